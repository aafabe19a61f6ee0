"""Expert parallelism: experts live on the ranks of a group; tokens travel to them and results back, by all-to-all.

A rank's choices, sorted by owner, go out as rows of tokens; the owner runs the layer on them, each row with its one
expert and weight 1; its results come back to where the choices stand, and are added up there in the order of choices.
So a token's result has the bits that it has on one GPU. Sizes of an uneven all-to-all are numbers of the host, which
waits for them once a call. Shared experts are every rank's own: their rows stay at home.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from warpspec.common.backend import resolve_backend
from warpspec.moe import reference
from warpspec.moe.experts import NVFP4Experts
from warpspec.moe.permute import DROPPED, SortedTokens, sort_tokens
from warpspec.moe.problem import LayerProblem, check_ids


def check_group(group) -> None:
    """Raise TypeError unless group is a process group, ValueError where this process is not in it."""
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
    if dist.get_rank(group) < 0:
        raise ValueError("group: this process is not one of its ranks")


def owners(topk_ids: torch.Tensor, experts: int, ranks: int) -> torch.Tensor:
    """int32 [T, k]: the rank that has each choice's expert, -1 for none."""
    there = (topk_ids >= 0) & (topk_ids < experts * ranks)
    return torch.where(there, topk_ids // experts, DROPPED).int()


def exchange(rows: torch.Tensor, send: list[int], receive: list[int], group) -> torch.Tensor:
    """Rows [sum(send), ...] go to the ranks in turn; the rows that come, [sum(receive), ...], in their order."""
    got = rows.new_empty(sum(receive), *rows.shape[1:])
    # As bytes: not every backend sends every dtype.
    sent, came = (t.view(torch.uint8) if t.dim() > 1 else t for t in (rows, got))
    dist.all_to_all_single(came, sent, receive, send, group=group)
    return got


@torch.no_grad()
def moe_ffn(x, experts: NVFP4Experts, topk_ids, topk_weights, group, run, *, check, backend) -> torch.Tensor:
    """The layer over a group's experts; collective: every rank of the group calls it, with tokens of its own or none.

    experts: this rank's, as many as the others'; ids name rank * experts + number. run(x, experts, ids, weights,
    check): the layer on this rank. Raises what the layer does, before anything is sent.
    """
    check_group(group)
    weights = experts.w13, experts.w2, experts.intermediate_scale
    LayerProblem.check(
        *(x, topk_ids, topk_weights, *weights),
        shared=experts.shared,
        activation="swiglu",
        limit=None,
        values=False,
    )
    backend = resolve_backend(backend, x.device)
    if check:
        check_ids(topk_ids, experts.experts * dist.get_world_size(group))
    ranks, own = dist.get_world_size(group), experts.experts
    tokens, choices = topk_ids.shape
    found = sort_tokens(owners(topk_ids, own, ranks), ranks)
    ends = found.offsets
    send = torch.diff(ends, prepend=ends.new_zeros(1)).long()
    counts = torch.stack([send, torch.empty_like(send)])
    dist.all_to_all_single(counts[1], counts[0], group=group)
    send, receive = counts.tolist()  # the one wait for the device
    source = found.source[: sum(send)].long()
    here = exchange(x[source // max(1, choices)].contiguous(), send, receive, group)
    ids = exchange((topk_ids.reshape(-1)[source] % own).contiguous(), send, receive, group)
    # Shared experts as further choices of this rank's tokens, their rows behind those that came.
    every = torch.arange(own, own + experts.shared, dtype=torch.int32, device=x.device)
    ids = torch.cat([ids, every.repeat(tokens)])[:, None]
    here = torch.cat([here, x.repeat_interleave(experts.shared, dim=0)])
    done = run(here, replace(experts, shared=0), ids, torch.ones(ids.shape, device=x.device), False)
    back = exchange(done[: sum(receive)].contiguous(), receive, send, group)
    rows = torch.cat([back, done[sum(receive) :]])
    position = found.position
    if experts.shared:
        behind = torch.arange(tokens * experts.shared, dtype=torch.int32, device=x.device) + len(back)
        position = torch.cat([position, behind.view(tokens, experts.shared)], dim=1)
    return add_up(rows, position, topk_weights, x.new_empty(x.shape), backend)


def add_up(rows, position, topk_weights, out, backend: str) -> torch.Tensor:
    """out [T, H]: the weighted sum of each token's rows, in the order of choices; those without a weight weigh 1."""
    if backend == "reference":
        ones = topk_weights.new_ones(len(position), position.shape[1] - topk_weights.shape[1])
        tokens = SortedTokens(position, position, position)  # only where choices stand matters here
        return out.copy_(reference.unpermute(rows, tokens, torch.cat([topk_weights, ones], dim=1)))
    from warpspec.moe.unpermute import unpermute

    unpermute(rows, position, topk_weights.contiguous(), out)
    return out
