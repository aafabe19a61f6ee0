"""Kernels that an H200 ran, run again by the simulator from the same PTX; the results must be the same.

Where the ISA defines a result it is compared bit for bit (NaN with NaN); approximations lie within the ISA's
error of the truth, on silicon as in the simulator; what the ISA leaves open is said at the kernel. data/ was
written by tests/recorders/record_silicon.py.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from helpers.suites import long
from silicon.case import arrays, digest, dsl_version, inputs_digest, run_simulated
from silicon.kernels import CASES

from warpspec.sim import BadDescriptor, MemoryFault

DATA = Path(__file__).resolve().parent / "data"
SEEDS = (0, 1)
# Swizzles between those of the other cases of a copy.
LONG = ("tma_load_32b", "tma_load_64b", "tma_load_64b_before_start", "tma_store_32b", "tma_store_64b")


def recorded(case) -> tuple[dict, list[np.ndarray], str]:
    """(about the recording, outputs, PTX) of a case."""
    with np.load(DATA / f"{case.name}.npz") as file:
        outputs = [file[name] for name in sorted(file.files) if name.startswith("output")]
        ptx = zlib.decompress(file["ptx"].tobytes()).decode()
        return json.loads(str(file["about"])), outputs, ptx


def same_object(case, about: dict, ptx: str) -> None:
    """The kernel compiled here is, byte for byte, the PTX that the GPU ran."""
    assert digest(ptx) == about["ptx_sha256"]
    if digest(case.compiled.artifacts.PTX) != about["ptx_sha256"]:
        pytest.fail(
            f"{case.name} compiles to another PTX than recorded: nvidia-cutlass-dsl {dsl_version()} here, "
            f"{about['nvidia-cutlass-dsl']} there. Record again on an H200: "
            f"python tests/recorders/record_silicon.py {case.name}"
        )
    assert inputs_digest(case) == about["inputs_sha256"], "the inputs are not those of the recording"


@pytest.mark.parametrize(
    "case",
    [long(case) if case.name in LONG else case for case in CASES if not case.refused],
    ids=lambda case: case.name,
)
def test_simulator_agrees_with_silicon(case):
    about, want, ptx = recorded(case)
    same_object(case, about, ptx)
    for seed in SEEDS:
        problems = case.judge(run_simulated(case, seed), want, arrays(case.inputs()))
        assert not problems, f"seed {seed}, recorded on {about['gpu']}:\n" + "\n".join(problems)


@pytest.mark.parametrize("case", [case for case in CASES if case.refused], ids=lambda case: case.name)
def test_simulator_refuses_what_silicon_refuses(case):
    about, _, ptx = recorded(case)
    same_object(case, about, ptx)
    assert about["refusal"]
    with pytest.raises((BadDescriptor, MemoryFault)):
        run_simulated(case)


def test_every_recording_has_its_case():
    assert {path.stem for path in DATA.glob("*.npz")} == {case.name for case in CASES}
