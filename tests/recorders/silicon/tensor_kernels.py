"""Kernels of tensor copies (TMA) in every swizzle, within and across the tensor's bounds, and of clusters."""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import cpasync
from silicon import inputs
from silicon.case import Case, unwritten

BLOCK = 128
SWIZZLE_BITS = {"none": 0, "32b": 1, "64b": 2, "128b": 3}
ROWS = 10  # of a box
FILLER = 0xEE  # shared memory before a copy


def _swizzled(span_bytes: int, bits: int, element) -> cute.ComposedLayout:
    """Shared layout (column, row) of a box whose rows are one swizzle span; 16 bytes move as one."""
    columns = span_bytes * 8 // element.width
    swizzle = cute.make_swizzle(bits, 4, 3)
    return cute.make_composed_layout(swizzle, 0, cute.make_layout((columns, ROWS), stride=(1, columns)))


def _view(tensor: cute.Tensor) -> cute.Tensor:
    """(row, column) as (column, row): TMA's order, the contiguous dimension first."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 0]))


def _load_host(bits: int, span: int, start: tuple[int, int]):
    """Each block loads one box, `start` (column, row) added to its place; shared memory is what it writes.

    bits: of the swizzle. span: bytes of a box's row.
    """
    size = span * ROWS

    @cute.kernel
    def tma_load(atom, coordinates: cute.Tensor, source: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        x, y, _ = cute.arch.block_idx()
        width, _, _ = cute.arch.grid_dim()
        smem = cutlass.memory.SmemAllocator()
        raw = smem.allocate_tensor(cutlass.Uint8, cute.make_layout(size), byte_alignment=1024)
        barrier = smem.allocate_array(cutlass.Int64, 1)
        for i in range(thread, size, BLOCK):
            raw[i] = cutlass.Uint8(FILLER)
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        layout = _swizzled(span, bits, source.element_type)
        shared = cute.make_tensor(
            cute.recast_ptr(raw.iterator, layout.inner, dtype=source.element_type), layout.outer
        )
        moved = cute.domain_offset(start, coordinates)
        tiles = cute.zipped_divide(moved, (span * 8 // source.element_type.width, ROWS))
        target, places = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), tiles
        )
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
        if thread < 32:
            cute.copy(atom, places[None, (x, y)], target, tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        for i in range(thread, size, BLOCK):
            out[y * width + x, i] = raw[i]

    @cute.jit
    def host(source: cute.Tensor, out: cute.Tensor):
        columns = span * 8 // source.element_type.width
        layout = _swizzled(span, bits, source.element_type)
        atom, coordinates = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), _view(source), layout, (columns, ROWS)
        )
        grid = (cute.ceil_div(source.shape[1], columns), cute.ceil_div(source.shape[0], ROWS), 1)
        tma_load(atom, coordinates, source, out).launch(grid=grid, block=(BLOCK, 1, 1))

    return host


def _store_host(bits: int, span: int, start: tuple[int, int], operation=None):
    """Each block stores (or, with `operation`, reduces) one box into the output, which it may overhang."""
    size = span * ROWS

    @cute.kernel
    def tma_store(atom, coordinates: cute.Tensor, data: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        x, y, _ = cute.arch.block_idx()
        width, _, _ = cute.arch.grid_dim()
        smem = cutlass.memory.SmemAllocator()
        raw = smem.allocate_tensor(cutlass.Uint8, cute.make_layout(size), byte_alignment=1024)
        for i in range(thread, size, BLOCK):
            raw[i] = data[y * width + x, i]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        layout = _swizzled(span, bits, out.element_type)
        shared = cute.make_tensor(
            cute.recast_ptr(raw.iterator, layout.inner, dtype=out.element_type), layout.outer
        )
        moved = cute.domain_offset(start, coordinates)
        tiles = cute.zipped_divide(moved, (span * 8 // out.element_type.width, ROWS))
        source, places = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), tiles
        )
        if thread < 32:
            cute.copy(atom, source, places[None, (x, y)])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def host(data: cute.Tensor, out: cute.Tensor):
        columns = span * 8 // out.element_type.width
        layout = _swizzled(span, bits, out.element_type)
        if cutlass.const_expr(operation is None):
            op = cpasync.CopyBulkTensorTileS2GOp()
        else:
            op = cpasync.CopyReduceBulkTensorTileS2GOp(operation)
        atom, coordinates = cpasync.make_tiled_tma_atom(op, _view(out), layout, (columns, ROWS))
        grid = (cute.ceil_div(out.shape[1], columns), cute.ceil_div(out.shape[0], ROWS), 1)
        tma_store(atom, coordinates, data, out).launch(grid=grid, block=(BLOCK, 1, 1))

    return host


# ---- a pipeline of tensor loads ------------------------------------------------------------------------

STAGES = 3
STEPS = 7
TILE_ROWS = 8
TILE_COLUMNS = 64  # of 16 bits: one 128-byte span
CONSUMERS = 96


@cute.kernel
def _tma_pipeline(atom, coordinates: cute.Tensor, out: cute.Tensor):
    """The DSL's PipelineTmaAsync: warp 0 loads tiles, warps 1 to 3 add up elements of each."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = cutlass.memory.SmemAllocator()
    layout = cute.make_composed_layout(
        cute.make_swizzle(3, 4, 3), 0, cute.make_layout((TILE_COLUMNS, TILE_ROWS, STAGES))
    )
    tile_bytes = TILE_COLUMNS * TILE_ROWS * 2
    raw = smem.allocate_tensor(cutlass.Uint8, cute.make_layout(tile_bytes * STAGES), byte_alignment=1024)
    shared = cute.make_tensor(
        cute.recast_ptr(raw.iterator, layout.inner, dtype=cutlass.Float16), layout.outer
    )
    channel = pipeline.PipelineTmaAsync.create(
        num_stages=STAGES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, CONSUMERS // 32),
        tx_count=tile_bytes,
        barrier_storage=smem.allocate_array(cutlass.Int64, 2 * STAGES),
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
    )
    cute.arch.sync_threads()
    tiles = cute.zipped_divide(coordinates, (TILE_COLUMNS, TILE_ROWS))
    target, places = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), tiles
    )
    if warp == 0:
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        for step in range(STEPS):
            channel.producer_acquire(state)
            barrier = channel.producer_get_barrier(state)
            cute.copy(atom, places[None, (0, step)], target[None, state.index], tma_bar_ptr=barrier)
            channel.producer_commit(state)
            state.advance()
    else:
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        consumer = thread - 32
        total = cutlass.Float32(0.0)
        for step in range(STEPS):
            channel.consumer_wait(state)
            value = shared[(consumer * 3 + step) % TILE_COLUMNS, consumer % TILE_ROWS, state.index]
            total = total * cutlass.Float32(0.75) + cutlass.Float32(value)
            channel.consumer_release(state)
            state.advance()
        out[consumer] = total


