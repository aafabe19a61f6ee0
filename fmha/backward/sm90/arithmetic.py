"""A consumer thread's fragment of a block of S^T, as wgmma lays it out; values as operands."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.common.device.wgmma import COLUMNS, PAIR, THREAD_ROWS, flat
from warpspec.fmha.backward.device.arithmetic import Block
from warpspec.fmha.backward.device.tile import own_group
from warpspec.fmha.backward.sm90 import bias


def block_of(work, step, number: int, place) -> Block:
    """A thread's share of a block of queries. number: the block's, in the tile. place: (query head, query tile)."""
    config, tile = work.config, work.tile
    head, query_tile = place
    offset = number * config.block_m + PAIR * work.member  # query of the thread's column 0, in the tile
    stage = work.channels["q_full"].stage(step) * config.tile_m
    statistics = None
    if not config.subtracts:
        layout = cute.make_layout((PAIR, 2, config.block_m // PAIR), stride=(1, PAIR, 2 * PAIR))
        statistics = cute.make_tensor((work.shared.statistics + (stage + offset) * 2).align(8), layout)
    return Block(
        config,
        work.operands,
        tile,
        work.scales[0],
        head,
        query_tile * config.tile_m + offset,
        statistics,
        columns=tuple(range(0, config.block_m, COLUMNS)),
        keys=tuple(tile.first_key + work.key(r) for r in range(THREAD_ROWS)),
        bounds=work.bounds,
        element=lambda column, r: (column // COLUMNS * THREAD_ROWS + r) * PAIR,
        writes_bias=own_group(config) == 0,
        started=not config.paired,
        bias_words=bias.reader(work, step) if config.bias_tiles else None,
        stores_bias=config.stores_bias,
        lse=work.lse,
    )


def keep(values: cute.Tensor, operand: cute.Tensor) -> None:
    """Round values to 16 bits into the registers of an operand, in the same order.

    Inline PTX stays behind the wait before it. Otherwise the compiler would convert earlier, into other registers
    because the operand's are still being read, and there are not enough for both.
    """
    source, words = flat(values), cute.recast_tensor(flat(operand), Int32)
    kind = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}[operand.element_type]
    for i in range(cute.size(words)):
        words[i] = cute.arch.inline_ptx(
            f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
            write_only_types=[Int32],
            read_only_args=[source[PAIR * i + 1], source[PAIR * i]],
        )
