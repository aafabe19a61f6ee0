"""tcgen05.mma: D = A * B + D, on one CTA or a pair. PTX ISA: "tcgen05.mma", "Data Path Layout Organization".

Operands are decoded exactly; products accumulate in float32 (BLAS, order unspecified as on hardware). The operands of
consecutive instructions on one accumulator are read at once, and the product of each is added by itself: how many of
them the schedule lets take effect together changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from warpspec.sim import sparsity
from warpspec.sim.errors import BadDescriptor, TmemFault, UnsupportedInstruction
from warpspec.sim.tcgen05 import metadata, operands
from warpspec.sim.tcgen05.instruction_descriptor import WORDS_PER_OPERAND_ROW, InstructionDescriptor
from warpspec.sim.tcgen05.memory import LANES, PARTITION_LANES, POISON, Tmem, address_parts
from warpspec.sim.tcgen05.operands import SharedOperand

PARTITIONS = LANES // PARTITION_LANES
# Scale exponents this far from 2**0 could leave float32's range before both scales are multiplied together.
SAFE_SCALE = 2.0**40
WORD_BYTES = SCALES_PER_WORD = 4
SCALE_ID_STEPS = {1: 1, 2: 2, 3: 1, 4: 4, 6: 2}  # step of scale factor ids; key: factors a row


@dataclass(slots=True)
class Mma:
    """One instruction. a, b: descriptors, or for `a_in_tmem` a tensor-memory address.

    scales_per_row: scale factors along one MMA's K (0: not block-scaled), at scale_a and scale_b.
    sparsity: address of the metadata of a sparse A.
    disabled_lanes: 128 bits per CTA, CTA 0 low; set bits keep their lane of D.
    """

    descriptor: InstructionDescriptor
    cta_group: int
    d: int
    a: int
    b: int
    a_in_tmem: bool = False
    enable_input_d: bool = True
    scale_input_d: int = 0
    disabled_lanes: int = 0
    weight_stationary: bool = False
    shift_a: bool = False
    scales_per_row: int = 0
    scale_a: int = 0
    scale_b: int = 0
    sparsity: int = 0

    @property
    def pipe(self) -> tuple:
        """The key of MMAs that take effect in order of issue: the accumulator and its shape."""
        return self.cta_group, self.d, self.descriptor.m, self.descriptor.n

    def scale_addresses(self, name: str, rows: int) -> list[int]:
        """Addresses of the words of scale factors of A or B: a word a row, and another one after those of all rows
        where the factors of K = 96 go beyond it."""
        d = self.descriptor
        address, first = (self.scale_a, d.scale_a_id) if name == "A" else (self.scale_b, d.scale_b_id)
        words = -(-(first + self.scales_per_row) // SCALES_PER_WORD)
        return [address + word * -(-rows // PARTITION_LANES) for word in range(words)]

    @property
    def flops(self) -> int:
        return 2 * self.descriptor.m * self.descriptor.n * self.descriptor.k

    def continues(self, before: Mma) -> bool:
        """Whether this MMA continues the accumulation of `before`, so that both may run as one operation."""
        one, two = before.descriptor, self.descriptor
        return (
            self.enable_input_d
            and self.d == before.d
            and self.scale_input_d == 0
            and not (self.shift_a or before.shift_a)
            and self.a_in_tmem == before.a_in_tmem
            and self.disabled_lanes == before.disabled_lanes
            and self.scales_per_row == before.scales_per_row
            and self.weight_stationary == before.weight_stationary
            and self.cta_group == before.cta_group
            and (one is two or _arithmetic(one) == _arithmetic(two))
        )


@cache
def _arithmetic(d: InstructionDescriptor) -> InstructionDescriptor:
    """The fields that fused instructions must have in common: all but scale factor ids and the sparsity selector."""
    return replace(d, scale_a_id=0, scale_b_id=0, selector=0) if d.scale_format or d.sparse else d


class MmaBatch:
    """A run of MMAs on one accumulator, in issue order; `append` refuses what does not continue it."""

    MAX_LENGTH = 16

    def __init__(self, first: Mma):
        self.mmas = [first]

    def append(self, mma: Mma) -> bool:
        if len(self.mmas) >= self.MAX_LENGTH or not mma.continues(self.mmas[-1]):
            return False
        self.mmas.append(mma)
        return True

    @property
    def flops(self) -> int:
        return sum(mma.flops for mma in self.mmas)

    def execute(self, ctas: Sequence) -> None:
        """Run on the CTAs of the group, even rank first; each has `.smem` (uint8 array) and `.tmem`
        (Tmem)."""
        run(self.mmas, ctas)


def run(mmas: Sequence[Mma], ctas: Sequence) -> None:
    """Execute a run of MMAs, each continuing the one before."""
    with np.errstate(all="ignore"):
        first = mmas[0]
        d = first.descriptor
        n_here = d.n // first.cta_group
        descriptors = tuple(mma.b for mma in mmas)
        parts = [
            operands.smem_operand(
                cta.smem, descriptors, n_here, d.b_format, d.kind, d.k, d.b_mn_major, b_row_chunks(d)
            )
            for cta in ctas
        ]
        b = parts[0] if len(parts) == 1 else np.concatenate(parts)  # [N, K]
        for rank, cta in enumerate(ctas):
            _run_cta(mmas, cta, rank, b)


def row_chunks(d: InstructionDescriptor) -> int:
    """Chunks of a K-major row of A in shared memory."""
    return d.row_words * WORD_BYTES // operands.CHUNK_BYTES


def b_row_chunks(d: InstructionDescriptor) -> int:
    """Chunks of a K-major row of B in shared memory."""
    return d.b_row_words * WORD_BYTES // operands.CHUNK_BYTES


def footprint(mmas: Sequence[Mma], ctas: Sequence) -> Iterator[tuple]:
    """The memory that a run of MMAs, each continuing the one before, accesses in each CTA.

    (CTA, operands in shared memory, indices of tensor memory that are read, index of D).
    """
    first = mmas[0]
    d = first.descriptor
    rows = d.m // first.cta_group
    columns = d.n // first.cta_group
    b = tuple(mma.b for mma in mmas)
    chunks = operands.operand_chunks(b, columns, d.b_format, d.k, d.b_mn_major, b_row_chunks(d))
    shared = [SharedOperand("B", b[0], columns, d.b_mn_major, chunks)]
    if not first.a_in_tmem:
        a = tuple(mma.a for mma in mmas)
        chunks = operands.operand_chunks(a, rows, d.a_format, d.stored_k, d.a_mn_major, row_chunks(d))
        shared.append(SharedOperand("A", a[0], rows, d.a_mn_major, chunks))
    for cta in ctas:
        layout = Accumulator(cta.tmem, first)
        lanes: slice | np.ndarray = slice(0, LANES)
        if layout.half_lanes:
            lanes = (np.arange(4)[:, None] * PARTITION_LANES + layout.lane + np.arange(16)).reshape(-1, 1)
        cells = []
        if first.a_in_tmem:
            for column, width in _runs((mma.a for mma in mmas), d.row_words):
                cells.append((lanes, _columns(lanes, column, width)))
        if d.sparse:
            for column in sorted({metadata.columns_of(mma.descriptor, mma.sparsity) for mma in mmas}):
                cells.append((lanes, _columns(lanes, *column)))
        if first.scales_per_row:
            for name, count in (("A", rows), ("B", layout.columns)):
                cells += _scale_cells([at for mma in mmas for at in mma.scale_addresses(name, count)], count)
        yield cta, shared, cells, (lanes, _columns(lanes, layout.column, layout.columns))


def _runs(addresses: Iterable[int], width: int) -> list[tuple[int, int]]:
    """(first column, columns) of operands of `width` columns at these addresses, joined where they touch."""
    runs: list[tuple[int, int]] = []
    for column in sorted({address_parts(address)[1] for address in addresses}):
        if runs and sum(runs[-1]) == column:
            runs[-1] = runs[-1][0], runs[-1][1] + width
        else:
            runs.append((column, width))
    return runs


def _scale_cells(addresses: list[int], rows: int) -> list[tuple]:
    """Indices of the scale factors of some rows, for MMAs that have them at these addresses: row r in lane r % 32 of
    each 32 lanes and column r // 32."""
    whole, rest = divmod(rows, PARTITION_LANES)
    cells: list[tuple] = []
    if whole:
        cells = [(slice(0, LANES), slice(at, at + width)) for at, width in _runs(addresses, whole)]
    if rest:
        lanes = (np.arange(PARTITIONS)[:, None] * PARTITION_LANES + np.arange(rest)).reshape(-1, 1)
        columns = sorted({address_parts(address)[1] + whole for address in addresses})
        cells.append((lanes, np.array(columns)))
    return cells


