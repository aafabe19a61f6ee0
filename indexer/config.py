"""What a select kernel is compiled for. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common.hardware import MAX_SMEM_PER_CTA, WARP_THREADS

WORD_BYTES = 4
K_LIMIT = 2048
BINS, HISTOGRAMS = 256, 3  # of a search, and how many take turns


@dataclass(frozen=True)
class SelectConfig:
    """The kernel of ``index_topk``: a CTA a row. lengths, table: whether those are given. threads: of a CTA. chunk:
    logits that it has in shared memory at a time. slots: of the list of candidates."""

    lengths: bool
    table: bool
    threads: int = 1024
    chunk: int = 32768
    slots: int = 4096

    def __post_init__(self):
        assert self.threads == WARP_THREADS**2, "a warp adds up the warps' counts"
        assert self.chunk % self.threads == 0 and self.slots % self.threads == 0
        assert self.chunk % (self.group * self.threads) == 0
        assert self.chunk + K_LIMIT < 2**16, "two counts share a word"
        assert self.place_words <= 2 * self.threads, "a thread has two"
        assert self.smem_bytes <= MAX_SMEM_PER_CTA

    @property
    def per_thread(self) -> int:
        """Logits of a chunk that a thread has: numbers thread, thread + threads, ..."""
        return self.chunk // self.threads

    @property
    def group(self) -> int:
        """Logits of a thread whose largest stands for them in the search for a threshold."""
        return 8

    @property
    def kept(self) -> int:
        """What was chosen of earlier chunks, by thread: numbers thread, thread + threads."""
        return K_LIMIT // self.threads

    @property
    def groups(self) -> int:
        """Groups of a thread."""
        return self.per_thread // self.group

    @property
    def place_words(self) -> int:
        """Words with a bit for each place: what was kept, then the chunk."""
        return (K_LIMIT + self.chunk) // WARP_THREADS

    @property
    def smem_bytes(self) -> int:
        words = self.chunk + 2 * self.slots + 4 * K_LIMIT + 4 + BINS * HISTOGRAMS
        return (words + 2 * self.place_words + WARP_THREADS) * WORD_BYTES
