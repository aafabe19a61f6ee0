"""The cuts of a line (``line``) as an operand: found by one launch, read by the calls of all layers of a step.

A launch whose work is cut by length begins with a scan of the lengths, in every layer again although they are the same
in all. The kernel FIND writes what each CTA would find, and kernels whose configuration says so
(``TileScheduler.reads_cuts``) read it. Only kernels whose CTAs add up pieces can (``device.cuts``).

An operand fits calls with one description (``describe``), a text, because torch's operators take it as an argument.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import torch

from warpspec.common.checks import check_tensor
from warpspec.common.launch import Kernel, Target
from warpspec.common.operands import INT32, Number, Operand, fakes
from warpspec.fmha.config import AttentionKernel
from warpspec.fmha.line import KEPT_WORDS, round_count
from warpspec.fmha.operands import CUTS


@dataclass(frozen=True)
class FindConfig:
    """A kernel that finds the cuts of ``kernel``'s launches."""

    kernel: AttentionKernel


class FindOperands(NamedTuple):
    """Tensors of the kernel. It reads kv_lengths and writes cuts, as in ``Operands``."""

    kv_lengths: Annotated[Any, Operand(INT32, 1)]
    cuts: Annotated[Any, replace(CUTS, when=None)]


class LineSizes(NamedTuple):
    """Sizes of a call by which its line is cut.

    requests, queries: number of requests, and of queries of each. heads, heads_kv: of q and of the keys. extent: most
    keys of a request, in pages if there are pages.
    """

    requests: Annotated[Any, Number(INT32)]
    queries: Annotated[Any, Number(INT32)]
    heads: Annotated[Any, Number(INT32)]
    heads_kv: Annotated[Any, Number(INT32)]
    extent: Annotated[Any, Number(INT32)]


class FindNumbers(NamedTuple):
    """The numbers among the kernel's arguments. ctas: of the launches that read the cuts."""

    sizes: LineSizes
    ctas: Annotated[Any, Number(INT32)]


def find_arguments(config: FindConfig) -> tuple:
    """The host function of a configuration and its arguments except the stream."""
    from warpspec.fmha.device.find_cuts import FindCuts

    return (FindCuts(config), *fakes(FindOperands, config), *fakes(FindNumbers, config))


FIND = Kernel("fmha.find_cuts", find_arguments)


def can_read(config: AttentionKernel) -> bool:
    """Whether a kernel can read its cuts."""
    return config.scheduler.adds_up


def reader(config: AttentionKernel) -> AttentionKernel:
    """The kernel that differs from ``config`` only in reading its cuts."""
    return replace(config, scheduler=replace(config.scheduler, reads_cuts=True, cuts_ahead=False))


def kernels_with_cuts(kernel: Kernel, config: AttentionKernel) -> list[tuple[Kernel, Hashable]]:
    """The kernels, with their configurations, of calls with a schedule that run ``config`` without one."""
    return [(FIND, FindConfig(config)), (kernel, reader(config))] if can_read(config) else []


def reading(plan, sizes: LineSizes, cut_for: str) -> AttentionKernel:
    """The ``reader`` of a plan's kernel. plan: with ``config`` and ``ctas``. Raises ValueError unless cuts that were
    made for ``cut_for`` are the plan's."""
    config, needed = plan.config, "one that is not cut by length"
    if can_read(config):
        needed = describe(config, plan.ctas, sizes)
    if cut_for != needed:
        raise ValueError(f"schedule: was made for {cut_for}; the call is {needed}")
    return reader(config)


def call_of(q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor) -> tuple:
    """What a schedule remembers of a call over pages kv [pages, page size, row]: sizes, (dtype, page size) and
    q's dtype if that is e4m3, device."""
    requests, queries, heads, _ = q.shape
    sizes = LineSizes(requests, queries, heads, 1, page_table.shape[1])
    codes = (q.dtype,) if q.dtype == torch.float8_e4m3fn else ()
    return sizes, (kv.dtype, kv.shape[1], *codes), q.device