def _columns(lanes: slice | np.ndarray, column: int, width: int) -> slice | np.ndarray:
    """Tensor-memory columns as an index that broadcasts against `lanes`."""
    return slice(column, column + width) if isinstance(lanes, slice) else np.arange(column, column + width)


def _run_cta(mmas: Sequence[Mma], cta, rank: int, b: np.ndarray) -> None:
    first = mmas[0]
    layout = Accumulator(cta.tmem, first)
    # What is in tensor memory stands in each group's lanes.
    several = first.a_in_tmem or first.descriptor.sparse
    copies = [_read_a(mmas, cta, copy) for copy in range(layout.a_copies if several else 1)]
    k = first.descriptor.k
    for at, mma in enumerate(mmas):
        part = slice(at * k, (at + 1) * k)
        _add_product(mma, cta.tmem, layout, [a[:, part] for a in copies], b[:, part], rank)


def _add_product(
    mma: Mma, tmem: Tmem, layout: Accumulator, copies: list[np.ndarray], b: np.ndarray, rank: int
) -> None:
    """D = A * B + D of one instruction. copies: of A, one for all groups of lanes or one for each."""
    d = mma.descriptor
    negate = d.negate_a != d.negate_b
    if not mma.scales_per_row and len(copies) == 1 and not negate and layout.replaces(mma):
        np.matmul(copies[0], b.T, out=layout.words.view(np.float32))
    else:
        if mma.scales_per_row:
            product = _scaled_product(mma, tmem, layout, copies, b)
        else:  # each group of lanes reads its own copy of A and makes its own columns
            columns = np.split(b, len(copies))
            products = [a @ part.T for a, part in zip(copies, columns, strict=True)]
            product = products[0] if len(products) == 1 else np.concatenate(products, axis=1)
        if negate:
            product = -product
        layout.accumulate(product, mma, mma.disabled_lanes >> rank * LANES & ((1 << LANES) - 1))
    if mma.shift_a:
        _shift_a(mma, tmem)


