"""Multi-head latent attention in vLLM: DeepSeek V2 and V3, Kimi K2.

vLLM's MLA layers compute attention in two forms. The few queries of a decoding step attend to the latent rows in the
cache (``WarpspecMLA``, by ``mla_decode``). Prompts attend to keys and values that are projected from those rows for
every head (``WarpspecPrefill``, by ``attention_varlen``); vLLM cuts a long context into chunks and merges the chunks'
results by their lse.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from warpspec.cache.quantize import quantize_float8
from warpspec.common.architecture import architecture_of
from warpspec.common.errors import UnsupportedProblem
from warpspec.engines import keys, queries
from warpspec.engines.step import schedule_of
from warpspec.engines.vllm import MLA_NAME, NAME, warmup
from warpspec.fmha import attention_varlen
from warpspec.fmha.heads import LATENT
from warpspec.latent import mla_decode

BLOCK = warmup.LATENT_BLOCK
FORMATS = {name: fmt for name, fmt in keys.QUANTIZED.items() if fmt == "e4m3"}
# Queries of a request from which on projecting its context for every head takes less time than latent attention.
PROMPT = 128


def refuse_options(**options) -> None:
    """Raise UnsupportedProblem for the first of a layer's options that is not None."""
    for name, value in options.items():
        if value is not None:
            raise UnsupportedProblem(f"{name}: {value} is not supported, choose another --attention-backend")


class WarpspecMLABackend(MLACommonBackend):
    """The class that vLLM asks, before it chooses a backend, what this backend supports."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(keys.DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *FORMATS]

    @staticmethod
    def get_name() -> str:
        return MLA_NAME

    @staticmethod
    def get_impl_cls() -> type[WarpspecMLA]:
        return WarpspecMLA

    @staticmethod
    def get_builder_cls() -> type[BatchBuilder]:
        return BatchBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int]:
        return [BLOCK]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return BLOCK

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [LATENT[0]]

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # all requests of a decoding batch must have as many queries

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        return architecture_of((capability.major, capability.minor)) is not None

    @classmethod
    def supports_combination(
        cls,
        head_size,
        dtype,
        kv_cache_dtype,
        block_size,
        use_mla,
        has_sink,
        use_sparse,
        use_mm_prefix,
        device_capability,
    ) -> str | None:
        """The settings that have to be changed and their allowed values, as a message; None if all are right."""
        if kv_cache_dtype in FORMATS and dtype != torch.bfloat16:
            return f"--dtype: must be bfloat16 with --kv-cache-dtype {kv_cache_dtype}, got {dtype}"
        return None


class BatchBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """vLLM's own builder of batches.

    Requests with equally many queries, drafts for example, are decoded together and can be a CUDA graph.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM
    reorder_batch_threshold: int = PROMPT


class LatentLayer:
    """What one latent layer of either kind refuses; the first base of an implementation of vLLM's.

    Raises UnsupportedProblem for options that are not supported.
    """

    cache_dtypes: ClassVar[list[str]]  # of --kv-cache-dtype
    can_return_lse_for_decode: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **of_mla,
    ) -> None:
        refuse_options(
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            attn_type=None if attn_type == AttentionType.DECODER else attn_type,
            kv_lora_rank=None if of_mla["kv_lora_rank"] == LATENT[1] else of_mla["kv_lora_rank"],
        )
        if kv_cache_dtype not in self.cache_dtypes:
            allowed = ", ".join(self.cache_dtypes)
            raise UnsupportedProblem(f"--kv-cache-dtype: must be one of {allowed}, got {kv_cache_dtype}")
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **of_mla,
        )
        self.supports_quant_query_input = False  # queries stay in 16 bits, unless a class says more


