"""Lists of blocks (block sparsity): which blocks of keys the queries of a block see.

Queries and keys are divided into blocks of a fixed size. For each block of queries a ``BlockMask`` lists the blocks of
keys that it visits: first *partial* blocks, of which a query sees some keys, then *full* blocks, of which it sees all.
Gradients use these lists from the side of the keys.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from warpspec.common.checks import kind_of, shape_of
from warpspec.fmha.lists import COUNT, convert, target_for
from warpspec.fmha.values import are_checked

BLOCK = 128  # queries and keys of a block where lists do not say
WORD_BITS = 32
ALL, TO_END = 0, 1  # patterns of full blocks: every key, every key before the last one's end
OWN_PATTERNS = 2  # patterns before those of partial blocks
VISIT_BITS = 4  # binary digits of ``Visits``
AT_A_TIME = 256  # blocks of which mask_mod is evaluated together
# Fields of flash-attn-4's and FlexAttention's lists: counts and indices of partial blocks, then of full ones.
FLASH_ATTN = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")
# Tensors of a ``BlockMask``: lists of batch rows and heads, their order, and patterns.
LISTS = ("kv_visits", "kv_counts", "q_visits", "q_counts")
TENSORS = (*LISTS, "kv_order", "patterns", "q_patterns")
FLEX = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


class Visits(NamedTuple):
    """Blocks of keys that a block of queries visits: the mean, how many of these need a mask, and the most; and the
    most blocks of queries that visit a block of keys.

    Plans look at them (``fmha.plan``). Numbers are ``coarse``, so that masks with about equal lists share a plan.
    """

    mean: float
    masked: float
    most: float
    visitors: float

    @classmethod
    def of(cls, kv_counts: torch.Tensor, visitors: torch.Tensor) -> Visits | None:
        """The visits of kv_counts (``BlockMask``); None without batch rows. visitors: how many blocks of queries visit
        each block of keys. Waits for the device."""
        if kv_counts.numel() == 0:
            return None
        masked, every = kv_counts.double().flatten(0, -2).unbind(-1)
        numbers = (every.mean(), masked.mean(), every.max(), visitors.double().max())
        return cls(*map(coarse, torch.stack(numbers).tolist()))


def coarse(number: float) -> float:
    """A number of at least 0 rounded to VISIT_BITS binary digits."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(math.ldexp(mantissa, VISIT_BITS)), exponent - VISIT_BITS)


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Lists of blocks in the form that kernels read. ``BlockMask.of`` converts other libraries' lists.

    block_size: (queries, keys) of a block. lengths: (Sq, Sk). kv_visits [B or 1, Hq or 1, M, N, 2] int32, with M and N
    at least 1: the blocks of keys that each of the M blocks of queries visits, as (block, rule), partial ones first.
    kv_counts [.., M, 2] int32: partial blocks, and all. q_visits [.., N, M, 3]: where block m of queries visits block n
    of keys, (the next block of queries that visits it, after the last the first, rule, how many blocks of keys before n
    are visited by m). q_counts [.., N, 4]: the first and the last block of queries that visits a block of keys, and how
    many do; and in row n the block of keys that is the n-th to begin in gradients, where those with the most visitors
    come first; a last block that is not whole is always the first. patterns [n, block queries, words] int32: patterns
    of bits, bit i % 32 of word i // 32 for a block's key i; q_patterns [n, block keys, words]: the same with a row for
    each key. None: partial blocks are cut by the call's causal, window and ranges alone.

    kv_order [.., M, 5] int32: the order in which tiles of queries begin, those with the longest lists first: (block of
    queries, its two counts, the two numbers of its list's first visit), as in kv_counts and kv_visits. A last block
    that is not whole is always the first. None: tiles begin with those of the last block. Kernels take counts from
    here, so a change of kv_visits or kv_counts in place needs one of kv_order. visited: what the host knows of lists'
    lengths, by which it plans; None: nothing.

    A rule is the number of a partial block's pattern (0 without patterns). That of a full block, of which rows see
    every key that exists, is negative: ~rule is the number of its pattern.

    Make one by ``of``. A call checks the shapes of a ``BlockMask``, not its values: a kernel follows counts, blocks and
    rules made by hand wherever they point.

    Raises TypeError or ValueError that names block_mask: for lists that are no tensors, a block size that is no pair of
    positive integers, or patterns without q_patterns.
    """

    block_size: tuple[int, int]
    lengths: tuple[int, int]
    kv_visits: torch.Tensor
    kv_counts: torch.Tensor
    q_visits: torch.Tensor
    q_counts: torch.Tensor
    patterns: torch.Tensor | None = None
    q_patterns: torch.Tensor | None = None
    kv_order: torch.Tensor | None = None
    visited: Visits | None = None

    def __post_init__(self):
        check_size(self.block_size)
        for name in LISTS:
            if not isinstance(getattr(self, name), torch.Tensor):
                raise TypeError(
                    f"block_mask: {name} must be a torch.Tensor, got {kind_of(getattr(self, name))}"
                )
        if (self.patterns is None) != (self.q_patterns is None):
            raise ValueError("block_mask: patterns and q_patterns must both be given, or neither")

    @property
    def operands(self) -> dict[str, torch.Tensor | None]:
        """The tensors, by name."""
        return {name: getattr(self, name) for name in TENSORS}

    @property
    def options(self) -> dict[str, int | float | None]:
        """The numbers, by the names of a call's options; without ``visited`` while torch.compile traces, which would
        compile anew for each mask's."""
        queries, keys = self.block_size
        known = None if torch.compiler.is_compiling() else self.visited
        mean, masked, most, visitors = known or (None,) * 4
        return {
            "block_queries": queries,
            "block_keys": keys,
            "block_visits": mean,
            "block_masked": masked,
            "block_most": most,
            "block_visitors": visitors,
        }

    def to(self, device: torch.device | str) -> BlockMask:
        """Copy the lists to another device. Raises what ``torch.Tensor.to`` raises."""
        tensors = {name: None if t is None else t.to(device) for name, t in self.operands.items()}
        return replace(self, **tensors)

    @classmethod
    def of(cls, lists: Any, seq_q: int, seq_k: int) -> BlockMask:
        """Convert lists for Sq queries and Sk keys.

        lists: FlexAttention's ``BlockMask``, whose mask_mod says which keys of partial blocks a query sees; it is
        evaluated here once, for the batch rows and heads that the lists have, and the host waits for the device. Or
        flash-attn-4's ``BlockSparseTensorsTorch``, or any object with its fields mask_block_cnt [B or 1, Hq or 1, M],
        mask_block_idx [.., M, N or fewer], full_block_cnt and full_block_idx or None, int32, and block_size (queries,
        keys) or None for (128, 128); the host does not wait. Entries past a count may hold anything. A block that is
        listed twice counts once, in both lists as a full one.

        Raises TypeError or ValueError that names block_mask.
        """
        found = read_lists(lists)
        check_lists(found, seq_q, seq_k)
        target = None if found.mask_mod else target_for(found[:4], seq_k, found.block_size[1])
        if target is not None:
            kv_visits, kv_counts, *q, order = convert(found[:4], (seq_q, seq_k), found.block_size, target)
            visited = Visits.of(kv_counts, q[1][..., COUNT]) if are_checked(kv_counts.device) else None
            return cls(
                found.block_size, (seq_q, seq_k), kv_visits, kv_counts, *q, kv_order=order, visited=visited
            )
        columns = -(-seq_k // found.block_size[1])
        partial = listed(found.counts, found.indices, columns)
        full = torch.zeros_like(partial)
        if found.full_counts is not None:
            full = listed(found.full_counts, found.full_indices, columns)
            partial, full = torch.broadcast_tensors(partial & ~full, full)
        rule = torch.where(full, ~ALL, 0)
        patterns, q_patterns, cut = None, None, torch.zeros_like(full)
        if seq_k % found.block_size[1]:  # the last keys of the last block do not exist: masked, though full
            cut[..., -1] = full[..., -1]
        if found.mask_mod is not None and partial.any():  # without patterns, full blocks take fewer reads
            patterns, numbers = patterns_of(found, partial, (seq_q, seq_k))
            q_patterns = pack(unpack(patterns, found.block_size[1]).transpose(1, 2))
            rule[partial] = numbers
            rule[cut] = ~TO_END
        masked = partial | cut
        kv = visits(masked, full & ~cut, rule)
        q = visitors(partial | full, rule, whole=seq_k % found.block_size[1] == 0)
        order = order_of(*kv, whole=seq_q % found.block_size[0] == 0)
        waits = found.mask_mod is not None or are_checked(found.counts.device)
        visited = Visits.of(kv[1], q[1][..., COUNT]) if waits else None
        return cls(found.block_size, (seq_q, seq_k), *kv, *q, patterns, q_patterns, order, visited)


class Lists(NamedTuple):
    """Another library's lists. counts [B or 1, H or 1, M], indices [.., M, N or fewer] int32: partial blocks;
    full_counts, full_indices: full ones, or None. names: names of these four. mask_mod: FlexAttention's, or None."""

    counts: torch.Tensor
    indices: torch.Tensor
    full_counts: torch.Tensor | None
    full_indices: torch.Tensor | None
    names: tuple[str, ...]
    block_size: tuple[int, int]
    mask_mod: Callable | None = None
    lengths: tuple[int, int] | None = None


def read_lists(lists: Any) -> Lists:
    """The fields of an object of either library."""
    if all(hasattr(lists, name) for name in FLEX):
        values = (getattr(lists, name) for name in FLEX)
        return Lists(*values, FLEX, tuple(lists.BLOCK_SIZE), lists.mask_mod, tuple(lists.seq_lengths))
    if all(hasattr(lists, name) for name in FLASH_ATTN):
        values = (getattr(lists, name) for name in FLASH_ATTN)
        size = getattr(lists, "block_size", None)
        check_size((BLOCK, BLOCK) if size is None else size)
        return Lists(*values, FLASH_ATTN, (BLOCK, BLOCK) if size is None else tuple(size))
    raise TypeError(
        "block_mask: must be a warpspec BlockMask, FlexAttention's BlockMask or flash-attn's BlockSparseTensorsTorch, "
        f"got {kind_of(lists)}"
    )


def check_size(size: Any) -> None:
    """Raise ValueError for what is no block size."""
    if not (
        isinstance(size, (tuple, list)) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    ):
        raise ValueError(f"block_mask: block size must be two ints above 0, got {size!r}")


def check_lists(lists: Lists, seq_q: int, seq_k: int) -> None:
    """Raise TypeError or ValueError, naming block_mask, for lists that do not fit this many queries and keys."""
    size = lists.block_size
    check_size(size)
    if lists.lengths not in (None, (seq_q, seq_k)):
        raise ValueError(f"block_mask: must be for {(seq_q, seq_k)} queries and keys, got {lists.lengths}")
    if (lists.full_counts is None) != (lists.full_indices is None):
        raise ValueError(f"block_mask: {lists.names[2]} and {lists.names[3]} must both be given, or neither")
    rows, columns = -(-seq_q // size[0]), -(-seq_k // size[1])
    for at in (0, 2):
        counts, indices = lists[at : at + 2]
        if counts is None and at:
            continue
        for name, tensor, dims in ((lists.names[at], counts, 3), (lists.names[at + 1], indices, 4)):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"block_mask: {name} must be a torch.Tensor, got {kind_of(tensor)}")
            if tensor.dtype != torch.int32:
                raise TypeError(f"block_mask: {name}: dtype must be torch.int32, got {tensor.dtype}")
            if tensor.dim() != dims or tensor.shape[2] != rows:
                wanted = f"[B or 1, Hq or 1, {rows}{', N' if dims == 4 else ''}]"
                raise ValueError(f"block_mask: {name}: shape must be {wanted}, got {shape_of(tensor)}")
        if indices.shape[3] > columns and lists.mask_mod is None:
            raise ValueError(
                f"block_mask: {lists.names[at + 1]}: {seq_k} keys have {columns} blocks of {size[1]}, "
                f"got a list of {indices.shape[3]}"
            )
    given = [(name, t) for name, t in zip(lists.names, lists[:4], strict=True) if t is not None]
    first, tensor = given[0]
    for name, other in given[1:]:
        if other.device != tensor.device:
            raise ValueError(
                f"block_mask: {name}: must be on {first}'s device, {tensor.device}, got {other.device}"
            )
    for dim, what in enumerate(("batch rows", "heads")):
        found = {name: t.shape[dim] for name, t in given}
        if len(set(found.values()) - {1}) > 1:
            raise ValueError(f"block_mask: lists must all have the same {what}, or 1, got {found}")
    if lists.mask_mod is None and are_checked(tensor.device):
        for (name, counts), (listed_in, indices) in zip(given[::2], given[1::2], strict=True):
            check_entries(name, counts, listed_in, indices, columns)


def check_entries(
    name: str, counts: torch.Tensor, listed_in: str, indices: torch.Tensor, blocks: int
) -> None:
    """Raise ValueError for a count that its list is too short for, and for an entry before it that is no block's
    number. name, listed_in: of counts and indices. Waits for the device."""
    width = indices.shape[3]
    wrong = (counts < 0) | (counts > width)
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"block_mask: {name}: values must be 0..{width}, got {int(counts[tuple(place)])} at {place}"
        )
    wrong = (torch.arange(width, device=indices.device) < counts[..., None]) & (
        (indices < 0) | (indices >= blocks)
    )
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        value = int(indices.expand(wrong.shape)[tuple(place)])
        raise ValueError(f"block_mask: {listed_in}: values must be 0..{blocks - 1}, got {value} at {place}")


def listed(counts: torch.Tensor, indices: torch.Tensor, blocks: int) -> torch.Tensor:
    """bool [B or 1, H or 1, M, blocks]: which blocks a list has. M and blocks are at least 1, so that kernels that look
    at a list past the last one find one."""
    valid = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    valid = valid & (indices >= 0) & (indices < blocks)
    found = torch.zeros(*valid.shape[:-1], blocks + 1, dtype=torch.bool, device=indices.device)
    found = found.scatter_(-1, torch.where(valid, indices, blocks).long(), True)[..., :blocks]
    return torch.nn.functional.pad(found, (0, int(blocks == 0), 0, int(found.shape[-2] == 0)))


def visits(masked: torch.Tensor, full: torch.Tensor, rule: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(visits, counts) of ``BlockMask`` from [.., rows, blocks]: blocks that need a mask, those that do not."""
    kind = torch.where(masked, 0, torch.where(full, 1, 2)).to(torch.uint8)
    order = kind.argsort(dim=-1, stable=True)
    counts = torch.stack([masked.sum(dim=-1), (masked | full).sum(dim=-1)], dim=-1)
    return torch.stack([order, rule.gather(-1, order)], dim=-1).int(), counts.int()


def order_of(visits: torch.Tensor, counts: torch.Tensor, whole: bool) -> torch.Tensor:
    """kv_order of ``BlockMask``. visits, counts: kv_visits, kv_counts. whole: whether the last block of queries is."""
    block = longest_first(counts[..., 1], whole)[..., None]
    found = (t.gather(-2, block.expand(*block.shape[:-1], 2)) for t in (counts, visits[..., 0, :]))
    return torch.cat([block, *found], dim=-1).int()


def visitors(visited: torch.Tensor, rule: torch.Tensor, whole: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(q_visits, q_counts) of ``BlockMask`` from [.., M, N]. whole: whether the last block of keys is."""
    rank = visited.int().cumsum(dim=-1) - visited.int()
    by_key, rows = visited.transpose(-2, -1), visited.shape[-2]
    row = torch.arange(rows, device=visited.device)
    places = torch.where(by_key, row, rows)
    first, last = places.amin(dim=-1), torch.where(by_key, row, -1).amax(dim=-1)
    after = places.roll(-1, dims=-1)
    after[..., -1:] = rows
    after = after.flip(-1).cummin(dim=-1).values.flip(-1)  # the smallest of the later ones
    after = torch.where(after == rows, first[..., None], after)
    visits = torch.stack([after, rule.transpose(-2, -1), rank.transpose(-2, -1)], dim=-1)
    counts = by_key.sum(dim=-1)
    order = longest_first(counts, whole)
    return visits.int(), torch.stack([first, last, counts, order], dim=-1).int()


def longest_first(lengths: torch.Tensor, whole: bool) -> torch.Tensor:
    """Indices that sort lengths [.., n], the most first; the last one before all others if it is not whole."""
    if not whole:
        lengths = lengths.clone()
        lengths[..., -1:] = torch.iinfo(lengths.dtype).max
    return lengths.argsort(dim=-1, descending=True, stable=True)


def patterns_of(
    lists: Lists, partial: torch.Tensor, lengths: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(patterns, number of each partial block's pattern in the order of ``partial.nonzero()``)."""
    rows, columns = lists.block_size
    key = torch.arange(columns, device=partial.device)
    own = [torch.ones_like(key, dtype=torch.bool), key < (lengths[1] - 1) % columns + 1]
    own = pack(torch.stack(own)[:, None].expand(-1, rows, -1))
    places = partial.nonzero()
    words = torch.cat([pack(evaluate(lists, some, lengths)) for some in places.split(AT_A_TIME)])
    first, numbers = alike(words)
    return torch.cat([own, words[first]]), numbers + OWN_PATTERNS


def evaluate(lists: Lists, places: torch.Tensor, lengths: tuple[int, int]) -> torch.Tensor:
    """bool [n, block queries, block keys]: mask_mod in the blocks at ``places`` [n, 4]; False past the lengths."""
    batch, head, row, column = places.unbind(-1)
    q, k = (
        number[:, None] * size + torch.arange(size, device=places.device)
        for number, size in zip((row, column), lists.block_size, strict=True)
    )
    function = lists.mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        function = torch.vmap(function, in_dims=dims)
    seen = function(batch, head, q.clamp(max=lengths[0] - 1), k.clamp(max=lengths[1] - 1))
    return seen.bool() & (q < lengths[0])[:, :, None] & (k < lengths[1])[:, None]


def pack(seen: torch.Tensor) -> torch.Tensor:
    """int32 [.., words] of bool [.., keys]."""
    padded = torch.nn.functional.pad(seen, (0, -seen.shape[-1] % WORD_BITS)).unflatten(-1, (-1, WORD_BITS))
    word = (padded.long() << torch.arange(WORD_BITS, device=seen.device)).sum(dim=-1)
    return torch.where(word >= 2**31, word - 2**32, word).int()


def unpack(words: torch.Tensor, keys: int) -> torch.Tensor:
    """bool [.., keys] of int32 [.., words]."""
    bits = words[..., None].long() >> torch.arange(WORD_BITS, device=words.device)
    return (bits & 1).bool().flatten(-2)[..., :keys]


def alike(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices of different rows of a tensor, which of these each row equals). Rows are compared by a hash first; where
    two rows have the same hash without being equal, every row is taken for different."""
    flat = words.flatten(1).long()
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (flat.shape[1],), generator=generator).to(flat.device)
    _, numbers = ((flat * factors).sum(dim=1)).unique(return_inverse=True)
    every = torch.arange(len(flat), device=flat.device)
    first = torch.full((int(numbers.max()) + 1,), len(flat), device=flat.device)
    first = first.scatter_reduce(0, numbers, every, "amin")
    return (first, numbers) if torch.equal(flat[first[numbers]], flat) else (every, every)


_converted = weakref.WeakKeyDictionary()  # FlexAttention's masks, which serve many calls


def block_mask_of(given: Any, q, k, page_table=None) -> BlockMask | None:
    """The ``BlockMask`` of an argument of ``attention``: itself, or converted. FlexAttention's are converted once, so
    their tensors must not change afterwards. q, k and page_table may be no tensors yet: the checks come later. Lists
    for pages say themselves for how many keys they are."""
    if given is None:
        return None
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and q.dim() == k.dim() == 4):
        if isinstance(given, BlockMask):
            return given
        read_lists(given)
        raise ValueError("block_mask: q and k must be [B, S, H, D]")
    if page_table is None:
        return converted(given, (q.shape[1], k.shape[1]), (q.shape[1], k.shape[1]))
    room = (
        page_table.shape[1] * k.shape[1]
        if isinstance(page_table, torch.Tensor) and page_table.dim() == 2
        else 0
    )
    return converted(given, (q.shape[1], None), (q.shape[1], room))


def packed_mask_of(given: Any, max_seqlen_q, max_seqlen_k) -> BlockMask | None:
    """The ``BlockMask`` of an argument of ``attention_varlen``, as ``block_mask_of``. The lists say themselves for how
    many queries and keys of a request they are; flash-attn-4's do not, and are for max_seqlen_q and max_seqlen_k."""
    return None if given is None else converted(given, (None, None), (max_seqlen_q, max_seqlen_k))


def converted(given: Any, wanted: tuple, unsaid: tuple) -> BlockMask:
    """The ``BlockMask`` of lists. wanted: queries and keys that they must be for, None for any number. unsaid: those of
    lists that do not say."""
    prepared, lengths = isinstance(given, BlockMask), None
    if prepared:
        lengths = given.lengths
    else:
        lengths = read_lists(given).lengths
    if lengths is None:
        if not all(type(length) is int and length >= 0 for length in unsaid):
            raise ValueError(
                "block_mask: flash-attn's lists of packed requests need max_seqlen_q and max_seqlen_k, ints >= 0, got "
                f"{unsaid[0]!r} and {unsaid[1]!r}"
            )
        return BlockMask.of(given, *unsaid)
    if any(number not in (None, length) for number, length in zip(wanted, lengths, strict=True)):
        what = f"{wanted} queries and keys" if None not in wanted else f"{wanted[0]} queries"
        raise ValueError(f"block_mask: must be for {what}, got {lengths}")
    if prepared:
        return given
    found = _converted.get(given)
    if found is None or found.lengths != lengths:
        found = _converted[given] = BlockMask.of(given, *lengths)
    return found


def seen_by_heads(problem, operands, seen: torch.Tensor) -> torch.Tensor:
    """bool [B, 1 or Hq, Sq, Sk]: which keys rows see. problem: ``AttentionProblem``. seen [B, Sq, Sk]: without lists of
    blocks (``mask.visible``). Queries and keys in blocks past the lists see and are seen by none."""
    seen = seen[:, None]
    if not problem.mask.has_blocks:
        return seen
    rows, columns = problem.mask.block_size
    table, counts = operands.kv_visits.long(), operands.kv_counts.long()
    blocks = table.shape[-2]
    valid = torch.arange(blocks, device=table.device) < counts[..., 1:]
    place = torch.where(valid, table[..., 0], blocks)
    none = 2**31  # no rule
    rule = torch.full((*place.shape[:-1], blocks + 1), none, device=table.device)
    rule = rule.scatter_(-1, place, table[..., 1])[..., :blocks]  # [.., M, N]
    full, partial = rule < 0, (rule >= 0) & (rule != none)

    def by_element(blocks_seen):  # [.., Sq, Sk] of [.., M, N]
        wide = blocks_seen.repeat_interleave(rows, dim=-2).repeat_interleave(columns, dim=-1)
        return of_size(wide)

    def of_size(wide):
        more = (0, max(problem.seq_k - wide.shape[-1], 0), 0, max(problem.seq_q - wide.shape[-2], 0))
        return torch.nn.functional.pad(wide, more)[..., : problem.seq_q, : problem.seq_k]

    full, partial = by_element(full), by_element(partial)
    if operands.patterns is not None:
        number = torch.where(rule < 0, ~rule, torch.where(rule == none, 0, rule))
        bits = unpack(operands.patterns, columns)[number]  # [.., M, N, rows, columns]
        bits = of_size(bits.transpose(-3, -2).flatten(-4, -3).flatten(-2))
        full, partial = full & bits, partial & bits
    if operands.kv_lengths is not None:
        key = torch.arange(problem.seq_k, device=table.device)
        full = full & (key < operands.kv_lengths[:, None, None, None])
    return (full | (partial & seen)).expand(problem.batch, -1, -1, -1)
