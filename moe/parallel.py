"""Expert parallelism: experts live on the ranks of a group; tokens travel to them and results back, by all-to-all.

A rank's choices, sorted by owner, go out as rows of tokens, each with its expert's number behind it; the owner runs the
layer on them, each row with its one expert and weight 1; its results come back to where the choices stand, and are
added up there in the order of choices. So a token's result has the bits that it has on one GPU. Shared experts are
every rank's own: their rows stay at home.

Without a capacity, as many rows travel as there are: sizes of an uneven all-to-all are numbers of the host, which waits
for them once a call. With one, every rank has so many slots for each of the others, and nothing waits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from warpspec.common.backend import resolve_backend
from warpspec.common.hardware import VECTOR_BYTES
from warpspec.common.launch import Target, target_of
from warpspec.moe import reference
from warpspec.moe.experts import NVFP4Experts
from warpspec.moe.permute import DROPPED, UNSENT, SortedTokens, sort_tokens
from warpspec.moe.problem import LayerProblem, check_ids

TAIL = VECTOR_BYTES // 2  # elements behind a row that is sent: its expert's number, int32, and nothing
TAIL_WORDS = VECTOR_BYTES // 4


def check_group(group) -> None:
    """Raise TypeError unless group is a process group, ValueError where this process is not in it."""
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
    if dist.get_rank(group) < 0:
        raise ValueError("group: this process is not one of its ranks")


def check_capacity(capacity, group) -> None:
    """Raise TypeError or ValueError unless capacity is None, or a positive int where there is a group."""
    if capacity is None:
        return
    if isinstance(capacity, bool) or not isinstance(capacity, int):
        raise TypeError(f"capacity: must be an int or None, got {capacity!r}")
    if capacity < 1:
        raise ValueError(f"capacity: must be positive, got {capacity}")
    if group is None:
        raise ValueError(f"capacity: needs a group, got {capacity} without one")


def owners(topk_ids: torch.Tensor, experts: int, ranks: int) -> torch.Tensor:
    """int32 [T, k]: the rank that has each choice's expert, -1 for none."""
    there = (topk_ids >= 0) & (topk_ids < experts * ranks)
    return torch.where(there, topk_ids // experts, DROPPED).int()


def sort_by_owner(topk_ids, experts: int, ranks: int, target: Target | None) -> SortedTokens:
    """The choices sorted by owner; offsets: [ranks]. target: of the kernel; None: in torch operations."""
    if target is None or topk_ids.numel() == 0:
        return sort_tokens(owners(topk_ids, experts, ranks), ranks)
    from warpspec.moe.sort import sort_choices

    return sort_choices(topk_ids, ranks, each=experts, target=target)[0]


def pack_rows(
    x: torch.Tensor, topk_ids: torch.Tensor, found: SortedTokens, experts: int, capacity: int | None, target
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank sends, and where its choices stand in it.

    found: sorted by owner. Returns (sent bf16 [slots, H + TAIL]: a token's row, and the number of its expert at the
    owner as an int32; place int32 [T, k]: each choice's slot, ``DROPPED`` of no expert). Without a capacity slots are
    the sorted rows; with one, each rank has so many in turn, of which those without a row have the expert ``DROPPED``
    and an unwritten row, and a choice for which none is left is ``UNSENT``.
    """
    ranks, count = len(found.offsets), topk_ids.numel()
    slots = count if capacity is None else ranks * capacity
    sent = x.new_empty(slots, x.shape[1] + TAIL)
    place = found.position if capacity is None else torch.empty_like(found.position)
    if count == 0:
        experts_of(sent).fill_(DROPPED)
        return sent, place
    if target is not None:
        from warpspec.moe.pack import pack

        pack(x, topk_ids, found, experts, sent, None if capacity is None else place, capacity or 0, target)
        return sent, place
    slot = torch.arange(slots, device=x.device)
    starts = torch.cat([found.offsets.new_zeros(1), found.offsets[:-1]])
    row, end = slot, found.offsets[-1]
    if capacity is not None:
        row, end = starts[slot // capacity] + slot % capacity, found.offsets[slot // capacity]
    choice = found.source[row.clamp(max=count - 1)].long()
    sent[:, :-TAIL] = x[choice // topk_ids.shape[1]]
    experts_of(sent).copy_(torch.where(row < end, topk_ids.reshape(-1)[choice] % experts, DROPPED))
    if capacity is not None:
        rank = owners(topk_ids, experts, ranks)
        index = found.position - starts[rank]
        there = torch.where(index < capacity, rank * capacity + index, UNSENT)
        place.copy_(torch.where(rank < 0, DROPPED, there))
    return sent, place


def experts_of(sent: torch.Tensor) -> torch.Tensor:
    """int32 [slots]: the experts' numbers behind rows that are sent."""
    return sent.view(torch.int32)[:, -TAIL_WORDS]


def exchange(rows: torch.Tensor, got: torch.Tensor, send=None, receive=None, group=None) -> None:
    """Rows go to the ranks in turn, those that come to ``got`` in their order: so many of each (lists), or as many of
    every one."""
    # As bytes: not every backend sends every dtype.
    dist.all_to_all_single(got.view(torch.uint8), rows.view(torch.uint8), receive, send, group=group)


def counts_of(offsets: torch.Tensor, group) -> tuple[list[int], list[int]]:
    """(rows to each rank, rows from each), which every rank says to the others; the one wait for the device."""
    send = torch.diff(offsets, prepend=offsets.new_zeros(1)).long()
    counts = torch.stack([send, torch.empty_like(send)])
    dist.all_to_all_single(counts[1], counts[0], group=group)
    send, receive = counts.tolist()
    return send, receive


@torch.no_grad()
def moe_ffn(
    x, experts: NVFP4Experts, topk_ids, topk_weights, group, run, *, capacity, check, backend
) -> torch.Tensor:
    """The layer over a group's experts; collective: every rank of the group calls it, with tokens of its own or none.

    experts: this rank's, as many as the others'; ids name rank * experts + number. run(x, experts, ids, weights,
    check): the layer on this rank. Raises what the layer does, before anything is sent; with ``check`` ValueError for
    choices that the capacity leaves no slot, when results are back, so that no other rank waits for this one.
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
    ranks, own, shared = dist.get_world_size(group), experts.experts, experts.shared
    if check:
        check_ids(topk_ids, own * ranks)
    target = None
    if backend != "reference":
        target = target_of(x.device, experts.layout)
    topk_ids = topk_ids.contiguous()
    tokens, hidden = x.shape
    found = sort_by_owner(topk_ids, own, ranks, target)
    sent, place = pack_rows(x, topk_ids, found, own, capacity, target)
    send = receive = None
    going = coming = len(sent)
    if capacity is None:
        send, receive = counts_of(found.offsets, group)
        going, coming = sum(send), sum(receive)
    # Shared experts as further choices of this rank's tokens, their rows behind those that came.
    here = x.new_empty(coming + tokens * shared, hidden + TAIL)
    exchange(sent[:going], here[:coming], send, receive, group)
    if shared:
        every = torch.arange(own, own + shared, dtype=torch.int32, device=x.device)
        here[coming:, :hidden] = x.repeat_interleave(shared, dim=0)
        experts_of(here)[coming:] = every.repeat(tokens)
    ids = experts_of(here)[:, None]
    done = run(
        here[:, :hidden], replace(experts, shared=0), ids, torch.ones(ids.shape, device=x.device), False
    )
    rows = x.new_empty(going + tokens * shared, hidden)
    exchange(done[:coming], rows[:going], receive, send, group)
    if shared:
        rows[going:] = done[coming:]
        behind = torch.arange(tokens * shared, dtype=torch.int32, device=x.device) + going
        place = torch.cat([place, behind.view(tokens, shared)], dim=1)
    out = add_up(rows, place, topk_weights, x.new_empty(x.shape), target, unsent=capacity is not None)
    if check and capacity is not None and (unsent := int((place == UNSENT).sum())):
        raise ValueError(
            f"capacity: must be the most choices that one rank has for another, got {capacity}, which leaves no slot "
            f"for {unsent}"
        )
    return out


def add_up(rows, place, topk_weights, out, target: Target | None, *, unsent: bool) -> torch.Tensor:
    """out [T, H]: the weighted sum of each token's rows, in the order of choices; those without a weight weigh 1.

    place: a row, or less than 0; ``UNSENT`` (unsent: there may be some) makes the token NaN. target: of the kernel;
    None: in torch operations.
    """
    if target is None:
        ones = topk_weights.new_ones(len(place), place.shape[1] - topk_weights.shape[1])
        tokens = SortedTokens(place, place, place)  # only where choices stand matters here
        out.copy_(reference.unpermute(rows, tokens, torch.cat([topk_weights, ones], dim=1)))
        return out.masked_fill_((place == UNSENT).any(1, keepdim=True), torch.nan)
    from warpspec.moe.unpermute import unpermute

    unpermute(rows, place, topk_weights.contiguous(), out, unsent=unsent, target=target)
    return out
