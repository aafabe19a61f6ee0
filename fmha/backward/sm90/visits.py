"""The steps that lists of blocks give: the first warp follows the tables, ahead of the consumers.

For each step that it fetches, it leaves (query head, query tile, rule) in shared memory, in as many stages as Q has,
before it arrives at q_full. So consumers read no table in global memory: P of every step would wait for a chain of such
reads. The first warp itself reads what it needs to go on from a block of queries, NEXT and RULE, when it comes to the
block, a step before it uses them.
"""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Boolean, Int32, cute

from warpspec.common.hardware import VECTOR_BYTES
from warpspec.fmha.backward.device.blocks import step_after
from warpspec.fmha.backward.sm90.config import VISIT_WORDS
from warpspec.fmha.lists import NEXT, RULE


class Visit(NamedTuple):
    """A step: its query head and query tile, and NEXT (``after``) and RULE of its block of queries."""

    head: Int32
    query_tile: Int32
    after: Int32
    rule: Int32


def visit_of(tile, head, query_tile) -> Visit:
    """The step at (query head, query tile)."""
    return Visit(head, query_tile, *(tile.blocks.entry(head, query_tile, which) for which in (NEXT, RULE)))


@cute.jit
def visit_after(tile, visit) -> Visit:
    """The step after one."""
    head, query_tile = step_after(tile.blocks, visit.head, visit.query_tile, visit.after)
    after, rule = visit.after, visit.rule
    if Boolean(query_tile != visit.query_tile + 1) | Boolean(query_tile % tile.blocks.tiles == 0):
        _, _, after, rule = visit_of(tile, head, query_tile)
    return Visit(head, query_tile, after, rule)


def words_of(work, step) -> cute.Tensor:
    """A step's words in shared memory."""
    pointer = work.shared.visits + step % work.config.q_stages * VISIT_WORDS
    return cute.make_tensor(pointer.align(VECTOR_BYTES), cute.make_layout(VISIT_WORDS))


@cute.jit
def leave(work, step, visit):
    """Leave a step in shared memory for the consumers, which see it once q_full has completed. Called by the first
    warp, whichever thread of which then arrives at q_full."""
    if work.index == 0:
        words = cute.make_rmem_tensor(VISIT_WORDS, Int32)
        words.fill(0)
        words[0], words[1], words[2] = visit.head, visit.query_tile, visit.rule
        cute.autovec_copy(words, words_of(work, step))
    cute.arch.sync_warp()


def read(work, step) -> cute.Tensor:
    """(query head, query tile, rule, unused) of a step whose q_full has completed."""
    words = cute.make_rmem_tensor(VISIT_WORDS, Int32)
    cute.autovec_copy(words_of(work, step), words)
    return words


def place(work, step) -> tuple:
    """(query head, query tile) of such a step."""
    words = read(work, step)
    return words[0], words[1]


def take_rule(work, step) -> None:
    """Make the rule of such a step that of the thread's present step."""
    work.tile.blocks.rule[0] = read(work, step)[2]
