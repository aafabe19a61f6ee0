"""Trees of drafts by the reference: each draft gets what its path alone would get; what is refused."""

import pytest
import torch
from helpers.tree_cases import SHAPES, path_by_path, random_tree

from warpspec.fmha import attention, attention_varlen, tree_words


@pytest.mark.parametrize("window", [None, (20, 0), (2, None), (0, 0)])
def test_every_draft_sees_its_path(window):
    """Prefixes of several lengths; windows that end in the prefix and among the drafts."""
    generator = torch.Generator().manual_seed(5)
    for drafts, prefix in SHAPES:
        mask = random_tree(drafts, generator)
        q = torch.randn(drafts, 2, 64, generator=generator).half()
        k, v = torch.randn(2, prefix + drafts, 1, 64, generator=generator).half()
        o, lse = attention(
            q[None], k[None], v[None], causal=True, window=window, tree=tree_words(mask)[None], return_lse=True,
            backend="reference",
        )  # fmt: skip
        expected, expected_lse = path_by_path(q, k, v, mask, prefix, window=window)
        torch.testing.assert_close(o[0], expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(lse[0], expected_lse, rtol=1e-5, atol=1e-5)


def test_a_chain_is_causal_attention():
    generator = torch.Generator().manual_seed(6)
    q = torch.randn(2, 20, 2, 64, generator=generator).half()
    k = torch.randn(2, 90, 1, 64, generator=generator).half()
    words = tree_words(torch.ones(20, 20, dtype=torch.bool).tril()).expand(2, 20)
    options = dict(
        causal=True, window=(30, 0), kv_lengths=torch.tensor([90, 45], dtype=torch.int32), backend="reference"
    )
    assert torch.equal(attention(q, k, tree=words, **options), attention(q, k, **options))


def test_words():
    mask = torch.zeros(3, 64, dtype=torch.bool)
    mask[0, 0] = mask[1, 63] = True
    mask[2] = True
    assert tree_words(mask).tolist() == [1, -(2**63), -1]
    with pytest.raises(ValueError, match=r"mask: shape must be .* at most 64, got \[2, 65\]"):
        tree_words(torch.zeros(2, 65, dtype=torch.bool))
    with pytest.raises(TypeError, match="mask: dtype must be"):
        tree_words(torch.zeros(2, 2))


def test_what_is_refused():
    q, k = torch.zeros(1, 3, 1, 64).half(), torch.zeros(1, 9, 1, 64).half()
    tree = torch.zeros(1, 3, dtype=torch.int64)

    def refuse(error, match, q=q, **options):
        with pytest.raises(error, match=match):
            attention(q, k, **{"tree": tree, "causal": True, "backend": "reference", **options})

    refuse(TypeError, "tree: dtype must be", tree=tree.int())
    refuse(ValueError, r"tree: shape must be \[B, Sq\] = \[1, 3\], got \[3, 1\]", tree=tree.T)
    refuse(ValueError, "tree: needs causal=True and key_stride 1, got causal=False", causal=False)
    refuse(ValueError, "tree: needs causal=True and key_stride 1, got .*key_stride=2", key_stride=2)
    many = torch.zeros(1, 65, 1, 64).half()
    refuse(
        ValueError, "tree: a request may have at most 64 queries, got 65", q=many, tree=tree.new_zeros(1, 65)
    )
    refuse(NotImplementedError, "tree: gradients are not implemented", q=q.clone().requires_grad_())
    starts = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"tree: shape must be \[T\] = \[3\], got \[1, 3\]"):
        attention_varlen(
            q[0],
            k[0],
            None,
            starts,
            max_seqlen_q=3,
            cu_seqlens_k=starts * 3,
            causal=True,
            tree=tree,
            backend="reference",
        )
