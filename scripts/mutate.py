"""Mutants of our kernels: what the simulator's order checker finds of them.

    python scripts/mutate.py                     every kernel of the list below, at small sizes
    python scripts/mutate.py fmha-sm100 topk     some of them
    python scripts/mutate.py --seeds 4 fmha      under more schedules; a name stands for all that begin with it
    python scripts/mutate.py --write FILE        also put the scores into FILE, as JSON

Each instruction of a kernel's PTX that orders memory (fences, waits, commits, arrivals, barriers) is deleted or
weakened, one at a time, and the kernel runs in the simulator with check="order". Prints the score by class and every
mutant that was not found. Instructions that the case does not execute are left out; idle ones, which do nothing in
its runs that an earlier one has not done, are counted apart: without them the kernel is as right as with them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from shared import mutants

from warpspec.common.launch import SIMULATED
from warpspec.fmha import attention, ops
from warpspec.fmha import launch as attention_launch

HELPERS = Path(__file__).resolve().parent.parent / "tests"


def _attention(arch: str, sms: int | None = None, **shape) -> Callable[[], None]:
    """sms: SMs that it is planned for; few of them, and a CTA has several tiles."""

    def run() -> None:
        torch.manual_seed(0)
        batch, sq, sk, heads, dim = (shape[n] for n in ("batch", "sq", "sk", "heads", "dim"))
        q = torch.randn(batch, sq, heads, dim).bfloat16()
        k, v = (torch.randn(batch, sk, 1, dim).bfloat16() for _ in range(2))
        k *= torch.linspace(4, 0.1, sk).bfloat16()[:, None, None]  # maxima rise: O is rescaled
        options = {name: value for name, value in shape.items() if name in ("causal", "window", "num_splits")}
        if "lengths" in shape:
            options["kv_lengths"] = torch.tensor(shape["lengths"], dtype=torch.int32)
        target = SIMULATED[arch] if sms is None else replace(SIMULATED[arch], sm_count=sms)

        def prepare(problem, _):
            return attention_launch.prepare(problem, target, 0)

        with mock.patch.object(ops, "prepare", prepare):
            attention(q, k, None if shape.get("latent") else v, **options, backend="sim")

    return run


def _gathered() -> None:
    sys.path.insert(0, str(HELPERS / "helpers"))
    from gathered_cases import random_case

    from warpspec.fmha.gathered import gathered_attention
    from warpspec.fmha.gathered import ops as gathered_ops

    case = random_case(4, 8, (130, 70), num_splits=1)
    target = replace(SIMULATED["sm_90a"], sm_count=1)
    with mock.patch.object(gathered_ops, "target_of", lambda device: target):
        gathered_attention(case.q, case.key_sets, backend="sim", **case.options)


def _swap() -> None:
    sys.path.insert(0, str(HELPERS / "helpers"))
    from swap_cases import make_plan, run, small

    # Two clusters: phases wait for other clusters' counts. One, with more weights: rings are filled again and again.
    for ctas, d_ff in ((4, 8), (2, 300)):
        x, state, weights = small(1, cores=9, d_ff=d_ff)
        plan = make_plan("sm_90a", fused=True, ctas=ctas)
        run(x, state, weights, dict(events=2, k_ffn=1, residual=False), plan, SIMULATED["sm_90a"])


def _moe(shape: str, groups: int = 2, **epilogue) -> Callable[[], None]:
    def run() -> None:
        sys.path.insert(0, str(HELPERS / "helpers"))
        from gemm_cases import GemmCase, inputs_of, poisoned_out

        from warpspec.moe.sm100 import config, grouped_gemm

        tiles = {"single": config.SINGLE, "pair": config.PAIR, "swapped": config.SWAPPED[16]}[shape]
        sizes = dict(counts=(5, 0, 130, 1), k=600, width=264, dropped=3)
        case = GemmCase("", **sizes, **epilogue)
        inputs, out = inputs_of(case, 0), poisoned_out(case)
        options = dict(epilogue=case.epilogue, limit=case.limit, out_scale=inputs.out_scale)
        grouped_gemm(inputs.a, inputs.w, inputs.offsets, out, **options, shape=tiles, groups=groups, seed=0)

    return run


def _streamed_moe() -> None:
    sys.path.insert(0, str(HELPERS / "helpers"))
    from moe_cases import make_experts, randn

    from warpspec.moe import moe_ffn, route

    layer = make_experts(5, 400, 120, biases=True)[0].for_backend("sm90")
    tokens = randn(12, 400, seed=7).bfloat16()
    moe_ffn(
        tokens, layer, *route(randn(12, 5, seed=50), 3), activation="swiglu_oai", limit=1.0, backend="sim"
    )


def _gradients(arch: str, dim: int) -> Callable[[], None]:
    def run() -> None:
        sys.path.insert(0, str(HELPERS / "helpers"))
        import pytest
        from gradient_cases import Case
        from simulate import simulate_gradients_as

        with pytest.MonkeyPatch.context() as patch:
            simulate_gradients_as(patch, arch)
            # Rows that see nothing; only keys that nobody sees; every row sees every key.
            for rows, keys, causal in ((330, 200, True), (256, 200, True), (256, 128, False)):
                case = Case("", seq_q=rows, seq_k=keys, head_dim=dim, causal=causal)
                case.gradients(case.tensors(), backend="reference")

    return run


def _projection(arch: str) -> Callable[[], None]:
    def run() -> None:
        sys.path.insert(0, str(HELPERS / "helpers"))
        from projection_cases import case

        from warpspec.fmha.projection import ops as projection_ops
        from warpspec.fmha.projection import output_projection

        target = replace(SIMULATED[arch], sm_count=1)
        with mock.patch.object(projection_ops, "target_of", lambda device: target):
            output_projection(*case(70, 24, 2, 384, float8=arch == "sm_90a"), backend="sim")

    return run


def _softmax(name: str, arch: str) -> Callable[[], None]:
    def run() -> None:
        sys.path[:0] = [str(HELPERS / part) for part in ("helpers", "softmax")]
        import test_softmax_sim as cases

        x, _, out = cases.case(name, torch.bfloat16, aligned=True)
        cases.run(name, x, out, arch)

    return run


def _topk(arch: str, **fields) -> Callable[[], None]:
    def run() -> None:
        sys.path[:0] = [str(HELPERS / part) for part in ("helpers", "softmax")]
        import test_topk_sim as cases

        torch.manual_seed(0)
        cases.run(cases.config_of(torch.float32, 4, **fields), torch.randn(3, 3000), 4, arch)

    return run


CAUSAL = dict(batch=2, sq=200, sk=500, heads=1, lengths=(500, 40), causal=True, num_splits=1)
FULL = dict(batch=2, sq=130, sk=700, heads=1, lengths=(700, 40), num_splits=1)
DECODE = dict(batch=2, sq=1, sk=900, heads=8, lengths=(900, 330), num_splits=2)
KERNELS: dict[str, Callable[[], None]] = {
    "fmha-sm100": _attention("sm_100a", **CAUSAL, window=(250, 0), dim=128),
    "fmha-sm100-d64": _attention("sm_100a", **FULL, dim=64),
    "fmha-sm100-d256": _attention("sm_100a", **CAUSAL, dim=256),
    "fmha-sm100-d512": _attention("sm_100a", **CAUSAL, dim=512),
    "fmha-sm100-latent": _attention("sm_100a", **CAUSAL, dim=512, latent=True),
    "fmha-sm100-decode": _attention("sm_100a", **DECODE, dim=128),
    "fmha-sm90": _attention("sm_90a", 1, **CAUSAL, window=(250, 0), dim=128),
    "fmha-sm90-d64": _attention("sm_90a", 1, **FULL, dim=64),
    "fmha-sm90-d256": _attention("sm_90a", 1, **CAUSAL, dim=256),
    "fmha-sm90-d512": _attention("sm_90a", 1, **CAUSAL, dim=512),
    "fmha-sm90-latent": _attention(
        "sm_90a", 1, **CAUSAL | dict(sq=70, sk=300, lengths=(300, 170)), dim=512, latent=True
    ),
    "fmha-sm90-decode": _attention("sm_90a", 1, **DECODE, dim=128),
    "gathered": _gathered,
    "swap": _swap,
    "gradients-sm90": _gradients("sm_90a", 128),
    "gradients-sm100": _gradients("sm_100a", 128),
    "projection-sm90": _projection("sm_90a"),
    "projection-sm100": _projection("sm_100a"),
    "moe-sm90": _streamed_moe,
    "moe-single": _moe("single", 1, epilogue="linear"),
    "moe-single-nvfp4": _moe("single", epilogue="swiglu", limit=3.0, out="nvfp4"),
    "moe-pair": _moe("pair", epilogue="swiglu"),
    "moe-swapped": _moe("swapped", epilogue="swiglu"),
    "softmax-resident": _softmax("resident", "sm_90a"),
    "softmax-split": _softmax("split", "sm_90a"),
    "softmax-staged": _softmax("staged cluster", "sm_90a"),
    "softmax-two-pass": _softmax("two-pass cluster", "sm_90a"),
    "softmax-cluster": _softmax("cluster", "sm_90a"),
    "topk": _topk("sm_90a", warps=4, unroll=2),
    "topk-cluster": _topk("sm_90a", warps=2, cluster=4, unroll=1),
}


def score(name: str, seeds: int, only: str = "") -> list[mutants.Verdict]:
    """The verdicts on the mutants of a kernel's launches. only: pattern of their descriptions."""
    found = mutants.Score(seeds, only)
    with mutants.recorded(found.visit):
        KERNELS[name]()
    return found.verdicts


