"""What a run of bench_mla.py says: a line a call, a summary. Plain Python.

A result is a dictionary, as it is written to JSON: call (``mla_draws.to_json``), name, chosen (the way that the plan
chose), times (microseconds by way), scheduled (those of the chosen way with a schedule, or None), expected (by the
model, where it has an expectation), peer (FlashMLA's microseconds, None without it), errors (relative differences: from
the reference, and from the peer) and wrong (which of them no rounding explains).
"""

from __future__ import annotations

from collections.abc import Sequence

from .gpu_bench import table
from .sweep_report import LEVEL, geometric_mean, text

PEER, REFERENCE = "peer", "reference"
WORST = 8


def ours(result: dict) -> float:
    """Microseconds of the chosen way."""
    return result["times"][result["chosen"]]


def ratio(result: dict) -> float | None:
    """The peer's time over ours; None without a peer whose result is ours."""
    return None if result["peer"] is None or result["wrong"] else result["peer"] / ours(result)


def loss(result: dict) -> float | None:
    """Our time over the best way's; None where no other way was timed."""
    times = result["times"]
    return ours(result) / min(times.values()) if len(times) > 1 else None


def kind(result: dict) -> str:
    """The chosen way without its numbers."""
    return result["chosen"].split()[0].rstrip("0123456789")


def with_schedule(result: dict) -> dict:
    """The result as if the chosen way had the time that it takes with a schedule, where it has one."""
    if result["scheduled"] is None:
        return result
    return result | {"times": result["times"] | {result["chosen"]: result["scheduled"]}}


def line(result: dict) -> str:
    found = f"{result['name']:32} {result['chosen']:12} {ours(result):7.1f} us"
    if result["peer"] is not None:
        found += f", FlashMLA {result['peer']:7.1f} us, {result['peer'] / ours(result):.3f}"
    if result["scheduled"] is not None:
        found += f", with a schedule {result['scheduled']:.1f} us"
        if result["peer"] is not None:
            found += f", {result['peer'] / result['scheduled']:.3f}"
    if loss(result) is not None:
        others = sorted((us, name) for name, us in result["times"].items() if name != result["chosen"])
        found += f", loses {loss(result) - 1:.1%}; " + ", ".join(f"{name} {us:.1f}" for us, name in others)
    if result["wrong"]:
        errors = ", ".join(f"{name} {result['errors'][name]:.1e}" for name in result["wrong"])
        found += f", WRONG: differs from {errors}"
    return found


def described(results: Sequence[dict]) -> list:
    """Numbers of calls and of those with a peer, mean ratio, numbers below LEVEL and 1, the least with its call."""
    ratios = {result["name"]: ratio(result) for result in results if ratio(result) is not None}
    values = list(ratios.values())
    below = [sum(value < level for value in values) for level in (LEVEL, 1)]
    least = min(ratios, key=ratios.get, default=None)
    where = None if least is None else f"{ratios[least]:.3f} ({least})"
    return [len(results), len(values), text(geometric_mean(values)), *below, where]


def summary(results: Sequence[dict], markdown: bool = False) -> str:
    """Ratios by the way that was chosen, and of all; what the choice loses; what is wrong."""
    kinds = sorted({kind(result) for result in results})
    rows = [[one, *described([result for result in results if kind(result) == one])] for one in kinds]
    rows.append(["all", *described(results)])
    cut = [result for result in results if result["scheduled"] is not None]
    if cut:
        rows.append(["line with a schedule", *described(list(map(with_schedule, cut)))])
        rows.append(["all with schedules", *described(list(map(with_schedule, results)))])
    columns = ("way", "calls", "with a peer", "geometric mean", f"below {LEVEL}", "below 1", "least")
    parts = [table(columns, rows, markdown=markdown)]
    lost = {result["name"]: loss(result) for result in results if loss(result) is not None}
    if lost:
        mean, most = geometric_mean(list(lost.values())) - 1, max(lost, key=lost.get)
        parts.append(
            f"the choice loses {mean:.2%} on average of {len(lost)} calls, at most {lost[most] - 1:.1%} ({most})"
        )
        worst = sorted((result for result in results if result["name"] in lost), key=loss)[-WORST:]
        parts += [line(result) for result in reversed(worst) if loss(result) > 1]
    wrong = [result for result in results if result["wrong"]]
    parts.append(f"{len(wrong)} calls differ from the reference or the peer by more than rounding explains")
    return "\n".join([*parts, *map(line, wrong)])
