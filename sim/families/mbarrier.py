"""mbarrier objects (PTX ISA 9.7.13.15): init, inval, arrive, expect_tx, complete_tx, test_wait, try_wait.

The state lives beside the shared memory, keyed by its offset; the eight bytes in shared memory hold a marker, so that
a program which overwrites or reuses the location is caught.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from warpspec.sim.errors import BEGINS, EXPECTED, MISSED, BarrierFault, MemoryFault
from warpspec.sim.instruction import Imm, Instr, Mem, Operand, Reg
from warpspec.sim.lanes import WARP_SIZE, lanes
from warpspec.sim.machine import Machine
from warpspec.sim.memory import CTA_RANK_SHIFT
from warpspec.sim.names import placed
from warpspec.sim.operation import Wait
from warpspec.sim.registry import Family, handler
from warpspec.sim.warp import Cta, Warp

MAX_COUNT = (1 << 20) - 1
MAX_TX = (1 << 20) - 1
SIZE = 8  # bytes, and the alignment
OFFSET_MASK = (1 << CTA_RANK_SHIFT) - 1
STATE_PENDING = 32  # bit of a state at which the pending count begins; the phase lies below
# What the arrivals of earlier lanes add to a state.
ARRIVED_BEFORE = np.arange(WARP_SIZE, dtype=np.uint64) << np.uint64(STATE_PENDING)


@dataclass(eq=False)
class Mbarrier:
    """One mbarrier: `pending` arrivals and `tx` bytes outstanding in the current phase, `phase` counts completions."""

    cta: Cta
    offset: int
    count: int
    pending: int
    tx: int = 0
    expected: int = 0  # bytes, by expect_tx of all phases
    phase: int = 0
    arrivals: int = 0  # number in all phases, for reports
    last: tuple | None = field(default=None, repr=False)  # (warp, instruction) of the last arrival
    # Its like, of a wait that passed before any phase ended.
    early: tuple | None = field(default=None, repr=False)
    seen: dict[int, int] = field(default_factory=dict, repr=False)  # by warp: the phase whose end it last saw
    marker: int = field(default=0, repr=False)
    order: object = field(default=None, repr=False)  # what the order checker keeps of it

    def label(self) -> str:
        """The barrier's name in a timeline."""
        return self.cta.names.barrier(self.offset) or f"mbarrier {self.offset:#x}"

    def describe(self, text: str) -> str:
        return (
            f"{text} mbarrier {place(self.cta, self.offset)}: phase {self.phase} "
            f"(parity {self.phase & 1}), {self.pending} of {self.count} arrivals pending, {self._bytes()}"
            f"; {self._history()}"
        )

    def _bytes(self) -> str:
        if self.tx < 0 or (self.tx and not self.pending):
            return self._came()
        return f"{self.tx} bytes pending"

    def _came(self) -> str:
        return f"{self.expected} {EXPECTED}, {self.expected - self.tx} came"

    def at_exit(self) -> list[str]:
        """What is wrong with it when its CTA exits: more bytes came than expect_tx announced, so that phases ended
        before all of theirs had come; or a wait for bytes passed before any could have come."""
        where, texts = place(self.cta, self.offset), []
        if self.tx < 0:
            texts.append(f"expect_tx is too small: mbarrier {where}: {self._came()} (in all phases)")
        if self.early is not None and self.expected:
            texts.append(
                f"a first parity is wrong: mbarrier {where}: a wait for parity 1 passed before any phase had ended, "
                f"although bytes of copies end its phases; who waits for bytes begins with parity 0: "
                f"{_by(*self.early)}"
            )
        return texts

    def _history(self) -> str:
        if self.last is None:
            return "no arrival yet"
        return f"last arrival by {_by(*self.last)}"

    def passed(self, parity: int, w: Warp, ins: Instr) -> None:
        """A wait for a parity has passed."""
        if parity and not self.phase and self.early is None:
            self.early = w, ins
        self.seen[w.index] = self.phase - 1


def _by(w: Warp, ins: Instr) -> str:
    """A text that names the warp that executed an instruction, and the instruction's line."""
    return f"warp {w.index}, {placed(ins.source) or f'PTX line {ins.line}'}"


