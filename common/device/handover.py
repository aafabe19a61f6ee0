"""Hands words from one warpgroup to another through shared memory, each thread to the thread with the same number.

The receiving warpgroup is in the same CTA or in another CTA of the cluster. Words travel as vectors of 16 bytes, which
lie side by side for all threads. To another CTA they go by st.async (PTX ISA), whose bytes complete on an mbarrier of
the receiving CTA.
"""

from __future__ import annotations

from cutlass import Int32, cute

from warpspec.common.hardware import VECTOR_BYTES, WARPGROUP_THREADS, WORD_BYTES

WORDS = VECTOR_BYTES // WORD_BYTES


def vector_at(base: cute.Pointer, thread, vector: int) -> cute.Pointer:
    """Pointer to one of a thread's vectors of words. thread: the thread's number in its warpgroup."""
    at = base.toint() + (vector * WARPGROUP_THREADS + thread) * VECTOR_BYTES
    return cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)


def vector_of(base: cute.Pointer, thread, vector: int) -> cute.Tensor:
    """The (WORDS) tensor of one of a thread's vectors in shared memory."""
    return cute.make_tensor(vector_at(base, thread, vector), cute.make_layout(WORDS))


def store_words(words: cute.Tensor, base: cute.Pointer, thread) -> None:
    """Store a warpgroup's words to shared memory of its own CTA. words: Int32 registers, a multiple of WORDS."""
    for vector in range(cute.size(words) // WORDS):
        cute.autovec_copy(cute.local_tile(words, (WORDS,), (vector,)), vector_of(base, thread, vector))


def send_words(words: cute.Tensor, base: cute.Pointer, thread, mbarrier: cute.Pointer, rank) -> None:
    """Send a warpgroup's words to the address ``base`` in the shared memory of CTA ``rank``.

    words: as in ``store_words``. mbarrier: the address, in this CTA, of the mbarrier that the bytes complete on in the
    receiving CTA.
    """
    for vector in range(cute.size(words) // WORDS):
        values = tuple(words[vector * WORDS + i] for i in range(WORDS))
        cute.arch.store_async_dsmem(vector_at(base, thread, vector), values, mbarrier, rank)


def received_words(base: cute.Pointer, thread, count: int) -> cute.Tensor:
    """Load the ``count`` words that a thread has been handed to Int32 registers."""
    words = cute.make_rmem_tensor(count, Int32)
    for vector in range(count // WORDS):
        cute.autovec_copy(vector_of(base, thread, vector), cute.local_tile(words, (WORDS,), (vector,)))
    return words


def meet() -> None:
    """Wait for all threads of all CTAs of the cluster.

    At the start, every mbarrier is then initialised; at the end, nothing is on its way to any of them.
    """
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
