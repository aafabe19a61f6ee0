"""The kernels whose mutants `scripts/mutate.py` scores: each a call at a small size that makes them work.

An input that lets an ordering instruction do its work has several tiles a CTA, rings that are filled again, parts that
nobody sees. A case may call several times: a mutant that one of the calls finds is found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from shared.mutant_cases import attention, experts, latent, rows

TESTS = Path(__file__).resolve().parents[3] / "tests"
sys.path[:0] = [str(TESTS / name) for name in (".", "fmha", "latent", "latent/indexer", "moe", "softmax")]

KERNELS: dict[str, Callable[[], None]] = attention.KERNELS | latent.KERNELS | experts.KERNELS | rows.KERNELS
