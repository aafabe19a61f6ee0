"""Warps, CTAs and clusters: the state that instructions read and write."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple, Protocol

import numpy as np

from warpspec.sim.codegen.layout import Ctx
from warpspec.sim.codegen.program import Program
from warpspec.sim.errors import RegisterHazard, UnsupportedInstruction
from warpspec.sim.instruction import Imm, Mem, Not, Operand, Reg, Sym, Vec
from warpspec.sim.lanes import FULL_MASK, WARP_SIZE, lanes
from warpspec.sim.memory import CTA_RANK_SHIFT, in_shared_window
from warpspec.sim.names import StorageNames
from warpspec.sim.operation import Wait
from warpspec.sim.register_memory import POISON, RegisterMemory
from warpspec.sim.tcgen05.memory import Tmem

LANE_NUMBERS = np.arange(WARP_SIZE, dtype=np.uint32)
_DTYPE = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
BLOCK_OF = attrgetter("block")


class InFlight(NamedTuple):
    """Registers (a bitset) that are filled later; see `Warp.in_flight`."""

    bits: int
    fill: Callable[[], None]
    owner: object
    moved_only: str


class Group:
    """Lanes of a warp that are at the same place. `block` is a block index; `wait` is set while they are blocked."""

    __slots__ = ("block", "converge", "mask", "since", "timed_out", "wait")

    def __init__(self, block: int, mask: int):
        self.block = block
        self.mask = mask
        self.wait: Wait | None = None
        self.converge = False  # at a collective instruction, waiting for its other lanes
        self.timed_out: Wait | None = None  # the bounded wait that it was released from without its event
        self.since = 0  # clock at which the wait began

    @property
    def free(self) -> bool:
        """Whether it can run."""
        return self.wait is None and not self.converge


class ThreadBarrier(Protocol):
    """A barrier that expects threads: the machine tells it when some leave the kernel."""

    def threads_left(self, m, w: Warp, count: int) -> None:
        """`count` threads of a warp have exited."""


class Cta:
    """A thread block: shared memory, tensor memory, barriers, warps."""

    def __init__(
        self,
        cluster: Cluster,
        rank: int,
        coords: tuple[int, int, int],
        number: int,
        smem: np.ndarray,
        names: StorageNames | None = None,
    ):
        self.cluster = cluster
        self.rank = rank
        self.coords = coords
        self.number = number  # linear index in the grid
        self.smem = smem
        self.smem_words = memoryview(smem[: smem.size // 8 * 8]).cast("Q")
        self.names = names or StorageNames()  # names of fields in its shared memory
        self.warps: list[Warp] = []
        self.order = None  # what the order checker keeps of it
        self.spare_registers = [0]  # given up by its warps
        self.live_warps = 0
        self.pending = 0  # asynchronous operations that its warps issued and that have not taken effect
        self.mbarriers: dict[int, object] = {}
        self.warpgroups: dict[int, object] = {}  # owned by the wgmma family
        self.named_barriers: dict[int, ThreadBarrier] = {}
        self._tmem: Tmem | None = None
        self.spare_tmem: list[np.ndarray] = []  # tensor memories that nothing uses

    @property
    def tmem(self) -> Tmem:
        if self._tmem is None:
            self._tmem = Tmem(self.spare_tmem.pop() if self.spare_tmem else None)
        return self._tmem

    def retire(self) -> None:
        """End the warp with its cluster: drop references, cut reference cycles, and return its tensor memory."""
        if self._tmem is not None:
            self.spare_tmem.append(self._tmem.data)
            self._tmem = None
        for w in self.warps:
            w.flying.clear()
        self.warps.clear()
        self.mbarriers.clear()
        self.warpgroups.clear()
        self.named_barriers.clear()

    @property
    def exited(self) -> bool:
        """Whether its shared memory is gone: all warps have exited and nothing they issued is outstanding."""
        return self.live_warps == 0 and self.pending == 0

    @property
    def uses_tmem(self) -> bool:
        return self._tmem is not None


class Cluster:
    """CTAs that are scheduled together and reach each other's shared memory."""

    def __init__(self, number: int, shape: tuple[int, int, int]):
        self.number = number
        self.shape = shape
        self.ctas: list[Cta] = []
        self.smem_table: np.ndarray | None = None
        self.live_ctas = 0
        self.barrier: ThreadBarrier | None = None  # state of barrier.cluster, owned by its family


