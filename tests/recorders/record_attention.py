"""Records what an H100 or H200 makes of every case of attention_silicon/cases.py, for test_attention_silicon.py.

python tests/recorders/record_attention.py [--out FILE] [NAME ...]     # on the GPU; NAME: these, the rest stays
python tests/recorders/record_attention.py --stale             # anywhere: cases whose kernel is another by now
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from attention_silicon.cases import CASES

DATA = Path(__file__).resolve().parents[1] / "silicon/attention.npz"
ABOUT = "about"
JOBS = 16  # cases at a time: compiling takes the time


def environment() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "nvidia-cutlass-dsl": importlib.metadata.version("nvidia-cutlass-dsl"),
        "torch": torch.__version__,
    }


def record(name: str) -> tuple[str, dict[str, np.ndarray], dict[str, str]]:
    """(name, results, digests) of a case. RuntimeError where two runs differ."""
    (recorded,) = (case for case in CASES if case.name == name)
    results, again = recorded.run("cuda"), recorded.run("cuda")
    for result, bits in results.items():
        if not np.array_equal(bits, again[result]):
            raise RuntimeError(f"{name}: {result} of two runs on the GPU differs")
    return name, results, {"inputs": recorded.inputs_digest(), "kernel": recorded.kernel_digest()}


def load(path: Path = DATA) -> tuple[dict, dict[str, np.ndarray]]:
    """(about the recording, results by "case/result"); nothing of what was never recorded."""
    if not path.exists():
        return {"cases": {}}, {}
    with np.load(path) as file:
        return json.loads(str(file[ABOUT])), {name: file[name] for name in file.files if name != ABOUT}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--stale", action="store_true", help="list cases whose kernel has changed")
    options = parser.parse_args()
    if unknown := set(options.names) - {case.name for case in CASES}:
        parser.error(f"no case is called {', '.join(sorted(unknown))}")
    if options.stale:
        digests = load()[0]["cases"]
        stale = [
            case.name for case in CASES if case.kernel_digest() != digests.get(case.name, {}).get("kernel")
        ]
        print("\n".join(stale) or "none")
        return int(bool(stale))
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("recording needs a GPU of compute capability 9.0")
    about, arrays = load() if options.names else ({"cases": {}}, {})
    about |= environment()
    names = [case.name for case in CASES if not options.names or case.name in options.names]
    with multiprocessing.get_context("spawn").Pool(min(JOBS, len(names))) as pool:
        for name, results, digests in pool.imap_unordered(record, names):
            about["cases"][name] = digests
            arrays |= {f"{name}/{result}": bits for result, bits in results.items()}
            print(name, flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(options.out, about=np.array(json.dumps(about)), **arrays)
    print(f"{options.out}: {options.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
