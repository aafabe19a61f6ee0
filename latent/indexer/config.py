"""Configuration of the kernels that select. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common.hardware import MAX_SMEM_PER_CTA, WARP_THREADS, WORD_BYTES
from warpspec.latent.indexer.scores_config import ScoresConfig
from warpspec.latent.indexer.sm100.config import SCORE_BARRIER, Sm100ScoresConfig

K_LIMIT = 2048
BINS, HISTOGRAMS = 256, 3  # bins of a search's histogram; histograms that take turns
TILE_ROOM = 1024  # bytes left for aligning the query in shared memory to as many


@dataclass(frozen=True)
class SelectConfig:
    """Configuration of the kernel of ``index_topk``, one CTA a row.

    lengths, table: whether the call has them. is_split: a row has several CTAs, each of which writes the largest logits
    of its split and their indices. mapped: the logits are such results of splits, with indices beside them. threads:
    threads of a CTA that select. chunk: logits in shared memory at a time. listed: length of the list of candidates.
    barrier: named barrier of the selecting threads; 0: the CTA has no other threads.
    """

    lengths: bool
    table: bool
    is_split: bool = False
    mapped: bool = False
    threads: int = 1024
    chunk: int = 32768
    listed: int = 4096
    barrier: int = 0

    def __post_init__(self):
        assert not (self.is_split and (self.table or self.mapped))
        assert BINS <= self.threads <= WARP_THREADS**2, "a warp adds up the warps' counts"
        assert self.chunk % self.threads == 0 and self.listed % self.threads == 0
        assert self.chunk % (self.group * self.threads) == 0
        assert self.chunk + K_LIMIT < 2**16, "two counts share a word"
        assert self.smem_bytes <= MAX_SMEM_PER_CTA

    @property
    def per_thread(self) -> int:
        """Logits of a chunk that a thread has; their numbers are thread, thread + threads, ..."""
        return self.chunk // self.threads

    @property
    def group(self) -> int:
        """Logits of a thread that form a group; the search for a threshold sees only a group's largest."""
        return 8

    @property
    def kept(self) -> int:
        """Entries kept of earlier chunks that a thread has; their numbers are thread, thread + threads, ..."""
        return K_LIMIT // self.threads

    @property
    def groups(self) -> int:
        """Groups of logits that a thread has."""
        return self.per_thread // self.group

    @property
    def place_words(self) -> int:
        """Words that have a bit for each place: first the kept entries, then the chunk."""
        return (K_LIMIT + self.chunk) // WARP_THREADS

    @property
    def own_words(self) -> int:
        """Number of ``place_words`` that a thread scans."""
        return -(-self.place_words // self.threads)

    @property
    def smem_bytes(self) -> int:
        words = self.chunk + 2 * self.listed + 4 * K_LIMIT + 4 + BINS * HISTOGRAMS
        return (words + 2 * self.place_words + WARP_THREADS) * WORD_BYTES


STREAM_WARPGROUPS, STREAM_CHUNK = 4, 16384
MOST_SPLITS = 16  # CTAs of a row; K_LIMIT entries of each together fit a chunk
SPLIT_LOGITS = 16384  # least number of logits of a split


def choose_splits(rows: int, logits: int, sm_count: int) -> int:
    """CTAs of a row: several where rows are few and longer than a chunk, else one, which takes chunk after chunk."""
    if logits <= SelectConfig(False, False).chunk:
        return 1
    return max(1, min(sm_count // rows, logits // SPLIT_LOGITS, MOST_SPLITS))


@dataclass(frozen=True)
class StreamConfig:
    """Configuration of the kernel that scores and selects in one launch, one CTA a query.

    scores, select: the configurations of the two steps; the same threads do both.
    """

    scores: ScoresConfig | Sm100ScoresConfig
    select: SelectConfig

    def __post_init__(self):
        assert self.scores.score_threads == self.select.threads and self.select.table
        assert self.select.chunk % (self.scores.tile_keys * self.scores.warpgroups) == 0
        assert self.select.smem_bytes + self.scores.smem_bytes + TILE_ROOM <= MAX_SMEM_PER_CTA

    @classmethod
    def of(cls, kind: type, format: str, heads: int, page_size: int) -> StreamConfig:
        """kind: the architecture's class of score configurations."""
        scores = kind.streaming(format, heads, page_size, STREAM_WARPGROUPS)
        barrier = 0 if scores.threads == scores.score_threads else SCORE_BARRIER
        select = SelectConfig(True, True, threads=scores.score_threads, chunk=STREAM_CHUNK, barrier=barrier)
        return cls(scores, select)

    @property
    def threads(self) -> int:
        return self.scores.threads
