"""Lists of blocks: the definition against masks of elements, the kernels in the simulator, what is refused."""

from dataclasses import replace

import pytest
import torch
from helpers.block_cases import CASES, FlashLists, inputs_of
from helpers.gradient_cases import BLOCKS as GRADIENTS
from helpers.gradient_cases import KERNEL_TOLERANCE, REFERENCE_TOLERANCE
from helpers.judged_calls import check, run
from helpers.suites import long_but
from torch.nn.attention.flex_attention import create_block_mask

from warpspec import sim
from warpspec.fmha import BlockMask, UnsupportedProblem, attention
from warpspec.fmha.block_mask import OWN_PATTERNS, block_mask_of

SPILLED = 16  # bytes that ptxas keeps on the stack, once a tile: 8 at D 256 without lists, too
EVERY = [(case, arch) for case in CASES for arch in ("sm_90a", "sm_100a")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_definition(case):
    """The reference with lists is the reference with a bias of -inf at the hidden elements."""
    inputs, seen = inputs_of(case)
    bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    dense = {"causal": False, "window": None, "block_mask": None, "bias": bias}
    expected = run(case, inputs | dense, backend="reference")
    for got, wanted in zip(run(case, inputs, backend="reference"), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("case", "arch"), long_but(EVERY[:1], EVERY), ids=lambda v: getattr(v, "id", v))
def test_case(case, arch, simulate_as, check_order):
    simulate_as(arch, small=True, sm_count=2)
    inputs, _ = inputs_of(case)
    check(case, run(case, inputs, backend="sim"), inputs)
    assert all(found.local_bytes <= SPILLED for found in sim.last_report().launches)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_by_definition(name):
    case = GRADIENTS[name]
    tensors = case.tensors()
    case.check(case.gradients(tensors, backend="reference"), tensors, REFERENCE_TOLERANCE[case.dtype])


@pytest.mark.parametrize(
    ("name", "arch"), long_but([], [(name, arch) for name in GRADIENTS for arch in ("sm_90a", "sm_100a")])
)
def test_gradients(name, arch, simulate_gradients_as, check_order):
    simulate_gradients_as(arch)
    case = GRADIENTS[name]
    tensors = case.tensors()
    case.check(case.gradients(tensors, backend="reference"), tensors, KERNEL_TOLERANCE[case.dtype])


def test_twice_listed():
    """A block that is listed twice counts once; one in both lists is full."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, n, 1, 64, generator=generator).half() for n in (128, 256, 256))
    counts, first = torch.full((1, 1, 1), 2, dtype=torch.int32), torch.zeros(1, 1, 1, 2, dtype=torch.int32)
    twice = FlashLists(counts, first, counts, torch.tensor([1, 0], dtype=torch.int32).view(1, 1, 1, 2))
    expected = attention(q, k, v, backend="reference")
    assert torch.equal(attention(q, k, v, causal=True, block_mask=twice, backend="reference"), expected)


def test_prepared_and_converted_lists():
    """FlexAttention's masks are converted once; a mask of a prepared BlockMask is the same."""
    inputs, _ = inputs_of(CASES[0])
    q, k = inputs["q"], inputs["k"]
    found = block_mask_of(inputs["block_mask"], q, k)
    assert block_mask_of(inputs["block_mask"], q, k) is found
    assert block_mask_of(found, None, None) is found
    assert BlockMask.of(inputs["block_mask"], q.shape[1], k.shape[1]).patterns.shape == found.patterns.shape


def test_patterns_are_shared():
    """A causal mask has one pattern on its diagonal."""
    lists = create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, device="cpu")
    found = BlockMask.of(lists, 512, 512)
    assert found.patterns.shape == (OWN_PATTERNS + 1, 128, 4)
    assert found.kv_counts[0, 0].tolist() == [[1, 1], [1, 2], [1, 3], [1, 4]]
    assert found.q_counts[0, 0].tolist() == [[0, 3, 4], [1, 3, 3], [2, 3, 2], [3, 3, 1]]
    assert found.q_visits[0, 0, 2, 2:, 0].tolist() == [3, 2]


def test_what_is_refused():
    q, k = torch.zeros(2, 200, 2, 64).half(), torch.zeros(2, 300, 2, 64).half()
    counts, indices = torch.ones(1, 2, 2, dtype=torch.int32), torch.zeros(1, 2, 2, 3, dtype=torch.int32)
    lists = FlashLists(counts, indices, None, None)

    def refuse(error, match, block_mask=lists, q=q, k=k, backend="reference", **options):
        with pytest.raises(error, match=match):
            attention(q, k, block_mask=block_mask, backend=backend, **options)

    refuse(TypeError, "block_mask: must be a warpspec BlockMask, FlexAttention's .*, got", block_mask=counts)
    refuse(
        TypeError,
        "block_mask: mask_block_cnt: dtype must be torch.int32",
        lists._replace(mask_block_cnt=counts.long()),
    )
    refuse(
        TypeError,
        "block_mask: mask_block_idx must be a torch.Tensor, got",
        lists._replace(mask_block_idx=None),
    )
    refuse(
        ValueError,
        r"mask_block_idx: shape must be \[B or 1, Hq or 1, 2, N\]",
        lists._replace(mask_block_idx=counts),
    )
    refuse(
        ValueError, r"shape must be \[B or 1, Hq or 1, 2\]", lists._replace(mask_block_cnt=counts[..., :1])
    )
    refuse(
        ValueError,
        "full_block_cnt and full_block_idx must both be given",
        lists._replace(full_block_cnt=counts),
    )
    refuse(
        ValueError,
        "300 keys have 3 blocks of 128, got a list of 5",
        lists._replace(mask_block_idx=indices.repeat(1, 1, 1, 2)[..., :5]),
    )
    refuse(
        ValueError,
        r"block size must be two ints above 0, got \(0, 128\)",
        lists._replace(block_size=(0, 128)),
    )
    flex = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 300, device="cpu")
    refuse(ValueError, r"must be for \(200, 300\) queries and keys, got \(128, 300\)", flex)
    prepared = BlockMask.of(lists, 200, 300)
    refuse(ValueError, r"must be for \(200, 200\) queries and keys, got \(200, 300\)", prepared, k=k[:, :200])
    cut = replace(prepared, kv_visits=prepared.kv_visits[..., :1])
    refuse(
        ValueError, r"kv_visits: shape must be \[B=2 or 1, Hq=2 or 1, 2, 3, 2\], got \[1, 2, 2, 3, 1\]", cut
    )
    words = replace(prepared, patterns=torch.zeros(3, 128, 5, dtype=torch.int32))
    refuse(ValueError, r"patterns: shape must be \[n, 128, 4\], got \[3, 128, 5\]", words)
    two = replace(prepared, q_counts=prepared.q_counts.expand(2, 2, -1, -1))
    refuse(ValueError, "lists must all have the same batch rows and heads", two)
    refuse(
        ValueError,
        "block_mask: must be None with kv_lengths",
        kv_lengths=torch.full((2,), 300, dtype=torch.int32),
    )
    odd = FlashLists(
        torch.ones(1, 1, 2, dtype=torch.int32),
        torch.zeros(1, 1, 2, 4, dtype=torch.int32),
        None,
        None,
        (100, 80),
    )
    for backend in ("sim", "reference"):
        if backend == "sim":
            refuse(
                UnsupportedProblem,
                "block_mask: no tile fits blocks of 100 queries and 80 keys",
                odd,
                backend=backend,
            )
        else:
            attention(q, k, block_mask=odd, backend=backend)
