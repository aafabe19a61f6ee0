"""Every bad argument raises, names itself, and nothing runs or is written."""

import math

import pytest
import torch

from warpspec.fmha import UnsupportedProblem, attention, reference
from warpspec.fmha.problem import AttentionProblem


def half(*shape):
    return torch.zeros(shape, dtype=torch.float16)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def good():
    """Arguments that every check lets through; a bad case replaces some of them."""
    return {"q": half(2, 5, 4, 64), "k": half(2, 7, 2, 64), "v": half(2, 7, 2, 64)}


def packed(total, offset, *shape):
    """A view of contiguous shape, ``offset`` elements into an allocation."""
    return half(total)[offset : offset + math.prod(shape)].view(shape)


PAGES = {
    "k": half(9, 4, 2, 64),
    "v": half(9, 4, 2, 64),
    "kv_lengths": int32(7, 3),
    "page_table": torch.tensor([[0, 8], [2, -1]], dtype=torch.int32),
}

SHARED = half(2, 5, 12, 64)  # of three tensors' heads
OWN_OUT = half(2, 5, 4, 64)

# id: (changed arguments, error, argument that the message starts with, words of the message)
BAD = {
    # Kinds of object.
    "q-list": ({"q": [1.0]}, TypeError, "q", "torch.Tensor"),
    "q-none": ({"q": None}, TypeError, "q", "torch.Tensor"),
    "k-none": ({"k": None}, TypeError, "k", "torch.Tensor"),
    "v-number": ({"v": 1.0}, TypeError, "v", "torch.Tensor"),
    "sink-float": ({"sink": 0.5}, TypeError, "sink", "0.5"),
    "bias-list": ({"bias": [0.0]}, TypeError, "bias", "torch.Tensor"),
    "kv_lengths-list": ({"kv_lengths": [7, 7]}, TypeError, "kv_lengths", "torch.Tensor"),
    "page_table-list": ({**PAGES, "page_table": [[0]]}, TypeError, "page_table", "torch.Tensor"),
    "q_start-int": ({"q_start": 3}, TypeError, "q_start", "torch.Tensor"),
    "out-true": ({"out": True}, TypeError, "out", "torch.Tensor"),
    "q-sparse": ({"q": half(2, 5, 4, 64).to_sparse()}, TypeError, "q", "strided"),
    # Rank.
    "q-rank-3": ({"q": half(5, 4, 64)}, ValueError, "q", r"4 dimensions .* \[5, 4, 64\]"),
    "k-rank-5": ({"k": half(1, 2, 7, 2, 64)}, ValueError, "k", "4 dimensions"),
    "v-rank-2": ({"v": half(7, 64)}, ValueError, "v", "4 dimensions"),
    # dtype.
    "q-fp32": ({"q": half(2, 5, 4, 64).float()}, TypeError, "q", "bfloat16.*float16.*float32"),
    "k-fp64": ({"k": half(2, 7, 2, 64).double()}, TypeError, "k", "float64"),
    "k-other": ({"k": half(2, 7, 2, 64).bfloat16()}, TypeError, "k", "float16.*bfloat16"),
    "v-other": ({"v": half(2, 7, 2, 64).bfloat16()}, TypeError, "v", "float16.*bfloat16"),
    "q-int8": ({"q": half(2, 5, 4, 64).to(torch.int8)}, TypeError, "q", "int8"),
    # Devices.
    "k-device": ({"k": half(2, 7, 2, 64).to("meta")}, ValueError, "k", "cpu.*meta"),
    "v-device": ({"v": half(2, 7, 2, 64).to("meta")}, ValueError, "v", "cpu.*meta"),
    "sink-device": ({"sink": torch.zeros(4, device="meta")}, ValueError, "sink", "cpu.*meta"),
    "bias-device": ({"bias": torch.zeros(1, 1, 5, 7, device="meta")}, ValueError, "bias", "meta"),
    "kv_lengths-device": ({"kv_lengths": int32(7, 7).to("meta")}, ValueError, "kv_lengths", "meta"),
    "q_start-device": ({"q_start": int32(0, 0).to("meta")}, ValueError, "q_start", "meta"),
    "page_table-device": (
        {**PAGES, "page_table": PAGES["page_table"].to("meta")}, ValueError, "page_table", "meta"),
    "out-device": ({"out": half(2, 5, 4, 64).to("meta")}, ValueError, "out", "meta"),
    # Heads, head size, batch, sequence.
    "heads-do-not-divide": ({"k": half(2, 7, 3, 64), "v": half(2, 7, 3, 64)}, ValueError, "k", "4, got 3"),
    "more-kv-heads": ({"k": half(2, 7, 8, 64), "v": half(2, 7, 8, 64)}, ValueError, "k", "4, got 8"),
    "no-heads": ({"q": half(2, 5, 0, 64)}, ValueError, "q", "at least one head"),
    "no-kv-heads": ({"k": half(2, 7, 0, 64), "v": half(2, 7, 0, 64)}, ValueError, "k", "got 0"),
    "head-size-264": (
        {"q": half(2, 5, 4, 264), "k": half(2, 7, 2, 264)}, ValueError, "q", "multiple of 8 up to 256.*got 264"),
    "head-size-7": ({"q": half(2, 5, 4, 7), "k": half(2, 7, 2, 7)}, ValueError, "q", "multiple of 8.*got 7"),
    "head-size-0": ({"q": half(2, 5, 4, 0)}, ValueError, "q", "got 0"),
    "k-head-size": ({"k": half(2, 7, 2, 128)}, ValueError, "k", "64, got 128"),
    "v-head-size": ({"v": half(2, 7, 2, 512)}, ValueError, "v", "multiple of 8 up to 256.*512"),
    "v-sequence": ({"v": half(2, 8, 2, 64)}, ValueError, "v", r"\[2, 7, 2, 64\], got \[2, 8, 2, 64\]"),
    "v-heads": ({"v": half(2, 7, 4, 64)}, ValueError, "v", "shape"),
    "k-batch": ({"k": half(3, 7, 2, 64), "v": half(3, 7, 2, 64)}, ValueError, "k", "2, got 3"),
    "k-batch-1": ({"k": half(1, 7, 2, 64), "v": half(1, 7, 2, 64)}, ValueError, "k", "2, got 1"),
    # Strides and addresses.
    "q-last-strided": ({"q": half(2, 5, 4, 128)[..., ::2]}, ValueError, "q", "last dimension.*contiguous"),
    "k-transposed": ({"k": half(2, 7, 64, 2).transpose(2, 3)}, ValueError, "k", "contiguous"),
    "v-last-expanded": ({"v": half(2, 7, 2, 1).expand(2, 7, 2, 64)}, ValueError, "v", "contiguous"),
    "q-rows-misaligned": ({"q": half(2, 5, 4, 68)[..., :64]}, ValueError, "q", "16 bytes.*136 bytes"),
    "k-address": ({"k": packed(2000, 4, 2, 7, 2, 64)}, ValueError, "k", "address 8 bytes off"),
    "v-address": ({"v": packed(2000, 1, 2, 7, 2, 64)}, ValueError, "v", "address 2 bytes off"),
    # Scalars.
    "scale-nan": ({"scale": math.nan}, ValueError, "scale", "finite, got nan"),
    "scale-inf": ({"scale": -math.inf}, ValueError, "scale", "finite, got -inf"),
    "softcap-nan": ({"softcap": math.nan}, ValueError, "softcap", "got nan"),
    "softcap-inf": ({"softcap": math.inf}, ValueError, "softcap", "0.001..10000, got inf"),
    "softcap-negative": ({"softcap": -50.0}, ValueError, "softcap", "None or 0, or within 0.001..10000, got -50"),
    "softcap-bool": ({"softcap": True}, TypeError, "softcap", "float"),
    "softcap-string": ({"softcap": "50"}, TypeError, "softcap", "float"),
    "scale-large": ({"scale": -1e31}, ValueError, "scale", "finite, got -1e"),
    "scale-larger": ({"scale": 10**400}, ValueError, "scale", "finite, got 10"),
    "scale-string": ({"scale": "1"}, TypeError, "scale", "float"),
    "scale-bool": ({"scale": True}, TypeError, "scale", "float"),
    "scale-tensor": ({"scale": torch.tensor(1.0)}, TypeError, "scale", "float"),
    "causal-int": ({"causal": 1}, TypeError, "causal", "bool"),
    "causal-none": ({"causal": None}, TypeError, "causal", "bool"),
    "normalize-none": ({"normalize": None}, TypeError, "normalize", "bool"),
    "return_lse-string": ({"return_lse": "yes"}, TypeError, "return_lse", "bool"),
    "key_stride-0": ({"key_stride": 0}, ValueError, "key_stride", "got 0"),
    "key_stride-negative": ({"key_stride": -4}, ValueError, "key_stride", "got -4"),
    "key_stride-float": ({"key_stride": 4.0}, TypeError, "key_stride", "int"),
    "key_stride-none": ({"key_stride": None}, TypeError, "key_stride", "int"),
    "num_splits-0": ({"num_splits": 0}, ValueError, "num_splits", "got 0"),
    "num_splits-many": ({"num_splits": 1025}, ValueError, "num_splits", "within 1..1024, got 1025"),
    "num_splits-bool": ({"num_splits": True}, TypeError, "num_splits", "int"),
    "window-int": ({"window": 5}, TypeError, "window", "left, right"),
    "window-one": ({"window": (5,)}, TypeError, "window", "left, right"),
    "window-three": ({"window": (5, 0, 0)}, TypeError, "window", "left, right"),
    "window-left-negative": ({"window": (-1, None)}, ValueError, "window left", "got -1"),
    "window-right-negative": ({"window": (3, -2)}, ValueError, "window right", "got -2"),
    "window-float": ({"window": (1.5, None)}, TypeError, "window left", "int"),
    "window-too-wide": ({"window": (None, 2**31)}, ValueError, "window right", "got 2147483648"),
    "window-with-key_stride": ({"window": (4, None), "key_stride": 4}, ValueError, "window", "key_stride 1"),
    # Sink and bias.
    "sink-shape": ({"sink": torch.zeros(3)}, ValueError, "sink", r"Hq=4.*\[3\]"),
    "sink-per-kv-head": ({"sink": torch.zeros(2)}, ValueError, "sink", "Hq=4"),
    "sink-rank": ({"sink": torch.zeros(2, 4)}, ValueError, "sink", "Hq=4"),
    "sink-int": ({"sink": torch.zeros(4, dtype=torch.int64)}, TypeError, "sink", "int64"),
    "sink-un-normalised": ({"sink": torch.zeros(4), "normalize": False}, ValueError, "sink", "merge"),
    "bias-shape": ({"bias": torch.zeros(1, 1, 5, 8)}, ValueError, "bias", r"Sk=7\], got \[1, 1, 5, 8\]"),
    "bias-heads": ({"bias": torch.zeros(1, 2, 5, 7)}, ValueError, "bias", "Hq=4 or 1"),
    "bias-batch": ({"bias": torch.zeros(3, 1, 5, 7)}, ValueError, "bias", "B=2 or 1"),
    "bias-rank": ({"bias": torch.zeros(5, 7)}, ValueError, "bias", "shape"),
    "bias-fp16": ({"bias": half(1, 1, 5, 7)}, TypeError, "bias", "bfloat16.*float32.*float16"),
    "bias-bool": ({"bias": torch.ones(1, 1, 5, 7, dtype=torch.bool)}, TypeError, "bias", "bool"),
    # Lengths, positions, pages.
    "kv_lengths-negative": ({"kv_lengths": int32(3, -1)}, ValueError, "kv_lengths", "got -1 at index 1"),
    "kv_lengths-beyond": ({"kv_lengths": int32(8, 7)}, ValueError, "kv_lengths", r"0..7 \(Sk\), got 8 at"),
    "kv_lengths-int64": ({"kv_lengths": int32(3, 3).long()}, TypeError, "kv_lengths", "int32.*int64"),
    "kv_lengths-shape": ({"kv_lengths": int32(3)}, ValueError, "kv_lengths", r"B=2\], got \[1\]"),
    "kv_lengths-rank": ({"kv_lengths": int32(3, 3)[:, None]}, ValueError, "kv_lengths", "shape"),
    "q_start-int64": ({"q_start": int32(3, 3).long()}, TypeError, "q_start", "int64"),
    "q_start-float": ({"q_start": torch.zeros(2)}, TypeError, "q_start", "float32"),
    "q_start-shape": ({"q_start": int32(3, 3, 3)}, ValueError, "q_start", r"B=2\], got \[3\]"),
    "q_start-range": ({"q_start": int32(0, 2**31 - 1)}, ValueError, "q_start", "at index 1"),
    "page_table-alone": ({**PAGES, "kv_lengths": None}, ValueError, "page_table", "needs kv_lengths"),
    "page_table-int64": ({**PAGES, "page_table": torch.zeros(2, 2).long()}, TypeError, "page_table", "int64"),
    "page_table-rank": ({**PAGES, "page_table": int32(0, 1)}, ValueError, "page_table", "max_pages"),
    "page_table-batch": (
        {**PAGES, "page_table": torch.zeros(3, 2, dtype=torch.int32)}, ValueError, "page_table", r"\[3, 2\]"),
    "page_table-beyond": (
        {**PAGES, "page_table": torch.tensor([[0, 9], [2, -1]], dtype=torch.int32)},
        ValueError, "page_table", r"got 9 at index \[0, 1\]"),
    "page_table-negative": (
        {**PAGES, "kv_lengths": int32(7, 5)}, ValueError, "page_table", r"got -1 at index \[1, 1\]"),
    "page_table-lengths": ({**PAGES, "kv_lengths": int32(9, 3)}, ValueError, "kv_lengths", "0..8"),
    "page_table-empty-pages": ({**PAGES, "k": half(9, 0, 2, 64), "v": None}, ValueError, "k", "one key"),
    # out.
    "out-shape": ({"out": half(2, 5, 2, 64)}, ValueError, "out", r"\[2, 5, 4, 64\], got \[2, 5, 2, 64\]"),
    "out-rank": ({"out": half(2, 5, 256)}, ValueError, "out", "shape"),
    "out-dtype": ({"out": half(2, 5, 4, 64).float()}, TypeError, "out", "float16, got torch.float32"),
    "out-dtype-of-a-state": ({"out": half(2, 5, 4, 64), "normalize": False}, TypeError, "out", "float32"),
    "out-last-strided": ({"out": half(2, 5, 4, 128)[..., ::2]}, ValueError, "out", "contiguous"),
    "out-misaligned": ({"out": half(2, 5, 4, 66)[..., :64]}, ValueError, "out", "16 bytes"),
    "out-address": ({"out": packed(4000, 3, 2, 5, 4, 64)}, ValueError, "out", "6 bytes off"),
    "out-expanded": ({"out": half(1, 5, 4, 64).expand(2, 5, 4, 64)}, ValueError, "out", "overlap each other"),
    "out-overlaps-itself": (
        {"out": half(3000).as_strided((2, 5, 4, 64), (1280, 128, 64, 1))}, ValueError, "out", "each other"),
    "out-is-q": ({"q": OWN_OUT, "out": OWN_OUT}, ValueError, "out", "q"),
    "out-between-q": ({"q": SHARED[:, :, :4], "out": SHARED[:, :, 2:6]}, ValueError, "out", "q"),
    # backend.
    "backend-unknown": ({"backend": "sm80"}, ValueError, "backend", "reference, got 'sm80'"),
    "backend-none": ({"backend": None}, TypeError, "backend", "None"),
    "backend-sm100-on-cpu": ({"backend": "sm100"}, UnsupportedProblem, "backend 'sm100'", "CUDA.*cpu"),
    "backend-sm90-on-cpu": ({"backend": "sm90"}, UnsupportedProblem, "backend 'sm90'", "CUDA.*cpu"),
}  # fmt: skip


