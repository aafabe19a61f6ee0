"""The kernels before and after the main one: configurations, and what they are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common.compile import fake_rows
from warpspec.common.hardware import TMA_ALIGNMENT
from warpspec.common.launch import Kernel
from warpspec.fmha.backward.features import PART_ELEMENTS, BackwardFeatures


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


def _types(dtype: str):
    import cutlass

    return {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[dtype], cutlass.Float32, cutlass.Int32


def row_arguments(config: RowConfig) -> tuple:
    from warpspec.fmha.backward.device.rows import Rows

    dtype, fp32, int32 = _types(config.dtype)

    def rows(dtype, rank, last):
        return fake_rows(dtype, rank, last, alignment=TMA_ALIGNMENT)

    return (
        Rows(config),
        rows(dtype, 4, config.head_dim),
        rows(dtype, 4, config.head_dim) if config.has_do else None,
        fake_rows(fp32, 3),
        fake_rows(fp32, 3) if config.has_dlse else None,
        fake_rows(fp32, 1) if config.has_sink else None,
        fake_rows(int32, 1) if config.packed else None,
        rows(fp32, 4, 4),
        rows(fp32, 3, config.tile_m * config.head_dim) if config.wants_q else None,
        fake_rows(int32, 3) if config.deterministic else None,
        fake_rows(fp32, 2) if config.wants_sink else None,
    )


def query_arguments(config: QueryConfig) -> tuple:
    from warpspec.fmha.backward.device.queries import Queries

    dtype, fp32, int32 = _types(config.dtype)
    return (
        Queries(config),
        fake_rows(fp32, 3, config.tile_m * config.head_dim, alignment=TMA_ALIGNMENT),
        fake_rows(dtype, 4, config.head_dim, alignment=TMA_ALIGNMENT),
        fake_rows(int32, 1) if config.packed else None,
        1.0,
    )


def key_arguments(config: KeyConfig) -> tuple:
    from warpspec.fmha.backward.device.keys import Keys

    dtype, fp32, int32 = _types(config.dtype)
    sums = fake_rows(fp32, 4, config.tile_n * config.head_dim, alignment=TMA_ALIGNMENT)
    rows = fake_rows(dtype, 4, config.head_dim, alignment=TMA_ALIGNMENT)
    return (
        Keys(config),
        sums if config.wants_k else None,
        sums if config.wants_v else None,
        rows if config.wants_k else None,
        rows if config.wants_v else None,
        fake_rows(int32, 1) if config.packed else None,
        1.0,
    )


KEYS = Kernel("fmha.backward.keys", key_arguments)
ROWS = Kernel("fmha.backward.rows", row_arguments)
QUERIES = Kernel("fmha.backward.queries", query_arguments)
