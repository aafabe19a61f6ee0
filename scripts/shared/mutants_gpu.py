"""Mutants on a Hopper GPU: the same changes to the kernel's PTX, assembled by ptxas, run many times.

Every mutant runs in a process of its own, which is ended where it hangs. The parent never touches the GPU. The list of
mutants (`plan`) is made where the simulator is installed; running it needs only the DSL and ptxas.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import torch

from warpspec.common import kernel_cache, launch

SECONDS = 4  # a mutant's process, its start included
RUNS = 30
AT_ONCE = 8  # processes


def plan(text: str) -> list[dict]:
    """The mutants of a kernel's PTX: class, what is changed, line (from 1), the line before and after."""
    from shared.mutants import mutants
    from warpspec.sim import ptx

    (kernel,) = ptx.parse(text).kernels.values()
    lines = text.split("\n")
    result = []
    for mutant in mutants(kernel.instrs):
        ins = kernel.instrs[mutant.index]
        before = lines[ins.line - 1]
        row = dict(group=mutant.group, change=mutant.describe(ins), line=ins.line, before=before)
        result.append(row | dict(after=_changed(before, ins, mutant)))
    return result


def _changed(line: str, ins, mutant) -> str:
    """A line of PTX with its instruction changed."""
    from shared.mutants import NOTHING, TRUE

    start = line.index(ins.opcode)
    end = line.index(";", start) + 1
    statement = line[start:end]
    if mutant.opcode == NOTHING:
        new = "/* deleted */"
        head, head_rest = line[:start], line[end:]
        guard = re.search(r"@!?\S+\s*$", head)
        line = head[: guard.start()] if guard else head
        return line + new + head_rest
    if mutant.opcode == TRUE:
        predicate = statement.split(None, 1)[1].split(",")[0]
        new = f"setp.eq.u32 {predicate}, 0, 0;"
    else:
        new = statement.replace(ins.opcode, mutant.opcode, 1)
        if mutant.operands != ins.operands:
            new = re.sub(r"\d+;$", f"{mutant.operands[0].value};", new)
    return line[:start] + new + line[end:]


