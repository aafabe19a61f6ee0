"""Tensor copies and bulk reductions against an H200, bit for bit: data recorded by tests/recorders/record_tma.py.

The same PTX (tests/recorders/tma_kernels.py) runs here in the simulator.
"""

import hashlib
import json
import struct
from itertools import groupby
from pathlib import Path

import pytest
import tma_kernels
from tma_kernels import (
    BULK_BYTES,
    DUMP_BYTES,
    MEMORY_BYTES,
    RECORDED_ADDRESS,
    RESERVED,
    STATUS_BYTES,
    pattern,
)

from warpspec.sim import runtime, tma
from warpspec.sim.errors import BadDescriptor, SimError
from warpspec.sim.memory import GlobalMemory
from warpspec.sim.tma import Interleave, Swizzle, SwizzleAtomicity, TensorMap
from warpspec.sim.tma.descriptor import CUTE_DSL_SETS, ELEMENT_BY_NAME

CASES = json.loads((Path(__file__).parent / "data" / "tma_h200.json").read_text())
COPIES = [case for case in CASES if "digest" in case]
REFUSED = [case for case in CASES if "device_error" in case]
TEXT = tma_kernels.module()
SM100_ONLY = ("b4x16", "b4x16_p64", "b6x16_p32")  # an H200's driver refuses them, and atomicities but 16B


def tensor_map(fields: dict, base: int) -> TensorMap:
    """A TensorMap from its recorded fields; addresses count from `base`."""
    lists = {name: tuple(fields[name]) for name in ("dims", "strides", "box", "element_strides")}
    return TensorMap(
        address=base + fields["address"],
        element=ELEMENT_BY_NAME[fields["element"]],
        **lists,
        interleave=Interleave(fields["interleave"]),
        swizzle=Swizzle(fields["swizzle"]),
        atomicity=SwizzleAtomicity(fields["atomicity"]),
        nan_fill=fields["nan_fill"],
        l2_promotion=fields["l2_promotion"],
    )


def run(case: dict, seed: int) -> str:
    """Digest of what the copy writes in the simulator."""
    gmem = GlobalMemory()
    memory = gmem.allocate(MEMORY_BYTES, "memory", data=pattern(MEMORY_BYTES, 1, case["memory"]).tobytes())
    filling = pattern(DUMP_BYTES, 2, case["memory"]).tobytes()
    operation = case["operation"]
    buffer = gmem.allocate(STATUS_BYTES + DUMP_BYTES, "buffer", data=filling)
    if operation.startswith("bulk_"):
        name = operation
        params = struct.pack("<QQI", memory.address, buffer.address, BULK_BYTES)
    else:
        name = f"{operation}_{len(case['map']['dims'])}"
        params = tma.encode(tensor_map(case["map"], memory.address))
        params += struct.pack("<5i", *case["coords"], *[0] * (5 - len(case["coords"])))
        if operation == "load":
            params += struct.pack("<IIIQI", case["offset"], case["expected"], 0, buffer.address, DUMP_BYTES)
        else:
            params += struct.pack("<IQI", case["offset"], buffer.address, DUMP_BYTES)
    runtime.execute(
        TEXT,
        name,
        grid=(1, 1, 1),
        block=(tma_kernels.THREADS, 1, 1),
        dynamic_smem=RESERVED + DUMP_BYTES,
        params=params,
        gmem=gmem,
        seed=seed,
    )
    result = buffer.array[STATUS_BYTES:] if operation == "load" else memory.array
    return hashlib.sha256(result.tobytes()).hexdigest()


def groups() -> list:
    """Copies by operation and element type, to keep the number of tests low."""

    def key(case):
        return case["operation"], case.get("map", {}).get("element", "")

    return [pytest.param(list(g), id=" ".join(k)) for k, g in groupby(sorted(COPIES, key=key), key)]


@pytest.mark.parametrize("cases", groups())
def test_copies_write_what_an_h200_writes(cases):
    for number, case in enumerate(cases):
        assert run(case, seed=number) == case["digest"], case


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["operation"])
def test_what_an_h200_refuses_is_diagnosed(case):
    with pytest.raises(SimError, match=r"boundary|aligned|negative|reduction"):
        run(case, seed=0)


def test_descriptors_equal_the_driver_s():
    checked = 0
    for case in CASES:
        if "descriptor" in case:
            expected = tensor_map(case["map"], RECORDED_ADDRESS)
            recorded = bytes.fromhex(case["descriptor"])
            assert tma.decode(recorded) == expected
            ours = bytearray(tma.encode(expected)[:64])
            ours[8] &= ~CUTE_DSL_SETS
            assert ours == recorded
            checked += 1
    assert checked > 300


def test_what_the_driver_refuses_to_encode_is_a_bad_descriptor():
    refused = [case["map"] for case in CASES if "encode_status" in case]
    shared = [f for f in refused if f["element"] not in SM100_ONLY and not f["atomicity"]]
    assert len(shared) >= 8
    for fields in shared:
        t = tensor_map(fields, RECORDED_ADDRESS)
        with pytest.raises(BadDescriptor):
            tma.descriptor.check(t)
