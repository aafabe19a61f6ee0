"""tcgen05.ld and tcgen05.st: which register of which thread holds which word of tensor memory.

PTX ISA: "Data Movement Shape", "Packing and Unpacking", "Access Restrictions".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from warpspec.sim.errors import TmemFault, UnsupportedInstruction
from warpspec.sim.tcgen05.memory import COLUMNS, PARTITION_LANES, Tmem, address_parts

REGISTERS_PER_REPEAT = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
MAX_REGISTERS = 128
LOW_HALF = np.uint32(0xFFFF)


@dataclass(frozen=True, slots=True)
class TransferMap:
    """lane, column: intp[registers, 32 threads], relative to the address; a packed register is two columns
    from `column` on. lanes, columns: the extent in tensor memory. dense: register j of thread t is simply [t,
    j]."""

    lane: np.ndarray
    column: np.ndarray
    lanes: int
    columns: int
    dense: bool


@lru_cache(maxsize=1024)
def transfer_map(shape: str, repeat: int, packed: bool = False, split_offset: int = 0) -> TransferMap:
    """The map of one instruction: `.shape.xN`, with .pack::16b / .unpack::16b, and immHalfSplitoff for
    16x32bx2."""
    per_repeat = REGISTERS_PER_REPEAT.get(shape)
    if per_repeat is None:
        raise UnsupportedInstruction(f"tcgen05.ld/st with shape .{shape}")
    registers = per_repeat * repeat
    if repeat & (repeat - 1) or not 1 <= registers <= MAX_REGISTERS:
        raise UnsupportedInstruction(f"tcgen05.ld/st .{shape}.x{repeat}")
    j = np.arange(registers)[:, None]
    t = np.arange(32)[None, :]
    second_half = np.zeros_like(j + t)
    if shape == "32x32b":
        lane, column = t + 0 * j, j + 0 * t
    elif shape == "16x32bx2":  # threads 16-31 read the same lanes, split_offset columns further
        lane, column = t % 16 + 0 * j, j + 0 * t
        second_half = t // 16 + 0 * j
    elif shape == "16x64b":  # two words a row and repeat; odd threads eight rows down
        lane, column = t // 4 + t % 2 * 8 + 0 * j, t // 2 % 2 + 2 * j
    elif shape == "16x128b":
        lane, column = t // 4 + j % 2 * 8, t % 4 + j // 2 * 4
    else:  # 16x256b: the accumulator fragment of mma.sync m16n8
        lane, column = t // 4 + j // 2 % 2 * 8, t % 4 * 2 + j % 2 + j // 4 * 8
    if packed:
        column = column * 2
    column = column + second_half * split_offset
    lane, column = lane.astype(np.intp), column.astype(np.intp)
    lane.setflags(write=False)
    column.setflags(write=False)
    return TransferMap(
        lane=lane,
        column=column,
        lanes=int(lane.max()) + 1,
        columns=int(column.max()) + (2 if packed else 1),
        dense=shape == "32x32b" and not packed,
    )


def first_lane(address: int, warp: int, lanes: int) -> int:
    """The first tensor-memory lane of an access of `lanes` lanes by a warp; a warp reaches its own 32 lanes
    only.

    The address may name the lane within the warp's quarter (below 32) or within all of tensor memory.
    """
    lane, _ = address_parts(address)
    quarter = warp % 4 * PARTITION_LANES
    if lane < PARTITION_LANES:
        lane += quarter
    if not quarter <= lane <= lane + lanes <= quarter + PARTITION_LANES:
        raise TmemFault(
            f"warp {warp} accesses tensor-memory lanes {lane} to {lane + lanes - 1}; "
            f"it may access lanes {quarter} to {quarter + PARTITION_LANES - 1} only"
        )
    if lanes == 16 and lane % 16:
        raise TmemFault(f"tensor-memory lane {lane} for a shape of 16 lanes; it must be a multiple of 16")
    return lane


def place(tmem: Tmem, address: int, warp: int, m: TransferMap, what: str) -> tuple[int, int]:
    """The checked (lane, column) of an access."""
    lane = first_lane(address, warp, m.lanes)
    column = address_parts(address)[1]
    if column >= COLUMNS:
        raise TmemFault(f"{what} at column {column}; there are {COLUMNS}")
    if m.dense:
        tmem.require(column, m.columns, what)
    else:  # 16x32bx2 may leave a gap between its halves
        used = np.zeros(m.columns, bool)
        used[m.column] = True
        if m.columns > int(m.column.max()) + 1:
            used[m.column + 1] = True
        touched = column + np.flatnonzero(used)
        if touched[-1] >= COLUMNS or not tmem.allocated[touched].all():
            tmem.require(column, m.columns, what)
    return lane, column


def cells(lane: int, column: int, m: TransferMap, packed: bool) -> tuple:
    """The index of tensor memory [lanes, columns] that an instruction touches."""
    if m.dense:
        return slice(lane, lane + PARTITION_LANES), slice(column, column + m.columns)
    lanes, columns = m.lane + lane, m.column + column
    if packed:
        lanes, columns = np.stack([lanes, lanes]), np.stack([columns, columns + 1])
    return lanes, columns


def load(tmem: Tmem, lane: int, column: int, m: TransferMap, packed: bool) -> np.ndarray:
    """uint32[registers, 32]: what the threads receive."""
    if m.dense:
        return tmem.data[lane : lane + 32, column : column + m.columns].T
    words = tmem.data[m.lane + lane, m.column + column]
    if not packed:
        return words
    return words & LOW_HALF | tmem.data[m.lane + lane, m.column + column + 1] << np.uint32(16)


def store(tmem: Tmem, lane: int, column: int, m: TransferMap, packed: bool, values: np.ndarray) -> None:
    """Write the threads' uint32[registers, 32]. Unpacked halves fill the low 16 bits of a word, the rest is
    zero."""
    if m.dense:
        tmem.data[lane : lane + 32, column : column + m.columns] = values.T
    elif not packed:
        tmem.data[m.lane + lane, m.column + column] = values
    else:
        tmem.data[m.lane + lane, m.column + column] = values & LOW_HALF
        tmem.data[m.lane + lane, m.column + column + 1] = values >> np.uint32(16)
