"""Kernels on shared and global memory: transposes, vectors, atomics, cp.async, bulk copies."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass import Int32
from silicon import compare, inputs
from silicon.assembly import ptx
from silicon.case import Case, unwritten

WARP = 32


def words64(address) -> tuple:
    """Low and high word of a 64-bit address."""
    return Int32(address & 0xFFFFFFFF), Int32(address >> 32)


def shared_bytes(count: int, alignment: int = 128):
    """Shared address (Int32) and tensor (Uint8) of `count` bytes."""
    smem = cutlass.memory.SmemAllocator()
    return smem.allocate_tensor(cutlass.Uint8, cute.make_layout(count), byte_alignment=alignment)


# ---- transposes through shared memory, vector widths ---------------------------------------------------

TILE = 32
ROWS = 8  # thread rows


@cute.kernel
def _transpose(source: cute.Tensor, out: cute.Tensor):
    x, y, _ = cute.arch.thread_idx()
    block_x, block_y, _ = cute.arch.block_idx()
    smem = cutlass.memory.SmemAllocator()
    tile = smem.allocate_tensor(source.element_type, cute.make_layout((TILE, TILE), stride=(TILE + 1, 1)))
    for i in cutlass.range_constexpr(TILE // ROWS):
        tile[y + i * ROWS, x] = source[block_y * TILE + y + i * ROWS, block_x * TILE + x]
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(TILE // ROWS):
        out[block_x * TILE + y + i * ROWS, block_y * TILE + x] = tile[x, y + i * ROWS]


@cute.jit
def transpose(source: cute.Tensor, out: cute.Tensor):
    grid = (source.shape[1] // TILE, source.shape[0] // TILE, 1)
    _transpose(source, out).launch(grid=grid, block=(TILE, ROWS, 1))


# ---- loads and stores of every width -------------------------------------------------------------------

BLOCK = 128
SLOT = 16  # bytes a thread
WIDTHS = ("b8", "b16", "b32", "b64", "v2.b8", "v4.b8", "v2.b16", "v4.b16", "v2.b32", "v4.b32", "v2.b64")
SIGN_EXTENDED = ("s8", "s16", "u8", "u16")


def _move(width: str, space: str) -> str:
    """Load from $0 and store to $1 (shared addresses or, for global, 64-bit addresses in word pairs)."""
    bits = int(width.rpartition("b")[2])
    count = int(width[1]) if width.startswith("v") else 1
    registers = [f"%v{i}" for i in range(count)]
    operand = f"{{{', '.join(registers)}}}" if count > 1 else registers[0]
    declare = f".reg .b{max(bits, 16)} {', '.join(registers)};"
    if space == "shared":
        return f"{{ {declare} ld.shared.{width} {operand}, [$0]; st.shared.{width} [$1], {operand}; }}"
    addresses = ".reg .b64 %from, %to; mov.b64 %from, {$0, $1}; mov.b64 %to, {$2, $3};"
    move = f"ld.global.{width} {operand}, [%from]; st.global.{width} [%to], {operand};"
    return f"{{ {declare} {addresses} {move} }}"


@cute.kernel
def _widths(source: cute.Tensor, out: cute.Tensor, extended: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    smem = shared_bytes(2 * BLOCK * SLOT)
    base = smem.iterator.toint()
    for i in cutlass.range_constexpr(SLOT):
        smem[thread * SLOT + i] = source[thread * SLOT + i]
        smem[(BLOCK + thread) * SLOT + i] = cutlass.Uint8(0)
    cute.arch.sync_threads()
    other = (thread * 5 + 3) % BLOCK
    for n in cutlass.range_constexpr(len(WIDTHS)):
        ptx(_move(WIDTHS[n], "shared"), base + other * SLOT, base + (BLOCK + thread) * SLOT, results=0)
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(SLOT):
            out[n, thread * SLOT + i] = smem[(BLOCK + thread) * SLOT + i]
            smem[(BLOCK + thread) * SLOT + i] = cutlass.Uint8(0)
        cute.arch.sync_threads()
    address = source.iterator.toint() + cutlass.Int64(other * SLOT)
    for n in cutlass.range_constexpr(len(WIDTHS)):
        target = out.iterator.toint() + cutlass.Int64((len(WIDTHS) + n) * BLOCK * SLOT + thread * SLOT)
        ptx(_move(WIDTHS[n], "global"), *words64(address), *words64(target), results=0)
    for n in cutlass.range_constexpr(len(SIGN_EXTENDED)):
        load = "ld.shared." + SIGN_EXTENDED[n] + " $0, [$1];"
        extended[n, thread] = ptx(load, base + other * SLOT)[0]


@cute.jit
def widths(source: cute.Tensor, out: cute.Tensor, extended: cute.Tensor):
    _widths(source, out, extended).launch(grid=(1, 1, 1), block=(BLOCK, 1, 1))


# ---- atomics -------------------------------------------------------------------------------------------

ATOMICS = (
    *(f"{op}.{t}" for op in ("add", "min", "max") for t in ("u32", "s32")),
    *(f"{op}.b32" for op in ("and", "or", "xor", "exch")),
    *("inc.u32", "dec.u32", "add.f32", "add.noftz.f16x2", "add.noftz.bf16x2", "cas.b32"),
)
WIDE_ATOMICS = (
    *(f"{op}.{t}64" for op in ("min", "max") for t in ("u", "s")),
    *("add.u64", "and.b64", "or.b64", "xor.b64", "exch.b64", "add.f64", "cas.b64"),
)
_NO_RED = ("exch", "cas")


def _atomic(op: str, space: str, reduction: bool) -> str:
    """Results $0 $1 (atom only), then the address in two words, the operand, for cas the new value.

    64-bit operations take (operand, value) as the words of one operand, (value, operand) as the other's.
    """
    wide = op.endswith("64")
    first = 0 if reduction else 2
    low, high, value, extra = (f"${first + i}" for i in range(4))
    declare = [".reg .b64 %at, %v, %w, %old; .reg .b32 %o;", f"mov.b64 %at, {{{low}, {high}}};"]
    operand, other, old = (value, extra, "%o")
    if wide:
        declare.append(f"mov.b64 %v, {{{value}, {extra}}}; mov.b64 %w, {{{extra}, {value}}};")
        operand, other, old = ("%v", "%w", "%old")
    if space == "shared":
        declare.append(".reg .b32 %sat; cvt.u32.u64 %sat, %at;")
    at = "%sat" if space == "shared" else "%at"
    if reduction:
        return "{ " + " ".join(declare) + f" red.{space}.{op} [{at}], {operand}; }}"
    arguments = f"{operand}, {other}" if op.startswith("cas") else operand
    finish = "mov.b64 {$0, $1}, %old;" if wide else "mov.b32 $0, %o; mov.b32 $1, 0;"
    return "{ " + " ".join(declare) + f" atom.{space}.{op} {old}, [{at}], {arguments}; {finish} }}"


def _atomics_host(ops: tuple[str, ...], space: str):
    """Each thread on 8 bytes of its own: old values, and memory after an atom and a red of each kind."""
    bodies = [
        (_atomic(op, space, False), None if op[:3] in ("exc", "cas") else _atomic(op, space, True))
        for op in ops
    ]

    @cute.kernel
    def atomics(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, old: cute.Tensor, memory: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        smem = cutlass.memory.SmemAllocator()
        cells = smem.allocate_tensor(
            cutlass.Int32, cute.make_layout((BLOCK, 2), stride=(2, 1)), byte_alignment=8
        )
        for n in cutlass.range_constexpr(len(bodies)):
            if cutlass.const_expr(space == "shared"):
                cells[thread, 0] = a[thread]
                cells[thread, 1] = b[thread]
                address = (cells.iterator.toint() + thread * 8, Int32(0))
            else:
                memory[n, thread, 0] = a[thread]
                memory[n, thread, 1] = b[thread]
                place = memory.iterator.toint() + cutlass.Int64((n * BLOCK + thread) * 8)
                address = words64(place)
            # Half of the comparisons of cas succeed.
            operand, other = (c[thread], a[thread])
            if cutlass.const_expr(ops[n].startswith("cas")):  # noqa: SIM102 - known when compiling
                if thread % 2 == 0:
                    operand = a[thread]
                    other = b[thread]
            low, high = ptx(bodies[n][0], *address, operand, other, results=2)
            old[n, thread, 0] = low
            old[n, thread, 1] = high
            if cutlass.const_expr(bodies[n][1] is not None):
                ptx(bodies[n][1], *address, b[thread], c[thread], results=0)
            if cutlass.const_expr(space == "shared"):
                memory[n, thread, 0] = cells[thread, 0]
                memory[n, thread, 1] = cells[thread, 1]

    @cute.jit
    def host(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, old: cute.Tensor, memory: cute.Tensor):
        atomics(a, b, c, old, memory).launch(grid=(1, 1, 1), block=(BLOCK, 1, 1))

    return host


CONTENDED = ("add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32", "inc.u32", "dec.u32", "add.f32")
CELLS = 5
COUNTERS = 4  # blocks that meet on global memory


@cute.kernel
def _contended(
    values: cute.Tensor, start: cute.Tensor, out: cute.Tensor, shared_out: cute.Tensor, tickets: cute.Tensor
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    smem = cutlass.memory.SmemAllocator()
    cells = smem.allocate_tensor(cutlass.Int32, cute.make_layout((len(CONTENDED), CELLS), stride=(CELLS, 1)))
    if thread < CELLS:
        for n in cutlass.range_constexpr(len(CONTENDED)):
            cells[n, thread] = start[n]
    cute.arch.sync_threads()
    cell = (thread * 7 + block) % CELLS
    for n in cutlass.range_constexpr(len(CONTENDED)):
        value = values[n, block * BLOCK + thread]
        inside = (cells.iterator.toint() + (n * CELLS + cell) * 4, Int32(0))
        ptx(_atomic(CONTENDED[n], "shared", True), *inside, value, Int32(0), results=0)
        outside = words64(out.iterator.toint() + cutlass.Int64((n * CELLS + cell) * 4))
        ptx(_atomic(CONTENDED[n], "global", False), *outside, value, Int32(0), results=2)
    # Everybody draws a ticket; whoever draws it leaves a mark, so that a ticket drawn twice shows.
    counter = words64(tickets.iterator.toint())
    ticket, _ = ptx(_atomic("inc.u32", "global", False), *counter, Int32(-1), Int32(0), results=2)
    mark = words64(tickets.iterator.toint() + cutlass.Int64((ticket + 1) * 4))
    ptx(_atomic("add.u32", "global", True), *mark, Int32(1), Int32(0), results=0)
    cute.arch.sync_threads()
    if thread < CELLS:
        for n in cutlass.range_constexpr(len(CONTENDED)):
            shared_out[block, n, thread] = cells[n, thread]


@cute.jit
def contended(
    values: cute.Tensor, start: cute.Tensor, out: cute.Tensor, shared_out: cute.Tensor, tickets: cute.Tensor
):
    _contended(values, start, out, shared_out, tickets).launch(grid=(COUNTERS, 1, 1), block=(BLOCK, 1, 1))


def _contended_inputs() -> list[torch.Tensor]:
    values = inputs.words(40, len(CONTENDED) * COUNTERS * BLOCK).reshape(len(CONTENDED), -1)
    small = inputs.below(41, values[0].size, 64).astype(np.float32) - 32  # sums are exact in any order
    values[-1] = small.view(np.uint32)
    values[-3:-1] = 37  # inc and dec wrap at one bound
    start = np.array([1, 5, 5, 0xFFFFFFFF, 0, 0xABCD, 0, 0, 0], np.uint32)
    return [inputs.tensor(values), inputs.tensor(start)]


# ---- cp.async ------------------------------------------------------------------------------------------

# (bytes, cache operator, bytes read: the rest is zero)
COPIES = (
    (4, "ca", 4),
    (8, "ca", 8),
    (16, "ca", 16),
    (16, "cg", 16),
    (4, "ca", 3),
    (8, "ca", 0),
    (16, "cg", 5),
)
STEPS = 4


@cute.kernel
def _cp_async(source: cute.Tensor, out: cute.Tensor, ring: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    smem = shared_bytes(BLOCK * SLOT)
    mine = smem.iterator.toint() + thread * SLOT
    for n in cutlass.range_constexpr(len(COPIES)):
        size, cache, read = COPIES[n]
        for i in cutlass.range_constexpr(SLOT):
            smem[thread * SLOT + i] = cutlass.Uint8(0xEE)
        start = words64(source.iterator.toint() + cutlass.Int64(((thread * 3 + n) % BLOCK) * SLOT))
        copy = f"cp.async.{cache}.shared.global [$0], [%at], {size}, {read};"
        text = f"{{ .reg .b64 %at; mov.b64 %at, {{$1, $2}}; {copy} }}"
        ptx(text, mine, *start, results=0)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        other = (thread + 1) % BLOCK
        for i in cutlass.range_constexpr(SLOT):
            out[n, other * SLOT + i] = smem[other * SLOT + i]
        cute.arch.sync_threads()
    # A ring of two stages: the copy of the next step is under way while this one's is used.
    stages = shared_bytes(2 * BLOCK * SLOT)
    words = cute.make_tensor(
        cute.recast_ptr(stages.iterator, dtype=cutlass.Int32),
        cute.make_layout((2, BLOCK, 4), stride=(BLOCK * 4, 4, 1)),
    )
    text = "{ .reg .b64 %at; mov.b64 %at, {$1, $2}; cp.async.cg.shared.global [$0], [%at], 16; }"
    total = Int32(0)
    for step in cutlass.range_constexpr(STEPS + 1):
        if cutlass.const_expr(step < STEPS):
            target = stages.iterator.toint() + (step % 2) * BLOCK * SLOT + thread * SLOT
            place = ((thread * 7 + step * 11) % BLOCK) * SLOT
            ptx(text, target, *words64(source.iterator.toint() + cutlass.Int64(place)), results=0)
        cute.arch.cp_async_commit_group()
        if cutlass.const_expr(step > 0):
            cute.arch.cp_async_wait_group(1)
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(4):
                total = total * 31 + words[(step - 1) % 2, (thread + 9) % BLOCK, i]
            cute.arch.sync_threads()
    ring[thread] = total


@cute.jit
def cp_async(source: cute.Tensor, out: cute.Tensor, ring: cute.Tensor):
    _cp_async(source, out, ring).launch(grid=(1, 1, 1), block=(BLOCK, 1, 1))


# ---- bulk copies ---------------------------------------------------------------------------------------

BULK_BYTES = 1024
PIECES = ((0, 256), (256, 16), (512, 496))  # (offset, bytes) of one copy each


@cute.kernel
def _bulk(source: cute.Tensor, out: cute.Tensor, reduced: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    data = smem.allocate_tensor(cutlass.Uint8, cute.make_layout(BULK_BYTES), byte_alignment=128)
    barrier = smem.allocate_array(cutlass.Int64, 1)
    for i in cutlass.range_constexpr(BULK_BYTES // BLOCK):
        data[i * BLOCK + thread] = cutlass.Uint8(0xEE)
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    load = (
        "{ .reg .b64 %at; mov.b64 %at, {$1, $2}; "
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [%at], $3, [$4]; }"
    )
    if thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, sum(size for _, size in PIECES))
        for n in cutlass.range_constexpr(len(PIECES)):
            offset, size = PIECES[n]
            start = words64(source.iterator.toint() + cutlass.Int64(offset + 16))
            target = data.iterator.toint() + offset
            ptx(load, target, *start, Int32(size), barrier.toint(), results=0)
    cute.arch.mbarrier_wait(barrier, 0)
    for i in cutlass.range_constexpr(BULK_BYTES // BLOCK):
        out[0, i * BLOCK + thread] = data[i * BLOCK + thread]
    cute.arch.sync_threads()
    data[thread * 4 + 1] = cutlass.Uint8(thread)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    if thread == 0:
        store = (
            "{ .reg .b64 %at; mov.b64 %at, {$0, $1}; "
            "cp.async.bulk.global.shared::cta.bulk_group [%at], [$2], $3; }"
        )
        target = words64(out.iterator.toint() + cutlass.Int64(BULK_BYTES + 48))
        ptx(store, *target, data.iterator.toint() + 16, Int32(496), results=0)
        target = words64(reduced.iterator.toint())
        for n in cutlass.range_constexpr(len(BULK_REDUCTIONS)):
            add = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{BULK_REDUCTIONS[n]} [%at], [$2], $3;"
            place = words64(reduced.iterator.toint() + cutlass.Int64(n * 256))
            text = "{ .reg .b64 %at; mov.b64 %at, {$0, $1}; " + add + " }"
            ptx(text, *place, data.iterator.toint() + n * 64, Int32(240), results=0)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)


BULK_REDUCTIONS = ("add.u32", "min.s32", "max.u64", "and.b32", "or.b64", "xor.b32", "inc.u32", "add.u64")


@cute.jit
def bulk(source: cute.Tensor, out: cute.Tensor, reduced: cute.Tensor):
    _bulk(source, out, reduced).launch(grid=(1, 1, 1), block=(BLOCK, 1, 1))


# ---- cases


def _bytes(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(inputs.words(seed, int(np.prod(shape))).astype(np.uint8).reshape(shape))


def _words(seed: int, *shape: int) -> torch.Tensor:
    return inputs.tensor(inputs.words(seed, int(np.prod(shape))).reshape(shape))


def _atomics(ops: tuple[str, ...], space: str, operands: list[np.ndarray]) -> Case:
    formats = tuple(op.rpartition(".")[2] if "add" in op else None for op in ops)
    wide = ops is WIDE_ATOMICS
    suffix = "_wide" if wide else ""
    return Case(
        f"atomics_{space}{suffix}",
        _atomics_host(ops, space),
        lambda: [inputs.tensor(word[:BLOCK]) for word in operands],
        lambda: [unwritten(torch.int32, len(ops), BLOCK, 2) for _ in range(2)],
        compare.of_formats(formats),
    )


CASES = (
    Case("transpose", transpose, lambda: [_words(30, 64, 96)], lambda: [unwritten(torch.int32, 96, 64)]),
    Case(
        "widths",
        widths,
        lambda: [_bytes(31, BLOCK * SLOT)],
        lambda: [
            torch.zeros(2 * len(WIDTHS), BLOCK * SLOT, dtype=torch.uint8),
            unwritten(torch.int32, len(SIGN_EXTENDED), BLOCK),
        ],
    ),
    _atomics(ATOMICS, "shared", inputs.float_operands(32)),
    _atomics(ATOMICS, "global", inputs.float_operands(33)),
    _atomics(WIDE_ATOMICS, "shared", inputs.double_operands(34)),
    _atomics(WIDE_ATOMICS, "global", inputs.double_operands(35)),
    Case(
        "atomics_contended",
        contended,
        _contended_inputs,
        lambda: [
            _contended_inputs()[1][:, None].repeat(1, CELLS),
            unwritten(torch.int32, COUNTERS, len(CONTENDED), CELLS),
            torch.zeros(COUNTERS * BLOCK + 1, dtype=torch.int32),
        ],
    ),
    Case(
        "cp_async",
        cp_async,
        lambda: [_bytes(36, BLOCK * SLOT)],
        lambda: [unwritten(torch.uint8, len(COPIES), BLOCK * SLOT), unwritten(torch.int32, BLOCK)],
    ),
    Case(
        "bulk_copy",
        bulk,
        lambda: [_bytes(37, BULK_BYTES + 32)],
        lambda: [unwritten(torch.uint8, 2, BULK_BYTES), _words(38, len(BULK_REDUCTIONS), 64)],
    ),
)
