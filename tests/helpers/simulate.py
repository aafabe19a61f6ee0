"""Calls of attention in the simulator: for which architecture, and past the checks of values."""

import contextlib
from collections.abc import Callable
from unittest import mock

from warpspec.common.launch import SIMULATED, Target, simulating
from warpspec.fmha import launch, plan
from warpspec.fmha.backward import call as backward_call
from warpspec.fmha.operands import Operands
from warpspec.fmha.plan import Plan
from warpspec.fmha.plan.candidates import Candidate, candidates, pairs_fit_line
from warpspec.fmha.plan.cost import Way
from warpspec.fmha.problem import AttentionProblem


@contextlib.contextmanager
def simulating_gradients(arch: str, **changes):
    """Gradients are computed by the kernels for ``arch`` in the simulator, whatever backend computed the results.
    changes: of the target, as ``simulating`` takes them."""
    resolve = mock.patch.object(backward_call, "resolve_backend", lambda backend, device: "sim")
    with simulating(arch, **changes), resolve:
        yield


@contextlib.contextmanager
def choosing(
    way: Way | None = None,
    wanted: Callable[[Candidate], bool] = lambda candidate: True,
    shape=None,
    splits: int = 1,
):
    """Plans are chosen, by their expected time, among the candidates that are ``wanted``, where there are some.

    way: the one in which CTAs get their work, however few tiles there are, where the kernel has it and nobody says how
    to split; None: the one that any number of tiles may be done in. shape: of tiles, instead of the chosen one. splits:
    into how many parts of the keys, for a way that has parts. What was prepared is forgotten: it does not know of this.
    """

    def chosen(choices, problem, target):
        def taken(shape, tiling):
            ways = choices.ways(problem, shape)
            fits = problem.seq_q <= tiling.queries or way is not Way.PARTITIONS
            if way is Way.LINE and tiling.column_groups > 1:
                fits = pairs_fit_line(problem, shape, tiling, target)
            if way in ways and fits:
                return Candidate(shape, tiling, way, splits)
            return Candidate(shape, tiling, ways[0], 1)

        if problem.num_splits is None:
            found = [taken(*one) for one in choices.tilings(problem)]
        else:
            found = list(candidates(choices, problem, target))
        found = [candidate for candidate in found if wanted(candidate)] or found
        return found if shape is None else [found[0]._replace(shape=shape)]

    forget = (launch.prepare.cache_clear, launch.expected_plan.cache_clear)
    for each in forget:
        each()
    with mock.patch.object(plan, "candidates", chosen):
        yield
    for each in forget:
        each()


@contextlib.contextmanager
def cutting_by_length():
    """Plans are chosen among those that cut work by length, of which calls must have some."""
    ways = set()

    def wanted(candidate: Candidate) -> bool:
        ways.add(candidate.way)
        return candidate.way is Way.LINE

    with choosing(Way.LINE, wanted):
        yield
    assert Way.LINE in ways, "no plan cut work by length"


def plan_for(target: Target | str, **arguments) -> Plan:
    """The plan of a call of ``attention``; its tensors may be without storage. target: also a simulated one's name."""
    target = SIMULATED[target] if isinstance(target, str) else target
    return launch.plan(AttentionProblem.of(**arguments, memory=False), target)


def run_unchecked(arguments: dict, *, o, arch: str = "sm_100a", **outputs) -> None:
    """Run a call's kernel in the simulator without the checks of the values of CPU tensors. outputs: lse, row_max,
    row_sum."""
    problem = AttentionProblem.of(**arguments, memory=False)
    tensors = {name: arguments.get(name) for name in Operands._fields if name != "o"} | outputs
    if tensors["v"] is None:
        tensors["v"] = tensors["k"]
    record = Operands(**tensors, o=o)
    launch.prepare(problem, SIMULATED[arch]).run(record)
