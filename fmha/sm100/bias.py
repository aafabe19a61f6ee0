"""Additive bias [B or 1, Hq or 1, Sq, Sk], bf16 or fp32: streamed through shared memory by TMA, or, where its
rows are not aligned for TMA, read from global memory by the threads that add it.

Scores become logits in log2 units (``device.logits``). In shared memory a KV tile's bias is a sequence of boxes, each
128 bytes of keys by the rows of the M tile: (query, head) packed like Q's, or one row per query if the heads share it.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from warpspec.common.device import tma
from warpspec.common.hardware import VECTOR_BYTES
from warpspec.common.logarithms import LOG2_E
from warpspec.fmha.device.bias import TYPES, row_of
from warpspec.fmha.device.logits import map_pair

SWIZZLE_ROWS = 8  # rows after which the swizzle repeats


def make_load(config, bias: cute.Tensor):
    """``tma.make_load`` of the bias. Host side."""
    batch, heads, seq_q, seq_k = bias.shape
    # (KEY, HEAD, QUERY, BATCH)
    view = cute.make_tensor(
        bias.iterator,
        cute.make_layout(
            (seq_k, heads, seq_q, batch), stride=(1, bias.stride[1], bias.stride[2], bias.stride[0])
        ),
    )
    return tma.make_load(view, config.bias_box)


def ring(config, atom, coordinates, base: cute.Pointer, tile) -> tma.TileRing | None:
    """The ring of boxes, ``bias_boxes`` of them per KV tile, or None. base: its shared memory."""
    if not config.bias_stages:
        return None
    first_head = tile.first_head if config.logits.bias.heads else 0
    bias = coordinates[None, None, None, tile.batch if config.logits.bias.batches else 0]
    bias = cute.domain_offset((0, first_head, tile.first_query), bias)
    # (KEY, HEAD, QUERY, BOX)
    boxes = cute.local_tile(bias, config.bias_box, (None, 0, 0))
    stages = config.bias_stages * config.bias_boxes
    shared = tma.shared_tiles(
        base, TYPES[config.logits.bias.dtype], config.bias_box, stages, config.bias_box_room
    )
    return tma.TileRing.make(atom, boxes, shared)


def load(config, channels, boxes: tma.TileRing, tile, step) -> None:
    """Issue the loads of the bias of the KV tile of visit ``step``. Consumes bias_empty, produces bias_full."""
    full = channels["bias_full"]
    channels["bias_empty"].wait_previous(step)
    full.expect_bytes(step, config.bias_boxes * tma.tile_bytes(config.bias_box))
    for box in range(config.bias_boxes):
        stage = full.stage(step) * config.bias_boxes + box
        boxes.load(tile * config.bias_boxes + box, stage, full.barrier(step))


def source(
    config, bias: cute.Tensor | None, tile, row, base: cute.Pointer
) -> cute.Pointer | cute.Tensor | None:
    """Where a thread finds its row's bias: the ring at ``base`` in shared memory, or the row in global memory."""
    if config.bias_stages:
        return base
    return row_of(config, bias, tile.place(row.index)) if config.logits.bias else None


@cute.jit
def add(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    row,
    bias,
    scores: cute.Tensor,
    first_key,
    step,
    numbers,
    masked: cutlass.Constexpr,
):
    """Turn scores (n) fp32 of the KV tile of visit ``step`` into logits in log2 units with their bias, in place.

    bias: Uint8 pointer to the ring in shared memory, or the row (KEY) in global memory. masked: the tile may reach past
    the keys; the caller hides the results there. Consumes bias_full, produces bias_empty.
    """
    if cutlass.const_expr(config.bias_stages > 0):
        full = channels["bias_full"]
        full.wait(step)
        index = row.index if cutlass.const_expr(config.logits.bias.heads) else row.index // config.rows.pack
        index = cutlass.min(index, config.bias_rows - 1)  # idle rows may lie past the box
        start = bias + full.stage(step) * config.bias_tile_bytes + index * tma.ROW_BYTES
        vectors = tma.ROW_BYTES // VECTOR_BYTES
        dtype = TYPES[config.logits.bias.dtype]
        words = VECTOR_BYTES * 8 // dtype.width
        for place in cutlass.range_constexpr(vectors):
            # One address per place; boxes lie at constant distances from it, which cost no register.
            base = (start + (place ^ index % SWIZZLE_ROWS) * VECTOR_BYTES).align(VECTOR_BYTES)
            base = cute.recast_ptr(base, dtype=dtype)
            for box in cutlass.range_constexpr(config.bias_boxes):
                source = base + box * config.bias_box_room * 8 // dtype.width
                keys = cute.make_rmem_tensor(words, dtype)  # (KEY)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(words)), keys)
                for i in cutlass.range_constexpr(0, words, 2):
                    key = (box * vectors + place) * words + i
                    add_pair(config.logits, scores, key, (keys[i], keys[i + 1]), numbers)
        cute.arch.fence_view_async_shared()  # the reads come before what the copy engine writes there next
        channels["bias_empty"].arrive(step)
    else:
        last = cute.size(bias) - 1
        start = bias.iterator + first_key
        for i in cutlass.range_constexpr(0, config.tile_n, 2):
            pair = cute.make_rmem_tensor(2, TYPES[config.logits.bias.dtype])
            pair.fill(0.0)
            for place in cutlass.range_constexpr(2):
                if cutlass.const_expr(not masked) or first_key + i + place <= last:
                    pair[place] = start[i + place]
            add_pair(config.logits, scores, i, (pair[0], pair[1]), numbers)


def add_pair(logits, scores: cute.Tensor, i: int, bias, numbers) -> None:
    """Map scores[i] and scores[i + 1] to logits with their two values of bias, as ``device.logits.add_bias`` does."""
    bias = tuple(value.to(Float32) for value in bias)
    scaled = map_pair(logits, (scores[i], scores[i + 1]), numbers, i)
    sums = cute.arch.fma_packed_f32x2(bias, (Float32(LOG2_E), Float32(LOG2_E)), scaled, rnd="rz")
    for place in range(2):
        hidden = Boolean(bias[place] == -Float32.inf)
        scores[i + place] = Float32(cutlass.select_(hidden, -Float32.inf, sums[place]))
