"""Compiles kernels before vLLM serves: a provider for its warm-up of CuTe DSL kernels.

Compiled kernels are kept on disk (`warpspec.common.kernel_cache`), from which later processes, such as other ranks,
load them.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from warpspec.common.kv_formats import EIGHT_BITS
from warpspec.engines import keys, queries
from warpspec.engines.step import schedule_of
from warpspec.engines.vllm.pages import format_of, pages_of, slot_bytes
from warpspec.fmha import attention_varlen
from warpspec.fmha.heads import LATENT
from warpspec.fmha.logits import LogitOptions
from warpspec.latent import mla_decode
from warpspec.latent.cache import LatentPool
from warpspec.latent.gathered import KeySet, gathered_attention

LATENT_BLOCK = 64  # rows of a block of latent rows
SELECTED_ROWS = "v3.2-fp8"  # our name of the format of rows that an indexer selects


class Provider:
    """The object that vLLM asks for kernels to compile: one unit for each kind of layer and batch."""

    def __init__(self) -> None:
        # (function that runs a batch, kind of layer that it takes): the sizes of vLLM's batches
        self.layers: dict = {}

    def get_cutedsl_warmup_compile_units(self) -> list:
        from vllm.model_executor.warmup.cutedsl_warmup import CuTeDSLCompileUnit

        return [
            CuTeDSLCompileUnit(
                f"warpspec {run.__name__} {kind}",
                (run.__name__, kind, batch),
                lambda run=run, kind=kind, batch=batch: run(kind, *batch),
            )
            for (run, kind), sizes in self.layers.items()
            for batch in batches(*sizes)
        ]


provider = Provider()


def of_layer(layer, dtype: torch.dtype) -> None:
    """Have the kernels of this layer compiled before vLLM serves."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None:
        return
    kind = (
        layer.num_heads,
        layer.num_kv_heads,
        (layer.head_size, layer.head_size_v),
        layer.window,
        LogitOptions(**layer.logits),
        layer.sinks is not None,
        sees_images(config.model_config, layer.window),
        dtype,
        layer.format,
    )
    add(run, kind, config)


def sees_images(model_config, window: tuple[int, int] | None) -> bool:
    """Whether tokens of an image see each other in a layer with this window: with Gemma 4's "vision", only in layers
    with one."""
    only_windows = getattr(model_config.hf_text_config, "use_bidirectional_attention", None) == "vision"
    return model_config.is_mm_prefix_lm and not (only_windows and window is None)


