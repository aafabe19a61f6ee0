"""The load warp: loads tokens, weights and the scales of both through TMA, a K tile at a time."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.common.device import tma
from warpspec.common.device.pipeline import drain
from warpspec.common.hardware import WORD_BYTES
from warpspec.common.nvfp4 import ATOM_ROWS


class Source(NamedTuple):
    """An operand in global memory: its TMA descriptor and the tensor of TMA coordinates."""

    atom: cute.CopyAtom
    coordinates: cute.Tensor


class Sources(NamedTuple):
    """The operands: tokens (K bytes, ROW), weights (K bytes, ROW, EXPERT), token_scales (Int32, K ATOM, ROW ATOM),
    weight_scales (Int32, K ATOM, ROW ATOM, EXPERT)."""

    tokens: Source
    weights: Source
    token_scales: Source
    weight_scales: Source


def make_sources(config, tokens, token_scales, weights, weight_scales, k) -> Sources:
    """Make the descriptors, on the host.

    Tensors as in ``kernel.GroupedGemm``. k: values along K; nothing past it is read.
    """
    rows, experts = tokens.shape[0], weights.shape[0]
    k_bytes = k // 2

    def view(tensor, shape, stride):
        return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))

    def words(tensor):
        return cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=Int32), tensor.layout)

    k_atoms, word = token_scales.shape[1], config.scale_words
    scale_stride = (1, word, k_atoms * word)
    row_atoms = weight_scales.shape[1]
    pair = config.pair
    return Sources(
        Source(
            *tma.make_load(view(tokens, (k_bytes, rows), (1, tokens.stride[0])), config.token_box, pair=pair)
        ),
        Source(
            *tma.make_load(
                view(
                    weights, (k_bytes, weights.shape[1], experts), (1, weights.stride[1], weights.stride[0])
                ),
                config.weight_box,
                pair=pair,
            )
        ),
        Source(
            *tma.make_load(
                view(words(token_scales), (word, k_atoms, token_scales.shape[0]), scale_stride),
                config.token_scale_box,
                swizzled=False,
                pair=pair,
            )
        ),
        Source(
            *tma.make_load(
                view(
                    words(weight_scales),
                    (word, k_atoms, row_atoms, experts),
                    (*scale_stride, row_atoms * k_atoms * word),
                ),
                config.weight_scale_box,
                swizzled=False,
                pair=pair,
            )
        ),
    )


class Stages(NamedTuple):
    """Each operand's stages in shared memory, (box..., STAGE)."""

    tokens: cute.Tensor
    weights: cute.Tensor
    token_scales: cute.Tensor
    weight_scales: cute.Tensor


def make_stages(config, tokens, weights, token_scales, weight_scales) -> Stages:
    """Make the stages in regions of shared memory that are given by their first byte."""

    def plain(base, box):
        stride = config.scale_bytes // WORD_BYTES
        layout = cute.append(cute.make_layout(box), cute.make_layout(config.stages, stride=stride))
        return cute.make_tensor(cute.recast_ptr(base, dtype=Int32), layout)

    return Stages(
        tma.shared_tiles(tokens, cutlass.Uint8, config.token_box, config.stages),
        tma.shared_tiles(weights, cutlass.Uint8, config.weight_box, config.stages),
        plain(token_scales, config.token_scale_box),
        plain(weight_scales, config.weight_scale_box),
    )


@cute.jit
def load(config: cutlass.Constexpr, channels: cutlass.Constexpr, records, sources, stages, k_tiles, rank):
    """For every tile record, fill a stage for each K tile by four loads.

    rank: this CTA's rank in its pair. It loads the rank-th 128 tokens of the tile, the rank-th half of its weights, and
    the weight scales of the whole tile. A box may begin and end at any row: results of another expert's rows are
    dropped, and what lies outside the tensor arrives as zeros. Consumes record_full and empty. Produces record_empty
    and full. All bytes of a pair complete on the first CTA's full barrier, which alone expects them.
    """
    full, empty = channels["full"], channels["empty"]
    use, fill = Int32(0), Int32(0)
    tile = records.read(use)
    while tile.rows > 0:
        row = tile.first_row + rank * config.token_rows
        feature = tile.first_feature + rank * config.weight_rows
        tokens = ring(sources.tokens, config.token_box, (0, row), stages.tokens)
        weights = ring(sources.weights, config.weight_box, (0, feature, tile.expert), stages.weights)
        token_scales = ring(
            sources.token_scales, config.token_scale_box, (0, 0, tile.atom + rank), stages.token_scales
        )
        weight_scales = ring(
            sources.weight_scales,
            config.weight_scale_box,
            (0, 0, tile.first_feature // ATOM_ROWS, tile.expert),
            stages.weight_scales,
        )
        for k_tile in cutlass.range(k_tiles, unroll=1):
            empty.wait_previous(fill)
            if rank == 0:
                full.expect_bytes(fill, config.stage_bytes * config.ctas)
            stage, barrier = full.stage(fill), full.barrier(fill)
            tokens.load(k_tile, stage, barrier)
            weights.load(k_tile, stage, barrier)
            token_scales.load(k_tile, stage, barrier)
            weight_scales.load(k_tile, stage, barrier)
            fill += 1
        use += 1
        tile = records.read(use)
    drain((empty,), fill)


def ring(source: Source, box, first, shared) -> tma.TileRing:
    """Boxes of ``source`` along K, from the coordinates ``first`` on."""
    tensor = cute.domain_offset(first, source.coordinates)
    extra = cute.rank(tensor) - len(box)
    tensor = tensor[(*(None,) * len(box), *(0,) * extra)]
    along_k = 0 if len(box) == 2 else 1
    place = tuple(None if mode == along_k else 0 for mode in range(len(box)))
    return tma.TileRing.make(source.atom, cute.local_tile(tensor, box, place), shared)
