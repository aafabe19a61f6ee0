"""The sm100 attention kernel as compiled: spills, registers, budgets, and the arithmetic of its tiles."""

import dataclasses
import itertools
import re

import pytest
from helpers.attention_cases import CASES, arguments
from helpers.attention_configs import configured
from helpers.simulate import plan_for
from helpers.suites import long

from warpspec.common.compile import resources
from warpspec.common.device import tma
from warpspec.common.hardware import MAX_REGISTERS_PER_THREAD
from warpspec.fmha.mask import key_range
from warpspec.fmha.schedule import TileGrid, key_span
from warpspec.fmha.sm100 import ATTENTION, AttentionConfig
from warpspec.fmha.sm100.shapes import SHAPES, SHARED_SHAPES
from warpspec.fmha.tiles import choose_pack

TILE_M = 128
BAND = [
    dict(causal=causal, has_left=left, has_right=right)
    for causal, left, right in itertools.product((False, True), repeat=3)
]
OPERANDS = [
    dict(),
    dict(has_sink=True, has_lse=True),
    dict(has_kv_lengths=True, has_q_start=True, has_sink=True),
    dict(has_kv_lengths=True, normalize=False),
    dict(has_q_start=True, has_lse=True, negate=True),
]
PACKS = (1, 7, 8, 128)
# Every mask with every set of operands; dtype and packing take turns.
VARIANTS = [
    configured(
        AttentionConfig, ("bfloat16", "float16")[i % 2], pack=PACKS[i % len(PACKS)], **band, **operands
    )
    for i, (band, operands) in enumerate(itertools.product(BAND, OPERANDS))
]


SHAPE_VARIANTS = [
    configured(
        AttentionConfig,
        head_dim=head_dim,
        shape=shape,
        shared_kv=shared,
        pack=8,
        causal=True,
        has_kv_lengths=True,
        **outputs,
    )
    for shared, table in ((False, SHAPES), (True, SHARED_SHAPES))
    for head_dim, shapes in table.items()
    for shape in shapes
    for outputs in (dict(has_sink=True, has_lse=True), dict(normalize=False, splits=True))
]


def is_simulated(config) -> bool:
    """Whether a case of test_kernel_sim or test_head_dims_sim has this shape: they look for spills too."""
    simulated = {(64, False), (128, False), (256, True), (512, False), (512, True)}
    first = (SHARED_SHAPES if config.format.shared_kv else SHAPES)[config.heads.qk][0]
    return (config.heads.qk, config.format.shared_kv) in simulated and config.shape == first


