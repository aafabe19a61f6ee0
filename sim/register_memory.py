"""The memory of one warp's registers, and views of it as numbers of each width."""

from __future__ import annotations

import numpy as np

from warpspec.sim.codegen.layout import RegisterFile
from warpspec.sim.lanes import WARP_SIZE

POISON = 0xFF
SCALARS = {8: "B", 16: "H", 32: "I", 64: "Q"}  # struct codes


def aligned_bytes(size: int, align: int = 64, fill: int | None = None) -> np.ndarray:
    """A uint8 array whose first byte is aligned."""
    raw = np.empty(size + align, np.uint8)
    start = -raw.__array_interface__["data"][0] % align
    out = raw[start : start + size]
    if fill is not None:
        out.fill(fill)
    return out


class RegisterMemory:
    """Registers of one warp after another, laid out as `registers` says.

    regs: all bytes; homes: bytes of registers that outlive a block; u16, u32, u64, rows (uint32 [n, 32]): the same
    memory as numbers; words: as Python integers, by width, which are faster to read singly. lanes: by name, for
    registers read per lane: their lanes as integers, and the bytes of all lanes.
    """

    __slots__ = ("address", "bytes", "homes", "lanes", "regs", "rows", "u16", "u32", "u64", "words")

    def __init__(self, registers: RegisterFile):
        self.regs = aligned_bytes(registers.end)
        self.address = self.regs.ctypes.data
        self.homes = self.regs[: registers.size]
        self.u16, self.u32, self.u64 = (self.regs.view(t) for t in (np.uint16, np.uint32, np.uint64))
        self.rows = self.u32[: len(self.u32) // WARP_SIZE * WARP_SIZE].reshape(-1, WARP_SIZE)
        self.bytes = memoryview(self.regs)
        self.words = {bits: self.bytes.cast(code) for bits, code in SCALARS.items()}
        self.lanes: dict[str, tuple[memoryview, memoryview]] = {}
