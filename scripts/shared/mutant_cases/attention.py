"""Cases of attention and its gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from warpspec.common.launch import simulating
from warpspec.fmha import attention


@contextlib.contextmanager
def few_sms(arch: str, sms: int | None = 1, row_groups: int = 1) -> Iterator[None]:
    """Simulate a GPU of few SMs, so that a CTA has several tiles, each of one row group, as few tiles have on a whole
    GPU, or of more, each of which is a consumer's."""
    from helpers.simulate import choosing

    with simulating(arch, sm_count=sms), choosing(wanted=lambda one: one.tiling.row_groups == row_groups):
        yield


def _attention(arch: str, sms: int | None = None, row_groups: int = 1, **shape) -> Callable[[], None]:
    """sms: SMs that it is planned for; few of them, and a CTA has several tiles. row_groups: of a tile."""

    def run() -> None:
        torch.manual_seed(0)
        batch, sq, sk, heads, dim = (shape[n] for n in ("batch", "sq", "sk", "heads", "dim"))
        q = torch.randn(batch, sq, heads, dim).bfloat16()
        k, v = (torch.randn(batch, sk, 1, dim).bfloat16() for _ in range(2))
        k *= torch.linspace(4, 0.1, sk).bfloat16()[:, None, None]  # maxima rise: O is rescaled
        options = {name: value for name, value in shape.items() if name in ("causal", "window", "num_splits")}
        if "lengths" in shape:
            options["kv_lengths"] = torch.tensor(shape["lengths"], dtype=torch.int32)
        with few_sms(arch, sms, row_groups):
            attention(q, k, None if shape.get("latent") else v, **options, backend="sim")

    return run


def _latent() -> None:
    """Batch rows of several KV tiles; ones of a single tile, of either consumer, with more after them."""
    for lengths in ((300, 170), (40, 100, 40)):
        shape = CAUSAL | dict(batch=len(lengths), sq=70, sk=300, lengths=lengths)
        _attention("sm_90a", 1, **shape, dim=512, latent=True)()


def _dim512() -> None:
    """First KV tiles with keys that nobody sees, where clearing their values waits for V; then ones without such keys,
    of either consumer, and tiles after them."""
    for shape in (CAUSAL, CAUSAL | dict(batch=3, sq=192, sk=224, lengths=(224, 64, 224))):
        _attention("sm_90a", 1, **shape, dim=512)()


def _quantised(arch: str, name: str) -> Callable[[], None]:
    """Keys in codes, so many that every ring is filled again. name: "e4m3" or "nvfp4"."""

    def run() -> None:
        from helpers.float8_cases import NVFP4, Case

        float8 = NVFP4 if name == "nvfp4" else torch.float8_e4m3fn
        case = Case(20, 480, (1, 1), 64, lengths=(470,), window=(460, None), float8=float8, splits=1)
        with simulating(arch):
            attention(**case.arguments(), backend="sim")

    return run


def _bias(arch: str, *calls: tuple) -> Callable[[], None]:
    """Tiles that are found without a look at memory. calls: (rows, keys, SMs) of each."""

    def run() -> None:
        generator = torch.Generator().manual_seed(0)
        for rows, keys, sms in calls:
            q, k, v, bias = (
                torch.randn(*shape, generator=generator).bfloat16()
                for shape in ((1, rows, 2, 64), (1, keys, 1, 64), (1, keys, 1, 64), (1, 2, rows, keys))
            )
            with few_sms(arch, sms):
                attention(q, k, v, bias=bias, window=(None, 200), num_splits=1, backend="sim")

    return run


def _pages(arch: str) -> Callable[[], None]:
    def run() -> None:
        from test_paged_sim import inputs

        options = dict(seq_q=70, heads_q=2, head_dim=128, causal=True)
        _, arguments = inputs((300, 170), 16, **options)
        with few_sms(arch):
            attention(**arguments, backend="sim")

    return run


def _masked(arch: str, kind: str) -> Callable[[], None]:
    """A tree of drafts, ranges or lists of blocks: several KV tiles with and without a mask, several M tiles a CTA."""

    def run() -> None:
        from helpers import block_cases, judged_calls, range_cases, tree_cases

        if kind == "tree":
            case = tree_cases.Case(
                "", 20, (300, 90), (4, 1), 128, page_size=64, options=(("window", (200, 0)),)
            )
            inputs = tree_cases.inputs_of(case)
        elif kind == "ranges":
            images = ((20, 180), (330, 399))
            case = range_cases.Case(
                "", (200, 200), (400, 250), images, (1, 1), 128, options=(("num_splits", 1),)
            )
            inputs = range_cases.inputs_of(case)
        else:
            options, parts = (("causal", True), ("num_splits", 1)), (0.2, 0.3, 0.5)
            lists = {"lists": (2, 1), "flex": kind == "patterns", "parts": parts}
            case = block_cases.Case("", 200, 900, (1, 1), 128, 2, **lists, options=options)
            inputs, _ = block_cases.inputs_of(case)
        with few_sms(arch):
            judged_calls.run(case, inputs, backend="sim")

    return run


def _heads_apart() -> None:
    """Consumers with a KV head each: whole tiles, splits, partitions from a queue; a request without keys, keys that
    nobody sees."""
    from helpers.simulate import choosing
    from helpers.varlen_cases import Packed

    from warpspec.fmha import attention_varlen
    from warpspec.fmha.plan.cost import Way

    keys = (900, 0, 90, 300, 64, 700, 5, 130)
    case = Packed(
        "", seq_q=(1,) * 8, seq_k=keys, heads_q=2, heads_kv=2, head_dim=72, page_size=16, poisoned=(2,)
    )
    for way, splits in ((Way.PARTITIONS, 3), (Way.PERSISTENT, 1)):
        with (
            simulating("sm_90a", sm_count=1),
            choosing(way, lambda one: one.shape.heads_apart, splits=splits),
        ):
            attention_varlen(**case.arguments(), backend="sim")


