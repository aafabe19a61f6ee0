"""Memory layout of a warp's registers and context, which generated code and Python handlers share."""

from __future__ import annotations

from enum import IntEnum

from warpspec.sim.cfg import CARRY
from warpspec.sim.instruction import Imm, Instr, Kernel, Mem, Not, Pair, Reg, Sym, Vec
from warpspec.sim.lanes import WARP_SIZE

LOG_WORDS = 33  # words of an access: instruction | lanes << 32, then the address in each lane
REGISTER_ALIGN = 64  # bytes: one AVX-512 vector
# A record, of 64-bit words: its function, the next record (0: it is the last of its block), the function's parameters.
FIRST_PARAMETER = 2


class Ctx(IntEnum):
    """Index of each 64-bit field of a warp's context."""

    SMEM_TABLE = 0  # pointer to host addresses of the cluster's shared memories, by CTA rank
    SMEM_SIZE = 1  # bytes addressable in each CTA's shared memory, reserved part included
    CLUSTER_SIZE = 2
    CTA_RANK = 3
    RANGES = 4  # pointer to (low, high, writable) triples of 64-bit words
    RANGE_COUNT = 5
    LOCAL_BASE = 6  # host address of lane 0's local memory
    LOCAL_SIZE = 7  # bytes of local memory a lane
    FAULT_KIND = 8
    FAULT_LANE = 9
    FAULT_ADDRESS = 10
    FAULT_INSTR = 11
    FAULT_SIZE = 12
    TAKEN = 13  # lanes that take a divergent branch
    COUNTERS = 14  # pointer to 64-bit execution counts, one a block
    ALIVE = 15  # lanes that have not exited
    FORCE = 16  # run a collective block although not all live lanes are here
    CLOCK = 17
    PARAMS = 18  # host address of the parameter buffer
    SYMBOLS = 19  # pointer to addresses of module-scope variables
    TARGET = 20  # block that the lanes in TAKEN go to, of a branch with more than one target
    LOG = 21  # pointer to the log of accesses (`LOG_WORDS` 64-bit words an entry), where a program keeps one
    LOG_COUNT = 22  # entries in it
    LOG_LIMIT = 23  # entries from which the trampoline returns
    REGISTERS = 24  # pointer to the warp's register file
    CODE = 25  # pointer to each block's first record
    FLAGS = 26  # pointer to a byte for each block: whether it is collective
    HOOKED_CODE = 27  # the same two for blocks at which the order checker stops
    HOOKED_FLAGS = 28
    COUNT = 29


# The trampoline's second argument: lanes, then from these bits on the first block, the most blocks, whether it runs
# what the order checker stops at.
START_BIT, BUDGET_BIT, HOOKED_BIT = 32, 56, 63


class Fault(IntEnum):
    """Why generated code stopped."""

    NONE = 0
    OUT_OF_BOUNDS = 1
    MISALIGNED = 2
    READ_ONLY = 3
    REMOTE_SHARED = 4  # a shared::cta access with another CTA's address
    TRAP = 5
    BRANCH_INDEX = 6  # brx.idx beyond its list of targets


class Stop(IntEnum):
    """Why the trampoline returned (high half of its result)."""

    PYTHON = 0  # a block without native code
    BUDGET = 1
    DIVERGED = 2
    EXIT = 3
    FAULT = 4
    COLLECTIVE = 5  # a collective block, and not all live lanes are here


SPECIAL_BITS = {"%clock64": 64, "%globaltimer": 64, "%gridid": 64, "%current_graph_exec": 64}
CLOCK_REGISTERS = frozenset(
    {"%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"}
)


def special_bits(name: str) -> int:
    """Width of a special register: 32 but for the 64-bit counters and the %is_explicit_cluster predicate."""
    if name == "%is_explicit_cluster":
        return 1
    return SPECIAL_BITS.get(name, 32)


def registers_of(operand) -> list[str]:
    """Names of all registers an operand mentions."""
    match operand:
        case Reg(name) | Not(Reg(name)):
            return [name]
        case Mem(base, _, coords):
            names = [base.name] if isinstance(base, Reg) else []
            return names + [c.name for c in coords or () if isinstance(c, Reg)]
        case Vec(items):
            return [i.name for i in items if isinstance(i, Reg)]
        case Pair(first, second):
            return [r.name for r in (first, second) if r is not None]
        case Imm() | Sym() | None:
            return []
    return []


class RegisterFile:
    """Widths of a kernel's registers and, for those that need a place in memory, their byte offsets."""

    def __init__(self, kernel: Kernel):
        self.bits: dict[str, int] = {**kernel.registers, CARRY: 32}
        for ins in kernel.instrs:
            for operand in ins.operands:
                for name in registers_of(operand):
                    if name not in self.bits:
                        self.bits[name] = special_bits(name)
        self.special = [
            n for n in self.bits if n not in kernel.registers and n != CARRY and n not in CLOCK_REGISTERS
        ]
        self.offset: dict[str, int] = {}  # offsets of homes
        self.size = 0  # bytes of the homes
        self.end = 0  # bytes with the temporary places after them

    def place(self, homes: list[str]) -> None:
        """Lay out the registers in `homes` and the special ones, widest first, so that each is aligned."""
        for name in sorted([*homes, *self.special], key=lambda n: -self.bits[n]):
            self.offset[name] = self.size
            self.size += register_bytes(self.bits[name])
        self.size = self.end = -(-max(self.size, 1) // REGISTER_ALIGN) * REGISTER_ALIGN


def register_bytes(bits: int) -> int:
    """Bytes a register's 32 lanes take; a predicate is one 32-bit mask."""
    return 4 if bits == 1 else WARP_SIZE * bits // 8


def guard_text(ins: Instr) -> str:
    """The guard in PTX syntax, or '' if there is none."""
    if ins.guard is None:
        return ""
    return f"@{'!' if ins.guard_negated else ''}{ins.guard.name} "
