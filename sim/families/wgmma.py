"""wgmma: the asynchronous matrix multiply of a warpgroup. PTX ISA: "Asynchronous Warpgroup Level Matrix
Multiply-Accumulate Instructions".

D (64 x N, in registers) = A B + D. A comes from shared memory or registers, B from shared memory. Consecutive
instructions on one accumulator form a `Product`, which takes effect when the schedule says so, after all four
warps have issued it and before wgmma.wait_group lets one of them go on; shared memory is read only then. Not
modelled: a missing wgmma.fence or fence.proxy.async (`order` finds them).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from warpspec.sim.errors import BadDescriptor, UnsupportedInstruction
from warpspec.sim.families import sparse
from warpspec.sim.families.mma_sync import WIDTH, a_matrix
from warpspec.sim.instruction import Imm, Instr, Operand, Vec
from warpspec.sim.machine import Machine
from warpspec.sim.operation import Op, Wait
from warpspec.sim.registry import Collective, Family, handler
from warpspec.sim.tcgen05 import operands, smem_descriptor
from warpspec.sim.tcgen05.operands import SharedOperand
from warpspec.sim.warp import Warp

M = 64
WARPS = 4  # warps of a warpgroup
ROWS = M // WARPS  # rows of D, and of A in registers, that each warp has
K = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}
ACCUMULATORS = {"f16": ("f16", "f32"), "bf16": ("f32",), "tf32": ("f32",), "e4m3": ("f16", "f32")}
ACCUMULATORS |= {"e5m2": ("f16", "f32"), "s8": ("s32",), "u8": ("s32",)}
TRANSPOSABLE = ("f16", "bf16")  # may be MN-major in shared memory
MAX_N = 256
LONGEST_PRODUCT = 16  # instructions computed as one matrix product
# The descriptor's swizzle field (bits 62-63) -> that of tcgen05 (bits 61-63); the layouts are the same.
SWIZZLE_MODES = {0: 0, 1: 2, 2: 4, 3: 6}
MOVED_ONLY = "before wgmma.wait_group has waited for the wgmma.mma_async that writes it"


@dataclass(frozen=True, slots=True)
class WgmmaForm:
    """The meaning of a wgmma.mma_async opcode. sparse: A is stored without its zeros, half of K (`sparse.py`)."""

    n: int
    k: int
    d: str
    a: str
    b: str
    saturate: bool
    sparse: bool = False

    @property
    def stored_k(self) -> int:
        """Elements of a row of A as it is stored."""
        return self.k // 2 if self.sparse else self.k

    @property
    def b_row_chunks(self) -> int:
        """Chunks of a K-major row of B."""
        return operands.OPERAND_ROW_CHUNKS * (2 if self.sparse else 1)

    @property
    def flops(self) -> int:
        return 2 * M * self.n * self.k


@lru_cache(maxsize=256)
def form(parts: tuple[str, ...]) -> WgmmaForm:
    """Raises UnsupportedInstruction for one-bit operands and for shapes the ISA does not list."""
    opcode = ".".join(parts)
    shape = next((p for p in parts if p.startswith("m64n")), "")
    types = [p for p in parts if p in K or p in ("f32", "s32")]
    is_sparse = "sp" in parts
    if len(types) != 3 or not shape:
        raise UnsupportedInstruction(f"`{opcode}`")
    d, a, b = types
    n, k = (int(number) for number in shape.removeprefix("m64n").split("k"))
    mixed = a != b and not ({a, b} <= {"s8", "u8"} or {a, b} <= {"e4m3", "e5m2"})
    if (
        mixed
        or a not in K
        or k != K[a] * (1 + is_sparse)
        or d not in ACCUMULATORS[a]
        or n % 8
        or not 8 <= n <= MAX_N
    ):
        raise UnsupportedInstruction(f"`{opcode}`")
    return WgmmaForm(n, k, d, a, b, "satfinite" in parts, is_sparse)


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction as a warp issues it. a: descriptor, or None where A is in registers."""

    form: WgmmaForm
    d: Operand
    a: int | None
    b: int
    use_d: bool
    negate: bool
    a_mn_major: bool
    b_mn_major: bool


