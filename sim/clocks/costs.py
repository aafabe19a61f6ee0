"""Cost of a PTX instruction of native code: the scheduler's pipe it takes, for how long, and its latency.

ptxas decides what is really issued. Without its output, the PTX is counted instead, except what never becomes an
instruction: moves between registers, conversions of address spaces, parameters (they are read from a constant bank),
and multiplications that a following addition absorbs are rare enough in optimised PTX to be left.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from warpspec.sim.clocks.constants import Chip
from warpspec.sim.instruction import Imm, Instr, Vec
from warpspec.sim.registry import Control, find

WARP = 32
REGISTER_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


class Pipe(IntEnum):
    """A resource shared by the warps of one scheduler, or, SHARED, by all warps of an SM. TENSOR: the tensor core, by
    wgmma. OPERANDS: shared memory, by what wgmma multiplies, which goes first. BESIDE is none: clocks that code takes
    more while its scheduler's tensor core works.
    """

    ISSUE = 0
    FMA = 1
    ALU = 2
    MUFU = 3
    SHARED = 4
    TENSOR = 5
    OPERANDS = 6
    BESIDE = 7


PIPES = len(Pipe)


@dataclass(frozen=True, slots=True)
class Cost:
    """issue: slots of the scheduler. pipe, busy: the pipe it takes besides, and for how many clocks. latency: clocks
    until its results can be used. shared: clocks of the SM's shared memory. global_bytes: bytes per lane of a load,
    store or atomic; load: whether its results come from global memory; adds: whether it is an addition without result.
    stall: clocks for which the warp issues nothing after it. shuffles: whether it exchanges registers of lanes.
    """

    issue: float = 0.0
    pipe: Pipe = Pipe.ISSUE
    busy: float = 0.0
    latency: float = 0.0
    shared: float = 0.0
    global_bytes: int = 0
    load: bool = False
    stall: float = 0.0
    adds: bool = False
    shuffles: bool = False

    def beside(self, chip: Chip) -> float:
        """Clocks that it takes more while its scheduler's tensor core works."""
        if not chip.has("code_beside_wgmma"):
            return 0.0
        return self.issue * chip.clocks("shuffle_beside_wgmma" if self.shuffles else "code_beside_wgmma")


FREE = Cost()
FMA_NAMES = ("fma", "add", "sub", "mul", "mad")
ALU_NAMES = (
    *(
        "min",
        "max",
        "and",
        "or",
        "xor",
        "not",
        "shl",
        "shr",
        "shf",
        "lop3",
        "prmt",
        "selp",
        "setp",
        "set",
        "slct",
    ),
    *(
        "neg",
        "abs",
        "bfe",
        "bfi",
        "bmsk",
        "sad",
        "szext",
        "testp",
        "copysign",
        "cnot",
        "lea",
        "vote",
        "match",
    ),
)
MUFU_NAMES = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")
FREE_NAMES = (
    "mov",
    "cvta",
    "ld.param",
    "isspacep",
    "griddepcontrol",
    "pragma",
    "nanosleep",
    "discard",
    "createpolicy",
)
FLOATS = ("f32", "f16", "bf16", "f16x2", "bf16x2", "f32x2", "ftz")
DOUBLE_BUSY = 16.0  # clocks of a 64-bit float instruction in a scheduler


def memory_bytes(ins: Instr) -> int:
    """Bytes per lane that a load, store or atomic moves."""
    parts = ins.parts
    digits = "".join(c for c in parts[-1] if c.isdigit()) or "32"
    digits = {"162": "32", "322": "64"}.get(digits, digits)  # f16x2 and f32x2 are read as 162 and 322
    width = REGISTER_BYTES.get(digits, 4)
    count = next((int(part[1:]) for part in parts if part[0] == "v" and part[1:].isdigit()), 1)
    return width * count


