"""Holds predicted clocks against measured ones: the error tables of docs/clock_errors.md.

    python scripts/clock_errors.py                              print the tables
    python scripts/clock_errors.py --write docs/clock_errors.md    put them between its markers; --check compares
    python scripts/clock_errors.py --keep CHIP MEASURED.json PREDICTED.json...     into docs/clocks.json first
    python scripts/clock_errors.py --publish PREDICTED.json                        of scripts/predict_published.py
    python scripts/clock_errors.py --plans PREDICTED.json                          of scripts/predict_plans.py
    python scripts/clock_errors.py --experts PREDICTED.json                        of scripts/predict_moe.py

docs/clocks.json holds what ``measure_clocks.py`` measured (clocks, and how many a nanosecond; null: not kept) and what
``predict_clocks.py`` predicted, and shared memory's bank conflicts where ncu counted them. A kernel's error is
(predicted - measured) / measured, in clocks of the SM.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from shared import generated_tables
from shared.clock_cases import cases

RECORD = Path(__file__).resolve().parent.parent / "docs" / "clocks.json"


@dataclass(frozen=True)
class Row:
    """One kernel: clocks measured, predicted, and the prediction's interval."""

    chip: str
    family: str
    case: str
    kernel: str
    measured: float
    predicted: float
    low: float
    high: float
    binds: str

    @property
    def error(self) -> float:
        return (self.predicted - self.measured) / self.measured

    @property
    def inside(self) -> bool:
        """Whether the measured clocks lie in the prediction's interval."""
        return self.low <= self.measured <= self.high


def rows(record: dict) -> Iterator[Row]:
    """Kernels that are both measured and predicted, chip by chip in the order of the cases."""
    for chip, measured in record["measured"].items():
        predicted = record["predicted"].get(chip, {})
        for case in cases():
            one, other = measured["cases"].get(case.name), predicted.get("cases", {}).get(case.name)
            if one is None or other is None or len(one) != len(other):
                continue
            for (clocks, _), guess in zip(one, other, strict=True):
                name, now, low, high, binds = guess
                yield Row(chip, case.family, case.name, name, clocks, now, low, high, binds)


def unmatched(record: dict, chip: str) -> list[str]:
    """Cases that were measured and of which there is no prediction."""
    found = {row.case for row in rows(record) if row.chip == chip}
    return [name for name in record["measured"][chip]["cases"] if name not in found]


def family_table(record: dict, unseen: bool = False) -> str:
    """Errors by chip and family. unseen: of the blind test's calls, instead of the others."""
    lines = []
    names = {case.name for case in cases() if case.unseen == unseen}
    every = [row for row in rows(record) if row.case in names]
    for chip in record["measured"]:
        mine = [row for row in every if row.chip == chip]
        for family in [*dict.fromkeys(row.family for row in mine), None]:
            chosen = [row for row in mine if family is None or row.family == family]
            if not chosen:
                continue
            errors = [row.error for row in chosen]
            worst = max(chosen, key=lambda row: abs(row.error))
            lines.append(
                (
                    chip.upper(),
                    family or "all",
                    len(chosen),
                    f"{sum(map(abs, errors)) / len(errors):.1%}",
                    f"{sum(errors) / len(errors):+.1%}",
                    f"{worst.error:+.1%}",
                    f"{worst.kernel} of {worst.case}",
                    f"{sum(row.inside for row in chosen)} of {len(chosen)}",
                )
            )
    header = ("GPU", "family", "kernels", "mean error", "signed", "worst", "which", "in the interval")
    left_out = [
        f"Measured on {chip.upper()} and not predicted: {', '.join(missing)}."
        for chip in record["measured"]
        if (missing := [name for name in unmatched(record, chip) if name in names])
    ]
    return "\n\n".join([generated_tables.table(header, lines), *left_out])


def plans_table(record: dict) -> str:
    """Plans of attention: what the predicted choice loses against the fastest plan that was timed."""
    found = list(record.get("plans", {"rows": {}})["rows"].values())
    lines = []
    for chip in record["measured"]:
        mine = [row for row in found if row["chip"] == chip and len(row["plans"]) > 1]
        for kind in [*dict.fromkeys(row["kind"] for row in mine), None]:
            chosen = [row for row in mine if kind in (None, row["kind"])]
            if chosen:
                lines.append((chip.upper(), kind or "all", *plans_line(chosen)))
    header = ("GPU", "calls", "problems", "plans", "regret", "worst", "2% or less", "a plan at random loses")
    return generated_tables.table(header, lines)