def label(config):
    changed = [
        f"{field.name}={getattr(config, field.name)}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    ]
    return ",".join(changed)


def check_resources(config):
    (kernel,) = resources(ATTENTION.compiled(config, "sm_100a")).values()
    assert kernel.local_bytes == 0, "registers spill, or an array landed in local memory"
    assert kernel.required_threads == (config.threads, 1, 1)
    if config.ctas_per_sm == 1:  # roles keep what they were launched with; an SM has enough for one CTA
        assert kernel.registers <= MAX_REGISTERS_PER_THREAD
    else:
        assert kernel.registers == config.launch_registers
    assert kernel.static_smem == 0


@pytest.mark.long
@pytest.mark.parametrize("config", VARIANTS, ids=label)
def test_every_variant_compiles_without_spills(config):
    check_resources(config)


# What runs in test_kernel_sim and test_head_dims_sim is looked at there: here another one by default.
@pytest.mark.parametrize("config", [
    long(config) if is_simulated(config) or number % 8 else config
    for number, config in enumerate(SHAPE_VARIANTS[::2])
], ids=label)  # fmt: skip
def test_every_shape_compiles_without_spills(config):
    check_resources(config)


@pytest.mark.long
@pytest.mark.parametrize("config", SHAPE_VARIANTS[1::2], ids=label)
def test_every_shape_of_partial_results_compiles_without_spills(config):
    check_resources(config)


def test_instructions_are_those_of_the_design():
    case = next(case for case in CASES if case.id == "causal-square")  # test_kernel_sim has its kernel
    config = plan_for("sm_100a", **arguments(case), return_lse=True).config
    ptx = ATTENTION.compiled(config, "sm_100a").artifacts.PTX
    assert f"setmaxnreg.inc.sync.aligned.u32 \t{config.softmax_registers}" in ptx
    assert f"setmaxnreg.dec.sync.aligned.u32 \t{config.other_registers}" in ptx
    for instruction in ("alloc", "relinquish_alloc_permit", "dealloc"):
        assert len(re.findall(rf"tcgen05\.{instruction}\b", ptx)) == 1
    a_operands = re.findall(r"tcgen05\.mma\.\S+ \[%\w+\], (\S+),", ptx)
    qk = [a for a in a_operands if not a.startswith("[")]
    pv = [a for a in a_operands if a.startswith("[")]
    # QK stands twice, for the first tile and in the loop.
    assert len(qk) == 2 * config.qk_tiler[2] // 16
    assert len(pv) == config.pv_tiler[2] // 16, "P is not read from tensor memory"
    assert "cp.async.bulk.tensor.4d" in ptx
    assert "st.local" not in ptx and "ld.local" not in ptx


def test_budgets_are_asserted():
    config = AttentionConfig()
    for change in (dict(kv_stages=4), dict(ctas_per_sm=3), dict(tile_n=256)):
        with pytest.raises(AssertionError):
            dataclasses.replace(config, shape=dataclasses.replace(config.shape, **change))
    with pytest.raises(AssertionError):
        dataclasses.replace(config, softmax_registers=224)
    alone = dataclasses.replace(config.shape, kv_stages=4, ctas_per_sm=1)
    assert dataclasses.replace(config, shape=alone).tmem_allocation == config.tmem_allocation


@pytest.mark.parametrize("seq_q", [1, 2, 17, 127, 128, 129, 1000])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 12, 64, 65, 128, 200])
def test_pack_covers_every_row_with_the_fewest_tiles(group, seq_q):
    pack = choose_pack(group, seq_q, TILE_M)
    rows = {
        (head_tile * pack + row % pack, query_tile * (TILE_M // pack) + row // pack)
        for head_tile in range(-(-group // pack))
        for query_tile in range(-(-seq_q // (TILE_M // pack)))
        for row in range(pack * (TILE_M // pack))
    }
    assert rows >= set(itertools.product(range(group), range(seq_q)))
    tiles = [-(-group // p) * -(-seq_q // (TILE_M // p)) for p in range(1, min(group, TILE_M) + 1)]
    assert tiles[pack - 1] == min(tiles)


@pytest.mark.parametrize("longest_first", [False, True])
def test_grid_holds_every_tile_once(longest_first):
    grid = TileGrid(query_tiles=5, head_tiles=2, heads_kv=3, batch=4)
    tiles = [grid.decode(index, longest_first=longest_first) for index in range(grid.size)]
    assert sorted(tiles) == sorted(itertools.product(range(5), range(2), range(3), range(4)))
    if longest_first:
        assert [tile[0] for tile in tiles] == sorted((tile[0] for tile in tiles), reverse=True)


@pytest.mark.parametrize("left", [None, 0, 3, 9])
@pytest.mark.parametrize("right", [None, 0, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_key_span_visits_tiles_some_row_sees_and_masks_only_where_needed(causal, left, right):
    keys, rows = 4, 3
    bounds = dict(causal=causal, left=left, right=right)
    for length, lowest in itertools.product((0, 1, 4, 5, 11), range(-6, 20)):
        seen = []
        for position in range(lowest, lowest + rows):
            first, end = key_range(position, length, **bounds)
            seen.append(set(range(first, end)))
        span = key_span(lowest, lowest + rows - 1, length, keys, bounds)
        visited = [span.tile(step) for step in range(span.count)]
        assert visited == sorted({key // keys for key in set.union(*seen)}, reverse=True)
        for step, tile in enumerate(visited):
            tile_keys = set(range(tile * keys, (tile + 1) * keys))
            assert span.needs_mask(step, keys) == any(not tile_keys <= row for row in seen)
            assert span.has_unseen(tile, keys) == (not tile_keys <= set.union(*seen))


@pytest.mark.parametrize(("head_dim", "shared"), [(64, False), (128, False), (256, True)])
def test_the_tile_that_tma_writes_is_the_tile_that_mma_reads(head_dim, shared):
    """Row r of block b starts (b * rows + r) * 128 bytes into a tile for TMA, for K, and for V read with D as N."""
    import cutlass
    import cutlass.cute as cute
    import cutlass.utils.blackwell_helpers as blackwell

    from warpspec.fmha.sm100 import mma

    shape = (SHARED_SHAPES if shared else SHAPES)[head_dim][0]
    config = configured(AttentionConfig, "float16", head_dim=head_dim, shape=shape, shared_kv=shared)
    layouts = {}

    @cute.jit
    def trace():
        dtype, stages = cutlass.Float16, config.kv_stages
        qk, pv = mma.make_qk(config, dtype), mma.make_pv(config)
        found = {
            "tma": tma.swizzled_layout(config.kv.box(), stages),
            "k": blackwell.make_smem_layout_b(qk, config.qk_tiler, dtype, stages),
            "v": blackwell.make_smem_layout_b(pv, config.pv_tiler, dtype, stages),
        }
        for name, layout in found.items():
            layouts[name] = (str(layout.inner), layout.outer.shape, layout.outer.stride)

    cute.compile(trace, options="--gpu-arch sm_100a")
    rows, depth, k, blocks = config.tile_n, 64, 16, config.heads.qk_blocks
    block, stage = rows * depth, rows * depth * blocks
    swizzle = layouts["tma"][0]
    steps, stride = (depth // k, k) if blocks == 1 else ((depth // k, blocks), (k, block))
    columns, across = (depth, 1) if blocks == 1 else ((depth, blocks), (1, block))
    stages = config.kv_stages
    assert layouts["tma"] == (
        swizzle,
        (depth, rows, blocks, stages),
        (1, depth, 0 if blocks == 1 else block, stage),
    )
    assert layouts["k"] == (swizzle, ((rows, k), 1, steps, stages), ((depth, 1), 0, stride, stage))
    assert layouts["v"] == (
        swizzle,
        ((columns, k), 1, rows // k, stages),
        ((across, depth), 0, k * depth, stage),
    )
