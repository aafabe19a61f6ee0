"""The sort kernel, for both architectures, in the simulator: bit for bit what torch's stable sort gives."""

import pytest
import torch
from helpers.moe_cases import randn

from warpspec.common.launch import SIMULATED
from warpspec.moe import streamed
from warpspec.moe.permute import head_rows, sort_tokens
from warpspec.moe.sm90.layer import list_work
from warpspec.moe.sort import CLUSTER, FEW, FEW_CHOICES, SortShape, choose_sort, sort_choices


@pytest.mark.parametrize(
    ("arch", "tokens", "choices", "experts", "shared", "widths", "shape"),
    [
        ("sm_90a", 1, 1, 1, 0, (8,), None),
        ("sm_90a", 9, 3, 5, 0, (4,), SortShape(4, ctas=2)),
        ("sm_100a", 40, 6, 200, 2, (8,), SortShape(4, ctas=4)),
        ("sm_90a", 300, 4, 33, 1, (16, 12, 4), SortShape(8, ctas=1)),  # several batches a warp
        ("sm_100a", 5, 0, 3, 3, (8,), SortShape(2, ctas=1)),  # shared experts alone
        pytest.param("sm_90a", 2600, 6, 256, 0, (144, 128, 112, 96, 80), CLUSTER, marks=pytest.mark.long),
        pytest.param("sm_100a", 1300, 8, 513, 1, (8,), CLUSTER, marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("check_order")
def test_as_torch_sorts(arch, tokens, choices, experts, shared, widths, shape):
    generator = torch.Generator().manual_seed(tokens)
    routed = experts - shared
    ids = torch.randint(-2, routed + 1, (tokens, choices), generator=generator, dtype=torch.int32)
    ids[: 2 * tokens // 3, : choices // 2] = 0  # one expert has most
    x = randn(tokens, 80).bfloat16()
    got, work, activations, report = sort_choices(
        ids, experts, shared=shared, widths=widths, x=x, shape=shape, target=SIMULATED[arch]
    )
    every = torch.arange(routed, experts, dtype=torch.int32).expand(tokens, -1)
    wanted = sort_tokens(torch.cat([torch.where((ids >= 0) & (ids < routed), ids, -1), every], 1), experts)
    for name in ("source", "position", "offsets"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
    entries, start = [], 0
    for expert, end in enumerate(wanted.offsets.tolist()):
        for first in range(start, end, widths[0]):
            entries.append([expert, first, min(widths[0], end - first)])
        start = end

    def number(entry):
        return max(i for i, width in enumerate(widths) if width >= entry[2])

    entries.sort(key=number)
    ends = [sum(number(entry) <= i for entry in entries) for i in range(len(widths))]
    heads = head_rows(widths)
    for list_ in (work, list_work(wanted.offsets, widths, wanted.source.numel())):
        assert list_[:heads].flatten()[: len(widths)].tolist() == ends
        assert list_[heads : heads + len(entries), :3].tolist() == entries
    assert torch.equal(activations, streamed.reorder(x))
    assert all(launch.local_bytes == 0 for launch in report.launches)


def test_chosen():
    assert [choose_sort(n) for n in (FEW_CHOICES, FEW_CHOICES + 1)] == [FEW, CLUSTER]
