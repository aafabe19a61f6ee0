"""The classes of instructions that order memory, by which mutants are counted."""

from __future__ import annotations

import re

from warpspec.sim.instruction import Instr

# (class, opcode pattern): what deleting an instruction belongs to.
DELETED = (
    ("grid dependency", r"griddepcontrol\.wait"),
    ("proxy fence", r"fence\.proxy"),
    ("mbarrier init fence", r"fence\.mbarrier_init"),
    ("memory fence", r"(fence|membar)\."),
    ("tcgen05.wait::ld", r"tcgen05\.wait::ld"),
    ("tcgen05.wait::st", r"tcgen05\.wait::st"),
    ("tcgen05.fence", r"tcgen05\.fence"),
    ("tcgen05.commit", r"tcgen05\.commit"),
    ("wgmma.fence", r"wgmma\.fence"),
    ("wgmma group", r"wgmma\.(commit|wait)_group"),
    ("bulk group", r"cp\.async\.bulk\.(commit|wait)_group"),
    ("cp.async group", r"cp\.async\.(commit_group|wait_group|wait_all|mbarrier)"),
    ("mbarrier arrive", r"mbarrier\.arrive"),
    ("mbarrier wait", r"mbarrier\.(try|test)_wait"),
    ("warp barrier", r"bar\.warp\.sync"),
    ("cluster barrier", r"barrier\.cluster"),
    ("thread barrier", r"(bar|barrier)\.(cta\.)?(sync|arrive|red)"),
)
TELLING = (
    "grid dependency",
    "proxy fence",
    "mbarrier init fence",
    "memory fence",
    "tcgen05.fence",
    "warp barrier",
)


def group_of(ins: Instr) -> str | None:
    """The class of an instruction whose deletion is a mutant."""
    for group, pattern in DELETED:
        if re.match(pattern, ins.opcode):
            return group
    return None
