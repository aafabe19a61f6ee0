"""Expert parallelism: the ranks of a group share the experts, and all-to-all moves tokens to them and results back.

A rank sorts its choices by the rank that owns their expert and sends each as a row: the token, followed by its expert's
number. The owner runs the layer on these rows, each with one expert and weight 1. The results return to where the
choices stand and are added up there in the order of choices, so a token's result has the same bits as on one GPU. Each
rank has the shared experts itself; their rows are not sent.

Without a capacity, only as many rows are sent as there are. The sizes of this uneven all-to-all must be known to the
host, which waits for them once a call. With a capacity, every rank has a fixed number of slots for each other rank, and
nothing waits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from warpspec.common.backend import resolve_backend
from warpspec.common.checks import check_int
from warpspec.common.hardware import VECTOR_BYTES
from warpspec.common.launch import Target, target_of
from warpspec.moe import reference
from warpspec.moe.experts import NVFP4Experts
from warpspec.moe.permute import DROPPED, UNSENT, SortedTokens, sort_tokens
from warpspec.moe.problem import LayerProblem, check_ids

TAIL = VECTOR_BYTES // 2  # elements after each sent row: its expert's number, int32, and padding
TAIL_WORDS = VECTOR_BYTES // 4


def check_group(group) -> None:
    """Raise TypeError unless group is a process group, and ValueError if this process is not in it."""
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
    if dist.get_rank(group) < 0:
        raise ValueError("group: this process is not one of its ranks")


def check_capacity(capacity, group) -> None:
    """Raise TypeError or ValueError unless capacity is None, or a positive int together with a group."""
    if capacity is None:
        return
    check_int("capacity", capacity, 1)
    if group is None:
        raise ValueError(f"capacity: needs a group, got {capacity} without one")


def owners(topk_ids: torch.Tensor, experts: int, ranks: int) -> torch.Tensor:
    """int32 [T, k]: the rank that owns each choice's expert, -1 for none."""
    there = (topk_ids >= 0) & (topk_ids < experts * ranks)
    return torch.where(there, topk_ids // experts, DROPPED).int()


def sort_by_owner(topk_ids, experts: int, ranks: int, target: Target | None) -> SortedTokens:
    """The choices sorted by owner; offsets: [ranks]. target: the target of a kernel; None: use torch operations."""
    if target is None or topk_ids.numel() == 0:
        return sort_tokens(owners(topk_ids, experts, ranks), ranks)
    from warpspec.moe.sort import sort_choices

    return sort_choices(topk_ids, ranks, each=experts, target=target)[0]


def pack_rows(
    x: torch.Tensor, topk_ids: torch.Tensor, found: SortedTokens, experts: int, capacity: int | None, target
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that a rank sends, and where its choices are among them.

    found: choices sorted by owner. Returns (sent, place). sent: bf16 [slots, H + TAIL], a token's row followed by its
    expert's number at the owner as an int32. place: int32 [T, k], each choice's slot; ``DROPPED`` without an expert.
    Without a capacity, slots are the sorted rows. With a capacity, each rank in turn has that many slots; unused slots
    have the expert ``DROPPED`` and an uninitialised row, and choices for which no slot is left are ``UNSENT``.
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
    """int32 [slots]: the expert's number after each sent row."""
    return sent.view(torch.int32)[:, -TAIL_WORDS]


def exchange(rows: torch.Tensor, got: torch.Tensor, send=None, receive=None, group=None) -> None:
    """Send ``rows`` to the ranks in turn; rows from the ranks arrive in ``got``, in the same order.

    send, receive: rows for each rank and from each rank, as lists; None: equally many for each.
    """
    # As bytes, because not every backend can send every dtype.
    dist.all_to_all_single(got.view(torch.uint8), rows.view(torch.uint8), receive, send, group=group)


def counts_of(offsets: torch.Tensor, group) -> tuple[list[int], list[int]]:
    """(rows to each rank, rows from each rank), after an exchange of counts. This is the one wait for the device."""
    send = torch.diff(offsets, prepend=offsets.new_zeros(1)).long()
    counts = torch.stack([send, torch.empty_like(send)])
    dist.all_to_all_single(counts[1], counts[0], group=group)
    send, receive = counts.tolist()
    return send, receive


@torch.no_grad()
def moe_ffn(
    x, experts: NVFP4Experts, topk_ids, topk_weights, group, run, *, capacity, check, backend
) -> torch.Tensor:
    """The layer over a group's experts. Collective: every rank of the group calls it, with its own tokens or none.

    experts: this rank's; all ranks have equally many, and ids name rank * experts + number. run(x, experts, ids,
    weights, check): the layer on this rank. Raises what the layer raises, before anything is sent. With ``check`` it
    also raises ValueError for choices without a slot, but only when results are back, so that no other rank hangs.
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
    # Shared experts are further choices of this rank's tokens; their rows follow those that were received.
    here = x.new_empty(coming + tokens * shared, hidden + TAIL)
    exchange(sent[:going], here[:coming], send, receive, group)
    if shared:
        every = torch.arange(own, own + shared, dtype=torch.int32, device=x.device)
        here[coming:, :hidden] = x.repeat_interleave(shared, dim=0)
        experts_of(here)[coming:] = every.repeat(tokens)
    ids = experts_of(here)[:, None]
    done = run(
        here[:, :hidden],
        replace(experts, shared=0),
        ids,
        torch.ones(ids.shape, dtype=torch.float32, device=x.device),
        False,
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
    """out [T, H]: the weighted sum of each token's rows, in the order of choices. Rows without a weight weigh 1.

    place: a row, or negative for none. ``UNSENT`` makes the token NaN; unsent: whether there may be any. target: the
    kernel's; None: use torch operations.
    """
    if target is None:
        ones = topk_weights.new_ones(len(place), place.shape[1] - topk_weights.shape[1])
        tokens = SortedTokens(place, place, place)  # the kernel reads only where choices stand
        out.copy_(reference.unpermute(rows, tokens, torch.cat([topk_weights, ones], dim=1)))
        return out.masked_fill_((place == UNSENT).any(1, keepdim=True), torch.nan)
    from warpspec.moe.unpermute import unpermute

    unpermute(rows, place, topk_weights.contiguous(), out, unsent=unsent, target=target)
    return out
