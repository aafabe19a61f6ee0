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

LATENT_BLOCK = 64  # rows of a block of latent rows


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


def of_latent_layer(layer, dtype: torch.dtype) -> None:
    """``of_layer`` for latent attention."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is not None:
        sizes = (layer.qk_head_dim, layer.v_head_dim)
        queries_in_codes = layer.supports_quant_query_input
        kind = (layer.num_heads, sizes, layer.scale, dtype, format_of(layer.kv_cache_dtype), queries_in_codes)
        add(run_latent, kind, config)


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
    from vllm.platforms import current_platform

    keys.check_page_size(block, "--block-size")
    device = torch.device(current_platform.device_type)
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
    """``run`` for latent attention: decoding on rows; prompts with keys and values of every head, alone, and in two
    parts that vLLM merges by lse, the new tokens and their context."""
    heads, (qk, v_dim), scale, dtype, fmt, queries_in_codes = kind
    from vllm.platforms import current_platform

    device = torch.device(current_platform.device_type)
    integers = {"dtype": torch.int32, "device": device}
    numbers = {"dtype": dtype, "device": device}
    if most_queries == 1:
        q = torch.zeros(requests, 1, heads, LATENT[0], **numbers)
        rows = torch.zeros(1, LATENT_BLOCK, LATENT[0], **numbers)
        call = (
            q.to(queries.CODES) if queries_in_codes else q,
            rows if fmt is None else rows.to(EIGHT_BITS[fmt]),
            torch.zeros(requests, -(-most_keys // LATENT_BLOCK), **integers),
            torch.zeros(requests, **integers),
        )
        q_scale = torch.ones((), dtype=torch.float32, device=device) if queries_in_codes else None
        mla_decode(*call, scale=scale, q_scale=q_scale, schedule=schedule_of(SimpleNamespace(), *call))
        return
    starts = torch.zeros(requests + 1, **integers)
    for causal, lse in ((True, False), (True, True), (False, True)):
        attention_varlen(
            torch.zeros(tokens, heads, qk, **numbers),
            torch.zeros(tokens, heads, qk, **numbers),
            torch.zeros(tokens, heads, v_dim, **numbers),
            starts,
            max_seqlen_q=most_queries,
            cu_seqlens_k=starts,
            max_seqlen_k=most_queries if causal else most_keys,
            causal=causal,
            scale=scale,
            return_lse=lse,
        )
