"""2**x on the multiply-add units: the coefficients, and the compiled code in the simulator against NumPy."""

from fractions import Fraction

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cuda.bindings.driver import CUstream
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from helpers.suites import long

from warpspec import sim
from warpspec.common.compile import compile_cached, resources
from warpspec.fmha.device.softmax import EXP2_COEFFICIENTS, exp2_polynomial, exponentiate

THREADS = 32
SCORES = 128  # a row of a tile
DEGREES = (3, 4)
ERROR = {3: 7.6e-5, 4: 2.8e-6}  # of the least-error polynomial and of fp32 arithmetic
BF16_ROUNDING, FP16_ROUNDING = 2.0**-9, 2.0**-12


def least_error_polynomial(degree):
    """(coefficients, lowest first, largest relative error) of the best fit to 2**f on [-0.5, 0.5] (Remez)."""
    count = degree + 2
    points = 0.5 * np.sin(np.pi * (np.arange(count) / (count - 1) - 0.5))
    grid = np.linspace(-0.5, 0.5, 200_001)
    for _ in range(20):
        system = np.column_stack(
            [*(points**power / 2**points for power in range(degree + 1)), (-1.0) ** np.arange(count)]
        )
        coefficients = np.linalg.solve(system, np.ones(count))[:-1]
        error = np.polyval(coefficients[::-1], grid) / 2**grid - 1
        runs = np.split(np.arange(len(grid)), np.flatnonzero(np.diff(np.sign(error))) + 1)
        points = grid[[run[np.abs(error[run]).argmax()] for run in runs]]
    return coefficients, np.abs(error).max()


@pytest.mark.parametrize("degree", DEGREES)
def test_coefficients_are_those_of_least_error(degree):
    best, least = least_error_polynomial(degree)
    np.testing.assert_allclose(EXP2_COEFFICIENTS[degree], best, rtol=2e-7)
    grid = np.linspace(-0.5, 0.5, 200_001)
    error = np.abs(np.polyval(EXP2_COEFFICIENTS[degree][::-1], grid) / 2**grid - 1).max()
    assert least <= error < min(1.03 * least, ERROR[degree])


def test_errors_are_well_below_the_rounding_of_p():
    assert ERROR[3] < BF16_ROUNDING / 20
    assert ERROR[4] < FP16_ROUNDING / 50


class Elementwise:
    """x [blocks, THREADS, 2] -> y: ``exp2_polynomial`` of every pair."""

    def __init__(self, degree):
        self.degree = degree

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: CUstream):
        self.kernel(x, y).launch(grid=(x.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        pair = (x[block, thread, 0], x[block, thread, 1])
        y[block, thread, 0], y[block, thread, 1] = exp2_polynomial(pair, self.degree)


class Rows:
    """scores [THREADS, SCORES], reference [THREADS], sums [THREADS]: ``exponentiate`` of every row."""

    def __init__(self, every, degree):
        self.every, self.degree = every, degree

    @cute.jit
    def __call__(self, scores, reference, sums, scale_log2: cutlass.Float32, stream: CUstream):
        self.kernel(scores, reference, sums, scale_log2).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, scores, reference, sums, scale_log2):
        thread, _, _ = cute.arch.thread_idx()
        row = cute.make_rmem_tensor(SCORES, cutlass.Float32)
        cute.autovec_copy(scores[thread, None], row)
        sums[thread] = exponentiate(row, reference[thread], scale_log2, self.every, self.degree)
        cute.autovec_copy(row, scores[thread, None])


def fake(*shape):
    return make_fake_tensor(
        cutlass.Float32,
        shape,
        stride=tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape))),
        assumed_align=16,
        memspace=cute.AddressSpace.gmem,
    )


def elementwise(values, degree):
    """``exp2_polynomial`` of a 1-D fp32 array, as compiled for sm_100a."""
    blocks = 16
    per_run = blocks * THREADS * 2
    tensor = fake(blocks, THREADS, 2)
    kernel = compile_cached(
        ("exp2", degree), lambda: (Elementwise(degree), tensor, tensor, make_fake_stream()), arch="sm_100a"
    )
    results = []
    for first in range(0, len(values), per_run):
        x = torch.zeros(per_run)
        part = torch.from_numpy(values[first : first + per_run])
        x[: len(part)] = part
        y = torch.full((per_run,), torch.nan)
        shape = (blocks, THREADS, 2)
        sim.run(kernel, x.view(shape), y.view(shape), None)
        results.append(y[: len(part)].numpy())
    return np.concatenate(results)


