"""Calls of which only tensors change: all else that their launches take is found once.

Kernels take the tensors of such a call as they are, and with the launches everything is done. To look at each tensor
again, and to put records of them together, takes longer than the launches do.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch

from warpspec.common.allocation import Block, allocate
from warpspec.common.launch import Target
from warpspec.fmha.backward.launch import (
    SINK_ALONE,
    Gradients,
    Prepared,
    Workspace,
    add_up_sink,
    arguments_of,
)
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.operands import INPUTS, Operands

HELD = ("o", "lse", *INPUTS)  # tensors of a forward call, in the order in which its backward pass gets them


class Place(NamedTuple):
    """Stands for a tensor: its index in the tuple from which launches pick."""

    index: int


class Direct(NamedTuple):
    """A call ready to run: each launch picks its arguments from one tuple of all tensors and constants.

    blocks: what is allocated, first ``count`` gradients, the wanted ones. constants: arguments that are no tensors.
    launches: functions of the kernels' arguments, each after the function that picks them. sink: the places of the
    parts of the sink's gradient, and of that gradient, among what is allocated.
    """

    target: Target
    device: torch.device
    blocks: tuple[Block, ...]
    count: int
    constants: tuple
    launches: tuple[tuple[Callable, Callable], ...]
    sink: tuple[int, int] | None

    def run(self, tensors: tuple) -> list[torch.Tensor]:
        """Compute the wanted gradients like ``launch.run_kernels``. tensors: do, dlse, the given ones of HELD."""
        device = self.target.device
        if device is not None and device == torch._C._cuda_getDevice():  # a context would take longer
            return self.launch(tensors)
        with self.target.current():
            return self.launch(tensors)

    def launch(self, tensors: tuple) -> list[torch.Tensor]:
        """``run`` on the current device."""
        made = allocate(self.blocks, self.device)
        everything = (*tensors, *made, *self.constants)
        for pick, launch in self.launches:
            launch(*pick(everything))
        if self.sink is not None:
            parts, gradient = self.sink
            add_up_sink(made[parts], made[gradient])
        return made[: self.count]


def is_direct(problem: BackwardProblem, operands: Operands, do, dlse) -> bool:
    """Whether a call can be ``Direct`` if kernels take its rows as they are."""
    small = [t for t in (operands.lse, dlse) if t is not None]
    further = operands.ranges is not None or "bias" in problem.wanted
    return do is not None and not further and all(t.is_contiguous() for t in small)


def direct(
    prepared: Prepared,
    problem: BackwardProblem,
    operands: Operands,
    results: tuple[Block, ...],
    workspace: Workspace,
) -> Direct:
    """Arrange the launches of a call. operands: with o and lse; it matters which are given."""
    numbers = itertools.count()

    def places(values) -> list[Place | None]:
        return [None if value is None else Place(next(numbers)) for value in values]

    do, dlse = places(("do", "dlse"))
    held = dict(zip(HELD, places(getattr(operands, name) for name in HELD), strict=True))
    held["v"] = held["v"] or held["k"]
    made, others = places(results), Workspace._make(places(workspace))
    gradients = Gradients(do, dlse, **dict(zip(problem.wanted, made, strict=True)))
    rows, main, last = arguments_of(prepared, Operands(**held), gradients, others)
    first, constants, launches = next(numbers), [], []
    kernels = [(prepared.rows, rows), (prepared.main, (*main, *prepared.numbers)), (prepared.results, last)]
    for launch, arguments in kernels[:1] if problem.wanted == SINK_ALONE else kernels:
        if launch is None:
            continue
        picked = []
        for argument in arguments:
            if isinstance(argument, Place):
                picked.append(argument.index)
            else:
                picked.append(first + len(constants))
                constants.append(argument)
        launches.append((operator.itemgetter(*picked), launch))
    blocks, sink = (*results, *[block for block in workspace if block is not None]), None
    if gradients.sink is not None:
        sink = tuple(place.index - made[0].index for place in (others.dsink, gradients.sink))
    return Direct(
        prepared.target,
        problem.forward.device,
        blocks,
        len(results),
        tuple(constants),
        tuple(launches),
        sink,
    )
