"""Cases of experts and of Swap-FFN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch

from shared.mutant_launches import unwritten
from warpspec.common.launch import SIMULATED, simulating


def _swap_chain(arch: str) -> Callable[[], None]:
    """A chain of kernels, each of which begins as the one before ends."""

    def run() -> None:
        from helpers.swap_cases import make_plan, run, small

        x, state, weights = small(1, cores=9, d_ff=300)
        target = replace(SIMULATED[arch], sm_count=1)
        with unwritten("bank_b", "bank_w", "router_norm", "router_w", "swap_w"):  # weights
            run(x, state, weights, dict(events=2, k_ffn=1, residual=False), make_plan(arch, ctas=2), target)

    return run


def _swap() -> None:
    from helpers.swap_cases import make_plan, run, small

    # Two clusters: phases wait for other clusters' counts. One, with more weights: rings are filled again and again.
    # Two steps an event: products read the 1 / RMS of rows without a router.
    for ctas, d_ff, k_ffn in ((4, 8, 1), (2, 300, 1), (4, 8, 2)):
        x, state, weights = small(1, cores=9, d_ff=d_ff)
        plan = make_plan("sm_90a", fused=True, ctas=ctas)
        run(x, state, weights, dict(events=2, k_ffn=k_ffn, residual=False), plan, SIMULATED["sm_90a"])


def _moe(shape: str, groups: int = 2, **epilogue) -> Callable[[], None]:
    def run() -> None:
        from helpers.gemm_cases import GemmCase, inputs_of, poisoned_out

        from warpspec.moe.sm100 import config, grouped_gemm

        tiles = {"single": config.SINGLE, "pair": config.PAIR, "swapped": config.SWAPPED[16]}[shape]
        sizes = dict(counts=(5, 0, 130, 1), k=600, width=264, dropped=3)
        case = GemmCase("", **sizes, **epilogue)
        inputs, out = inputs_of(case, 0), poisoned_out(case)
        options = dict(epilogue=case.epilogue, limit=case.limit, out_scale=inputs.out_scale)
        grouped_gemm(inputs.a, inputs.w, inputs.offsets, out, **options, shape=tiles, groups=groups, seed=0)

    return run


def _streamed_moe() -> None:
    from helpers.moe_cases import make_experts, randn

    from warpspec.moe import moe_ffn, route
    from warpspec.moe.sm90 import layer as moe_layer
    from warpspec.moe.sm90.config import Shape
    from warpspec.moe.sort import sort_choices

    layer = make_experts(5, 400, 120, biases=True)[0].for_backend("sm90")
    options = dict(activation="swiglu_oai", limit=1.0, backend="sim")
    tiles = Shape(row_groups=4, tokens=16, stages=4, ctas_per_sm=1, load_warps=4)
    # A tile a CTA; tiles one after another, of which some have no rows for a consumer, and choices of several warps.
    for tokens, sms in ((12, 132), (43, 1)):
        with (
            simulating("sm_90a", sm_count=sms),
            mock.patch.object(moe_layer, "choose_shape", lambda *_: tiles),
        ):
            x = randn(tokens, 400, seed=7).bfloat16()
            moe_ffn(x, layer, *route(randn(tokens, 5, seed=50), 3), **options)
    # The same sort of more choices than a warp counts at a time.
    ids = torch.randint(0, 5, (250, 3), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    x = torch.randn(250, 400).bfloat16()
    sort_choices(ids, 5, widths=(16,), x=x, target=SIMULATED["sm_90a"])


def _sort() -> None:
    """Several groups of choices a warp; a list of work in two classes, tokens in the kernel's order."""
    from warpspec.moe.sort import sort_choices

    ids = torch.randint(-1, 9, (250, 3), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    x = torch.randn(250, 72).bfloat16()
    sort_choices(ids, 10, shared=1, widths=(64, 16), x=x, target=SIMULATED["sm_90a"])


def _quantize_rows() -> None:
    from test_quantize_rows import check, random_case

    check(*random_case(9, 528, 3, 4), 4)


def _streamed_shape(shape: tuple, **options) -> Callable[[], None]:
    """Hopper's grouped GEMM of several consumers; few CTAs, so that rings are filled again."""

    def run() -> None:
        from helpers.moe_cases import make_experts, randn

        from warpspec.moe import sm90, streamed
        from warpspec.moe.sm90.config import Shape, StreamConfig

        w = make_experts(3, 160, 448)[0].for_backend("sm90").w2
        config = StreamConfig(shape=Shape(*shape, **options), block=w.block, early=True)
        most = min(config.widths)
        counts = (most, most - 3, 5)
        h = randn(sum(counts), w.k).bfloat16()
        work = torch.full((len(counts) + 2, 4), -1, dtype=torch.int32)
        work[0, : len(config.widths)] = torch.tensor([3] * len(config.widths))
        for i, count in enumerate(counts):
            work[i + 1, :3] = torch.tensor([i, sum(counts[:i]), count])
        out = torch.empty(sum(counts), w.n, dtype=torch.bfloat16)
        target = SIMULATED["sm_90a"]
        with unwritten("data", "global_scale", "work"):  # weights; what the launch before last has written
            sm90.grouped_gemm(config, streamed.reorder(h), None, w, work, out, ctas=2, target=target, seed=1)

    return run


KERNELS: dict[str, Callable[[], None]] = {
    "swap": _swap,
    "swap-chain-sm90": _swap_chain("sm_90a"),
    "swap-chain-sm100": _swap_chain("sm_100a"),
    "moe-sm90": _streamed_moe,
    "moe-single": _moe("single", 1, epilogue="linear"),
    "moe-single-nvfp4": _moe("single", epilogue="swiglu", limit=3.0, out="nvfp4"),
    "moe-pair": _moe("pair", epilogue="swiglu"),
    "moe-swapped": _moe("swapped", epilogue="swiglu"),
    "moe-sm90-splits": _streamed_shape((1, 8, 3, 2), splits=2),
    "moe-sm90-tall": _streamed_shape((4, 64, 2, 1, 4), tall=2, steps=1),
    "moe-sort": _sort,
    "moe-quantize": _quantize_rows,
}
