"""NVFP4 keys and values in kernels, in the simulator, against FP32 on dequantised values."""

from dataclasses import replace

import pytest
import torch
from helpers.float8_cases import NVFP4, Case, check
from helpers.suites import long

from warpspec import sim
from warpspec.common.launch import simulating
from warpspec.fmha import attention

FP16 = torch.float16
PAGED = Case(
    1, 150, (16, 2), batch=2, page=16, lengths=(150, 33), scale="request", swizzled=True, by_head=True
)
CASES = [
    Case(1, 70, (4, 1), 64, page=16, lengths=(68,), swizzled=True),
    long(PAGED),
    long(Case(1, 4100, (8, 1), swizzled=True)),  # a CTA for each SM
    long(Case(70, 140, (2, 1), 64, dtype=FP16, window=(90, 0), sink=True, nan=True, swizzled=True)),
    long(Case(1, 300, (16, 2), 64, batch=2, lengths=(300, 17), splits=2, scale="tensor")),
    long(Case(1, 200, (8, 1), 256, dtype=FP16, scale=None, swizzled=True)),
    long(Case(130, 260, (2, 1), 128, causal=True, nan=True)),
    long(Case(70, 140, (2, 1), 256, causal=True)),
    long(Case(3, 200, (8, 2), 128, dtype=FP16, causal=True, shared=True)),
    long(Case(2, 200, (8, 2), 128, normalize=False, page=64, lengths=(190,))),
    long(Case(4, 300, (4, 1), 64, causal=True, nan=True)),
    long(Case(3, 200, (32, 2), 128, batch=2, page=16, lengths=(200, 33))),
]


BLACKWELL = [
    Case(70, 140, (2, 1), 64, window=(90, 0), sink=True, nan=True, swizzled=True),
    *(long(*case.values) if hasattr(case, "values") else long(case) for case in CASES),
]


def run(arguments, arch="sm_90a"):
    with simulating(arch, seed=1):
        results = attention(**arguments, return_lse=arguments["normalize"], backend="sim")
    assert all(each.local_bytes == 0 for each in sim.last_report().launches)
    return results


@pytest.mark.parametrize("case", CASES)
def test_against_reference(case):
    check(replace(case, float8=NVFP4), run)


@pytest.mark.parametrize("case", BLACKWELL)
def test_against_reference_on_blackwell(case):
    check(replace(case, float8=NVFP4), lambda arguments: run(arguments, "sm_100a"))


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("case", [PAGED, Case(130, 260, (2, 1), 128, causal=True)])
def test_order_is_clean(case, arch, check_order):
    check(replace(case, float8=NVFP4), lambda arguments: run(arguments, arch))