class Accumulator:
    """The places of D's rows and columns in one CTA's tensor memory.

    One partition layout covers all: lane group g (of `groups`) holds columns [g * N / groups, (g + 1) * N /
    groups) of every row. Layouts A and D: one group of 128 lanes; B and E: two of 64; G: four of 32; F (M =
    64): one of 64 rows, 16 lanes of each warp's 32.
    """

    def __init__(self, tmem: Tmem, mma: Mma):
        d = mma.descriptor
        self.tmem = tmem
        self.rows = d.m // mma.cta_group
        self.lane, self.column = address_parts(mma.d)
        self.half_lanes = self.rows == 64 and mma.cta_group == 1 and not mma.weight_stationary
        self.groups = 1 if self.half_lanes else LANES // self.rows
        self.columns = d.n // self.groups
        self.a_copies = self.groups
        allowed = (0, 16) if self.half_lanes else (0,)
        if self.lane not in allowed:
            raise TmemFault(
                f"D at lane {self.lane}: for this shape it must be {' or '.join(map(str, allowed))}"
            )
        tmem.require(self.column, self.columns, "tcgen05.mma, matrix D,")

    def replaces(self, mma: Mma) -> bool:
        """Whether D becomes the product alone and occupies all lanes, so that BLAS may write it in place."""
        plain = self.groups == 1 and not self.half_lanes and not mma.disabled_lanes
        return plain and not mma.enable_input_d and mma.descriptor.d_format == "f32"

    @property
    def words(self) -> np.ndarray:
        """The words of D as uint32, in its columns of all lanes."""
        return self.tmem.data[:, self.column : self.column + self.columns]

    def accumulate(self, product: np.ndarray, mma: Mma, disabled: int) -> None:
        """Add float32 [rows, N] to D (or replace D), lanes set in `disabled` excepted. TmemFault if D was not written
        since its allocation."""
        d = mma.descriptor
        if mma.enable_input_d and self.words[self.lane, 0] == POISON and (self.words == POISON).all():
            raise TmemFault(
                f"tcgen05.mma adds to columns {self.column} to {self.column + self.columns - 1}, which nothing has "
                "written since they were allocated: an accumulator's first MMA takes enable-input-d (scale-d) false"
            )
        if (
            self.groups == 1
            and not (self.half_lanes or disabled or mma.scale_input_d)
            and d.d_format == "f32"
        ):
            values = self.words.view(np.float32)
            if mma.enable_input_d:
                np.add(values, product, out=values)
            else:
                values[...] = product
            return
        span = slice(self.column, self.column + self.columns)
        if self.half_lanes:
            shape, moved = (4, 16, d.n), product.reshape(4, 16, d.n)
            lanes = slice(self.lane, self.lane + 16)
            words = self.tmem.data.reshape(4, 32, -1)[:, lanes, span]
        else:
            shape = (self.groups, self.rows, self.columns)
            moved = product.reshape(self.rows, self.groups, self.columns).transpose(1, 0, 2)
            words = self.tmem.data.reshape(self.groups, self.rows, -1)[:, :, span]
        if disabled:
            keep = np.array([disabled >> lane & 1 for lane in range(LANES)], bool)
            keep = keep.reshape(4, 32)[:, lanes] if self.half_lanes else keep.reshape(shape[:2])
            before = words[keep]
        if d.d_format == "f32":
            values = words.view(np.float32)
            if not mma.enable_input_d:
                values[...] = moved
            elif mma.scale_input_d:
                values[...] = values * np.float32(2.0**-mma.scale_input_d) + moved
            else:
                np.add(values, moved, out=values)
        elif d.d_format == "f16":
            if mma.enable_input_d:
                old = words.astype(np.uint16).view(np.float16).astype(np.float32)
                moved = old * np.float32(2.0**-mma.scale_input_d) + moved
            words[...] = moved.astype(np.float16).view(np.uint16)
        else:
            total = moved.astype(np.int64)
            if mma.enable_input_d:
                total = total + words.view(np.int32)
            if d.saturate:
                total = np.clip(total, -(1 << 31), (1 << 31) - 1)
            words[...] = total.astype(np.uint32)
        if disabled:
            words[keep] = before


