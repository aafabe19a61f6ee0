"""Cases of softmax and top-k."""

from __future__ import annotations

from collections.abc import Callable

import torch

from warpspec.common.launch import SIMULATED


def _softmax(name: str, arch: str) -> Callable[[], None]:
    def run() -> None:
        import test_softmax_sim as cases

        *_, vectors = cases.STRATEGIES[name]
        for shorten in (0, (vectors - 100) * 8):  # of short rows, two stand in a ring
            x, _, out = cases.case(name, torch.bfloat16, aligned=True, shorten=shorten)
            cases.run(name, x, out, arch)

    return run


def _softmax_once() -> None:
    import test_softmax_sim as cases

    config = cases.StagedConfig("float32", 64, 2, 2, False, 4, once=True)
    x = torch.randn(6, 4 * (96 * 2 - 8))
    cases.launch.run_sim(
        x, torch.empty_like(x), cases.SoftmaxPlan("staged", config, 0, 0, 0.0), SIMULATED["sm_90a"]
    )


def _topk(arch: str, **fields) -> Callable[[], None]:
    def run() -> None:
        import test_topk_sim as cases

        torch.manual_seed(0)
        length = 1000 if "held" in fields else 3000
        cases.run(cases.config_of(torch.float32, 4, **fields), torch.randn(3, length), 4, arch)

    return run


KERNELS: dict[str, Callable[[], None]] = {
    "softmax-resident": _softmax("resident", "sm_90a"),
    "softmax-split": _softmax("split", "sm_90a"),
    "softmax-staged": _softmax("staged cluster", "sm_90a"),
    "softmax-two-pass": _softmax("two-pass cluster", "sm_90a"),
    "softmax-cluster": _softmax("cluster", "sm_90a"),
    "softmax-once": _softmax_once,
    "topk-warp": _topk("sm_90a", rows=4, warps=1, unroll=2),
    "topk-again": _topk("sm_90a", again=True, warps=4, cluster=2, unroll=2),
    "topk-held": _topk("sm_90a", held=True, warps=4, unroll=2),
    "topk": _topk("sm_90a", warps=4, unroll=2),
    "topk-cluster": _topk("sm_90a", warps=2, cluster=4, unroll=1),
}
