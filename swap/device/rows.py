"""The rows phases: add up partial sums to vectors, exchange them with banks (``router``), write them and 1 / RMS. 256
threads process four rows at a time."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32

from warpspec.swap.config import GROUP_ROWS, ROW_THREADS, TILE_GROUPS, VECTOR
from warpspec.swap.device.flow import count, synchronize, wait_together
from warpspec.swap.device.router import Router, exchange, load_head, load_held, load_norm, load_weights
from warpspec.swap.device.row_group import RowThread, columns_of, inverse_rms, put_squares, row_sum, vector_of

SPLITS_AT_ONCE = 4  # splits whose partial sums a thread loads before it adds them


@cute.jit
def rows_phase(
    config: cutlass.Constexpr,
    kind: cutlass.Constexpr,
    ops,
    scratch,
    flow,
    place,
    event,
    step,
    ring=None,
):
    """Process all groups of this CTA, which are adjacent. Executed by the threads of ``flow.synchronize``.

    kind: one of ROWS_PHASES. place: (thread, CTA, CTAs). event: the event's number. step: FFN steps done. ring:
    ``RouterTile``, in the fused kernel, which also consumes the down counts of a row tile and produces its rows counts.
    """
    thread, cta, ctas = place
    rows = ops.vectors.shape[0]
    routes = cutlass.const_expr(kind != "rows")
    router = None
    if cutlass.const_expr(routes):
        weights = ring if cutlass.const_expr(config.fused) else load_weights(config, ops, thread)
        router = Router(weights, load_head(ops), load_norm(config, ops, thread % ROW_THREADS))
    if cutlass.const_expr(not config.fused):
        cute.arch.griddepcontrol_wait()
    groups = cute.ceil_div(rows, GROUP_ROWS)
    first, end = Int32(cta * groups // ctas), Int32((cta + 1) * groups // ctas)
    done = Int32(0)  # groups of the row tile that are not counted yet
    for group in cutlass.range(first, end, unroll=1):
        row_tile = group // TILE_GROUPS
        row = group * GROUP_ROWS + thread // ROW_THREADS
        at = RowThread(
            cutlass.min(row, rows - 1), Boolean(row < rows), thread // ROW_THREADS, thread % ROW_THREADS
        )
        held = load_held(config, ops, at) if cutlass.const_expr(routes) else None
        if cutlass.const_expr(config.fused and kind != "first"):  # noqa: SIM102
            if (group == first) | (group % TILE_GROUPS == 0):
                down_tiles = config.d_model // config.tiles.down_n
                wait_together(flow.tile("down", row_tile), step * down_tiles * config.splits, thread)
        values = summed(config, ops, at) if cutlass.const_expr(kind != "first") else spread(config, ops, at)
        if cutlass.const_expr(routes):
            exchange(config, ops, scratch, router, held, at, thread, values, event)
        store(config, ops, at, values)
        put_squares(values, scratch, at, 0)
        synchronize()
        total = row_sum(scratch, at, 0)
        if at.in_range & (at.member == 0):
            ops.inverse[at.row] = inverse_rms(config, total)
        done += 1
        if cutlass.const_expr(config.fused):
            if (group + 1 == end) | ((group + 1) % TILE_GROUPS == 0):
                count(flow.tile("rows", row_tile), thread, done)
                done = Int32(0)
            else:
                free_scratch(routes)
        else:
            free_scratch(routes)


@cute.jit
def free_scratch(routes: cutlass.Constexpr):
    """Barrier before the next group's squares overwrite this group's. With a router, ``exchange`` has barriers before
    them."""
    if cutlass.const_expr(not routes):
        synchronize()


@cute.jit
def spread(config: cutlass.Constexpr, ops, at) -> cute.Tensor:
    """A core's first vector: x * core_scale + core_shift in fp32, rounded to bf16 like all vectors."""
    cores = ops.core_scale.shape[0]
    request, core = at.row // cores, at.row % cores
    values = cute.make_rmem_tensor(columns_of(config), Float32)
    for i in cutlass.range_constexpr(columns_of(config) // VECTOR):
        x = cute.make_rmem_tensor(VECTOR, BFloat16)
        scale, shift = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))
        cute.autovec_copy(vector_of(ops.x[request, None], i, at.member), x)
        cute.autovec_copy(vector_of(ops.core_scale[core, None], i, at.member), scale)
        cute.autovec_copy(vector_of(ops.core_shift[core, None], i, at.member), shift)
        for j in cutlass.range_constexpr(VECTOR):
            value = x[j].to(Float32) * scale[j] + shift[j]
            values[i * VECTOR + j] = value.to(BFloat16).to(Float32)
    return values


@cute.jit
def summed(config: cutlass.Constexpr, ops, at) -> cute.Tensor:
    """An FFN step's result: the splits' sums added in order, plus the vector itself if there is a residual."""
    vectors = columns_of(config) // VECTOR
    values = cute.make_rmem_tensor(columns_of(config), Float32)
    for first in cutlass.range_constexpr(0, config.splits, SPLITS_AT_ONCE):
        taken = min(SPLITS_AT_ONCE, config.splits - first)
        parts = cute.make_rmem_tensor((VECTOR, vectors, taken), Float32)
        for split in cutlass.range_constexpr(taken):  # all loads first: they overlap
            for i in cutlass.range_constexpr(vectors):
                source = vector_of(ops.partial[first + split, at.row, None], i, at.member)
                cute.autovec_copy(source, parts[None, i, split])
        for split in cutlass.range_constexpr(taken):
            for i in cutlass.range_constexpr(columns_of(config)):
                part = parts[i % VECTOR, i // VECTOR, split]
                values[i] = part if cutlass.const_expr(first + split == 0) else values[i] + part
    for i in cutlass.range_constexpr(vectors):
        old = cute.make_rmem_tensor(VECTOR, BFloat16)
        if cutlass.const_expr(config.residual):
            cute.autovec_copy(vector_of(ops.vectors[at.row, None], i, at.member), old)
        for j in cutlass.range_constexpr(VECTOR):
            value = values[i * VECTOR + j]
            if cutlass.const_expr(config.residual):
                value = value + old[j].to(Float32)
            values[i * VECTOR + j] = value.to(BFloat16).to(Float32)
    return values


@cute.jit
def store(config: cutlass.Constexpr, ops, at, values: cute.Tensor):
    """Write the vector as bf16."""
    if at.in_range:
        for i in cutlass.range_constexpr(columns_of(config) // VECTOR):
            rounded = cute.make_rmem_tensor(VECTOR, BFloat16)
            for j in cutlass.range_constexpr(VECTOR):
                rounded[j] = values[i * VECTOR + j].to(BFloat16)
            cute.autovec_copy(rounded, vector_of(ops.vectors[at.row, None], i, at.member))
