"""Words that a thread of a warpgroup hands to the thread of the same number in another one, of its CTA or of another
CTA of its cluster, through shared memory: vectors of 16 bytes, of all threads side by side.

To another CTA they go by st.async (PTX ISA), whose bytes complete on an mbarrier of the CTA that receives them.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from warpspec.common.hardware import VECTOR_BYTES, WARPGROUP_THREADS, WORD_BYTES

WORDS = VECTOR_BYTES // WORD_BYTES


def vector_at(base: cute.Pointer, thread, vector: int) -> cute.Pointer:
    """Where a thread's vector of words lies. thread: of a warpgroup."""
    at = base.toint() + (vector * WARPGROUP_THREADS + thread) * VECTOR_BYTES
    return cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)


def vector_of(base: cute.Pointer, thread, vector: int) -> cute.Tensor:
    """(WORDS): a thread's vector in shared memory."""
    return cute.make_tensor(vector_at(base, thread, vector), cute.make_layout(WORDS))


def store_words(words: cute.Tensor, base: cute.Pointer, thread) -> None:
    """A warpgroup's words to shared memory of its CTA. words: Int32 registers, a multiple of WORDS."""
    for vector in range(cute.size(words) // WORDS):
        cute.autovec_copy(cute.local_tile(words, (WORDS,), (vector,)), vector_of(base, thread, vector))


def send_words(words: cute.Tensor, base: cute.Pointer, thread, mbarrier: cute.Pointer, rank) -> None:
    """A warpgroup's words to CTA ``rank``, to where ``base`` is there. words: as of ``store_words``.
    mbarrier: the one of this CTA that stands where the receiving CTA has the one that the bytes complete on."""
    for vector in range(cute.size(words) // WORDS):
        values = tuple(words[vector * WORDS + i] for i in range(WORDS))
        cute.arch.store_async_dsmem(vector_at(base, thread, vector), values, mbarrier, rank)


def received_words(base: cute.Pointer, thread, count: int) -> cute.Tensor:
    """What a thread has been handed: ``count`` words in registers, Int32."""
    words = cute.make_rmem_tensor(count, Int32)
    for vector in range(count // WORDS):
        cute.autovec_copy(vector_of(base, thread, vector), cute.local_tile(words, (WORDS,), (vector,)))
    return words


def meet() -> None:
    """All CTAs of the cluster are here: their mbarriers are there, or nothing is on its way to them any more. By all
    threads."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
