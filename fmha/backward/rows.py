"""The kernels before and after the main one: configurations, and what they are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common.launch import Kernel
from warpspec.common.operands import fakes
from warpspec.fmha.backward.features import PART_ELEMENTS, BackwardFeatures
from warpspec.fmha.backward.operands import KeyOperands, QueryOperands, RowOperands


@dataclass(frozen=True)
class RowConfig:
    """Configuration of the kernel before the main one, which makes statistics of rows. The other fields say which
    operands there are.
    """

    head_dim: int
    tile_m: int
    dtype: str = "bfloat16"
    packed: bool = False
    has_do: bool = True
    has_dlse: bool = False
    has_sink: bool = False
    wants_q: bool = True
    wants_sink: bool = False
    deterministic: bool = False
    delta_factor: float = 1.0


@dataclass(frozen=True)
class QueryConfig:
    """Configuration of the kernel after the main one, which finishes dQ."""

    head_dim: int
    tile_m: int
    dtype: str = "bfloat16"
    packed: bool = False

    @property
    def parts(self) -> int:
        return self.tile_m * self.head_dim // PART_ELEMENTS


@dataclass(frozen=True)
class KeyConfig:
    """Configuration of the kernel that adds up the dK and dV of key tiles' pieces. packed: of requests."""

    head_dim: int
    tile_n: int
    dtype: str = "bfloat16"
    packed: bool = False
    wants_k: bool = True
    wants_v: bool = True

    @property
    def tile_m(self) -> int:
        """Rows of a tile."""
        return self.tile_n

    @property
    def parts(self) -> int:
        return self.tile_n * self.head_dim // PART_ELEMENTS


def key_config(config: BackwardFeatures) -> KeyConfig:
    """The kernel behind the main kernel of ``config``, which cuts key tiles."""
    return KeyConfig(
        config.head_dim, config.tile_n, config.dtype, config.packed_k, config.wants_k, config.wants_v
    )


def row_config(config: BackwardFeatures, problem) -> RowConfig:
    """The first kernel of a problem whose main kernel is that of ``config``."""
    return RowConfig(
        config.head_dim,
        config.tile_m,
        config.dtype,
        config.packed_q,
        problem.has_do,
        problem.has_dlse,
        problem.forward.has_sink,
        config.wants_q,
        "sink" in problem.wanted,
        config.deterministic,
        config.delta_factor,
    )


def row_arguments(config: RowConfig) -> tuple:
    from warpspec.fmha.backward.device.rows import Rows

    return (Rows(config), *fakes(RowOperands, config))


def query_arguments(config: QueryConfig) -> tuple:
    from warpspec.fmha.backward.device.queries import Queries

    return (Queries(config), *fakes(QueryOperands, config))


def key_arguments(config: KeyConfig) -> tuple:
    from warpspec.fmha.backward.device.keys import Keys

    return (Keys(config), *fakes(KeyOperands, config))


KEYS = Kernel("fmha.backward.keys", key_arguments)
ROWS = Kernel("fmha.backward.rows", row_arguments)
QUERIES = Kernel("fmha.backward.queries", query_arguments)