class DecodeSchedule:
    """The cuts of a decoding step, computed on the device once a step for the calls of all layers.

    ``warpspec.latent.mla_schedule`` makes it, and its docstring says what a schedule does. cuts: int32 on the device,
    each CTA's chunks; None if the calls are not cut by length, and then run as they would without a schedule.
    made_for: what calls must have in common with the one that it was made for, as text.
    """

    def __init__(
        self,
        sizes: LineSizes,
        about: tuple,
        kv_lengths: torch.Tensor,
        plan=None,
        target: Target | None = None,
    ):
        """sizes, about: of the calls, as from ``call_of``. plan: with ``config`` and ``ctas``, of calls that are cut by
        length by kernels that can read their cuts; None: of others."""
        self.sizes, self.about, self.device = sizes, about, kv_lengths.device
        self.made_for, self.cuts = f"{sizes}, {about}", None
        self._plan, self._target = plan, target
        if plan is not None:
            self.made_for = describe(plan.config, plan.ctas, sizes)
            self.cuts = empty_cuts(plan.config, plan.ctas, sizes, self.device)
        self.update(kv_lengths)

    def update(self, kv_lengths: torch.Tensor) -> None:
        """Compute the cuts again, in place, for other lengths: int32 [B], read on the device by a launch on the current
        stream. The host does not wait, and a CUDA graph may capture this, before the calls that use it or apart from
        them. A schedule that was not updated costs time, but results stay right up to rounding."""
        check_tensor("kv_lengths", kv_lengths, (torch.int32,), (self.sizes.requests,), self.device)
        if self.cuts is not None and self.sizes.requests > 0:
            numbers = (*self.sizes, self._plan.ctas)
            FIND.run(
                FindConfig(self._plan.config), self._target, kv_lengths.contiguous(), self.cuts, *numbers
            )

    @property
    def operand(self) -> tuple[torch.Tensor | None, str | None]:
        """The cuts and what they were made for, as operators take them; None and None if there are no cuts."""
        return (None, None) if self.cuts is None else (self.cuts, self.made_for)

    def fits(self, q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor) -> bool:
        """Whether ``mla_decode`` takes the schedule with these tensors."""
        return call_of(q, kv, page_table) == (self.sizes, self.about, self.device)

    def check(self, q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor) -> None:
        """Raise ValueError unless the schedule fits."""
        if not self.fits(q, kv, page_table):
            (sizes, about, device), own = call_of(q, kv, page_table), (self.sizes, *self.about, self.device)
            made_for, call = (", ".join(map(str, each)) for each in (own, (sizes, *about, device)))
            raise ValueError(f"schedule: was made for {made_for}; the call has {call}")


def describe(config: AttentionKernel, ctas: int, sizes: LineSizes) -> str:
    """All that the cuts of a launch follow from but lengths. config: also one that reads them."""
    causal, rows = "causally " if config.mask.causal else "", config.rows
    return (
        f"{sizes.requests} requests of {sizes.queries} queries with {sizes.heads} heads over {sizes.heads_kv}, "
        f"{causal}of at most {sizes.extent} {'pages' if pages_of(config) else 'keys'}, by {ctas} CTAs in tiles of "
        f"{rows.queries} queries, {rows.pack} heads and {config.tile_n} keys ({type(config).__name__})"
    )


def pages_of(config: AttentionKernel) -> bool:
    """Whether the extent of a request is a number of pages."""
    return config.requests.page_size > 0 or config.line_source is not None


def empty_cuts(config: AttentionKernel, ctas: int, sizes: LineSizes, device: torch.device) -> torch.Tensor:
    """Memory for the cuts of a launch."""
    heads = sizes.heads_kv * -(-(sizes.heads // sizes.heads_kv) // config.rows.pack)
    rounds = 1
    if config.line_source is None:
        rounds = round_count(sizes.queries // config.rows.queries * sizes.requests * heads, ctas)
    return torch.zeros(ctas, rounds, KEPT_WORDS, dtype=torch.int32, device=device)
