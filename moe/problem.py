"""The layer's problem: every argument is checked once, every size derived once.

Checks raise TypeError for a wrong kind of object or dtype and ValueError for a wrong value. The message has the
argument's name, its value and what is allowed; nothing has been launched or written by then. Values in tensors are
checked for CPU tensors, and for CUDA tensors only on request, because the host would have to wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpspec.common.checks import (
    ANY,
    check_choice,
    check_int,
    check_kind,
    check_number,
    check_rows,
    check_tensor,
)
from warpspec.common.nvfp4 import NVFP4_BLOCK
from warpspec.moe.activations import activation_named
from warpspec.moe.operands import SIZE_LIMIT, PreparedWeights, check_offsets
from warpspec.moe.streamed import StreamedWeights
from warpspec.moe.weights import INTERLEAVE

PRECISIONS = ("auto", "w4a16", "w4a4")
OUT_FORMATS = ("bf16", "nvfp4")


@dataclass(frozen=True)
class GroupedProblem:
    """One grouped GEMM with an activation: rows [R, H] bf16 sorted by expert, w13 of E experts, result [R, I]."""

    rows: int
    experts: int
    hidden: int
    width: int
    activation: str
    limit: float | None
    device: torch.device

    @classmethod
    def check(
        cls, a, offsets, w13, *, activation, limit, out_format, out_scale, values: bool, memory: bool = True
    ) -> GroupedProblem:
        """The problem of these arguments, each of them checked.

        values: check the values of offsets. memory: False for tensors without storage (tracing).
        """
        check_activation(activation, limit)
        check_choice("out_format", out_format, OUT_FORMATS)
        check_tokens("a", a, w13.k, memory)
        check_weights("w13", w13, a.device, gated=True)
        check_tensor("offsets", offsets, (torch.int32,), (w13.experts,), a.device)
        if out_scale is not None:
            if out_format != "nvfp4":
                raise ValueError(f"out_scale: belongs to out_format 'nvfp4', got {out_format!r}")
            check_tensor("out_scale", out_scale, (torch.float32,), (w13.experts,), a.device)
        if values and memory:
            check_offsets(offsets, a.shape[0])
        return cls(a.shape[0], w13.experts, w13.k, w13.width, activation, limit, a.device)


@dataclass(frozen=True)
class LayerProblem:
    """The whole layer: T tokens of H, k choices each among E experts, S more experts that every token takes."""

    tokens: int
    choices: int
    experts: int  # not counting the shared ones
    shared: int
    hidden: int
    width: int
    activation: str
    limit: float | None
    device: torch.device

    @property
    def rows(self) -> int:
        """Rows of the sorted space: one for every choice of every token."""
        return self.tokens * (self.choices + self.shared)

    @classmethod
    def check(
        cls,
        x,
        topk_ids,
        topk_weights,
        w13,
        w2,
        intermediate_scale,
        *,
        shared,
        activation,
        limit,
        values,
        memory=True,
    ) -> LayerProblem:
        """The problem of these arguments, each of them checked.

        values: check the values of topk_ids. memory: False for tensors without storage (tracing).
        """
        check_activation(activation, limit)
        check_tokens("x", x, w13.k, memory)
        check_weights("experts.w13", w13, x.device, gated=True)
        check_weights("experts.w2", w2, x.device, gated=False)
        if w2.experts != w13.experts or w2.n != w13.k or w2.k != -(-w13.width // NVFP4_BLOCK) * NVFP4_BLOCK:
            raise ValueError(
                f"experts.w2: must be {w13.experts} experts of [{w13.k}, {w13.width}], got {w2.experts} of "
                f"[{w2.n}, {w2.k}]"
            )
        check_tensor(
            "experts.intermediate_scale", intermediate_scale, (torch.float32,), (w13.experts,), x.device
        )
        check_int("experts.shared", shared, 0, w13.experts)
        tokens = x.shape[0]
        check_tensor("topk_ids", topk_ids, (torch.int32,), (tokens, ANY), x.device)
        choices = topk_ids.shape[1]
        check_tensor("topk_weights", topk_weights, (torch.float32,), (tokens, choices), x.device)
        experts = w13.experts - shared
        if tokens * (choices + shared) > SIZE_LIMIT:
            raise ValueError(
                f"topk_ids: T * k must be at most {SIZE_LIMIT}, got shape {list(topk_ids.shape)}"
            )
        if values and memory:
            check_ids(topk_ids, experts)
        return cls(tokens, choices, experts, shared, w13.k, w13.width, activation, limit, x.device)


def check_activation(activation, limit) -> None:
    """Raise TypeError or ValueError for an unknown activation, or a limit that is neither None nor positive."""
    activation_named(activation)
    if limit is not None:
        check_number("limit", limit, positive=True)


def check_tokens(name, x, hidden, memory) -> None:
    """Raise TypeError or ValueError unless x is [T, H] bf16 with contiguous, aligned rows."""
    check_tensor(name, x, (torch.bfloat16,), (ANY, hidden))
    check_rows(name, x, memory)


def check_precision(precision) -> None:
    """Raise TypeError or ValueError unless precision is one of ``PRECISIONS``."""
    check_choice("precision", precision, PRECISIONS)


def check_weights(name, w: PreparedWeights | StreamedWeights, device, *, gated) -> None:
    check_kind(name, w, (PreparedWeights, StreamedWeights))
    if w.data.device != device:
        raise ValueError(f"{name}: must be on {device}, got {w.data.device}")
    if w.gated != gated:
        made_by = "prepare_w13" if gated else "prepare_w2"
        raise ValueError(
            f"{name}: must be what {made_by} returns, got global_scale {list(w.global_scale.shape)}"
        )
    if w.width % INTERLEAVE:
        raise ValueError(f"{name}: its result must be a multiple of {INTERLEAVE} wide, got {w.width}")


def check_ids(topk_ids, experts) -> None:
    """Raise ValueError for an id that is neither -1 nor an expert. Synchronises on CUDA."""
    wrong = (topk_ids < -1) | (topk_ids >= experts)
    if bool(wrong.any()):
        token, choice = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"topk_ids: values must be within -1..{experts - 1}, got {int(topk_ids[token, choice])} at "
            f"[{token}, {choice}]"
        )
