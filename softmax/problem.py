"""The softmax problem: every argument is checked once, every size derived once.

``SoftmaxProblem.check`` raises ``TypeError`` (wrong kind of object or dtype) or ``ValueError`` (wrong value) with the
argument's name, its value and what is allowed. Nothing has been launched or written by then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from warpspec.common.checks import check_strided, check_tensor
from warpspec.common.hardware import VECTOR_BYTES
from warpspec.common.outputs import check_apart

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of an element
MOST_ELEMENTS = 2**25  # longest row
# A kernel counts rows in 32 bits, up to those of the last CTA, which may lie past the last row.
MOST_ROWS = 2**31 - 2**10


@dataclass(frozen=True)
class SoftmaxProblem:
    """The properties of a call that choose its kernel and that the kernel may rely on. Holds no tensors; hashable.

    rows, length: sizes of x as a matrix. dtype: the dtype's name. aligned: every row of x starts and ends on a 16-byte
    boundary. store_bytes: the widest store to out that is aligned where loads from x are aligned to 16.
    """

    rows: int
    length: int
    dtype: str
    aligned: bool = True
    store_bytes: int = VECTOR_BYTES

    @property
    def is_empty(self) -> bool:
        return self.rows == 0

    @property
    def bytes(self) -> int:
        """Bytes read and written, each counted once."""
        return 2 * self.rows * self.length * (4 if self.dtype == "float32" else 2)

    @property
    def vectors(self) -> int:
        """The most whole vectors that a row can have at any alignment; at least 1."""
        return max(1, self.bytes // (2 * self.rows) // VECTOR_BYTES)

    @classmethod
    def of(cls, x: torch.Tensor, out: torch.Tensor) -> SoftmaxProblem:
        """The problem of matrices x and out (ROW, ELEMENT) with contiguous rows."""
        rows, length = x.shape
        width = x.element_size()
        ends = x.data_ptr() | x.stride(0) * width | length * width
        apart = (out.data_ptr() - x.data_ptr()) | (out.stride(0) - x.stride(0)) * width
        aligned = ends % VECTOR_BYTES == 0
        return cls(rows, length, DTYPES[x.dtype], aligned, min(VECTOR_BYTES, math.gcd(apart, VECTOR_BYTES)))


def check_input(x) -> None:
    """Raise TypeError or ValueError for an x that ``softmax`` does not take."""
    check_tensor("x", x, DTYPES)
    if x.dim() == 0:
        raise ValueError("x: must have at least one dimension, got none")
    if not 1 <= x.shape[-1] <= MOST_ELEMENTS:
        raise ValueError(f"x: rows must have 1..{MOST_ELEMENTS} elements, got shape {list(x.shape)}")
    if x.numel() // x.shape[-1] > MOST_ROWS:
        raise ValueError(f"x: must have at most {MOST_ROWS} rows, got shape {list(x.shape)}")


def check_output(out, x: torch.Tensor) -> None:
    """Raise TypeError or ValueError for an ``out`` that cannot hold the result for x."""
    check_strided("out", out)
    if out.dtype != x.dtype:
        raise TypeError(f"out: dtype must be x's, {x.dtype}, got {out.dtype}")
    if out.shape != x.shape:
        raise ValueError(f"out: shape must be x's, {list(x.shape)}, got {list(out.shape)}")
    if out.device != x.device:
        raise ValueError(f"out: device must be x's, {x.device}, got {out.device}")
    if as_matrix(out) is None:
        raise ValueError(
            "out: rows must be contiguous and evenly spaced, none over another, "
            f"got shape {list(out.shape)}, strides {tuple(out.stride())}"
        )
    check_apart({"out": out}, {"x": x}, in_place=("x",))


def as_matrix(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor as (ROW, ELEMENT) without a copy, rows contiguous and not overlapping; None if that is impossible."""
    length = tensor.shape[-1]
    if tensor.numel() == 0:
        return tensor.reshape(0, length)
    if length > 1 and tensor.stride(-1) != 1:
        return None
    rows, step = 1, 0  # rows of the dimensions seen so far, and their distance (0: a single row)
    for size, stride in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if rows > 1 and stride != step * rows:
            return None
        if rows == 1:
            step = stride
        rows *= size
    if rows > 1 and step < length:
        return None
    return tensor.as_strided((rows, length), (step or length, 1))
