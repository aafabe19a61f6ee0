"""ldmatrix, stmatrix, movmatrix: matrices between shared memory and the fragments of a warp.

A matrix row is 16 bytes at an address that one thread gives. PTX ISA: "Warp-level matrix load instruction:
ldmatrix", "stmatrix", "movmatrix".
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from warpspec.sim import formats
from warpspec.sim.errors import MemoryFault, UnsupportedInstruction
from warpspec.sim.instruction import Instr
from warpspec.sim.machine import Machine
from warpspec.sim.memory import CTA_RANK_SHIFT, in_shared_window
from warpspec.sim.registry import Collective, Family, handler
from warpspec.sim.warp import Warp

ROW_BYTES = 16
COUNTS = {"x1": 1, "x2": 2, "x4": 4}
DECOMPRESSIONS = {"b4x16_p64": 8, "b6x16_p32": 12}  # bytes of a row that hold its 16 elements

THREAD = np.arange(32)
GROUP, IN_GROUP = THREAD // 4, THREAD % 4


@lru_cache(maxsize=64)
def form(parts: tuple[str, ...]) -> tuple[str, int, bool, int]:
    """(shape, matrices, transposed, bytes used of each row when it is decompressed or 0)."""
    shape = next((p for p in parts if p in ("m8n8", "m16n16", "m8n16", "m16n8")), "")
    count = next((COUNTS[p] for p in parts if p in COUNTS), 0)
    used = next((DECOMPRESSIONS[p] for p in parts if p in DECOMPRESSIONS), 0)
    return shape, count, "trans" in parts, used


def row_view(m: Machine, w: Warp, operand, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(shared memory of a CTA, intp[rows, 16] byte indices): the rows that the first threads address."""
    address = w.address(operand)[:rows]
    first = int(address[0])
    if in_shared_window(first):
        address = address & np.uint64(0xFFFFFFFF)
        first &= 0xFFFFFFFF
    if (address % ROW_BYTES).any():
        raise MemoryFault(
            f"matrix row at shared address {int(address[address % ROW_BYTES > 0][0]):#x}: not 16-byte aligned"
        )
    cta, _ = m.cta_at(w, first)
    offset = (address & np.uint64((1 << CTA_RANK_SHIFT) - 1)).astype(np.intp)
    m.shared(w, int(address[np.argmax(offset)]), ROW_BYTES)
    m.shared(w, int(address[np.argmin(offset)]), ROW_BYTES)
    return cta.smem, offset[:, None] + np.arange(ROW_BYTES)


def note_rows(m: Machine, w: Warp, ins: Instr, operand, index: np.ndarray, write: bool) -> None:
    """Tell the order checker of the rows that an instruction reads or writes."""
    if m.order is not None:
        cta, _ = m.cta_at(w, int(w.address(operand)[0]) & 0xFFFFFFFF)
        m.order.shared_rows(w, ins, cta, index[:, 0], ROW_BYTES, write)


@handler("ldmatrix", family=Family.MATRIX, destinations=1, collective=Collective.WARP)
def ldmatrix(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """ldmatrix: rows of shared memory to fragments."""
    shape, count, transposed, used = form(ins.parts)
    destination, source = ins.operands[:2]
    rows_each = 16 if shape == "m16n16" else 8
    if not count or shape not in ("m8n8", "m16n16", "m8n16") or rows_each * count > 32:
        raise UnsupportedInstruction(f"`{ins.opcode}`")
    smem, index = row_view(m, w, source, rows_each * count)
    note_rows(m, w, ins, source, index, False)
    rows = smem[index]
    if used:  # 4- and 6-bit elements, each into the low bits of a byte
        rows = formats.unpack_nibbles(rows[:, :used]) if used == 8 else formats.unpack_sextets(rows[:, :used])
    rows = rows.reshape(count, rows_each, ROW_BYTES)
    if shape == "m16n16":  # thread holds four rows' bytes of one column, and of the column eight further on
        bytes_ = rows[:, 4 * IN_GROUP[:, None] + np.arange(4), :]  # [count, 32, 4, 16]
        registers = np.stack([bytes_[:, THREAD, :, GROUP + 8 * half] for half in (0, 1)], axis=0)
        words = np.ascontiguousarray(registers.transpose(2, 0, 1, 3)).view(np.uint32)  # [count, 2, 32, 1]
    elif transposed:
        elements = rows.view(np.uint16)  # [count, 8, 8]
        words = fragment_words(elements.transpose(0, 2, 1))
    else:
        words = rows.view(np.uint32)[:, GROUP, IN_GROUP]
    w.write_vec(destination, words.reshape(-1, 32), mask)


@handler("stmatrix", family=Family.MATRIX, destinations=0, collective=Collective.WARP)
def stmatrix(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """stmatrix: fragments to rows of shared memory."""
    shape, count, transposed, _ = form(ins.parts)
    target, source = ins.operands[:2]
    if not count or shape not in ("m8n8", "m16n8"):
        raise UnsupportedInstruction(f"`{ins.opcode}`")
    values = w.read_vec(source)
    smem, index = row_view(m, w, target, 8 * count)
    note_rows(m, w, ins, target, index, True)
    rows = np.empty((count, 8, ROW_BYTES), np.uint8)
    if shape == "m16n8":  # byte i of a thread: row of memory 2 * IN_GROUP + i % 2, byte GROUP + 8 * (i / 2)
        bytes_ = values[:, :, None].view(np.uint8)
        for i in range(4):
            rows[:, 2 * IN_GROUP + i % 2, GROUP + i // 2 * 8] = bytes_[:, :, i]
    else:
        elements = fragment_elements(values)
        rows.view(np.uint16)[...] = elements.transpose(0, 2, 1) if transposed else elements
    smem[index] = rows.reshape(-1, ROW_BYTES)


@handler("movmatrix", family=Family.MATRIX, destinations=1, collective=Collective.WARP)
def movmatrix(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """movmatrix.m8n8.trans.b16: transpose an 8x8 fragment."""
    values = w.read_vec(ins.operands[1])
    w.write_vec(ins.operands[0], fragment_words(fragment_elements(values).transpose(0, 2, 1)), mask)


def fragment_words(elements: np.ndarray) -> np.ndarray:
    """uint16[n, 8, 8] -> uint32[n, 32]: thread t holds elements 2 (t % 4) and the next of row t / 4."""
    return np.ascontiguousarray(elements).view(np.uint32).reshape(-1, 32)


def fragment_elements(values: np.ndarray) -> np.ndarray:
    """uint32[n, 32] -> uint16[n, 8, 8]."""
    return np.ascontiguousarray(values).view(np.uint16).reshape(-1, 8, 8)
