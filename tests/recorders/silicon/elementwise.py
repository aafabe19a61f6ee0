"""Kernels that run one group of instructions of instructions.py on every thread's three words."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from silicon.assembly import ptx, word_function

THREADS = 128


def result_words(group: tuple[str, ...]) -> int:
    """Result words a thread of a group's kernel writes."""
    return sum(word_function(body).results for body in group)


def host_of(group: tuple[str, ...]):
    """Host function (a, b, c [COUNT], out [words, COUNT]): each instruction on a[i], b[i], c[i]."""
    functions = [word_function(body) for body in group]

    @cute.kernel
    def elementwise(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * THREADS + thread
        sources = (a[i], b[i], c[i])
        row = 0
        for n in cutlass.range_constexpr(len(functions)):
            words = ptx(functions[n].text, *sources, results=functions[n].results)
            for w in cutlass.range_constexpr(len(words)):
                out[row + w, i] = words[w]
            row += len(words)

    @cute.jit
    def host(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, out: cute.Tensor):
        elementwise(a, b, c, out).launch(grid=(cute.size(a) // THREADS, 1, 1), block=(THREADS, 1, 1))

    return host
