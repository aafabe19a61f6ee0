"""Partitions of unequal requests' keys from a queue, on the GPU of this machine."""

import pytest
import torch
from helpers.partition_cases import in_partitions, random_partitions
from helpers.simulate import choosing
from helpers.varlen_cases import Packed

from warpspec.fmha import attention_varlen
from warpspec.fmha.plan.cost import Way

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(300, 324))
def test_random_batches(seed):
    """Twice the same, to the bit, in the rows that belong to a request."""
    batch, splits = random_partitions(seed)
    used, results = sum(batch.seq_q), []
    with choosing(Way.PARTITIONS, in_partitions, splits=splits):
        for _ in range(2):
            result = attention_varlen(
                **batch.arguments("cuda"), out=batch.poisoned_out("cuda"), return_lse=batch.normalize
            )
            batch.check(result)
            results.append((result[0][:used].nan_to_num(), result[1][:, :used]))
    assert all(map(torch.equal, *results))


def test_a_graph_serves_other_lengths():
    """Captured with some lengths, replayed with others in the same tensors: the longest, and so the partitions,
    change."""
    batch = Packed(
        "decode", seq_q=(1,) * 70, seq_k=tuple(137 * i % 3000 for i in range(70)), heads_q=16, heads_kv=4, head_dim=128,
        page_size=16,
    )  # fmt: skip
    arguments = batch.arguments("cuda")
    out = torch.full_like(arguments["q"], torch.nan)
    with choosing(Way.PARTITIONS, in_partitions, splits=9):
        attention_varlen(**arguments, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attention_varlen(**arguments, out=out)
    lengths = arguments["kv_lengths"]
    for now in (
        lengths.clone(),
        lengths // 7,
        torch.minimum(lengths, lengths.new_tensor(1)),
        torch.zeros_like(lengths),
    ):
        lengths.copy_(now)
        out.fill_(torch.nan)
        graph.replay()
        expected = attention_varlen(**arguments, backend="reference")
        torch.testing.assert_close(out[:70].float(), expected[:70].float(), rtol=2e-2, atol=2e-2)
