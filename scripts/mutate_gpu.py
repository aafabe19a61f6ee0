"""Mutants of the Hopper kernels on a Hopper GPU: which of them ever give a wrong result, hang or crash.

    python scripts/mutate_gpu.py plan FILE           list the mutants (needs the simulator, no GPU)
    python scripts/mutate_gpu.py run FILE SECONDS    run them (needs ptxas and the GPU), so long for each kernel

Prints class, mutant and outcome of each. Every mutant that is wrong here has to be found by scripts/mutate.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from shared import mutants_gpu

from warpspec.common.hardware import MIB
from warpspec.common.launch import SIMULATED

H200 = replace(SIMULATED["sm_90a"], sm_count=132, l2_bytes=60 * MIB)


def _attention(dim: int) -> tuple[Callable, Callable]:
    shape = (2, 2048, 4, dim)

    def call() -> torch.Tensor:
        from warpspec.fmha import attention

        torch.manual_seed(0)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        return attention(q, k, v, causal=True, num_splits=1)

    def text() -> str:
        from warpspec.fmha import launch, sm90
        from warpspec.fmha.problem import AttentionProblem

        q = torch.empty(shape, dtype=torch.bfloat16)
        problem = AttentionProblem.of(q=q, k=q, v=q, causal=True, num_splits=1, memory=False)
        config = launch.plan(problem, H200).config
        return sm90.ATTENTION.compiled(config, "sm_90a", native=True).artifacts.PTX

    return call, text


def _softmax(rows: int, columns: int) -> tuple[Callable, Callable]:
    def call() -> torch.Tensor:
        from warpspec.softmax import softmax

        torch.manual_seed(0)
        return softmax(torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 4)

    def text() -> str:
        from warpspec.softmax import launch
        from warpspec.softmax.plan import choose_plan
        from warpspec.softmax.problem import SoftmaxProblem

        x = torch.empty(rows, columns, dtype=torch.bfloat16)
        config = choose_plan(SoftmaxProblem.of(x, x), H200).config
        return launch.softmax_kernel.compiled(config, "sm_90a", native=True).artifacts.PTX

    return call, text


CASES = {
    "fmha-sm90-d128": _attention(128),
    "softmax-long": _softmax(4, 1 << 21),
    "fmha-sm90-d64": _attention(64),
    "softmax-middle": _softmax(264, 40_000),
    "fmha-sm90-d256": _attention(256),
}


def main() -> None:
    """Command line."""
    if len(sys.argv) < 3 or sys.argv[1] not in ("plan", "run"):
        sys.exit(__doc__)
    path = Path(sys.argv[2])
    if sys.argv[1] == "plan":
        path.write_text(json.dumps({name: mutants_gpu.plan(text()) for name, (_, text) in CASES.items()}))
        return
    for name, rows in json.loads(path.read_text()).items():
        call, _ = CASES[name]
        for row in mutants_gpu.score(call, lambda _, rows=rows: rows, float(sys.argv[3])):
            print(name, *row, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
