"""route against plain Python, one token at a time."""

import math

import pytest
import torch

from warpspec.moe import route


def score(logits, scoring):
    if scoring == "softmax":
        top = max(logits)
        parts = [math.exp(x - top) for x in logits]
        return [p / sum(parts) for p in parts]
    if scoring == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in logits]
    return [math.sqrt(math.log1p(math.exp(x))) for x in logits]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_by_definition(scoring, biased, normalize):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(40, 12, generator=generator)
    bias = torch.randn(12, generator=generator) if biased else None
    ids, weights = route(logits, 5, scoring=scoring, bias=bias, normalize=normalize, scale=1.5)
    assert (ids.dtype, weights.dtype, ids.shape) == (torch.int32, torch.float32, (40, 5))
    differs = 0
    for row, chosen, given in zip(logits.tolist(), ids.tolist(), weights.tolist(), strict=True):
        scores = score(row, scoring)
        steered = [s + (bias[e].item() if biased else 0) for e, s in enumerate(scores)]
        expected = sorted(range(12), key=lambda e: -steered[e])[:5]
        differs += expected != sorted(range(12), key=lambda e: -scores[e])[:5]
        assert chosen == expected
        total = sum(scores[e] for e in expected) if normalize else 1
        assert given == pytest.approx([1.5 * scores[e] / total for e in expected], rel=1e-5)
    assert bool(differs) == biased


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_ties_go_to_the_lower_index(scoring):
    logits = torch.zeros(3, 300)
    logits[1, 100:] = 1
    logits[2, ::2] = -1
    ids, _ = route(logits, 4, scoring=scoring)
    assert ids.tolist() == [[0, 1, 2, 3], [100, 101, 102, 103], [1, 3, 5, 7]]
    ids, _ = route(-logits, 2, scoring=scoring, bias=torch.full((300,), 2.0))
    assert ids.tolist() == [[0, 1], [0, 1], [0, 2]]


def test_extremes():
    logits = torch.tensor([[-2e4, -1e4, -3e4], [1e4, 1e4, -1e4]])
    ids, weights = route(logits.bfloat16(), 2)
    assert ids.tolist() == [[1, 0], [0, 1]] and weights.tolist() == [[1, 0], [0.5, 0.5]]
    _, weights = route(logits, 2, scoring="sigmoid")  # first token: every score is 0
    assert weights.tolist() == [[0, 0], [0.5, 0.5]]
    assert route(torch.zeros(0, 4), 2)[0].shape == (0, 2)


@pytest.mark.parametrize(
    ("error", "match", "change"),
    [
        (TypeError, r"^logits", dict(logits=torch.zeros(2, 4).int())),
        (ValueError, r"^logits", dict(logits=torch.zeros(4))),
        (TypeError, r"^k", dict(k=2.0)),
        (ValueError, r"^k", dict(k=5)),
        (ValueError, r"^k", dict(k=0)),
        (ValueError, r"^scoring", dict(scoring="relu")),
        (TypeError, r"^bias", dict(bias=torch.zeros(4).int())),
        (ValueError, r"^bias", dict(bias=torch.zeros(3))),
        (ValueError, r"^scale", dict(scale=math.inf)),
        (TypeError, r"^scale", dict(scale="1")),
    ],
)
def test_bad_input(error, match, change):
    with pytest.raises(error, match=match):
        route(**{"logits": torch.zeros(2, 4), "k": 2, **change})
