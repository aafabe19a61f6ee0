"""Records what a GPU (sm_90) does with tensor copies, as the data of tests/sim/test_tma_silicon.py.

    python tests/recorders/record_tma.py cases CASES.json            # here: writes the cases
    python tests/recorders/record_tma.py run CASES.json OUT.json     # on the GPU: needs its driver and numpy

Each case is one tensor map, encoded by the driver (cuTensorMapEncodeTiled), and one copy made with it by a
kernel of tma_kernels.py. OUT.json holds the cases, the driver's bytes or its refusal, and the digest of
what the copy wrote or the device's error. With --dumps DIR the changed bytes themselves are kept too.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import itertools
import json
import random
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import tma_kernels
from tma_kernels import BULK_BYTES, DUMP_BYTES, MEMORY_BYTES, RECORDED_ADDRESS, pattern

DRIVER_TYPES = (
    *("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32.ftz", "tf32", "tf32.ftz"),
    *("b4x16", "b4x16_p64", "b6x16_p32"),
)
DRIVER_SWIZZLE = {(0, 0): 0, (1, 0): 1, (2, 0): 2, (3, 0): 3, (3, 1): 4, (3, 2): 5, (3, 3): 6}
CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


def make_cases() -> list[dict]:
    """Loads of every rank, swizzle and type; stores; reductions; encodings that the driver may refuse."""
    from warpspec.sim.tma import copy

    def case(operation: str, t, coords, offset: int = 0, memory: str = "bytes") -> dict:
        fields = {name: getattr(t, name) for name in type(t).__dataclass_fields__}
        fields |= {"element": t.element.name, "address": t.address - tma_model().BASE}
        named = {"operation": operation, "map": fields, "coords": list(coords), "offset": offset}
        return {**named, "memory": memory, "expected": copy.transfer_bytes(t)}

    recorded = (drawn_copies(), reductions(), ties(), short_tensors())
    cases = [case(*each) for each in itertools.chain(*recorded)]
    for name in tma_kernels.BULK:
        for memory in ("bytes", "ties" if "f32" in name else "subnormal halves"):
            cases.append({"operation": f"bulk_{name}", "memory": memory})
    return cases + [case(*each) for each in itertools.chain(refused_by_the_device(), odd_encodings())]


@functools.cache
def tma_model():
    """The tests' helpers of this name, which the machine with the GPU need not have."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from helpers import tma_model

    return tma_model


