"""Random calls of the sm100 kernel, in the simulator: against the reference, and against each other.

What is compiled in makes a ``Kernel``; all else of a call is drawn: sizes, lengths, positions, data, how tensors
lie in memory, splits, pages. The result must be the reference's; another number of splits, other pages and
another order of the keys change nothing. NaN stands wherever no row may read (keys past a length or outside every
row's window, the rest of a page, pages out of use, gaps between rows, ``out``), and page numbers out of range in
slots past the length.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers.attention_cases import (
    LSE_TOLERANCE,
    O_TOLERANCE,
    Case,
    arguments,
    check,
    poisoned_out,
    relative_error,
)
from helpers.page_layouts import PAGE_SIZES, paged
from hypothesis import given, settings
from hypothesis import strategies as st

from warpspec.fmha import attention
from warpspec.fmha.heads import CLASSES as HEAD_DIMS
from warpspec.fmha.mask import visible
from warpspec.fmha.problem import AttentionProblem

DATA = ("normal", "rising", "falling", "equal", "peaked", "outliers", "poisoned-tail")
FEW_QUERIES = 8  # of decode: a kernel of its own
HIDDEN = 0.3  # share of a bias that is -inf


@dataclass(frozen=True)
class Kernel:
    """What a call has compiled in. decode: at most FEW_QUERIES, of four heads to a KV head; otherwise more, of one
    head. left, right: the window's sides that are bounded. splits: the numbers of splits to draw from."""

    head_dim: int
    decode: bool = False
    shared_kv: bool = False
    causal: bool = False
    left: bool = False
    right: bool = False
    key_stride: int = 1
    q_start: bool = False
    lengths: bool = True
    page_size: int | None = None
    sink: bool = False
    normalize: bool = True
    negative: bool = False
    dtype: torch.dtype = torch.bfloat16
    bias: torch.dtype | None = None
    splits: tuple[int, ...] = (2, 3, 4)

    @property
    def keys_may_move(self) -> bool:
        """No row sees other keys than the rest of its batch row."""
        return not (self.causal or self.left or self.right)


@dataclass(frozen=True)
class Call:
    """A call and a variation of it: the second of each pair."""

    kernel: Kernel
    case: Case
    seed: int
    splits: tuple[int, int]
    page_seeds: tuple[int, int]
    spare_slots: tuple[int, int]
    heads_outside: tuple[bool, bool]
    bias_shape: tuple[bool, bool]  # batch rows, heads have each their own


@st.composite
def calls(draw, kernel: Kernel) -> Call:
    def pair(values):
        return draw(values), draw(values)

    batch = draw(st.integers(1, 3))
    heads_kv = 1 if kernel.shared_kv else draw(st.integers(1, 2))
    seq_q = draw(st.integers(1, FEW_QUERIES) if kernel.decode else st.integers(FEW_QUERIES + 1, 140))
    seq_k = draw(st.integers(2, 320))
    lengths = tuple(draw(st.integers(0, seq_k)) for _ in range(batch)) if kernel.lengths else None
    positions = st.integers(-40, seq_k * kernel.key_stride + 40)
    reach = st.integers(0, seq_k)
    window = (draw(reach) if kernel.left else None, draw(reach) if kernel.right else None)
    scale = None if not kernel.negative else -draw(st.sampled_from((0.01, 0.2)))
    case = Case(
        "random",
        batch=batch,
        seq_q=seq_q,
        seq_k=seq_k,
        heads_q=heads_kv * (4 if kernel.decode else 1),
        heads_kv=heads_kv,
        head_dim=kernel.head_dim,
        dtype=kernel.dtype,
        scale=scale,
        causal=kernel.causal,
        window=window if kernel.left or kernel.right else None,
        sink=kernel.sink,
        kv_lengths=lengths,
        q_start=tuple(draw(positions) for _ in range(batch)) if kernel.q_start else None,
        key_stride=kernel.key_stride,
        normalize=kernel.normalize,
        shared_kv=kernel.shared_kv,
        layout=draw(st.sampled_from(("bshd", "bhsd", "padded", "broadcast"))),
        data=draw(st.sampled_from(DATA)),
    )
    return Call(
        kernel,
        case,
        draw(st.integers(0, 2**16)),
        pair(st.sampled_from(kernel.splits)),
        pair(st.integers(0, 2**16)),
        pair(st.integers(0, 3)),
        pair(st.booleans()),
        pair(st.booleans()),
    )


def dense_inputs(call: Call) -> dict:
    """Arguments of ``attention`` without a page table."""
    case, inputs = call.case, arguments(call.case, call.seed)
    if call.kernel.bias is not None:
        generator = torch.Generator().manual_seed(call.seed)
        batches, heads = call.bias_shape
        shape = (case.batch if batches else 1, case.heads_q if heads else 1, case.seq_q, case.seq_k)
        bias = 2 * torch.randn(shape, generator=generator)
        bias[torch.rand(shape, generator=generator) < HIDDEN] = -torch.inf
        problem = AttentionProblem.of(**inputs)
        seen = visible(problem, inputs["kv_lengths"], inputs["q_start"])  # [B, Sq, Sk]
        unseen = ~seen if batches else ~seen.any(dim=0, keepdim=True)
        inputs["bias"] = torch.where(unseen[:, None], torch.nan, bias).to(call.kernel.bias)
    return inputs


