"""softmax as a torch operator, its arguments, and the choice of a plan: nothing here runs a kernel."""

from dataclasses import replace

import pytest
import torch
from helpers.recorder import Recorder
from hypothesis import given
from hypothesis import strategies as st

from warpspec.common import repeated
from warpspec.common.backend import BACKEND_VARIABLE
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import H200_SPEEDS, MAX_SMEM_PER_CTA, MIB
from warpspec.common.launch import simulated
from warpspec.softmax import ops, softmax
from warpspec.softmax.plan import SMEM_BESIDE_DATA, candidates, choose_plan
from warpspec.softmax.problem import MOST_ELEMENTS, SoftmaxProblem, as_matrix

H200 = simulated("sm_90a", sm_count=132, l2_bytes=60 * MIB, speeds=H200_SPEEDS)
REFERENCE = {"backend": "reference"}


def randn(*shape, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), **options)


class TestArguments:
    @pytest.mark.parametrize(
        "x, error, message",
        [
            ([1.0], TypeError, r"^x: must be a torch.Tensor"),
            (torch.ones(3, dtype=torch.float64), TypeError, r"^x: dtype"),
            (torch.ones(3, dtype=torch.int32), TypeError, r"^x: dtype"),
            (torch.tensor(1.0), ValueError, r"^x: must have at least one dimension"),
            (torch.ones(3, 0), ValueError, r"^x: rows must have 1\.\."),
            (torch.ones(1).expand(1, MOST_ELEMENTS + 1), ValueError, r"^x: rows must have"),
            (torch.ones(1).expand(2**31 - 1, 1), ValueError, r"^x: must have at most"),
            (torch.ones(3, 3).to_sparse(), TypeError, r"^x: must be a strided tensor"),
        ],
    )
    def test_bad_x(self, x, error, message):
        with pytest.raises(error, match=message):
            softmax(x, **REFERENCE)

    @pytest.mark.parametrize(
        "out, error, message",
        [
            ([1.0], TypeError, r"^out: must be a torch.Tensor"),
            (torch.ones(4, 6, dtype=torch.float16), TypeError, r"^out: dtype must be x's"),
            (torch.ones(4, 5), ValueError, r"^out: shape must be x's"),
            (torch.ones(6, 4).t(), ValueError, r"^out: rows must be contiguous"),
            (torch.ones(6).expand(4, 6), ValueError, r"^out: rows must be contiguous"),
            (torch.ones(4, 6, device="meta"), ValueError, r"^out: device must be x's"),
        ],
    )
    def test_bad_out(self, out, error, message):
        with pytest.raises(error, match=message):
            softmax(randn(4, 6), out=out, **REFERENCE)

    def test_overlapping_out(self):
        memory = randn(30)
        x, out = memory[:24].view(4, 6), memory[6:].view(4, 6)
        before = memory.clone()
        with pytest.raises(ValueError, match=r"^out: must be x itself or not share memory"):
            softmax(x, out=out, **REFERENCE)
        assert torch.equal(memory, before)

    def test_backends(self):
        with pytest.raises(UnsupportedProblem, match="sm90"):
            softmax(randn(2, 3), backend="sm90")
        with pytest.raises(ValueError, match="backend"):
            softmax(randn(2, 3), backend="nonesuch")

    def test_out_is_x(self):
        x = randn(4, 6)
        expected = torch.softmax(x, -1)
        assert softmax(x, out=x, **REFERENCE) is x
        torch.testing.assert_close(x, expected)

    @pytest.mark.parametrize(
        "make, rows, step",
        [
            (lambda: torch.empty(3, 4, 5), 12, 5),
            (lambda: torch.empty(3, 4, 5)[:, ::2], 6, 10),
            (lambda: torch.empty(3, 4, 5)[:, :3], None, None),
            (lambda: torch.empty(3, 4, 6)[..., 1:], 12, 6),
            (lambda: torch.empty(6, 4, 5)[::2], None, None),  # four rows close together, then a gap
            (lambda: torch.empty(6, 1, 5)[::2], 3, 10),
            (lambda: torch.empty(5, 4).t(), None, None),
            (lambda: torch.empty(5).expand(4, 5), None, None),
            (lambda: torch.empty(7), 1, 7),
            (lambda: torch.empty(3, 1).expand(3, 1), 3, 1),
            (lambda: torch.empty(0, 5), 0, 5),
        ],
    )
    def test_as_matrix(self, make, rows, step):
        matrix = as_matrix(make())
        if rows is None:
            assert matrix is None
        else:
            assert (*matrix.shape, matrix.stride(0)) == (rows, make().shape[-1], step)


