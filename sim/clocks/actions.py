"""The effects of system instructions in a replay: kinds, clocks that they hold their warps, and clocks of units."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from warpspec.sim.clocks.constants import Chip
from warpspec.sim.clocks.costs import memory_bytes
from warpspec.sim.instruction import Imm, Instr, Vec
from warpspec.sim.tcgen05 import transfer

WARP = 32
K_BYTES = 32  # bytes of a row that one wgmma reads, for every type
WGMMA_M = 64


class Kind(Enum):
    """The kinds of instructions that a replay distinguishes."""

    PLAIN = auto()  # it only takes time
    SIGNAL = auto()  # contributes to events
    BARRIER = auto()  # contributes to an event and, unless it only arrives, waits for it
    WAIT = auto()  # for an mbarrier
    WGMMA = auto()
    WGMMA_COMMIT = auto()
    WGMMA_WAIT = auto()
    LOAD = auto()  # by TMA
    STORE = auto()
    STORE_COMMIT = auto()
    STORE_WAIT = auto()
    COPY = auto()  # cp.async
    COPY_COMMIT = auto()
    COPY_WAIT = auto()
    TENSOR_MMA = auto()
    TENSOR_COMMIT = auto()
    TENSOR_COPY = auto()
    TENSOR_TRANSFER = auto()
    TENSOR_WAIT = auto()
    MEMORY = auto()  # global memory, by lanes


@dataclass(frozen=True, slots=True)
class Action:
    """kind; issue: clocks that the warp spends; latency: clocks until others see it; busy: clocks of its unit; shared:
    clocks of shared memory. count: groups that may stay pending, bytes, or columns; reads: whether its result comes
    back; for a barrier, whether it is one of a CTA's threads. adds: whether a store adds."""

    kind: Kind
    issue: float = 1.0
    latency: float = 0.0
    busy: float = 0.0
    shared: float = 0.0
    count: int = 0
    reads: bool = False
    adds: bool = False


def action_of(ins: Instr, chip: Chip) -> Action:
    """The action of an instruction; PLAIN, with the default issue time, if nothing else is known."""
    parts = ins.parts
    family = parts[0]
    find = {
        "mbarrier": _mbarrier,
        "bar": _barrier,
        "barrier": _barrier,
        "wgmma": _wgmma,
        "cp": _copy,
        "tcgen05": _tcgen05,
    }.get(family)
    if find is not None:
        return find(ins, chip)
    if family in ("st", "red") and "async" in parts:
        return Action(Kind.SIGNAL, 4.0, chip.clocks("remote_latency"))
    if family in ("atom", "red", "ld", "st") and not any(part.startswith("shared") for part in parts):
        reads = family in ("atom", "ld")
        return Action(Kind.MEMORY, 4.0, count=memory_bytes(ins), reads=reads, adds=family == "red")
    if family in ("ldmatrix", "stmatrix"):
        count = next((int(part[1:]) for part in parts if part[0] == "x" and part[1:].isdigit()), 1)
        clocks = count * WARP * 4 / chip.clocks("shared_bytes")
        return Action(Kind.PLAIN, 2 * clocks, shared=clocks)
    if family == "mma":
        return Action(Kind.PLAIN, chip.clocks("mma_sync"))
    if family == "fence":
        return Action(Kind.PLAIN, chip.clocks("fence"))
    if family == "setmaxnreg":
        return Action(Kind.PLAIN, chip.clocks("setmaxnreg"))
    return Action(Kind.PLAIN, 2.0)


def _last_number(ins: Instr) -> int:
    last = ins.operands[-1] if ins.operands else None
    return last.value if isinstance(last, Imm) else 0


def _mbarrier(ins: Instr, chip: Chip) -> Action:
    what = ins.parts[1]
    if what in ("try_wait", "test_wait"):
        return Action(Kind.WAIT, chip.clocks("wait_issue"), chip.clocks("wait_passed"))
    if what in ("arrive", "arrive_drop", "complete_tx"):
        remote = "shared::cluster" in ins.parts
        latency = chip.clocks("remote_latency" if remote else "arrive_latency")
        return Action(Kind.SIGNAL, chip.clocks("arrive_issue"), latency)
    return Action(Kind.PLAIN, 2.0)


