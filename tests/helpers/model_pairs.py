"""A transformers model twice, with eager attention and with ours: for the oracles that compare logits."""

from copy import deepcopy

import torch
from transformers import AttentionInterface, AttentionMaskInterface

import warpspec.engines.transformers

# On logits, relative, when nothing but attention is bf16: that of attention itself.
ATTENTION_TOLERANCE = 4e-3
EAGER_FACTOR = 1.25  # with the whole model in bf16: ours is not worse than this times eager's own error
SENSITIVITY = 10  # what a part under test does to the logits, at least, as a multiple of the tolerance
VOCABULARY = 512


def with_attention(model, name: str, dtype=torch.float32):
    """A copy of the model in `dtype` that uses the attention implementation `name`."""
    copy = deepcopy(model).to(dtype).eval()  # its configuration too, which keeps the implementation's name
    copy.set_attn_implementation(name)
    return copy


def register_in_fp32_model(name: str, backend: str, compressed: str = "bias") -> None:
    """Like `register`, for a model in FP32: operands are rounded to bf16, the rest is exact."""

    def forward(module, query, key, value, attention_mask, **arguments):
        k = key.bfloat16()
        v = k if value is key else value.bfloat16()  # a shared tensor stays one
        o, _ = warpspec.engines.transformers.attention_forward(
            module, query.bfloat16(), k, v, attention_mask, backend=backend, **arguments
        )
        return o.float(), None

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, warpspec.engines.transformers.mask_maker(compressed))


def relative_error(got, expected) -> float:
    return ((got.float() - expected).norm() / expected.norm()).item()


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def padded(side: str, lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask of a batch of prompts, padded on one side to the longest."""
    ids, index = tokens(len(lengths), max(lengths)), torch.arange(max(lengths))
    index = index.flip(0) if side == "left" else index
    mask = index < torch.tensor(lengths)[:, None]
    return ids * mask, mask.long()
