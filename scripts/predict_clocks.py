"""Predicts the time of the calls that scripts/measure_clocks.py measures, without a GPU.

    python scripts/predict_clocks.py OUT.json [--chips h200 h100] [--only TEXT] [--sample 4]

Each call of ``shared/clock_cases.py`` runs a few clusters of each kernel in the simulator. OUT.json: for each case and
chip its kernels in order with clocks (prediction, low, high), what binds, and the version of the table of constants.
Cases that are there already stay, unless they are among those asked for.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from shared.clock_cases import ClockCase, cases

from warpspec import sim
from warpspec.common.launch import simulating
from warpspec.sim.clocks.answer import clocks_of
from warpspec.sim.clocks.chips import chip, table_digest
from warpspec.sim.clocks.record import captured

SAMPLE = 4


def traces_of(case: ClockCase, sample: int) -> list:
    """The recorded launches of one call, of which preparing its inputs is no part."""
    with simulating("sm_90a"), sim.recording(sample):
        call = case.make("cpu")
        with captured() as traces:
            call()
    return traces


def predicted(traces: list, chips: list[str]) -> dict[str, list[dict]]:
    found = {}
    for name in chips:
        launches = clocks_of(traces, name).launches
        found[name] = [
            {
                "kernel": one.kernel,
                "clocks": round(one.clocks),
                "low": round(one.low),
                "high": round(one.high),
                "binds": one.binding.split(" ")[0],
                "ctas_an_sm": one.ctas_an_sm,
                "waves": round(one.waves, 2),
            }
            for one in launches
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--chips", nargs="+", default=["h200", "h100"])
    parser.add_argument("--only", default="", help="cases whose name or family has this text")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="clusters of each kernel")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = json.loads(options.out.read_text()) if options.out.exists() else {"cases": {}}
    result["constants"] = {name: table_digest(chip(name)) for name in options.chips}
    for case in cases():
        if not case.ours or (options.only not in case.name and options.only not in case.family):
            continue
        began = time.monotonic()
        try:
            traces = traces_of(case, options.sample)
            middle = time.monotonic()
            result["cases"][case.name] = predicted(traces, options.chips)
        except Exception as error:  # one case that fails must not lose the others
            print(f"{case.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        took = f"{middle - began:.1f} s to run, {time.monotonic() - middle:.1f} s to replay"
        first = result["cases"][case.name][options.chips[0]]
        text = "; ".join(
            f"{one['kernel']} {one['clocks']} ({one['low']} to {one['high']}) {one['binds']}" for one in first
        )
        print(f"{case.name}: {text} [{took}]", flush=True)
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
