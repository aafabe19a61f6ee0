"""Multi-head latent attention in SGLang: DeepSeek V2 and V3, Kimi K2.

SGLang's layers compute attention in one of two forms, which ``forward_method`` chooses. Decoding, drafts and short
additions to a cached prefix attend to the latent rows in the cache (``latent``). Prompts attend to keys and values that
are projected for every head (``expanded``): those of the prompt and its prefix at once, or those of a long prefix chunk
by chunk, and SGLang merges the chunks' results by their lse.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import is_in_breakable_cuda_graph
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
    is_in_tc_piecewise_cuda_graph,
)
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

from warpspec.cache.quantize import quantize_float8
from warpspec.common.errors import UnsupportedProblem
from warpspec.engines import keys, queries
from warpspec.engines.step import schedule_of
from warpspec.fmha import attention_varlen
from warpspec.fmha.heads import LATENT
from warpspec.latent import mla_decode

FLOAT8_PAGE = 64


def check_model(config, cache_dtype: torch.dtype, page_size: int) -> None:
    """Raise UnsupportedProblem for a model with other latent rows, or a cache that cannot be read."""
    sizes = (config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank)
    if sizes != LATENT:
        raise UnsupportedProblem(
            f"kv_lora_rank and qk_rope_head_dim: must be {LATENT[1]} and {LATENT[0] - LATENT[1]}, got {sizes[1]} and "
            f"{sizes[0] - sizes[1]}; choose another --attention-backend for this model"
        )
    if cache_dtype == torch.float8_e4m3fn:
        if page_size != FLOAT8_PAGE:
            raise UnsupportedProblem(
                f"--page-size: must be {FLOAT8_PAGE} for latent rows in fp8_e4m3, got {page_size}"
            )
    elif cache_dtype not in keys.DTYPES:
        raise UnsupportedProblem(
            f"--kv-cache-dtype: must be bfloat16, float16 or fp8_e4m3 for latent rows, got {cache_dtype}; set it "
            "to auto"
        )


def forward_method(layer, step) -> AttnForwardMethod:
    """Choose how a layer computes a batch. SGLang calls this for each layer."""
    captured = is_in_tc_piecewise_cuda_graph() or is_in_breakable_cuda_graph()
    if captured or not step.forward_mode.is_extend_without_speculative():
        return AttnForwardMethod.MLA
    prefixes = sum(step.extend_prefix_lens_cpu or ())
    in_codes = layer.kv_cache_dtype == "fp8_e4m3"
    short = 0 < prefixes < layer.chunked_prefix_cache_threshold or layer.disable_chunked_prefix_cache
    if prefixes and short and not in_codes:
        return AttnForwardMethod.MLA
    keys_of_all = prefixes + sum(step.extend_seq_lens_cpu)
    if keys_of_all <= step.get_max_chunk_capacity():
        return AttnForwardMethod.MHA_ONE_SHOT
    return AttnForwardMethod.MHA_CHUNKED_KV


def attend(backend, q, k, v, layer, step, save: bool):
    """Attention of one layer, in the form that its head sizes imply: ``latent`` or ``expanded``."""
    if (layer.qk_head_dim, layer.v_head_dim) == LATENT:
        return latent(backend, q, k, v, layer, step, save)
    return expanded(backend.forward_metadata, q, k, v, layer, step)


def latent(backend, q, k, v, layer, step, save: bool) -> torch.Tensor:
    """Attention of absorbed queries [rows, H * 576] to the cache's latent rows.

    First writes the new rows, k [rows, 1, 576], to the cache. Returns [rows, H * 512].
    """
    pool, batch = backend.token_to_kv_pool, backend.forward_metadata
    if save and k is not None:
        pool.set_kv_buffer(layer, KVWriteLoc(step.out_cache_loc), k, v)
    rows = pool.get_key_buffer(layer.layer_id).view(-1, LATENT[0])
    pages = keys.pages_of(rows, backend.page_size)
    q = q.view(-1, layer.tp_q_head_num, LATENT[0])
    in_codes = pages.dtype == torch.float8_e4m3fn
    if batch.each is not None and batch.tree is None:
        scales = {}
        if in_codes:
            scales["kv_scale"] = backend.unit if layer.k_scale is None else layer.k_scale
        if in_codes and q.shape[1] * batch.each >= backend.rows_rounded:
            q, scales["q_scale"] = rounded(q, backend.unit), backend.unit
        call = (q.unflatten(0, (-1, batch.each)), pages, batch.page_table, batch.kv_lengths)
        o = mla_decode(*call, scale=layer.scaling, **scales, schedule=schedule_of(batch, *call))
        return o.flatten(0, 1).flatten(1)
    if in_codes:
        raise UnsupportedProblem(
            "--kv-cache-dtype: fp8_e4m3 in latent attention needs as many queries of each request, and no trees of "
            "drafts; set it to auto"
        )
    o = attention_varlen(
        q,
        pages[:, :, None],
        cu_seqlens_q=batch.cu_seqlens_q,
        max_seqlen_q=batch.most_queries,
        max_seqlen_k=batch.most_keys,
        page_table=batch.page_table,
        kv_lengths=batch.kv_lengths,
        q_start=batch.q_start,
        tree=batch.tree,
        causal=True,
        scale=layer.scaling,
        v_dim=LATENT[1],
    )
    return o.flatten(1)


def rounded(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Queries [rows, H, 576] divided by a scale and rounded to e4m3; beyond its largest number, they become that."""
    if not q.is_cuda:
        return quantize_float8(q, scale, "e4m3").view(queries.CODES)
    from sglang.kernels.ops.quantization.fp8_kernel import scaled_fp8_quant

    codes, _ = scaled_fp8_quant(q.reshape(-1, q.shape[-1]), scale)
    return codes.view(q.shape)


def expanded(batch, q, k, v, layer, step):
    """Attention of queries [rows, H * 192] to keys k [keys, H, 192] and values v [keys, H, 128] of every head.

    The keys are those of new tokens, those of new tokens and their prefix, or those of a chunk of the prefix. Returns
    [rows, H, 128], and also lse [rows, H] where SGLang merges results.
    """
    cu_seqlens_k, most_keys = batch.cu_seqlens_q, batch.most_queries
    chunk = bool(step.attn_attend_prefix_cache)
    if chunk:
        number = step.prefix_chunk_idx
        cu_seqlens_k, most_keys = (
            step.prefix_chunk_cu_seq_lens[number],
            step.prefix_chunk_max_seq_lens[number],
        )
    elif step.mha_one_shot:
        cu_seqlens_k = torch.zeros_like(batch.cu_seqlens_q)
        torch.cumsum(batch.kv_lengths, 0, out=cu_seqlens_k[1:])
        most_keys = batch.most_keys
    with_lse = bool(step.mha_return_lse)
    o = attention_varlen(
        q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
        k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
        v.view(-1, layer.tp_k_head_num, layer.v_head_dim),
        batch.cu_seqlens_q,
        max_seqlen_q=batch.most_queries,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_k=most_keys,
        causal=not chunk,
        scale=layer.scaling,
        return_lse=with_lse,
    )
    return (o[0], o[1].T.contiguous()) if with_lse else o
