"""The chips: H100, H200, B200, B300."""

from __future__ import annotations

from warpspec.sim.clocks.constants import HIGH, LOW, MEDIUM, Chip, Constant

OURS = "scripts/microbench"
SEMI = "SemiAnalysisAI/microbench-blackwell at 9a068d8"
GB300 = "Antoniomv7/gb300-microbench at 1c36b44"
GUESS = "as on Hopper"

_COMMON = {
    "fma": (1, OURS, HIGH), "fma_latency": (4, OURS, HIGH), "imad": (2, OURS, HIGH), "packed_fma": (2, SEMI, MEDIUM),
    "alu": (2, OURS, HIGH), "alu_latency": (4, OURS, HIGH), "pack": (2, OURS, HIGH),
    "mufu": (8, OURS, HIGH), "mufu_latency": (17, OURS, HIGH), "branch": (8, OURS, MEDIUM),
    "shared_bytes": (128, OURS, HIGH), "shared_latency": (29, OURS, HIGH), "shuffle_latency": (24, OURS, HIGH),
    "wait_issue": (4, OURS, MEDIUM), "wait_passed": (40, OURS, MEDIUM),
    "wait_woken": (20, OURS, MEDIUM), "arrive_issue": (8, OURS, MEDIUM),
    "arrive_latency": (25, OURS, MEDIUM), "warp_sync": (1, OURS, MEDIUM), "barrier_latency": (4, OURS, HIGH),
    "barrier_arrival": (2, OURS, HIGH),
    "cluster_barrier": (200, OURS, LOW), "fence": (23, OURS, MEDIUM), "setmaxnreg": (4, OURS, MEDIUM),
    "mma_sync": (16, OURS, LOW),
    "tma_issue": (10, OURS, MEDIUM), "tma_interval": (20, OURS, MEDIUM), "tma_bytes": (128, OURS, MEDIUM),
    "tma_l2_latency": (600, OURS, MEDIUM), "tma_hbm_latency": (1000, OURS, MEDIUM),
    "store_read_latency": (300, OURS, MEDIUM), "store_latency": (600, OURS, MEDIUM),
    "l2_latency": (281, "GH200, published", MEDIUM), "hbm_latency": (690, "GH200, published", MEDIUM),
    "launch": (1500, OURS, MEDIUM), "cta_turnover": (600, OURS, MEDIUM),
}  # fmt: skip

_HOPPER = {
    "wgmma_issue": (2, OURS, MEDIUM), "wgmma_fence": (2, OURS, MEDIUM),
    "wgmma_tail": (47, OURS, HIGH), "wgmma_registers": (28, OURS, HIGH),
    "wgmma_least_registers": (13, OURS, HIGH),
    "mma_flops": (4096, OURS, HIGH), "l2_bytes": (5500, OURS, MEDIUM),
}  # fmt: skip

_BLACKWELL = {
    "mma_issue": (4, SEMI, LOW), "mma_column": (0.5, SEMI, HIGH), "mma_least": (32, SEMI, MEDIUM),
    "mma_tail": (120, SEMI, HIGH), "mma_tail_tensor": (104, SEMI, HIGH), "commit_latency": (100, SEMI, LOW),
    "tensor_copy": (32, SEMI, LOW), "tmem_load_bytes": (512, SEMI, LOW), "tmem_store_bytes": (512, SEMI, MEDIUM),
    "tmem_latency": (40, SEMI, LOW), "mma_flops": (8192, SEMI, HIGH), "l2_bytes": (8000, GUESS, LOW),
    "wgmma_tail": (0, "there is none", HIGH),
}  # fmt: skip


def _table(*parts: dict) -> dict[str, Constant]:
    return {name: Constant(*row) for part in parts for name, row in part.items()}


CHIPS = {
    name: Chip(model, target, sms, ghz, l2_bytes, _table(_COMMON, own, more))
    for name, model, target, sms, ghz, l2_bytes, own, more in (
        ("h100", "H100", "sm_90a", 132, 1.9, 50 << 20, _HOPPER, {"hbm_gb": (3030, OURS, HIGH)}),
        ("h200", "H200", "sm_90a", 132, 1.9, 60 << 20, _HOPPER, {"hbm_gb": (4280, OURS, HIGH)}),
        ("b200", "B200", "sm_100a", 148, 1.9, 126 << 20, _BLACKWELL, {"hbm_gb": (7100, SEMI, HIGH)}),
        (
            "b300",
            "B300",
            "sm_103a",
            148,
            1.9,
            126 << 20,
            _BLACKWELL,
            {"hbm_gb": (7100, SEMI, HIGH), "mufu": (4, GB300, HIGH)},
        ),
    )
}


def chip(name: str) -> Chip:
    """The chip of a name: h100, h200, b200, b300. ValueError for another."""
    found = CHIPS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"chip is {name!r}; one of {', '.join(CHIPS)} is needed")
    return found