@lru_cache(maxsize=1 << 14)
def matrix_descriptor(bits: int) -> int:
    """The tcgen05 descriptor of the same matrix. PTX ISA: "Matrix Descriptor Format" of wgmma."""
    reserved = bits >> 14 & 0x3 | bits >> 30 & 0x3 | bits >> 46 & 0x7 | bits >> 52 & 0x3FF
    if reserved:
        raise BadDescriptor(f"wgmma matrix descriptor 0x{bits:016x}: bits that must be 0 are set")
    return smem_descriptor.encode(
        start=(bits & 0x3FFF) << 4,
        leading_offset=(bits >> 16 & 0x3FFF) << 4,
        stride_offset=(bits >> 32 & 0x3FFF) << 4,
        swizzle_mode=SWIZZLE_MODES[bits >> 62],
        base_offset=bits >> 49 & 0x7,
    )


class Product(Op):
    """Consecutive instructions on one accumulator, of all four warps of a warpgroup. hollow: it is not computed, for
    nobody asks for its values (`clocks.record`)."""

    __slots__ = (
        "closed", "cta", "done", "fragments", "group", "hollow", "marks", "number", "orders", "steps", "warps"
    )  # fmt: skip

    def __init__(self, warpgroup: Warpgroup, number: int):
        super().__init__(
            f"wgmma of warpgroup {warpgroup.index}", ("wgmma", warpgroup.cta.number, warpgroup.index)
        )
        self.cta = warpgroup.cta
        self.group = warpgroup
        self.number = number
        self.orders: list[list] = [[] for _ in range(WARPS)]  # the order checker's operation of each step
        self.steps: list[Step] = []
        self.warps: list = [None] * WARPS
        self.fragments: list[list[np.ndarray]] = [[] for _ in range(WARPS)]  # A in registers, float32 [16, K]
        self.marks: list[list[np.ndarray]] = [[] for _ in range(WARPS)]  # for a sparse A, see `sparse.fours`
        self.closed: set[int] = set()  # warps of the group that issue no more of it
        self.done: set[int] = set()
        self.hollow = False

    def describe(self) -> str:
        """A text of what a warp in wgmma.wait_group waits for."""
        missing = WARPS - len(self.closed)
        return "wgmma group" + f", which {missing} other warps of the warpgroup have not committed" * bool(
            missing
        )

    def execute(self, m: Machine) -> None:
        if m.order is not None:
            self.note(m.order)
        self.compute([part for part in range(WARPS) if part not in self.done])
        m.stats.mma_flops += sum(step.form.flops for step in self.steps)
        m.notify(self)

    def note(self, order) -> None:
        """Tell the order checker what the steps read; those that were issued with one clock at once."""
        f, start = self.steps[0].form, 0
        while start < len(self.steps):
            stop = start + 1
            while stop < len(self.steps) and all(
                mine[stop].clock is mine[start].clock for mine in self.orders
            ):
                stop += 1
            steps, ops = self.steps[start:stop], [mine[start] for mine in self.orders]
            read = order.of(ops[0], False, component=self.group.order.component, count=self.number + 1)
            clocks = [op.clock for op in ops]
            b, mn_major = tuple(step.b for step in steps), steps[0].b_mn_major
            chunks = operands.operand_chunks(b, f.n, f.b, f.k, mn_major, f.b_row_chunks)
            order.shared_chunks(self.cta, chunks, smem_descriptor.CHUNK_BYTES, read, *clocks)
            order.layouts.read(self.cta, ops[0].ins, SharedOperand("B", b[0], f.n, mn_major, chunks))
            if steps[0].a is not None:
                a, mn_major = tuple(step.a for step in steps), steps[0].a_mn_major
                chunks = operands.operand_chunks(a, M, f.a, f.stored_k, mn_major)
                for part, own in enumerate(rows_of_warps(chunks, mn_major)):
                    read = order.of(
                        ops[part], False, component=self.group.order.component, count=self.number + 1
                    )
                    order.shared_chunks(self.cta, own, smem_descriptor.CHUNK_BYTES, read, clocks[part])
                order.layouts.read(self.cta, ops[0].ins, SharedOperand("A", a[0], M, mn_major, chunks))
            start = stop

    def compute(self, parts: list[int]) -> None:
        """The rows of some warps into their registers."""
        if not parts:
            return
        if self.hollow:
            for part in parts:
                self.land(part)
            return
        first = self.steps[0]
        f = first.form
        with np.errstate(all="ignore"):
            descriptors = tuple(step.b for step in self.steps)
            b = operands.smem_operand(
                self.cta.smem, descriptors, f.n, f.b, "", f.k, first.b_mn_major, f.b_row_chunks
            )
            if first.a is None:
                a = np.concatenate([np.concatenate(self.fragments[part], axis=1) for part in parts])
            else:
                descriptors = tuple(step.a for step in self.steps)
                a = operands.smem_operand(
                    self.cta.smem, descriptors, M, f.a, "", f.stored_k, first.a_mn_major
                )
                a = a.reshape(WARPS, ROWS, -1)[parts].reshape(len(parts) * ROWS, -1)
            if f.sparse:
                a = np.concatenate(
                    [
                        self.dense(part, rows)
                        for part, rows in zip(parts, np.split(a, len(parts)), strict=True)
                    ]
                )
            if len(parts) < WARPS:  # of all rows nevertheless: BLAS sums fewer in another order
                whole = np.zeros((WARPS, ROWS, a.shape[1]), np.float32)
                whole[parts] = a.reshape(len(parts), ROWS, -1)
                product = (whole.reshape(M, -1) @ b.T).reshape(WARPS, ROWS, -1)[parts].reshape(a.shape[0], -1)
            else:
                product = a @ b.T
            if first.negate:
                product = -product
            for i, part in enumerate(parts):
                self.finish(part, product[i * ROWS : (i + 1) * ROWS])

    def dense(self, part: int, stored: np.ndarray) -> np.ndarray:
        """float32 [16, K] of a warp's rows of a sparse A, from what is stored of all steps."""
        f = self.steps[0].form
        by_step = np.split(stored, len(self.steps), axis=1)
        marks = self.marks[part]
        return np.concatenate(
            [sparse.dense(rows, own, WIDTH[f.a]) for rows, own in zip(by_step, marks, strict=True)],
            axis=1,
        )

    def finish(self, part: int, product: np.ndarray) -> None:
        """Add float32 [16, N] to a warp's accumulator."""
        w, first = self.warps[part], self.steps[0]
        f = first.form
        if f.d == "s32":
            total = product.astype(np.int64)
            if first.use_d:
                total += from_registers(w.read_vec(first.d), f.d)
            if f.saturate:
                total = np.clip(total, -(1 << 31), (1 << 31) - 1)
            total = total.astype(np.uint32).view(np.int32)
        else:
            total = product + from_registers(w.read_vec(first.d), f.d) if first.use_d else product
        w.write_vec(first.d, to_registers(total, f.d), w.alive)
        self.land(part)

    def land(self, part: int) -> None:
        """A warp's registers have their values."""
        self.done.add(part)
        self.warps[part].landed(self)
        self.warps[part] = None


