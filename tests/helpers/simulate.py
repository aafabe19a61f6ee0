"""Which architecture's attention kernel backend "sim" runs."""

from dataclasses import replace

from warpspec.common.launch import SIMULATED, SIMULATED_ARCH
from warpspec.fmha import launch, ops
from warpspec.fmha.backward import call as backward_call
from warpspec.fmha.backward import launch as backward_launch
from warpspec.fmha.operands import Operands
from warpspec.fmha.plan import Plan
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.sm90 import shapes


def simulate_as(
    monkeypatch, arch: str, *, sm_count: int | None = None, seed: int = 0, small: bool = False
) -> None:
    """From now on backend "sim" runs the kernel for ``arch``, on so many SMs, with this seed of the simulator.

    small: on sm_90a, with the tile shapes of problems that have few tiles, as a test's have, instead of those of many.
    """
    if not small:
        monkeypatch.setattr(shapes, "SMALL_TILES", 0)
    target = SIMULATED[arch]
    if sm_count:
        target = replace(target, sm_count=sm_count)
    monkeypatch.setattr(ops, "prepare", lambda problem, _: launch.prepare(problem, target, seed))


def plan_for(arch: str, **arguments) -> Plan:
    """The plan of a call of ``attention``; its tensors may be without storage."""
    return launch.plan(AttentionProblem.of(**arguments, memory=False), SIMULATED[arch])


def run_unchecked(arguments: dict, *, o, arch: str = "sm_100a", **outputs) -> None:
    """Run a call's kernel in the simulator without the checks of the values of CPU tensors. outputs: lse, row_max,
    row_sum."""
    problem = AttentionProblem.of(**arguments, memory=False)
    tensors = {name: arguments.get(name) for name in Operands._fields if name != "o"} | outputs
    if tensors["v"] is None:
        tensors["v"] = tensors["k"]
    record = Operands(**tensors, o=o)
    if problem.packed_q:
        names = ("q", "o", "lse", "row_max", "row_sum", *(("k", "v") if problem.packed_k else ()))
        rows = {name: getattr(record, name) for name in names}
        record = record._replace(**{name: t if t is None else t[None] for name, t in rows.items()})
    launch.prepare(problem, SIMULATED[arch]).run(record)


def simulate_gradients_as(monkeypatch, arch: str, seed: int = 0) -> None:
    """From now on gradients are computed by the kernels for ``arch`` in the simulator, with this seed of it, whatever
    backend computed the results."""
    prepare = backward_launch.prepare
    monkeypatch.setattr(backward_call, "resolve_backend", lambda backend, device: "sim")
    monkeypatch.setattr(backward_call, "SIMULATED", {SIMULATED_ARCH: SIMULATED[arch]})
    monkeypatch.setattr(backward_launch, "prepare", lambda problem, target: prepare(problem, target, seed))
