"""What starting and ending CTAs costs: empty kernels in a row, and the gap between two CTAs of one SM."""

from __future__ import annotations

import numpy as np
from case import END, SM, START, START_NS, Case
from memory import ALL

CTAS_AN_SM = 6
SPIN = 3000  # clocks that a CTA stays


def gaps(case: Case, times: np.ndarray) -> dict[str, float]:
    """Clocks from the end of one CTA to the start of the next on its SM; how far apart the first CTAs start."""
    found = []
    for sm in np.unique(times[..., SM]):
        on_it = times[times[:, 0, SM] == sm]
        starts, ends = on_it[..., START].min(1).astype(np.int64), on_it[..., END].max(1).astype(np.int64)
        order = np.argsort(starts)
        found += (starts[order][1:] - ends[order][:-1]).tolist()
    first = [times[times[:, 0, SM] == sm][..., START_NS].min() for sm in np.unique(times[..., SM])]
    return {
        "gap": float(np.median(found)) if found else -1.0,
        "first_starts_ns": float(max(first) - min(first)),
        "sms": float(len(first)),
    }


def _turnover(block: int, shared: int) -> Case:
    name = f"turnover_{block}_{shared}"
    body = f"AGAIN_{name}:\nmov.u64 %rd1, %clock64; sub.s64 %rd2, %rd1, %t0; setp.lt.s64 %p1, %rd2, {SPIN};"
    body += f"@%p1 bra AGAIN_{name};"
    return Case(
        name,
        body,
        1,
        grid=ALL,
        block=block,
        shared=shared,
        count=CTAS_AN_SM,
        evaluate=gaps,
        about={"kind": "turnover", "block": block, "shared": shared, "grid": "all", "ctas_an_sm": CTAS_AN_SM},
    )


def _brief(ctas_an_sm: int, block: int, shared: int) -> Case:
    """CTAs that do nothing: under ncu, what a launch costs by its grid."""
    name = f"brief_{ctas_an_sm}x{block}_{shared}"
    about = {"kind": "brief", "block": block, "shared": shared, "grid": "all", "ctas_an_sm": ctas_an_sm}
    return Case(
        name, "", 1, grid=ALL, block=block, shared=shared, count=ctas_an_sm, evaluate=gaps, about=about
    )


def cases() -> list[Case]:
    """CTAs that take an SM for themselves, by threads; CTAs that do nothing, by their number."""
    found = [_turnover(block, 200 * 1024) for block in (128, 256, 384)] + [_turnover(128, 120 * 1024)]
    found += [_brief(ctas, block, 0) for ctas, block in ((1, 128), (1, 512), (4, 128), (4, 512), (16, 128))]
    return found + [_brief(ctas, 384, 200 * 1024) for ctas in (1, 4)]
