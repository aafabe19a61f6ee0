"""cuTensorMapEncodeTiled, with which compiled host code makes tensor maps (CUDA driver API)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TypeVar

from warpspec.sim.cuda_runtime import INT, PTR, SIZE, UINT, Session, entry_point
from warpspec.sim.errors import BadDescriptor
from warpspec.sim.tma import Interleave, Swizzle, SwizzleAtomicity, TensorMap, encode
from warpspec.sim.tma.descriptor import ELEMENT_BY_NAME, MAX_RANK, check

_T = TypeVar("_T")

# The call's enumerations: CUtensorMapDataType in order, CUtensorMapSwizzle as mode and atomicity.
TYPES = (
    "u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16",
    "f32.ftz", "tf32", "tf32.ftz", "b4x16", "b4x16_p64", "b6x16_p32",
)  # fmt: skip
SWIZZLES = (
    (Swizzle.NONE, SwizzleAtomicity.BYTES_16),
    (Swizzle.BYTES_32, SwizzleAtomicity.BYTES_16),
    (Swizzle.BYTES_64, SwizzleAtomicity.BYTES_16),
    (Swizzle.BYTES_128, SwizzleAtomicity.BYTES_16),
    (Swizzle.BYTES_128, SwizzleAtomicity.BYTES_32),
    (Swizzle.BYTES_128, SwizzleAtomicity.BYTES_32_FLIP_8),
    (Swizzle.BYTES_128, SwizzleAtomicity.BYTES_64),
)
L2_PROMOTIONS = 4
ALIGN = 64  # bytes, of a CUtensorMap


@entry_point("_cuTensorMapEncodeTiled", PTR, INT, INT, PTR, PTR, PTR, PTR, PTR, INT, INT, INT, INT)
def tensor_map_encode_tiled(
    _session: Session,
    out: int,
    element: int,
    rank: int,
    address: int,
    dims: int,
    strides: int,
    box: int,
    element_strides: int,
    interleave: int,
    swizzle: int,
    l2_promotion: int,
    fill: int,
) -> None:
    """Write a tensor map to `out`; `strides`: bytes of dimensions 1 and up. BadDescriptor: a broken rule."""

    def choose(what: str, number: int, choices: Sequence[_T]) -> _T:
        if not 0 <= number < len(choices):
            raise BadDescriptor(f"cuTensorMapEncodeTiled: there is no {what} {number}")
        return choices[number]

    def read(kind: type, at: int, count: int) -> tuple[int, ...]:
        return tuple((kind * count).from_address(at)) if count else ()

    if not 1 <= rank <= MAX_RANK:
        raise BadDescriptor(f"cuTensorMapEncodeTiled: rank {rank}")
    if out % ALIGN:
        raise BadDescriptor(f"cuTensorMapEncodeTiled: the tensor map is not aligned to {ALIGN} bytes")
    mode, atomicity = choose("swizzle", swizzle, SWIZZLES)
    tensor_map = check(
        TensorMap(
            address=address,
            element=ELEMENT_BY_NAME[choose("data type", element, TYPES)],
            dims=read(SIZE, dims, rank),
            strides=read(SIZE, strides, rank - 1),
            box=read(UINT, box, rank),
            element_strides=read(UINT, element_strides, rank),
            interleave=choose("interleave", interleave, tuple(Interleave)),
            swizzle=mode,
            atomicity=atomicity,
            nan_fill=choose("out-of-bounds fill", fill, (False, True)),
            l2_promotion=choose("L2 promotion", l2_promotion, range(L2_PROMOTIONS)),
        )
    )
    raw = encode(tensor_map)
    ctypes.memmove(out, raw, len(raw))