def _barrier(ins: Instr, chip: Chip) -> Action:
    if "warp" in ins.parts:
        return Action(Kind.PLAIN, chip.clocks("warp_sync"))
    if "cluster" in ins.parts:
        return Action(Kind.BARRIER, 2.0, chip.clocks("cluster_barrier"))
    return Action(Kind.BARRIER, 2.0, chip.clocks("barrier_latency"), reads=True)


def _wgmma(ins: Instr, chip: Chip) -> Action:
    parts = ins.parts
    if "commit_group" in parts:
        return Action(Kind.WGMMA_COMMIT)
    if "wait_group" in parts:
        return Action(Kind.WGMMA_WAIT, count=_last_number(ins))
    if "mma_async" not in parts:
        return Action(Kind.PLAIN, chip.clocks("wgmma_fence"))
    shape = next(part for part in parts if part.startswith("m64n"))
    n = int(shape.removeprefix("m64n").split("k")[0])
    registers = isinstance(ins.operands[1], Vec)
    latency = chip.clocks("wgmma_registers") if registers else 0.0
    issue = max(n / chip.clocks("wgmma_issue_columns") - chip.clocks("wgmma_issue_less"), 1.0)
    reading = wgmma_reads(chip, n, registers)
    return Action(Kind.WGMMA, issue, latency, wgmma_clocks(chip, n, registers), shared=reading)


def wgmma_reads(chip: Chip, n: int, registers: bool) -> float:
    """Clocks of shared memory for the operands of a wgmma."""
    return ((0 if registers else WGMMA_M) + n) * K_BYTES / chip.clocks("shared_bytes")


def wgmma_clocks(chip: Chip, n: int, registers: bool) -> float:
    """Clocks between consecutive wgmmas: multiplying, or reading A and B from shared memory, whichever is longer."""
    multiplying = WGMMA_M * n * K_BYTES / chip.clocks("mma_flops")
    if registers:
        return max(multiplying, chip.clocks("wgmma_least_registers"))
    return max(multiplying, wgmma_reads(chip, n, registers))


def _copy(ins: Instr, chip: Chip) -> Action:
    parts = ins.parts
    if "bulk" in parts:
        if "commit_group" in parts:
            return Action(Kind.STORE_COMMIT)
        if "wait_group" in parts:
            return Action(Kind.STORE_WAIT, count=_last_number(ins), reads="read" in parts)
        if "prefetch" in parts:
            return Action(Kind.PLAIN, chip.clocks("tma_issue"))
        completes = any(part.startswith("mbarrier::complete_tx") for part in parts)
        kind = Kind.LOAD if completes else Kind.STORE
        return Action(kind, chip.clocks("tma_issue"), adds="reduce" in parts)
    if "commit_group" in parts:
        return Action(Kind.COPY_COMMIT)
    if "wait_group" in parts or "wait_all" in parts:
        return Action(Kind.COPY_WAIT, count=_last_number(ins) if "wait_group" in parts else 0)
    if "mbarrier" in parts:
        return Action(Kind.SIGNAL, chip.clocks("arrive_issue"), chip.clocks("arrive_latency"))
    return Action(Kind.COPY, 4.0)


def _tcgen05(ins: Instr, chip: Chip) -> Action:
    what = ins.parts[1]
    if what == "mma":
        return Action(Kind.TENSOR_MMA, chip.clocks("mma_issue"))
    if what == "commit":
        return Action(Kind.TENSOR_COMMIT, chip.clocks("mma_issue"))
    if what == "cp":
        return Action(Kind.TENSOR_COPY, chip.clocks("mma_issue"), count=128)
    if what in ("ld", "st"):
        shape = next((part for part in ins.parts if part in transfer.REGISTERS_PER_REPEAT), "")
        repeat = next((int(part[1:]) for part in ins.parts if part[0] == "x" and part[1:].isdigit()), 1)
        registers = transfer.REGISTERS_PER_REPEAT.get(shape, 1) * repeat
        return Action(Kind.TENSOR_TRANSFER, 2.0, count=registers * WARP * 4, reads=what == "ld")
    if what.startswith("wait"):
        return Action(Kind.TENSOR_WAIT)
    return Action(Kind.PLAIN, 2.0)
