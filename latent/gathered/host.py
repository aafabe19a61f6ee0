"""The host side of the gathered-attention kernels, the same for every architecture."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32

from warpspec.common.device import tma
from warpspec.common.device.host import host_function
from warpspec.common.operands import fakes
from warpspec.fmha.device.host import SMEM_CARVEOUT_PERCENT, q_view
from warpspec.latent.gathered.task import (
    DeviceKeySet,
    Gathered,
    GatheredNumbers,
    KeySetOperands,
    divisors_of,
    units_of,
)


class GatheredHost:
    """``GatheredAttention(config)(...)`` is the host function; an architecture's class adds ``kernel``."""

    def __init__(self, config):
        self.config = config

    def load_of(self, operands: Gathered) -> tuple:
        """``tma.make_load`` of what a kernel loads by TMA: Q, unless its codes are converted."""
        if self.config.gathers.has_q_scale:
            return None, None
        return tma.make_load(q_view(self.config.heads, operands.q), self.config.q_box)

    @host_function(Gathered, GatheredNumbers)
    def __call__(self, operands: Gathered, numbers: GatheredNumbers, stream: CUstream):
        """Launch the kernel."""
        config, q, splits = self.config, operands.q, numbers.splits
        operands = operands._replace(sets=device_sets(config, q, operands.sets[: config.gathers.sets]))
        units = units_of(config, operands, splits)
        atom, coordinates = self.load_of(operands)
        grid = numbers.ctas if config.scheduler.cuts_tiles else units.total
        if config.scheduler.persistent:
            grid = cutlass.min(grid, numbers.ctas)
        shares = cutlass.const_expr(config.gathers.cluster > 1)
        self.kernel(operands, atom, coordinates, units, numbers.logits).launch(
            grid=(grid, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.gathers.cluster, 1, 1) if shares else None,
            min_blocks_per_mp=config.shape.ctas_per_sm,
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            use_pdl=True,
            stream=stream,
        )


def device_sets(config, q: cute.Tensor, sets: tuple[KeySetOperands, ...]) -> tuple[DeviceKeySet, ...]:
    """The key sets as kernels take them, the first with the queries of a request where its slots are a page table."""
    found = (None, None)
    if config.gathers.paged:
        found = divisors_of(config, Int32(q.shape[1] // sets[0].lengths.shape[0]))
    return tuple(
        DeviceKeySet(
            each.pool,
            each.slots,
            each.lengths,
            cute.FastDivmodDivisorV2(each.page_size),
            *((None, None) if number else found),
        )
        for number, each in enumerate(sets)
    )


def gathered_arguments(host: type, config) -> tuple:
    """The host function of a configuration and its arguments without the stream."""
    return (host(config), *fakes(Gathered, config), *fakes(GatheredNumbers, config))