def place(cta: Cta, offset: int) -> str:
    """A text that locates an mbarrier: its field in the kernel's storage if known, and its offset."""
    name = cta.names.barrier(offset)
    return f"{name + ' ' if name else ''}at shared offset {offset:#x} of CTA {cta.coords}"


def lookup(cta: Cta, offset: int) -> Mbarrier:
    """The mbarrier at an offset of a CTA's shared memory; BarrierFault if none was initialised there."""
    barrier = cta.mbarriers.get(offset)
    if barrier is None:
        name = cta.names.barrier(offset)
        name = f", which is {name}" if name else ""
        raise BarrierFault(
            f"no mbarrier is initialised at shared offset {offset:#x} of CTA {cta.coords}{name}"
        )
    if cta.smem_words[offset // SIZE] != barrier.marker:
        raise BarrierFault(f"the mbarrier {place(cta, offset)} was overwritten")
    return barrier


def initialise(cta: Cta, offset: int, count: int) -> Mbarrier:
    """Make an mbarrier that expects `count` arrivals a phase at an offset of a CTA's shared memory."""
    if not 1 <= count <= MAX_COUNT:
        raise BarrierFault(f"mbarrier.init with count {count}; 1 to {MAX_COUNT} are allowed")
    if offset % SIZE:
        raise MemoryFault(f"mbarrier at shared offset {offset:#x} is not aligned to {SIZE} bytes")
    marker = 0x6D62_6172_0000_0000 | offset
    cta.smem_words[offset // SIZE] = marker
    barrier = cta.mbarriers[offset] = Mbarrier(cta, offset, count, count, marker=marker)
    return barrier


def _complete_if_done(m: Machine, barrier: Mbarrier) -> None:
    if barrier.pending == 0 and barrier.tx == 0:
        barrier.phase += 1
        barrier.pending = barrier.count
        if m.order is not None:
            m.order.phase_ends(barrier)
        m.notify(barrier)


def arrive(m: Machine, cta: Cta, offset: int, count: int = 1, drop: bool = False, *, op=None) -> Mbarrier:
    """Count arrivals; completes the phase when none and no bytes are pending. op: the order checker's operation."""
    barrier = lookup(cta, offset)
    if op is not None:
        m.order.arrive_op(op, barrier)
    _count_down(m, barrier, count, drop)
    return barrier


def _count_down(m: Machine, barrier: Mbarrier, count: int, drop: bool) -> None:
    if count > barrier.pending:
        raise BarrierFault(barrier.describe(f"{count} arrivals are more than are pending at the"))
    if m.recorder is not None:
        m.recorder.signal(barrier)
    barrier.pending -= count
    barrier.arrivals += count
    barrier.last = m.executing
    if drop:
        barrier.count -= count
    m.progress += 1
    if barrier.pending == 0:
        _complete_if_done(m, barrier)


def expect_tx(m: Machine, cta: Cta, offset: int, nbytes: int) -> None:
    """Make the current phase expect that many more bytes."""
    _expect(m, lookup(cta, offset), nbytes)


def _expect(m: Machine, barrier: Mbarrier, nbytes: int) -> None:
    barrier.tx += nbytes
    barrier.expected += nbytes
    if abs(barrier.tx) > MAX_TX:
        raise BarrierFault(barrier.describe(f"the transaction count leaves its range of +-{MAX_TX} at the"))
    m.progress += 1


def complete_tx(m: Machine, cta: Cta, offset: int, nbytes: int, *, op=None) -> None:
    """Count bytes that arrived. Bytes may arrive before they are expected: the phase cannot end before its arrivals.

    op: the order checker's operation.
    """
    barrier = lookup(cta, offset)
    if op is not None:
        m.order.arrive_op(op, barrier)
    if m.recorder is not None:
        m.recorder.signal(barrier, nbytes)
    barrier.tx -= nbytes
    m.progress += 1
    _complete_if_done(m, barrier)


# ---- instructions -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _own_only(parts: tuple[str, ...]) -> bool:
    """Whether the state space is explicitly .shared::cta."""
    return "shared::cluster" not in parts and "shared::cta" in parts


def _common(w: Warp, operand: Operand, mask: int) -> Mbarrier | None:
    """The mbarrier of the executing CTA that all lanes address; None where they address others, or what is none."""
    address = w.uniform_address(operand, mask)
    if address is None:
        return None
    cta, offset = w.cta, address & OFFSET_MASK
    barrier = cta.mbarriers.get(offset)
    if barrier is None or (address & 0xFFFFFFFF) >> CTA_RANK_SHIFT != cta.rank:
        return None
    return barrier if cta.smem_words[offset // SIZE] == barrier.marker else None


def _places(m: Machine, w: Warp, ins: Instr, operand: Operand, mask: int) -> list[tuple[int, Cta, int]]:
    """(lanes as a mask, CTA, offset) for each barrier that the executing lanes address, in order of the first lane."""
    first = w.uniform_address(operand, mask)
    if first is not None:
        groups = {first & 0xFFFFFFFF: mask}
    else:
        groups = {}
        addresses = w.address(operand)
        for lane in lanes(mask):
            address = int(addresses[lane]) & 0xFFFFFFFF
            groups[address] = groups.get(address, 0) | 1 << lane
    own_only = _own_only(ins.parts)
    found = []
    for address, members in groups.items():
        if own_only and address >> CTA_RANK_SHIFT != w.cta.rank:
            raise MemoryFault(f"shared::cta address {address:#x} names CTA rank {address >> CTA_RANK_SHIFT}")
        if address % SIZE:
            raise MemoryFault(f"mbarrier address {address:#x} is not aligned to {SIZE} bytes")
        m.shared(w, address, SIZE)
        cta = w.cta.cluster.ctas[address >> CTA_RANK_SHIFT & 0xFF]
        found.append((members, cta, address & OFFSET_MASK))
    return found


@handler("mbarrier.init", family=Family.MBARRIER, destinations=0)
def mbarrier_init(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """mbarrier.init [addr], count."""
    for members, cta, offset in _places(m, w, ins, ins.operands[0], mask):
        barrier = initialise(cta, offset, w.scalar(ins.operands[1], members))
        if m.order is not None:
            m.order.barrier_init(w, ins, barrier, members)


@handler("mbarrier.inval", family=Family.MBARRIER, destinations=0)
def mbarrier_inval(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """mbarrier.inval frees the place; it is a fault while lanes wait on the mbarrier."""
    for _, cta, offset in _places(m, w, ins, ins.operands[0], mask):
        barrier = lookup(cta, offset)
        if barrier in m.waiters:
            raise BarrierFault(barrier.describe("mbarrier.inval while lanes wait on the"))
        del cta.mbarriers[offset]
        cta.smem[offset : offset + SIZE] = 0xFF


def _returned_states(ins: Instr) -> int:
    """1 for `arrive state, [addr]`; 0 for an arrive that begins with the address."""
    return 0 if isinstance(ins.operands[0], Mem) else 1


@handler("mbarrier.arrive", "mbarrier.arrive_drop", family=Family.MBARRIER, destinations=_returned_states)
def mbarrier_arrive(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """arrive[.expect_tx|.noComplete] [state,] [addr] [, count]; remote arrives return no state (`_` or none).

    The state that arrive returns and test_wait takes is opaque: here the phase and, above it, the arrivals that were
    pending before.
    """
    operands = ins.operands
    returns = _returned_states(ins)
    state = operands[0] if returns else None
    tokens = None
    if state is not None and not w.program.is_ignored(state):
        tokens = np.zeros(WARP_SIZE, np.uint64)
    amounts = operands[returns + 1] if len(operands) > returns + 1 else None
    drop = ins.parts[1] == "arrive_drop"
    expects = "expect_tx" in ins.parts
    barrier = _common(w, operands[returns], mask)
    if barrier is not None:
        _arrive_lanes(m, w, ins, barrier, mask, amounts, tokens, expects, drop)
    else:
        for members, cta, offset in _places(m, w, ins, operands[returns], mask):
            _arrive_lanes(m, w, ins, lookup(cta, offset), members, amounts, tokens, expects, drop)
    if tokens is not None:
        w.set_values(state, tokens, 64, mask)


def _arrive_lanes(
    m: Machine,
    w: Warp,
    ins: Instr,
    barrier: Mbarrier,
    members: int,
    amounts,
    tokens,
    expects: bool,
    drop: bool,
) -> None:
    """The arrivals of lanes on one mbarrier. amounts: operand with each lane's count, or bytes if it `expects` them."""
    if m.order is not None:
        m.order.arrive(w, ins, barrier, members)
    if amounts is None or (not expects and w.uniform(amounts, members) == 1):
        _arrive_alone(m, barrier, members, tokens, drop)
        return
    for lane in lanes(members):
        if tokens is not None:
            tokens[lane] = _state(barrier)
        amount = w.scalar(amounts, 1 << lane) & 0xFFFFFFFF
        if expects:
            _expect(m, barrier, amount)
        _count_down(m, barrier, 1 if expects else amount, drop)


def _state(barrier: Mbarrier) -> np.uint64:
    return np.uint64(barrier.phase | barrier.pending << STATE_PENDING)


def _arrive_alone(m: Machine, barrier: Mbarrier, members: int, tokens: np.ndarray | None, drop: bool) -> None:
    """One arrival a lane, in as few steps as there are phases that they end."""
    if tokens is None:
        rest = members.bit_count()
        while rest:
            now = min(rest, max(barrier.pending, 1))
            rest -= now
            _count_down(m, barrier, now, drop)
        return
    left = lanes(members)
    while left:
        now, left = left[: max(barrier.pending, 1)], left[max(barrier.pending, 1) :]
        tokens[now] = _state(barrier) - ARRIVED_BEFORE[: len(now)]
        _count_down(m, barrier, len(now), drop)


@handler("mbarrier.expect_tx", family=Family.MBARRIER, destinations=0)
def mbarrier_expect_tx(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """mbarrier.expect_tx [addr], bytes: each lane's bytes count."""
    amounts = w.u32(ins.operands[1])
    for members, cta, offset in _places(m, w, ins, ins.operands[0], mask):
        for lane in lanes(members):
            expect_tx(m, cta, offset, int(amounts[lane]))


@handler("mbarrier.complete_tx", family=Family.MBARRIER, destinations=0)
def mbarrier_complete_tx(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """mbarrier.complete_tx [addr], bytes: each lane's bytes count."""
    amounts = w.u32(ins.operands[1])
    for members, cta, offset in _places(m, w, ins, ins.operands[0], mask):
        for lane in lanes(members):
            complete_tx(m, cta, offset, int(amounts[lane]))


@handler("mbarrier.pending_count", family=Family.MBARRIER, destinations=1)
def mbarrier_pending_count(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """The arrivals that were pending before the arrive that returned the state (9.7.13.15.17)."""
    w.set_u32(ins.operands[0], (w.u64(ins.operands[1]) >> np.uint64(STATE_PENDING)).astype(np.uint32), mask)


def _wait_state(m: Machine, w: Warp, ins: Instr, mask: int) -> tuple[int, Mbarrier | None]:
    """(lanes whose phase has completed, a barrier that the others wait for)."""
    parity = "parity" in ins.parts
    operand = ins.operands[2]
    done, missing = 0, None
    for members, cta, offset in _places(m, w, ins, ins.operands[1], mask):
        barrier = lookup(cta, offset)
        same = w.uniform(operand, members)
        if same is not None:
            if parity and same <= 1:
                if same != barrier.phase & 1:
                    done |= members
                    barrier.passed(same, w, ins)
                else:
                    missing = barrier
                continue
            groups = ((same, members),)
        else:
            values = w.values(operand, 32 if parity else 64)
            groups = tuple((int(values[lane]), 1 << lane) for lane in lanes(members))
        for value, those in groups:
            if parity and value > 1:
                # QuACK's pingpong GEMM does this and works: ptxas shifts the lowest bit to the top.
                m.stats.warn(
                    f"a phase parity of {value} (the ISA allows 0 and 1), PTX line {ins.line}"
                    f"{' from ' if ins.source else ''}{placed(ins.source)}: hardware takes the lowest bit"
                )
                value &= 1
            if value != barrier.phase & 1 if parity else value & ((1 << STATE_PENDING) - 1) < barrier.phase:
                done |= those
            else:
                missing = barrier
    return done, missing


def _note_waits(m: Machine, w: Warp, ins: Instr, mask: int, done: int) -> None:
    """Tell the order checker whose phases lanes have seen complete."""
    for members, cta, offset in _places(m, w, ins, ins.operands[1], mask):
        m.order.waited(w, ins, lookup(cta, offset), bool(done & members & -members))


@handler("mbarrier.test_wait", family=Family.MBARRIER, destinations=1)
def mbarrier_test_wait(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """mbarrier.test_wait tells each lane whether its phase is complete; it never waits."""
    done, _ = _wait_state(m, w, ins, mask)
    if m.order is not None:
        _note_waits(m, w, ins, mask, done)
    w.set_pred(ins.operands[0], done, mask)


@handler("mbarrier.try_wait", family=Family.MBARRIER, destinations=1)
def mbarrier_try_wait(m: Machine, w: Warp, ins: Instr, mask: int) -> Wait | None:
    """Waits until the phase completes, or returns false: rarely at once, else when the machine says so.

    The instruction's time limit may pass at any time, so that a kernel must try again; one that does not is wrong
    under some seed.
    """
    if ins.plan is None:
        ins.plan = "parity" in ins.parts
    barrier = _common(w, ins.operands[1], mask)
    parity = None
    if barrier is not None and ins.plan:
        parity = w.uniform(ins.operands[2], mask)
    if parity == 0 or parity == 1:
        complete = parity != barrier.phase & 1
        done, missing = (mask, None) if complete else (0, barrier)
        if complete:
            barrier.passed(parity, w, ins)
    else:
        barrier = None
        done, missing = _wait_state(m, w, ins, mask)
    if missing is not None and not w.current.timed_out and m.rng.random() >= m.timeout_chance:
        return Wait(on=missing, text=lambda: describe_wait(m, w, ins, mask), poll=True)
    if m.order is not None:
        if barrier is not None:
            m.order.waited(w, ins, barrier, bool(done))
        else:
            _note_waits(m, w, ins, mask, done)
    w.set_pred(ins.operands[0], done, mask)
    return None


def describe_wait(m: Machine, w: Warp, ins: Instr, mask: int) -> str:
    """A text of what lanes at an mbarrier.try_wait wait for; '' if the phase is complete."""
    _, missing = _wait_state(m, w, ins, mask)
    if missing is None:
        return ""
    operand = ins.operands[2]
    shown = w.scalar(operand, mask) if isinstance(operand, (Reg, Imm)) else "?"
    kind = "parity" if ins.has("parity") else "phase"
    if kind == "phase" and shown != "?":
        shown &= (1 << STATE_PENDING) - 1
    text = missing.describe(f"waits for {kind} {shown} of the")
    if kind == "parity":
        first = "" if w.index in missing.seen else _first_parity(m, missing, ins)
        text += first or _missed(missing, w)
    return text


def _missed(barrier: Mbarrier, w: Warp) -> str:
    """A text of the phase that a warp may be too late for, if a later one has ended, too; "" if there is none."""
    phase = barrier.phase
    if w.index not in barrier.seen and phase & 1:
        return f"; a new mbarrier lets a wait for parity 1 pass, and phases have ended since: {MISSED} that"
    last = barrier.seen.get(w.index, -1)
    if phase - last < 3:
        return ""
    which = f"{last + 1} and {phase - 1}" if phase - last == 3 else f"{last + 1} to {phase - 1}"
    return f"; phases {which} have ended since it last passed: {MISSED} the first of them"


def _first_parity(m: Machine, barrier: Mbarrier, ins: Instr) -> str:
    """A text of what may be wrong with the parity of a warp's first wait for an mbarrier; "" if nothing is."""
    if not (barrier.phase or barrier.arrivals or barrier.expected) and _fills_after(m, ins):
        return f"; who waits for what is free at first {BEGINS} 1"
    if barrier.phase == 1 and barrier.expected:
        return f"; its first phase, which has ended, has parity 0: who waits for bytes {BEGINS} 0"
    return ""


def _fills_after(m: Machine, ins: Instr) -> bool:
    """Whether the code after a wait, up to the next one, makes copies to shared memory: the wait is for free space."""
    for later in m.program.kernel.instrs:
        if later.line <= ins.line:
            continue
        if later.opcode.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
            return False
        if "expect_tx" in later.opcode or later.opcode.startswith(
            ("cp.async.bulk.shared", "cp.async.bulk.tensor")
        ):
            return True
    return False