def of_latent_layer(layer, dtype: torch.dtype, selected: int = 0) -> None:
    """``of_layer`` for latent attention. selected: the most rows that an indexer selects, 0 without an indexer."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None:
        return
    kind = (layer.num_heads, (layer.qk_head_dim, layer.v_head_dim), layer.scale, dtype)
    if selected:
        add(run_selected, (*kind, selected), config)
    else:
        fmt, in_codes = format_of(layer.kv_cache_dtype), layer.supports_quant_query_input
        add(run_latent, (*kind, fmt, in_codes), config)


def add(run, kind, config) -> None:
    """Have vLLM compile what ``run`` calls with this kind of layer, for its batches."""
    from vllm.model_executor.warmup.cutedsl_warmup import register_cutedsl_warmup_provider

    scheduler = config.scheduler_config
    provider.layers[run, kind] = (
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        config.model_config.max_model_len,
        config.cache_config.block_size,
    )
    register_cutedsl_warmup_provider(provider)


def batches(most_requests: int, most_tokens: int, most_keys: int, block: int) -> list[tuple[int, ...]]:
    """(requests, tokens, most queries, most keys, block) of typical batches: one request and a full batch that decode,
    one prompt, prompts mixed with decoding. Other batches may need another kernel, which is compiled when the first of
    them comes."""
    requests = sorted({1, most_requests})
    decode = [(count, count, 1, most_keys, block) for count in requests]
    return decode + [(count, most_tokens, most_tokens, most_keys, block) for count in requests]


def run(kind, requests: int, tokens: int, most_queries: int, most_keys: int, block: int) -> None:
    """Compute attention of requests without keys, which compiles the kernel and launches it on an empty problem."""
    heads, heads_kv, (head_dim, v_dim), window, logits, has_sinks, has_images, dtype, fmt = kind
    keys.check_page_size(block, "--block-size")
    device = device_of_layers()
    shape = (
        (1, 2 * heads_kv, block, slot_bytes(head_dim))
        if fmt == "nvfp4"
        else (1, heads_kv, block, head_dim + v_dim)
    )
    cache = torch.zeros(shape, dtype=dtype if fmt is None else torch.uint8, device=device)
    scale_of_cache = None if fmt is None else torch.ones(1, dtype=torch.float32, device=device)
    pages = pages_of(cache, head_dim, fmt)
    integers = {"dtype": torch.int32, "device": device}
    attention_varlen(
        torch.zeros(tokens, heads, head_dim, dtype=dtype, device=device),
        pages.k,
        pages.v,
        torch.zeros(requests + 1, **integers),
        max_seqlen_q=most_queries,
        max_seqlen_k=most_keys,
        page_table=torch.zeros(requests, -(-most_keys // block), **integers),
        kv_lengths=torch.zeros(requests, **integers),
        causal=True,
        window=window,
        sink=torch.zeros(heads, dtype=dtype, device=device) if has_sinks else None,
        **logits._asdict(),
        ranges=torch.full((tokens, 2), -1, **integers) if has_images else None,
        k_scale=scale_of_cache,
        v_scale=scale_of_cache,
        **pages.block_scales,
        out=torch.empty(tokens, heads, v_dim, dtype=dtype, device=device),
    )


def run_latent(kind, requests: int, tokens: int, most_queries: int, most_keys: int, block: int) -> None:
    """``run`` for latent attention: decoding on rows, or prompts."""
    heads, sizes, scale, dtype, fmt, queries_in_codes = kind
    if most_queries > 1:
        run_prompts(heads, sizes, scale, dtype, requests, tokens, most_keys)
        return
    device = device_of_layers()
    integers = {"dtype": torch.int32, "device": device}
    q = torch.zeros(requests, 1, heads, LATENT[0], dtype=dtype, device=device)
    rows = torch.zeros(1, LATENT_BLOCK, LATENT[0], dtype=dtype, device=device)
    call = (
        q.to(queries.CODES) if queries_in_codes else q,
        rows if fmt is None else rows.to(EIGHT_BITS[fmt]),
        torch.zeros(requests, -(-most_keys // LATENT_BLOCK), **integers),
        torch.zeros(requests, **integers),
    )
    q_scale = torch.ones((), dtype=torch.float32, device=device) if queries_in_codes else None
    mla_decode(*call, scale=scale, q_scale=q_scale, schedule=schedule_of(SimpleNamespace(), *call))


def run_selected(kind, requests: int, tokens: int, most_queries: int, most_keys: int, block: int) -> None:
    """``run`` for latent attention to selected rows: any batch, and prompts that are computed with all keys."""
    heads, sizes, scale, dtype, selected = kind
    device = device_of_layers()
    slots = torch.full((tokens, selected), -1, dtype=torch.int32, device=device)
    pool = LatentPool.empty(1, LATENT_BLOCK, SELECTED_ROWS, device=device)
    q = torch.zeros(tokens, heads, LATENT[0], dtype=dtype, device=device)
    gathered_attention(q, [KeySet(pool, slots)], scale=scale)
    if most_queries > 1:
        run_prompts(heads, sizes, scale, dtype, requests, tokens, most_keys)


def run_prompts(heads: int, sizes, scale: float, dtype, requests: int, tokens: int, most_keys: int) -> None:
    """Prompts of latent attention, whose keys and values have heads of their own: alone, and in two parts that vLLM
    merges by lse, the new tokens and their context. sizes: head sizes of keys and of values."""
    device = device_of_layers()
    q, k, v = (torch.zeros(tokens, heads, size, dtype=dtype, device=device) for size in (sizes[0], *sizes))
    starts = torch.zeros(requests + 1, dtype=torch.int32, device=device)
    for causal, lse in ((True, False), (True, True), (False, True)):
        attention_varlen(
            q,
            k,
            v,
            starts,
            max_seqlen_q=tokens,
            cu_seqlens_k=starts,
            max_seqlen_k=tokens if causal else most_keys,
            causal=causal,
            scale=scale,
            return_lse=lse,
        )


def device_of_layers() -> torch.device:
    """The kind of device that vLLM computes on."""
    from vllm.platforms import current_platform

    return torch.device(current_platform.device_type)
