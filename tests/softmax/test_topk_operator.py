"""softmax_topk without its kernels: arguments, the reference, torch.compile, autograd, which kernel is chosen."""

import helpers.topk_cases as cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import MAX_SMEM_PER_CTA
from warpspec.softmax.topk import ops, reference, softmax_topk
from warpspec.softmax.topk.config import K_LIMIT, LENGTH_LIMIT
from warpspec.softmax.topk.plan import choose_config


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("no tensor", 1), TypeError, "logits: must be a torch.Tensor"),
        ((torch.zeros(2, 8, dtype=torch.float64), 1), TypeError, "logits: dtype must be one of"),
        ((torch.zeros(2, 8).to_sparse(), 1), TypeError, "logits: must be a strided tensor"),
        ((torch.tensor(1.0), 1), ValueError, "logits: rows must have 1..1048576 elements"),
        (
            (torch.zeros(3, 0), 1),
            ValueError,
            r"logits: rows must have 1..1048576 elements, got shape \[3, 0\]",
        ),
        ((torch.zeros(1).expand(LENGTH_LIMIT + 1), 1), ValueError, "logits: rows must have"),
        ((torch.zeros(2, 8), 0), ValueError, "k: must be in 1..8 for rows of 8, got 0"),
        ((torch.zeros(2, 8), 9), ValueError, "k: must be in 1..8"),
        ((torch.zeros(2, 500), K_LIMIT + 1), ValueError, "k: must be in 1..128"),
        ((torch.zeros(2, 8), 2.0), TypeError, "k: must be an int"),
        ((torch.zeros(2, 8), True), TypeError, "k: must be an int"),
        ((torch.zeros(2, 8), [1]), TypeError, "k: must be an int"),
        ((torch.zeros(1).expand(2**31 - 1, 1), 1), ValueError, "logits: must have at most"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "auto"])  # "auto" looks for an earlier call like it first
def test_bad_arguments(arguments, error, message, backend):
    with pytest.raises(error, match=message):
        softmax_topk(*arguments, backend=backend)


def test_bad_options():
    logits = torch.zeros(2, 8)
    with pytest.raises(TypeError, match="renormalize: must be a bool"):
        softmax_topk(logits, 1, renormalize="yes", backend="reference")
    with pytest.raises(TypeError, match="renormalize: must be a bool"):
        softmax_topk(logits, 1, renormalize=[])
    with pytest.raises(TypeError, match="backend: must be a string"):
        softmax_topk(logits, 1, backend=3)
    with pytest.raises(ValueError, match="backend: must be one of"):
        softmax_topk(logits, 1, backend="fastest")
    with pytest.raises(UnsupportedProblem, match="sm90"):
        softmax_topk(logits, 1, backend="sm90")


@pytest.mark.parametrize("shape", [(0, 8), (4, 0, 8), (8,), (1, 1, 8)])
def test_shapes(shape):
    for backend in ("reference", "sim"):
        probs, indices = softmax_topk(torch.zeros(shape), 3, backend=backend)
        assert probs.shape == indices.shape == (*shape[:-1], 3)
        assert (probs.dtype, indices.dtype) == (torch.float32, torch.int32)


def test_any_strides():
    """Rows that are not contiguous, or not evenly spaced, or one row for all."""
    whole = cases.random_rows(6, 40)
    for logits in (
        whole[:, ::2],
        whole.view(2, 3, 40)[:, :2],
        whole.t(),
        whole[:1].expand(4, 40),
        whole[:, 7],
    ):
        got = softmax_topk(logits, 3)
        before = logits.clone()
        for a, b in zip(got, softmax_topk(logits.contiguous(), 3, backend="reference"), strict=True):
            torch.testing.assert_close(a, b)
        assert torch.equal(logits, before)


