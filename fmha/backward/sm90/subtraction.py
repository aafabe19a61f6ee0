"""S - lse' / factor and dP - delta by products: the statistics of a query are further columns of Q and of dO.

The first kernel splits each statistic into three bf16 numbers (``backward.features``), and a wgmma of another 16
columns adds them up: its A, in registers, has ones in the first three columns. So a consumer reads no statistics. B has
eight columns, and stands for the other eight, too, which A multiplies by 0; zeros of their own would be as many bytes
again. The columns of the other statistic would not do: 0 times a NaN is one.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Int32

from warpspec.common.device.wgmma import flat, settle
from warpspec.common.hardware import FP32_BYTES
from warpspec.fmha.backward.features import COLUMN_BYTES
from warpspec.fmha.backward.sm90.config import CONSUMER_KEYS
from warpspec.fmha.backward.sm90.products import K_MAJOR, MMA_K, make_mma
from warpspec.fmha.tiles import ELEMENT_BYTES

ONE = 0x3F80  # in bf16
COLUMNS = COLUMN_BYTES // ELEMENT_BYTES
CORE_BYTES = 128  # of 8 rows of 16 bytes, which a descriptor without a swizzle names


def columns_mma(config) -> cute.TiledMma:
    """The product of ones with a statistic's columns, for a block of queries."""
    return make_mma(BFloat16, K_MAJOR, K_MAJOR, config.block_m, registers=True)


def ones(config, member) -> cute.Tensor:
    """A (MMA, 1, 1): ones in the first three of 16 columns of each key. member: the thread's number in its quad."""
    operand = cute.make_rmem_tensor(columns_mma(config).partition_shape_A((CONSUMER_KEYS, MMA_K)), BFloat16)
    words = cute.recast_tensor(flat(operand), Int32)
    first = Int32(cutlass.select_(Boolean(member == 1), Int32(ONE), Int32(0)))
    first = Int32(cutlass.select_(Boolean(member == 0), Int32(ONE << 16 | ONE), first))
    # Columns 0 to 7 of both rows, then the others.
    for i, word in enumerate((first, first, Int32(0), Int32(0))):
        words[i] = word
    settle(words)
    return operand


def subtraction(work, number: int, block: int, stage) -> tuple:
    """What ``multiply`` adds to S (number 0) or dP (1) of a block of queries. stage: of the statistics."""
    config, mma = work.config, columns_mma(work.config)
    first = (number * config.tile_m + block * config.block_m) * COLUMN_BYTES
    start = work.shared.statistics + (stage * config.statistics_bytes + first) // FP32_BYTES
    layout = cute.make_layout((config.block_m, (COLUMNS, MMA_K // COLUMNS)), stride=(COLUMNS, (1, 0)))
    tile = cute.make_tensor(cute.recast_ptr(start, dtype=BFloat16).align(CORE_BYTES), layout)
    operand = mma.make_fragment_B(mma.get_slice(0).partition_B(tile))
    return mma, work.ones[None, None, 0], operand[None, None, 0]
