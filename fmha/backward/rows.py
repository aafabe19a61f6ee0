"""Configurations of the kernels before and after the main one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from warpspec.common.launch import Kernel
from warpspec.common.operands import fakes
from warpspec.fmha.backward.features import BackwardKernel
from warpspec.fmha.backward.operands import ResultOperands, RowOperands
from warpspec.fmha.features import Format
from warpspec.fmha.heads import HeadSizes


@dataclass(frozen=True)
class RowConfig:
    """Configuration of the kernel before the main one, which computes row statistics. main: the main kernel's
    configuration if requests are packed, because this kernel sorts their key tiles. delta_factor, sink_limit: as the
    main kernel's. tile_n: keys of a tile whose sums are cleared. rows, dq_width: as the main kernel's. sink: the sink's
    dtype, None if there is none. The other fields say which operands exist.
    """

    heads: HeadSizes
    tile_m: int
    dq_width: int
    format: Format = Format()
    packed: bool = False
    has_do: bool = True
    has_dlse: bool = False
    sink: str | None = None
    wants_q: bool = True
    wants_sink: bool = False
    deterministic: bool = False
    delta_factor: float = 1.0
    sink_limit: float = 0.0
    main: BackwardKernel | None = None
    rows: HeadSizes | None = None
    tile_n: int = 0
    clears_k: bool = False
    clears_v: bool = False
    clears_done: bool = False
    subtracts: bool = False

    @property
    def sizes(self) -> HeadSizes:
        """Sizes of rows in memory."""
        return self.rows or self.heads


@dataclass(frozen=True)
class ResultConfig:
    """Configuration of the kernel after the main one, which finishes dQ, and dK and dV of cut key tiles.

    tile_m, tile_n: rows of the tiles of queries and of keys. packed: requests are packed. q: dQ is wanted. k, v: there
    are pieces of dK, of dV to add up. joins: dV is added to dK. by_length: the device decides how many pieces a tile
    has; by_request: as ``runs`` say; last_rows: those of the first rows may be whole. added: pieces have been added up
    already. rows: as the main kernel's.
    """

    heads: HeadSizes
    tile_m: int
    tile_n: int
    format: Format = Format()
    packed: bool = False
    q: bool = True
    k: bool = False
    v: bool = False
    joins: bool = False
    by_length: bool = False
    by_request: bool = False
    last_rows: bool = False
    added: bool = False
    rows: HeadSizes | None = None

    @property
    def sizes(self) -> HeadSizes:
        """Sizes of rows in memory."""
        return self.rows or self.heads

    @property
    def reads_order(self) -> bool:
        """Whether the order of key tiles, or its last row, is read."""
        return self.by_request or self.last_rows

    @property
    def has_v(self) -> bool:
        """Whether there are pieces of dV."""
        return self.v or self.joins


def result_config(config: BackwardKernel) -> ResultConfig | None:
    """The kernel after the main kernel of ``config``, or what that does at its end (``BackwardKernel.finishes``); None
    if nothing is left to do."""
    k, v = config.leaves_k, config.leaves_v and config.wanted.dv
    if not (config.wanted.q or k or v):
        return None
    sizes = (config.heads, config.tile_m, config.tile_n)
    joins, by_length = (
        k and config.wanted.joins_keys,
        (k or v) and config.cuts_by_length and not config.slices,
    )
    by_request = by_length and config.keeps_requests
    last_rows = by_length and config.cuts_last_rows
    how = (joins, by_length, by_request, last_rows, config.slices, config.rows)
    return ResultConfig(*sizes, config.format, config.requests.packed_q, config.wanted.q, k, v, *how)


def row_config(config: BackwardKernel, problem) -> RowConfig:
    """The first kernel of a problem whose main kernel is that of ``config``."""
    main = None
    if config.requests.packed_k:
        main = config if config.cuts_by_length else replace(config, cut=False)
        main = replace(main, wanted=replace(config.wanted, q="q" in problem.wanted))  # whoever makes it
    return RowConfig(
        config.heads,
        config.tile_m,
        config.dq_width,
        config.format,
        config.requests.packed_q,
        problem.has_do,
        problem.has_dlse,
        problem.forward.sink_dtype if problem.forward.has_sink else None,
        config.wanted.q,
        "sink" in problem.wanted,
        config.deterministic,
        config.delta_factor,
        config.sink_limit if problem.forward.has_sink else 0.0,
        main,
        config.rows,
        config.tile_n if config.slices else 0,
        config.slices and config.leaves_k,
        config.slices and config.leaves_v,
        config.finishes,
        config.subtracts,
    )


def row_arguments(config: RowConfig) -> tuple:
    from warpspec.fmha.backward.device.rows import RowStatistics

    return (RowStatistics(config), *fakes(RowOperands, config))


def result_arguments(config: ResultConfig) -> tuple:
    from warpspec.fmha.backward.device.results import GradientResults

    return (GradientResults(config), *fakes(ResultOperands, config))


ROWS = Kernel("fmha.backward.rows", row_arguments)
RESULTS = Kernel("fmha.backward.results", result_arguments)
