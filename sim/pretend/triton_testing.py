"""What benchmarks use of `triton.testing`: calls are run once, and their time is this machine's."""

from __future__ import annotations

import importlib.machinery
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

NAME = "triton.testing"


def do_bench(
    fn: Callable, warmup: int = 25, rep: int = 100, *_: object, quantiles: Sequence[float] | None = None,
    return_mode: str = "mean", **__: object,
) -> float | list[float]:  # fmt: skip
    """Call a function once; its milliseconds, one for each quantile, or in a list for return_mode "all"."""
    start = time.perf_counter()
    fn()
    taken = (time.perf_counter() - start) * 1e3
    if quantiles is not None:
        return [taken] * len(quantiles) if len(quantiles) > 1 else taken
    return [taken] if return_mode == "all" else taken


class Benchmark(SimpleNamespace):
    """triton.testing.Benchmark: the axes of a benchmark, as attributes."""

    def __init__(
        self, x_names: Sequence[str], x_vals: Sequence, line_arg: str, line_vals: Sequence, line_names: Sequence[str],
        plot_name: str, args: dict, **others: object,
    ):  # fmt: skip
        super().__init__(
            x_names=x_names, x_vals=x_vals, line_arg=line_arg, line_vals=line_vals, line_names=line_names,
            plot_name=plot_name, args=args, **others,
        )  # fmt: skip


class Mark:
    """triton.testing.Mark: a function and its benchmarks; `run` prints a line for each call's result."""

    def __init__(self, fn: Callable, benchmarks: Benchmark | list[Benchmark]):
        self.fn, self.benchmarks = fn, benchmarks

    def run(self, *_: object, **options: object) -> None:
        """Call the function at each point of each benchmark."""
        for bench in self.benchmarks if isinstance(self.benchmarks, list) else [self.benchmarks]:
            for x in bench.x_vals:
                values = x if isinstance(x, list | tuple) else [x] * len(bench.x_names)
                point = dict(zip(bench.x_names, values, strict=True))
                for value, name in zip(bench.line_vals, bench.line_names, strict=True):
                    result = self.fn(**point, **{bench.line_arg: value}, **bench.args)
                    print(f"{bench.plot_name}: {point}, {name}: {result}")


def perf_report(benchmarks: Benchmark | list[Benchmark]) -> Callable[[Callable], Mark]:
    """triton.testing.perf_report: a decorator that makes a Mark."""
    return lambda fn: Mark(fn, benchmarks)


BENCHES = {
    "do_bench": do_bench,
    "do_bench_cudagraph": do_bench,
}  # they want a device: replaced in the real one
WRITTEN = BENCHES | {"Benchmark": Benchmark, "Mark": Mark, "perf_report": perf_report}


class _Finder:
    """Replaces the functions of an installed `triton.testing` that want a device, when it is imported."""

    def __init__(self) -> None:
        self.before: dict[str, object] = {}

    def find_spec(self, name: str, path: object = None, target: object = None):
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == NAME else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module) -> None:
                execute(module)
                self.replace(module)

            spec.loader.exec_module = exec_module
        return spec

    def replace(self, module: ModuleType) -> None:
        self.before = {name: getattr(module, name) for name in BENCHES}
        vars(module).update(BENCHES)


@contextmanager
def replaced() -> Iterator[None]:
    """A context in which an installed `triton.testing` measures without a device."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    if NAME in sys.modules:
        finder.replace(sys.modules[NAME])
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if NAME in sys.modules:
            vars(sys.modules[NAME]).update(finder.before)
