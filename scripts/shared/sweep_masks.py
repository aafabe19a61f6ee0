"""Masks that sweeps give as lists of blocks: for FlexAttention (mask_mod in torch), for flash-attn-4 (in CuTe DSL), and
their size. A mask has a name and a number."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from warpspec.fmha.block_mask import Visits

BLOCK = 128  # queries and keys of a block
ROWS = 32
SINKS = 4  # first tokens that every query of a window sees


def documents(number: int, length: int, device) -> Callable:
    """Causal within documents whose lengths are drawn evenly up to twice the mean, ``number``."""
    generator, own = torch.Generator().manual_seed(number), torch.zeros(length, dtype=torch.int32)
    begin, document = 0, 0
    while begin < length:
        own[begin:] = document
        begin += int(torch.randint(1, 2 * number, (1,), generator=generator))
        document += 1
    own = own.to(device)
    return lambda b, h, q, k: (q >= k) & (own[q] == own[k])


def equal(number: int, length: int, device) -> Callable:
    """Causal within documents of ``number`` tokens."""
    return lambda b, h, q, k: (q >= k) & (q // number == k // number)


def sliding(number: int, length: int, device) -> Callable:
    """A causal window, and the first tokens."""
    return lambda b, h, q, k: (q >= k) & ((q - k < number) | (k < SINKS))


def dilated(number: int, length: int, device) -> Callable:
    """Causal, of every ``number``-th block from the query's own on."""
    return lambda b, h, q, k: (q >= k) & ((q // BLOCK - k // BLOCK) % number == 0)


def blocks(number: int, length: int, device) -> Callable:
    """Whole blocks drawn at random, the diagonal among them. number: the seed, which also says how many."""
    generator, count = torch.Generator().manual_seed(number), -(-length // BLOCK)
    table = torch.rand(count, count, generator=generator) < 1 / (2 + number % 7)
    table = (table | torch.eye(count, dtype=torch.bool)).to(device)
    return lambda b, h, q, k: table[q // BLOCK, k // BLOCK]


WHOLE = blocks.__name__  # the mask all of whose blocks are full
MASKS = {function.__name__: function for function in (documents, equal, sliding, dilated, blocks)}


def in_torch(mask: tuple[str, int], length: int, device) -> Callable:
    """The mask_mod of FlexAttention."""
    return MASKS[mask[0]](mask[1], length, device)


@lru_cache(maxsize=256)
def pairs_of(mask: tuple[str, int], length: int) -> int:
    """Pairs of a query and a key that sees it, of as many queries as keys; counted in one query of every ROWS."""
    seen, q = in_torch(mask, length, "cpu"), torch.arange(ROWS // 2, max(length, ROWS), ROWS)
    q = q.clamp(max=length - 1)[:, None]
    return int(seen(0, 0, q, torch.arange(length)[None]).sum()) * length // len(q)


@lru_cache(maxsize=256)
def visits_of(mask: tuple[str, int], length: int) -> Visits:
    """What lists of a mask of as many queries and keys tell plans, without making them, which takes seconds. Of each
    block the corners and the first key behind SINKS are looked at: by these, MASKS see some of a block, or all."""
    with unset_fake_temporarily():
        last = torch.arange(BLOCK - 1, length - 1 + BLOCK, BLOCK)
        ends = last.clamp(max=length - 1)
        q, k = (
            torch.stack([last - BLOCK + 1, ends]),
            torch.stack([last - BLOCK + 1, last - BLOCK + 1 + SINKS, ends]),
        )
        seen = in_torch(mask, length, "cpu")(
            0, 0, q[:, None, :, None], k.clamp(max=length - 1)[None, :, None]
        )
        some, whole = seen.flatten(0, 1).any(0), seen.flatten(0, 1).all(0)
        whole &= (last < length)[:, None] & (last < length)  # what is missing counts as hidden
        return Visits.of(torch.stack([(some & ~whole).sum(1), some.sum(1)], 1), some.sum(0))


def compiles(mask: tuple[str, int]) -> bool:
    """Whether flash-attn-4 is timed under a mask: it needs no table of its own."""
    return mask[0] != "documents"


def in_cute(mask: tuple[str, int]) -> Callable | None:
    """The mask as a function that flash-attn-4 compiles; None if all of its blocks are full. The function says by what
    flash-attn-4 finds its kernel on disk, because a hash of its closure differs from process to process."""
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute.utils import scalar_to_ssa

    name, number = mask

    def constant(value):
        return scalar_to_ssa(value, cutlass.Int32)

    @cute.jit
    def equal(batch, head, q, k, seqlen_info, aux_tensors):
        return (k <= q) & (q // constant(number) == k // constant(number))

    @cute.jit
    def sliding(batch, head, q, k, seqlen_info, aux_tensors):
        return (k <= q) & ((q < k + constant(number)) | (k < constant(SINKS)))

    @cute.jit
    def dilated(batch, head, q, k, seqlen_info, aux_tensors):  # of the blocks that are listed
        return k <= q

    found = {"equal": equal, "sliding": sliding, "dilated": dilated}.get(name)
    if found is not None:
        found.__cute_hash__ = f"warpspec {name} {number}"
    return found
