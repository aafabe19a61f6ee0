"""The 32-bit instruction descriptor of tcgen05.mma. PTX ISA: "Instruction Descriptor", "Matrix Shape"."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from warpspec.sim.errors import BadDescriptor, UnsupportedInstruction

BLOCK_SCALED_KINDS = ("mxf8f6f4", "mxf4", "mxf4nvf4")
NARROW_FORMATS = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
OPERAND_FORMATS = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": NARROW_FORMATS,
    "i8": {0: "u8", 1: "s8"},
    "mxf8f6f4": NARROW_FORMATS,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
ACCUMULATOR_FORMATS = {
    "f16": {0: "f16", 1: "f32"},
    "tf32": {1: "f32"},
    "f8f6f4": {0: "f16", 1: "f32"},
    "i8": {2: "s32"},
}
K_ELEMENTS = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
WORDS_PER_OPERAND_ROW = 8  # every kind reads 32 bytes of K a row, but with K = 96
LONG_K = 96  # K of .kind::mxf4 and ::mxf4nvf4 on sm_103a


@dataclass(frozen=True, slots=True)
class InstructionDescriptor:
    """m, n, k of the whole instruction (both CTAs). a_mn_major: A is stored M-major ("transposed"); B
    likewise."""

    kind: str
    m: int
    n: int
    k: int
    a_format: str
    b_format: str
    d_format: str
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool
    saturate: bool = False
    scale_format: str | None = None
    scale_a_id: int = 0
    scale_b_id: int = 0

    @property
    def row_words(self) -> int:
        """The number of 32-bit words that one row of an operand has along K."""
        return WORDS_PER_OPERAND_ROW * 3 // 2 if self.k == LONG_K else WORDS_PER_OPERAND_ROW


@lru_cache(maxsize=4096)
def decode(
    bits: int, kind: str, cta_group: int = 1, weight_stationary: bool = False
) -> InstructionDescriptor:
    """Raises BadDescriptor when the hardware would not accept it, UnsupportedInstruction for sparsity."""

    def bad(why: str):
        raise BadDescriptor(f"instruction descriptor 0x{bits:08x} for .kind::{kind}: {why}")

    if kind not in OPERAND_FORMATS:
        raise UnsupportedInstruction(f"tcgen05.mma .kind::{kind} is not supported")
    if bits >> 2 & 1:
        raise UnsupportedInstruction("tcgen05.mma with a sparse A matrix is not supported")
    scaled = kind in BLOCK_SCALED_KINDS
    formats = OPERAND_FORMATS[kind]
    # bit 12 belongs to B's format, except in the 4-bit kinds, where it says how sparsity metadata looks
    a_code, b_code = bits >> 7 & 7, bits >> 10 & (3 if kind in ("mxf4", "mxf4nvf4") else 7)
    a_format, b_format = formats.get(a_code), formats.get(b_code)
    if a_format is None or b_format is None:
        bad(f"A format {a_code}, B format {b_code}")
    if bits >> 6 & 1:
        bad("reserved bit 6 is set")
    if kind == "i8" and bits >> 13 & 3:
        bad("integer operands cannot be negated")

    a_mn_major, b_mn_major = bool(bits >> 15 & 1), bool(bits >> 16 & 1)
    for name, fmt, transposed in (("A", a_format, a_mn_major), ("B", b_format, b_mn_major)):
        if transposed and fmt in ("e2m3", "e3m2", "e2m1"):
            bad(f"{name} is {fmt} and MN-major; 4- and 6-bit operands are K-major only")

    fields = {}
    if scaled:
        fields = _scale_fields(bits, kind, bad)
    else:
        d_format = ACCUMULATOR_FORMATS[kind].get(bits >> 4 & 3)
        if d_format is None:
            bad(f"accumulator format {bits >> 4 & 3}")
        if bits >> 3 & 1 and kind != "i8":
            bad("saturation is for .kind::i8")
        if bits >> 23 & 1 or bits >> 29 & 1:
            bad("reserved bit 23 or 29 is set")
        fields = {"d_format": d_format, "saturate": bool(bits >> 3 & 1)}

    m, n = (bits >> 24 & 0x1F) << 4, (bits >> 17 & 0x3F) << 3
    _check_shape(m, n, kind, cta_group, weight_stationary, bad)
    if kind in ("f8f6f4", "mxf8f6f4", "i8") and b_mn_major and n % (16 * cta_group):
        bad(f"N = {n} with an 8-bit N-major B must be a multiple of {16 * cta_group}")
    return InstructionDescriptor(
        kind=kind,
        m=m,
        n=n,
        k=LONG_K if scaled and bits >> 31 & 1 else K_ELEMENTS[kind],
        a_format=a_format,
        b_format=b_format,
        negate_a=bool(bits >> 13 & 1),
        negate_b=bool(bits >> 14 & 1),
        a_mn_major=a_mn_major,
        b_mn_major=b_mn_major,
        **fields,
    )


def _scale_fields(bits: int, kind: str, bad) -> dict:
    scale_format = "ue8m0" if bits >> 23 & 1 else "ue4m3"
    if scale_format == "ue4m3" and kind != "mxf4nvf4":
        bad("UE4M3 scales are for .kind::mxf4nvf4")
    if bits >> 31 & 1 and kind == "mxf8f6f4":
        bad("bit 31 is set; K = 96 is for .kind::mxf4 and .kind::mxf4nvf4")
    return {
        "d_format": "f32",
        "scale_format": scale_format,
        "scale_a_id": bits >> 29 & 3,
        "scale_b_id": bits >> 4 & 3,
    }


def _check_shape(m: int, n: int, kind: str, cta_group: int, weight_stationary: bool, bad) -> None:
    if weight_stationary:
        allowed_m, allowed_n = (32, 64, 128), (64, 128, 256)
    elif kind in BLOCK_SCALED_KINDS:
        allowed_m = (128,) if cta_group == 1 else (128, 256)
        allowed_n = range(8 * cta_group, 257, 8 * cta_group)
    else:
        allowed_m = (64, 128) if cta_group == 1 else (128, 256)
        step = 16 * cta_group if kind == "i8" else 8 * cta_group
        allowed_n = range(step, 257, step)
        if kind == "i8" and cta_group == 1:
            allowed_n = (8, 24, *allowed_n)
    if m not in allowed_m:
        bad(f"M = {m} with .cta_group::{cta_group}; it may be {', '.join(map(str, allowed_m))}")
    if n not in allowed_n:
        bad(f"N = {n} with M = {m} and .cta_group::{cta_group}")
