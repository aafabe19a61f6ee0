"""What a sweep found: ratios, shares of the least time that a GPU needs, tables. Plain Python.

A result is a dictionary, as it is written to JSON: shape (``sweep_shapes.to_json``), name, kind, bytes, flops, times
(microseconds by candidate, ours among them unless the shape failed), errors (relative, of the peers that were
compared), missing (why a candidate has no time), bytes_us and flops_us (microseconds that the GPU needs for the call's
bytes at a copy's speed, and for its arithmetic at that of a large matrix product, both measured on it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .gpu_bench import Speeds, table
from .sweep_calls import OURS
from .sweep_shapes import KINDS, Shape, to_json

LARGE_BYTES = 100e6
LONG_US = 60.0  # shorter calls need not reach SHARE: launches and the ends of tiles take several microseconds
LEVEL, MEAN, SHARE = 0.97, 1.08, 0.90  # wanted: of every shape, of the geometric mean, of the least time
BYTES, PRODUCTS = "bytes", "products"
WORST = 10


def result_of(shape: Shape, speeds: Speeds) -> dict:
    """Without times. speeds: of the GPU that will run it."""
    return {
        "shape": to_json(shape),
        "kind": shape.kind,
        "name": shape.name,
        "bytes": shape.bytes,
        "flops": shape.flops,
        "bytes_us": shape.bytes / speeds.copy * 1e-6,
        "flops_us": shape.flops / speeds.matmul * 1e-6,
        "times": {},
        "errors": {},
        "missing": {},
    }


def best_peer(result: dict) -> str | None:
    """The fastest peer that computes the same."""
    peers = [name for name in result["times"] if name != OURS]
    return min(peers, key=result["times"].get) if peers and OURS in result["times"] else None


def ratio(result: dict) -> float | None:
    """The best peer's time over ours; None without a peer."""
    peer = best_peer(result)
    return None if peer is None else result["times"][peer] / result["times"][OURS]


def binding(result: dict) -> str:
    """What takes the GPU longer: the call's bytes, or its products."""
    return BYTES if result["bytes_us"] >= result["flops_us"] else PRODUCTS


def share(result: dict) -> float | None:
    """The time of the bytes or of the products, whichever is greater, over ours; of calls that move much."""
    if result["bytes"] <= LARGE_BYTES or OURS not in result["times"]:
        return None
    return max(result["bytes_us"], result["flops_us"]) / result["times"][OURS]


def long_share(result: dict) -> float | None:
    """``share`` of a call that takes so long that SHARE is wanted of it."""
    found = share(result)
    return None if found is None or result["times"][OURS] < LONG_US else found


def geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def suspicious(result: dict) -> bool:
    """Peers were compared, and none has our result: ours may be the wrong one. Other plans of ours are no peers."""
    return bool(result["errors"].keys() - result.get("plans", {}).keys()) and best_peer(result) is None


def text(value: float | None, form: str = ".3f") -> str | None:
    return None if value is None else format(value, form)


COLUMNS = ("kind", "shape", f"{OURS} us", "best peer", "us", "ratio", "bytes us", "products us", "share")


def cells(result: dict) -> list:
    peer = best_peer(result)
    return [
        *(result["kind"], result["name"], result["times"].get(OURS), peer),
        *(result["times"].get(peer), text(ratio(result)), result["bytes_us"], result["flops_us"]),
        text(share(result), ".0%"),
    ]


def every_table(results: Sequence[dict], markdown: bool = False) -> str:
    """A line for each shape, with every peer."""
    names = sorted({name for result in results for name in result["times"]} - {OURS})
    rows = [
        [*cells(result)[:3], *(result["times"].get(name) for name in names), *cells(result)[5:]]
        for result in results
    ]
    columns = (*COLUMNS[:3], *(f"{name} us" for name in names), *COLUMNS[5:])
    return table(columns, rows, markdown=markdown)


def worst(results: Sequence[dict], value) -> list[dict]:
    """The results with the least values, those without one left out."""
    return sorted((result for result in results if value(result) is not None), key=value)[:WORST]


