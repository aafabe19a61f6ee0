"""Latent attention to the rows that an indexer selects, in vLLM: DeepSeek V3.2, GLM-5.

vLLM's indexer writes which tokens of its request each query selects; this computes attention over their rows, of 656
bytes ("fp8_ds_mla"), by ``gathered_attention``. Short prompts are computed densely, as ``mla.WarpspecPrefill`` does.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport

from warpspec.engines import keys
from warpspec.engines.vllm import SPARSE_MLA_NAME, warmup
from warpspec.engines.vllm.mla import BLOCK, LatentLayer, WarpspecMLABackend
from warpspec.latent.cache import LatentPool
from warpspec.latent.gathered import KeySet, gathered_attention

CACHE = "fp8_ds_mla"


class WarpspecSparseBackend(AttentionBackend):
    """The class that vLLM asks, before it chooses a backend, what this backend supports."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [CACHE]
    supports_compute_capability = WarpspecMLABackend.supports_compute_capability
    get_preferred_block_size = WarpspecMLABackend.get_preferred_block_size
    get_supported_head_sizes = WarpspecMLABackend.get_supported_head_sizes
    get_supported_kernel_block_sizes = staticmethod(WarpspecMLABackend.get_supported_kernel_block_sizes)

    @staticmethod
    def get_name() -> str:
        return SPARSE_MLA_NAME

    @staticmethod
    def get_impl_cls() -> type[WarpspecSparseMLA]:
        return WarpspecSparseMLA

    @staticmethod
    def get_builder_cls() -> type[SparseBatchBuilder]:
        return SparseBatchBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class SparseBatchBuilder(SparseMLACommonMetadataBuilder[SparseMLACommonMetadata]):
    """vLLM's own builder of batches."""

    metadata_cls = SparseMLACommonMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)


class WarpspecSparseMLA(LatentLayer, SparseMLACommonImpl[SparseMLACommonMetadata]):
    """Latent attention of one layer. Raises UnsupportedProblem for options that are not supported."""

    cache_dtypes: ClassVar[list[str]] = WarpspecSparseBackend.supported_kv_cache_dtypes

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        keys.check_dtype(act_dtype, "--dtype")
        warmup.of_latent_layer(self, act_dtype, selected=self.topk_indices_buffer.shape[1])

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMLACommonMetadata,
        layer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of absorbed queries [tokens, H, 576] (or its parts of 512 and 64) to the selected rows of the
        cache, uint8 [blocks, 64, 656]. Returns o [tokens, H, 512], and lse [tokens, H] if vLLM combines it."""
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        selected = self.topk_indices_buffer[: len(q)]
        slots = slots_of(selected, attn_metadata.req_id_per_token[: len(q)], attn_metadata.block_table)
        results = gathered_attention(
            q,
            [KeySet(pool_of(kv_c_and_k_pe_cache), slots)],
            scale=self.scale,
            return_lse=self.need_to_return_lse_for_decode,
        )
        if not self.need_to_return_lse_for_decode:
            return results, None
        return results[0], results[1].T


def pool_of(kv_cache: torch.Tensor) -> LatentPool:
    """A layer's cache [blocks, 64, 656] as a pool."""
    return LatentPool(kv_cache.view(torch.uint8).flatten(1), BLOCK, warmup.SELECTED_ROWS)


def slots_of(selected: torch.Tensor, request: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """int32 [tokens, K]: the slots of selected tokens, -1 for none.

    selected: int32 [tokens, K], places of tokens in their request, -1 for none. request: [tokens], each query's.
    """
    if selected.is_cuda:
        from vllm.v1.attention.backends.mla.sparse_utils import triton_convert_req_index_to_global_index

        return triton_convert_req_index_to_global_index(
            request, block_table, selected, BLOCK_SIZE=BLOCK, NUM_TOPK_TOKENS=selected.shape[1]
        )
    blocks = (selected // BLOCK).clamp(min=0).long()
    pages = block_table[request.long()[:, None], blocks]
    return torch.where(selected >= 0, pages * BLOCK + selected % BLOCK, -1).int()
