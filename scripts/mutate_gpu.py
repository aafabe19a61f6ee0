"""Mutants of the Hopper kernels on a Hopper GPU: which of them ever give a wrong result, hang or crash.

    python scripts/mutate_gpu.py plan FOLDER [CASE...]           compile kernels and list mutants (no GPU needed)
    python scripts/mutate_gpu.py run FOLDER SECONDS [CASE...]    run them (ptxas and the GPU), for so long in all

Prints case, class, mutant and outcome of each. Every mutant that is wrong here has to be found by scripts/mutate.py.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
from shared import mutants_gpu
from shared.mutants_gpu import Case

from warpspec.common.hardware import gpu_model
from warpspec.common.launch import Target

H200 = Target.of_model(gpu_model("H200"))


def _normal(*shape: int, seed: int, dtype=torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def _attention(q: tuple, k: tuple, *, latent: bool = False) -> Case:
    options = dict(causal=True, num_splits=1)

    def compiled():
        from warpspec.fmha import launch, sm90
        from warpspec.fmha.problem import AttentionProblem

        queries, keys = (torch.empty(shape, dtype=torch.bfloat16) for shape in (q, k))
        problem = AttentionProblem.of(q=queries, k=keys, v=None if latent else keys, **options)
        return sm90.ATTENTION.compiled(launch.plan(problem, H200).config, "sm_90a", native=True)

    def inputs(seed: int) -> list:
        made = [_normal(*q, seed=3 * seed), *(_normal(*k, seed=3 * seed + i) for i in (1, 2))]
        return [*made[:2], None] if latent else made

    def call(tensors: list) -> list[torch.Tensor]:
        from warpspec.fmha import attention

        return [attention(*tensors, **options)]

    return Case("fmha.sm90", compiled, inputs, call)


def _softmax(rows: int, columns: int) -> Case:
    def compiled():
        from warpspec.softmax import launch
        from warpspec.softmax.plan import choose_plan
        from warpspec.softmax.problem import SoftmaxProblem

        x = torch.empty(rows, columns, dtype=torch.bfloat16)
        config = choose_plan(SoftmaxProblem.of(x, x), H200).config
        return launch.softmax_kernel.compiled(config, "sm_90a", native=True)

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        from warpspec.softmax import softmax

        return [softmax(x)]

    return Case("softmax", compiled, lambda seed: 4 * _normal(rows, columns, seed=seed), call)


def _topk(rows: int, columns: int, k: int) -> Case:
    def compiled():
        from warpspec.softmax.topk.launch import topk_kernel
        from warpspec.softmax.topk.plan import choose_config

        config = choose_config(rows, columns, k, "float32", False, False, H200.sm_count)
        return topk_kernel.compiled(config, "sm_90a", native=True)

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        from warpspec.softmax import softmax_topk

        return list(softmax_topk(x, k))

    return Case(
        "softmax_topk", compiled, lambda seed: _normal(rows, columns, seed=seed, dtype=torch.float32), call
    )


def _swap() -> Case:
    events = dict(events=2, k_ffn=2, residual=False)
    sizes = dict(cores=256, d_ff=2048)

    def compiled():
        from shared.swap_inputs import random_call, random_weights

        from warpspec.swap import launch
        from warpspec.swap.problem import SwapProblem

        weights = random_weights(**sizes).prepare()
        step = launch.Step.__new__(launch.Step)
        step.problem = SwapProblem.check(*random_call(weights, 1), weights, **events)
        step.target, step.plan = H200, launch.make_plan(step.problem, H200)
        step.forced = step.recorded = False
        return launch.SWAP.compiled(step.config("fused"), "sm_90a", native=True)

    def inputs(seed: int) -> tuple:
        from shared.swap_inputs import random_call, random_weights

        weights = random_weights(**sizes, device="cuda", seed=seed).prepare()
        return *random_call(weights, 1, seed=seed + 1), weights

    def call(made: tuple) -> list[torch.Tensor]:
        from warpspec.swap import swap_ffn_decode

        delta, state = swap_ffn_decode(*made, **events)
        return [delta, state.ram, state.map]

    return Case("swap", compiled, inputs, call)


CASES = {
    "fmha-sm90-d128": _attention((2, 2048, 4, 128), (2, 2048, 4, 128)),
    "fmha-sm90-d512": _attention((2, 64, 32, 512), (2, 2048, 1, 512), latent=True),
    "softmax-long": _softmax(4, 1 << 21),
    "softmax-middle": _softmax(264, 40_000),
    "topk": _topk(16, 128_000, 8),
    "swap": _swap(),
}


def main() -> None:
    """Command line."""
    if len(sys.argv) < 3 or sys.argv[1] not in ("plan", "run"):
        sys.exit(__doc__)
    folder = Path(sys.argv[2])
    names = sys.argv[3 if sys.argv[1] == "plan" else 4 :]
    cases = {name: CASES[name] for name in names or CASES}
    if sys.argv[1] == "plan":
        mutants_gpu.plan(folder, cases)
        return
    counts = Counter()
    for row in mutants_gpu.score(folder, cases, float(sys.argv[3])):
        print(*row, sep=" | ", flush=True)
        counts[row[0], row[3].split(" ")[0].split(":")[0]] += 1
    for (name, outcome), count in sorted(counts.items()):
        print(f"{name}: {count} {outcome}")


if __name__ == "__main__":
    main()