def test_the_definition_is_torch_topk_of_the_logits():
    """Where torch's result is unique: its order of NaN, of infinities, and torch.softmax's probabilities."""
    logits = cases.random_rows(8, 200)
    logits[1, 3], logits[2, 5], logits[3, 7] = torch.nan, torch.inf, -torch.inf
    logits[4] = -torch.inf
    logits[4, 9] = 2.0
    probs, indices = softmax_topk(logits, 1, backend="reference")
    assert torch.equal(indices.long(), logits.topk(1).indices)
    torch.testing.assert_close(probs, logits.softmax(-1).gather(-1, logits.topk(1).indices), equal_nan=True)
    torch.testing.assert_close(
        softmax_topk(logits, 9, backend="reference")[1].long()[:4], logits[:4].topk(9).indices
    )


def test_torch_compile_and_fake_tensors():
    compiled = torch.compile(
        lambda x: softmax_topk(x * 2, 3, backend="reference"), fullgraph=True, backend="eager"
    )
    logits = cases.random_rows(4, 30)
    for got, expected in zip(compiled(logits), softmax_topk(logits * 2, 3, backend="reference"), strict=True):
        torch.testing.assert_close(got, expected)
    torch.library.opcheck(ops.softmax_topk_operator, (logits, 3, True, "reference"))


def test_gradients_raise():
    logits = cases.random_rows(2, 30).requires_grad_()
    probs, _ = softmax_topk(logits, 3, backend="reference")
    with pytest.raises(NotImplementedError, match="gradients are not implemented"):
        probs.sum().backward()
    with torch.no_grad():
        assert not softmax_topk(logits, 3, backend="reference")[0].requires_grad


@given(
    rows=st.integers(1, 2**20),
    length=st.integers(1, LENGTH_LIMIT),
    k=st.integers(1, K_LIMIT),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    edges=st.booleans(),
    sm_count=st.sampled_from([1, 78, 132, 148]),
)
def test_there_is_a_kernel_for_every_problem(rows, length, k, dtype, edges, sm_count):
    """The configuration's own checks pass, shared memory suffices, and a row that is held fits."""
    k = min(k, length)
    config = choose_config(rows, length, k, dtype, edges, False, sm_count)
    assert config.smem_bytes <= MAX_SMEM_PER_CTA
    assert config.threads <= 1024
    if config.held:
        assert length <= config.capacity * config.per_vector


def test_a_call_like_an_earlier_one_skips_the_checks_and_no_other_does(monkeypatch):
    """With a kernel that stands in for the GPU's."""
    monkeypatch.delenv("WARPSPEC_BACKEND", raising=False)
    monkeypatch.setattr(ops, "_calls", ops.Remembered())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # the index that CPU tensors give
    launched = []
    memory = cases.random_rows(1, 200)[0]
    logits = memory[:60].view(3, 4, 5)

    def kernel(matrix, probs, indices):
        launched.append((matrix.shape, probs.shape))
        for out, value in zip((probs, indices), reference.softmax_topk(matrix, 2, False), strict=True):
            out.copy_(value)

    assert ops.run_again(logits, 2, False) is None
    like = [ops.empty_like_without_memory(tensor) for tensor in ops.new_outputs(logits, 2)]
    call = ops.RememberedCall(kernel, -1, *like, ((12, 5), (5, 1)))
    ops._calls.remember(ops._key(logits, 2, False), call)
    probs, indices = ops.run_again(logits, 2, False)
    cases.judge(probs.view(12, 2), indices.view(12, 2), logits.view(12, 5), 2)
    assert launched == [((12, 5), (12, 2))]
    shifted, half, turned = memory[1:61].view(3, 4, 5), logits.half(), logits.transpose(0, 1)
    for other in ((shifted, 2, False), (half, 2, False), (turned, 2, False)):
        assert ops.run_again(*other) is None
    assert ops.run_again(logits, True, False) is None and ops.run_again(logits, 2, True) is None
    monkeypatch.setenv("WARPSPEC_BACKEND", "reference")
    assert ops.run_again(logits, 2, False) is None
    assert len(launched) == 1
