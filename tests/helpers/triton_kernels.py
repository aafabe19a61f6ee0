"""Triton kernels for tests/sim/test_other_compilers.py, which imports them where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def matmul(a, b, c, k, n, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """C [m, n] = A [m, k] B [n, k]^T, by pointers; sizes are multiples of the tile's."""
    row, column = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    at = tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for i in range(0, k, K):
        left = tl.load(a + row[:, None] * k + i + at[None, :])
        right = tl.load(b + column[None, :] * k + i + at[:, None])
        total = tl.dot(left, right, total)
    tl.store(c + row[:, None] * n + column[None, :], total.to(tl.float16))


@triton.jit
def matmul_described(a, b, c, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """C = A B^T by tensor descriptors."""
    row, column = tl.program_id(0) * M, tl.program_id(1) * N
    total = tl.zeros((M, N), tl.float32)
    for i in range(0, tl.cdiv(k, K)):
        total = tl.dot(a.load([row, i * K]), b.load([column, i * K]).T, total)
    c.store([row, column], total.to(tl.float16))
