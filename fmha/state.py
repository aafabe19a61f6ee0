"""Un-normalised attention over a set of keys, and the exact combination of several such sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from warpspec.common.checks import check_floating, check_kind, check_tensor

FARTHEST = torch.finfo(torch.float32).max / 2  # of sinks; infinite ones count as this


class AttentionState(NamedTuple):
    """Attention over some set of keys before normalisation; all fp32.

    Over the keys that a row sees, with logit = scale * q.k + bias:

    o [B, Sq, Hq, D]: sum of exp(logit - row_max) * v;
    row_max [B, Hq, Sq]: largest logit, -inf for a row that sees no key;
    row_sum [B, Hq, Sq]: sum of exp(logit - row_max), 0 for a row that sees no key.

    For packed queries: o [T, Hq, D], row_max and row_sum [Hq, T]; rows that belong to no request are undefined.

    A kernel's row_max may be any reference that the sums were taken against, not only the largest logit: everything
    below holds unchanged.
    """

    o: torch.Tensor
    row_max: torch.Tensor
    row_sum: torch.Tensor

    @property
    def lse(self) -> torch.Tensor:
        """[B, Hq, Sq] (packed: [Hq, T]) fp32: ln(sum of exp(logit)), -inf for a row that sees no key."""
        empty = self.row_sum == 0
        return torch.where(empty, -torch.inf, torch.where(empty, 1.0, self.row_sum).log() + self.row_max)


def normalized_output(state: AttentionState, sink: torch.Tensor | None = None) -> torch.Tensor:
    """o of a state, fp32, divided by the row sum, to which the sink adds exp(sink - row_max).

    sink: [Hq] floating or None. A row that sees no key gives 0, with or without a sink.
    """
    empty = state.row_sum == 0
    row_sum = torch.where(empty, 1.0, state.row_sum)
    if sink is None:
        return torch.where(by_row(empty), 0.0, state.o / by_row(row_sum))
    sink = sink.float().clamp(max=FARTHEST)[:, None]
    row_max = torch.where(empty, 0.0, state.row_max)
    high = torch.maximum(row_max, sink)  # nothing overflows against it, in derivatives neither
    keys = torch.exp(row_max - high)
    row_sum = row_sum * keys + torch.exp(sink - high)
    return torch.where(by_row(empty), 0.0, state.o * by_row(keys) / by_row(row_sum))


def by_row(statistic: torch.Tensor) -> torch.Tensor:
    """[..., Sq, Hq, 1] of [..., Hq, Sq]: to go with o."""
    return statistic.transpose(-1, -2)[..., None]


def combine(states: Sequence[AttentionState]) -> AttentionState:
    """The state over the union of the states' (disjoint) key sets."""
    row_max = torch.stack([state.row_max for state in states]).amax(0)
    # Against a row maximum of -inf every weight would be NaN; against any finite number it is 0, as it should
    # be.
    base = torch.where(row_max == -torch.inf, 0.0, row_max)
    weights = [torch.exp(state.row_max - base) for state in states]  # [B, Hq, Sq]
    pairs = list(zip(states, weights, strict=True))
    o = sum(state.o * by_row(weight) for state, weight in pairs)
    row_sum = sum(state.row_sum * weight for state, weight in pairs)
    return AttentionState(o, row_max, row_sum)


def check_states(states, sink) -> None:
    """Raise TypeError or ValueError, naming the argument, unless ``merge`` can combine these."""
    if isinstance(states, AttentionState) or not isinstance(states, Sequence):
        raise TypeError(f"states: must be a sequence of AttentionState, got {type(states).__name__}")
    if len(states) == 0:
        raise ValueError("states: must hold at least one AttentionState, got none")
    for index, state in enumerate(states):
        if not isinstance(state, AttentionState):
            raise TypeError(f"states: must hold AttentionState, got {type(state).__name__} at index {index}")
        for field, tensor, first in zip(state._fields, state, states[0], strict=True):
            name = f"states: {field} of state {index}"
            check_kind(name, tensor, torch.Tensor)
            check_tensor(name, tensor, (torch.float32,), tuple(first.shape), states[0].o.device)
    o, row_max, row_sum = states[0]
    if (
        o.dim() not in (3, 4)
        or row_max.shape != (*o.shape[:-3], o.shape[-2], o.shape[-3])
        or row_sum.shape != row_max.shape
    ):
        raise ValueError(
            "states: shapes must be o [B, Sq, Hq, D], row_max and row_sum [B, Hq, Sq], or packed [T, Hq, D] and "
            f"[Hq, T], got {list(o.shape)}, {list(row_max.shape)}, {list(row_sum.shape)}"
        )
    if sink is None:
        return
    check_floating("sink", sink, (o.shape[-2],), o.device)
