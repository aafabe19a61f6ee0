"""Compiling in many processes what a test on a GPU will launch: one after another would take minutes."""

import os
from collections.abc import Callable

import torch

from warpspec.aot.workers import compile_all
from warpspec.common.launch import Kernel

MOST_JOBS = 16


def compile_ahead(calls: Callable[[], object], monkeypatch) -> int:
    """Compile and keep the kernels that ``calls`` launches natively; returns how many.

    They are found by calling it with launches that do nothing: results are what memory held, so nothing may read them
    on the host.
    """
    wanted = {}

    def launcher(self, config, target, *, seed=0):
        wanted[self, config] = target.arch
        return lambda *arguments: None

    with monkeypatch.context() as patched:
        patched.setattr(Kernel, "launcher", launcher)
        calls()
    torch.cuda.synchronize()
    (arch,) = set(wanted.values())
    assert compile_all(list(wanted), arch, min(os.cpu_count(), MOST_JOBS)) == 0
    return len(wanted)
