"""Float formats on exact rationals: what the tests of arithmetic and conversions compare with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Binary:
    """An IEEE-like format; `precision` counts the hidden bit, exponents are those of normal numbers."""

    bits: int
    precision: int
    min_exponent: int
    max_exponent: int

    @property
    def largest(self) -> Fraction:
        return (2 - Fraction(2) ** (1 - self.precision)) * Fraction(2) ** self.max_exponent

    def value(self, pattern: int) -> Fraction | float:
        """A bit pattern's value: a Fraction, or inf/-inf/nan; -0.0 for the negative zero."""
        sign = -1 if pattern >> (self.bits - 1) else 1
        field = self.precision - 1
        exponent = pattern >> field & ((1 << (self.bits - self.precision)) - 1)
        mantissa = pattern & ((1 << field) - 1)
        if exponent == (1 << (self.bits - self.precision)) - 1:
            return math.nan if mantissa else sign * math.inf
        if exponent == 0 and mantissa == 0:
            return -0.0 if sign < 0 else Fraction(0)
        if exponent:
            mantissa += 1 << field
        return sign * mantissa * Fraction(2) ** (max(exponent, 1) - 1 + self.min_exponent - field)

    def round(self, value: Fraction, mode: str) -> float:
        """The value nearest to an exact one in a mode, as a Python float; overflow as IEEE 754 has it."""
        if value == 0:
            return 0.0
        sign = -1 if value < 0 else 1
        magnitude = abs(value)
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        while Fraction(2) ** exponent > magnitude:
            exponent -= 1
        while Fraction(2) ** (exponent + 1) <= magnitude:
            exponent += 1
        unit = Fraction(2) ** (max(exponent, self.min_exponent) - self.precision + 1)
        below = magnitude // unit * unit
        above = below + unit if below != magnitude else below
        up = {"rz": below, "rp": above if sign > 0 else below, "rm": below if sign > 0 else above}
        if mode in up:
            result = up[mode]
        else:
            middle = below + unit / 2
            even = below if below / unit % 2 == 0 else above
            tie = above if mode == "rna" else even
            result = below if magnitude < middle else above if magnitude > middle else tie
        if result > self.largest:
            to_largest = mode == "rz" or mode == ("rm" if sign > 0 else "rp")
            return sign * (float(self.largest) if to_largest else math.inf)
        return sign * float(result)


F16 = Binary(16, 11, -14, 15)
BF16 = Binary(16, 8, -126, 127)
F32 = Binary(32, 24, -126, 127)
F64 = Binary(64, 53, -1022, 1023)
