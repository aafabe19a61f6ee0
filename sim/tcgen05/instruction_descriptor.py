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
PACKED_KINDS = ("mxf4", "mxf4nvf4")  # two e2m1 a byte, no padding
SELECTORS = {"f16": 2, "tf32": 2}  # sparsity selectors of a kind; one, 0, for the others


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
    sparse: bool = False  # A is stored without half of its elements; k counts them all
    selector: int = 0  # of the columns of sparsity metadata

    @property
    def row_words(self) -> int:
        """The number of 32-bit words that one row of A has along K."""
        return WORDS_PER_OPERAND_ROW * 3 // 2 if self.k == LONG_K else WORDS_PER_OPERAND_ROW

    @property
    def b_row_words(self) -> int:
        """The number of 32-bit words that one row of B has along K."""
        return self.row_words * (2 if self.sparse else 1)

    @property
    def stored_k(self) -> int:
        """The elements of a row of A that are stored."""
        return self.k // 2 if self.sparse else self.k


@lru_cache(maxsize=4096)
def decode(
    bits: int, kind: str, cta_group: int = 1, weight_stationary: bool = False, sparse: bool = False
) -> InstructionDescriptor:
    """Decode an instruction descriptor. sparse: it is a tcgen05.mma.sp's.

    Raises BadDescriptor when the hardware would not accept it, UnsupportedInstruction for shapes of a sparse A that are
    not simulated.
    """

    def bad(why: str):
        raise BadDescriptor(f"instruction descriptor 0x{bits:08x} for .kind::{kind}: {why}")

    if kind not in OPERAND_FORMATS:
        raise UnsupportedInstruction(f"tcgen05.mma .kind::{kind} is not supported")
    if bits >> 2 & 1 != sparse:
        bad(
            "bit 2 says "
            + ("dense, the instruction is .sp" if sparse else "sparse, the instruction is not .sp")
        )
    scaled = kind in BLOCK_SCALED_KINDS
    selector = bits & 3 if sparse and not scaled else 0
    if selector >= SELECTORS.get(kind, 1):
        bad(f"sparsity selector {selector}")
    a_format, b_format = _operand_formats(bits, kind, bad)
    if bits >> 6 & 1:
        bad("reserved bit 6 is set")
    if kind == "i8" and bits >> 13 & 3:
        bad("integer operands cannot be negated")

    a_mn_major, b_mn_major = bool(bits >> 15 & 1), bool(bits >> 16 & 1)
    for name, fmt, transposed in (("A", a_format, a_mn_major), ("B", b_format, b_mn_major)):
        if transposed and fmt in ("e2m3", "e3m2", "e2m1"):
            bad(f"{name} is {fmt} and MN-major; 4- and 6-bit operands are K-major only")

    fields = (_scale_fields if scaled else _accumulator_fields)(bits, kind, bad)
    k = LONG_K if scaled and bits >> 31 & 1 else K_ELEMENTS[kind]
    if sparse and (k == LONG_K or (kind in PACKED_KINDS and bits >> 12 & 1)):
        bad("bit 31 or 12 is set with a sparse A")
    m, n = (bits >> 24 & 0x1F) << 4, (bits >> 17 & 0x3F) << 3
    _check_shape(m, n, kind, cta_group, weight_stationary, bad)
    if sparse and m // cta_group == 64 and not weight_stationary:
        raise UnsupportedInstruction("tcgen05.mma.sp with 64 rows a CTA is not supported")
    if kind in ("f8f6f4", "mxf8f6f4", "i8") and b_mn_major and n % (16 * cta_group):
        bad(f"N = {n} with an 8-bit N-major B must be a multiple of {16 * cta_group}")
    return InstructionDescriptor(
        kind=kind,
        m=m,
        n=n,
        k=2 * k if sparse else k,
        a_format=a_format,
        b_format=b_format,
        negate_a=bool(bits >> 13 & 1),
        negate_b=bool(bits >> 14 & 1),
        a_mn_major=a_mn_major,
        b_mn_major=b_mn_major,
        sparse=sparse,
        selector=selector,
        **fields,
    )


def _operand_formats(bits: int, kind: str, bad) -> tuple[str, str]:
    """Formats of A and B."""
    formats = OPERAND_FORMATS[kind]
    # bit 12 belongs to B's format, except in the 4-bit kinds, where it says how sparsity metadata looks
    a_code, b_code = bits >> 7 & 7, bits >> 10 & (3 if kind in PACKED_KINDS else 7)
    a_format, b_format = formats.get(a_code), formats.get(b_code)
    if a_format is None or b_format is None:
        bad(f"A format {a_code}, B format {b_code}")
    return a_format, b_format


def _accumulator_fields(bits: int, kind: str, bad) -> dict:
    """Fields of a descriptor without block scales: the accumulator's format, saturation."""
    d_format = ACCUMULATOR_FORMATS[kind].get(bits >> 4 & 3)
    if d_format is None:
        bad(f"accumulator format {bits >> 4 & 3}")
    if bits >> 3 & 1 and kind != "i8":
        bad("saturation is for .kind::i8")
    if bits >> 23 & 1 or bits >> 29 & 1:
        bad("reserved bit 23 or 29 is set")
    return {"d_format": d_format, "saturate": bool(bits >> 3 & 1)}


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
