"""Time of a block of native code in one warp: its instructions in the order of a list scheduler.

ptxas schedules each block for latency, so a block alone takes about what a greedy list scheduler by critical path
takes: every instruction waits for its operands, for an issue slot and for its pipe. The clocks that the block takes of
each pipe determine how much it and other warps slow each other down.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from warpspec.sim.cfg import control_of
from warpspec.sim.clocks.constants import Chip
from warpspec.sim.clocks.costs import PIPES, Cost, Pipe, cost_of
from warpspec.sim.codegen.program import Program

MAX_LOADS_IN_FLIGHT = 64  # most parts of a block, each of which waits for earlier parts' loads


@dataclass(slots=True)
class Part:
    """A stretch of instructions between waits for global memory.

    alone: clocks in a warp that has the SM to itself. demand: clocks of each pipe. loads: bytes per lane loaded from
    global memory; stores: bytes per lane stored; additions: bytes per lane added.
    """

    alone: float
    demand: tuple[float, ...]
    loads: int
    stores: int
    additions: int = 0


@dataclass(slots=True)
class BlockCost:
    """A block: its parts, the registers (a bitset) it needs at its start, and those that its last loads fill."""

    parts: list[Part]
    uses: int
    filled: int
    branches: bool


def block_cost(program: Program, index: int, chip: Chip) -> BlockCost:
    """The cost of a native block of a program."""
    if index == program.exit_index:
        return BlockCost([], 0, 0, False)
    block = program.blocks[index]
    instrs = program.kernel.instrs[block.start : block.end]
    touched = program.live.touched[block.start : block.end]
    costs = [cost_of(ins, chip) for ins in instrs]
    level: list[int] = []  # for each instruction: the length of the chain of loads it depends on
    producer: dict[str, int] = {}
    inputs: list[list[int]] = []
    filled = 0
    for i, (reads, writes) in enumerate(touched):
        found = [producer[name] for name in reads if name in producer]
        inputs.append(found)
        level.append(max((level[j] + costs[j].load for j in found), default=0))
        for name in writes:
            producer[name] = i
            bit = program.live.bits((name,))
            filled = filled | bit if costs[i].load else filled & ~bit
    if instrs and control_of(instrs[-1]) is not None:
        level[-1] = max(level)
    parts = []
    for number in range(min(max(level, default=0), MAX_LOADS_IN_FLIGHT) + 1):
        chosen = [i for i in range(len(instrs)) if level[i] == number]
        parts.append(_part(chosen, costs, inputs, [cost.beside(chip) for cost in costs]))
    branches = bool(instrs) and control_of(instrs[-1]) is not None
    return BlockCost(parts, program.live.uses[index], filled, branches)


def _part(chosen: list[int], costs: list[Cost], inputs: list[list[int]], beside: list[float]) -> Part:
    demand = [0.0] * PIPES
    loads = stores = additions = 0
    for i in chosen:
        cost = costs[i]
        demand[Pipe.ISSUE] += cost.issue
        demand[Pipe.BESIDE] += beside[i]
        if cost.pipe is not Pipe.SHARED:
            demand[cost.pipe] += cost.busy if cost.pipe is not Pipe.ISSUE else 0.0
        demand[Pipe.SHARED] += cost.shared
        if cost.load:
            loads += cost.global_bytes
        elif cost.adds:
            additions += cost.global_bytes
        else:
            stores += cost.global_bytes
    return Part(schedule(chosen, costs, inputs), tuple(demand), loads, stores, additions)


def schedule(chosen: list[int], costs: list[Cost], inputs: list[list[int]]) -> float:
    """Clocks until the last of some instructions has issued, by a greedy list schedule.

    inputs: for every instruction of the block, those whose results it reads; those that are not chosen count as done.
    """
    here = set(chosen)
    users: dict[int, list[int]] = {i: [] for i in chosen}
    missing: dict[int, int] = {}
    for i in chosen:
        mine = {j for j in inputs[i] if j in here}
        missing[i] = len(mine)
        for j in mine:
            users[j].append(i)
    height: dict[int, float] = {}
    for i in reversed(chosen):
        height[i] = costs[i].latency + max((height[j] for j in users[i]), default=0.0)
    earliest = dict.fromkeys(chosen, 0.0)
    waiting = [(0.0, i) for i in chosen if not missing[i]]
    heapq.heapify(waiting)
    ready: list[list[tuple[float, int]]] = [[] for _ in range(PIPES)]
    free = [0.0] * PIPES
    now = end = 0.0
    left = len(chosen)
    while left:
        while waiting and waiting[0][0] <= now:
            _, i = heapq.heappop(waiting)
            heapq.heappush(ready[costs[i].pipe], (-height[i], i))
        best = None
        for pipe in range(PIPES):
            free_now = ready[pipe] and (free[pipe] <= now or pipe == Pipe.ISSUE)
            if free_now and (best is None or ready[pipe][0] < ready[best][0]):
                best = pipe
        if best is None:
            times = [free[pipe] for pipe in range(PIPES) if ready[pipe]]
            if waiting:
                times.append(waiting[0][0])
            now = max(now, min(times))
            continue
        _, i = heapq.heappop(ready[best])
        cost = costs[i]
        left -= 1
        if best != Pipe.ISSUE:
            # One scheduler alone reaches half of shared memory's rate, less each access's start-up time.
            free[best] = now + (2 * cost.shared + 2 if best == Pipe.SHARED else cost.busy)
        done = now + max(cost.latency, cost.issue)
        now += cost.issue + cost.stall
        end = max(end, now)
        for j in users[i]:
            earliest[j] = max(earliest[j], done)
            missing[j] -= 1
            if not missing[j]:
                heapq.heappush(waiting, (earliest[j], j))
    return end
