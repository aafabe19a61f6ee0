"""Mutants of a kernel: its PTX with one instruction that orders memory deleted or weakened, and what becomes of each.

``mutants`` lists them, ``verdicts`` runs them in the simulator with the order checker on one recorded launch.
"""

from __future__ import annotations

import copy
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from unittest import mock

import numpy as np

from shared.mutant_classes import TELLING, group_of
from shared.mutant_launches import Launch
from shared.mutant_matters import decisive
from shared.mutants_explained import EXPLAINED, Reason, Site
from shared.source_places import Place, place_of
from warpspec import sim
from warpspec.sim.codegen.program import Program
from warpspec.sim.instruction import Imm, Instr
from warpspec.sim.order import of_text
from warpspec.sim.order.checker import OrderChecker
from warpspec.sim.registry import Family, find, handler

SECONDS = 10  # of processor time; a mutant that runs longer hangs
WATCHED_SEEDS = 4  # schedules in which an instruction has to do nothing to count as idle
NOTHING, TRUE = "mutant.nothing", "mutant.true"  # opcodes that stand for what is deleted

if find(NOTHING) is None:

    @handler(NOTHING, family=Family.MISCELLANEOUS, destinations=0)
    def nothing(m, w, ins, mask) -> None:
        """A deleted instruction."""

    @handler(TRUE, family=Family.MISCELLANEOUS, destinations=1)
    def true(m, w, ins, mask) -> None:
        """A wait that returns at once, saying that what it waits for has happened."""
        w.set_pred(ins.operands[0], mask, mask)


@dataclass(frozen=True, eq=False)
class Mutant:
    """One change. group: the class in which it is counted. index: of the instruction. change: in words.

    opcode, operands: what the instruction becomes.
    """

    group: str
    index: int
    change: str
    opcode: str
    operands: tuple

    def describe(self, ins: Instr) -> str:
        return f"{self.change}: `{ins.text}`"


SCOPES = {"sys": "cta", "gpu": "cta", "cluster": "cta"}


def mutants(instrs: list[Instr]) -> Iterator[Mutant]:
    """Every mutant of a kernel, in the order of its text."""
    for ins in instrs:
        yield from _deletions(ins)
        yield from _weakenings(ins)


def _deletions(ins: Instr) -> Iterator[Mutant]:
    group = group_of(ins)
    if group == "mbarrier wait":
        yield Mutant(group, ins.index, "returns at once", TRUE, ins.operands)
    elif group == "thread barrier" and ".red" in ins.opcode:
        return  # its result is data
    elif group is not None:
        yield Mutant(group, ins.index, "deleted", NOTHING, ())


def _weakenings(ins: Instr) -> Iterator[Mutant]:
    def without(*parts: str) -> str:
        return ".".join(part for part in ins.parts if part not in parts)

    def instead(**parts: str) -> str:
        return ".".join(parts.get(part, part) for part in ins.parts)

    name = ins.opcode
    if "wait_group" in name and isinstance(ins.operands[0], Imm):
        more = (replace(ins.operands[0], value=ins.operands[0].value + 1), *ins.operands[1:])
        group = (
            "wgmma group"
            if name.startswith("wgmma")
            else "bulk group"
            if "bulk" in name
            else "cp.async group"
        )
        yield Mutant(group, ins.index, "waits for one group fewer", name, more)
        if group == "bulk group" and "read" not in ins.parts:
            yield Mutant(group, ins.index, "waits for reads only", name + ".read", ins.operands)
    if name.startswith("barrier.cluster.arrive") and "relaxed" not in ins.parts:
        relaxed = "barrier.cluster.arrive.relaxed" + (".aligned" if "aligned" in ins.parts else "")
        yield Mutant("cluster barrier", ins.index, "arrives relaxed", relaxed, ins.operands)
    if ins.parts[0] in ("ld", "st", "atom", "red") and {"acq_rel", "acquire", "release"} & set(ins.parts):
        weaker = instead(acq_rel="relaxed", acquire="relaxed", release="relaxed")
        yield Mutant("release, acquire", ins.index, "relaxed", weaker, ins.operands)
    scope = next((part for part in ins.parts[1:] if part in SCOPES), None)
    fence = name.startswith(("fence.acq_rel", "fence.sc"))
    access = name.startswith(("ld.acquire", "st.release", "atom", "red."))
    if scope is not None and (fence or access) and "shared" not in name:
        yield Mutant("scope", ins.index, f".{scope} becomes .cta", instead(**{scope: "cta"}), ins.operands)


