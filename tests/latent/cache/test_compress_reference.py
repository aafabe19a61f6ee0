"""The reference of ``compress``: the definition, and the same bits however tokens are divided into calls."""

import pytest
import torch
from helpers.cache_cases import Compressor, Run, expected_entries, grow

from warpspec.latent.cache.reference import fold, hadamard_transform, rms_norm

CASES = [("csa", 4, 512), ("csa", 4, 128), ("hca", 8, 512)]


@pytest.mark.parametrize(("kind", "stride", "dim"), CASES)
def test_definition(kind, stride, dim):
    """Entries are those computed from all tokens at once, in fp64."""
    compressor = Compressor.random(kind, 2, 43, stride=stride, dim=dim)
    run = grow(Run.start(compressor, "bf16"), 43, "prefill", backend="reference")
    for request in range(2):
        got = run.entries(request).view(torch.bfloat16).float()
        rows = rms_norm(expected_entries(compressor, request, 43).bfloat16(), compressor.weight, 1e-6).float()
        angles = (torch.arange(len(rows)) * stride)[:, None] * 1e4 ** (-torch.arange(32) / 32)
        pairs = torch.view_as_complex(rows[:, -64:].reshape(-1, 32, 2)) * torch.polar(torch.ones(()), angles)
        wanted = torch.cat((rows[:, :-64], torch.view_as_real(pairs).flatten(1)), dim=1)
        assert len(got) == 43 // stride
        assert (got - wanted).norm() < 2e-3 * wanted.norm()


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("kind", "stride", "dim"), CASES)
def test_calls_do_not_matter(kind, stride, dim, drafts):
    compressor = Compressor.random(kind, 3, 50, stride=stride, dim=dim)
    ways = ["prefill", "chunked", "tokens", *(["speculative"] if drafts else [])]
    name = "v4-fp8" if dim == 512 else "mxfp4"
    runs = [grow(Run.start(compressor, name, drafts), 50, way, backend="reference", seed=5) for way in ways]
    for request in range(3):
        first = runs[0].entries(request)
        assert len(first) == 50 // stride
        for run in runs[1:]:
            assert torch.equal(run.entries(request), first)


def test_fold_of_gates_that_are_not_there():
    """-inf has no weight, first or later; NaN stays."""
    state = torch.tensor([[-torch.inf], [0.0], [0.0]])
    for content, gate in ((7.0, -torch.inf), (3.0, 1.0), (9.0, -torch.inf), (5.0, 1.0)):
        state = fold(state, torch.tensor([[content], [gate]]))
    assert state.flatten().tolist() == [1.0, 2.0, 8.0]
    assert fold(state, torch.tensor([[1.0], [torch.nan]]))[1:].isnan().all()


def test_hadamard_is_a_rotation():
    rows = torch.randn(3, 128)
    matrix = hadamard_transform(torch.eye(128))
    assert torch.allclose(matrix @ matrix.T, torch.eye(128), atol=1e-5) and matrix[1, :4].sign().tolist() == [
        1,
        -1,
        1,
        -1,
    ]
    assert torch.allclose(hadamard_transform(rows), rows @ matrix, atol=1e-5)
