"""The grouped GEMM as compiled, with every two of its options: spills, registers, budgets; and how plans choose."""

import itertools
import re

import pytest
import torch
from helpers.gemm_cases import GemmCase, inputs_of, poisoned_out
from helpers.pairwise import pairwise

from warpspec.common.compile import resources
from warpspec.common.hardware import GPUS, MAX_REGISTERS_PER_THREAD, MAX_SMEM_PER_CTA, TMEM_COLUMNS
from warpspec.moe.sm100 import GemmConfig, gemm_kernel, grouped_gemm
from warpspec.moe.sm100.config import PAIR, SINGLE, SWAPPED, Shape
from warpspec.moe.sm100.plan import (
    SHAPES,
    choose_shape,
    estimate,
    expected_tiles,
    group_count,
    tile_bound,
)

SM_COUNT = GPUS["sm_100a"].sm_count
ARCH = "sm_100a"
KINDS = [
    dict(),
    *(
        dict(epilogue=epilogue, output=output, has_limit=limit)
        for epilogue, output, limit in itertools.product(
            ("swiglu", "swiglu_oai"), ("bf16", "nvfp4"), (False, True)
        )
    ),
]
OPERANDS = [
    dict(has_row_scale=row_scale, has_bias=bias)
    for row_scale, bias in itertools.product((True, False), repeat=2)
]
CONFIGS = [
    GemmConfig(shape, **kind, **operands)
    for shape, kind, operands in pairwise(list(SHAPES), KINDS, OPERANDS)  # a quarter of the product
]


def label(config):
    flags = [name for name in ("has_row_scale", "has_limit", "has_bias") if getattr(config, name)]
    return ",".join((str(config.shape), config.epilogue, config.output, *flags))


def check_resources(config):
    (kernel,) = resources(gemm_kernel.compiled(config, ARCH)).values()
    assert kernel.local_bytes == 0, "registers spill, or an array landed in local memory"
    assert kernel.required_threads == (config.threads, 1, 1)
    assert kernel.registers <= MAX_REGISTERS_PER_THREAD
    assert kernel.static_smem == 0
    assert (
        config.smem_bytes <= MAX_SMEM_PER_CTA
        and config.tmem_columns <= config.tmem_allocation <= TMEM_COLUMNS
    )


@pytest.mark.parametrize("config", CONFIGS[5::23], ids=label)
def test_compiles_without_spills(config):
    check_resources(config)


@pytest.mark.long
@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_every_two_options_compile_without_spills(config):
    check_resources(config)


def test_the_native_launch_is_the_same_kernel():
    """Calls on CUDA tensors go through another host function around the same machine code."""
    config = GemmConfig(PAIR, "swiglu", "nvfp4", has_limit=True)
    native, simulated = gemm_kernel.compiled(config, ARCH, native=True), gemm_kernel.compiled(config, ARCH)
    (kernel,), (same,) = resources(native).values(), resources(simulated).values()
    assert kernel == same
    assert callable(native)


# With the epilogues that test_grouped_gemm_sim runs.
@pytest.mark.parametrize("config", [
    GemmConfig(SINGLE, "swiglu"), *(GemmConfig(s, "swiglu", "nvfp4", has_limit=True) for s in (PAIR, SWAPPED[16]))
], ids=label)  # fmt: skip
def test_instructions_are_those_of_the_design(config):
    ptx = gemm_kernel.compiled(config, ARCH).artifacts.PTX
    group = f"cta_group::{config.ctas}"
    mma = re.findall(r"tcgen05\.mma\.\S+", ptx)
    assert len(mma) == 4
    assert all(op.startswith(f"tcgen05.mma.{group}.kind::mxf4nvf4.block_scale.block16") for op in mma)
    copies = re.findall(r"tcgen05\.cp\.\S+", ptx)
    assert copies == [f"tcgen05.cp.{group}.32x128b.warpx4"] * (4 * (1 + config.weight_atoms))
    assert "tcgen05.st" not in ptx, "a way back to tensor memory"
    assert "st.local" not in ptx and "ld.local" not in ptx
    assert ("barrier.cluster" in ptx) == config.pair