@cute.jit
def tma_pipeline(source: cute.Tensor, out: cute.Tensor):
    layout = cute.make_composed_layout(
        cute.make_swizzle(3, 4, 3), 0, cute.make_layout((TILE_COLUMNS, TILE_ROWS))
    )
    atom, coordinates = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), _view(source), layout, (TILE_COLUMNS, TILE_ROWS)
    )
    _tma_pipeline(atom, coordinates, out).launch(grid=(1, 1, 1), block=(32 + CONSUMERS, 1, 1))


# ---- multicast ----------------------------------------------------------------------------------------


def _multicast_host(mask_of_rank: tuple[int, ...]):
    """Each block of a cluster loads one box into the blocks of its mask, at a place for that sender."""
    senders = len(mask_of_rank)
    box = TILE_ROWS * TILE_COLUMNS * 2
    size = box * senders

    @cute.kernel
    def tma_multicast(atom, coordinates: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        smem = cutlass.memory.SmemAllocator()
        raw = smem.allocate_tensor(cutlass.Uint8, cute.make_layout(size), byte_alignment=1024)
        barrier = smem.allocate_array(cutlass.Int64, 1)
        for i in range(thread, size, BLOCK):
            raw[i] = cutlass.Uint8(FILLER)
        mask, expected = Int32(0), Int32(0)
        for sender in cutlass.range_constexpr(senders):
            if rank == sender:
                mask = Int32(mask_of_rank[sender])
            if (mask_of_rank[sender] >> rank) & 1 == 1:
                expected += box
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, expected)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        layout = cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3),
            0,
            cute.make_layout((TILE_COLUMNS, TILE_ROWS, senders)),
        )
        shared = cute.make_tensor(
            cute.recast_ptr(raw.iterator, layout.inner, dtype=cutlass.Float16), layout.outer
        )
        tiles = cute.zipped_divide(coordinates, (TILE_COLUMNS, TILE_ROWS))
        target, places = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), tiles
        )
        if thread < 32:
            cute.copy(
                atom,
                places[None, (0, block)],
                target[None, rank],
                tma_bar_ptr=barrier,
                mcast_mask=mask.to(cutlass.Int16),
            )
        cute.arch.mbarrier_wait(barrier, 0)
        for i in range(thread, size, BLOCK):
            out[block, i] = raw[i]
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def host(source: cute.Tensor, out: cute.Tensor):
        layout = cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3), 0, cute.make_layout((TILE_COLUMNS, TILE_ROWS))
        )
        atom, coordinates = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SMulticastOp(),
            _view(source),
            layout,
            (TILE_COLUMNS, TILE_ROWS),
        )
        tma_multicast(atom, coordinates, out).launch(
            grid=(out.shape[0], 1, 1), block=(BLOCK, 1, 1), cluster=(senders, 1, 1)
        )

    return host


