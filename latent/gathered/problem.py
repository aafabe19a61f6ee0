"""Checks the arguments of ``gathered_attention``: key sets, and the problem with all its sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from warpspec.common.checks import (
    INTEGER_DTYPES,
    check_bool,
    check_choice,
    check_int,
    check_kind,
    check_number,
    check_operand,
    check_range,
)
from warpspec.common.outputs import check_output
from warpspec.fmha.checks import MOST_SPLITS, SINK_DTYPES, check_splits
from warpspec.fmha.logits import LogitOptions
from warpspec.latent.cache.pools import LatentPool, table_slots
from warpspec.latent.cache.problem import ROPE_DIM, check_pool
from warpspec.latent.projection.float8 import FP8_BLOCK, Float8Tensor

VALUE_DIM = 512  # the first numbers of a row, of which O is made
MAX_KEY_SETS = 3
HEAD_LIMIT = 128
OUT_FORMATS = ("bf16", "fp8")


@dataclass(frozen=True, eq=False)
class KeySet:
    """Rows of one pool, given by slot, each query with rows of its own.

    pool: a ``LatentPool``. slots: int32 [T, K], each page * page_size + row; a slot below 0 or beyond the pool belongs
    to no key. lengths: int32 [T], how many of a query's slots count, from the first; None: all. Raises TypeError or
    ValueError naming the field.
    """

    pool: LatentPool
    slots: torch.Tensor
    lengths: torch.Tensor | None = None

    def __post_init__(self):
        check_kind("pool", self.pool, LatentPool)
        device = self.pool.device
        check_operand("slots", self.slots, (torch.int32,), (-1, -1), device)
        if self.lengths is not None:
            check_operand("lengths", self.lengths, (torch.int32,), (len(self.slots),), device)
            check_range("lengths", self.lengths, 0, self.slots.shape[1], "slots of a query")

    @classmethod
    def from_table(
        cls, pool: LatentPool, page_table: torch.Tensor, requests: torch.Tensor, lengths: torch.Tensor
    ) -> KeySet:
        """All rows of requests, in order, found by their pages.

        page_table: int32 [R, pages]. requests: int32 or int64 [T], the request of each query. lengths: int32 [T], how
        many rows a query sees, from the first. A request out of range has no rows on a GPU and raises ValueError on the
        CPU. The slots are materialised: 4 bytes for each row of the table and query.
        """
        check_pool(pool, (LatentPool,))
        device = pool.device
        check_operand("page_table", page_table, (torch.int32,), (-1, -1), device)
        check_operand("requests", requests, INTEGER_DTYPES, (-1,), device)
        check_operand("lengths", lengths, (torch.int32,), (len(requests),), device)
        check_range("requests", requests, 0, len(page_table) - 1, "rows of page_table")
        count = page_table.shape[1] * pool.page_size
        rows = torch.arange(count, device=device).expand(len(page_table), -1)
        slots = table_slots(page_table, rows, pool.page_size)
        known = (requests >= 0) & (requests < len(page_table))
        return cls(pool, slots[torch.where(known, requests, 0).long()], torch.where(known, lengths, 0))


@dataclass(frozen=True)
class GatheredProblem:
    """Sizes and switches of a call, without tensors. Hashable.

    tokens, heads: sizes of q. format: the rows' format. slots: K of each key set. lengths: for each set, whether it has
    lengths. paged, has_kv_scale, has_q_scale: as in ``config.Gathers``. queries: of a request, which are neighbouring
    tokens, if keys are paged. cut_for: as in ``fmha.operands.Options``. All other fields: as in ``gathered_attention``.
    """

    tokens: int
    heads: int
    format: str
    slots: tuple[int, ...]
    lengths: tuple[bool, ...]
    scale: float
    has_sink: bool = False
    normalize: bool = True
    return_lse: bool = False
    rotate_back: bool = False
    num_splits: int | None = None
    float8: bool = False
    paged: bool = False
    has_kv_scale: bool = False
    has_q_scale: bool = False
    queries: int = 1
    cut_for: str | None = None

    @classmethod
    def of(
        cls,
        q,
        key_sets,
        *,
        scale,
        sink,
        normalize,
        return_lse,
        rotate_back,
        num_splits,
        out,
        out_format="bf16",
    ) -> GatheredProblem:
        """Check all arguments. Raises TypeError or ValueError naming the argument."""
        check_key_sets(key_sets)
        pool = key_sets[0].pool
        fmt, device = pool.row_format, pool.device
        check_operand("q", q, (torch.bfloat16,), (-1, -1, fmt.dim), device, aligned=True)
        tokens, heads = q.shape[:2]
        if not 1 <= heads <= HEAD_LIMIT:
            raise ValueError(f"q: must have 1 to {HEAD_LIMIT} heads, got {heads}")
        for number, each in enumerate(key_sets):
            if len(each.slots) != tokens:
                raise ValueError(
                    f"key_sets: slots of set {number} must be of q's {tokens} queries, got {len(each.slots)}"
                )
        for name, flag in (("normalize", normalize), ("return_lse", return_lse)):
            check_bool(name, flag)
        if not normalize and (sink is not None or return_lse or out is not None):
            raise ValueError("normalize: an un-normalised state has no sink, lse or out")
        if scale is not None:
            check_number("scale", scale, positive=True)
        scale = LogitOptions(scale).checked(VALUE_DIM).scale
        if sink is not None:
            check_operand("sink", sink, SINK_DTYPES, (heads,), device)
        check_choice("out_format", out_format, OUT_FORMATS)
        if out_format == "fp8" and not normalize:
            raise ValueError("out_format: an un-normalised state is fp32")
        if out is not None:
            check_out(out, out_format, (tokens, heads, VALUE_DIM), device)
        if num_splits is not None:
            check_int("num_splits", num_splits, 1, MOST_SPLITS)
            check_splits(num_splits, tokens * heads, VALUE_DIM)
        if rotate_back is not None:
            check_rotation(rotate_back, tokens, fmt, device)
        if out is not None:
            check_apart_out(out, q, key_sets, sink, rotate_back)
        return cls(
            tokens,
            heads,
            pool.format,
            tuple(each.slots.shape[1] for each in key_sets),
            tuple(each.lengths is not None for each in key_sets),
            scale,
            sink is not None,
            normalize,
            return_lse,
            rotate_back is not None,
            num_splits,
            out_format == "fp8",
        )

    @property
    def states(self) -> GatheredProblem:
        """This problem with un-normalised states as results, as the kernel of a split computes it."""
        return replace(self, has_sink=False, return_lse=False, normalize=False, float8=False)


def check_key_sets(key_sets) -> None:
    """Check that these are one to MAX_KEY_SETS key sets of one row format and device."""
    if isinstance(key_sets, KeySet) or not isinstance(key_sets, (list, tuple)):
        raise TypeError(f"key_sets: must be a list of KeySet, got {type(key_sets).__name__}")
    if not 1 <= len(key_sets) <= MAX_KEY_SETS:
        raise ValueError(f"key_sets: must be 1 to {MAX_KEY_SETS}, got {len(key_sets)}")
    for number, each in enumerate(key_sets):
        if not isinstance(each, KeySet):
            raise TypeError(f"key_sets: must hold KeySet, got {type(each).__name__} at index {number}")
    first = key_sets[0].pool
    for number, each in enumerate(key_sets):
        if each.pool.format != first.format:
            raise ValueError(
                f"key_sets: rows must be of one format, got {first.format!r} in set 0 and {each.pool.format!r} in set "
                f"{number} (states of each apart: normalize=False and merge)"
            )
        if each.pool.device != first.device:
            raise ValueError(f"key_sets: must be on {first.device}, got {each.pool.device} in set {number}")


def check_out(out, out_format: str, shape: tuple, device) -> None:
    """Check that out is a tensor, or in FP8 a ``Float8Tensor``, of the result's shape."""
    if out_format == "bf16":
        check_operand("out", out, (torch.bfloat16,), shape, device, aligned=True)
        return
    check_kind("out", out, Float8Tensor)
    check_operand("out data", out.data, (torch.float8_e4m3fn,), shape, device, aligned=True)
    check_operand("out scales", out.scales, (torch.float32,), (*shape[:-1], shape[-1] // FP8_BLOCK), device)


def check_apart_out(out: torch.Tensor | Float8Tensor, q, key_sets, sink, rotate_back) -> None:
    """Check that outputs have no address twice and overlap no argument."""
    others = {"q": q, "sink": sink}
    for number, each in enumerate(key_sets):
        set_of = {"pool": each.pool.data, "slots": each.slots, "lengths": each.lengths}
        others |= {f"key_sets: {name} of set {number}": tensor for name, tensor in set_of.items()}
    if rotate_back is not None:
        others |= zip(("rotate_back cos_sin", "rotate_back positions"), rotate_back, strict=True)
    if isinstance(out, torch.Tensor):
        check_output("out", out, others)
    else:
        check_output("out data", out.data, others)
        check_output("out scales", out.scales, {**others, "out data": out.data})


def check_rotation(rotate_back, tokens, fmt, device) -> None:
    """Check (cos_sin, positions)."""
    if not isinstance(rotate_back, (tuple, list)) or len(rotate_back) != 2:
        raise TypeError(f"rotate_back: must be (cos_sin, positions), got {rotate_back!r}")
    if fmt.dim != VALUE_DIM:
        raise ValueError(f"rotate_back: values of {fmt.name!r} rows are not rotated")
    cos_sin, positions = rotate_back
    check_operand("rotate_back cos_sin", cos_sin, (torch.float32,), (-1, ROPE_DIM), device, aligned=True)
    check_operand("rotate_back positions", positions, (torch.int32,), (tokens,), device)
    check_range("rotate_back positions", positions, 0, len(cos_sin) - 1, "rows of cos_sin")