@pytest.mark.parametrize("degree", DEGREES)
def test_relative_error(degree):
    """Where the result is a normal number: every power of two, both sides of every rounding, many between."""
    whole = np.arange(-126, 128, dtype=np.float32)
    halves = (whole[:-1] + np.float32(0.5)).astype(np.float32)
    random = np.random.default_rng(0).uniform(-126, 8.5, 3000).astype(np.float32)
    small = np.random.default_rng(1).uniform(-1, 1, 1000).astype(np.float32)
    tiny = np.array([0.0, -0.0, 1e-30, -1e-30, 2.0**-24, -(2.0**-24), 1e-42], np.float32)
    edges = [np.nextafter(halves, np.float32(way)) for way in (-np.inf, np.inf)]
    x = np.concatenate([whole, halves, *edges, random, small, tiny])
    x = x[(x >= -126) & (x <= 127)]
    got, exact = elementwise(x, degree).astype(np.float64), np.exp2(x.astype(np.float64))
    assert (np.abs(got - exact) / exact).max() < ERROR[degree]


@pytest.mark.parametrize("degree", DEGREES)
def test_hidden_scores_nan_and_underflow(degree):
    x = np.array([-np.inf, np.nan, -126.6, -127.0, -127.5, -128.0, -200.0, -1e6, -3e38, -126.4], np.float32)
    got = elementwise(x, degree)
    assert np.isnan(got[1]) and (np.delete(got[:-1], 1) == 0).all()
    assert not np.signbit(np.delete(got, 1)).any()
    assert 0 <= got[-1] < 2.0**-126, "at most the smallest normal number is lost"


def test_monotonic_enough_for_weights():
    """A larger score never weighs less by more than the error."""
    x = np.linspace(-3, 3, 4096, dtype=np.float32)
    for degree in DEGREES:
        y = elementwise(x, degree)
        assert (y[1:] >= y[:-1] * (1 - 2 * ERROR[degree])).all()


@pytest.mark.parametrize(
    "every, degree", [(0, 4), long(1, 3), (1, 4), long(2, 3), long(3, 4), (4, 3), (Fraction(8, 3), 3)]
)
def test_exponentiate(every, degree):
    """Rows of every kind; the share of exponentials on the multiply-add units is what was asked for."""
    scale_log2 = 0.18
    random = torch.Generator().manual_seed(degree)
    scores = 20 * torch.randn(THREADS, SCORES, generator=random)
    scores[torch.rand(THREADS, SCORES, generator=random) < 0.2] = -torch.inf
    scores[1] = -torch.inf
    scores[2, 1:] = -torch.inf
    reference = scale_log2 * scores.amax(1) - 8 * (torch.arange(THREADS) % 2)  # lagging by 8 powers of two
    before = scores.double()
    sums = torch.full((THREADS,), torch.nan)
    row, rows = fake(THREADS), fake(THREADS, SCORES)
    kernel = compile_cached(
        ("exponentiate", every, degree),
        lambda: (Rows(every, degree), rows, row, row, 1.0, make_fake_stream()),
        arch="sm_100a",
    )
    report = sim.run(kernel, scores, reference, sums, scale_log2, None)

    base = torch.where(reference == -torch.inf, 0.0, reference).double()[:, None]
    exact = torch.exp2(np.float64(np.float32(scale_log2)) * before - base)
    hidden = before == -torch.inf
    assert (scores[hidden] == 0).all()
    # s * scale rounds before the exponential: half a unit in the last place of the product.
    spread = 2.0**-23 * (before.abs().where(~hidden, 0.0) * scale_log2 + base.abs())
    bound = (ERROR[degree] if every else 1e-6) + spread + 1e-6
    relative = (scores.double() - exact).abs() / exact.clamp(min=2.0**-126)
    assert (relative[~hidden] <= bound[~hidden]).all()
    torch.testing.assert_close(sums.double(), scores.double().sum(1), rtol=1e-6, atol=0)
    assert sums[1] == 0

    polynomials = SCORES // 2 // every if every else 0  # pairs
    assert report.launches[0].opcodes.get("ex2.approx.ftz.f32", 0) == SCORES - 2 * polynomials
    assert next(iter(resources(kernel).values())).local_bytes == 0
