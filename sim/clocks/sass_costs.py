"""Cost of a SASS instruction: its scheduler's pipe that it takes, and when its results are ready."""

from __future__ import annotations

import re

from warpspec.sim.clocks.constants import Chip
from warpspec.sim.clocks.costs import WARP, Cost, Pipe
from warpspec.sim.clocks.sass import SassInstr

FMA_NAMES = (
    "FFMA",
    "FMUL",
    "FADD",
    "HFMA2",
    "HADD2",
    "HMUL2",
    "IMAD",
    "FFMA32I",
    "FMUL32I",
    "FADD32I",
    "IDP",
    "FSWZADD",
)
PACKED = ("FFMA2", "FADD2", "FMUL2")
DOUBLES = ("DFMA", "DADD", "DMUL", "DSETP", "DMNMX")
MUFU_NAMES = ("MUFU", "I2F", "F2I", "F2F", "POPC", "FLO", "BREV", "REDUX", "FRND", "I2I", "MATCH")
SHARED_NAMES = ("LDS", "STS", "ATOMS", "LDSM", "STSM", "SHFL", "LDL", "STL", "MOVM")
GLOBAL_NAMES = ("LDG", "STG", "ATOMG", "ATOM", "RED", "REDG", "LD", "ST")
ISSUE_NAMES = (
    *(
        "BRA",
        "BRX",
        "BRXU",
        "JMP",
        "EXIT",
        "BSSY",
        "BSYNC",
        "NOP",
        "CALL",
        "RET",
        "WARPSYNC",
        "YIELD",
        "NANOSLEEP",
    ),
    *("DEPBAR", "MEMBAR", "ERRBAR", "CCTL", "FENCE", "PREEXIT", "ACQBULK", "ELECT", "KILL"),
)
WIDTH = re.compile(r"\.(128|64|U16|S16|16|U8|S8|256)\b")
WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "16": 2, "U8": 1, "S8": 1, "256": 32}
VECTOR = re.compile(r"\.B?F(32|16)x(\d)\b")  # of an addition
MATRICES = re.compile(r"\.(4|2)\b")
SPECIAL_LATENCY = 25.0  # S2R, LDC, LDCU: a special register, a constant


def base_name(ins: SassInstr) -> str:
    return ins.name.split(".", 1)[0]


def access_bytes(ins: SassInstr) -> int:
    """Bytes per lane that a load, store or atomic moves."""
    found, vector = WIDTH.search(ins.name), VECTOR.search(ins.name)
    return int(vector[1]) * int(vector[2]) // 8 if vector else WIDTHS[found[1]] if found else 4


def sass_cost(ins: SassInstr, chip: Chip) -> Cost:
    """The cost of an instruction that is not a step of its own. latency: that of results announced by a scoreboard."""
    name = base_name(ins)
    if name in PACKED:
        return Cost(1, Pipe.FMA, chip.clocks("packed_fma") * chip.clocks("fma"))
    if name in FMA_NAMES:
        return Cost(1, Pipe.FMA, chip.clocks("fma"))
    if name in DOUBLES:
        return Cost(1, Pipe.FMA, 16.0)
    if name in MUFU_NAMES:
        latency = 44.0 if name == "REDUX" else chip.clocks("mufu_latency")
        return Cost(1, Pipe.MUFU, chip.clocks("mufu"), latency)
    if name in SHARED_NAMES:
        return _shared(ins, name, chip)
    if name in GLOBAL_NAMES:
        nbytes = access_bytes(ins)
        load = name in ("LDG", "LD", "ATOMG", "ATOM")
        clocks = nbytes * WARP / chip.clocks("shared_bytes")
        adds = name in ("RED", "REDG")
        return Cost(1, Pipe.SHARED, 0.0, 0.0, shared=clocks, global_bytes=nbytes, load=load, adds=adds)
    if name in ISSUE_NAMES or name[0] == "U" or name in ("R2UR", "S2UR", "LDCU"):
        if name in ("FENCE", "MEMBAR"):
            return Cost(1, stall=chip.clocks("fence"))
        return Cost(1, latency=SPECIAL_LATENCY if ins.writes != 7 else 0.0)
    if name in ("S2R", "LDC", "CS2R", "B2R", "R2B"):
        return Cost(1, latency=SPECIAL_LATENCY)
    return Cost(1, Pipe.ALU, chip.clocks("alu"))


def _shared(ins: SassInstr, name: str, chip: Chip) -> Cost:
    if name == "SHFL":
        clocks = WARP * 4 / chip.clocks("shared_bytes")
        return Cost(1, Pipe.SHARED, 0.0, chip.clocks("shuffle_latency"), shared=clocks, shuffles=True)
    nbytes = access_bytes(ins)
    if name in ("LDSM", "STSM", "MOVM"):
        found = MATRICES.search(ins.name)
        nbytes = 4 * (int(found[1]) if found else 1)
    clocks = nbytes * WARP / chip.clocks("shared_bytes")
    return Cost(1, Pipe.SHARED, 0.0, chip.clocks("shared_latency"), shared=clocks)