class TestOperator:
    def test_compiles_without_graph_breaks(self):
        torch._dynamo.reset()
        layer = torch.compile(lambda x: softmax(x * 2, **REFERENCE) + 1, fullgraph=True, backend="aot_eager")
        for shape in ((3, 7), (2, 3, 20)):
            torch.testing.assert_close(layer(randn(shape)), torch.softmax(randn(shape) * 2, -1) + 1)

    def test_out_compiles_and_is_written_in_place(self):
        torch._dynamo.reset()
        x, out = randn(3, 7), torch.full((3, 7), torch.nan)
        layer = torch.compile(
            lambda x, out: softmax(x, out=out, **REFERENCE) * 2, fullgraph=True, backend="aot_eager"
        )
        torch.testing.assert_close(layer(x, out), torch.softmax(x, -1) * 2)
        torch.testing.assert_close(out, torch.softmax(x, -1))

    def test_schema_fake_and_autograd(self):
        x = randn(4, 9, requires_grad=True)
        torch.library.opcheck(torch.ops.warpspec.softmax, (x, "reference"))
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        arguments = (x.detach(), torch.empty(4, 9), "reference")
        torch.library.opcheck(torch.ops.warpspec.softmax_out, arguments, test_utils=checks)

    def test_fake_tensors_run_nothing(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            y = softmax(torch.empty(3, 4, 5, dtype=torch.float16).transpose(0, 1))
        assert (y.shape, y.dtype, y.is_contiguous()) == ((4, 3, 5), torch.float16, True)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gradients(self, dtype):
        x = randn(5, 11).to(dtype).requires_grad_()
        twin = x.detach().clone().requires_grad_()
        weight = randn(5, 11).to(dtype)
        (softmax(x, **REFERENCE) * weight).sum().backward()
        (torch.softmax(twin, -1) * weight).sum().backward()
        torch.testing.assert_close(x.grad, twin.grad)

    def test_gradients_with_out_raise_before_anything_is_written(self):
        x, out = randn(3, 4, requires_grad=True), torch.full((3, 4), 3.0)
        with pytest.raises(NotImplementedError, match=r"^out: gradients"):
            softmax(x, out=out, **REFERENCE)
        assert (out == 3).all()
        with torch.no_grad():
            assert not softmax(x, out=out, **REFERENCE).requires_grad
            assert not softmax(x, **REFERENCE).requires_grad

    def test_tensor_subclasses_and_modes_see_the_operator(self):
        with Recorder() as seen:
            softmax(randn(2, 3), **REFERENCE)
        assert seen.names == ["softmax"]


class TestPlan:
    def test_a_split_is_not_larger_than_the_gpu(self):
        for sms in (1, 2, 7, 132):
            problem = SoftmaxProblem(3, 2**25, "float32")
            assert candidates(problem, replace(H200, sm_count=sms, l2_bytes=1 * MIB))

    @given(
        rows=st.one_of(st.integers(1, 40), st.integers(1, 2**20)),
        length=st.one_of(st.integers(1, 600), st.integers(1, MOST_ELEMENTS)),
        dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
        aligned=st.booleans(),
        sms=st.sampled_from([1, 8, 78, 132, 148]),
    )
    def test_every_candidate_has_room_for_the_rows(self, rows, length, dtype, aligned, sms):
        width = 4 if dtype == "float32" else 2
        problem = SoftmaxProblem(rows, length, dtype, aligned and length * width % 16 == 0)
        vectors = length * width // 16
        plans = candidates(problem, replace(H200, sm_count=sms))
        assert plans
        for plan in plans:
            config = plan.config
            assert config.edges == (not problem.aligned) and plan.microseconds > 0
            if plan.strategy in ("rows", "cluster"):
                assert vectors <= config.vectors * config.lanes * config.cluster
                assert config.threads <= 1024
            if plan.strategy == "staged":
                assert vectors <= config.share * config.cluster
                config.check_row(vectors)
                assert config.share * 16 <= MAX_SMEM_PER_CTA and config.threads <= 1024
            if plan.strategy == "split":  # all CTAs at once, or they would wait for ever
                assert plan.groups * plan.group <= sms
            if plan.strategy in ("split", "resident"):
                assert config.smem_bytes <= MAX_SMEM_PER_CTA - SMEM_BESIDE_DATA

    @pytest.mark.parametrize(
        "rows, length, strategy",
        [
            (32768, 128, "rows"),
            (2048, 4096, "rows"),
            (4, 32768, "cluster"),
            (8192, 50257, "staged"),
            (4096, 131072, "staged"),
            (4, 8388608, "split"),
        ],
    )
    def test_strategies_by_shape(self, rows, length, strategy):
        problem = SoftmaxProblem(rows, length, "bfloat16", length % 8 == 0)
        assert choose_plan(problem, H200).strategy == strategy


class TestShortWay:
    """``ops.run_again`` with a launcher that stands in for the GPU's."""

    @pytest.fixture
    def launched(self, monkeypatch):
        launches = []

        def launcher(x, out):
            launches.append((tuple(x.shape), x.stride(), out.stride()))
            out.copy_(torch.softmax(x, -1))

        monkeypatch.setattr(ops, "_calls", repeated.Remembered())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # the index that CPU tensors give
        self.launcher = launcher
        return launches

    def remember(self, x, out=None):
        ops._calls.remember(ops._call_key(x, out, "auto"), self.launcher)

    def test_only_for_a_call_like_an_earlier_one(self, launched):
        memory = randn(200)
        x = memory[:60].view(3, 4, 5)
        assert ops.run_again(x, None, "auto") is None
        self.remember(x)
        torch.testing.assert_close(ops.run_again(x, None, "auto"), torch.softmax(x, -1))
        assert launched == [((12, 5), (5, 1), (5, 1))]
        others = (x.half(), memory[60:120].view(4, 3, 5), memory[1:61].view(3, 4, 5), x.transpose(0, 1))
        for other in others:  # another dtype, shape, alignment, layout
            assert ops.run_again(other, None, "auto") is None
        assert ops.run_again(x, None, "reference") is None
        assert ops.run_again(memory[100:160].view(3, 4, 5), None, "auto") is not None

    def test_out(self, launched):
        memory = randn(200)
        x, out = memory[:60].view(12, 5), memory[100:160].view(12, 5)
        self.remember(x, out)
        assert ops.run_again(x, out, "auto") is out
        torch.testing.assert_close(out, torch.softmax(x, -1))
        assert ops.run_again(x, memory[4:64].view(12, 5), "auto") is None  # overlaps
        assert ops.run_again(x, torch._neg_view(out), "auto") is None
        assert ops.run_again(x, out.requires_grad_(), "auto") is None
        assert ops.run_again(x, x, "auto") is x  # in place, aligned as x and out were
        assert len(launched) == 2

    def test_a_single_row_of_any_stride(self, launched):
        x = randn(40).as_strided((1, 8), (3, 1))
        self.remember(x)
        assert ops.run_again(x, None, "auto").shape == (1, 8)
        assert launched == [((1, 8), (8, 1), (8, 1))]


class TestRemembered:
    def test_forgets_everything_once_full(self):
        remembered = repeated.Remembered()
        for i in range(repeated.MOST_REMEMBERED):
            remembered.remember((i,), i)
        assert len(remembered) == repeated.MOST_REMEMBERED
        remembered.remember(("one more",), 1)
        assert remembered == {("one more",): 1}

    def test_the_backend_variable_is_seen_as_it_changes(self, monkeypatch):
        monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
        assert repeated.backend_variable() is None
        monkeypatch.setenv(BACKEND_VARIABLE, "reference")
        first = repeated.backend_variable()
        assert first is not None
        monkeypatch.setenv(BACKEND_VARIABLE, "sim")
        assert repeated.backend_variable() not in (None, first)

    def test_who_watches(self):
        x = randn(3, 4)
        assert not repeated.watched(x) and not repeated.watched(torch.nn.Parameter(x, requires_grad=False))
        assert repeated.watched(x.to("meta"))
        leaf = x.clone().requires_grad_()
        assert repeated.recorded(x, leaf) and not repeated.recorded(x, None) and not repeated.watched(leaf)
        with torch.no_grad():
            assert not repeated.recorded(leaf)
        seen = []
        torch.func.vmap(lambda row: seen.append(repeated.watched(row)) or row)(x)
        assert seen == [True]