def kinds_table(results: Sequence[dict], markdown: bool = False) -> str:
    """A table of ratios by kind, and of all: their geometric mean, the least one, how many are below LEVEL."""
    rows = []
    present = [kind for kind in KINDS if any(result["kind"] == kind for result in results)]
    for kind in (*present, "all"):
        chosen = [result for result in results if kind in ("all", result["kind"])]
        ratios = [found for found in map(ratio, chosen) if found is not None]
        below = sum(value < LEVEL for value in ratios)
        rows.append(
            [
                *(kind, len(chosen), len(ratios)),
                *(text(geometric_mean(ratios)), text(min(ratios, default=None))),
                f"{below} ({below / len(ratios):.0%})" if ratios else None,
            ]
        )
    columns = ("kind", "shapes", "with a peer", "mean ratio", "least", f"below {LEVEL}")
    return table(columns, rows, markdown=markdown)


def shares_table(results: Sequence[dict], markdown: bool = False) -> str | None:
    """A table, by kind and by what binds, of the shares that calls over LARGE_BYTES reach, and those among them that
    take LONG_US or more; None if there is no such call."""
    rows = []
    for kind in (*KINDS, "all"):
        for bound in (BYTES, PRODUCTS):
            chosen = [one for one in results if kind in ("all", one["kind"]) and binding(one) == bound]
            large = [found for found in map(share, chosen) if found is not None]
            lasting = [found for found in map(long_share, chosen) if found is not None]
            if large:
                rows.append([kind, bound, *described(large), *described(lasting)])
    columns = ["kind", "bound by"]
    for which in ("large", f"of {LONG_US:.0f} us"):
        columns += [which, "mean share", "least", f"below {SHARE:.0%}"]
    return table(columns, rows, markdown=markdown) if rows else None


def described(shares: Sequence[float]) -> list:
    """How many shares there are, their mean, the least, and how many are below SHARE."""
    mean = sum(shares) / len(shares) if shares else None
    least = min(shares, default=None)
    return [len(shares), text(mean, ".0%"), text(least, ".0%"), sum(value < SHARE for value in shares)]


def verdict(results: Sequence[dict]) -> str:
    """What is wanted, and whether it is so."""
    ratios = [found for found in map(ratio, results) if found is not None]
    shares = [found for found in map(long_share, results) if found is not None]
    below, mean = sum(value < LEVEL for value in ratios), geometric_mean(ratios)
    lines = []
    if ratios:
        lines.append(f"{below} of {len(ratios)} shapes below {LEVEL} of the best peer (wanted: none)")
        lines.append(f"geometric mean of the ratios {mean:.3f} (wanted: {MEAN})")
    if shares:
        short = sum(value < SHARE for value in shares)
        lines.append(
            f"{short} of {len(shares)} calls over {LARGE_BYTES / 1e6:.0f} MB and {LONG_US:.0f} us below {SHARE:.0%} of "
            "the time of their bytes or products (wanted: none)"
        )
    return "\n".join(lines)


def problems(results: Sequence[dict]) -> list[str]:
    """Candidates without a time, and results that no peer shares."""
    lines = []
    for result in results:
        place = f"{result['kind']} {result['name']}"
        lines += [f"{place}: {name}: {why}" for name, why in result["missing"].items()]
        if suspicious(result):
            lines.append(f"{place}: NO PEER HAS OUR RESULT")
    return lines


def report(results: Sequence[dict], markdown: bool = False) -> str:
    """All tables; the worst shapes and what is wanted last."""
    parts = [every_table(results, markdown)]
    found = problems(results)
    if found:
        parts.append("\n".join(("without a time:", *found)))
    for title, value in (
        ("worst ratios", ratio),
        (f"worst shares of the time of bytes or products, {LONG_US:.0f} us and more", long_share),
    ):
        rows = [cells(result) for result in worst(results, value)]
        if rows:
            parts.append(f"{title}\n{table(COLUMNS, rows, markdown=markdown)}")
    parts += [kinds_table(results, markdown), shares_table(results, markdown), verdict(results)]
    return "\n\n".join(part for part in parts if part)
