"""Collective instructions: the lanes that one names meet before it executes."""

from __future__ import annotations

from warpspec.sim import diagnosis
from warpspec.sim.codegen.program import Program
from warpspec.sim.instruction import Imm, Instr
from warpspec.sim.lanes import FULL_MASK, lanes
from warpspec.sim.registry import Collective, row_of
from warpspec.sim.warp import Group, Warp


def gathered(program: Program, w: Warp, group: Group, ins: Instr) -> bool:
    """Whether the lanes named by a collective instruction are together; if not, the group waits for them.

    If lanes name different sets (tiles of a warp), those whose set is complete go on and the others wait.
    """
    complete = 0
    for members, named in named_lanes(w, group, ins):
        if named & w.alive & ~group.mask == 0:
            complete |= members
    anywhere = row_of(ins.opcode).collective is Collective.MEMBERS_ANYWHERE
    if not complete and anywhere and meets_elsewhere(program, w, group, ins):
        return True
    if complete != group.mask:
        rest = group
        if complete:
            rest = Group(group.block, group.mask & ~complete)
            group.mask = complete
            w.groups.insert(w.groups.index(group) + 1, rest)
        rest.converge = True
    if not complete:
        w.merge()
    return bool(complete)


def named_lanes(w: Warp, group: Group, ins: Instr) -> list[tuple[int, int]]:
    """(lanes of the group, lanes that a collective instruction names for them)."""
    if row_of(ins.opcode).collective is Collective.WARP:
        return [(group.mask, FULL_MASK)]
    operand = ins.membermask
    if isinstance(operand, Imm):
        return [(group.mask, operand.value & FULL_MASK)]
    named: dict[int, int] = {}
    masks = w.u32(operand)
    for lane in lanes(group.mask):
        named[int(masks[lane])] = named.get(int(masks[lane]), 0) | 1 << lane
    return [(members, mask) for mask, members in named.items()]


def meets_elsewhere(program: Program, w: Warp, group: Group, ins: Instr) -> bool:
    """bar.warp.sync joins lanes wherever in the text they execute it; frees those that waited for this group."""
    named = w.scalar(ins.membermask, group.mask) & w.alive
    parked = [g for g in w.groups if g.converge and g.mask & named]
    here = row_of(ins.opcode)
    waiting = [g for g in parked if row_of(diagnosis.instruction_at(program, g).opcode) is here]
    together = group.mask
    for other in waiting:
        together |= other.mask
    if named & ~together:
        return False
    for other in waiting:
        w.executed[other.block] += 1
        other.block += 1
        other.converge = False
    return True