def table(results: dict[str, list[mutants.Verdict]]) -> dict[str, dict[str, list[int]]]:
    """Class -> kernel -> [found, explained, all but the idle, idle]."""
    counts: dict[str, dict[str, list[int]]] = {}
    for name, verdicts in results.items():
        for verdict in verdicts:
            cell = counts.setdefault(verdict.mutant.group, {}).setdefault(name, [0, 0, 0, 0])
            cell[0] += verdict.found
            cell[1] += verdict.outcome == "explained"
            cell[2] += verdict.outcome != "idle"
            cell[3] += verdict.outcome == "idle"
    return counts


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernels", nargs="*", help=", ".join(KERNELS))
    parser.add_argument("--seeds", type=int, default=2, help="schedules of each mutant")
    parser.add_argument(
        "--only", default="", help="pattern of the mutants' descriptions, as they are printed"
    )
    parser.add_argument("--write", type=Path, help="JSON file for the scores")
    arguments = parser.parse_args()
    names = [n for n in KERNELS if not arguments.kernels or any(n.startswith(k) for k in arguments.kernels)]
    if not names:
        parser.error(f"no kernel of that name; there are {', '.join(KERNELS)}")
    results = {}
    for name in names:
        start = time.monotonic()
        results[name] = score(name, arguments.seeds, arguments.only)
        kinds = Counter(verdict.outcome for verdict in results[name])
        found = sum(verdict.found for verdict in results[name])
        shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        idle = kinds["idle"]
        print(
            f"{name}: {found} of {len(results[name]) - idle} found in {time.monotonic() - start:.0f} s ({shown})",
            flush=True,
        )
        for verdict in results[name]:
            if verdict.outcome in ("wrong", "unnoticed"):
                print(f"    {verdict.outcome}: {verdict.mutant.group}, {verdict.text}")
            elif verdict.outcome == "explained":
                print(f"    {verdict.mutant.group}, {verdict.text}: {verdict.reason}")
    counts = table(results)
    print("\nclass                 found, explained, of all; idle")
    for group, cells in counts.items():
        found, explained, every, idle = (sum(cell[i] for cell in cells.values()) for i in range(4))
        print(f"{group:22}{found}, {explained}, of {every}; {idle}")
    if arguments.write:
        arguments.write.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
