"""The NVFP4 grouped GEMM kernel in the simulator, in every choice of tiles, against FP32 on the same operands."""

import dataclasses
import itertools
import math

import pytest
import torch
from helpers.gemm_cases import GemmCase, check, expected, inputs_of, poisoned_out, relative

from warpspec.common import compile
from warpspec.common.device import pipeline
from warpspec.common.disk_cache import CACHE_VARIABLE
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import SIMULATED
from warpspec.common.nvfp4 import unswizzle_scales
from warpspec.moe.operands import PreparedWeights, QuantizedRows, deinterleave
from warpspec.moe.sm100 import GemmConfig, choose_config, grouped_gemm, kernel
from warpspec.moe.sm100.config import PAIR, SINGLE, SWAPPED
from warpspec.sim import SimError

SHAPES = (SINGLE, PAIR, *SWAPPED.values())
EPILOGUES = {
    "linear": dict(epilogue="linear"),
    "down": dict(epilogue="linear", bias=True, fixed=True),
    "swiglu": dict(epilogue="swiglu"),
    "oai": dict(epilogue="swiglu_oai", limit=2.0, bias=True),
    "nvfp4": dict(epilogue="swiglu", limit=3.0, out="nvfp4"),
    "oai-nvfp4": dict(epilogue="swiglu_oai", limit=7.0, out="nvfp4", bias=True, fixed=True),
}
# K of 5 blocks has a K tile with 2 of 4 MMAs; 46 experts take two rounds of the scheduler.
RAGGED = dict(counts=(5, 0, 130, 0, 0, 1, 70), k=336, width=584, dropped=3)
MANY = dict(counts=(0, 33, 17, 140, *(0,) * 41, 3), k=80, width=104, dropped=1)


def launch(case: GemmCase, inputs, shape, seed=0, groups=3):
    """(report, result): the kernel run into a result full of NaN."""
    out = poisoned_out(case)
    options = dict(epilogue=case.epilogue, limit=case.limit, out_scale=inputs.out_scale)
    testing = dict(shape=shape, groups=groups, seed=seed)
    return grouped_gemm(inputs.a, inputs.w, inputs.offsets, out, **options, **testing), out


def run(case: GemmCase, shape, seed=0, groups=3):
    """Run a case and judge it; inputs must come back as they were. seed: of the data and of the order of events."""
    inputs = inputs_of(case, seed)
    tensors = [*vars(inputs.a).values(), *vars(inputs.w).values(), inputs.offsets, inputs.out_scale]
    before = [(t, t.clone()) for t in tensors if isinstance(t, torch.Tensor)]
    report, out = launch(case, inputs, shape, seed, groups)
    check(case, inputs, out)
    for tensor, copy in before:
        assert torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8)), "an input was modified"
    return report, inputs, out


# Each kernel takes seconds to compile and translate: by default every output and activation once or twice;
# few tokens in the tests of the layer.
DEFAULT = [
    (SINGLE, "oai-nvfp4"),
    (SINGLE, "swiglu"),
    (PAIR, "down"),
    (SWAPPED[16], "nvfp4"),
    (SWAPPED[64], "linear"),
]


@pytest.mark.usefixtures("check_order")
@pytest.mark.parametrize("shape, epilogue", DEFAULT, ids=str)
def test_ragged_experts(shape, epilogue):
    for seed, sizes in enumerate((RAGGED, MANY)):
        run(GemmCase("", **sizes, **EPILOGUES[epilogue]), shape, seed)


@pytest.mark.long
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_and_epilogue(shape, epilogue):
    for seed, sizes in itertools.product(range(3), (RAGGED, MANY)):
        run(GemmCase("", **sizes, **EPILOGUES[epilogue]), shape, seed)


@pytest.mark.parametrize(
    "shape, epilogue", [(SINGLE, "linear"), (PAIR, "down"), (SWAPPED[64], "linear")], ids=str
)
@pytest.mark.parametrize(
    "counts, dropped",
    [((0, 0, 0), 2), ((1,), 0), ((0, 300, 0), 0), ((0, 0, 128), 1), ((128, 128, 64, 64), 0)],
    ids=str,
)
def test_distributions_of_the_rows(shape, epilogue, counts, dropped):
    run(GemmCase("", counts, k=64, width=104, dropped=dropped, **EPILOGUES[epilogue]), shape)


