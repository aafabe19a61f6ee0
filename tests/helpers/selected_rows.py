"""Models with an indexer (DeepSeek V3.2, GLM-5): a selection by position in place of the engines' and transformers'."""

import torch

from helpers.sglang_batches import STUBS


def stored(t: torch.Tensor) -> torch.Tensor:
    """What a cache of 656 bytes a row makes of its latent parts [..., 512]; rotated parts stay."""
    if t.shape[-1] != 512:
        return t
    from sglang_on_cpu import dequantise, quantise

    return dequantise(quantise(t.bfloat16())).to(t.dtype)


def select_by_position(monkeypatch) -> None:
    """Let transformers' models select as ``sglang_on_cpu.select`` does, which can be imported from now on."""
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

    monkeypatch.syspath_prepend(str(STUBS))
    from sglang_on_cpu import select

    def selected(self, hidden_states, q_resid, position_embeddings, attention_mask, position_ids, *_, **__):
        found = select(position_ids.flatten(), self.index_topk).view(*position_ids.shape, -1)
        return torch.where(found < 0, position_ids[..., None], found)

    for indexer in (DeepseekV32Indexer, GlmMoeDsaIndexer):
        monkeypatch.setattr(indexer, "forward", selected)