class WarpspecMLA(LatentLayer, MLACommonImpl[MLACommonMetadata]):
    """Latent attention of one layer. Raises UnsupportedProblem for options that are not supported."""

    cache_dtypes = WarpspecMLABackend.supported_kv_cache_dtypes

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        # If so, vLLM divides the queries of a layer over FP8 rows by ``layer._q_scale`` and rounds them to e4m3.
        device = torch.empty(0, device=current_platform.device_type).device
        rows = self.num_heads * (1 + drafts_of(get_current_vllm_config()))
        self.supports_quant_query_input = self.kv_cache_dtype in FORMATS and rows >= queries.least_rows(
            device
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        keys.check_dtype(act_dtype, "--dtype")
        warmup.of_latent_layer(self, act_dtype)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of absorbed queries [tokens, H, 576] (or its parts of 512 and 64) to the cache [blocks, 64, 576].

        Queries in e4m3 are codes times ``layer._q_scale``. Returns o [tokens, H, 512], and lse [tokens, H] if vLLM
        combines it with other ranks'.
        """
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        q = q.unflatten(0, (attn_metadata.num_decodes, -1))  # every request has the same number of queries
        batch = attn_metadata.decode
        call = (q, kv_c_and_k_pe_cache, batch.block_table, batch.seq_lens)
        results = mla_decode(
            *call,
            scale=self.scale,
            kv_scale=layer._k_scale if self.kv_cache_dtype in FORMATS else None,
            q_scale=layer._q_scale if q.dtype == queries.CODES else None,
            return_lse=self.need_to_return_lse_for_decode,
            schedule=schedule_of(batch, *call),
        )
        if not self.need_to_return_lse_for_decode:
            return results.flatten(0, 1), None
        o, lse = results
        return o.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    def do_kv_cache_update(
        self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype: str, k_scale, *skip_scale: bool
    ) -> None:
        """Write latent rows [rows, 512] and rotated ones [rows, 1, 64] to the slots; -1 means none.

        skip_scale, from vLLM 0.33 on: whether k_scale is 1.
        """
        if kv_cache.is_cuda or kv_cache.numel() == 0:
            super().do_kv_cache_update(
                kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, *skip_scale
            )
            return
        new = torch.cat([kv_c_normed, k_pe.squeeze(1)], dim=-1)
        slots = slot_mapping.flatten().long()
        rows = (slots >= 0).nonzero()[:, 0]
        new = new[rows]
        if kv_cache_dtype in FORMATS:
            new, kv_cache = (
                quantize_float8(new, k_scale, "e4m3").view(torch.uint8),
                kv_cache.view(torch.uint8),
            )
        kv_cache.flatten(0, 1)[slots[rows]] = new


def drafts_of(config) -> int:
    """The drafts that each request of a decoding step brings, besides its last token."""
    return config.speculative_config.num_speculative_tokens if config.speculative_config else 0


class WarpspecPrefill(MLAPrefillBackend):
    """Attention of prompts, whose keys and values have heads of their own: 192 and 128 numbers in DeepSeek V3."""

    @staticmethod
    def get_name() -> str:
        return NAME

    @classmethod
    def supports_compute_capability(cls, device_capability) -> bool:
        return WarpspecMLABackend.supports_compute_capability(device_capability)

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions) -> bool:
        sizes = mla_dimensions
        return {sizes.qk_nope_head_dim + sizes.qk_rope_head_dim, sizes.v_head_dim} <= set(keys.HEAD_DIMS)

    def supports_out(self) -> bool:
        return True

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse: bool, out=None, output_scale=None):
        """Causal attention of each prompt's new tokens, q, k [T, H, 192], v [T, H, 128]: o, or (o, lse [H, T])."""
        if output_scale is not None:
            raise UnsupportedProblem("output_scale: the output's quantisation is not supported")
        batch = self._prefill_metadata
        return self.attend(
            q,
            k,
            v,
            batch,
            batch.query_start_loc,
            batch.max_query_len,
            causal=True,
            lse=return_softmax_lse,
            out=out,
        )

    def run_prefill_context_chunk(self, chunk, q, k, v, out=None) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of new tokens to a chunk of their context, all of which they see: (o, lse [H, T])."""
        return self.attend(
            q, k, v, chunk, chunk.cu_seq_lens, chunk.max_seq_len, causal=False, lse=True, out=out
        )

    def attend(self, q, k, v, batch, cu_seqlens_k, most_keys: int, *, causal: bool, lse: bool, out):
        """``attention_varlen`` of a batch of requests."""
        return attention_varlen(
            q,
            k,
            v,
            batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_k=most_keys,
            causal=causal,
            scale=self.scale,
            return_lse=lse,
            out=out,
        )
