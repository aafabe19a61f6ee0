"""tcgen05: tensor memory and the 5th-generation tensor core. PTX ISA: "TensorCore 5th Generation
Instructions".

mma, cp, shift and commit of one warp enter one queue and take effect in order, later.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from warpspec.sim.errors import BadDescriptor, TmemFault, UnsupportedInstruction
from warpspec.sim.families import mbarrier
from warpspec.sim.instruction import Imm, Instr, Mem, Operand, Vec
from warpspec.sim.lanes import lanes
from warpspec.sim.machine import Machine
from warpspec.sim.operation import Op, Wait
from warpspec.sim.registry import Collective, Family, handler
from warpspec.sim.tcgen05 import copy as smem_copy
from warpspec.sim.tcgen05 import instruction_descriptor, mma
from warpspec.sim.tcgen05.memory import LANES, PARTITION_LANES, address_parts
from warpspec.sim.tcgen05.mma import Mma, MmaBatch
from warpspec.sim.tcgen05.smem_descriptor import CHUNK_BYTES
from warpspec.sim.warp import Warp

LONG_K_TARGETS = ("sm_103", "sm_107")
SCALES_PER_ROW = {  # with K = 96 half as many again
    ("mxf8f6f4", ""): 1,
    ("mxf8f6f4", "scale_vec::1X"): 1,
    ("mxf8f6f4", "block32"): 1,
    ("mxf4", ""): 2,
    ("mxf4", "scale_vec::2X"): 2,
    ("mxf4", "block32"): 2,
    ("mxf4nvf4", "scale_vec::2X"): 2,
    ("mxf4nvf4", "block32"): 2,
    ("mxf4nvf4", "scale_vec::4X"): 4,
    ("mxf4nvf4", "block16"): 4,
}


@lru_cache(maxsize=256)
def cta_group_of(parts: tuple[str, ...]) -> int:
    """1, or 2 where a pair of CTAs works together."""
    return 2 if "cta_group::2" in parts else 1


def group_ctas(w: Warp, cta_group: int) -> list:
    """The CTAs an instruction works on, even rank first; notes the kernel's .cta_group."""
    cta = w.cta
    if cta.tmem.cta_group != cta_group:
        cta.tmem.use_cta_group(cta_group)
    if cta_group == 1:
        return [cta]
    return [cta, peer] if cta.rank < (peer := peer_of(cta)).rank else [peer, cta]


def peer_of(cta):
    """The other CTA of a pair: ranks that differ in the lowest bit."""
    rank = cta.rank ^ 1
    if rank >= len(cta.cluster.ctas):
        raise TmemFault(
            f".cta_group::2 in a cluster of {len(cta.cluster.ctas)}: CTA rank {cta.rank} has no peer"
        )
    return cta.cluster.ctas[rank]


# ---- allocation --------------------------------------------------------------------------------------------


@handler("tcgen05.alloc", family=Family.TCGEN05, destinations=0, collective=Collective.WARP)
def alloc(m: Machine, w: Warp, ins: Instr, mask: int) -> Wait | None:
    """tcgen05.alloc: reserve columns, write their address to shared memory; waits until they are free."""
    cta_group = cta_group_of(ins.parts)
    tmem = w.cta.tmem
    tmem.use_cta_group(cta_group)
    columns = w.scalar(ins.operands[1], mask)
    if cta_group == 1:
        address = tmem.allocate(columns, (w, ins))
        if address is None:
            return Wait(on=tmem, text=lambda: f"tcgen05.alloc of {columns} columns; {tmem.describe()}")
    else:
        waiting = _alloc_pair(m, w.cta, columns, (w, ins))
        if waiting is not None:
            return waiting
        address, tmem.pair_grant = tmem.pair_grant, None
    target = w.shared_address(ins.operands[0], mask)
    if m.order is not None:
        cta, offset = m.cta_at(w, target)
        m.order.shared_range(cta, offset, 4, m.order.generic(w, ins, True, together=True), w.order)
        if cta_group == 2:
            m.order.pair_allocated(w, ins)
    m.shared(w, target, 4).view(np.uint32)[0] = address
    return None