def plans_line(rows: list[dict]) -> tuple:
    """A table row: how many problems and plans there are, the predicted choice's regret, a random choice's loss."""
    regrets, losses = [], []
    for row in rows:
        times = [(guess, us) for us, guess in row["plans"].values()]
        best = min(us for _, us in times)
        regrets.append(min(times)[1] / best - 1)
        losses.append(sum(us for _, us in times) / len(times) / best - 1)
    count, small = len(rows), sum(one <= 0.02 for one in regrets)
    return (
        count,
        sum(len(row["plans"]) for row in rows),
        f"{sum(regrets) / count:.1%}",
        f"{max(regrets):.1%}",
        f"{small} of {count}",
        f"{sum(losses) / count:.0%}",
    )


def experts_table(record: dict) -> str:
    """Tiles of the NVFP4 grouped GEMMs: what the plan chooses by its counts, and what the model would."""
    lines = []
    for name, row in record["experts"]["rows"].items():
        shapes, chosen = row["shapes"], row["chosen"]
        best = min(shapes, key=lambda shape: shapes[shape][0])
        (clocks, low, _, counted), (least, _, high, _) = shapes[chosen], shapes[best]
        told = "same" if best == chosen else "yes" if high < low else "no"
        cells = (f"{row['rows_an_expert']:.2g}", chosen, f"{counted:,}", f"{clocks:,}", best, f"{least:,}")
        lines.append((name, *cells, f"{clocks / least - 1:.1%}", told))
    header = (
        "GEMM",
        "rows an expert",
        "the plan takes",
        "counted",
        "predicted",
        "the model takes",
        "predicted",
    )
    return generated_tables.table((*header, "the plan loses", "intervals apart"), lines)


def conflicts_table(record: dict) -> str:
    """Bank conflicts of shared memory by family: what a perfect access would not take."""
    lines = []
    for chip, measured in record["measured"].items():
        counted = measured.get("conflicts", {})
        families = {case.name: case.family for case in cases()}
        for family in dict.fromkeys(families[name] for name in counted):
            mine = {name: kernels for name, kernels in counted.items() if families[name] == family}
            every = [(part / max(whole, 1), name) for name, ks in mine.items() for part, whole in ks]
            conflicts, wavefronts = (sum(k[i] for ks in mine.values() for k in ks) for i in (0, 1))
            worst, name = max(every)
            lines.append(
                (chip.upper(), family, len(every), f"{conflicts / wavefronts:.1%}", f"{worst:.1%}", name)
            )
    header = ("GPU", "family", "kernels", "conflicts of all wavefronts", "worst kernel", "which")
    return generated_tables.table(header, lines)


def kernel_table(record: dict) -> str:
    """Every kernel."""
    lines = [
        (
            row.chip.upper(),
            row.case,
            row.kernel.removesuffix(".kernel"),
            f"{row.measured:,.0f}",
            f"{row.predicted:,.0f}",
            f"{row.low:,.0f} to {row.high:,.0f}",
            f"{row.error:+.1%}",
            row.binds,
        )
        for row in rows(record)
    ]
    header = ("GPU", "call", "kernel", "measured", "predicted", "interval", "error", "predicted to bind")
    return generated_tables.table(header, lines)


def published_table(record: dict) -> str:
    """Kernels of others that others have timed, beside their predictions: pairs, in which the clock cancels, first."""
    rows = record["published"]["rows"]
    pairs, ratios = [], []
    cases = {}
    for row in rows:
        cases.setdefault((row.get("gpu"), row["case"]), []).append(row)
    for first, second in (pair for same in cases.values() for pair in pairwise(same)):
        work = second["flop"] / first["flop"]
        real, guess = second["tflops"] / first["tflops"], work * first["clocks"] / second["clocks"]
        ratios.append((real, guess))
        sign = "yes" if (real > 1) == (guess > 1) else "no"
        name = f"{second['variant']} over {first['variant']}"
        pairs.append((first.get("gpu", "B300"), first["case"], name, f"{real:.2f}", f"{guess:.2f}", sign))
    lines = []
    for row in rows:
        low, high = (row["flop"] / clocks * row["ghz"] / 1000 for clocks in (row["high"], row["low"]))
        guess = row["flop"] / row["clocks"] * row["ghz"] / 1000
        inside = "yes" if low <= row["tflops"] <= high else "no"
        about = (
            row.get("gpu", "B300"),
            row["case"],
            row["variant"],
            f"{row['tflops']:,.0f}",
            f"{guess:,.0f}",
        )
        lines.append((*about, f"{low:,.0f} to {high:,.0f}", f"{row['tflops'] / guess - 1:+.0%}", inside))
    titles = ("GPU", "case", "pair", "published ratio", "predicted ratio", "right sign")
    header = (
        "GPU",
        "case",
        "variant",
        "published TFLOP/s",
        "predicted",
        "interval",
        "error of time",
        "inside",
    )
    right = sum((real > 1) == (guess > 1) for real, guess in ratios)
    near = sum(abs(real - guess) <= 0.05 for real, guess in ratios)
    known = [row for row in rows if row.get("known_clock")]
    text = f"{right} of {len(pairs)} pairs have the right sign, {near} a ratio within 5 points; "
    text += f"{sum(line[-1] == 'yes' for line in lines)} of {len(lines)} rows lie in their interval."
    if known:
        errors = [abs(row["tflops"] * row["clocks"] / row["flop"] / row["ghz"] * 1000 - 1) for row in known]
        text += (
            f" Rows of a locked clock: {sum(errors) / len(errors):.0%} off on average ({len(known)} rows)."
        )
    return "\n\n".join([text, generated_tables.table(titles, pairs), generated_tables.table(header, lines)])


