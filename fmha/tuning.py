"""Timing the plans of attention calls on the caller's own tensors.

    from warpspec.fmha.tuning import tuning

    with tuning():
        model(tokens)  # each new call of attention times its best plans, and keeps the fastest on disk

The model that chooses plans (``plan.cost``) does not see lengths that are on the device, and is wrong by some percent.
Where calls repeat their shapes, timing a few plans once is exact. Later processes find what was kept
(``common.disk_cache``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from warpspec.fmha import ops
from warpspec.fmha.plan.kept import plans_wanted

PLANS, MOST_PLANS = 4, 32


@contextlib.contextmanager
def tuning(plans: int = PLANS) -> Iterator[None]:
    """A context in which each call of ``attention`` and ``attention_varlen`` on a GPU, of which no plan is kept yet,
    times the ``plans`` (1 to 32) plans with the least expected time on its tensors and keeps the fastest.

    Such a call compiles that many kernels, waits for the GPU, and takes memory of twice L2's size. Calls that are
    captured into a CUDA graph are not timed, nor are backward passes, nor calls whose quantised keys are dequantised
    first. Raises ValueError for another number of plans.
    """
    if type(plans) is not int or not 1 <= plans <= MOST_PLANS:
        raise ValueError(f"plans: must be an int from 1 to {MOST_PLANS}, got {plans!r}")
    token = plans_wanted.set(plans)
    ops.forget_calls()  # those that were made before are new again
    try:
        yield
    finally:
        plans_wanted.reset(token)
        ops.forget_calls()
