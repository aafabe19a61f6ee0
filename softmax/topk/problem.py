"""The softmax + top-k problem: every argument is checked once.

Checks raise ``TypeError`` (wrong kind of object or dtype) or ``ValueError`` (wrong value) with the argument's name, its
value and what is allowed, before anything is launched or allocated.
"""

from __future__ import annotations

import torch

from warpspec.softmax.problem import DTYPES, MOST_ROWS
from warpspec.softmax.topk.config import K_LIMIT, LENGTH_LIMIT

FLAGS = (True, False)


def check(logits, k, renormalize) -> None:
    """Raise TypeError or ValueError for arguments that ``softmax_topk`` does not take."""
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"logits: must be a torch.Tensor, got {logits!r} ({type(logits).__name__})")
    if logits.dtype not in DTYPES:
        raise TypeError(f"logits: dtype must be one of {', '.join(map(str, DTYPES))}, got {logits.dtype}")
    if logits.layout != torch.strided:
        raise TypeError(f"logits: must be a strided tensor, got layout {logits.layout}")
    shape = logits.shape
    if len(shape) == 0 or not 1 <= shape[-1] <= LENGTH_LIMIT:
        raise ValueError(f"logits: rows must have 1..{LENGTH_LIMIT} elements, got shape {list(shape)}")
    if logits.numel() // shape[-1] > MOST_ROWS:
        raise ValueError(f"logits: must have at most {MOST_ROWS} rows, got shape {list(shape)}")
    if type(k) is not int and (isinstance(k, bool) or not isinstance(k, (int, torch.SymInt))):
        raise TypeError(f"k: must be an int, got {k!r} ({type(k).__name__})")
    if not 1 <= k <= min(shape[-1], K_LIMIT):
        raise ValueError(f"k: must be in 1..{min(shape[-1], K_LIMIT)} for rows of {shape[-1]}, got {k}")
    if renormalize not in FLAGS:
        raise TypeError(f"renormalize: must be a bool, got {renormalize!r}")