@dataclass(slots=True)
class Issue:
    """The wgmmas that one warp of a warpgroup has issued."""

    next_number: int = 0
    open: Product | None = None
    uncommitted: list[Product] = field(default_factory=list)
    groups: deque[list[Product]] = field(default_factory=deque)


class Warpgroup:
    """Four warps whose first has a number that is a multiple of four."""

    def __init__(self, cta, index: int):
        self.cta, self.index = cta, index
        self.issues = [Issue() for _ in range(WARPS)]
        self.order = None  # the order checker's queue of its products
        self.products: dict[int, Product] = {}  # by number, until all four warps have closed it
        self.first_left_out: int | None = None

    def leaves_out(self, part: int) -> bool:
        """Whether a warp's next product is left out, because steps are only counted by now.

        The first that is left out is the first that none of the four warps had begun when one of them was asked.
        """
        if self.first_left_out is None:
            self.first_left_out = max(issue.next_number for issue in self.issues)
        mine = self.issues[part]
        return mine.open is None and mine.next_number >= self.first_left_out

    def issue(
        self,
        m: Machine,
        w: Warp,
        ins: Instr,
        step: Step,
        fragment: np.ndarray | None,
        marks: np.ndarray | None,
    ) -> Product:
        """One instruction of one warp. fragment: A in registers. marks: where the elements of a sparse A belong."""
        if m.order is not None and self.order is None:
            self.order = m.order.new_queue(w)
        part = w.index % WARPS
        mine = self.issues[part]
        joins = mine.open is not None and continues(mine.open, len(mine.open.fragments[part]), step)
        if not joins:
            self.close(m, part)
        if mine.open is None:
            number, mine.next_number = mine.next_number, mine.next_number + 1
            mine.open = self.products.setdefault(number, Product(self, number))
            mine.open.warps[part] = w
            mine.uncommitted.append(mine.open)
            w.in_flight(step.d, forced(m, mine.open, part), owner=mine.open, moved_only=MOVED_ONLY)
        product = mine.open
        at = len(product.fragments[part])
        if at == len(product.steps):
            product.steps.append(step)
        elif product.steps[at] != step:
            raise BadDescriptor(
                f"warps of a warpgroup execute different wgmma.mma_async: warp {w.index} {step}, "
                f"another {product.steps[at]}"
            )
        product.fragments[part].append(fragment)
        product.marks[part].append(marks)
        if m.order is not None:
            product.orders[part].append(m.order.issue(w, ins))
        return product

    def close(self, m: Machine, part: int) -> None:
        """A warp issues no more of its open product; the last of the four makes it ready to run."""
        mine = self.issues[part]
        product, mine.open = mine.open, None
        if product is None:
            return
        product.closed.add(part)
        if len(product.closed) == WARPS:
            del self.products[product.number]
            m.defer(product)


