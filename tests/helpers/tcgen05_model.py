"""A plain, slow model of tcgen05 operands and accumulators, element by element, for tests.

Written from the ISA's tables, not from the simulator: addresses are computed one element at a time, with the
swizzle as "16-byte cell number exclusive-or 128-byte line number".
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from warpspec.sim.tcgen05.memory import Tmem

BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
BITS |= {"e2m1": 4, "e2m3": 6, "e3m2": 6}
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
SWIZZLE_ROW_BYTES = {0: 16, 1: 128, 2: 128, 4: 64, 6: 32}


@dataclass
class ModelCta:
    """What an MMA sees of a CTA."""

    smem: np.ndarray
    tmem: Tmem = field(default_factory=Tmem)


@dataclass(frozen=True)
class Layout:
    """A shared-memory operand: descriptor fields in bytes, swizzle mode as encoded, major-ness.

    next: where a row of K goes on after its 128 bytes, of a descriptor with an absolute address instead of lbo.
    """

    start: int
    lbo: int
    sbo: int
    mode: int
    mn_major: bool = False
    next: int | None = None


def swizzled(address, mode):
    line, cell, rest = address // 128, address // 16 % 8, address % 16
    cell ^= {0: 0, 1: line % 4 * 2, 2: line % 8, 4: line % 4, 6: line % 2}[mode]
    return line * 128 + cell * 16 + rest


def locate(layout, fmt, packed, mn, k):
    """(byte address, bit offset in it, bits) of one element."""
    bits = BITS[fmt]
    padded = bits in (4, 6) and not packed
    width = SWIZZLE_ROW_BYTES[layout.mode]
    if layout.mn_major:
        size = bits // 8
        per_row = width // size  # elements along MN in one atom
        depth = 4 if layout.mode == 1 else 8
        if layout.mode == 0:
            address = mn // per_row * layout.sbo + mn % per_row * size + k % 8 * 16 + k // 8 * layout.lbo
        else:
            address = (
                mn // per_row * layout.lbo + mn % per_row * size + k % depth * width + k // depth * layout.sbo
            )
        return swizzled(layout.start + address, layout.mode), 0, bits
    cell, bit = divmod(k * bits, 128) if not padded else (k // 16, k % 16 * bits)
    cell_stride = layout.lbo if layout.mode == 0 else 16
    address = mn // 8 * layout.sbo + mn % 8 * width + cell * cell_stride
    if layout.next is not None and layout.start % 128 + cell * 16 >= 128:
        address += layout.next - (layout.start - layout.start % 128) - 128
    return swizzled(layout.start + address, layout.mode) + bit // 8, bit % 8, bits


def code_at(data, address, bit, bits):
    """`bits` bits from a byte array, little-endian."""
    span = int.from_bytes(bytes(data[address : address + 4]), "little")
    return span >> bit & ((1 << bits) - 1)


def value_of(code, fmt):
    """The exact value of a code as a Python float."""
    if fmt == "e2m1":
        return E2M1_VALUES[code & 7] * (-1.0 if code & 8 else 1.0)
    if fmt in ("e2m3", "e3m2"):
        mantissa_bits, bias = (3, 1) if fmt == "e2m3" else (2, 3)
        exponent, mantissa = (code & 31) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        scale = 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
        magnitude = (mantissa + (1 << mantissa_bits if exponent else 0)) * scale
        return -magnitude if code & 32 else magnitude
    if fmt == "tf32":
        return float(np.array(code & 0xFFFFE000, np.uint32).view(np.float32))
    if fmt in ("s8", "u8"):
        return float(code - 256 if fmt == "s8" and code > 127 else code)
    if fmt == "ue8m0":
        return 2.0 ** (code - 127)
    dtype, raw = {
        "f16": (torch.float16, torch.int16),
        "bf16": (torch.bfloat16, torch.int16),
        "e4m3": (torch.float8_e4m3fn, torch.uint8),
        "ue4m3": (torch.float8_e4m3fn, torch.uint8),
        "e5m2": (torch.float8_e5m2, torch.uint8),
    }[fmt]
    if raw is torch.int16 and code >= 1 << 15:
        code -= 1 << 16
    return torch.tensor(code, dtype=raw).view(dtype).item()


_value_cache = {}


def cached_value(code, fmt):
    key = (code, fmt)
    if key not in _value_cache:
        _value_cache[key] = value_of(code, fmt)
    return _value_cache[key]


def smem_matrix(smem, layout, fmt, rows, k, packed=False):
    """float64[rows, k] from shared memory."""
    out = np.empty((rows, k))
    for mn in range(rows):
        for j in range(k):
            out[mn, j] = cached_value(code_at(smem, *locate(layout, fmt, packed, mn, j)), fmt)
    return out


def tmem_a_matrix(tmem, fmt, column, lanes, k, packed=False):
    """float64[len(lanes), k]: operand A in tensor memory, one lane a row; narrow types in byte containers."""
    out = np.empty((len(lanes), k))
    for row, lane in enumerate(lanes):
        data = tmem.data[lane, column : column + 8].tobytes() + bytes(4)
        for j in range(k):
            if fmt in ("e2m1", "e2m3", "e3m2") and not packed:
                code = data[j] >> (2 if fmt == "e2m1" else 1) & ((1 << BITS[fmt]) - 1)
            else:
                address, bit = divmod(j * BITS[fmt], 8)
                code = code_at(data, address, bit, BITS[fmt])
            out[row, j] = cached_value(code, fmt)
    return out


def accumulator_cells(m, n, cta_group, rank, weight_stationary=False, lane=0):
    """(row of D, column of D) -> (lane, column offset) for the part of D in one CTA, as a dict."""
    cells = {}
    rows = m // cta_group
    for r in range(rows):
        for c in range(n):
            if m == 64 and cta_group == 1 and not weight_stationary:  # layout F
                where = (lane + r // 16 * 32 + r % 16, c)
            elif rows == 64:  # layouts B and E
                where = (r + 64 * (c >= n // 2), c % (n // 2))
            elif rows == 32:  # layout G
                where = (r + 32 * (c // (n // 4)), c % (n // 4))
            else:  # layouts A and D
                where = (r, c)
            cells[rank * rows + r, c] = where
    return cells


def read_accumulator(tmem, column, cells, shape, first_row=0):
    """float64[shape] of float32 words."""
    out = np.empty(shape)
    for (r, c), (lane, offset) in cells.items():
        out[r - first_row, c] = tmem.data[lane, column + offset : column + offset + 1].view(np.float32)[0]
    return out