def fail(*_arguments, **_options):
    raise AssertionError("a backend ran")


@pytest.mark.parametrize("changes, error, name, words", BAD.values(), ids=BAD.keys())
def test_raises_and_names_the_argument(changes, error, name, words, monkeypatch):
    monkeypatch.setattr(reference, "forward", fail)
    call = {"backend": "reference", **good(), **changes}
    if "out" not in changes:
        call["out"] = torch.full(
            (2, 5, 4, 64), 3.0, dtype=torch.float32 if changes.get("normalize") is False else torch.float16
        )
    with pytest.raises(error, match=rf"(?s)^{name}:? .*{words}"):
        attention(**call)
    if "out" not in changes:
        assert (call["out"] == 3.0).all()
    if "backend" not in changes:
        with pytest.raises(error, match=rf"(?s)^{name}:? .*{words}"):
            attention(**{**call, "backend": "sim", "out": changes.get("out")})


def test_memory_of_splits():
    """Splits whose results take more memory than any use of them needs are refused; as many as fit are not."""
    q = torch.empty(2, 2**14, 32, 128, dtype=torch.float16, device="meta")
    with pytest.raises(ValueError, match=r"^num_splits: 1024 splits .* need 549.8 GB .* at most 32 splits"):
        AttentionProblem.of(q, q, q, num_splits=1024, memory=False)
    assert AttentionProblem.of(q, q, q, num_splits=32, memory=False).num_splits == 32


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_of_codes(name, value):
    """A negative k_scale would turn the order of logits around."""
    q, k = torch.zeros(1, 1, 2, 64).half(), torch.zeros(1, 4, 2, 64).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=rf"{name}: values must be finite and at least 0, got \[1.0, "):
        attention(q, k, k, **{name: torch.tensor([1.0, value])}, backend="reference")


