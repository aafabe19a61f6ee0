"""The torch operator behind ``swap_ffn_decode``: checks, backend choice, the step.

The operator takes weights as a list of tensors, from which ``weights.unflatten`` rebuilds the record. Checks run inside
the operator, on real tensors, so that compiled and eager calls raise the same errors.
"""

import torch

from warpspec.common.backend import resolve_backend
from warpspec.common.launch import target_of
from warpspec.common.outputs import note_written
from warpspec.common.repeated import watched
from warpspec.swap import reference
from warpspec.swap.problem import SwapProblem
from warpspec.swap.weights import SwapState, unflatten

SCHEMA = (
    "(Tensor x, Tensor(a!) ram, Tensor(b!) map, Tensor[] weights, float eps, SymInt events, SymInt k_ffn, "
    "bool residual, str backend) -> Tensor"
)


def checked(x, ram, map_, tensors, eps, events, k_ffn, residual, *, memory: bool):
    """Check the operator's arguments; (problem, weights)."""
    weights = unflatten(tensors, eps)
    options = dict(events=events, k_ffn=k_ffn, residual=residual)
    return SwapProblem.check(x, SwapState(ram, map_), weights, **options, memory=memory), weights


def run(x, ram, map, weights, eps, events, k_ffn, residual, backend) -> torch.Tensor:
    """Run a step; returns delta, changes ram and map in place."""
    problem, w = checked(x, ram, map, weights, eps, events, k_ffn, residual, memory=True)
    backend = resolve_backend(backend, problem.device)
    if problem.rows == 0:
        return torch.empty_like(x)
    if backend == "reference":
        options = dict(events=events, k_ffn=k_ffn, residual=residual)
        delta, new_ram, new_map, _ = reference.decode(x, ram, map, w, **options)
        ram.copy_(new_ram)
        map.copy_(new_map)
        return delta.to(x.dtype)
    from warpspec.swap import launch

    delta = torch.empty(problem.batch, problem.d_model, dtype=x.dtype, device=x.device)
    step = launch.prepare(problem, target_of(x.device))
    step.run(step.operands(x.contiguous(), ram, map, w, delta))
    return delta


@torch.library.custom_op("warpspec::swap_ffn", mutates_args=("ram", "map"), schema=SCHEMA)
def swap_ffn(x, ram, map, weights, eps, events, k_ffn, residual, backend):
    """Operator of a step; returns delta, changes ram and map in place."""
    return run(x, ram, map, weights, eps, events, k_ffn, residual, backend)


@swap_ffn.register_fake
def _(x, ram, map, weights, eps, events, k_ffn, residual, backend):
    checked(x, ram, map, weights, eps, events, k_ffn, residual, memory=False)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def call(x, ram, map, weights, *others) -> torch.Tensor:
    """Call ``swap_ffn`` on arguments that autograd does not record; through torch if ``watched`` says so."""
    if watched(x, ram, map, *weights):
        return swap_ffn(x, ram, map, weights, *others)
    delta = run(x, ram, map, weights, *others)
    note_written(ram, map)
    return delta
