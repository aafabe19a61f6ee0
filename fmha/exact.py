"""Rows of global memory in fp32, for the paths that sum a row again."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from warpspec.fmha.features import BLOCK


def load_part(source: cute.Tensor) -> cute.Tensor:
    """Registers (n) holding a part of a row of a global tensor."""
    registers = cute.make_rmem_tensor(cute.size(source), source.element_type)
    cute.autovec_copy(source, registers)
    return registers


@cute.jit
def dot(
    config: cutlass.Constexpr, q: cute.Tensor, k: cute.Tensor, part: cutlass.Constexpr = BLOCK
) -> Float32:
    """q.k of two rows (D), ``part`` elements in registers at a time."""
    total = Float32(0.0)
    for place in cutlass.range(config.head_dim // part, unroll=1):
        a, b = (load_part(cute.local_tile(row, (part,), (place,))) for row in (q, k))
        for i in cutlass.range_constexpr(part):
            total = total + a[i].to(Float32) * b[i].to(Float32)
    return total
