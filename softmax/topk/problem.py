"""The softmax + top-k problem: every argument is checked once.

Checks raise ``TypeError`` (wrong kind of object or dtype) or ``ValueError`` (wrong value) with the argument's name, its
value and what is allowed, before anything is launched or allocated.
"""

from __future__ import annotations

from warpspec.common.checks import check_bool, check_int, check_tensor
from warpspec.softmax.problem import DTYPES, MOST_ROWS
from warpspec.softmax.topk.config import K_LIMIT, LENGTH_LIMIT


def check(logits, k, renormalize) -> None:
    """Raise TypeError or ValueError for arguments that ``softmax_topk`` does not take."""
    check_tensor("logits", logits, DTYPES)
    shape = logits.shape
    if len(shape) == 0 or not 1 <= shape[-1] <= LENGTH_LIMIT:
        raise ValueError(f"logits: rows must have 1..{LENGTH_LIMIT} elements, got shape {list(shape)}")
    if logits.numel() // shape[-1] > MOST_ROWS:
        raise ValueError(f"logits: must have at most {MOST_ROWS} rows, got shape {list(shape)}")
    check_int("k", k)
    if not 1 <= k <= min(shape[-1], K_LIMIT):
        raise ValueError(f"k: must be in 1..{min(shape[-1], K_LIMIT)} for rows of {shape[-1]}, got {k}")
    check_bool("renormalize", renormalize)
