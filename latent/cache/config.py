"""Configuration of the insert and compress kernels. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import FP32_BYTES, MAX_SMEM_PER_CTA, MAX_THREADS_PER_CTA, WARP_THREADS
from warpspec.latent.cache.formats import INDEX_FORMATS, LATENT_FORMATS, RowFormat
from warpspec.latent.cache.models import OVERLAP

MOST_CSA_TOKENS = 16  # of an entry, which kernels pool from twice as many
VECTOR = 4  # fp32 numbers of one 16-byte access
STORED_BY_KERNELS = ("v4-fp8", "bf16", "mxfp4", "fp8")  # formats that kernels can write


def row_format(kind: str, name: str) -> RowFormat:
    """The record of a format that kernels write; raises UnsupportedProblem for any other."""
    if name not in STORED_BY_KERNELS:
        raise UnsupportedProblem(
            f"pool: kernels store rows of {', '.join(STORED_BY_KERNELS)}, got {name!r} (backend 'reference' stores all)"
        )
    return (LATENT_FORMATS if kind == "latent" else INDEX_FORMATS)[name]


@dataclass(frozen=True)
class InsertConfig:
    """Configuration of the kernel of ``insert_window`` and ``store_rows``, which gives each row a warp.

    kind, format: kind and format of the pool. project: normalise and rotate rows before they are stored. queries:
    normalise and rotate queries too, and return them. weight: dtype of the norm's weight; None: rotate rows without
    normalising them. hadamard: apply the Hadamard transform to rows. share: this many consecutive rows have the same
    position.
    """

    kind: str
    format: str
    project: bool = True
    queries: bool = True
    weight: str | None = "float32"
    hadamard: bool = False
    share: int = 1

    def __post_init__(self):
        assert self.threads <= MAX_THREADS_PER_CTA
        assert self.project or not (self.queries or self.hadamard)
        assert self.share == 1 or not self.queries

    @property
    def fmt(self) -> RowFormat:
        return row_format(self.kind, self.format)

    @property
    def warps(self) -> int:
        """Warps of a CTA; each has one row."""
        return 8

    @property
    def threads(self) -> int:
        return self.warps * WARP_THREADS


@dataclass(frozen=True)
class CompressConfig:
    """Configuration of the kernel of ``compress``.

    The first CTAs have a request each and do what needs its state; each further CTA has ``stride`` tokens.

    tail: "csa" or "hca". stride: tokens of an entry. max_draft: see ``state.Tail``. kind, format: kind and format of
    the pool. hadamard: apply the Hadamard transform to rows. weight, ape: dtypes of the norm's weight and of the
    positional bias.
    """

    tail: str
    stride: int
    max_draft: int
    kind: str
    format: str
    hadamard: bool = False
    weight: str = "float32"
    ape: str = "float32"

    def __post_init__(self):
        assert self.tail in ("csa", "hca") and self.stride >= 1 and self.max_draft >= 0
        assert self.dim % (VECTOR * WARP_THREADS) == 0 and self.threads <= MAX_THREADS_PER_CTA
        assert self.smem_bytes <= MAX_SMEM_PER_CTA
        if self.tail == "csa" and self.stride > MOST_CSA_TOKENS:  # an entry's rows are in registers
            raise UnsupportedProblem(
                f"tail: kernels take CSA entries of at most {MOST_CSA_TOKENS} tokens, got stride {self.stride} "
                "(backend 'reference' takes all)"
            )

    @property
    def fmt(self) -> RowFormat:
        return row_format(self.kind, self.format)

    @property
    def dim(self) -> int:
        """Channels of an entry."""
        return self.fmt.dim

    @property
    def series(self) -> int:
        """c: how many times ``dim`` channels C and Z of a token have."""
        return OVERLAP if self.tail == "csa" else 1

    @property
    def reach(self) -> int:
        """Number of tokens that an entry is pooled from."""
        return self.series * self.stride

    @property
    def ring(self) -> int:
        """Rows of a request's tail."""
        return self.max_draft + (self.reach if self.tail == "csa" else 0)

    @property
    def threads(self) -> int:
        """Threads of a CTA; each has VECTOR channels."""
        return self.dim // VECTOR

    @property
    def smem_bytes(self) -> int:
        """Bytes that carry an entry's channels from the threads that pool them to the warp that stores the row."""
        return self.dim * FP32_BYTES
