"""Tile shapes of the sm_90a attention kernel: all that fit an SM and may be a problem's best.

``fmha.plan`` chooses among them by a model of the time. docs/notebook/attention_sm90.md says which were dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from warpspec.common.hardware import (
    KIB,
    REGISTERS_PER_SM,
    SMEM_PER_SM,
    SMEM_RESERVED_PER_CTA,
    WARPGROUP_THREADS,
)

WARPGROUP_ROWS = 64  # query rows of a consumer warpgroup: M of wgmma


@dataclass(frozen=True)
class Shape:
    """consumers: warpgroups of 64 query rows each. tile_n: keys of a KV tile. kv_stages: KV tiles in flight.
    ctas_per_sm: that registers and shared memory are budgeted for. consumer_registers, producer_registers: of a
    thread, set by setmaxnreg. column_parts: consumers that share 64 rows, each with a part of O's columns."""

    consumers: int
    tile_n: int
    kv_stages: int
    ctas_per_sm: int
    consumer_registers: int
    producer_registers: int
    column_parts: int = 1


# Registers of a consumer's and of the producer's thread, by consumers and CTAs an SM: as many as an SM has.
REGISTERS = {(1, 1): (240, 24), (1, 2): (208, 48), (1, 3): (136, 24), (2, 1): (240, 24), (3, 1): (160, 32)}
# Keys of a tile: of few stages' worth more are worse in every call that was timed, fewer where a consumer has room for
# more. Two consumers are worse than three that have room for as many keys.
TILE_KEYS, LARGEST_KEYS, FEW_KEYS = (64, 80), (128, 96), 48
WIDE_COLUMNS = 256  # of O, that leave a consumer room for few keys
THREE_CONSUMERS = 64  # columns of O up to which three consumers have room for as many keys as two
# Registers of a consumer's thread that are neither S, P nor O: addresses, row statistics, temporaries of the softmax.
# A bias takes more, for its elements and their addresses.
OTHER_REGISTERS, BIAS_REGISTERS = 30, 68
MOST_COLUMNS = 256  # of O, that a consumer has registers for
MOST_STAGES = 4
BESIDE_TILES = 1 * KIB  # shared memory of barriers and records
TWO_CONSUMERS = Shape(2, 128, 2, 1, 240, 24)
# Two consumers with half of O's columns each: K and V two tensors, or one, of whose tiles twice as many keys have room.
HALVES = Shape(2, 32, 2, 1, 240, 24, column_parts=2)
PAIR = Shape(2, 64, 2, 1, 240, 24, column_parts=2)


@lru_cache(maxsize=64)
def tiles(columns: int, row_bytes: int, key_bytes: int, one_tensor: bool, bias: bool) -> tuple[Shape, ...]:
    """Tile shapes whose S, P and O fit a consumer's registers, and at least two stages of which fit an SM.

    columns: of O. row_bytes: of a row of Q. key_bytes: of K and V of a key. one_tensor: V is K.
    """
    if columns > MOST_COLUMNS:
        return (PAIR if one_tensor else HALVES,)
    return tuple(fitting(columns, row_bytes, key_bytes, bias))


def fitting(columns: int, row_bytes: int, key_bytes: int, bias: bool) -> Iterator[Shape]:
    """``tiles`` of consumers that have all of O's columns."""
    for (consumers, ctas), registers in REGISTERS.items():
        at_launch = REGISTERS_PER_SM // (ctas * (consumers + 1) * WARPGROUP_THREADS)  # what ptxas counts with
        if columns // 2 + OTHER_REGISTERS > at_launch:
            continue
        if consumers == ctas == 1 and columns // 2 + OTHER_REGISTERS <= at_launch // 2:
            continue  # two such CTAs have room
        room = (
            SMEM_PER_SM // ctas
            - SMEM_RESERVED_PER_CTA
            - BESIDE_TILES
            - consumers * WARPGROUP_ROWS * row_bytes
        )
        stages = {}
        for keys in (FEW_KEYS, *TILE_KEYS, *LARGEST_KEYS):
            operands = columns // 2 + keys // 2 + keys // 4  # fp32 O and S, 16-bit P
            if operands + (BIAS_REGISTERS if bias else OTHER_REGISTERS) <= registers[0]:
                stages[keys] = min(room // (keys * key_bytes), MOST_STAGES)
        fit = [keys for keys in stages if stages[keys] >= 2]
        largest = next((keys for keys in LARGEST_KEYS if keys in fit), None)
        wide = columns >= WIDE_COLUMNS
        if consumers == 2 and columns <= THREE_CONSUMERS:
            continue
        for keys in fit:
            if (
                keys in TILE_KEYS
                or (keys == FEW_KEYS and (wide or ctas > 2))
                or (keys == largest and not wide)
            ):
                yield Shape(consumers, keys, stages[keys], ctas, *registers)