def test_experts_without_tokens_cost_nothing():
    sizes = dict(k=256, width=256)
    (few,), (many,) = (
        run(GemmCase("", counts, **sizes), SINGLE, groups=1)[0].launches
        for counts in ((64, 0, 32), (64, *(0,) * 28, 32))
    )
    assert many.tma_bytes_loaded == few.tma_bytes_loaded and many.mma_flops == few.mma_flops
    assert few.mma_flops == 2 * 2 * 128 * 256 * 256


def test_only_mma_steps_that_k_has_are_issued():
    (launch,) = run(GemmCase("", (10,), k=336, width=256), SINGLE, groups=1)[0].launches
    assert launch.mma_flops == 2 * 128 * 256 * 64 * -(-336 // 64)


@pytest.mark.parametrize("shape", [SINGLE, SWAPPED[64]], ids=str)
def test_nan_stays_in_its_row(shape):
    """A NaN scale, as a row with NaN or Inf has, gives NaN to that row and to no other."""
    case = GemmCase("", (5, 40), k=64, width=104)
    inputs = inputs_of(case)
    poisoned = 7
    inputs.a.row_scale[poisoned] = torch.nan
    _, out = launch(case, inputs, shape)
    assert out[poisoned].isnan().all()
    others = [row for row in range(case.rows) if row != poisoned]
    assert relative(out[others], expected(case, inputs)[others]) < 3e-3


@pytest.mark.parametrize("magnitude", [1e-20, 1e20])
def test_magnitudes(magnitude):
    run(GemmCase("", (5, 40), k=64, width=104, magnitude=magnitude), SINGLE)


def test_large_values_saturate():
    """Outputs beyond 6 * 448 times the fixed scale become the largest value, none of them NaN."""
    run(
        GemmCase("", (5, 40), k=80, width=104, magnitude=3000.0, **EPILOGUES["oai-nvfp4"] | dict(limit=None)),
        SINGLE,
    )


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_random_problems(seed):
    g = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=g))

    counts = tuple(draw(0, 200) * (draw(0, 2) > 0) for _ in range(draw(1, 40)))
    sizes = dict(k=16 * draw(1, 40), width=8 * draw(1, 60), dropped=draw(0, 5))
    for epilogue, shape in zip(EPILOGUES.values(), SHAPES, strict=False):
        width = sizes["width"] + (sizes["width"] % 16 if epilogue["epilogue"] == "linear" else 0)
        run(GemmCase("", counts, **sizes | dict(width=width), **epilogue), shape, seed, groups=draw(1, 8))


@pytest.mark.parametrize(
    "offsets", [(50, 0, 50, 0, 50), (-7, 60, 2**31 - 1, -(2**31), 3), (2**30,) * 5, (-1,) * 5], ids=str
)
@pytest.mark.parametrize("shape", [PAIR, SWAPPED[16]], ids=str)
def test_wrong_offsets_reach_no_other_memory(shape, offsets, monkeypatch):
    """Wrong offsets give any result, but the simulator would stop at an access out of bounds."""
    case = GemmCase("", (9, 0, 30, 0, 2), k=16, width=104, **EPILOGUES["nvfp4"])
    inputs = inputs_of(case)
    launch(case, dataclasses.replace(inputs, offsets=torch.tensor(offsets, dtype=torch.int32)), shape)


