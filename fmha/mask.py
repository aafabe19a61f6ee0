"""The keys that a query row may see.

The keys that a row sees are one interval, whatever the combination of causality, window, compressed keys and KV length.
The mask is therefore two integers per row: kernels compare a key's index with them, and tile loops clip to them. The
exception is a tree of drafts (``tree``), where one bit each decides over up to 64 keys after the interval.
"""

from __future__ import annotations

import torch

from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.tree import MOST_DRAFTS, see_drafts


def key_range(position, length, *, causal, left=None, right=None, key_stride=1, minimum=min, maximum=max):
    """Interval [first, end) of the keys that the row at ``position`` sees; empty where end <= first.

    position: p, the row's place among the keys (negative for rows before the first key); length: L, keys of
    the batch row. Both ints, int32 tensors or DSL Int32 values, with their ``minimum`` and ``maximum``.
    causal, left, right, key_stride: compile-time; None on a side leaves it unbounded. Key j stands for
    positions j * key_stride to (j + 1) * key_stride - 1, and a causal row sees it once the last of them is
    not after p.
    """
    first, end = 0, length
    if causal:
        # (j + 1) * key_stride - 1 <= p. Where p < -1 a quotient rounded to zero is 0, a floor negative: both
        # mean no key.
        end = minimum(end, position + 1 if key_stride == 1 else (position + 1) // key_stride)
    if right is not None:
        end = minimum(end, position + right + 1)
    if left is not None:
        first = maximum(0, position - left)
    return first, end


def widened(first, end, range_first, range_last, length, *, minimum=min, maximum=max, select):
    """Interval [first, end) of the keys of a row that also sees the existing keys of range_first to range_last; -1 for
    both means no range.

    An image contains its own queries' keys, so the range meets the row's interval and the union is one interval.
    Otherwise the row also sees the keys between the two. select(condition, yes, no) chooses a value. The other
    arguments are those of ``key_range``.
    """
    end = maximum(end, minimum(range_last + 1, length))
    return select(range_first < 0, first, minimum(first, range_first)), end


def position_range(key, *, causal, left=None, right=None, key_stride=1, maximum=max):
    """Interval [first, end) of the positions whose rows see ``key``, if the key exists: ``key_range`` from the other
    side. None: unbounded on that side. Arguments as for ``key_range``; both bounds grow with the key."""
    first = end = None
    if causal:
        first = (key + 1) * key_stride - 1
    if right is not None:
        first = key - right if first is None else maximum(first, key - right)
    if left is not None:
        end = key + left + 1
    return first, end


def intervals(problem: AttentionProblem, position, length, ranges=None) -> tuple[torch.Tensor, torch.Tensor]:
    """(first, end) of the keys that rows see: ``key_range``, ``widened`` by their ranges, for tensors.

    position, length: integer tensors that broadcast to the rows. ranges: [..., 2] of the rows, or None.
    """
    first, end = key_range(
        position,
        length,
        causal=problem.mask.causal,
        left=problem.window_left,
        right=problem.window_right,
        key_stride=problem.mask.key_stride,
        minimum=torch.minimum,
        maximum=lambda lowest, value: value.clamp(min=lowest),
    )
    first, end = (
        torch.as_tensor(bound, device=position.device).expand(position.shape) for bound in (first, end)
    )
    if ranges is None:
        return first, end
    functions = {"minimum": torch.minimum, "maximum": torch.maximum, "select": torch.where}
    return widened(first, end, *ranges.long().unbind(-1), length, **functions)


def visible(problem: AttentionProblem, kv_lengths=None, q_start=None, tree=None, ranges=None) -> torch.Tensor:
    """Visibility of every key to every row, from structure alone (a bias of -inf hides keys besides).

    kv_lengths, q_start: int32 [B] or None, tree: int64 [B, Sq] or None, ranges: int32 [B, Sq, 2] or None, as given to
    ``attention``. Returns bool [B, Sq, Sk].
    """
    device = problem.device
    if kv_lengths is None:
        length = torch.full((problem.batch,), problem.seq_k, device=device)
    else:
        length = kv_lengths.long().clamp(0, problem.seq_k)  # as kernels do with unchecked values
    start = length - problem.seq_q if q_start is None else q_start.long()
    drafts = None
    if tree is None:
        position = start[:, None] + torch.arange(problem.seq_q, device=device)  # [B, Sq]
    else:
        depth, drafts = see_drafts(tree, problem.window_left)
        position = start[:, None] + depth
    first, end = intervals(problem, position, length[:, None], ranges)
    key = torch.arange(problem.seq_k, device=device)
    seen = ((key >= first[..., None]) & (key < end[..., None])).expand(
        problem.batch, problem.seq_q, problem.seq_k
    )
    if drafts is None:
        return seen
    number = (key - start[:, None])[:, None].expand(seen.shape)  # of the draft whose key it is
    on_path = drafts.gather(-1, number.clamp(0, MOST_DRAFTS - 1))
    on_path = on_path & (number < MOST_DRAFTS) & (key < length[:, None, None])
    return torch.where(number < 0, seen, on_path)
