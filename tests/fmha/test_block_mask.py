"""Lists of blocks: the definition against masks of elements, the kernels in the simulator, what is refused."""

import itertools
from dataclasses import replace

import pytest
import torch
from helpers.attention_cases import O_TOLERANCE, relative_error
from helpers.block_cases import CASES, Case, FlashLists, inputs_of, mask_of, requests_of
from helpers.gradient_cases import BLOCKS as GRADIENTS
from helpers.gradient_cases import KERNEL_TOLERANCE, REFERENCE_TOLERANCE
from helpers.judged_calls import check, run
from helpers.simulate import plan_for
from helpers.suites import long_but
from torch.nn.attention.flex_attention import create_block_mask

from warpspec import sim
from warpspec.common.compile import resources
from warpspec.common.launch import simulated, simulating
from warpspec.fmha import BlockMask, UnsupportedProblem, attention, attention_varlen
from warpspec.fmha.block_mask import OWN_PATTERNS, Visits, block_mask_of, read_lists
from warpspec.fmha.lists import KERNELS, ListsConfig, convert

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


@pytest.mark.parametrize("arch", long_but(("sm_90a",), ("sm_90a", "sm_100a")))
@pytest.mark.parametrize(
    ("sizes", "width", "full"),
    [((640, 600), 4, True), ((4200, 300), 3, False), *long_but([], [((100, 9000), 71, True)])],
)
def test_kernels_convert_lists_as_torch_does(sizes, width, full, arch, check_order):
    """Blocks that are in both lists, or twice in one, entries past counts that are no blocks, lists with other batch
    rows and heads."""
    blocks, draw = [-(-size // 128) for size in sizes], torch.Generator().manual_seed(3)

    def drawn(batch, heads):
        place = torch.rand(batch, heads, blocks[0], blocks[1], generator=draw).argsort(-1)[..., :width]
        place[..., 1] = place[..., 0]
        counts = torch.randint(0, width + 1, place.shape[:-1], generator=draw)
        past = torch.arange(width) >= counts[..., None]
        return counts.int(), torch.where(past, (-1) ** place * 10**9, place).int()

    lists = FlashLists(*drawn(1, 2), *(drawn(3, 1) if full else (None, None)))
    wanted = BlockMask.of(lists, *sizes)
    found = convert(read_lists(lists)[:4], sizes, (128, 128), simulated(arch))
    names = ("kv_visits", "kv_counts", "q_visits", "q_counts", "kv_order")
    for name, tensor in zip(names, found, strict=True):
        assert torch.equal(tensor, getattr(wanted, name)), name
    for kernel in KERNELS:
        (one,) = resources(kernel.compiled(ListsConfig(full), simulated(arch).arch)).values()
        assert one.local_bytes == 0


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_by_definition(name):
    GRADIENTS[name].judge(REFERENCE_TOLERANCE, backend="reference")


@pytest.mark.parametrize(
    ("name", "arch"), long_but([], [(name, arch) for name in GRADIENTS for arch in ("sm_90a", "sm_100a")])
)
def test_gradients(name, arch, simulate_gradients_as, check_order):
    simulate_gradients_as(arch)
    GRADIENTS[name].judge(KERNEL_TOLERANCE, backend="reference")


@pytest.mark.parametrize("pages", [False, True], ids=["packed", "paged"])
@pytest.mark.parametrize(
    ("backend", "arch"), [("reference", "sm_90a"), *long_but([], [("sim", "sm_90a"), ("sim", "sm_100a")])]
)
def test_requests(backend, arch, pages, simulate_as, check_order):
    """Each request's own lists: keys end in a partial, in a full and between blocks; no keys, no queries; lists for
    fewer queries and keys than a request has. NaN at every key that does not exist or that nobody sees."""
    simulate_as(arch, small=True, sm_count=2)
    inputs = requests_of(pages, torch.Generator().manual_seed(3))
    got = [attention_varlen(**inputs.call, return_lse=True, backend=backend)]
    if backend == "sim":
        assert all(found.local_bytes <= SPILLED for found in sim.last_report().launches)
    if pages:  # the same requests, queries of one after another
        got.append(attention_varlen(**inputs.call, num_splits=2, return_lse=True, backend=backend))
    for o, lse in got:
        inputs.check(o, lse)


SIZES = [
    (64, 64),
    (96, 96),
    (192, 128),
    (128, 256),
    (256, 96),
    (256, 128),
    (256, 160),
    (256, 256),
    (512, None),
]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_head_size_has_tiles(arch):
    """Blocks of 128 queries and keys have a tile at every head size, for few and many queries, with a bias or not."""
    for (dim, dim_v), queries, has_bias in itertools.product(SIZES, (1, 300), (False, True)):
        bias = torch.zeros(1, 1, queries, 256) if has_bias else None
        q, k = torch.zeros(1, queries, 2, dim).half(), torch.zeros(1, 256, 1, dim).half()
        v = None if dim_v is None else torch.zeros(1, 256, 1, dim_v).half()
        indices = torch.zeros(1, 1, -(-queries // 128), 2, dtype=torch.int32)
        lists = BlockMask.of(FlashLists(indices[..., 0] + 1, indices, None, None), queries, 256)
        blocks = {"block_queries": 128, "block_keys": 128, **lists.operands}
        tile_n = plan_for(arch, q=q, k=k, v=v, bias=bias, **blocks).config.tile_n
        assert 128 % tile_n == 0, (dim, dim_v, queries, has_bias)


@pytest.mark.long
@pytest.mark.parametrize(("dim_v", "has_bias"), [(128, False), (256, True)])
def test_tiles_that_blocks_alone_get(dim_v, has_bias, check_order):
    """Head sizes whose usual tiles divide no block."""
    generator = torch.Generator().manual_seed(1)
    case = Case("", 150, 300, (2, 1), 256, flex=False, options=(("causal", True),))
    lists, _ = mask_of(case, generator)
    shapes = (150, 2, 256), (300, 1, 256), (300, 1, dim_v)
    q, k, v = (torch.randn(1, *shape, generator=generator).half() for shape in shapes)
    options = {"causal": True, "block_mask": lists}
    if has_bias:
        options["bias"] = torch.randn(1, 2, 150, 300, generator=generator)
    out = torch.full((1, 150, 2, dim_v), torch.nan, dtype=q.dtype)
    with simulating("sm_90a", sm_count=2):
        attention(q, k, v, **options, out=out, backend="sim")
    expected = attention(q, k, v, **options, backend="reference")
    assert relative_error(out, expected) <= O_TOLERANCE[q.dtype]


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
    assert found.q_counts[0, 0].tolist() == [[0, 3, 4, 0], [1, 3, 3, 1], [2, 3, 2, 2], [3, 3, 1, 3]]
    assert found.q_visits[0, 0, 2, 2:, 0].tolist() == [3, 2]


@pytest.mark.parametrize("queries", [640, 513])
def test_longest_lists_come_first(queries):
    """After a last block that is not whole. Each entry has its block's counts and first visit."""
    counts = torch.tensor([2, 1, 3, 0, 1], dtype=torch.int32).view(1, 1, 5)
    indices = torch.tensor([2, 0, 1], dtype=torch.int32).expand(1, 1, 5, 3)
    found = BlockMask.of(FlashLists(counts, indices, None, None), queries, 384)
    order = found.kv_order[0, 0]
    wanted = [2, 0, 1, 4, 3] if queries == 640 else [4, 2, 0, 1, 3]
    assert order[:, 0].tolist() == wanted
    assert torch.equal(order[:, 1:3], found.kv_counts[0, 0, wanted])
    assert torch.equal(order[:, 3:], found.kv_visits[0, 0, wanted, 0])


@pytest.mark.parametrize(("keys", "wanted"), [(512, [2, 0, 1, 3]), (500, [3, 2, 0, 1])])
def test_most_visited_keys_come_first_in_gradients(keys, wanted):
    """After a last block that is not whole."""
    counts = torch.tensor([2, 1, 3, 1], dtype=torch.int32).view(1, 1, 4)
    indices = torch.tensor([2, 0, 1], dtype=torch.int32).expand(1, 1, 4, 3)
    found = BlockMask.of(FlashLists(counts, indices, None, None), 512, keys).q_counts[0, 0]
    assert found[:, 2].tolist() == [2, 1, 4, 0] and found[:, 3].tolist() == wanted


def test_what_plans_know_of_lists():
    """Means and the maximum, in few digits; nothing of lists on a GPU, for which the host would wait."""
    counts = torch.tensor([2, 1, 37, 0], dtype=torch.int32).view(1, 1, 4)
    indices = torch.arange(40, dtype=torch.int32).expand(1, 1, 4, 40)
    lists = FlashLists(counts, indices, counts, indices + 1)
    found = BlockMask.of(lists._replace(full_block_idx=indices), 512, 5120)
    assert found.visited == Visits(10.0, 0.0, 36.0, 3.0)
    assert found.options["block_most"] == 36.0
    assert (
        BlockMask.of(lists._replace(full_block_cnt=None, full_block_idx=None), 512, 5120).visited[1] == 10.0
    )
    on_gpu = FlashLists(*(t.to("meta") for t in lists[:4]))
    assert BlockMask.of(on_gpu, 512, 5120).visited is None


COUNTS, ENTRIES, FIVE = (
    torch.ones(2, 2, 2).int(),
    torch.zeros(2, 2, 2, 3).int(),
    torch.zeros(2, 2, 2, 5).int(),
)
WRONG_LISTS = [
    ({"block_size": 128}, ValueError, "block size must be two ints above 0, got 128"),
    ({"block_size": (True, 128)}, ValueError, r"block size must be two ints above 0, got \(True, 128\)"),
    ({"block_size": (0, 128)}, ValueError, r"block size must be two ints above 0, got \(0, 128\)"),
    ({"mask_block_cnt": COUNTS.long()}, TypeError, "mask_block_cnt: dtype must be torch.int32"),
    ({"mask_block_idx": None}, TypeError, "mask_block_idx must be a torch.Tensor, got"),
    ({"mask_block_idx": COUNTS}, ValueError, r"mask_block_idx: shape must be \[B or 1, Hq or 1, 2, N\]"),
    (
        {"mask_block_cnt": COUNTS[..., :1]},
        ValueError,
        r"mask_block_cnt: shape must be \[B or 1, Hq or 1, 2\]",
    ),
    ({"full_block_idx": None}, ValueError, "full_block_cnt and full_block_idx must both be given"),
    ({"mask_block_idx": FIVE}, ValueError, "300 keys have 3 blocks of 128, got a list of 5"),
    (
        {"mask_block_cnt": COUNTS[:1].repeat(3, 1, 1)},
        ValueError,
        "the same batch rows, or 1, got {'mask_block_cnt': 3",
    ),
    ({"full_block_cnt": COUNTS.repeat(1, 2, 1)}, ValueError, "lists must all have the same heads, or 1, got"),
    (
        {"full_block_idx": ENTRIES.to("meta")},
        ValueError,
        "full_block_idx: must be on mask_block_cnt's device, cpu, got meta",
    ),
    (
        {"mask_block_cnt": COUNTS + 3},
        ValueError,
        r"mask_block_cnt: values must be 0..3, got 4 at \[0, 0, 0\]",
    ),
    ({"full_block_cnt": COUNTS - 2}, ValueError, "full_block_cnt: values must be 0..3, got -1"),
    ({"mask_block_idx": ENTRIES + 3}, ValueError, "mask_block_idx: values must be 0..2, got 3"),
]
WRONG_MASKS = [
    ({"block_size": None}, ValueError, "block size must be two ints above 0, got None"),
    ({"kv_visits": None}, TypeError, "kv_visits must be a torch.Tensor, got None"),
    ({"q_patterns": None}, ValueError, "patterns and q_patterns must both be given"),
    ({"patterns": torch.zeros(0, 128, 4).int()}, ValueError, "patterns: shape must be .n >= 2, 128, 4"),
    ({"q_patterns": torch.zeros(9, 128, 4).int()}, ValueError, "must be as many, got 3 and 9"),
]


@pytest.mark.parametrize(("changes", "error", "match"), WRONG_LISTS)
def test_lists_that_are_refused(changes, error, match):
    """Lists that do not fit each other, and entries that name no block."""
    lists = FlashLists(COUNTS, ENTRIES, COUNTS, ENTRIES)
    BlockMask.of(lists, 200, 300)
    with pytest.raises(error, match=f"block_mask: .*{match}"):
        BlockMask.of(lists._replace(**changes), 200, 300)


@pytest.mark.parametrize(("changes", "error", "match"), WRONG_MASKS)
def test_prepared_lists_that_are_refused(changes, error, match):
    """Nothing of a BlockMask can be left out, so that no list is ignored."""
    q = torch.zeros(1, 256, 1, 64).half()
    lists = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
    prepared = BlockMask.of(lists, 256, 256)
    with pytest.raises(error, match=f"block_mask: .*{match}"):
        attention(q, q, block_mask=replace(prepared, **changes), backend="reference")


@pytest.mark.parametrize("backend", ["reference", "sim"])
def test_lists_for_no_queries_or_keys(backend):
    """Requests that have some see nothing."""
    rows = torch.full((2, 70, 1, 64), torch.nan).half()
    ends = torch.tensor([0, 70], dtype=torch.int32)
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 70, "max_seqlen_k": 70}
    for queries, keys in ((70, 0), (0, 70), (0, 0)):
        counts = torch.zeros(1, 1, -(-queries // 128), dtype=torch.int32)
        indices = torch.zeros(*counts.shape, -(-keys // 128), dtype=torch.int32)
        mask = BlockMask.of(FlashLists(counts, indices, None, None), queries, keys)
        o, lse = attention_varlen(
            rows[0], rows[1], block_mask=mask, **packed, return_lse=True, backend=backend
        )
        assert not o.any() and (lse == -torch.inf).all()


def test_lists_for_fewer_keys_than_pages_hold():
    """With queries and without any."""
    k, lengths = torch.randn(4, 128, 1, 64).half(), torch.tensor([300], dtype=torch.int32)
    pages = torch.tensor([[2, 0, 1, 3]], dtype=torch.int32)
    for queries in (0, 9):
        counts = torch.ones(1, 1, -(-queries // 128), dtype=torch.int32)
        mask = BlockMask.of(FlashLists(counts, counts[..., None] * 0, None, None), queries, 128)
        q = torch.randn(1, queries, 1, 64).half()
        o = attention(q, k, block_mask=mask, page_table=pages, kv_lengths=lengths, backend="reference")
        expected = attention(q, k[2:3], backend="reference")
        torch.testing.assert_close(o, expected)


LISTS = FlashLists(COUNTS[:1], ENTRIES[:1], None, None)  # of 200 queries and 300 keys


def refused(error, match, lists, seq_q=200, seq_k=300, **options) -> None:
    """Assert that a call with these lists raises an error about them."""
    q, k = torch.zeros(2, seq_q, 2, 64).half(), torch.zeros(2, seq_k, 2, 64).half()
    with pytest.raises(error, match="block_mask: " + match):
        attention(q, k, block_mask=lists, **{"backend": "reference", **options})


def test_lists_of_another_kind_or_for_other_sizes():
    refused(TypeError, "must be a warpspec BlockMask, FlexAttention's .*, got", COUNTS)
    flex = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 300, device="cpu")
    refused(ValueError, r"must be for \(200, 300\) queries and keys, got \(128, 300\)", flex)
    prepared = BlockMask.of(LISTS, 200, 300)
    refused(ValueError, r"must be for \(200, 200\) queries and keys, got \(200, 300\)", prepared, seq_k=200)
    few = FlashLists(COUNTS[..., :1], ENTRIES[:, :, :1], None, None)
    tree = torch.ones(2, 60, dtype=torch.int64)
    refused(ValueError, "must be None with tree", few, seq_q=60, causal=True, tree=tree)


def test_prepared_lists_of_wrong_shapes():
    prepared = BlockMask.of(LISTS, 200, 300)
    cut = replace(prepared, kv_visits=prepared.kv_visits[..., :1])
    refused(
        ValueError, r"kv_visits: shape must be \[B=2 or 1, Hq=2 or 1, 2, 3, 2\], got \[1, 2, 2, 3, 1\]", cut
    )
    words = torch.zeros(3, 128, 4, dtype=torch.int32)
    wide = replace(prepared, patterns=words.repeat(1, 1, 2)[..., :5], q_patterns=words)
    refused(ValueError, r"patterns: shape must be \[n >= 2, 128, 4\], got \[3, 128, 5\]", wide)
    two = replace(prepared, q_counts=prepared.q_counts.expand(2, 2, -1, -1))
    refused(ValueError, "lists must all have the same batch rows and heads", two)


def test_packed_lists_without_sizes_or_with_gradients():
    ends = torch.tensor([0, 200], dtype=torch.int32)
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 200, "backend": "reference"}
    q = torch.zeros(200, 2, 64).half().requires_grad_()
    with pytest.raises(ValueError, match="need max_seqlen_q and max_seqlen_k, ints >= 0, got 200 and None"):
        attention_varlen(q, q, q, block_mask=LISTS, **packed)
    o = attention_varlen(q, q, q, block_mask=LISTS, max_seqlen_k=300, **packed)
    with pytest.raises(
        NotImplementedError, match="block_mask: gradients are not implemented with cu_seqlens_k"
    ):
        o.sum().backward()


def test_blocks_of_which_no_tile_is_part():
    counts, indices = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 4, dtype=torch.int32)
    odd = FlashLists(counts, indices, None, None, (100, 80))
    refused(UnsupportedProblem, "no tile fits blocks of 100 queries and 80 keys", odd, backend="sim")
    q, k = torch.zeros(2, 200, 2, 64).half(), torch.zeros(2, 300, 2, 64).half()
    attention(q, k, block_mask=odd, backend="reference")


def test_compiled_calls_serve_all_masks():
    """What plans know of a mask's lengths is no reason to compile a call anew."""
    graphs, tensors = [], [torch.randn(1, 256, 1, 64).half() for _ in "qkv"]
    torch._dynamo.reset()

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    call = torch.compile(
        lambda mask: attention(*tensors, block_mask=mask, backend="reference"), fullgraph=True, backend=count
    )
    indices = torch.tensor([0, 1], dtype=torch.int32).expand(1, 1, 2, 2)
    for counts in ((1, 2), (0, 1), (2, 2)):
        counts = torch.tensor(counts, dtype=torch.int32).view(1, 1, 2)
        mask = BlockMask.of(FlashLists(counts, indices, None, None), 256, 256)
        assert torch.equal(call(mask), attention(*tensors, block_mask=mask, backend="reference"))
    assert len(graphs) == 1
