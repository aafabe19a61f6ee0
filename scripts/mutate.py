"""Mutants of our kernels: what the simulator's order checker finds of them.

    python scripts/mutate.py                     every kernel of the list below, at small sizes
    python scripts/mutate.py fmha-sm100 topk     some of them
    python scripts/mutate.py --seeds 4 fmha      under more schedules; a name stands for all that begin with it
    python scripts/mutate.py --write FILE        also put the scores into FILE, as JSON, in place of theirs before

Each instruction of a kernel's PTX that orders memory (fences, waits, commits, arrivals, barriers) is deleted or
weakened, one at a time, and the kernel runs in the simulator with check="order". Prints the score by class and every
mutant that was not found. Instructions that the case does not execute are left out; idle ones, which do nothing in
its runs that an earlier one has not done, are counted apart: without them the kernel is as right as with them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

from shared import mutant_launches, mutants
from shared.mutant_cases import KERNELS


def score(name: str, seeds: int, only: str = "") -> list[mutants.Verdict]:
    """The verdicts on the mutants of a kernel's launches. only: pattern of their descriptions."""
    found = mutants.Score(seeds, only)
    with mutant_launches.recorded(found.visit):
        KERNELS[name]()
    return found.verdicts


def table(results: dict[str, list[mutants.Verdict]]) -> dict[str, dict[str, list[int]]]:
    """Class -> kernel -> [found, explained, all but the idle, idle]."""
    counts: dict[str, dict[str, list[int]]] = {}
    for name, verdicts in results.items():
        for verdict in verdicts:
            cell = counts.setdefault(verdict.mutant.group, {}).setdefault(name, [0, 0, 0, 0])
            cell[0] += verdict.found
            cell[1] += verdict.outcome == "explained"
            cell[2] += verdict.outcome != "idle"
            cell[3] += verdict.outcome == "idle"
    return counts


def reasons(results: dict[str, list[mutants.Verdict]]) -> dict[str, list[str]]:
    """Reason -> the kernels of which it explains mutants."""
    found: dict[str, set[str]] = {}
    for name, verdicts in results.items():
        for verdict in verdicts:
            if verdict.outcome == "explained":
                found.setdefault(str(verdict.reason), set()).add(name)
    return {reason: sorted(names) for reason, names in found.items()}


def record(file: Path, results: dict[str, list[mutants.Verdict]]) -> None:
    """Put the scores of these cases, and the reasons for what was not found, into a file, in place of what it has of
    them."""
    before = json.loads(file.read_text()) if file.exists() else {"scores": {}, "reasons": {}}
    counts, needed = table(results), reasons(results)
    scores = {
        group: {name: cell for name, cell in before["scores"].get(group, {}).items() if name not in results}
        | counts.get(group, {})
        for group in before["scores"].keys() | counts.keys()
    }
    names = {
        reason: {name for name in before["reasons"].get(reason, ()) if name not in results}
        | set(needed.get(reason, ()))
        for reason in before["reasons"].keys() | needed.keys()
    }
    merged = {
        "scores": {group: dict(sorted(cells.items())) for group, cells in sorted(scores.items()) if cells},
        "reasons": {reason: sorted(of_reason) for reason, of_reason in sorted(names.items()) if of_reason},
    }
    file.write_text(json.dumps(merged, indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernels", nargs="*", help=", ".join(KERNELS))
    parser.add_argument("--seeds", type=int, default=2, help="schedules of each mutant")
    parser.add_argument(
        "--only", default="", help="pattern of the mutants' descriptions, as they are printed"
    )
    parser.add_argument("--write", type=Path, help="JSON file for the scores")
    arguments = parser.parse_args()
    names = [n for n in KERNELS if not arguments.kernels or any(n.startswith(k) for k in arguments.kernels)]
    if not names:
        parser.error(f"no kernel of that name; there are {', '.join(KERNELS)}")
    results = {}
    for name in names:
        start = time.monotonic()
        results[name] = score(name, arguments.seeds, arguments.only)
        kinds = Counter(verdict.outcome for verdict in results[name])
        found = sum(verdict.found for verdict in results[name])
        shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        idle = kinds["idle"]
        print(
            f"{name}: {found} of {len(results[name]) - idle} found in {time.monotonic() - start:.0f} s ({shown})",
            flush=True,
        )
        for verdict in results[name]:
            if verdict.outcome in ("wrong", "unnoticed"):
                print(f"    {verdict.outcome}: {verdict.mutant.group}, {verdict.text}")
            elif verdict.outcome == "explained":
                print(f"    {verdict.mutant.group}, {verdict.text}: {verdict.reason.why}")
    counts = table(results)
    print("\nclass                 found, explained, of all; idle")
    for group, cells in counts.items():
        found, explained, every, idle = (sum(cell[i] for cell in cells.values()) for i in range(4))
        print(f"{group:22}{found}, {explained}, of {every}; {idle}")
    if arguments.write:
        record(arguments.write, results)


if __name__ == "__main__":
    main()
