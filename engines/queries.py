"""Chooses whether queries of latent attention over a cache in e4m3 are rounded to e4m3, as engines' own backends do."""

from __future__ import annotations

import os

import torch

from warpspec.common.backend import resolve_backend

VARIABLE = "WARPSPEC_MLA_QUERIES"
CHOICES = ("e4m3", "16-bit")
CODES = torch.float8_e4m3fn


def are_codes(device: torch.device) -> bool:
    """Whether queries are rounded to e4m3 on this device: as VARIABLE says, or if it is unset or empty, where that is
    faster, on sm_90a. Raises ValueError for another value than one of CHOICES."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", *CHOICES):
        raise ValueError(f"{VARIABLE}: must be one of {', '.join(CHOICES)}, got {chosen!r}")
    return chosen == "e4m3" if chosen else resolve_backend("auto", device) == "sm90"