def _gradients_apart(dim: int, *inputs: tuple, **options) -> Callable[[], None]:
    """dQ by query tiles, dK and dV by key tiles; arguments as of ``_gradients``. Rings are refilled within a tile, for
    a tile's own operands are handed back later than what its steps have read."""

    def run() -> None:
        from unittest import mock

        from warpspec.fmha.backward import apart, launch
        from warpspec.fmha.backward.schedule import Order

        with (
            mock.patch.object(apart, "gains", lambda *_: True),
            mock.patch.object(launch, "choose_order", lambda *_: Order(1, 1)),
            mock.patch.object(launch, "prepare", launch.prepare.__wrapped__),
        ):
            _gradients("sm_90a", dim, *inputs, **options)()

    return run


def _gradients(arch: str, dim: int, *inputs: tuple, **options) -> Callable[[], None]:
    """inputs: (batch rows, queries, keys, causal) of each call. options: further ones of a case. What makes dQ waits
    for a single row; of several, it finds some done at its first look."""

    def run() -> None:
        from helpers.gradient_cases import Case
        from helpers.simulate import simulating_gradients

        with simulating_gradients(arch, sm_count=1):
            for batch, rows, keys, causal in inputs:
                case = Case("", batch, rows, keys, head_dim=dim, causal=causal, **options)
                case.gradients(case.tensors(), backend="reference")

    return run


CAUSAL = dict(batch=2, sq=200, sk=500, heads=1, lengths=(500, 40), causal=True, num_splits=1)
TURNS = dict(sq=300, lengths=(500, 300))  # tiles of two consumers, the last with rows for one
FULL = dict(batch=2, sq=130, sk=700, heads=1, lengths=(700, 40), num_splits=1)
DECODE = dict(batch=2, sq=1, sk=900, heads=8, lengths=(900, 330), num_splits=2)
UNSEEN = ((1, 330, 200, True), (1, 256, 200, True))  # rows that see nothing; only keys that nobody sees
BIASED = (140, 520, 1)
# Tiles that see nothing, each a CTA's only one: who writes zeros has waited for the launch before.
IDLE = (330, 70, 8)
LISTED = (False, (1, 1), (0.1, 0.4, 0.5))  # lists of ``gradient_cases.Case``
KERNELS: dict[str, Callable[[], None]] = {
    "fmha-sm100": _attention("sm_100a", **CAUSAL, window=(250, 0), dim=128),
    "fmha-sm100-d64": _attention("sm_100a", **FULL, dim=64),
    "fmha-sm100-d256": _attention("sm_100a", **CAUSAL, dim=256),
    "fmha-sm100-d512": _attention("sm_100a", **CAUSAL, dim=512),
    "fmha-sm100-latent": _attention("sm_100a", **CAUSAL, dim=512, latent=True),
    "fmha-sm100-decode": _attention("sm_100a", **DECODE, dim=128),
    "fmha-sm100-e4m3": _quantised("sm_100a", "e4m3"),
    "fmha-sm100-nvfp4": _quantised("sm_100a", "nvfp4"),
    "fmha-sm90": _attention("sm_90a", 1, **CAUSAL, window=(400, 0), dim=128),
    "fmha-sm90-d64": _attention("sm_90a", 1, **FULL, dim=64),
    "fmha-sm90-d256": _attention("sm_90a", 1, **CAUSAL, dim=256),
    "fmha-sm90-turns": _attention("sm_90a", 1, 2, **CAUSAL | TURNS, window=(400, 0), dim=128),
    "fmha-sm90-d512": _dim512,
    "fmha-sm90-latent": _latent,
    "fmha-sm90-decode": _attention("sm_90a", 1, **DECODE, dim=128),
    "fmha-sm100-bias": _bias("sm_100a", BIASED),
    "fmha-sm90-bias": _bias("sm_90a", BIASED, IDLE),
    "fmha-sm100-pages": _pages("sm_100a"),
    "fmha-sm90-pages": _pages("sm_90a"),
    **{
        f"fmha-{arch[:2]}{arch[3:-1]}-{kind}": _masked(arch, kind)
        for arch in ("sm_100a", "sm_90a")
        for kind in ("tree", "ranges", "lists", "patterns")
    },
    "gradients-sm90": _gradients("sm_90a", 128, *UNSEEN, (2, 330, 200, True)),
    "gradients-sm100": _gradients("sm_100a", 128, *UNSEEN),
    "gradients-sm90-whole": _gradients("sm_90a", 128, (2, 256, 256, False)),
    "gradients-sm100-whole": _gradients("sm_100a", 128, (1, 256, 256, False)),
    "fmha-sm90-heads": _heads_apart,
    "gradients-sm90-apart": _gradients_apart(
        128,
        *(UNSEEN[0], (1, 70, 450, True), (1, 450, 128, False)),
        *((1, 256, 256, True), (2, 192, 384, False)),
    ),
    "gradients-sm90-apart-d64": _gradients_apart(
        64,
        *((1, 330, 300, True), (1, 128, 900, True), (2, 896, 128, False)),
        *((1, 384, 384, True), (1, 128, 768, False)),
    ),
    "gradients-sm90-apart-wide": _gradients_apart(192, UNSEEN[0], (1, 70, 450, True), v_dim=128),
    "gradients-sm90-lists": _gradients("sm_90a", 128, *((n, 520, 300, True) for n in (1, 2)), blocks=LISTED),
    "gradients-sm100-lists": _gradients("sm_100a", 128, (1, 520, 300, True), blocks=LISTED),
}