def test_budgets_are_asserted():
    for shape in SHAPES:
        config = GemmConfig(shape)
        assert MAX_SMEM_PER_CTA - config.smem_bytes < config.stage_bytes, "a further stage fits"
    with pytest.raises(AssertionError):
        GemmConfig(Shape(swapped=False, tile_n=100))
    with pytest.raises(AssertionError):
        GemmConfig(SINGLE, "linear", "nvfp4")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accumulators_share_no_column_with_scales_and_only_what_is_read_first(shape):
    config = GemmConfig(shape)
    first = set(range(config.tile_n))
    second = {config.accumulator_columns + column for column in first}
    scales = set(range(config.tmem_token_scales, config.tmem_columns))
    assert not scales & (first | second)
    if not shape.swapped:
        early = config.release_steps * 32
        assert first & second <= set(range(config.tile_n - early, config.tile_n))
        assert first & second <= {config.accumulator_columns + column for column in range(early)}
    else:
        assert not first & second


def test_expected_tiles():
    assert expected_tiles(300, 1, 128) == (3.0, 1.0)
    tiles, active = expected_tiles(1, 32, 128)
    assert tiles == pytest.approx(1.0) and active == pytest.approx(1.0)
    generator = torch.Generator().manual_seed(0)
    for rows, experts, tokens in ((40, 16, 8), (5000, 16, 128), (1000, 100, 8)):
        counts = [
            torch.bincount(torch.randint(experts, (rows,), generator=generator), minlength=experts)
            for _ in range(400)
        ]
        drawn = sum(float(((count + tokens - 1) // tokens).sum()) for count in counts) / len(counts)
        assert expected_tiles(rows, experts, tokens)[0] == pytest.approx(drawn, rel=0.01)


def test_choice_follows_the_rows_of_an_expert():
    def chosen(tokens, experts, k, hidden, width):
        return choose_shape(tokens * k, experts, 2 * width, hidden, SM_COUNT)

    oss = dict(experts=32, k=4, hidden=2880, width=2880)
    assert chosen(1, **oss) == SWAPPED[8]
    assert chosen(64, **oss).swapped and chosen(64, **oss).tile_n >= 16
    assert chosen(4096, **oss) == PAIR
    assert chosen(16384, experts=384, k=6, hidden=7168, width=3072) == PAIR
    assert not chosen(4096, experts=256, k=6, hidden=4096, width=2048).swapped
    for rows, experts in ((1, 1), (7, 384), (100000, 8)):
        shape = choose_shape(rows, experts, 2880, 2880, SM_COUNT)
        assert (
            1
            <= group_count(shape, rows, experts, 2880, SM_COUNT)
            <= min(SM_COUNT, tile_bound(shape, rows, experts, 2880))
        )


@pytest.mark.parametrize("shape", [SINGLE, PAIR, SWAPPED[64]], ids=str)
def test_estimate_is_what_the_simulator_counts(shape):
    """One expert, so that expected tiles are the tiles: bytes that TMA brings and multiplications. On kernels of
    test_grouped_gemm_sim: the bias of pairs is no matter of TMA."""
    case = GemmCase("", (300,), k=320, width=512, bias=shape == PAIR, fixed=shape == PAIR)
    inputs = inputs_of(case)
    report = grouped_gemm(inputs.a, inputs.w, inputs.offsets, poisoned_out(case), shape=shape, groups=2)
    (launch,) = report.launches
    found = estimate(shape, case.rows, 1, case.width, case.k, SM_COUNT)
    assert launch.tma_bytes_loaded == found.loaded_bytes
    assert launch.mma_flops == found.tiles * found.mma * shape.ctas * 32768