def run(call: Call, inputs: dict, variation: bool = False):
    """(o, lse) or a state: the kernel's, with the call's splits and pages, into an output full of NaN."""
    inputs, page_size = dict(inputs), call.kernel.page_size
    if page_size is not None:
        keys, shared = inputs["k"], inputs["v"] is None
        tensors = (keys,) if shared else (keys, inputs["v"])
        pages, inputs["page_table"] = paged(
            tensors,
            call.case.kv_lengths,
            page_size,
            spare_slots=call.spare_slots[variation],
            seed=call.page_seeds[variation],
            heads_outside=call.heads_outside[variation],
        )
        inputs["k"], inputs["v"] = pages[0], None if shared else pages[1]
        if inputs.get("bias") is not None:
            keys = inputs["page_table"].shape[1] * page_size
            bias = torch.full((*inputs["bias"].shape[:3], keys), torch.nan, dtype=inputs["bias"].dtype)
            bias[..., : call.case.seq_k] = inputs["bias"]
            inputs["bias"] = bias
    return attention(
        **inputs,
        num_splits=call.splits[variation],
        return_lse=call.case.normalize,
        out=poisoned_out(call.case),
        backend="sim",
    )


def assert_same(call: Call, expected, got) -> None:
    """Two results of the kernel, within the tolerance that each has against the reference."""
    (o, lse), (expected_o, expected_lse) = (
        result if call.case.normalize else (normalized(result), result.lse) for result in (got, expected)
    )
    finite = expected_o.isfinite().all(dim=-1, keepdim=True)  # rows that see a NaN of "poisoned-tail" are not
    assert o.isfinite().all(dim=-1, keepdim=True).equal(finite)
    o, expected_o = (torch.where(finite, t.float(), 0.0) for t in (o, expected_o))
    assert relative_error(o, expected_o) <= O_TOLERANCE[call.case.dtype]
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=LSE_TOLERANCE, equal_nan=True)


def normalized(state) -> torch.Tensor:
    """o of a state; 0 in rows that saw no key."""
    total = state.row_sum.transpose(1, 2)[..., None]
    return state.o / torch.where(total == 0, 1.0, total)


def shuffled(call: Call, inputs: dict) -> dict:
    """Keys in another order, batch row by batch row; those past a length stay."""
    moved = dict(inputs)
    names = ("k",) if inputs["v"] is None else ("k", "v")
    for name in names:
        moved[name] = inputs[name].clone()
    bias = inputs.get("bias")
    if bias is not None:
        moved["bias"] = bias.expand(call.case.batch, -1, -1, -1).clone()
    for row in range(call.case.batch):
        length = call.case.seq_k if call.case.kv_lengths is None else call.case.kv_lengths[row]
        order = torch.randperm(length, generator=torch.Generator().manual_seed(call.seed + row))
        for name in names:
            moved[name][row, :length] = inputs[name][row, order]
        if bias is not None:
            moved["bias"][row, ..., :length] = bias.expand(call.case.batch, -1, -1, -1)[row][..., order]
    return moved


def check_call(call: Call) -> None:
    inputs = dense_inputs(call)
    result = run(call, inputs)
    check(call.case, result, inputs, against_torch=False)
    assert_same(call, result, run(call, inputs, variation=True))
    if call.kernel.keys_may_move:
        assert_same(call, result, run(call, shuffled(call, inputs)))


# One a head dimension; together they have what a call can have.
KERNELS = [
    Kernel(64, causal=True, left=True, page_size=16, sink=True),
    Kernel(128, page_size=32, normalize=False, dtype=torch.float16),
    Kernel(256, decode=True, causal=True, key_stride=4, q_start=True),
    Kernel(512, decode=True, shared_kv=True, page_size=64, sink=True),
]


@pytest.mark.long
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: str(kernel.head_dim))
@settings(max_examples=10)
@given(data=st.data())
def test_random_calls(kernel, data):
    check_call(data.draw(calls(kernel)))


@st.composite
def kernels(draw, head_dim: int, page_size: int | None) -> Kernel:
    flag = st.booleans()
    causal = draw(flag)
    key_stride = draw(st.sampled_from((1, 1, 4, 128))) if causal else 1
    normalize = draw(flag)
    return Kernel(
        head_dim,
        decode=draw(flag),
        shared_kv=draw(flag),
        causal=causal,
        left=key_stride == 1 and draw(flag),
        right=key_stride == 1 and draw(flag),
        key_stride=key_stride,
        q_start=draw(flag),
        lengths=page_size is not None or draw(flag),
        page_size=page_size,
        sink=normalize and draw(flag),
        normalize=normalize,
        negative=draw(flag),
        dtype=draw(st.sampled_from((torch.bfloat16, torch.float16))),
        bias=draw(st.sampled_from((None, None, torch.bfloat16, torch.float32))),
        splits=draw(st.sampled_from(((1,), (1, 2, 5), (2, 3, 9)))),
    )


@pytest.mark.long
@pytest.mark.parametrize("page_size", (None, *PAGE_SIZES, 48, 256))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@settings(max_examples=6)
@given(data=st.data())
def test_random_calls_of_random_kernels(head_dim, page_size, data):
    kernel = data.draw(kernels(head_dim, page_size))
    for _ in range(3):
        check_call(data.draw(calls(kernel)))