def _read_a(mmas: Sequence[Mma], cta, copy: int) -> np.ndarray:
    """float32[rows of this CTA, K]. `copy`: which of the lane groups that hold A, or its metadata, again (tensor memory
    only)."""
    d = mmas[0].descriptor
    stored = _read_stored(mmas, cta, copy)
    if not d.sparse:
        return stored
    rows = len(stored)
    marks = [metadata.fours(m.descriptor, cta.tmem, m.sparsity, copy * rows, rows) for m in mmas]
    return sparsity.dense(stored, np.concatenate(marks, axis=1), metadata.granularity(d))


def _read_stored(mmas: Sequence[Mma], cta, copy: int) -> np.ndarray:
    """The elements of A that are stored: float32[rows of this CTA, K], of a sparse A [rows, K / 2]."""
    first = mmas[0]
    d = first.descriptor
    rows = d.m // first.cta_group
    if not first.a_in_tmem:
        descriptors = tuple(mma.a for mma in mmas)
        return operands.smem_operand(
            cta.smem, descriptors, rows, d.a_format, d.kind, d.stored_k, d.a_mn_major, row_chunks(d)
        )
    if d.a_mn_major:
        raise UnsupportedInstruction("tcgen05.mma with A in tensor memory needs a K-major A")
    half_lanes = rows == 64 and first.cta_group == 1 and not first.weight_stationary
    parts = []
    for mma in mmas:
        lane, column = address_parts(mma.a)
        cta.tmem.require(column, d.row_words, "tcgen05.mma, matrix A,")
        expected = address_parts(mma.d)[0] if half_lanes else 0
        if lane != expected:
            raise TmemFault(
                f"A in tensor memory at lane {lane}: for this shape it must be {expected}, as for D"
            )
        words = cta.tmem.data[:, column : column + d.row_words]
        if half_lanes:
            parts.append(words.reshape(4, 32, -1)[:, lane : lane + 16].reshape(64, -1))
        else:
            parts.append(words[copy * rows : (copy + 1) * rows])
    return operands.decode_tmem(np.concatenate(parts, axis=1), d.a_format, d.kind)


def _shift_a(mma: Mma, tmem: Tmem) -> None:
    """.ashift: after the MMA, rows of A move down by one within each warp's 32 lanes; the last stays."""
    _, column = address_parts(mma.a)
    shift_rows_down(tmem, 0, LANES, column)