def exact_activation(case, inputs):
    """What the kernel computes, step by step in fp32, of accumulators that are exact: K is one block.

    ex2 and rcp are correctly rounded in the simulator.
    """
    a, w = inputs.a, inputs.w
    unit = torch.ones(case.rows)
    tokens = dataclasses.replace(a, row_scale=unit).dequantize(inputs.offsets)
    weights = dataclasses.replace(w, global_scale=torch.ones_like(w.global_scale)).dequantize()
    parts, start = [], 0
    for expert, end in enumerate(inputs.offsets.tolist()):
        gate, up = (part[0].T for part in deinterleave((weights[expert] @ tokens[start:end].T)[None]))
        scales = w.global_scale[expert] * a.row_scale[start:end, None]
        gate, up = gate * scales[:, :1], up * scales[:, 1:]
        if case.limit is not None:
            gate, up = gate.clamp(max=case.limit), up.clamp(-case.limit, case.limit)
        power = torch.exp2((gate * -math.log2(math.e)).double()).float()
        sigmoid = (1 / (1 + power).double()).float()
        parts.append(gate * sigmoid * up)
        start = end
    return torch.cat(parts)


@pytest.mark.usefixtures("check_order")
@pytest.mark.parametrize("shape", [PAIR, SWAPPED[16]], ids=str)
def test_nvfp4_results_have_the_bits_of_the_reference_quantiser(shape):
    case = GemmCase("", (70, 0, 21), k=16, width=104, **EPILOGUES["nvfp4"])
    inputs = inputs_of(case)
    _, out = launch(case, inputs, shape)
    wanted = QuantizedRows.from_rows(
        exact_activation(case, inputs), inputs.offsets, out_scale=inputs.out_scale
    )
    assert torch.equal(out.data[:, : out.k // 2], wanted.data[:, : out.k // 2])
    for got, want, count in ((out.scales[0], wanted.scales[0], 70), (out.scales[1], wanted.scales[1], 21)):
        scales = [unswizzle_scales(x[None], count, 7).view(torch.uint8) for x in (got, want)]
        assert torch.equal(*scales)


@pytest.mark.long
@pytest.mark.parametrize("epilogue", ["oai", "oai-nvfp4"])
def test_every_choice_of_tiles_gives_the_same_bits(epilogue):
    """With sums that are exact, a token's result does not depend on how many other tokens there are."""
    case = GemmCase("", (70, 0, 21), k=16, width=104, **EPILOGUES[epilogue])
    inputs = inputs_of(case)
    first, *others = (launch(case, inputs, shape)[1] for shape in SHAPES)
    for other in others:
        if case.out == "bf16":
            assert torch.equal(first, other)
        else:
            assert torch.equal(first.data, other.data) and torch.equal(first.scales, other.scales)


@pytest.mark.long
@pytest.mark.parametrize("name", ["full", "accumulator_empty"])
def test_a_forgotten_wait_shows(monkeypatch, name):
    """The kernel without one of its waits: under some order of events the result is wrong, or the run stops."""

    class Silent(pipeline.Channel):
        def wait(self, use):
            """Forgotten."""

        wait_previous = wait

    def without(table, base):
        channels = pipeline.init_barriers(table, base)
        return channels | {name: Silent(channels[name].base, channels[name].stages)}

    monkeypatch.setattr(compile, "_compiled", {})
    monkeypatch.setenv(CACHE_VARIABLE, "")  # nobody else wants this kernel
    monkeypatch.setattr(kernel, "init_barriers", without)
    shown = 0
    for seed in range(8):
        try:
            run(GemmCase("", (60, 0, 130, 200), k=1600, width=800), SINGLE, seed, groups=1)
        except (AssertionError, SimError):
            shown += 1
    assert shown


def bad(**change):
    """Arguments of a good call, with a change."""
    case = GemmCase("", (3, 4), k=64, width=32, **change.pop("case", {}))
    inputs = inputs_of(case)
    arguments = dict(
        a=inputs.a, w=inputs.w, offsets=inputs.offsets, out=poisoned_out(case), epilogue=case.epilogue
    )
    arguments |= dict(limit=case.limit, out_scale=inputs.out_scale)
    for name, value in change.items():
        arguments[name] = value(arguments) if callable(value) else value
    return arguments


def field(operand, name, value):
    """A change of one tensor of an operand."""
    return lambda arguments: dataclasses.replace(
        arguments[operand], **{name: value(getattr(arguments[operand], name))}
    )


GATED = dict(case=dict(epilogue="swiglu"))
NVFP4 = dict(case=dict(epilogue="swiglu", out="nvfp4"))


@pytest.mark.parametrize(
    "error, message, change",
    [
        (UnsupportedProblem, "grouped_gemm: sm_90a does not have", dict(target=SIMULATED["sm_90a"])),
        (ValueError, "epilogue: must be one of", dict(epilogue="relu")),
        (ValueError, "w: swiglu needs gate and up", dict(epilogue="swiglu")),
        (ValueError, "w: linear takes", dict(GATED, epilogue="linear")),
        (ValueError, "limit: a clamp belongs", dict(limit=1.0)),
        (ValueError, "limit: must not be negative", dict(GATED, limit=-1.0)),
        (ValueError, "a: k must be that of w", dict(a=field("a", "k", lambda k: 48))),
        (ValueError, r"offsets: shape must be \[2\]", dict(offsets=torch.zeros(3, dtype=torch.int32))),
        (
            TypeError,
            "offsets: dtype must be one of torch.int32",
            dict(offsets=torch.zeros(2, dtype=torch.int64)),
        ),
        (ValueError, "a.scales: .* atoms of rows needed", dict(a=field("a", "scales", lambda s: s[:1]))),
        (ValueError, "a.row_scale: shape", dict(a=field("a", "row_scale", lambda s: s[1:]))),
        (ValueError, "a.data: must be contiguous", dict(a=field("a", "data", lambda d: d.T.contiguous().T))),
        (
            ValueError,
            "a.data: rows of 32 bytes needed",
            dict(a=field("a", "data", lambda d: d[:, :16].contiguous())),
        ),
        (
            ValueError,
            "w.data: rows must be multiples of 16 bytes",
            dict(w=field("w", "data", lambda d: d[..., :24].clone())),
        ),
        (
            TypeError,
            "w.global_scale: dtype must be one of torch.float32",
            dict(w=field("w", "global_scale", lambda s: s.double())),
        ),
        (ValueError, "out: shape must be", dict(out=torch.empty(6, 32, dtype=torch.bfloat16))),
        (TypeError, "out: dtype must be one of torch.bfloat16", dict(out=torch.empty(7, 32))),
        (ValueError, "out: linear writes bf16", dict(out=lambda arguments: arguments["a"])),
        (
            ValueError,
            "out: row_scale must be None",
            dict(NVFP4, out=field("out", "row_scale", lambda _: torch.ones(7))),
        ),
        (ValueError, "out: k must be 32", dict(NVFP4, out=field("out", "k", lambda k: 48))),
        (ValueError, "out_scale: quantised results", dict(NVFP4, out_scale=None)),
        (ValueError, "out_scale: belongs to", dict(GATED, out_scale=torch.ones(2))),
    ],
)
def test_bad_input_is_named(error, message, change):
    arguments = bad(**change)
    a, w, offsets, out = (arguments.pop(name) for name in ("a", "w", "offsets", "out"))
    with pytest.raises(error, match=message):
        grouped_gemm(a, w, offsets, out, **arguments)


def test_the_check_notices_a_wrong_row():
    """The judge itself: one scale code, one row or one row too many make it fail."""
    case = GemmCase("", **MANY, **EPILOGUES["oai-nvfp4"])
    _, inputs, out = run(case, SINGLE)
    for tensor, place in ((out.data, 40), (out.data, case.rows - 1), (out.scales, 0)):
        kept = tensor[place].clone()
        tensor[place] ^= 0x11
        with pytest.raises(AssertionError):
            check(case, inputs, out)
        tensor[place] = kept
    check(case, inputs, out)


def test_operands_are_what_the_kernel_is_configured_for():
    case = GemmCase("", (3,), k=64, width=32, epilogue="swiglu", limit=1.0, bias=True)
    inputs = inputs_of(case)
    assert isinstance(inputs.a, QuantizedRows) and isinstance(inputs.w, PreparedWeights)
    config = GemmConfig(SINGLE, "swiglu", has_limit=True, has_bias=True)
    assert choose_config(inputs.a, inputs.w, 148, epilogue="swiglu", limit=1.0, shape=SINGLE) == config
