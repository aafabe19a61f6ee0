"""Reorders a warp's trace into the order of the kernel's SASS.

A trace has blocks of PTX and steps. ptxas moves code: most of a softmax may come after a wait that follows it in the
PTX. So a warp's stretches of PTX are mapped to the blocks of SASS that they became (by the PTX line of every
instruction), and each block runs as ptxas ordered it, its steps in the places of their instructions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from warpspec.sim.cfg import control_of, targets
from warpspec.sim.clocks.constants import Chip
from warpspec.sim.clocks.sass import Sass
from warpspec.sim.clocks.sass_blocks import Chunk, Place, cut, fill, ptx_kind
from warpspec.sim.clocks.trace import Entry, Step
from warpspec.sim.codegen.program import Program
from warpspec.sim.lanes import FULL_MASK

HOME = 0.3  # share of a stretch's instructions that makes a block one of its blocks
OWNED = 0.1  # the share required of a block that has more of this stretch than of any other
FAR = 1 << 30


@dataclass(slots=True)
class Moved:
    """A chunk of code with what its lanes moved. loads: (bytes, scoreboard, `near`) each; bytes stored and added."""

    chunk: Chunk
    loads: tuple[tuple[int, int, bool], ...]
    stored: int
    added: int = 0


@dataclass(slots=True)
class Jump:
    """A taken branch."""


JUMP = Jump()


class _Group:
    """Consecutive blocks, and their part of the trace.

    lanes: of each of its stretches. ahead: of those that the warp runs before it goes back, whose loads may have moved
    into these blocks.
    """

    __slots__ = ("ahead", "blocks", "lanes", "steps")

    def __init__(self, blocks: list[int], ahead: dict[int, int]):
        self.blocks, self.ahead = blocks, ahead
        self.steps: list[Step] = []
        self.lanes: dict[int, int] = {}


class SassOrder:
    """The mapping of one kernel, for one chip's constants."""

    def __init__(self, program: Program, sass: Sass, chip: Chip):
        self.program, self.sass = program, sass
        self.blocks = cut(sass.instrs)
        for block in self.blocks:
            fill(block, chip)
        self._cut_stretches()
        self.homes = self._find_homes()
        self._plans: dict[tuple, list] = {}
        self.executed = 0  # SASS instructions of the reordered warps

    def _cut_stretches(self) -> None:
        """Number the stretches of PTX without a branch or a branch's target."""
        kernel = self.program.kernel
        starts = {0}
        for ins in kernel.instrs:
            if control_of(ins) is not None:
                starts.add(ins.index + 1)
                starts.update(kernel.labels[name] for name in targets(ins, kernel))
        self.stretch_of: list[int] = []
        number = -1
        for ins in kernel.instrs:
            number += ins.index in starts
            self.stretch_of.append(number)
        self.lines = [ins.line for ins in kernel.instrs]
        self.first = {}  # the first instruction of each stretch
        for index, stretch in enumerate(self.stretch_of):
            self.first.setdefault(stretch, index)

    def stretch_at(self, line: int) -> int:
        """The stretch that contains a line of the PTX."""
        index = bisect_right(self.lines, line) - 1
        return self.stretch_of[max(index, 0)] if self.stretch_of else 0

    def _depths(self) -> list[int]:
        """Number of loops that each block is in."""
        at = {block.instrs[0].label: block.index for block in self.blocks if block.instrs[0].label}
        depth = [0] * len(self.blocks)
        for block in self.blocks:
            for ins in block.instrs:
                start = at.get(ins.target) if ins.target else None
                if start is not None and start <= block.index:
                    for inside in range(start, block.index + 1):
                        depth[inside] += 1
        return depth

    def _find_homes(self) -> dict[int, tuple[int, ...]]:
        counts: dict[int, Counter[int]] = defaultdict(Counter)
        owners: dict[int, int] = {}
        for block in self.blocks:
            if block.cold:
                continue
            mine = Counter(self.stretch_at(ins.line) for ins in block.instrs)
            owners[block.index] = mine.most_common(1)[0][0]
            for stretch, count in mine.items():
                counts[stretch][block.index] += count
        depth = self._depths()
        homes = {}
        for stretch, found in counts.items():
            total = found.total()
            main = found.most_common(1)[0][0]
            homes[stretch] = tuple(
                sorted(
                    block
                    for block, count in found.items()
                    if depth[block] >= depth[main]
                    and (count >= HOME * total or (owners[block] == stretch and count >= OWNED * total))
                )
            )
        return homes

    # ---- a warp ------------------------------------------------------------------------------------------------

    def warp(self, entries: list[Entry]) -> Iterator[Chunk | Moved | Step | Jump]:
        """A warp's Chunk, Moved, Step and Jump entries in the order of SASS, as far as they are asked for."""
        result: list = []
        group = _Group([], {})
        last = None  # the block before
        done: set[int] = set()  # blocks that have run since the warp last went back
        before = -1
        for stretch, lanes, steps, ahead in self._looking_ahead(entries):
            if stretch <= before:
                done = set()
            before = stretch
            blocks = [block for block in self.homes.get(stretch, ()) if block not in done]
            if blocks:
                done.update(blocks)
                if not group.blocks:
                    group.blocks, group.ahead = group.blocks + blocks, ahead
                else:
                    last = self._emit(group, result, last)
                    group = _Group(blocks, ahead)
                    yield from result
                    result.clear()
            group.steps += steps
            group.lanes[stretch] = max(lanes, group.lanes.get(stretch, 0))
        self._emit(group, result, last)
        yield from result

    def _looking_ahead(self, entries: list[Entry]) -> Iterator[tuple[int, int, list[Step], dict[int, int]]]:
        """(stretch, lanes, steps, lanes of all stretches until the warp goes back) in the order the warp ran them."""
        run: list[tuple[int, int, list[Step]]] = []
        ahead: dict[int, int] = {}
        for stretch, lanes, steps in self._stretches(entries):
            if run and stretch <= run[-1][0]:
                yield from ((*one, ahead) for one in run)
                run, ahead = [], {}
            run.append((stretch, lanes, steps))
            ahead[stretch] = lanes
        yield from ((*one, ahead) for one in run)

    def _stretches(self, entries: list[Entry]):
        """(stretch, lanes, steps) in the order the warp ran them."""
        program = self.program
        blocks, stretch_of = program.blocks, self.stretch_of
        current, position, lanes, steps = None, -1, 0, []
        for entry in entries:
            if type(entry) is Step:
                index, now = entry.ins.index, entry.lanes
            else:
                number, mask = (entry, FULL_MASK) if type(entry) is int else entry
                if number >= len(blocks) or blocks[number].start >= len(stretch_of):
                    continue
                index, now = blocks[number].start, mask.bit_count()
            stretch = stretch_of[index]
            if stretch != current or index <= position:
                if current is not None:
                    yield current, lanes, steps
                current, lanes, steps = stretch, 0, []
            position = index
            if type(entry) is Step:
                steps.append(entry)
            lanes = max(lanes, now)
        if current is not None:
            yield current, lanes, steps

    def _emit(self, group: _Group, result: list, last: int | None) -> int | None:
        key = (tuple(group.blocks), tuple(step.ins.index for step in group.steps))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(group)
        if last is not None and group.blocks and group.blocks[0] != last + 1:
            result.append(JUMP)
        for item in plan:
            if type(item) is int:
                result.append(group.steps[item])
                continue
            self.executed += item.count
            if item.loads or item.stores or item.additions:
                loads = tuple(
                    (nbytes * self._lanes(group, line), board, near)
                    for nbytes, board, line, near in item.loads
                )
                stored, added = (
                    sum(nbytes * self._lanes(group, line) for nbytes, line in lines)
                    for lines in (item.stores, item.additions)
                )
                result.append(Moved(item, loads, stored, added))
            else:
                result.append(item)
        self.executed += len(group.steps)
        return group.blocks[-1] if group.blocks else last

    def _lanes(self, group: _Group, line: int) -> int:
        stretch = self.stretch_at(line)
        return group.lanes.get(stretch) or group.ahead.get(stretch, 0)

    def _plan(self, group: _Group) -> list[Chunk | int]:
        """Chunks, and numbers of the group's steps, in the order of SASS."""
        items: list[Chunk | Place] = []
        for number in group.blocks:
            items += self.blocks[number].items
        placed: dict[int, int] = {}  # item -> step
        by_kind: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for i, item in enumerate(items):
            if type(item) is Place:
                by_kind[item.kind][0].append(i)
        for number, step in enumerate(group.steps):
            kind = ptx_kind(step.ins)
            if kind is not None:
                by_kind[kind][1].append(number)
        for places, steps in by_kind.values():
            lines = [items[i].line for i in places]
            for i, j in aligned(lines, [group.steps[n].ins.line for n in steps]):
                placed[places[i]] = steps[j]
        behind: dict[int, list[int]] = defaultdict(list)  # step -> steps without a place that follow it
        taken, before = set(placed.values()), -1
        for number in range(len(group.steps)):
            if number in taken:
                before = number
            else:
                behind[before].append(number)
        plan: list[Chunk | int] = list(behind[-1])
        for i, item in enumerate(items):
            if type(item) is Chunk:
                plan.append(item)
            elif i in placed:
                plan += [placed[i], *behind[placed[i]]]
        return plan


def aligned(first: list[int], second: list[int]) -> list[tuple[int, int]]:
    """Align two lists of lines: pairs of positions, in order, one for each line of the shorter list, matching nearest
    lines."""
    if len(first) == len(second):
        return [(i, i) for i in range(len(first))]
    swap = len(first) > len(second)
    short, long = (second, first) if swap else (first, second)
    n, m = len(short), len(long)
    best = [[0] * (m + 1)] + [[FAR * n] * (m + 1) for _ in range(n)]
    for i in range(1, n + 1):
        for j in range(i, m + 1):
            paired = best[i - 1][j - 1] + abs(short[i - 1] - long[j - 1])
            best[i][j] = min(best[i][j - 1], paired) if j > i else paired
    pairs, j = [], m
    for i in range(n, 0, -1):
        while j > i and best[i][j] == best[i][j - 1]:
            j -= 1
        pairs.append((j - 1, i - 1) if swap else (i - 1, j - 1))
        j -= 1
    return pairs[::-1]