ALIKE = 3  # of one change to one instruction of the source, which unrolling may have put in many places


def sample(
    instrs: list[Instr], text: str, executed: set[int] | None = None, most: int = ALIKE
) -> list[Mutant]:
    """Mutants of a kernel, or of some of its instructions, at most this many alike. text: its PTX."""
    alike: dict[tuple, list[Mutant]] = {}
    lines = text.split("\n")
    for mutant in mutants(instrs):
        if executed is not None and mutant.index not in executed:
            continue
        ins = instrs[mutant.index]
        kind = (mutant.group, mutant.change, ins.opcode, ins.source, context(lines, ins.line))
        alike.setdefault(kind, []).append(mutant)
    chosen = [mutant for found in alike.values() for mutant in found[:: -(-len(found) // most)]]
    return sorted(chosen, key=lambda mutant: mutant.index)


def apply(program: Program, mutant: Mutant) -> Program:
    """The program with one instruction changed; its translation is shared."""
    changed = copy.copy(program)
    changed.kernel = copy.copy(program.kernel)
    changed.kernel.instrs = list(program.kernel.instrs)
    ins = changed.kernel.instrs[mutant.index]
    changed.kernel.instrs[mutant.index] = replace(
        ins, opcode=mutant.opcode, parts=tuple(mutant.opcode.split(".")), operands=mutant.operands
    )
    if mutant.opcode in (NOTHING, TRUE):
        block = program.block_at[mutant.index]
        changed.hooked = list(program.hooked)
        changed.hooked[block] = False
        if not program.system[block]:
            raise ValueError(f"{ins.text} is not a block of its own: declare its row with orders=True")
    return changed


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    text: what is changed, and where. outcome: "order" (the order checker found it), the name of another diagnosis,
    "wrong" (a wrong result without a word) or "unnoticed"; "explained": unnoticed, for a known reason; "idle": in the
    kernel's runs the instruction does nothing that an earlier one has not done (wgmma.fence on no path;
    wgmma.wait_group nothing that a later one does not do before the warp writes or signals anything): without it the
    kernel is as right as before. reason: the known one, if there is any.
    """

    mutant: Mutant
    text: str
    outcome: str
    reason: Reason | None = None

    @property
    def found(self) -> bool:
        return self.outcome not in ("wrong", "unnoticed", "explained", "idle")


class Score:
    """The verdicts on mutants of the launches that `visit` sees. Of a kernel that is launched again, what was not found
    before gets another chance: other inputs may need what the first do without, or execute more."""

    def __init__(self, seeds: int = 1, only: str = "", most: int = ALIKE):
        self.seeds, self.only, self.most = seeds, only, most
        self._of_text: dict[str, dict[Mutant, Verdict]] = {}
        self._executed: dict[str, set[int]] = {}

    def visit(self, launch: Launch) -> None:
        """Run mutants of a launch, at most this many alike."""
        before = self._of_text.setdefault(launch.text, {})
        executed = self._executed.setdefault(launch.text, set())
        again = [mutant for mutant, verdict in before.items() if not verdict.found]
        for verdict in verdicts(launch, self.seeds, self.only, self.most, again, executed):
            old = before.get(verdict.mutant)
            if old is None or _weight(verdict) > _weight(old):
                before[verdict.mutant] = verdict

    @property
    def verdicts(self) -> list[Verdict]:
        return [verdict for of_kernel in self._of_text.values() for verdict in of_kernel.values()]


def _weight(verdict: Verdict) -> int:
    return 3 if verdict.found else ("idle", "explained", "unnoticed", "wrong").index(verdict.outcome)


def verdicts(
    launch: Launch,
    seeds: int = 1,
    only: str = "",
    most: int = ALIKE,
    again: Sequence[Mutant] = (),
    executed: set[int] | None = None,
) -> list[Verdict]:
    """Run mutants of a launch (at most this many alike) under a few seeds, and the first of WATCHED_SEEDS under which
    the instruction matters, or is executed. The kernel itself must be clean under all of them. only: pattern of
    their texts. again: mutants of the same kernel's launches before, for those instructions that they executed:
    executed, to which this one's are added."""
    right = Right(launch)
    for seed in range(seeds):
        right[seed]
    instrs = launch.program.kernel.instrs
    executing, useful = decisive(launch, max(seeds, WATCHED_SEEDS))
    here = executing.keys()
    known = set() if executed is None else executed
    lines = launch.text.split("\n")
    found = []
    sampled = [*again, *sample(instrs, launch.text, here - known, most)]
    known.update(here)
    for mutant in sampled:
        if mutant.index not in here:
            continue
        ins = instrs[mutant.index]
        site = site_of(mutant, ins, lines)
        text = f"{site} (PTX line {ins.line})"
        if not re.search(only, text):
            continue
        outcome = "idle"
        if mutant.index in useful or group_of(ins) not in TELLING:
            deciding = useful.get(mutant.index, executing[mutant.index])
            outcome = _outcome(launch, mutant, right, sorted({*range(seeds), deciding}))
            if outcome == "unnoticed" and mutant.index not in useful:
                outcome = "idle"
        reason = next((reason for reason in EXPLAINED if reason.explains(site)), None)
        if outcome == "unnoticed" and reason is not None:
            outcome = "explained"
        found.append(Verdict(mutant, text, outcome, reason))
    return found


def site_of(mutant: Mutant, ins: Instr, lines: list[str]) -> Site:
    """Where a mutant stands. lines: the PTX."""
    at = ins.source.rpartition(":")[::2] if ins.source else None
    return Site(mutant.describe(ins), *(_place(where) for where in (at, *context(lines, ins.line))))


def _place(where: tuple[str, str] | None) -> Place | None:
    return where and place_of(where[0], int(where[1]))


@cache
def _files(text: str) -> dict[str, str]:
    """Number -> file name, of a PTX text's .file lines (which stand at its end)."""
    return dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', text, flags=re.M))


def context(lines: list[str], line: int) -> tuple[tuple[str, str] | None, tuple[str, str] | None]:
    """The nearest source lines (file, number) before and after a line of PTX, but those of helpers that every role
    calls."""
    files = _files("\n".join(lines[-200:]))

    def nearest(numbers: range) -> tuple[str, str] | None:
        for number in numbers:
            loc = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", lines[number])
            if loc and not files.get(loc[1], "").endswith(("device/pipeline.py", "device/host.py")):
                return files.get(loc[1], ""), loc[2]
        return None

    return nearest(range(line - 1, -1, -1)), nearest(range(line, len(lines)))


class Right(dict[int, list[np.ndarray]]):
    """The results of the launch itself by seed, each computed when it is first asked for. The kernel must be clean."""

    def __init__(self, launch: Launch):
        super().__init__()
        self.launch = launch

    def __missing__(self, seed: int) -> list[np.ndarray]:
        with mock.patch.object(OrderChecker, "first_only", True):  # it must do without warnings, too
            self[seed] = self.launch.run(self.launch.program, seed)
        return self[seed]


def _outcome(launch: Launch, mutant: Mutant, right: Right, seeds: Sequence[int]) -> str:
    """What becomes of a mutant under the schedules of these seeds."""
    program = apply(launch.program, mutant)
    if of_text(program):
        return "order"
    if mutant.group == "wgmma.fence":
        return "idle"
    outcome = "unnoticed"
    for seed in seeds:
        expected = right[seed]
        try:
            with mock.patch.object(OrderChecker, "first_only", True), _time_limit(SECONDS):
                result = launch.run(program, seed)
        except sim.OrderError:
            return "order"
        except sim.SimError as error:
            return type(error).__name__
        except TimeoutError:
            return "hangs"
        if any(_wrong(*arrays) for arrays in zip(result, expected, launch.memory, strict=True)):
            outcome = "wrong"
    return outcome


def _wrong(result: np.ndarray, expected: np.ndarray, memory: tuple) -> bool:
    """Whether more differs than the last bits of numbers, which depend on the order of additions in memory."""
    other = result != expected
    if not other.any():
        return False
    words = len(result) // 4 * 4
    got, right = (array[:words].view(np.uint16)[1::2].astype(np.int32) for array in (result, expected))
    far = np.abs(got - right) > 2  # of upper halves: steps of bf16, or of fp16
    written = int((expected != memory[1]).sum())
    return 4 * int(far.sum()) > written // 50


@contextmanager
def _time_limit(seconds: int):
    """Raises TimeoutError in a run that takes more processor time: spinning warps are sure to hang long before that is
    proven."""

    def stop(*_) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
