"""Chooses whether queries of latent attention over a cache in e4m3 are rounded to e4m3, as engines' own backends do."""

from __future__ import annotations

import math
import os

import torch

from warpspec.common.backend import resolve_backend
from warpspec.latent.gathered.transposed.config import ROWS

VARIABLE = "WARPSPEC_MLA_QUERIES"
CHOICES = ("e4m3", "16-bit")
CODES = torch.float8_e4m3fn


def least_rows(device: torch.device) -> float:
    """The least number of rows, heads times queries of a request, for which queries are rounded to e4m3.

    0 or infinity if VARIABLE is one of CHOICES. If it is unset or empty, queries are rounded where that is faster: on
    sm_90a, for more rows than are columns of a tile (docs/notebook/latent.md). Raises ValueError for another value.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", *CHOICES):
        raise ValueError(f"{VARIABLE}: must be one of {', '.join(CHOICES)}, got {chosen!r}")
    faster = resolve_backend("auto", device) == "sm90"
    return {"e4m3": 0, "16-bit": math.inf, "": max(ROWS) + 1 if faster else math.inf}[chosen]
