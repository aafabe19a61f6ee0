"""Latent attention to the rows that an indexer selects, in SGLang: DeepSeek V3.2, GLM-5.

SGLang's backend for these models ("dsa") describes batches, runs the indexer and translates what it selects into slots
of the cache. Its attention over the rows in those slots, of 656 bytes, is replaced by ``gathered_attention``; that of
prompts so short that an indexer selects all of it, by ``attention_varlen``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.layers.attention import dsa_backend
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
from sglang.srt.models.deepseek_common import attention_backend_handler, utils

from warpspec.common.errors import UnsupportedProblem
from warpspec.engines.sglang import NAME, _replaced
from warpspec.fmha import attention_varlen
from warpspec.fmha.heads import LATENT
from warpspec.latent.cache import LatentPool
from warpspec.latent.gathered import KeySet, gathered_attention

ROWS = "v3.2-fp8"  # our name of the rows' format
PAGE = 64
FORM = "flashmla_kv"  # SGLang's name of the computation that reads such rows by their slots


def offer() -> None:
    """Let SGLang's layers with an indexer call a backend of our name as they call "dsa"."""
    attention_backend_handler.AttentionBackendRegistry.register(
        NAME, attention_backend_handler.handle_attention_dsa
    )
    names = utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS  # (the list that the layers look into)
    if NAME not in names:
        names.append(NAME)


def draft_backend(factory, whole: bool):
    """SGLang's backends of a draft model with an indexer, with our attention: those of all drafting steps (``whole``),
    or the one that extends the draft model's cache."""
    with _replaced(dsa_backend, "DeepseekSparseAttnBackend", WarpspecSparseBackend):
        _, backend = factory._create_dsa_decode_backend() if whole else factory._create_dsa_prefill_backend()
    return backend


def check_cache(runner) -> None:
    """Raise UnsupportedProblem for a model with other rows, or a cache of another format."""
    config, pool = runner.model_config, runner.token_to_kv_pool
    if (config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank) != LATENT:
        raise UnsupportedProblem(
            f"kv_lora_rank and qk_rope_head_dim: must be {LATENT[1]} and {LATENT[0] - LATENT[1]} with an indexer, got "
            f"{config.kv_lora_rank} and {config.qk_rope_head_dim}; choose --attention-backend dsa for this model"
        )
    if not pool.dsa_kv_cache_store_fp8:
        raise UnsupportedProblem(
            f"--kv-cache-dtype: must be fp8_e4m3 for a model with an indexer, got {runner.kv_cache_dtype}; set it, or "
            "choose --attention-backend dsa"
        )


@dataclass(frozen=True)
class NoSchedule:
    """Stands for FlashMLA's schedule of a batch, which our kernels do not need."""

    def slice(self, part) -> NoSchedule:
        return self

    def copy_(self, other) -> None:
        pass


class WarpspecSparseBackend(DeepseekSparseAttnBackend):
    """SGLang's backend of models with an indexer, with our attention."""

    def __init__(self, runner, **options) -> None:
        """options: those of SGLang's backend. Raises UnsupportedProblem for a model or cache that is not supported."""
        check_cache(runner)
        super().__init__(runner, **options)
        if self.dcp_size > 1:
            raise UnsupportedProblem(
                f"--decode-context-parallel-size: must be 1 with an indexer, got {self.dcp_size}"
            )
        self.dsa_prefill_impl = self.dsa_decode_impl = FORM
        self.enable_auto_select_prefill_impl = False

    def _compute_flashmla_metadata(self, cache_seqlens: torch.Tensor, seq_len_q: int) -> NoSchedule:
        return NoSchedule()

    def _forward_flashmla_kv(
        self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1
    ) -> torch.Tensor:
        """Attention of absorbed queries [rows, H, 576] to the rows in slots ``page_table_1`` [rows, K], -1 for none:
        [rows, H, 512]."""
        pages = kv_cache.view(torch.uint8).view(-1, PAGE * kv_cache.shape[-1])
        key_set = KeySet(LatentPool(pages, PAGE, ROWS), page_table_1.int())
        return gathered_attention(q_all.view(-1, layer.tp_q_head_num, LATENT[0]), [key_set], scale=sm_scale)

    def _forward_standard_mha(self, q, k, v, layer, forward_batch, metadata) -> torch.Tensor:
        """Attention of queries [rows, H * 192] to keys and values of every head, those of a prefix included:
        [rows, H, 128]."""
        return attention_varlen(
            q.view(-1, layer.tp_q_head_num, layer.head_dim),
            k.view(-1, layer.tp_k_head_num, layer.head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            metadata.cu_seqlens_q,
            max_seqlen_q=metadata.max_seq_len_q,
            cu_seqlens_k=metadata.cu_seqlens_k,
            max_seqlen_k=metadata.max_seq_len_k,
            causal=True,
            scale=layer.scaling,
        )
