"""Records what a GPU (sm_90) makes of every case, as the data of test_silicon.py.

    python tests/recorders/record_silicon.py [--out tests/silicon/data] [case ...]

Compiles each case for sm_90a, runs it on the GPU and writes one .npz: the outputs, a digest of the inputs,
the PTX (compressed) with its digest and the cubin's, and what ran it. Cases that the GPU refuses run in
processes of their own, because their context is lost.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from silicon.case import Case, digest, dsl_version, inputs_digest, run_native
from silicon.kernels import CASES

DATA = Path(__file__).resolve().parents[1] / "silicon/data"


def driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]


def environment() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "nvidia-cutlass-dsl": dsl_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def record_refusal(case: Case, where: dict[str, str], folder: Path) -> int:
    """Write the error with which the GPU stops a case. The context is lost then: the process's last act."""
    try:
        run_native(case)
    except RuntimeError as error:
        return write(case, {**where, "refusal": str(error).splitlines()[0]}, {}, folder)
    raise RuntimeError(f"{case.name}: the GPU did not refuse it")


def record(case: Case, where: dict[str, str], folder: Path) -> int:
    """Run one case and write its file; bytes written."""
    outputs = run_native(case)
    again = run_native(case)
    if any(
        not np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(outputs, again, strict=True)
    ):
        raise RuntimeError(f"{case.name}: two runs on the GPU differ")
    return write(case, where, {f"output{i}": output for i, output in enumerate(outputs)}, folder)


def write(case: Case, about: dict[str, str], outputs: dict[str, np.ndarray], folder: Path) -> int:
    """Write a case's file; its size."""
    ptx = case.compiled.artifacts.PTX
    about = {
        **about,
        "inputs_sha256": inputs_digest(case),
        "ptx_sha256": digest(ptx),
        "cubin_sha256": digest(case.compiled.artifacts.CUBIN),
    }
    path = folder / f"{case.name}.npz"
    np.savez_compressed(
        path,
        about=np.array(json.dumps(about)),
        ptx=np.frombuffer(zlib.compress(ptx.encode(), 9), np.uint8),
        **outputs,
    )
    return path.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DATA, help="folder of the .npz files")
    parser.add_argument("cases", nargs="*", help="names of cases; all of them by default")
    options = parser.parse_args()
    if unknown := set(options.cases) - {case.name for case in CASES}:
        parser.error(f"no case is called {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("recording needs a GPU of compute capability 9.0")
    options.out.mkdir(parents=True, exist_ok=True)
    where = environment()
    print(json.dumps(where))
    total = 0
    for case in CASES:
        if options.cases and case.name not in options.cases:
            continue
        if case.refused and options.cases != [case.name]:
            command = [sys.executable, __file__, "--out", str(options.out), case.name]
            subprocess.run(command, check=True)
            continue
        size = (record_refusal if case.refused else record)(case, where, options.out)
        total += size
        print(f"{case.name}: {size} bytes", flush=True)
    print(f"{total} bytes in all")


if __name__ == "__main__":
    main()
