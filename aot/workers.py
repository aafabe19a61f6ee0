"""Compiles many kernels in several processes."""

from __future__ import annotations

import dataclasses
import enum
import shutil
import sys
import time
import warnings
from collections.abc import Hashable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from warpspec.common.launch import Kernel


def compile_ahead(kernel: Kernel, config: Hashable, arch: str) -> float:
    """Compile and keep a kernel; returns the seconds it took.

    Raises what the DSL raises, and RuntimeWarning if the result cannot be kept.
    """
    warnings.simplefilter("error", RuntimeWarning)
    start = time.monotonic()
    kernel.compiled(config, arch, native=True)
    return time.monotonic() - start


def shown(value) -> str:
    """A configuration as text for people: the fields that differ from their defaults, in records within it, too."""
    if isinstance(value, enum.Enum):
        return value.name
    if not dataclasses.is_dataclass(value):
        return repr(value)
    texts = (
        (each.name, shown(own))
        for each in dataclasses.fields(value)
        if (own := getattr(value, each.name)) != each.default
    )
    return f"{type(value).__name__}({', '.join(f'{name}={text}' for name, text in texts)})"


class Progress:
    """A line with kernels done, kernels in all, time, and the last kernel.

    Without a terminal, a line for each kernel.
    """

    def __init__(self, total: int):
        self.total, self.done, self.start = total, 0, time.monotonic()
        self.terminal = sys.stdout.isatty()

    def step(self, text: str) -> None:
        self.done += 1
        bar = "#" * (20 * self.done // self.total)
        line = f"[{bar:20}] {self.done}/{self.total}  {time.monotonic() - self.start:.0f} s  {text}"
        if not self.terminal:
            print(line, flush=True)
            return
        width = shutil.get_terminal_size().columns
        print(f"\r\x1b[K{line[: width - 1]}", end="\n" if self.done == self.total else "", flush=True)


def compile_all(wanted: Sequence[tuple[Kernel, Hashable]], arch: str, jobs: int) -> int:
    """Compile kernels in ``jobs`` processes; returns how many failed. Reports failures on stderr."""
    progress, failed = Progress(len(wanted)), 0
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        pending = {pool.submit(compile_ahead, *item, arch): item for item in wanted}
        for future in as_completed(pending):
            kernel, config = pending[future]
            error = future.exception()
            progress.step(f"{kernel.name} {'failed' if error else f'{future.result():.1f} s'}")
            if error is not None:
                failed += 1
                print(f"\n{kernel.name} {shown(config)}: {type(error).__name__}: {error}", file=sys.stderr)
    return failed
