"""The backend: what it supports, what describes a batch, and the attention of a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import fill_mm_prefix_query_ranges

from warpspec.cache import insert
from warpspec.common.architecture import architecture_of
from warpspec.common.errors import UnsupportedProblem
from warpspec.engines import keys
from warpspec.engines.vllm import NAME, TWO_SIZES_NAME, warmup
from warpspec.engines.vllm.pages import format_of, pages_of, slot_bytes
from warpspec.fmha import attention_varlen

PREFERRED_BLOCK = 64  # keys of a block, unless --block-size is given


class WarpspecBackend(AttentionBackend):
    """The class that vLLM asks, before it chooses a backend, what this backend supports."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(keys.DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *keys.QUANTIZED]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[WarpspecAttention]:
        return WarpspecAttention

    @staticmethod
    def get_builder_cls() -> type[BatchBuilder]:
        return BatchBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int]:
        return [16, 32, 64, 128]

    @classmethod
    def customize_spec(cls, spec):
        """Give an NVFP4 cache as many bytes as its codes and block scales take, with keys and values apart."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_nvfp4:
            return spec
        if spec.head_size_v != spec.head_size:
            raise UnsupportedProblem(
                f"--kv-cache-dtype: nvfp4 needs one head size of keys and values, got {spec.head_size} and "
                f"{spec.head_size_v}; set it to auto"
            )
        size = slot_bytes(spec.head_size) * spec.dtype.itemsize
        return replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=size)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return max(default_block_size, PREFERRED_BLOCK)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(keys.HEAD_DIMS)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False

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
        reasons = []
        checks = (
            (keys.check_head_size, head_size, "choose another --attention-backend for this model"),
            (keys.check_dtype, dtype, "--dtype"),
            (keys.check_page_size, PREFERRED_BLOCK if block_size is None else block_size, "--block-size"),
        )
        if kv_cache_dtype in keys.QUANTIZED:
            checks += ((keys.check_quantized_head, head_size, "--kv-cache-dtype"),)
        for check, value, setting in checks:
            try:
                check(value, setting)
            except UnsupportedProblem as problem:
                reasons.append(str(problem))
        if kv_cache_dtype not in (None, *cls.supported_kv_cache_dtypes):
            allowed = ", ".join(cls.supported_kv_cache_dtypes)
            reasons.append(f"--kv-cache-dtype: must be one of {allowed}, got {kv_cache_dtype}")
        return "; ".join(reasons) or None

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        return architecture_of((capability.major, capability.minor)) is not None


class TwoSizesBackend(WarpspecBackend):
    """The backend of models whose values have another head size than their keys.

    A model sets the values' head size before it makes a layer.
    """

    head_size_v: ClassVar[int | None] = None

    @staticmethod
    def get_name() -> str:
        return TWO_SIZES_NAME

    @staticmethod
    def get_impl_cls() -> type[TwoSizesAttention]:
        return TwoSizesAttention

    @classmethod
    def set_head_size_v(cls, head_size_v: int) -> None:
        keys.check_head_size(head_size_v, "choose another --attention-backend for this model")
        cls.head_size_v = head_size_v


@dataclass
class Batch(AttentionMetadata):
    """The requests of one step; the same for all layers of a group. Lengths stay on the device."""

    tokens: int  # number of queries; rows past it are padding
    most_queries: int
    most_keys: int  # an upper bound
    cu_seqlens_q: torch.Tensor  # [B + 1] int32
    kv_lengths: torch.Tensor  # [B] int32, new tokens included
    page_table: torch.Tensor  # [B, blocks] int32
    # [tokens, 2] int32, where tokens of an image see each other. vLLM clears a field of this name for layers that see
    # images causally (Gemma 4's global ones).
    mm_prefix_query_range_tensor: torch.Tensor | None = None


class BatchBuilder(AttentionMetadataBuilder[Batch]):
    """Describes a batch. The only thing that it computes is where the batch's images are.

    Any batch can therefore be a CUDA graph, and speculative decoding's draft model needs no batches of its own kind.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        keys.check_page_size(kv_cache_spec.block_size, "--block-size (block_size)")
        self.ranges = None  # a graph that was captured with it reads what later batches write to it
        if vllm_config.model_config.is_mm_prefix_lm:
            most = vllm_config.scheduler_config.max_num_batched_tokens
            self.ranges = torch.full((most, 2), -1, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Batch:
        batch = common_attn_metadata
        if batch.causal is not True:
            raise UnsupportedProblem(f"causal: must be True for every request, got {batch.causal}")
        return Batch(
            tokens=batch.num_actual_tokens,
            most_queries=batch.max_query_len,
            most_keys=batch.max_seq_len,
            cu_seqlens_q=batch.query_start_loc,
            kv_lengths=batch.seq_lens,
            page_table=batch.block_table_tensor,
            mm_prefix_query_range_tensor=None if self.ranges is None else self._ranges_of(batch),
        )

    def _ranges_of(self, batch: CommonAttentionMetadata) -> torch.Tensor:
        """[tokens, 2] int32: the range of each token of an image, from its own position to the image's last.

        A token sees the keys before its own position as far as its layer's window reaches: vLLM cuts images there
        (Gemma 4), or takes no image that is longer than the window.
        """
        ranges = torch.full((batch.num_actual_tokens, 2), -1, dtype=torch.int32)
        lengths = batch.seq_lens_cpu_upper_bound  # exact wherever there are images
        starts = batch.query_start_loc_cpu
        if fill_mm_prefix_query_ranges(ranges.numpy(), batch.mm_req_doc_ranges, starts, lengths) > 0:
            queries = starts.diff()
            first = (lengths[: len(queries)] - queries - starts[:-1]).repeat_interleave(queries)
            rows = ranges[: len(first)]
            rows[:, 0] = torch.where(rows[:, 1] >= 0, torch.arange(len(first)) + first, -1)
        return self.ranges[: len(ranges)].copy_(ranges)

    def update_block_table(self, metadata: Batch, blk_table, slot_mapping) -> Batch:
        return Batch(**{**vars(metadata), "page_table": blk_table})


class WarpspecAttention(AttentionImpl[Batch]):
    """Attention of one layer. Raises UnsupportedProblem for options that are not supported."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        keys.check_head_size(head_size, "choose another --attention-backend for this model")
        if kv_cache_dtype not in WarpspecBackend.supported_kv_cache_dtypes:
            raise UnsupportedProblem(
                f"--kv-cache-dtype: must be one of {', '.join(WarpspecBackend.supported_kv_cache_dtypes)}, got "
                f"{kv_cache_dtype}"
            )
        if kv_cache_dtype in keys.QUANTIZED:
            keys.check_quantized_head(head_size, "--kv-cache-dtype")
        if alibi_slopes is not None:
            raise UnsupportedProblem("alibi_slopes: not supported, choose another --attention-backend")
        if attn_type != AttentionType.DECODER:
            raise UnsupportedProblem(f"attn_type: must be {AttentionType.DECODER!r}, got {attn_type!r}")
        self.num_heads, self.head_size, self.head_size_v = num_heads, head_size, head_size
        self.num_kv_heads = num_kv_heads or num_heads
        self.logits = {"scale": float(scale), "softcap": logits_soft_cap or None}  # ``attention``'s arguments
        self.kv_cache_dtype = kv_cache_dtype
        self.format = format_of(kv_cache_dtype)
        self.supports_quant_query_input = False  # queries stay in 16 bits
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks  # [Hq], of this rank
        self.window = keys.window_of(sliding_window, counts_own=True)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        keys.check_dtype(act_dtype, "--dtype")
        warmup.of_layer(self, act_dtype)

    def forward(
        self,
        layer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Batch | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query [rows, Hq, D] to keys and values that are in kv_cache already (``pages.pages_of``).

        Writes output [rows, Hq, Dv] up to the batch's tokens and returns it.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedProblem("output_scale: the output's quantisation is not supported")
        if attn_metadata is None:  # vLLM is measuring memory
            return output.fill_(0)
        batch = attn_metadata
        pages = pages_of(kv_cache, self.head_size, self.format)
        attention_varlen(
            query[: batch.tokens],
            pages.k,
            pages.v,
            batch.cu_seqlens_q,
            max_seqlen_q=batch.most_queries,
            max_seqlen_k=batch.most_keys,
            page_table=batch.page_table,
            kv_lengths=batch.kv_lengths,
            causal=True,
            window=self.window,
            sink=self.sinks,
            **self.logits,
            **self.scales_of(layer),
            **pages.block_scales,
            ranges=batch.mm_prefix_query_range_tensor,
            out=output.view(-1, self.num_heads, self.head_size_v)[: batch.tokens],
        )
        return output

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Write key and value [rows, Hkv, D] to the slots; -1 means none. FP8, NVFP4: divided by the layer's scales."""
        if self.format is not None:
            self.insert(layer, key, value, kv_cache, slot_mapping)
            return
        pages = pages_of(kv_cache, self.head_size, None)
        if kv_cache.is_cuda:
            from vllm._custom_ops import reshape_and_cache_flash

            reshape_and_cache_flash(
                key,
                value,
                pages.k,
                pages.v,
                slot_mapping,
                self.kv_cache_dtype,
                layer._k_scale,
                layer._v_scale,
            )
        else:
            block = pages.k.shape[1]
            rows = (slot_mapping >= 0).nonzero()[:, 0]
            slots = slot_mapping[rows]
            pages.k[slots // block, slots % block] = key[rows]
            pages.v[slots // block, slots % block] = value[rows]

    def fused_rope_kvcache_supported(self) -> bool:
        """vLLM may leave RoPE and the cache's update to ``do_rope_and_kv_cache_update``. (vLLM 0.32 asks on ROCm
        only.)"""
        return True

    fused_qk_norm_rope_kvcache_supported = fused_rope_kvcache_supported

    def do_rope_and_kv_cache_update(
        self, layer, query, key, value, positions, cos_sin_cache, is_neox, kv_cache, layer_slot_mapping
    ) -> None:
        """Rotate query in place; rotate key, and write it and value to the slots. One launch.

        query [rows, Hq, D] (or Hq D), key and value likewise; cos_sin_cache [positions, R]. key itself keeps its
        numbers: attention reads the cache.
        """
        q = query.view(len(query), -1, self.head_size)
        rope = dict(positions=positions, cos_sin=cos_sin_cache, interleaved=not is_neox)
        self.insert(layer, key, value, kv_cache, layer_slot_mapping, q=q, out=q, **rope)

    def do_qk_norm_rope_kvcache_update(
        self,
        layer,
        qkv,
        q_out,
        k_out,
        positions,
        q_weight,
        k_weight,
        rms_norm_eps,
        cos_sin_cache,
        is_neox,
        kv_cache,
        layer_slot_mapping,
    ) -> None:
        """``do_rope_and_kv_cache_update`` after an RMS norm of each head of query and key. qkv [rows, (Hq + 2 Hkv) D];
        q_out receives the queries; k_out is not written."""
        heads = qkv.view(len(qkv), -1, self.head_size)
        q, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        self.insert(
            layer,
            key,
            value,
            kv_cache,
            layer_slot_mapping,
            q=q,
            out=q_out.view(q.shape),
            q_weight=q_weight,
            k_weight=k_weight,
            eps=rms_norm_eps,
            positions=positions,
            cos_sin=cos_sin_cache,
            interleaved=not is_neox,
        )

    def insert(self, layer, key, value, kv_cache, slots, **projection) -> None:
        """``warpspec.cache.insert`` of key and value into the layer's cache."""
        pages = pages_of(kv_cache, self.head_size, self.format)
        insert(
            key.view(len(key), -1, self.head_size),
            value.view(len(value), -1, self.head_size),
            pages.k,
            pages.v,
            slots,
            format=self.format,
            **self.scales_of(layer),
            **pages.block_scales,
            **projection,
        )

    def scales_of(self, layer) -> dict:
        """k_scale and v_scale of a quantised cache, on its device: one number, or one of each KV head."""
        if self.format is None:
            return {}
        return {"k_scale": layer._k_scale, "v_scale": layer._v_scale}


class TwoSizesAttention(WarpspecAttention):
    """Attention of one layer whose values have a head size of their own."""

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self.head_size_v = TwoSizesBackend.head_size_v or self.head_size
        if self.format is not None and self.head_size_v != self.head_size:
            raise UnsupportedProblem(
                f"--kv-cache-dtype: {self.kv_cache_dtype} needs one head size of keys and values, got "
                f"{self.head_size} and {self.head_size_v}; set it to auto"
            )

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Write key and value to the slots, as for one head size, by the kernel that vLLM has for two."""
        if self.head_size_v == self.head_size or not kv_cache.is_cuda:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
            triton_reshape_and_cache_flash_diffkv,
        )

        pages, scales = kv_cache.transpose(1, 2), (layer._k_scale, layer._v_scale)
        triton_reshape_and_cache_flash_diffkv(key, value, pages, slot_mapping, self.kv_cache_dtype, *scales)

    def fused_rope_kvcache_supported(self) -> bool:
        """Whether one launch may rotate and store: only if keys and values have one head size."""
        return self.head_size_v == self.head_size

    fused_qk_norm_rope_kvcache_supported = fused_rope_kvcache_supported