def sections() -> list[generated_tables.Section]:
    record = json.loads(RECORD.read_text())
    made = {
        "families": family_table(record),
        "unseen": family_table(record, unseen=True),
        "plans": plans_table(record),
        "experts": experts_table(record),
        "conflicts": conflicts_table(record),
        "published": published_table(record),
        "kernels": kernel_table(record),
    }
    return [
        (*(f"<!-- scripts/clock_errors.py {name}: {side} -->" for side in ("begin", "end")), text)
        for name, text in made.items()
    ]


def keep(chip: str, measured: Path, predictions: list[Path]) -> None:
    """Put a chip's measurements and predictions into the record."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"measured": {}, "predicted": {}}
    found = json.loads(measured.read_text())
    record["measured"].setdefault(chip, {"gpu": found["gpu"], "cases": {}})["cases"] |= {
        case["name"]: [[round(k["clocks"]), round(k["clocks"] / k["ns"], 3)] for k in case["kernels"]]
        for case in found["cases"]
    }
    record["measured"][chip].setdefault("conflicts", {}).update(
        {
            case["name"]: [[round(k["bank_conflicts"]), round(k["wavefronts"])] for k in case["kernels"]]
            for case in found["cases"]
            if all("bank_conflicts" in k for k in case["kernels"])
        }
    )
    mine = record["predicted"].setdefault(chip, {"cases": {}})
    for path in predictions:
        answer = json.loads(path.read_text())
        mine["constants"] = answer["constants"][chip]
        for name, by_chip in answer["cases"].items():
            if chip not in by_chip:
                continue
            mine["cases"][name] = [
                [one["kernel"], one["clocks"], one["low"], one["high"], one["binds"]] for one in by_chip[chip]
            ]
    write(record)


def publish(path: Path) -> None:
    """Put predictions of published figures into the record, in the place of those of the same number."""
    record, found = json.loads(RECORD.read_text()), json.loads(path.read_text())
    numbers = {row["number"] for row in found}
    kept = [row for row in record["published"]["rows"] if row.get("number") not in numbers]
    record["published"]["rows"] = kept + found
    write(record)


def keep_plans(path: Path) -> None:
    """Put predictions of plans into the record, in the place of the former ones."""
    record, found = json.loads(RECORD.read_text()), json.loads(path.read_text())
    for row in found["rows"].values():
        shape = row.pop("shape")
        row["kind"] = shape["kind"]
    record["plans"] = found
    write(record)


def keep_experts(path: Path) -> None:
    """Put predictions of the experts' tiles into the record, in the place of the former ones."""
    record = json.loads(RECORD.read_text())
    record["experts"] = json.loads(path.read_text())
    write(record)


def write(record: dict) -> None:
    text = json.dumps(record, separators=(",", ":"))
    RECORD.write_text(text.replace(']],"', ']],\n"').replace('},{"', '},\n{"') + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    generated_tables.add_file_options(parser)
    parser.add_argument("--keep", nargs="+", metavar=("CHIP", "FILE"), help="chip, measured, predicted...")
    parser.add_argument(
        "--publish", type=Path, metavar="FILE", help="predictions of scripts/predict_published.py"
    )
    parser.add_argument("--plans", type=Path, metavar="FILE", help="predictions of scripts/predict_plans.py")
    parser.add_argument("--experts", type=Path, metavar="FILE", help="predictions of scripts/predict_moe.py")
    options = parser.parse_args()
    if options.experts:
        keep_experts(options.experts)
    if options.publish:
        publish(options.publish)
    if options.plans:
        keep_plans(options.plans)
    if options.keep:
        chip, measured, *predictions = options.keep
        keep(chip, Path(measured), [Path(one) for one in predictions])
    return generated_tables.deliver(options, "scripts/clock_errors.py", sections())


if __name__ == "__main__":
    raise SystemExit(main())
