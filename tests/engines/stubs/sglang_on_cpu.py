"""A plug-in of SGLang for tests: what it does with Triton kernels, NVFP4 caches and indexers, on a CPU.

With this folder in the path and TRITON_INTERPRET=1, SGLang's own kernels build and verify trees of drafts and copy
keys; it has them interpreted where it would look for sgl-kernel, of which there is no wheel for CPUs without AMX. It
makes pools of NVFP4, which it does on GPUs alone. Its indexers have kernels for GPUs alone, so that ``select`` stands
for them; models with an indexer ask for the GPU's kind, too, which is answered as on Hopper. Latent rows are quantised
by torch, because Triton's interpreter rounds some numbers wrongly to e4m3 (error 0.055 instead of 0.026).
"""

STRIDE = 3  # of a long prefix, every third key is selected


def select(positions, count: int):
    """int32 [T, count]: the places of the keys that each query selects, -1 for none: all if there are at most count,
    else every third, backwards from the query."""
    import torch

    steps = torch.arange(count, device=positions.device)
    stride = torch.where(positions < count, 1, STRIDE)[:, None]
    places = positions[:, None] - stride * steps
    return torch.where(places >= 0, places, -1).int()


def _indexer(self, x, q_lora, positions, forward_batch, layer_id, return_indices=True):
    return select(positions, self.index_topk) if return_indices else None


def _store(self, layer, slots, rows, _values=None):
    """Store latent rows [T, 1, 576]: SGLang hands over whole rows except on CUDA GPUs."""
    self.set_mla_kv_buffer(layer, slots, rows[..., : self.kv_lora_rank], rows[..., self.kv_lora_rank :])


def quantise(latent):
    """The bytes [..., 528] of latent parts [..., 512]: e4m3, then an fp32 scale for each 128 numbers."""
    import torch

    parts = latent.float().unflatten(-1, (-1, 128))
    scales = parts.abs().amax(-1) / 448
    codes = (parts / scales.clamp(min=1e-30)[..., None]).to(torch.float8_e4m3fn).flatten(-2)
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], dim=-1)


def dequantise(data):
    """fp32 [..., 512]: what ``quantise`` stored."""
    import torch

    codes = data[..., :512].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 128))
    return (codes * data[..., 512:].contiguous().view(torch.float32)[..., None]).flatten(-2)


def _quantise_rows(latent, rotated):
    import torch

    return quantise(latent), rotated.contiguous().view(torch.uint8)


def _lengths_of_queries(queries, lengths, _total, _most):
    """int32: how many keys each of the last ``queries`` [B] sees of its row's ``lengths`` [B], under a causal mask."""
    import torch

    counts = zip(queries.tolist(), lengths.tolist(), strict=True)
    return torch.cat([torch.arange(n - m + 1, n + 1) for m, n in counts]).clamp(min=0).int()


def register() -> None:
    import torch
    from sglang.kernels.ops.speculative import cache_locs, spec_tree
    from sglang.srt import utils
    from sglang.srt.layers.attention import dsa_backend
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.mem_cache import kv_cache_configurator, memory_pool
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    for module in (cache_locs, spec_tree):
        module._is_xpu = True  # a device for which it chooses its Triton kernels
    kv_cache_configurator.is_float4_e2m1fn_x2 = lambda dtype: dtype == torch.float4_e2m1fn_x2
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    utils.get_device_sm = lambda: 90
    torch.cuda.synchronize = lambda *_: None  # DeepSeek's layer for drafts calls it on any device
    Indexer.forward_native = _indexer
    dsa_backend.seqlens_expand_triton = _lengths_of_queries
    DSATokenToKVPool.set_kv_buffer = _store
    memory_pool.quantize_k_cache_separate = _quantise_rows
