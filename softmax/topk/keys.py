"""Order of candidates: one 64-bit word each, so that comparing words is all that is needed. Device side.

A logit's *key* is an Int32 that orders as the logits do: NaN, of any sign and payload, is above +inf, and -0 equals +0.
A *candidate* has the key (as unsigned) in its upper half and the complement of the column below. Larger logits come
first, among equal ones the lower column, and no two candidates of a row are equal.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, Uint32, Uint64

KEY_BITS = 31  # below the sign
MAGNITUDE = 0x7FFFFFFF
SIGN = -0x80000000
NAN_KEY = 0x7FFFFFFE  # so that no candidate has all bits set
INF_KEY = 0x7F800000  # bits of +inf
LOWEST_KEY = -0x7F800001  # key of -inf
NOTHING_YET = LOWEST_KEY - 1  # below every logit's key
BELOW_ZERO = -2  # key of the largest number below 0; -1 would be that of -0, which is not below 0
COLUMN_MASK = 0xFFFFFFFF
COLUMN_BITS = 32


def key_of(logit: Float32) -> Int32:
    """The key of a logit."""
    bits = (logit + Float32(0.0)).bitcast(Int32)  # turns -0 into +0
    key = bits ^ ((bits >> KEY_BITS) & MAGNITUDE)
    return Int32(cutlass.select_(Boolean(logit != logit), Int32(NAN_KEY), key))


def logit_of(key: Int32) -> Float32:
    """The logit of a key; +0 for -0, and the same NaN for all NaNs."""
    return (key ^ ((key >> KEY_BITS) & MAGNITUDE)).bitcast(Float32)


def bar_of(key: Int32) -> Float32:
    """A number b such that ``passes(x, b)`` holds for exactly those x whose key is above ``key``, with two exceptions.

    For ``key`` NOTHING_YET, b is NaN, and -inf passes too, as it must. For NaN's ``key``, NaNs pass.
    """
    key = cutlass.min(key, Int32(INF_KEY))
    key = Int32(cutlass.select_(Boolean(key == -1), Int32(BELOW_ZERO), key))
    return logit_of(key)


def passes(logit: Float32, bar: Float32) -> Boolean:
    """Whether logit is above ``bar`` or either is NaN, in one instruction."""
    return ~Boolean(logit <= bar)


def candidate(logit: Float32, column: Int32) -> Uint64:
    high = Uint64(Uint32(key_of(logit) ^ SIGN))
    return (high << COLUMN_BITS) | Uint64(Uint32(~column))


def lowest_candidate(key: Int32) -> Uint64:
    """A word that no candidate of ``key`` is below, and that is above every candidate of a lower key."""
    return Uint64(Uint32(key ^ SIGN)) << COLUMN_BITS


def candidate_key(word: Uint64) -> Int32:
    return Int32(Uint32(word >> COLUMN_BITS)) ^ SIGN


def candidate_column(word: Uint64) -> Int32:
    return ~Int32(Uint32(word & COLUMN_MASK))
