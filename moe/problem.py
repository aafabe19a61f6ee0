"""The layer's problem: every argument is checked once, every size derived once.

Checks raise TypeError for a wrong kind of object or dtype and ValueError for a wrong value. The message has the
argument's name, its value and what is allowed; nothing has been launched or written by then. Values in tensors are
checked for CPU tensors, and for CUDA tensors only on request, because the host would have to wait for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from warpspec.common.hardware import VECTOR_BYTES
from warpspec.common.nvfp4 import BLOCK
from warpspec.moe.activations import activation_named
from warpspec.moe.operands import INTERLEAVE, PreparedWeights
from warpspec.moe.streamed import StreamedWeights

ROW_LIMIT = 2**31 - 1  # int32 indices in kernels
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
        if out_format not in OUT_FORMATS:
            raise ValueError(f"out_format: must be one of {', '.join(OUT_FORMATS)}, got {out_format!r}")
        check_rows("a", a, w13.k, memory)
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
        check_rows("x", x, w13.k, memory)
        check_weights("experts.w13", w13, x.device, gated=True)
        check_weights("experts.w2", w2, x.device, gated=False)
        if w2.experts != w13.experts or w2.n != w13.k or w2.k != -(-w13.width // BLOCK) * BLOCK:
            raise ValueError(
                f"experts.w2: must be {w13.experts} experts of [{w13.k}, {w13.width}], got {w2.experts} of "
                f"[{w2.n}, {w2.k}]"
            )
        check_tensor(
            "experts.intermediate_scale", intermediate_scale, (torch.float32,), (w13.experts,), x.device
        )
        if not 0 <= shared <= w13.experts:
            raise ValueError(f"experts.shared: must be within 0..{w13.experts}, got {shared}")
        tokens = x.shape[0]
        check_tensor("topk_ids", topk_ids, (torch.int32,), (tokens, None), x.device)
        choices = topk_ids.shape[1]
        check_tensor("topk_weights", topk_weights, (torch.float32,), (tokens, choices), x.device)
        experts = w13.experts - shared
        if tokens * (choices + shared) > ROW_LIMIT:
            raise ValueError(f"topk_ids: T * k must be at most {ROW_LIMIT}, got shape {list(topk_ids.shape)}")
        if values and memory:
            check_ids(topk_ids, experts)
        return cls(tokens, choices, experts, shared, w13.k, w13.width, activation, limit, x.device)


def check_activation(activation, limit) -> None:
    """Raise TypeError or ValueError for an unknown activation, or a limit that is neither None nor positive."""
    activation_named(activation)
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, (int, float)):
        raise TypeError(f"limit: must be a float or None, got {limit!r} ({type(limit).__name__})")
    if not (math.isfinite(limit) and limit > 0):
        raise ValueError(f"limit: must be positive and finite, got {limit}")


def check_rows(name, x, hidden, memory) -> None:
    """Raise TypeError or ValueError unless x is [T, H] bf16 with contiguous, aligned rows."""
    check_tensor(name, x, (torch.bfloat16,), (None, hidden), None)
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError(f"{name}: last dimension must be contiguous, got strides {tuple(x.stride())}")
    if x.numel() and x.shape[0] > 1 and x.stride(0) * x.element_size() % VECTOR_BYTES:
        raise ValueError(
            f"{name}: rows must be aligned to {VECTOR_BYTES} bytes, got strides {tuple(x.stride())}"
        )
    if memory and x.numel() and x.data_ptr() % VECTOR_BYTES:
        raise ValueError(
            f"{name}: rows must be aligned to {VECTOR_BYTES} bytes, got an address "
            f"{x.data_ptr() % VECTOR_BYTES} bytes off (storage offset {x.storage_offset()})"
        )


def check_precision(precision) -> None:
    """Raise TypeError or ValueError unless precision is one of ``PRECISIONS``."""
    if not isinstance(precision, str):
        raise TypeError(f"precision: must be a string, got {precision!r}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision: must be one of {', '.join(PRECISIONS)}, got {precision!r}")


def check_weights(name, w: PreparedWeights | StreamedWeights, device, *, gated) -> None:
    if not isinstance(w, (PreparedWeights, StreamedWeights)):
        raise TypeError(f"{name}: must be PreparedWeights, got {type(w).__name__}")
    if w.data.device != device:
        raise ValueError(f"{name}: must be on {device}, got {w.data.device}")
    if w.gated != gated:
        made_by = "prepare_w13" if gated else "prepare_w2"
        raise ValueError(
            f"{name}: must be what {made_by} returns, got global_scale {list(w.global_scale.shape)}"
        )
    if w.width % INTERLEAVE:
        raise ValueError(f"{name}: its result must be a multiple of {INTERLEAVE} wide, got {w.width}")


def check_tensor(name, tensor, dtypes, shape, device) -> None:
    """Raise TypeError for another dtype; ValueError for another shape (None: any extent) or, if given, device."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: must be a torch.Tensor, got {tensor!r} ({type(tensor).__name__})")
    if tensor.layout != torch.strided or tensor.dtype not in dtypes:
        raise TypeError(f"{name}: dtype must be {', '.join(map(str, dtypes))}, got {tensor.dtype}")
    fits = tensor.dim() == len(shape) and all(
        wanted is None or wanted == size for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: shape must be [{wanted}], got {list(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: must be on {device}, got {tensor.device}")


def check_offsets(offsets, rows) -> None:
    """Raise ValueError unless offsets are running ends, which never fall and lie within 0..rows.

    Synchronises on CUDA.
    """
    ends = offsets.tolist()
    for e, (before, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if not before <= end <= rows:
            raise ValueError(
                f"offsets: must never fall and stay within 0..{rows} (rows), got {end} after {before} at expert {e}"
            )


def check_ids(topk_ids, experts) -> None:
    """Raise ValueError for an id that is neither -1 nor an expert. Synchronises on CUDA."""
    wrong = (topk_ids < -1) | (topk_ids >= experts)
    if bool(wrong.any()):
        token, choice = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"topk_ids: values must be within -1..{experts - 1}, got {int(topk_ids[token, choice])} at "
            f"[{token}, {choice}]"
        )
