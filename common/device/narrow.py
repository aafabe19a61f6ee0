"""Rounds fp32 to numbers of 8 and 4 bits, several to a word, on sm_90a and sm_100a alike."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Uint32

from warpspec.common.nvfp4 import TO_INTEGER

FLOAT8 = ("e4m3", "e5m2")
MAGNITUDE = 0x7FFFFFFF
SIGN_BIT, CODE_SIGN_BIT = 31, 3  # position of the sign in fp32 and in e2m1
CODE_BITS, CODE_MASK = 4, 0xF


def to_float8(values: list, fmt: str) -> Uint32:
    """Round four fp32 to e4m3 or e5m2 (``fmt``), to nearest, ties to even; the first goes to the lowest byte.

    Larger magnitudes and Inf become the largest finite number, NaN becomes 0x7F.
    """
    assert fmt in FLOAT8
    return cute.arch.inline_ptx(
        f"{{ .reg .b16 low; .reg .b16 high; cvt.rn.satfinite.{fmt}x2.f32 low, {{$r1}}, {{$r0}};"
        f" cvt.rn.satfinite.{fmt}x2.f32 high, {{$r3}}, {{$r2}}; mov.b32 {{$w0}}, {{low, high}}; }}",
        write_only_types=[Uint32],
        read_only_args=list(values),
    )


def e2m1_codes(values: list) -> Uint32:
    """Round fp32 of magnitude at most 6 to e2m1, to nearest, ties to even; the first goes to the lowest bits.

    Does without the conversion instruction that sm_90a lacks. Same codes as ``nvfp4.e2m1_codes``.
    """
    word = Uint32(0)
    for i, value in enumerate(values):
        bits = value.bitcast(Uint32)
        magnitude = (bits & Uint32(MAGNITUDE)).bitcast(Float32)
        # e2m1 has steps of 1/2 below 2, of 1 below 4 and of 2 above. A number's code is how many steps it lies above 0.
        two, four = Boolean(magnitude >= 2.0), Boolean(magnitude >= 4.0)
        factor = Float32(
            cutlass.select_(four, Float32(0.5), cutlass.select_(two, Float32(1.0), Float32(2.0)))
        )
        below = Uint32(cutlass.select_(four, Uint32(4), cutlass.select_(two, Uint32(2), Uint32(0))))
        steps = (magnitude * factor + TO_INTEGER).bitcast(Uint32) & Uint32(CODE_MASK)
        code = (steps + below) | (bits >> SIGN_BIT << CODE_SIGN_BIT)
        word = word | (code << (CODE_BITS * i))
    return word