def continues(product: Product, issued: int, step: Step) -> bool:
    """Whether an instruction goes on with what a warp has open, so that both run as one matrix product."""
    first = product.steps[0]
    return (
        issued < LONGEST_PRODUCT
        and step.use_d
        and step.d == first.d
        and step.form == first.form
        and first.form.d != "f16"  # rounds after every instruction
        and not first.form.saturate
        and (step.a is None) == (first.a is None)
        and (step.negate, step.a_mn_major, step.b_mn_major)
        == (first.negate, first.a_mn_major, first.b_mn_major)
    )


def forced(m: Machine, product: Product, part: int) -> Callable[[], None]:
    """Completes a product for one warp early, those before it first (its registers are about to be touched)."""

    def force() -> None:
        if product.group.issues[part].open is product:
            product.group.close(m, part)
        if part not in product.done:
            product.compute([part])

    return force


_ROWS_OF_WARPS: dict[int, tuple] = {}


def rows_of_warps(chunks: np.ndarray, mn_major: bool) -> list[np.ndarray]:
    """The part of A's chunks that each warp reads: its own 16 rows. chunks: as `operand_chunks` keeps them."""
    kept = _ROWS_OF_WARPS.get(id(chunks))
    if kept is None or kept[0] is not chunks:
        parts = [np.ascontiguousarray(part) for part in np.split(chunks, WARPS, axis=1 if mn_major else 0)]
        for part in parts:
            part.setflags(write=False)
        if len(_ROWS_OF_WARPS) > 4096:
            _ROWS_OF_WARPS.clear()
        kept = _ROWS_OF_WARPS[id(chunks)] = (chunks, parts)
    return kept[1]


def from_registers(words: np.ndarray, fmt: str) -> np.ndarray:
    """A warp's 16 x N of D's registers uint32[n, 32]: float32, or int32 for s32."""
    words = np.ascontiguousarray(words)
    if fmt == "f16":  # [8 columns, row half, group, 2 columns of a thread: thread in group, element]
        halves = words.view(np.float16).reshape(-1, 2, 8, 4, 2).transpose(1, 2, 0, 3, 4)
        return halves.reshape(ROWS, -1).astype(np.float32)
    values = words.view(np.float32 if fmt == "f32" else np.int32).reshape(-1, 2, 2, 8, 4)
    return values.transpose(1, 3, 0, 4, 2).reshape(ROWS, -1)  # [row half, group][8 columns, thread, element]


def to_registers(values: np.ndarray, fmt: str) -> np.ndarray:
    """Registers uint32[n, 32] of a warp's 16 x N."""
    if fmt == "f16":
        parts = values.astype(np.float16).reshape(2, 8, -1, 4, 2).transpose(2, 0, 1, 3, 4)
        return np.ascontiguousarray(parts).view(np.uint32).reshape(-1, 32)
    parts = np.ascontiguousarray(values).reshape(2, 8, -1, 4, 2).transpose(2, 0, 4, 1, 3)
    return np.ascontiguousarray(parts).view(np.uint32).reshape(-1, 32)


