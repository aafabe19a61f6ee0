"""Instructions on words of registers that the DSL has no function for."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int64, Uint32


def permute(word: Uint32, order: int) -> Uint32:
    """Select bytes of ``word`` and of a zero word after it, by the nibbles of ``order`` (prmt)."""
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, 0, {order:#x};", write_only_types=[Uint32], read_only_args=[word]
    )


def multiply_bf16x2(pair: Uint32, factor: Uint32) -> Uint32:
    """Multiply two pairs of bf16."""
    return cute.arch.inline_ptx(
        "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[pair, factor]
    )


def shuffle_address(address: Int64, source) -> Int64:
    """The 64-bit number of another lane."""
    low = Uint32(cute.arch.shuffle_sync(Uint32(address & Int64(0xFFFFFFFF)), source))
    high = Uint32(cute.arch.shuffle_sync(Uint32((address >> Int64(32)) & Int64(0xFFFFFFFF)), source))
    return (Int64(high) << Int64(32)) | Int64(low)
