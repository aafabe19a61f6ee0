"""Timing a sweep's shapes in a process of its own, which is started again where a call hangs or takes it down."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import warnings
from collections.abc import Callable

import torch

from . import gpu_bench, sweep_calls, sweep_regret, sweep_report
from .attention_peers import FLASH, FLEX, flash_attention
from .sweep_calls import OURS
from .sweep_compile import calls_of, one_line
from .sweep_shapes import BACKWARD, Shape, from_json, to_json

SHAPE_SECONDS = 20.0  # of a candidate at a shape, or of reading its kernels
START_SECONDS = 90.0  # of a process, or of what it prepares
DIFFERENT = 1e-2  # relative difference that no rounding to bf16 explains
DIFFERENT_GRADIENTS = 3e-2  # dS is rounded, too, and is a difference of two numbers


def serve(connection) -> None:
    """Times shapes as they arrive, or prepares one where ``without`` is None. Says which candidate it is at, then the
    result."""
    warnings.simplefilter("ignore")
    torch.cuda.init()
    torch.empty(1, device="cuda")
    flash_attention()
    connection.send(("ready", None))
    while True:
        fields, without, speeds, plans = connection.recv()
        shape = from_json(fields)
        if without is None:
            with torch.no_grad(), contextlib.suppress(Exception):  # timing it will say what is wrong
                sweep_calls.prepare(shape)
            connection.send(("result", None))
            continue
        result = sweep_report.result_of(shape, speeds) | {"missing": dict(without)}
        try:
            with torch.no_grad():
                measure(shape, result, lambda name: connection.send(("at", name)), plans)
        except Exception as error:
            result["missing"][OURS] = one_line(error)
        torch.cuda.empty_cache()
        connection.send(("result", result))


def measure(shape: Shape, result: dict, at: Callable[[str], None], plans: int = 0) -> None:
    """Fills in times, errors and missing. at: called with a candidate before it does anything that may fail. plans:
    how many besides the chosen one are timed."""
    at(OURS)
    inputs = calls_of(shape).input_sets(shape)
    calls = {OURS: calls_of(shape).ours(shape)}
    expected = calls[OURS](*inputs[0])
    torch.cuda.synchronize()
    others = {}
    if plans and sweep_regret.planned(shape):
        others, result["chosen"] = sweep_regret.other_calls(shape, plans)
    for name, call in (others | calls_of(shape).peers(shape)).items():
        if name in result["missing"] or (name == FLEX and FLASH in calls):
            continue
        at(name)
        try:
            error = difference(call(*inputs[0]), expected)
            gpu_bench.captured(call, inputs, 1)
        except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError) as refused:
            result["missing"][name] = one_line(refused)
            check_device()
            continue
        result["errors"][name] = error
        if error <= (DIFFERENT_GRADIENTS if shape.kind in BACKWARD else DIFFERENT):
            calls[name] = call
        else:
            result["missing"][name] = f"computes something else: relative difference {error:.1e}"
    del expected
    at(OURS)
    rounds = gpu_bench.SHORT_ROUNDS if result["flops_us"] > result["bytes_us"] else {}
    times = gpu_bench.graph_times(calls, inputs, **rounds)
    result["plans"] = {name: time for name, time in times.items() if name in others}
    result["times"] = {name: time for name, time in times.items() if name not in others}


def difference(theirs, ours) -> float:
    """Relative; NaN where either has one. Tensors, or as many of each, whose largest difference counts."""
    if isinstance(ours, tuple):
        return float(torch.tensor([difference(*pair) for pair in zip(theirs, ours, strict=True)]).max())
    assert theirs.shape == ours.shape, f"shape {list(theirs.shape)}, ours {list(ours.shape)}"
    exact = ours.float()
    return float((theirs.float() - exact).norm() / exact.norm())


def check_device() -> None:
    """End the process where the GPU does not answer any more: nothing that follows would mean anything."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        os._exit(1)


class Timer:
    """The process that times. speeds: of the GPU."""

    def __init__(self, speeds: gpu_bench.Speeds, serve: Callable = serve, start_method: str = "spawn"):
        self.speeds, self.serve, self.context = speeds, serve, multiprocessing.get_context(start_method)
        self.process = None

    def start(self) -> None:
        self.connection, far = self.context.Pipe()
        self.process = self.context.Process(target=self.serve, args=(far,), daemon=True)
        self.process.start()
        far.close()
        self._message(START_SECONDS)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None

    def _message(self, seconds: float):
        """(what, value) from the process. Raises EOFError where it has ended, TimeoutError where it says nothing."""
        if not self.connection.poll(seconds):
            raise TimeoutError
        return self.connection.recv()

    def _ask(self, shape: Shape, missing: dict | None, plans: int) -> None:
        """Send a request to the process, which is started where there is none."""
        if self.process is None:
            self.start()
        self.connection.send((to_json(shape), missing, self.speeds, plans))

    def prepare(self, shape: Shape) -> None:
        """Have the process compile what only it can (``sweep_calls.prepare``), before the shape is timed."""
        try:
            self._ask(shape, None, 0)
            self._message(START_SECONDS)
        except (EOFError, OSError):  # as above
            self.stop()

    def time(self, shape: Shape, plans: int = 0) -> dict:
        """The result. A candidate that takes the process down is left out, and the rest timed again. plans: how many
        besides the chosen one are timed."""
        missing = {}
        while True:
            at = OURS
            try:
                self._ask(shape, missing, plans)
                while True:
                    what, value = self._message(SHAPE_SECONDS)
                    if what == "result":
                        return value
                    at = value
            except (EOFError, OSError) as error:
                hung = isinstance(error, TimeoutError)
                self.stop()
                missing[at] = f"nothing for {SHAPE_SECONDS:.0f} s" if hung else "ended the process"
                if at == OURS:
                    return sweep_report.result_of(shape, self.speeds) | {"missing": missing}