# ---- cases ---------------------------------------------------------------------------------------------


def _bytes(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(inputs.words(seed, int(np.prod(shape))).astype(np.uint8).reshape(shape))


def _typed(seed: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bytes, as elements of a type: TMA moves them unseen."""
    return _bytes(seed, rows, columns * dtype.itemsize).view(dtype)


def _tiles(rows: int, columns: int, span: int, dtype: torch.dtype) -> int:
    return -(-columns * dtype.itemsize // span) * -(-rows // ROWS)


def _load(name: str, bits: int, span: int, dtype: torch.dtype, shape: tuple[int, int], start=(0, 0)) -> Case:
    count = _tiles(*shape, span, dtype)
    return Case(
        name,
        _load_host(bits, span, start),
        lambda: [_typed(70 + bits, *shape, dtype)],
        lambda: [unwritten(torch.uint8, count, span * ROWS)],
    )


def _store(name: str, bits: int, span: int, dtype: torch.dtype, shape: tuple[int, int], start=(0, 0)) -> Case:
    count = _tiles(*shape, span, dtype)
    return Case(
        name,
        _store_host(bits, span, start),
        lambda: [_bytes(80 + bits, count, span * ROWS)],
        lambda: [unwritten(dtype, *shape)],
    )


def _reduce(name: str, operation, dtype: torch.dtype, shape: tuple[int, int]) -> Case:
    """Operands are small integers: no rounding, whatever the order."""
    span = 128
    count = _tiles(*shape, span, dtype)
    elements = span * ROWS // dtype.itemsize

    def small(seed: int, *extents: int) -> torch.Tensor:
        return (
            torch.from_numpy(inputs.below(seed, int(np.prod(extents)), 100) - 50).reshape(extents).to(dtype)
        )

    return Case(
        name,
        _store_host(3, span, (0, 0), operation),
        lambda: [small(90, count, elements).view(torch.uint8)],
        lambda: [small(91, *shape)],
    )


_ADD = cute.ReductionOp.ADD
CASES = (
    _load("tma_load_none", 0, 48, torch.float16, (23, 72)),
    _load("tma_load_32b", 1, 32, torch.float16, (23, 40)),
    _load("tma_load_64b", 2, 64, torch.int32, (23, 36)),
    _load("tma_load_128b", 3, 128, torch.float16, (23, 136)),
    _load("tma_load_128b_bytes", 3, 128, torch.uint8, (17, 208)),
    _load("tma_load_128b_before_start", 3, 128, torch.float32, (23, 68), (-12, -3)),
    _load("tma_load_64b_before_start", 2, 64, torch.bfloat16, (12, 72), (-40, 7)),
    _load("tma_load_none_far_outside", 0, 64, torch.float16, (12, 40), (1000, -2000)),
    _store("tma_store_none", 0, 48, torch.float16, (23, 72)),
    _store("tma_store_32b", 1, 32, torch.float16, (23, 40)),
    _store("tma_store_64b", 2, 64, torch.int32, (23, 36)),
    _store("tma_store_128b", 3, 128, torch.bfloat16, (23, 136)),
    _reduce("tma_add_f32", _ADD, torch.float32, (23, 68)),
    _reduce("tma_add_f16", _ADD, torch.float16, (23, 136)),
    _reduce("tma_max_s32", cute.ReductionOp.MAX, torch.int32, (23, 68)),
    Case(
        "tma_pipeline",
        tma_pipeline,
        lambda: [torch.from_numpy(inputs.normals(97, 53 * TILE_COLUMNS)).reshape(53, TILE_COLUMNS).half()],
        lambda: [unwritten(torch.float32, CONSUMERS)],
    ),
    Case(
        "tma_multicast",
        _multicast_host((0b1111, 0b0010, 0b1100, 0b1001)),
        lambda: [_typed(96, 8 * TILE_ROWS, TILE_COLUMNS, torch.float16)],
        lambda: [unwritten(torch.uint8, 8, 4 * TILE_ROWS * TILE_COLUMNS * 2)],
    ),
    # What the H200 answers with an illegal instruction or a misaligned address.
    replace(
        _store("refused_tma_store_before_start", 3, 128, torch.float32, (23, 68), (-12, -3)), refused=True
    ),
    replace(_load("refused_tma_load_off_boundary", 3, 128, torch.float32, (23, 68), (-5, -3)), refused=True),
)