def cost_of(ins: Instr, chip: Chip) -> Cost:
    """The cost of an instruction that is native code."""
    parts = ins.parts
    name, kind = parts[0], parts[-1]
    row = find(ins.opcode)
    if row is not None and row.control is not None:
        ends = row.control in (Control.EXIT, Control.TRAP)
        return FREE if ends else Cost(1, latency=0)
    if name in ("ld", "st", "atom", "red", "ldu"):
        return _memory(ins, chip)
    if name in FREE_NAMES or ins.opcode.startswith(FREE_NAMES):
        special = (
            name == "mov" and not isinstance(ins.operands[-1], (Imm, Vec)) and "%" in ins.text.split(",")[-1]
        )
        return _move(ins, chip) if special else FREE
    if name == "fence" or name == "membar":
        return Cost(1, stall=chip.clocks("fence"))
    if name in ("shfl", "ldmatrix", "stmatrix", "movmatrix"):
        return _exchange(ins, chip)
    if name in MUFU_NAMES:
        return Cost(1, Pipe.MUFU, chip.clocks("mufu"), chip.clocks("mufu_latency"))
    if name in ("popc", "clz", "brev", "bfind", "redux", "fns"):
        return Cost(1, Pipe.MUFU, chip.clocks("mufu"), chip.clocks("mufu_latency"))
    if kind == "f64" and name != "mov":
        return Cost(1, Pipe.FMA, DOUBLE_BUSY, chip.clocks("fma_latency") * 4)
    if name == "cvt":
        return _conversion(parts, chip)
    if name in FMA_NAMES and any(part in FLOATS for part in parts):
        packed = "f32x2" in parts
        slots = chip.clocks("packed_fma") if packed else 1.0
        return Cost(1, Pipe.FMA, slots * chip.clocks("fma"), chip.clocks("fma_latency"))
    if name in ("mad", "mul", "div", "rem") or name == "fma":
        wide = 2 if kind.endswith("64") or "wide" in parts else 1
        return Cost(wide, Pipe.FMA, wide * chip.clocks("imad"), chip.clocks("fma_latency"))
    if name in ALU_NAMES or name in ("add", "sub", "addc", "subc"):
        wide = 2 if kind.endswith("64") else 1
        return Cost(wide, Pipe.ALU, wide * chip.clocks("alu"), chip.clocks("alu_latency"))
    return Cost(1, Pipe.ALU, chip.clocks("alu"), chip.clocks("alu_latency"))


def _move(ins: Instr, chip: Chip) -> Cost:
    """A move; from a special register it is a slow, but rare, instruction."""
    if "%tid" in ins.text or "%ctaid" in ins.text or "%laneid" in ins.text:
        return Cost(1, Pipe.ALU, chip.clocks("alu"), chip.clocks("alu_latency"))
    return FREE


def _conversion(parts: tuple[str, ...], chip: Chip) -> Cost:
    target, source = [part for part in parts if part[0] in "fubse" and any(c.isdigit() for c in part)][:2]
    integers = (target[0] in "us", source[0] in "us")
    if all(integers):
        return Cost(0.5, Pipe.ALU, chip.clocks("alu") / 2, chip.clocks("alu_latency"))
    if any(integers) and "64" not in target + source and integers[1]:
        return Cost(1, Pipe.ALU, chip.clocks("alu"), chip.clocks("alu_latency"))
    if any(integers) or "64" in target + source:
        return Cost(1, Pipe.MUFU, chip.clocks("mufu"), chip.clocks("mufu_latency"))
    if target == "f32" and source == "bf16":
        return Cost(1, Pipe.ALU, chip.clocks("alu"), chip.clocks("alu_latency"))
    if target == "f32":
        return Cost(1, Pipe.ALU, chip.clocks("pack"), chip.clocks("alu_latency"))
    return Cost(1, Pipe.ALU, chip.clocks("pack"), chip.clocks("alu_latency"))


def _exchange(ins: Instr, chip: Chip) -> Cost:
    count = next((int(part[1:]) for part in ins.parts if part[0] == "x" and part[1:].isdigit()), 1)
    clocks = count * WARP * 4 / chip.clocks("shared_bytes")
    latency = chip.clocks("shuffle_latency")
    return Cost(1, Pipe.SHARED, 0.0, latency, shared=clocks, shuffles=ins.parts[0] == "shfl")


def _memory(ins: Instr, chip: Chip) -> Cost:
    parts, nbytes = ins.parts, memory_bytes(ins)
    load = parts[0] in ("ld", "atom", "ldu")
    if any(part.startswith("param") for part in parts) or "const" in parts:
        return FREE
    if any(part.startswith("shared") for part in parts):
        clocks = nbytes * WARP / chip.clocks("shared_bytes")
        return Cost(1, Pipe.SHARED, 0.0, chip.clocks("shared_latency") if load else 0.0, shared=clocks)
    if "local" in parts:
        clocks = nbytes * WARP / chip.clocks("shared_bytes")
        return Cost(1, Pipe.SHARED, 0.0, chip.clocks("shared_latency"), shared=clocks)
    clocks = nbytes * WARP / chip.clocks("shared_bytes")
    adds = parts[0] == "red"
    return Cost(1, Pipe.SHARED, 0.0, 0.0, shared=clocks, global_bytes=nbytes, load=load, adds=adds)
