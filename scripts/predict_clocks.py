"""Predicts the time of the calls that scripts/measure_clocks.py measures, without a GPU.

    python scripts/predict_clocks.py OUT.json [--chips h200 h100] [--only TEXT] [--sample 4] [--traces FOLDER]

Each call of ``shared/clock_cases.py`` runs a few clusters of each kernel in the simulator, planned for the chip's own
GPU. Kernels that docs/clocks.json has measured are predicted for the SM clock at which they ran: under load, it is no
constant of a chip. OUT.json: for each case and chip its kernels in order with clocks (prediction, low, high), what
binds, and the version of the table of constants. Cases that are there already stay, unless they are among those asked
for. FOLDER keeps the traces: a call whose trace is there is timed again without running.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from shared.clock_cases import ClockCase, cases

from warpspec import sim
from warpspec.common.hardware import MODELS
from warpspec.common.launch import Target, simulating
from warpspec.sim.clocks.answer import clocks_of
from warpspec.sim.clocks.chips import chip, table_digest
from warpspec.sim.clocks.record import captured
from warpspec.sim.clocks.store import load, save

SAMPLE = 4
RECORD = Path(__file__).resolve().parent.parent / "docs" / "clocks.json"


def target_of(name: str) -> Target:
    """The simulated GPU of a chip."""
    return Target.of_model(next(gpu for gpu in MODELS if gpu.name.lower() == name))


def traces_of(case: ClockCase, sample: int, chip_name: str = "h200") -> list:
    """The recorded launches of one call, of which preparing its inputs is no part."""
    if not case.ours:
        return peers_traces(case, sample)
    with simulating(target_of(chip_name)), sim.recording(sample):
        call = case.make("cpu")
        with captured() as traces:
            call()
    return traces


def peers_traces(case: ClockCase, sample: int) -> list:
    """Traces of a library's call, which is made to believe that it runs on a GPU."""
    with sim.intercept("sm_90a"), sim.recording(sample):
        call = case.make("cuda")
        with captured() as traces:
            call()
    return traces


def kept_traces(case: ClockCase, sample: int, chip_name: str, folder: Path | None) -> list:
    """Traces of a case: read from the folder if they are there, otherwise recorded and saved in it."""
    if folder is None:
        return traces_of(case, sample, chip_name)
    path = folder / f"{chip_name} {case.name}.xz"
    if path.exists():
        return load(path)
    traces = traces_of(case, sample, chip_name)
    save(traces, path)
    return traces


def rates_of(measured: dict, name: str, case: str) -> list[float | None]:
    """SM clocks in GHz of a case's kernels on a chip. Where they were not kept, those of the same case on another chip
    are taken; None: of no chip.
    """
    mine = measured.get(name, {"cases": {}})["cases"].get(case, [])
    for other in (name, *measured):
        rates = [ghz for _, ghz in measured.get(other, {"cases": {}})["cases"].get(case, [])]
        if rates and None not in rates and len(rates) == len(mine):
            return rates
    return [None] * len(mine)


def predicted(traces: list, name: str, rates: list[float | None]) -> list[dict]:
    """Predictions of a call's kernels, in order. rates: SM clocks in GHz that they ran at, where that was measured."""
    of = chip(name)
    if len(rates) != len(traces):
        rates = [None] * len(traces)
    launches = [
        launch
        for trace, ghz in zip(traces, rates, strict=True)
        for launch in clocks_of([trace], of.at(ghz or of.ghz)).launches
    ]
    return [
        {
            "kernel": one.kernel,
            "clocks": round(one.clocks),
            "low": round(one.low),
            "high": round(one.high),
            "binds": one.binding.split(" ")[0],
            "ctas_an_sm": one.ctas_an_sm,
            "waves": round(one.waves, 2),
            "code": one.code,
        }
        for one in launches
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--chips", nargs="+", default=["h200", "h100"])
    parser.add_argument("--only", default="", help="cases whose name or family has this text")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="clusters of each kernel")
    parser.add_argument("--traces", type=Path, help="folder of traces")
    parser.add_argument("--peers", action="store_true", help="also kernels that are not ours")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = json.loads(options.out.read_text()) if options.out.exists() else {"cases": {}}
    measured = json.loads(RECORD.read_text())["measured"]
    result["constants"] = {name: table_digest(chip(name)) for name in options.chips}
    for case in cases():
        if options.only not in case.name and options.only not in case.family:
            continue
        if not case.ours and not options.peers:
            continue
        for name in options.chips:
            began = time.monotonic()
            try:
                traces = kept_traces(case, options.sample, name, options.traces)
                middle = time.monotonic()
                rows = predicted(traces, name, rates_of(measured, name, case.name))
            except Exception as error:  # one case that fails must not lose the others
                print(f"{name} {case.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            result["cases"].setdefault(case.name, {})[name] = rows
            took = f"{middle - began:.1f} s to run, {time.monotonic() - middle:.1f} s to replay"
            text = "; ".join(
                f"{one['kernel']} {one['clocks']} ({one['low']} to {one['high']}) {one['binds']}"
                for one in rows
            )
            print(f"{name} {case.name}: {text} [{took}]", flush=True)
            options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