def shift_rows_down(tmem: Tmem, lane: int, lanes: int, column: int) -> None:
    """Row r takes what row r + 1 held, within each 32 lanes, 32 bytes wide; row 31 keeps its own."""
    tmem.require(column, WORDS_PER_OPERAND_ROW, "a shift of rows")
    span = slice(column, column + WORDS_PER_OPERAND_ROW)
    block = tmem.data[lane : lane + lanes, span].reshape(-1, PARTITION_LANES, WORDS_PER_OPERAND_ROW)
    block = block.copy()
    block[:, :-1] = block[:, 1:]
    tmem.data[lane : lane + lanes, span] = block.reshape(lanes, -1)


def _scaled_product(mma: Mma, tmem: Tmem, layout: Accumulator, copies: list, b: np.ndarray) -> np.ndarray:
    """(A * scale_A) (B * scale_B): float32 [rows, N]."""
    scale_a = _scales(mma, tmem, mma.scale_a, layout.rows, "A")
    n = layout.columns  # columns made by one lane group; its scales stand in that group's own partitions
    scale_b = _scales(mma, tmem, mma.scale_b, n, "B")
    per_group = PARTITIONS // layout.groups
    product = np.empty((layout.rows, b.shape[0]), np.float32)
    for group in range(layout.groups):
        a = copies[group] if len(copies) > 1 else copies[0]
        columns = slice(group * n, (group + 1) * n)
        own = slice(group * per_group, (group + 1) * per_group)
        own_a, own_b = scale_a[own], scale_b[own]
        # partition p of the group makes rows [32 p, 32 p + 32) with the scales of its own lanes
        if _same(own_a) and _same(own_b):
            product[:, columns] = scaled_matmul(a, own_a[0], b[columns], own_b[0])
            continue
        for p in range(per_group):
            rows = slice(p * PARTITION_LANES, (p + 1) * PARTITION_LANES)
            product[rows, columns] = scaled_matmul(a[rows], own_a[p, rows], b[columns], own_b[p])
    return product


def _scales(mma: Mma, tmem: Tmem, address: int, rows: int, name: str) -> np.ndarray:
    """float32[4 partitions, rows, scales_per_row]."""
    d = mma.descriptor
    lane, column = address_parts(address)
    first_byte = d.scale_a_id if name == "A" else d.scale_b_id
    if lane:
        raise TmemFault(f"scale factors of {name} at lane {lane}; they start at lane 0")
    if first_byte % SCALE_ID_STEPS[mma.scales_per_row]:
        raise BadDescriptor(f"scale factor id {first_byte} of {name} with {mma.scales_per_row} factors a row")
    columns = -(-rows // PARTITION_LANES)
    addresses = mma.scale_addresses(name, rows)
    tmem.require(column, columns * len(addresses), f"tcgen05.mma, scale factors of {name},")
    words = tmem.data[:, column : column + columns * len(addresses)]
    if len(addresses) > 1:  # put each row's words side by side
        words = np.ascontiguousarray(words.reshape(LANES, len(addresses), columns).transpose(0, 2, 1))
    return operands.scale_factors(
        words, first_byte, mma.scales_per_row, d.scale_format, row_words=len(addresses)
    )[:, :rows]


def _same(copies: np.ndarray) -> bool:
    """Whether all partitions hold the same scale factors (NaN equals NaN)."""
    bits = copies.view(np.uint32)
    return bool((bits == bits[:1]).all())


def scaled_matmul(a: np.ndarray, scale_a: np.ndarray, b: np.ndarray, scale_b: np.ndarray) -> np.ndarray:
    """a [m, K], scale_a [m, blocks], b [n, K], scale_b [n, blocks] -> [m, n] in float32."""
    wide = not (_in_safe_range(scale_a) and _in_safe_range(scale_b))
    dtype = np.float64 if wide else np.float32
    left = _apply(a.astype(dtype, copy=False), scale_a.astype(dtype, copy=False))
    right = _apply(b.astype(dtype, copy=False), scale_b.astype(dtype, copy=False))
    return (left @ right.T).astype(np.float32, copy=False)


def _in_safe_range(scale: np.ndarray) -> bool:
    low, high = scale.min(), scale.max()
    return bool(high <= SAFE_SCALE and (low >= 1 / SAFE_SCALE or low == 0))


def _apply(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    blocks = scale.shape[1]
    return (values.reshape(len(values), blocks, -1) * scale[:, :, None]).reshape(values.shape)