def warpgroup(w: Warp) -> Warpgroup:
    """The warpgroup of a warp."""
    groups = w.cta.warpgroups
    index = w.index // WARPS
    if index not in groups:
        if (index + 1) * WARPS > len(w.cta.warps):
            raise BadDescriptor(
                f"warp {w.index} executes wgmma and belongs to no whole warpgroup: the CTA has {len(w.cta.warps)} warps"
            )
        groups[index] = Warpgroup(w.cta, index)
    return groups[index]


@handler(
    "wgmma.mma_async.sync", "wgmma.mma_async.sp.sync",
    family=Family.WGMMA, destinations=1, collective=Collective.WARP, accumulates=True,
)  # fmt: skip
def mma_async(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """wgmma.mma_async computes D = A B + D, or D = A B, later. With .sp, metadata of A and a selector follow B."""
    hollow = m.recorder is not None and m.recorder.enough
    if hollow and warpgroup(w).leaves_out(w.index % WARPS):
        return
    f = form(ins.parts)
    d, a, b, *rest = ins.operands
    marks = None
    if f.sparse:
        metadata, selector, *rest = rest
        marks = sparse.fours(w.u32(metadata), w.scalar(selector, mask), WIDTH[f.a], f.k)
    scale_d, *rest = rest
    in_registers = isinstance(a, Vec)
    use_d = bool(scale_d.value) if isinstance(scale_d, Imm) else bool(w.pred(scale_d) & mask)
    flags = [immediate(operand) for operand in rest]  # scales of A and B, then which are transposed
    signs, transposed = (flags[:2], flags[2:]) if f.d != "s32" else ([1, 1], [])
    expected = 0 if f.a not in TRANSPOSABLE else 1 if in_registers else 2
    if len(transposed) != expected:
        raise UnsupportedInstruction(f"`{ins.text}`: {len(transposed)} transpose flags, {expected} expected")
    step = Step(
        form=f,
        d=d,
        a=None if in_registers else matrix_descriptor(w.scalar(a, mask)),
        b=matrix_descriptor(w.scalar(b, mask)),
        use_d=use_d,
        negate=(signs[0] < 0) != (signs[1] < 0),
        a_mn_major=bool(transposed[0]) if expected == 2 else False,
        b_mn_major=bool(transposed[-1]) if expected else False,
    )
    fragment = a_matrix(w.read_vec(a), f.a, f.stored_k) if in_registers and not hollow else None
    warpgroup(w).issue(m, w, ins, step, fragment, marks).hollow |= hollow


def immediate(operand: Operand) -> int:
    """The signed value of an immediate."""
    value = operand.value & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


@handler("wgmma.fence.sync", family=Family.WGMMA, destinations=0, collective=Collective.WARP)
def fence(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """wgmma.fence orders accesses to registers, which are in order here anyhow."""


@handler("wgmma.commit_group.sync", family=Family.WGMMA, destinations=0, collective=Collective.WARP)
def commit_group(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """wgmma.commit_group: what this warp has issued since the last one is a group."""
    group = warpgroup(w)
    group.close(m, w.index % WARPS)
    mine = group.issues[w.index % WARPS]
    mine.groups.append(mine.uncommitted)
    mine.uncommitted = []


@handler("wgmma.wait_group.sync", family=Family.WGMMA, destinations=0, collective=Collective.WARP)
def wait_group(m: Machine, w: Warp, ins: Instr, mask: int) -> Wait | None:
    """wgmma.wait_group N: until at most the N newest groups are pending."""
    part = w.index % WARPS
    group = warpgroup(w)
    groups = group.issues[part].groups
    newest = w.scalar(ins.operands[0], mask)
    while len(groups) > newest:
        for product in groups[0]:
            if part not in product.done:
                return Wait(on=product, text=product.describe)
        settled = groups.popleft()
        if m.order is not None and settled:
            warps = w.cta.warps[group.index * WARPS :]
            issuers = [
                (warp, mine[-1]) for warp, mine in zip(warps, settled[-1].orders, strict=False) if mine
            ]
            m.order.passed_queue(w, ins, group.order, settled[-1].number + 1, issuers)
    return None