def assemble(text: str) -> bytes | None:
    """ptxas's cubin of a PTX text, or None where it refuses."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "a.ptx", Path(folder) / "a.cubin"
        # The toolkit may be older than the DSL; what these kernels need is in PTX 9.0.
        text = re.sub(r"^\s*\.(loc|file)\b.*$", "", text, flags=re.M)  # without line information
        text = re.sub(r"^\s*\.section[^{]*\{[^}]*\}", "", text, flags=re.M)
        source.write_text(re.sub(r"^\.version .*$", ".version 9.0", text, count=1, flags=re.M))
        command = ["ptxas", "-arch=sm_90a", "-o", str(target), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        return target.read_bytes() if done.returncode == 0 else None


class Recorder:
    """Stands for ``launch.Kernel.compiled``: remembers what is compiled, and puts a mutant's code in one's place."""

    def __init__(self):
        self.original = launch.Kernel.compiled
        self.made: list[tuple] = []
        self.code: dict[tuple, bytes] = {}

    def __call__(self, kernel, config, arch, *, native=False):
        key = (kernel.name, repr(config))
        if key in self.code:
            artifacts = next(compiled.artifacts for k, compiled in self.made if k == key)
            return kernel_cache.NativeFunction(self.code[key], artifacts)
        compiled = self.original(kernel, config, arch, native=native)
        self.made.append((key, compiled))
        return compiled


class Child:
    """A forked process that does some work and says how it ended."""

    def __init__(self, work: Callable[[], str], seconds: float):
        reading, writing = os.pipe()
        self.pid: int | None = os.fork()
        if self.pid == 0:
            try:
                os.write(writing, work().encode())
            finally:
                os._exit(0)
        os.close(writing)
        self.pipe = os.fdopen(reading, "rb")
        self.end = time.monotonic() + seconds

    def result(self) -> str | None:
        """What the work returned; "hangs" where it took too long, "crashes" where it ended otherwise; None: not yet."""
        if os.waitpid(self.pid, os.WNOHANG)[0]:
            with self.pipe:
                return self.pipe.read().decode() or "crashes"
        if time.monotonic() < self.end:
            return None
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pipe.close()
        return "hangs"


def in_children(works: list[Callable[[], str] | None], seconds: float, budget: float) -> list[str]:
    """What each work returns, several at a time; "not run" where the time of all is over."""
    results = ["not run"] * len(works)
    waiting = [i for i, work in enumerate(works) if work is not None]
    running: dict[int, Child] = {}
    end = time.monotonic() + budget
    while running or (waiting and time.monotonic() < end):
        while waiting and len(running) < AT_ONCE and time.monotonic() < end:
            i = waiting.pop(0)
            running[i] = Child(works[i], seconds)
        for i, child in list(running.items()):
            found = child.result()
            if found is not None:
                results[i] = found
                del running[i]
        time.sleep(0.01)
    return results


def score(
    call: Callable[[], torch.Tensor], rows_of: Callable[[str], list[dict]], budget: float
) -> list[tuple[str, str, str]]:
    """(class, mutant, outcome) of every mutant of the first kernel that `call` launches on CUDA tensors.

    rows_of: makes `plan` of its PTX.

    outcome: "right", "wrong", "hangs", "crashes", an error's name, or "not assembled". budget: seconds, of all.
    """
    recorder = Recorder()
    folder = Path(tempfile.mkdtemp())

    def compile_() -> str:
        with mock.patch.object(launch.Kernel, "compiled", lambda *a, **k: recorder(*a, **k)):
            right = call()
        (key, compiled), *_ = recorder.made
        code = getattr(compiled, "code", None) or kernel_cache._export_native(compiled)
        (folder / "code").write_bytes(code)
        (folder / "cubin").write_bytes(compiled.artifacts.CUBIN)
        (folder / "ptx").write_text(compiled.artifacts.PTX)
        torch.save(right.cpu(), folder / "right")
        return "\n".join(key)

    key = tuple(in_children([compile_], 60, 60)[0].split("\n"))
    if len(key) != 2:
        return [("", "the kernel itself", f"not compiled: {key}")]
    text, code = (folder / "ptx").read_text(), (folder / "code").read_bytes()
    cubin = (folder / "cubin").read_bytes()
    at = code.index(cubin)
    chosen = rows_of(text)
    lines = text.split("\n")
    texts = [text]
    for row in chosen:
        at_line = row["line"] - 1
        if lines[at_line] != row["before"]:
            return [("", "the kernel itself", f"is another one: line {row['line']} is {lines[at_line]}")]
        texts.append("\n".join([*lines[:at_line], row["after"], *lines[at_line + 1 :]]))
    with ThreadPoolExecutor(16) as pool:
        cubins = list(pool.map(assemble, texts))

    class Artifacts:
        PTX, CUBIN = text, cubin

    def outcome(new: bytes | None) -> Callable[[], str] | None:
        def work() -> str:
            try:
                right = torch.load(folder / "right").cuda().float()
                patched = Recorder()
                patched.made = [(key, type("Kept", (), {"artifacts": Artifacts}))]
                patched.code[key] = code[:at] + new.ljust(len(cubin), b"\0") + code[at + len(cubin) :]
                with mock.patch.object(launch.Kernel, "compiled", lambda *a, **k: patched(*a, **k)):
                    for _ in range(RUNS):
                        got = call()
                        torch.cuda.synchronize()
                        if not torch.allclose(
                            got.float(), right.float(), rtol=0.05, atol=0.02, equal_nan=True
                        ):
                            return "wrong"
                return "right"
            except Exception as error:
                return f"{type(error).__name__}: {error}"[:300].replace("\n", " ")

        return None if new is None or len(new) > len(cubin) else work

    names = ["the kernel itself", *(row["change"] for row in chosen)]
    groups = ["control", *(row["group"] for row in chosen)]
    results = in_children([outcome(new) for new in cubins], SECONDS, budget)
    rows = []
    for group, name, new, result in zip(groups, names, cubins, results, strict=True):
        if new is None or len(new) > len(cubin):
            result = "not assembled" if new is None else f"too long by {len(new) - len(cubin)}"
        rows.append((group, name, result))
    return rows
