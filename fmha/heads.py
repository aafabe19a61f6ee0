"""Head sizes of Q and K, and of V and O, and the sizes that kernels derive from them.

Pages, caches and results hold rows of the true sizes. In shared memory a row has whole spans of the 128-byte swizzle;
TMA fills zeros past the true size. Products run over the true size, rounded up to an instruction's depth. So a head
size costs memory traffic for its own elements, tensor core time for a multiple of 16, and shared memory for a multiple
of 64.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 64  # contiguous elements of a row in shared memory: one span of the 128-byte swizzle
MMA_K = 16  # elements that one instruction sums over
STEP = 8  # a head size is a multiple of this many: rows aligned to 16 bytes
CLASSES = (64, 128, 256, 512)  # head sizes that tile shapes are tuned for
LARGEST = 256  # largest size between the tuned ones; 512 stands alone
# fp32 after the D columns of a row of a piece's state: maximum, sum, and as many unused as let every row begin with a
# sector of memory.
PIECE_STATISTICS = 8
LATENT = (576, 512)  # sizes of Q and K, and of V, if V is the first part of K's rows (MLA's absorbed form)


def supported(size: int) -> bool:
    """Whether attention supports this head size."""
    return size in CLASSES or (0 < size <= LARGEST and size % STEP == 0)


def class_of(size: int) -> int:
    """The tuned head size whose tile shapes a size uses."""
    return next(each for each in CLASSES if each >= size)


def rounded(size: int, step: int) -> int:
    """The next multiple of ``step``."""
    return -(-size // step) * step


@dataclass(frozen=True)
class HeadSizes:
    """qk: elements of a row of Q and K. v: elements of a row of V and O."""

    qk: int
    v: int

    @property
    def whole(self) -> bool:
        """Whether rows fill their spans. If so, TMA sees spans as a dimension and loads several at a time; otherwise
        each span is a box of the row, and TMA pads the row's end."""
        return self.qk % BLOCK == 0 and self.v % BLOCK == 0

    @property
    def qk_blocks(self) -> int:
        """Spans of a row of Q and K."""
        return -(-self.qk // BLOCK)

    @property
    def v_blocks(self) -> int:
        """Spans of a row of V."""
        return -(-self.v // BLOCK)

    def blocks(self, ring: str) -> int:
        """Spans of a row of a ring's, "k" or "v"."""
        return self.v_blocks if ring == "v" else self.qk_blocks

    @property
    def qk_room(self) -> int:
        """Elements of a row of Q and K in shared memory."""
        return self.qk_blocks * BLOCK

    @property
    def v_room(self) -> int:
        """Elements of a row of V in shared memory."""
        return self.v_blocks * BLOCK

    @property
    def qk_steps(self) -> int:
        """Instructions of QK, each of which sums over MMA_K elements."""
        return -(-self.qk // MMA_K)

    @property
    def v_state(self) -> int:
        """fp32 columns of a row of O in a partial result, a power of two; those past ``v`` are not written."""
        return class_of(self.v)

    @property
    def piece_columns(self) -> int:
        """fp32 numbers of a row in the state of a piece of a tile (``line``)."""
        return self.v_state + PIECE_STATISTICS