class Warp:
    """A warp: register file, context of the native code, groups of lanes.

    memory: of its registers, which another warp of the program may have had before; None: new.
    Operand access for handlers: `u32`, `u64`, `u16`, `pred`, `scalar`, `address`, `read_vec` read;
    `set_u32`, `set_u64`, `set_pred`, `write_vec` write the lanes of a mask.
    """

    def __init__(
        self,
        program: Program,
        symbol_addresses: np.ndarray,
        cta: Cta,
        index: int,
        threads: int,
        special: dict[str, object],
        memory: RegisterMemory | None = None,
    ):
        self.program = program
        self.symbol_addresses = symbol_addresses
        self.cta = cta
        self.index = index
        registers = self.program.registers
        self._offset, self._bits = registers.offset, registers.bits
        self.memory = memory = memory or RegisterMemory(registers)
        self.regs, self._homes = memory.regs, memory.homes
        if program.unwritten is None:
            self._homes.fill(POISON)
        else:
            for place in program.unwritten:
                self._homes[place] = POISON
        self._u8, self._u16, self._u32, self._u64 = memory.regs, memory.u16, memory.u32, memory.u64
        self._rows, self._bytes, self._words = memory.rows, memory.bytes, memory.words
        self._lanes = memory.lanes
        self.ctx = np.zeros(Ctx.COUNT, np.uint64)
        self.context = memoryview(self.ctx)  # the same, read faster
        self.ctx_ptr = self.ctx.ctypes.data
        self.alive = (1 << threads) - 1
        self.groups = [Group(0, self.alive)]
        self.current = self.groups[0]
        self.ready = True
        self.trace: list | None = None  # where what it does is recorded (clocks/record.py)
        self.order = None  # its clock, where a checker of memory order keeps one
        self.local: np.ndarray | None = None  # uint8, local memory of its 32 lanes one after the other
        self.diverged_turns = 0  # its last turns in a row in which lanes could run apart
        self.diverged_states: set[int] = set()  # states at its last turns in which lanes could run apart
        self.flying: list[InFlight] = []
        self.state: dict[str, object] = {}  # per-warp state of instruction families
        for name, value in special.items():
            self._preset(name, value)

    def _preset(self, name: str, value) -> None:
        bits = self._bits[name]
        if bits == 1:
            self._u32[self._offset[name] // 4] = FULL_MASK if value else 0
        else:
            self._view(name)[:] = value

    # ---- operands ---------------------------------------------------------------------------------------------

    def bits(self, reg: Reg) -> int:
        return self._bits[reg.name]

    def _view(self, name: str) -> np.ndarray:
        """The 32 lanes of a register of 8 bits or more, in place. 128-bit registers: [32, 2] uint64."""
        bits, at = self._bits[name], self._offset[name]
        if bits == 32:
            return self._u32[at >> 2 : (at >> 2) + 32]
        if bits == 64:
            return self._u64[at >> 3 : (at >> 3) + 32]
        if bits == 16:
            return self._u16[at >> 1 : (at >> 1) + 32]
        if bits == 128:
            return self._u64[at >> 3 : (at >> 3) + 64].reshape(32, 2)
        return self._u8[at : at + 32]

    def values(self, operand: Operand, bits: int) -> np.ndarray:
        """Lane values of a source operand as unsigned integers of the given width."""
        dtype = _DTYPE[bits]
        match operand:
            case Reg(name):
                view = self._view(name)
                return view if view.dtype == dtype else view.astype(dtype)
            case Imm(value, _):
                return np.full(WARP_SIZE, value & ((1 << bits) - 1), dtype)
            case Sym():
                return np.full(WARP_SIZE, self.symbol(operand, bits) & ((1 << bits) - 1), dtype)
            case Vec(items):
                part = bits // len(items)
                total = np.zeros(WARP_SIZE, dtype)
                for position, item in enumerate(items):
                    total |= self.values(item, part).astype(dtype) << dtype(position * part)
                return total
        raise UnsupportedInstruction(f"operand {operand} as a source")

    def u16(self, operand: Operand) -> np.ndarray:
        return self.values(operand, 16)

    def u32(self, operand: Operand) -> np.ndarray:
        return self.values(operand, 32)

    def u64(self, operand: Operand) -> np.ndarray:
        return self.values(operand, 64)

    def symbol(self, operand: Sym, bits: int = 64) -> int:
        """Address of a variable, as PTX code sees it; a parameter's in 32 bits is its offset in the buffer."""
        tables = self.program.tables
        if operand.name in tables.shared:
            return (self.cta.rank << CTA_RANK_SHIFT) + tables.shared[operand.name] + operand.offset
        if operand.name in tables.params:
            base = int(self.ctx[Ctx.PARAMS]) if bits == 64 else 0
            return base + tables.params[operand.name] + operand.offset
        if operand.name in tables.symbols:
            return int(self.symbol_addresses[tables.symbols[operand.name]]) + operand.offset
        if operand.name in tables.local:
            return tables.local[operand.name] + operand.offset
        raise UnsupportedInstruction(f"address of {operand.name}")

    def pred(self, operand: Operand) -> int:
        """A predicate operand as a bitmask over lanes."""
        if type(operand) is Reg:
            return self._words[32][self._offset[operand.name] >> 2]
        if isinstance(operand, Not):
            return self._words[32][self._offset[operand.reg.name] >> 2] ^ FULL_MASK
        if isinstance(operand, Imm):
            return FULL_MASK if operand.value else 0
        raise UnsupportedInstruction(f"predicate operand {operand}")

    def _lanes_of(self, name: str) -> tuple[memoryview, memoryview]:
        """The lanes of a register of 8 to 64 bits as integers, and their bytes."""
        found = self._lanes.get(name)
        if found is None:
            bits, at = self._bits[name], self._offset[name]
            if bits not in self._words:
                raise UnsupportedInstruction(f"operand {Reg(name)} as a scalar")
            first = at * 8 // bits
            lanes_ = self._words[bits][first : first + WARP_SIZE]
            found = self._lanes[name] = lanes_, self._bytes[at : at + WARP_SIZE * bits // 8]
        return found

    def scalar(self, operand: Operand, mask: int) -> int:
        """The operand's unsigned value in the lowest lane of the mask."""
        kind = type(operand)
        if kind is Reg:
            try:
                values = self._lanes[operand.name][0]
            except KeyError:
                values = self._lanes_of(operand.name)[0]
            return values[(mask & -mask).bit_length() - 1]
        if kind is Imm:
            return operand.value
        if kind is Sym:
            return self.symbol(operand)
        if kind is Vec:
            bits = sum(self._bits[i.name] if isinstance(i, Reg) else 32 for i in operand.items)
            return int(self.values(operand, bits)[(mask & -mask).bit_length() - 1])
        raise UnsupportedInstruction(f"operand {operand} as a scalar")

    def uniform(self, operand: Operand, mask: int) -> int | None:
        """The operand's unsigned value if it is the same in all lanes of the mask, else None."""
        one_lane = mask & mask - 1 == 0
        if one_lane or type(operand) is not Reg:
            value = None if isinstance(operand, Vec) and not one_lane else self.scalar(operand, mask)
            return None if value is None else value & (1 << 64) - 1
        values, raw = self._lanes.get(operand.name) or self._lanes_of(operand.name)
        if mask == FULL_MASK:
            text, size = raw.tobytes(), raw.nbytes // WARP_SIZE
            return values[0] if text == text[:size] * WARP_SIZE else None
        first = values[(mask & -mask).bit_length() - 1]
        return first if all(values[lane] == first for lane in lanes(mask)) else None

    def uniform_address(self, operand: Operand, mask: int) -> int | None:
        """The address of a memory operand if it is the same in all lanes of the mask, else None."""
        offset = 0
        if type(operand) is Mem:
            operand, offset = operand.base, operand.offset
        base = self.uniform(operand, mask)
        if base is None or not offset:
            return base
        narrow = type(operand) is Reg and self._bits[operand.name] == 32
        return base + offset & (FULL_MASK if narrow else (1 << 64) - 1)

    def address(self, operand: Operand) -> np.ndarray:
        """Each lane's address of a memory operand, uint64; 32-bit bases wrap at 32 bits."""
        if isinstance(operand, Mem):
            base, offset = operand.base, operand.offset
        else:
            base, offset = operand, 0
        if isinstance(base, Reg) and self._bits[base.name] == 32:
            return ((self._view(base.name) + np.uint32(offset & 0xFFFFFFFF)) & np.uint32(FULL_MASK)).astype(
                np.uint64
            )
        return self.values(base, 64) + np.uint64(offset & 0xFFFFFFFFFFFFFFFF)

    def address_scalar(self, operand: Operand, mask: int) -> int:
        """The address in the lowest lane of the mask."""
        offset = 0
        if type(operand) is Mem:
            operand, offset = operand.base, operand.offset
        address = self.scalar(operand, mask) + offset
        if type(operand) is Reg and self._bits[operand.name] == 32:
            return address & FULL_MASK
        return address & (1 << 64) - 1

    def shared_address(self, operand: Operand, mask: int) -> int:
        """Like address_scalar, for an operand that may be a shared or a generic address; returns the shared one."""
        address = self.address_scalar(operand, mask)
        return address & 0xFFFFFFFF if in_shared_window(address) else address

    def read_vec(self, vec: Operand) -> np.ndarray:
        """A vector of 32-bit registers as uint32 [n, 32], a copy."""
        rows = self.program.vector(vec).rows
        if rows is not None:
            return self._rows[rows].copy() if isinstance(rows, slice) else self._rows[rows]
        items = vec.items if isinstance(vec, Vec) else (vec,)
        return np.stack([self.values(item, 32) for item in items])

    def write_vec(self, vec: Operand, values: np.ndarray, mask: int) -> None:
        """Write uint32 [n, 32] (or what broadcasts to it) to a vector of 32-bit registers in the lanes of the mask."""
        rows = self.program.vector(vec).rows
        if rows is not None and mask == FULL_MASK:
            self._rows[rows] = values
            return
        items = vec.items if isinstance(vec, Vec) else (vec,)
        for item, row in zip(items, np.broadcast_to(values, (len(items), WARP_SIZE)), strict=True):
            if item is not None:
                self._set(item, row, mask)

    def _set(self, reg: Reg | None, values, mask: int) -> None:
        if reg is None:
            return
        view = self._view(reg.name)
        if mask == FULL_MASK:
            view[:] = values
        else:
            chosen = (mask >> LANE_NUMBERS & 1).astype(bool)
            view[chosen] = values[chosen] if isinstance(values, np.ndarray) and values.ndim else values

    def set_u32(self, reg: Reg | None, values, mask: int) -> None:
        self._set(reg, values, mask)

    def set_u64(self, reg: Reg | None, values, mask: int) -> None:
        self._set(reg, values, mask)

    def set_values(self, target: Operand, values: np.ndarray, bits: int, mask: int) -> None:
        """Write unsigned values of the given width to a register (zero-extended) or, piecewise, to a vector of them."""
        if isinstance(target, Vec):
            part = bits // len(target.items)
            for position, item in enumerate(target.items):
                piece = values >> values.dtype.type(position * part) & values.dtype.type((1 << part) - 1)
                self.set_values(item, piece, part, mask)
        elif target is not None:
            self._set(target, values.astype(_DTYPE[self._bits[target.name]]), mask)

    def set_pred(self, reg: Reg | None, bits: int, mask: int) -> None:
        if reg is None:
            return
        words, at = self._words[32], self._offset[reg.name] >> 2
        words[at] = (words[at] & ~mask & FULL_MASK) | (bits & mask)

    def in_flight(
        self, vec: Operand, fill: Callable[[], None], owner: object = None, moved_only: str = ""
    ) -> None:
        """Mark registers as filled later: `fill` runs before the first instruction that touches one of them.

        owner: what `landed` names when it has filled them itself. moved_only: why no instruction but mov may read
        them until then (ptxas, too, follows a result in flight through moves).
        """
        self.flying.append(InFlight(self.program.vector(vec).bits, fill, owner, moved_only))

    def settle(self, touched: int = -1, block: int | None = None) -> None:
        """Fill registers in flight: those in the bitset `touched`, or all. block: the one that touches them."""
        for entry in tuple(self.flying):
            if entry.bits & touched:
                if entry.moved_only and block is not None:
                    self._check_moved_only(entry, touched, block)
                entry.fill()
                if entry in self.flying:
                    self.flying.remove(entry)

    def landed(self, owner: object) -> None:
        """Registers that `owner` was to fill have their values."""
        self.flying = [entry for entry in self.flying if entry.owner is not owner]

    def _check_moved_only(self, entry: InFlight, touched: int, block: int) -> None:
        read = self.program.uses_beyond_moves(block) & touched & entry.bits
        if read:
            name = self.program.live.names(read)[0]
            raise RegisterHazard(f"{name} is read {entry.moved_only}")

    # ---- threads ----------------------------------------------------------------------------------------------

    def state_hash(self) -> int:
        """A hash of where its lanes are, of its registers and of its local memory."""
        groups = tuple((group.block, group.mask) for group in self.groups)
        return hash((groups, self._homes.tobytes(), b"" if self.local is None else self.local.tobytes()))

    def merge(self) -> None:
        """Join groups that have come to the same block and are free to run."""
        groups = self.groups
        if len(groups) < 2:
            return
        if len(groups) == 2:
            first, second = groups
            if first.block < second.block:
                return
            if first.block > second.block:
                groups.reverse()
            elif first.wait is None and second.wait is None:
                first.mask |= second.mask
                first.converge = False
                first.timed_out = first.timed_out and second.timed_out
                groups.pop()
            return
        groups.sort(key=BLOCK_OF)
        last = groups[0]
        merged = [last]
        for group in groups[1:]:
            if group.block == last.block and group.wait is None and last.wait is None:
                last.mask |= group.mask
                last.converge = False
                last.timed_out = last.timed_out and group.timed_out
            else:
                merged.append(group)
                last = group
        self.groups = merged

    def alone(self, group: Group) -> bool:
        """Whether no other group can run."""
        groups = self.groups
        if len(groups) == 2:
            return not groups[groups[0] is group].free
        return not any(other.free for other in groups if other is not group)

    def runnable(self) -> Group | None:
        """The group to run: the one furthest behind that is not blocked; None when all are."""
        for group in self.groups:
            if group.wait is None and not group.converge:
                return group
        return None