def _alloc_pair(m: Machine, cta, columns: int, who: tuple) -> Wait | None:
    """Both CTAs of a pair must ask, for the same size; then both get theirs. Sets `pair_grant`."""
    tmem, peer = cta.tmem, peer_of(cta).tmem
    if tmem.pair_grant is not None:
        return None
    tmem.pair_request = columns
    if peer.pair_request is None:
        return Wait(
            on=tmem, text=f"tcgen05.alloc.cta_group::2 of {columns} columns, for the peer CTA's to join"
        )
    if peer.pair_request != columns:
        raise TmemFault(
            f"tcgen05.alloc.cta_group::2 of {columns} columns, but {peer.pair_request} in the peer CTA"
        )
    grants = [t.allocate(columns, who) for t in (tmem, peer)]
    if None in grants:
        for t, grant in zip((tmem, peer), grants, strict=True):
            if grant is not None:
                t.deallocate(grant, columns)
        return Wait(on=tmem, text=lambda: f"tcgen05.alloc of {columns} columns; {tmem.describe()}")
    for t, grant in zip((tmem, peer), grants, strict=True):
        t.pair_grant, t.pair_request = grant, None
    m.notify(peer)
    return None


@handler("tcgen05.dealloc", family=Family.TCGEN05, destinations=0, collective=Collective.WARP)
def dealloc(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """tcgen05.dealloc: give columns back; wakes allocations that wait."""
    cta_group = cta_group_of(ins.parts)
    ctas = group_ctas(w, cta_group)
    address, columns = w.scalar(ins.operands[0], mask), w.scalar(ins.operands[1], mask)
    w.cta.tmem.deallocate(address, columns, (w, ins))
    if m.order is not None:
        m.order.tensor_freed(w, ins, address, columns, peer_of(w.cta) if cta_group == 2 else None)
    for cta in ctas:
        m.notify(cta.tmem)


@handler("tcgen05.relinquish_alloc_permit", family=Family.TCGEN05, destinations=0, collective=Collective.WARP)
def relinquish(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """tcgen05.relinquish_alloc_permit: this CTA must not allocate again."""
    w.cta.tmem.relinquish()


# ---- the queue of mma, cp, shift and commit ----------------------------------------------------------------


class MmaOp(Op):
    """MMAs on one accumulator that were issued in a row."""

    __slots__ = ("batch", "ctas", "orders")

    def __init__(self, queue, ctas, first: Mma, text: str):
        super().__init__(text, queue)
        self.batch = MmaBatch(first)
        self.ctas = ctas
        self.orders: list = []  # the order checker's operation of each

    def execute(self, m: Machine) -> None:
        if self.orders:
            note_mmas(m.order, self.batch.mmas, self.orders, self.ctas)
        self.batch.execute(self.ctas)
        m.stats.mma_flops += self.batch.flops


def note_mmas(order, mmas: list[Mma], ops: list, ctas) -> None:
    """Tell the order checker what MMAs access; those that were issued with one clock at once."""
    start = 0
    while start < len(mmas):
        stop = start + 1
        while stop < len(mmas) and ops[stop].clock is ops[start].clock:
            stop += 1
        op = ops[stop - 1]  # its completion is that of those before it
        read, written = order.of(op, False, queued=True), order.of(op, True, queued=True)
        read.pipe = written.pipe = mmas[start].pipe
        for cta, shared, cells, accumulator in mma.footprint(mmas[start:stop], ctas):
            for operand in shared:
                order.shared_chunks(cta, operand.chunks, CHUNK_BYTES, read, op.clock)
                order.layouts.read(cta, op.ins, operand)
            for where in cells:
                order.tensor_access(cta, where, read, op.clock)
            order.tensor_access(cta, accumulator, written, op.clock)
        start = stop


class CopyOp(Op):
    """tcgen05.cp in each CTA of the group, from its own shared memory."""

    __slots__ = ("address", "ctas", "descriptor", "order", "shape", "source_format")

    def __init__(self, queue, ctas, descriptor, address, shape, source_format, text):
        super().__init__(text, queue)
        self.ctas, self.descriptor, self.address = ctas, descriptor, address
        self.shape, self.source_format = shape, source_format
        self.order = None  # the order checker's operation

    def execute(self, m: Machine) -> None:
        for cta in self.ctas:
            if self.order is not None:
                self.note(m.order, cta)
            smem_copy.copy(cta.smem, cta.tmem, self.descriptor, self.address, self.shape, self.source_format)

    def note(self, order, cta) -> None:
        """Tell the order checker. Rows that race are suspects until an MMA reads them: other lanes do not matter."""
        chunks, cells = smem_copy.footprint(self.descriptor, self.address, self.shape)
        read, clock = order.of(self.order, False, queued=True), self.order.clock
        with order.held_back() as found:
            order.shared_chunks(cta, chunks, CHUNK_BYTES, read, clock)
        order.tensor_access(cta, cells, order.of(self.order, True, queued=True), clock)
        if found:
            for row in range(self.shape.rows):
                with order.held_back() as found:
                    order.shared_chunks(cta, chunks[row], CHUNK_BYTES, read, clock)
                if found:
                    order.suspect(cta, smem_copy.row_cells(self.address, self.shape, row), found)


class ShiftOp(Op):
    """tcgen05.shift in each CTA of the group."""

    __slots__ = ("address", "ctas", "order")

    def __init__(self, queue, ctas, address, text):
        super().__init__(text, queue)
        self.ctas, self.address = ctas, address
        self.order = None  # the order checker's operation

    def execute(self, m: Machine) -> None:
        lane, column = address_parts(self.address)
        for cta in self.ctas:
            if self.order is not None:
                where = (
                    slice(lane, lane + PARTITION_LANES),
                    slice(column, column + mma.WORDS_PER_OPERAND_ROW),
                )
                access = m.order.of(self.order, True, queued=True)
                m.order.tensor_access(cta, where, access, self.order.clock)
            mma.shift_rows_down(cta.tmem, lane, PARTITION_LANES, column)


class CommitOp(Op):
    """tcgen05.commit: all before it in the queue is done, so it arrives on mbarriers, given as (CTA, offset)."""

    __slots__ = ("order", "targets")

    def __init__(self, queue, targets, text):
        super().__init__(text, queue)
        self.targets = targets
        self.order = None  # the order checker's operation

    def execute(self, m: Machine) -> None:
        for cta, offset in self.targets:
            mbarrier.arrive(m, cta, offset, op=self.order)


def queue_of(w: Warp) -> tuple:
    """The key of the queue that a warp's mma, cp, shift and commit share."""
    key = w.state.get("tcgen05 queue")
    if key is None:
        key = w.state["tcgen05 queue"] = ("tcgen05", w.cta.number, w.index)
    return key


@dataclass(frozen=True, slots=True)
class MmaForm:
    """The meaning of a tcgen05.mma opcode."""

    kind: str
    cta_group: int
    weight_stationary: bool
    shift_a: bool
    scales_per_row: int
    sparse: bool


@lru_cache(maxsize=256)
def mma_form(parts: tuple[str, ...]) -> MmaForm:
    """Raises UnsupportedInstruction for a sparse A that is shifted, and for scale vector sizes that a kind has not."""
    sparse = "sp" in parts
    if sparse and "ashift" in parts:
        raise UnsupportedInstruction("tcgen05.mma.sp with .ashift is not supported")
    kind = next((p[len("kind::") :] for p in parts if p.startswith("kind::")), "")
    scaled = kind in instruction_descriptor.BLOCK_SCALED_KINDS
    size = next((p for p in parts if p.startswith(("scale_vec::", "block")) and p != "block_scale"), "")
    if scaled and (kind, size) not in SCALES_PER_ROW:
        raise UnsupportedInstruction(
            f"tcgen05.mma .kind::{kind} with scale vector size {size or 'unspecified'}"
        )
    return MmaForm(
        kind=kind,
        cta_group=cta_group_of(parts),
        weight_stationary="ws" in parts,
        shift_a="ashift" in parts,
        scales_per_row=SCALES_PER_ROW[kind, size] if scaled else 0,
        sparse=sparse,
    )


@dataclass(frozen=True, slots=True)
class MmaPlan:
    """A tcgen05.mma's operands by name. sparsity: None, or where the metadata of a sparse A are; scales: of A and B;
    disabled: words of lanes that keep D, each with what it is multiplied by (one register for all words is read once);
    scale_input: None or scale-input-d."""

    form: MmaForm
    text: str
    d: Mem
    a: Operand
    b: Operand
    sparsity: Operand | None
    descriptor: Operand
    scales: tuple[Operand, ...]
    disabled: tuple[tuple[Operand, int], ...]
    enable: Operand
    scale_input: Operand | None

    @classmethod
    def of(cls, ins: Instr) -> MmaPlan:
        form = mma_form(ins.parts)
        d, a, b, *rest = ins.operands
        sparsity = rest.pop(0) if form.sparse else None
        descriptor = rest.pop(0)
        scales: tuple[Operand, ...] = ()
        disabled: tuple[tuple[Operand, int], ...] = ()
        if form.scales_per_row:
            scales = rest.pop(0), rest.pop(0)
        elif rest and isinstance(rest[0], Vec):
            disabled = cls._words(rest.pop(0).items)
        enable = rest.pop(0)
        scale_input = None
        if rest and form.weight_stationary:
            if not (isinstance(rest[0], Imm) and rest[0].value == 0):
                raise UnsupportedInstruction("tcgen05.mma.ws with a zero-column mask is not supported")
        elif rest:
            scale_input = rest[0]
        text = f"tcgen05.mma{'.sp' * form.sparse}.kind::{form.kind}"
        return cls(form, text, d, a, b, sparsity, descriptor, scales, disabled, enable, scale_input)

    @staticmethod
    def _words(items: tuple[Operand, ...]) -> tuple[tuple[Operand, int], ...]:
        if all(item == items[0] for item in items):
            return ((items[0], sum(1 << 32 * position for position in range(len(items)))),)
        return tuple((item, 1) for item in items)


@handler("tcgen05.mma", family=Family.TCGEN05, destinations=0)
def mma_issue(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """tcgen05.mma: each executing lane issues one; those that continue an accumulator run as one operation."""
    plan = ins.plan
    if plan is None:
        plan = ins.plan = MmaPlan.of(ins)
    ctas = group_ctas(w, plan.form.cta_group)
    queue = queue_of(w)
    while mask:
        lane = mask & -mask
        mask ^= lane
        one = read_mma(w, plan, lane)
        waiting = m.queues.get(queue)
        op = waiting[-1] if waiting else None
        if type(op) is not MmaOp or not op.batch.append(one):
            op = MmaOp(queue, ctas, one, plan.text)
            m.defer(op)
        if m.order is not None:
            op.orders.append(m.order.issue(w, ins, "tcgen05", lane))


def read_mma(w: Warp, plan: MmaPlan, lane: int) -> Mma:
    """The instruction's operands in one lane (a mask of one bit)."""
    form, scalar = plan.form, w.scalar
    scale_a = scale_b = disabled = scale_input_d = 0
    if plan.scales:
        scale_a, scale_b = (w.address_scalar(scale, lane) for scale in plan.scales)
    elif plan.disabled:
        for position, (item, times) in enumerate(plan.disabled):
            disabled |= (scalar(item, lane) & 0xFFFFFFFF) * times << 32 * position
    if plan.scale_input is not None:
        scale_input_d = scalar(plan.scale_input, lane)
        if form.kind not in ("f16", "tf32") or not 0 <= scale_input_d <= 15:
            raise BadDescriptor(f"scale-input-d {scale_input_d} with .kind::{form.kind}")
    bits = scalar(plan.descriptor, lane) & 0xFFFFFFFF
    descriptor = instruction_descriptor.decode(
        bits, form.kind, form.cta_group, form.weight_stationary, form.sparse
    )
    if form.scales_per_row == 2 and descriptor.scale_format == "ue4m3":
        raise BadDescriptor("UE4M3 scales come four a row (.scale_vec::4X, .block16)")
    a_in_tmem = type(plan.a) is Mem
    if form.shift_a and not (a_in_tmem and descriptor.m // form.cta_group == LANES):
        raise BadDescriptor(f".ashift needs A in tensor memory and M = 128 or 256; M is {descriptor.m}")
    long = descriptor.k == instruction_descriptor.LONG_K
    if long and not w.program.module.target.startswith(LONG_K_TARGETS):
        raise BadDescriptor(
            f"tcgen05.mma with K = 96 needs sm_103a; the kernel is for {w.program.module.target}"
        )
    return Mma(
        descriptor,
        form.cta_group,
        w.address_scalar(plan.d, lane),
        w.address_scalar(plan.a, lane) if a_in_tmem else scalar(plan.a, lane),
        scalar(plan.b, lane),
        a_in_tmem,
        w.pred(plan.enable) & lane != 0,
        scale_input_d,
        disabled,
        form.weight_stationary,
        form.shift_a,
        form.scales_per_row * 3 // 2 if long else form.scales_per_row,
        scale_a,
        scale_b,
        0 if plan.sparsity is None else w.address_scalar(plan.sparsity, lane),
    )


@lru_cache(maxsize=64)
def copy_form(parts: tuple[str, ...]) -> tuple[smem_copy.CopyShape, str]:
    """(shape, source format of a decompression or '')."""
    shape = next((p for p in parts if p.endswith("b") and "x" in p and p[0].isdigit()), "")
    multicast = next((p for p in parts if p.startswith("warpx")), "")
    source_format = next((p for p in parts if p in smem_copy.DECOMPRESSIONS), "")
    return smem_copy.copy_shape(shape, multicast), source_format


@handler("tcgen05.cp", family=Family.TCGEN05, destinations=0)
def cp(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """tcgen05.cp copies shared memory to tensor memory, in order with the warp's other operations."""
    ctas = group_ctas(w, cta_group_of(ins.parts))
    shape, source_format = copy_form(ins.parts)
    for lane in lanes(mask):
        address = w.address_scalar(ins.operands[0], 1 << lane)
        descriptor = w.scalar(ins.operands[1], 1 << lane)
        op = CopyOp(queue_of(w), ctas, descriptor, address, shape, source_format, "tcgen05.cp")
        if m.order is not None:
            op.order = m.order.issue(w, ins, "tcgen05", 1 << lane)
        m.defer(op)


@handler("tcgen05.shift", family=Family.TCGEN05, destinations=0)
def shift(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """tcgen05.shift.down: within the 32 lanes at the address, row r takes row r + 1, 32 bytes wide."""
    ctas = group_ctas(w, cta_group_of(ins.parts))
    for lane in lanes(mask):
        address = w.address_scalar(ins.operands[0], 1 << lane)
        if address_parts(address)[0] % PARTITION_LANES:
            raise TmemFault(
                f"tcgen05.shift at 0x{address:08x}: the lane must be a multiple of {PARTITION_LANES}"
            )
        op = ShiftOp(queue_of(w), ctas, address, "tcgen05.shift")
        if m.order is not None:
            op.order = m.order.issue(w, ins, "tcgen05", 1 << lane)
        m.defer(op)


@handler("tcgen05.commit", family=Family.TCGEN05, destinations=0)
def commit(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """tcgen05.commit: arrive on an mbarrier when this warp's mma, cp and shift so far are done.

    With .multicast::cluster, on the mbarrier at the same offset in every CTA of the mask.
    """
    plan = ins.plan
    if plan is None:
        plan = ins.plan = cta_group_of(ins.parts), ins.has("multicast::cluster")
    cta_group, multicast = plan
    group_ctas(w, cta_group)
    for lane in lanes(mask):
        cta, offset = m.cta_at(w, w.shared_address(ins.operands[0], 1 << lane))
        targets = [(cta, offset)]
        if multicast:
            chosen = w.scalar(ins.operands[1], 1 << lane) & 0xFFFF
            ctas = w.cta.cluster.ctas
            if chosen >> len(ctas):
                raise BadDescriptor(f"tcgen05.commit to CTA mask 0x{chosen:04x} in a cluster of {len(ctas)}")
            targets = [(ctas[rank], offset) for rank in range(len(ctas)) if chosen >> rank & 1]
        op = CommitOp(queue_of(w), targets, "tcgen05.commit")
        if m.order is not None:
            op.order = m.order.commit(w, ins, 1 << lane)
        m.defer(op)