def test_good_arguments_pass():
    """So that each bad case fails for what it changes."""
    for changes in (
        {},
        PAGES,
        {
            "sink": torch.zeros(4),
            "bias": torch.zeros(2, 4, 5, 7),
            "kv_lengths": int32(0, 7),
            "q_start": int32(-9, 9),
        },
        {"out": half(2, 4, 5, 64).transpose(1, 2), "window": [3, None]},
        {"scale": 0, "window": (0, 0), "num_splits": 1},
        {"key_stride": 128, "causal": True},
    ):
        attention(**{**good(), **changes}, backend="reference")


def test_size_one_dimensions_may_have_any_stride():
    """A stride that is never stepped says nothing about alignment."""
    q = half(200).as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    attention(q, q, out=half(200).as_strided((1, 1, 1, 64), (3, 5, 7, 1)), backend="reference")


def test_empty_tensors_have_no_rows_to_align():
    q = half(2, 0, 4, 68)[..., :64]
    assert attention(q, half(2, 7, 2, 64), backend="reference").shape == (2, 0, 4, 64)


def test_unsupported_problem_is_a_value_error():
    assert issubclass(UnsupportedProblem, ValueError)


@pytest.mark.parametrize(
    "changes, words",
    [
        (PAGES, "page_size.*4"),
        ({"bias": torch.zeros(1, 1, 5, 14)[..., ::2]}, "bias"),
    ],
)
def test_what_the_sm100_kernel_does_not_do_is_named(changes, words):
    with pytest.raises(UnsupportedProblem, match=words):
        attention(**{**good(), **changes}, backend="sim")


def test_problem_is_hashable_and_derives_sizes():
    problem = AttentionProblem.of(**good(), causal=True, return_lse=True)
    assert hash(problem) == hash(AttentionProblem.of(**good(), causal=True, return_lse=True))
    sizes = (problem.batch, problem.seq_q, problem.seq_k, problem.heads_q, problem.heads_kv, problem.group)
    assert sizes == (2, 5, 7, 4, 2, 2)
    assert (problem.o_shape, problem.stat_shape, problem.stat_count) == ((2, 5, 4, 64), (2, 4, 5), 1)
    assert problem.logits.scale == 0.125 and not problem.requests.page_size and not problem.is_empty
    paged = AttentionProblem.of(**{**good(), **PAGES}, normalize=False, return_lse=True)
    assert (paged.seq_k, paged.requests.page_size, paged.stat_count, paged.o_dtype) == (
        8,
        4,
        2,
        torch.float32,
    )
    assert not paged.return_lse
