"""Code that the projection kernels of all architectures share: host side, order of tiles, load warp.

Tiles with the same columns are adjacent in the order, so that a group's weight is read from memory once and its tokens'
rows stay in L2.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32

from warpspec.common.compile import fake_rows
from warpspec.common.device import tma
from warpspec.common.device.pipeline import drain
from warpspec.common.hardware import TMA_ALIGNMENT
from warpspec.latent.projection.config import ProjectionConfig

E4M3 = cutlass.Float8E4M3FN
SCALE_COLUMNS = 128  # columns of a weight that share a scale


class ProjectionWork(NamedTuple):
    """The tiles of a launch.

    tiles: how many there are. m_tiles: how many belong to one group and column tile. blocks: stages along K.
    """

    tiles: Int32
    m_tiles: Int32
    blocks: Int32


class ProjectionHost:
    """``Projection(config)(...)`` is the host function; an architecture's class adds ``kernel``."""

    def __init__(self, config: ProjectionConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        a_scales: cute.Tensor | None,
        b_scales: cute.Tensor | None,
        out: cute.Tensor,
        ctas: Int32,
        stream: CUstream,
    ):
        """Launch the kernel.

        a: [T, G, K]. b: [G, N, K]. a_scales: fp32 [T, G, K / 128] and b_scales: fp32 [G, N / 128, K / 128], in FP8.
        out: bf16 [T, G, N]. ctas: most CTAs of the persistent launch.
        """
        config = self.config
        loads = (
            tma.make_load(blocked(config, a, 0, 1), (config.stage_depth, config.box_rows)),
            tma.make_load(blocked(config, b, 1, 0), (config.stage_depth, config.tile_n)),
        )
        tokens, groups, columns = out.shape
        m_tiles = cute.ceil_div(tokens, config.tile_m)
        tiles = Int32(m_tiles * groups * (columns // config.tile_n))
        blocks = a.shape[2] // config.stage_depth
        self.kernel(
            tuple(atom for atom, _ in loads),
            tuple(t for _, t in loads),
            a_scales,
            b_scales,
            out,
            ProjectionWork(tiles, m_tiles, Int32(blocks)),
        ).launch(
            grid=(cutlass.min(tiles, ctas), 1, 1),
            block=(config.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )


def element(config: ProjectionConfig):
    return E4M3 if config.float8 else BFloat16


def blocked(config: ProjectionConfig, tensor: cute.Tensor, row_mode: int, group_mode: int) -> cute.Tensor:
    """(DEPTH, ROW, GROUP, BLOCK): a or b with K cut into stages."""
    depth = config.stage_depth
    shape = (depth, tensor.shape[row_mode], tensor.shape[group_mode], tensor.shape[2] // depth)
    stride = (1, tensor.stride[row_mode], tensor.stride[group_mode], depth)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def tile_at(config, out, m_tiles, index) -> tuple:
    """(first token, group, column tile) of the index-th tile."""
    n_tiles = out.shape[2] // config.tile_n
    rest = index // m_tiles
    return index % m_tiles * config.tile_m, rest // n_tiles, rest % n_tiles


@cute.jit
def load(config: cutlass.Constexpr, channels: cutlass.Constexpr, bases, atoms, coordinates, out, work):
    """The load warp: both operands of every stage of the CTA's tiles.

    Produces full. Consumes empty before a stage is filled again. Returns only when all stages have been released.
    """
    dtype = cutlass.Uint8 if cutlass.const_expr(config.float8) else BFloat16
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    use = Int32(0)
    a_box, b_box = (config.stage_depth, config.box_rows), (config.stage_depth, config.tile_n)
    for index in cutlass.range(cta, work.tiles, ctas, unroll=1):
        first, group, column = tile_at(config, out, work.m_tiles, index)
        rings = []
        for box in cutlass.range_constexpr(config.row_boxes):
            row = first + box * config.box_rows
            rings.append(ring_of(config, atoms[0], coordinates[0], bases[0], dtype, a_box, (row, group), box))
        rings.append(
            ring_of(
                config, atoms[1], coordinates[1], bases[1], dtype, b_box, (column * config.tile_n, group), 0
            )
        )
        for block in cutlass.range(work.blocks, unroll=1):
            channels["empty"].wait_previous(use + block)
            channels["full"].expect_bytes(use + block, config.stage_bytes)
            stage = (use + block) % config.stages
            for ring in rings:
                ring.load(block, stage, channels["full"].barrier(use + block))
        use += work.blocks
    drain((channels["empty"],), use)


def ring_of(config, atom, coordinates, base, dtype, box, at, number) -> tma.TileRing:
    """The ring of one operand's blocks, from row and group ``at`` on. number: which of the rings at ``base``."""
    row, group = at
    tiles = cute.domain_offset((0, row, 0), coordinates[None, None, group, None])
    tiles = cute.local_tile(tiles, box, (0, 0, None))  # (DEPTH, ROW, BLOCK)
    base = (base + number * config.stages * tma.tile_bytes(box)).align(tma.TILE_ALIGNMENT)
    return tma.TileRing.make(atom, tiles, tma.shared_tiles(base, dtype, box, config.stages))


def projection_arguments(host: type, config: ProjectionConfig) -> tuple:
    """The host function of a configuration and its arguments without the stream."""
    dtype = cutlass.Uint8 if config.float8 else BFloat16

    def scales():
        return fake_rows(Float32, 3) if config.float8 else None

    def rows(dtype):
        return fake_rows(dtype, 3, alignment=TMA_ALIGNMENT)

    return (host(config), rows(dtype), rows(dtype), scales(), scales(), rows(BFloat16), Int32(1))
