"""Trees of drafts: which of a request's last keys a draft sees.

Speculative decoding verifies several continuations of a request at once. Its queries are drafts, the nodes of a tree;
the key of draft j is key q_start + j, after the prefix, the keys that all drafts see. A draft sees the prefix, the
drafts on the path from the root to itself, and itself. What it sees is a word of bits: bit j stands for draft j.

A draft's position is its depth in the tree, not its number: with n bits set, it stands at position q_start + n - 1, and
the n drafts that it sees at q_start, q_start + 1, ... in the order of their numbers (a path's numbers ascend). Windows
count from these positions. So every draft gets the result that its path alone would get under a causal mask.
"""

from __future__ import annotations

import torch

from warpspec.common.checks import check_tensor, shape_of

MOST_DRAFTS = 64  # bits of a word


def tree_words(mask: torch.Tensor) -> torch.Tensor:
    """Make ``attention``'s argument ``tree``, int64 [..., n], of a mask, bool [..., n, d].

    mask[..., i, j] says whether draft i sees draft j; d is at most 64. The host does not wait for the device, so a CUDA
    graph may capture the conversion. Raises TypeError or ValueError for a mask of another kind.
    """
    check_tensor("mask", mask, (torch.bool,))
    if mask.dim() < 2 or mask.shape[-1] > MOST_DRAFTS:
        raise ValueError(
            f"mask: shape must be [..., n, d] with d of at most {MOST_DRAFTS}, got {shape_of(mask)}"
        )
    bit = torch.arange(mask.shape[-1], device=mask.device)
    return (mask.long() << bit).sum(dim=-1)


def see_drafts(tree: torch.Tensor, left: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(depths, drafts that are seen) of rows, from their words: int64 [B, Sq] -> int64 [B, Sq], bool [B, Sq, 64].

    A row's depth is its position less q_start; left: reach of the window on that side, None: unbounded.
    """
    seen = (tree[..., None] >> torch.arange(MOST_DRAFTS, device=tree.device) & 1).bool()
    number = seen.cumsum(dim=-1) - 1  # positions of the drafts on the path, less q_start
    depth = seen.sum(dim=-1) - 1
    if left is not None:
        seen = seen & (number >= depth[..., None] - left)
    return depth, seen