def drawn_copies():
    """Loads and stores of drawn maps: every rank, swizzle and type of whole bytes."""
    from warpspec.sim.tma import Swizzle, SwizzleAtomicity, copy
    from warpspec.sim.tma.descriptor import ELEMENT_TYPES

    swizzles = (Swizzle.NONE, Swizzle.BYTES_32, Swizzle.BYTES_64, Swizzle.BYTES_128)
    plain = [e for e in ELEMENT_TYPES if e.bits >= 8]
    model = tma_model()
    for number in range(260):
        rng = random.Random(number)
        rank, swizzle = 1 + number % 5, swizzles[number // 5 % 4]
        operation = "store" if number % 4 == 3 else "load"
        offset = 128 * rng.randint(0, 16)
        while True:
            element = plain[number % len(plain)]
            t = model.random_map(rng, rank, swizzle, SwizzleAtomicity.BYTES_16, element=element)
            if copy.shared_bytes(t) + offset <= DUMP_BYTES:
                break
        low = 0 if operation == "store" else -4
        yield operation, t, model.random_coordinates(rng, t, low=low), offset


def reductions():
    """Every reduction of every type; of floating types with ties or subnormal numbers, too."""
    from warpspec.sim.tma import Swizzle, TensorMap
    from warpspec.sim.tma.descriptor import ELEMENT_BY_NAME

    types = [
        ("add", "u32 s32 u64 f16 bf16 f32 f32.ftz f64 tf32 tf32.ftz"),
        ("min", "u32 s32 u64 s64 f16 bf16"),
        ("max", "u32 s32 u64 s64 f16 bf16"),
        *((name, "u32 s32 u64") for name in ("and", "or", "xor")),
        ("inc", "u32"),
        ("dec", "u32"),
    ]
    for operation, name in ((operation, name) for operation, names in types for name in names.split()):
        element = ELEMENT_BY_NAME[name]
        width = 1024 // element.bits
        dims, strides = (width * 3 // 2, 70), (width * 2 * element.bits // 8,)
        shape = (dims, strides, (width, 64), (1, 1))
        t = TensorMap(tma_model().BASE, element, *shape, swizzle=Swizzle.BYTES_128, l2_promotion=0)
        for memory in ("bytes", "ties" if element.bits == 32 else "subnormal halves"):
            if memory == "bytes" or element.nan:
                yield operation, t, (128 // element.bits, 10), 0, memory


def ties():
    """Copies of numbers half-way between two of tf32."""
    from warpspec.sim.tma import TensorMap
    from warpspec.sim.tma.descriptor import ELEMENT_BY_NAME

    for name in ("f32", "f32.ftz", "tf32", "tf32.ftz"):
        t = TensorMap(tma_model().BASE, ELEMENT_BY_NAME[name], (512, 8), (2048,), (256, 8), (1, 1))
        yield "load", t, (4, 0), 0, "ties"
        yield "store", t, (4, 0), 0, "ties"


def short_tensors():
    """Tensors that end within 16 bytes."""
    from warpspec.sim.tma import TensorMap
    from warpspec.sim.tma.descriptor import ELEMENT_BY_NAME

    for name, dim in (("u8", 21), ("u16", 9), ("f16", 9), ("u32", 5), ("u64", 3), ("f32", 6), ("bf16", 17)):
        element = ELEMENT_BY_NAME[name]
        for nan_fill in (False, True) if element.nan is not None else (False,):
            shape = ((dim, 4), (64,), (256 // element.bits, 2), (1, 1))
            t = TensorMap(tma_model().BASE, element, *shape, nan_fill=nan_fill)
            yield "store", t, (0, 1)
            yield "load", t, (0, 1)


def refused_by_the_device():
    """A load that works, then copies that the device refuses."""
    from dataclasses import replace

    from warpspec.sim.tma import Swizzle
    from warpspec.sim.tma.descriptor import ELEMENT_BY_NAME

    v = tma_model().valid_map()
    yield "load", v, (4, 0)
    yield "load", replace(v, swizzle=Swizzle.NONE), (8, 0), 64
    yield "store", v, (0, -1)
    yield "store", v, (-8, 0)
    yield "min", replace(v, element=ELEMENT_BY_NAME["f32"], box=(32, 8)), (0, 0)
    yield "add", replace(v, element=ELEMENT_BY_NAME["u16"]), (0, 0)
    yield "add", replace(v, element=ELEMENT_BY_NAME["s64"], box=(16, 8)), (0, 0)
    yield "and", replace(v, element=ELEMENT_BY_NAME["s64"], box=(16, 8)), (0, 0)


def odd_encodings():
    """Maps that the driver may refuse to encode."""
    from dataclasses import replace

    from warpspec.sim.tma import SwizzleAtomicity
    from warpspec.sim.tma.descriptor import ELEMENT_BY_NAME

    v = tma_model().valid_map()
    odd = [
        replace(v, box=(128, 8)),
        replace(v, box=(60, 8)),
        replace(v, box=(64, 257)),
        replace(v, element_strides=(1, 9)),
        replace(v, element_strides=(2, 1)),
        replace(v, address=v.address + 8),
        replace(v, strides=(136,)),
        replace(v, strides=(0,)),
        replace(v, strides=(64,)),
        replace(v, strides=(1 << 40,)),
        replace(v, dims=(64, 1 << 32)),
        replace(v, dims=(64, 0)),
        replace(v, element=ELEMENT_BY_NAME["u16"], nan_fill=True),
        *(replace(v, atomicity=a) for a in SwizzleAtomicity if a),
        replace(v, element=ELEMENT_BY_NAME["b4x16"], dims=(128, 64)),
        replace(v, element=ELEMENT_BY_NAME["b4x16_p64"], dims=(128, 64), box=(128, 8)),
        replace(v, element=ELEMENT_BY_NAME["b6x16_p32"], dims=(128, 64), box=(128, 8)),
    ]
    for t in odd:
        yield "encode", t, (0, 0)


class Gpu:
    """The CUDA driver through ctypes."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.check(self.cuda.cuInit(0))
        device, context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.cuda.cuDeviceGet(ctypes.byref(device), 0))
        self.check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        self.check(self.cuda.cuCtxSetCurrent(context))
        text = tma_kernels.module().encode() + b"\0"
        self.check(self.cuda.cuModuleLoadData(ctypes.byref(module), text))
        self.module = module
        self.memory = self.allocate(MEMORY_BYTES)
        self.buffer = self.allocate(DUMP_BYTES + tma_kernels.STATUS_BYTES)

    def check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"CUDA driver error {status}")

    def allocate(self, nbytes: int) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        self.check(self.cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes)))
        return address

    def put(self, address: ctypes.c_uint64, data: np.ndarray) -> None:
        source = data.ctypes.data_as(ctypes.c_void_p)
        self.check(self.cuda.cuMemcpyHtoD_v2(address, source, ctypes.c_size_t(data.nbytes)))

    def get(self, address: ctypes.c_uint64, nbytes: int) -> np.ndarray:
        data = np.empty(nbytes, np.uint8)
        target = data.ctypes.data_as(ctypes.c_void_p)
        self.check(self.cuda.cuMemcpyDtoH_v2(target, address, ctypes.c_size_t(nbytes)))
        return data

    def encode(self, fields: dict, address: int) -> tuple[int, bytes]:
        """(driver status, 128 bytes)."""
        raw = (ctypes.c_uint8 * 256)()
        at = -ctypes.addressof(raw) % 64
        rank = len(fields["dims"])

        def u64(values):
            return (ctypes.c_uint64 * max(len(values), 1))(*values)

        def u32(values):
            return (ctypes.c_uint32 * len(values))(*values)

        status = self.cuda.cuTensorMapEncodeTiled(
            ctypes.c_void_p(ctypes.addressof(raw) + at),
            DRIVER_TYPES.index(fields["element"]),
            rank,
            ctypes.c_void_p(address),
            u64(fields["dims"]),
            u64(fields["strides"]),
            u32(fields["box"]),
            u32(fields["element_strides"]),
            fields["interleave"],
            DRIVER_SWIZZLE[fields["swizzle"], fields["atomicity"]],
            fields["l2_promotion"],
            int(fields["nan_fill"]),
        )
        return status, bytes(raw[at : at + 128])

    def launch(self, name: str, shared: int, *params) -> None:
        function = ctypes.c_void_p()
        self.check(self.cuda.cuModuleGetFunction(ctypes.byref(function), self.module, name.encode()))
        self.check(
            self.cuda.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        )
        pointers = (ctypes.c_void_p * len(params))(*(ctypes.addressof(p) for p in params))
        size = (1, 1, 1, tma_kernels.THREADS, 1, 1)
        self.check(self.cuda.cuLaunchKernel(function, *size, shared, None, pointers, None))
        self.check(self.cuda.cuCtxSynchronize())


def run_bulk(gpu: Gpu, case: dict) -> tuple[dict, np.ndarray]:
    """A bulk reduction of BULK_BYTES into the start of the memory."""
    before = pattern(MEMORY_BYTES, 1, case["memory"])
    gpu.put(gpu.memory, before)
    gpu.put(gpu.buffer, pattern(DUMP_BYTES, 2, case["memory"]))
    gpu.launch(case["operation"], DUMP_BYTES, gpu.memory, gpu.buffer, ctypes.c_uint32(BULK_BYTES))
    result = gpu.get(gpu.memory, MEMORY_BYTES)
    return {**case, "digest": hashlib.sha256(result.tobytes()).hexdigest()}, result ^ before


class Map(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint8 * 128),)


def run_case(gpu: Gpu, case: dict) -> tuple[dict, np.ndarray | None]:
    """Adds what the driver and the device answered to a case; also the bytes written."""
    u32 = ctypes.c_uint32
    if case["operation"].startswith("bulk_"):
        return run_bulk(gpu, case)
    fields = case["map"]
    status, _ = gpu.encode(fields, gpu.memory.value + fields["address"])
    if status:
        return {**case, "encode_status": status}, None
    # Encoded at a fixed address too, so that the recorded bytes do not depend on where the GPU's memory lies.
    # The second half is the driver's own notes.
    descriptor = gpu.encode(fields, RECORDED_ADDRESS + fields["address"])[1][:64]
    answer = {**case, "descriptor": descriptor.hex()}
    if case["operation"] == "encode":
        return answer, None
    encoded = Map((ctypes.c_uint8 * 128)(*gpu.encode(fields, gpu.memory.value + fields["address"])[1]))
    coords = (ctypes.c_int32 * 5)(*case["coords"])
    before = pattern(MEMORY_BYTES, 1, case["memory"])
    gpu.put(gpu.memory, before)
    rank, shared = len(fields["dims"]), DUMP_BYTES + tma_kernels.RESERVED
    offset, dump = u32(case["offset"]), u32(DUMP_BYTES)
    if case["operation"] == "load":
        gpu.launch(f"load_{rank}", shared, encoded, coords, offset, u32(case["expected"]), gpu.buffer, dump)
        out = gpu.get(gpu.buffer, DUMP_BYTES + tma_kernels.STATUS_BYTES)
        if not out[0]:
            answer["arrived"] = 0
        result = changed = out[tma_kernels.STATUS_BYTES :]
    else:
        gpu.put(gpu.buffer, pattern(DUMP_BYTES, 2, case["memory"]))
        gpu.launch(f"{case['operation']}_{rank}", shared, encoded, coords, offset, gpu.buffer, dump)
        result = gpu.get(gpu.memory, MEMORY_BYTES)
        changed = result ^ before
    answer["digest"] = hashlib.sha256(result.tobytes()).hexdigest()
    return answer, changed


def record(cases: list[dict], start: int, dumps: Path | None) -> None:
    """Run cases from `start` on and print an answer a line; ends after the first error of the device."""
    gpu = Gpu()
    for number, case in enumerate(cases[start:], start):
        try:
            answer, changed = run_case(gpu, case)
        except RuntimeError as error:
            print(json.dumps({**case, "device_error": str(error)}, separators=(",", ":")), flush=True)
            return
        print(json.dumps(answer, separators=(",", ":")), flush=True)
        if dumps and changed is not None:
            (dumps / f"{number}.z").write_bytes(zlib.compress(changed.tobytes()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Record tensor copies of a GPU.")
    parser.add_argument("step", choices=("cases", "run", "from"))
    parser.add_argument("cases", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--dumps", type=Path, help="keep the changed bytes in this folder")
    arguments = parser.parse_args()
    if arguments.step == "cases":
        arguments.cases.write_text(json.dumps(make_cases()))
        return
    cases = json.loads(arguments.cases.read_text())
    if arguments.step == "from":
        record(cases, arguments.start, arguments.dumps)
        return
    answers: list[str] = []
    while len(answers) < len(cases):  # an error of the device ends a process
        command = [sys.executable, __file__, "from", str(arguments.cases), "--start", str(len(answers))]
        command += ["--dumps", str(arguments.dumps)] if arguments.dumps else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        answers += done.stdout.splitlines()
    arguments.out.write_text("[\n" + ",\n".join(answers) + "\n]\n")
    print(f"{len(answers)} cases, {sum('digest' in a for a in answers)} copies")


if __name__ == "__main__":
    main()
