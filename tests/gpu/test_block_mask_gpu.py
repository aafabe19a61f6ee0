"""Lists of blocks on the GPU of this machine: the simulator's cases, random ones, a graph."""

import random as python_random

import pytest
import torch
from helpers.block_cases import (
    CASES,
    EVEN,
    LONGEST,
    SPARSE,
    Case,
    FlashLists,
    inputs_of,
    moved_inputs,
    requests_of,
)
from helpers.gpu_tensors import moved
from helpers.gradient_cases import BLOCKS, KERNEL_TOLERANCE
from helpers.gradient_cases import Case as Gradients
from helpers.judged_calls import check, run

from warpspec.fmha import BlockMask, attention, attention_varlen

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case):
    inputs, _ = inputs_of(case)
    check(case, run(case, moved_inputs(inputs)), inputs)


@pytest.mark.parametrize("seed", range(24))
def test_random_case(seed):
    draw = python_random.Random(seed)
    kv, flex, batch = draw.choice((1, 2)), draw.random() < 0.5, draw.choice((1, 2))
    group = draw.choice((1, 2, 3, 4))
    causal = not flex and draw.random() < 0.6
    options = {
        "causal": causal,
        "window": draw.choice((None, (draw.randint(0, 300), 0))) if causal else None,
        "softcap": draw.choice((None, None, 8.0)),
        "sink": draw.choice((None, torch.randn(group * kv))),
        "num_splits": draw.choice((None, None, 1, 4)),
    }
    case = Case(
        f"random-{seed}",
        draw.choice((1, 100, draw.randint(1, 1500))),
        draw.choice((130, draw.randint(1, 1500))),
        (group * kv, kv),
        draw.choice((64, 72, 128, 128, 256)),
        batch,
        (draw.choice((1, batch)), draw.choice((1, group * kv))),
        flex,
        draw.choice(((0.4, 0.3, 0.3), (0.9, 0.05, 0.05), (0.0, 0.5, 0.5), (0.2, 0.8, 0.0))),
        dtype=draw.choice((torch.bfloat16, torch.float16)),
        options=tuple(options.items()),
    )
    inputs, _ = inputs_of(case, seed)
    check(case, run(case, moved_inputs(inputs)), inputs)


@pytest.mark.parametrize("pages", [False, True], ids=["packed", "paged"])
@pytest.mark.parametrize("splits", [None, 3])
def test_requests(pages, splits):
    inputs = requests_of(pages, torch.Generator().manual_seed(17))
    lists = BlockMask.of(inputs.call["block_mask"], *LONGEST)
    call = moved(inputs.call | {"block_mask": lists})
    inputs.check(*attention_varlen(**call, num_splits=splits, return_lse=True))


@pytest.mark.parametrize("name", BLOCKS)
def test_gradients(name):
    case = BLOCKS[name]
    tensors = case.tensors("cuda")
    case.check(case.gradients(tensors), tensors, KERNEL_TOLERANCE[case.dtype])


@pytest.mark.parametrize("seed", range(20))
def test_random_gradients(seed):
    draw = python_random.Random(seed)
    heads, group, batch = draw.choice((1, 2)), draw.choice((1, 2, 4)), draw.choice((1, 2))
    flex, sizes = (
        draw.random() < 0.5,
        [draw.choice((draw.randint(1, 128), draw.randint(1, 700))) for _ in "qk"],
    )
    causal = not flex and draw.random() < 0.7
    case = Gradients(
        f"random-{seed}",
        batch=batch,
        seq_q=sizes[0],
        seq_k=sizes[1],
        heads_q=heads * group,
        heads_kv=heads,
        head_dim=draw.choice((64, 128, 128, 256)),
        dtype=draw.choice((torch.bfloat16, torch.float16)),
        causal=causal,
        window=(draw.randint(0, 200), 0) if causal and draw.random() < 0.5 else None,
        softcap=draw.choice((None, None, 5.0)),
        sink=draw.random() < 0.3,
        through=draw.choice(("o", "o+lse")),
        deterministic=draw.random() < 0.4,
        bias=draw.choice((None, None, (True, False))),
        blocks=(
            flex,
            (draw.choice((1, batch)), draw.choice((1, heads * group))),
            draw.choice((EVEN, SPARSE, (0.0, 0.5, 0.5))),
        ),
    )
    tensors = case.tensors("cuda")
    case.check(case.gradients(tensors), tensors, KERNEL_TOLERANCE[case.dtype])


def test_a_graph_serves_other_lists():
    """Lists are read on the device: a graph serves what they come to hold."""
    case = Case("graph", 300, 600, (4, 2), 128, flex=False)
    inputs, _ = inputs_of(case)
    inputs["k"], inputs["v"] = (t.nan_to_num(0.0, 0.0, 0.0) for t in (inputs["k"], inputs["v"]))
    on_device = moved_inputs(inputs)
    attention(**on_device)
    out = torch.full_like(on_device["q"], torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention(**on_device, out=out)
    others, _ = inputs_of(case, seed=5)
    inputs["block_mask"] = others["block_mask"]
    for name, tensor in moved_inputs(inputs)["block_mask"].operands.items():
        if tensor is not None:
            getattr(on_device["block_mask"], name).copy_(tensor)
    out.fill_(torch.nan)
    graph.replay()
    expected = attention(**inputs, backend="reference")
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("sizes", [(640, 600), (100, 9000), (16384, 16384)])
@pytest.mark.parametrize("shared", [False, True])
def test_lists_are_converted_on_the_gpu(sizes, shared):
    """By kernels as by torch on a CPU, whether or not partial and full blocks have the same batch rows and heads; and
    again in a graph, for other lists."""
    rows, blocks = (-(-size // 128) for size in sizes)

    def drawn(batch, heads):
        counts = torch.randint(0, blocks + 1, (batch, heads, rows)).int()
        return counts, torch.rand(batch, heads, rows, blocks).argsort(-1).int()

    first, second = (FlashLists(*drawn(1, 2), *drawn(*((1, 2) if shared else (3, 1)))) for _ in range(2))
    given = FlashLists(*[t.cuda() for t in first[:4]])
    graph = torch.cuda.CUDAGraph()
    compare(BlockMask.of(given, *sizes), BlockMask.of(first, *sizes))
    with torch.cuda.graph(graph):
        found = BlockMask.of(given, *sizes)
    for tensor, other in zip(given[:4], second[:4], strict=True):
        tensor.copy_(other)
    graph.replay()
    compare(found, BlockMask.of(second, *sizes))


def compare(found: BlockMask, wanted: BlockMask) -> None:
    for name, tensor in wanted.operands.items():
        assert (tensor is None) == (getattr(found, name) is None), name
        assert tensor is None or torch.equal(getattr(found, name).cpu(), tensor), name
