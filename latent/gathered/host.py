"""The host side of the gathered-attention kernels, the same for every architecture."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Uint32

from warpspec.common.compile import fake_rows
from warpspec.common.device import tma
from warpspec.common.hardware import TMA_ALIGNMENT, WORD_BYTES
from warpspec.fmha.device.host import SMEM_CARVEOUT_PERCENT, q_view
from warpspec.fmha.device.logits import LogitNumbers
from warpspec.fmha.features import Schedule
from warpspec.latent.gathered.config import MAX_KEY_SETS, ROPE_DIM
from warpspec.latent.gathered.task import DeviceKeySet, Gathered, Units


class GatheredHost:
    """``GatheredAttention(config)(...)`` is the host function; an architecture's class adds ``kernel``."""

    def __init__(self, config):
        self.config = config

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        o: cute.Tensor,
        scales: cute.Tensor | None,
        sink: cute.Tensor | None,
        lse: cute.Tensor | None,
        row_max: cute.Tensor | None,
        row_sum: cute.Tensor | None,
        cos_sin: cute.Tensor | None,
        positions: cute.Tensor | None,
        kv_scale: cute.Tensor | None,
        pool0: cute.Tensor,
        slots0: cute.Tensor,
        lengths0: cute.Tensor | None,
        page_size0: Int32,
        pool1: cute.Tensor | None,
        slots1: cute.Tensor | None,
        lengths1: cute.Tensor | None,
        page_size1: Int32,
        pool2: cute.Tensor | None,
        slots2: cute.Tensor | None,
        lengths2: cute.Tensor | None,
        page_size2: Int32,
        scale_log2: Float32,
        splits: Int32,
        ctas: Int32,
        stream: CUstream,
    ):
        """Launch the kernel.

        Tensors as in ``task.Gathered``, flat. scale_log2: scale * log2(e). splits: parts of each query's keys. ctas:
        most CTAs of a persistent launch.
        """
        config = self.config
        queries = None
        if cutlass.const_expr(config.paged):
            queries = Int32(q.shape[1] // lengths0.shape[0])
        sets = (
            DeviceKeySet(pool0, slots0, lengths0, cute.FastDivmodDivisorV2(page_size0), queries),
            DeviceKeySet(pool1, slots1, lengths1, cute.FastDivmodDivisorV2(page_size1)),
            DeviceKeySet(pool2, slots2, lengths2, cute.FastDivmodDivisorV2(page_size2)),
        )[: config.sets]
        operands = Gathered(q, o, scales, sink, lse, row_max, row_sum, cos_sin, positions, kv_scale, sets)
        head_groups = cute.ceil_div(q.shape[2], config.pack)
        units = Units(Int32(q.shape[1] * head_groups * splits), head_groups, splits)
        atom, coordinates = tma.make_load(q_view(config, q), config.q_box)
        grid = units.total
        if cutlass.const_expr(config.schedule is Schedule.PERSISTENT):
            grid = cutlass.min(grid, ctas)
        self.kernel(operands, atom, coordinates, units, LogitNumbers(scale_log2)).launch(
            grid=(grid, 1, 1),
            block=(config.threads, 1, 1),
            min_blocks_per_mp=config.shape.ctas_per_sm,
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            stream=stream,
        )


def gathered_arguments(host: type, config) -> tuple:
    """The host function of a configuration and its arguments without the stream."""
    partial = 1 if config.splits else 0

    def rows(dtype, rank, size=config.heads.v):
        return fake_rows(dtype, rank, size, alignment=TMA_ALIGNMENT)

    def of(present, *arguments, **options):
        return fake_rows(*arguments, **options) if present else None

    results = (rows(BFloat16 if config.normalize else Float32, 4 + partial), None)
    if config.float8:
        results = (
            fake_rows(Uint32, 4, config.heads.v // WORD_BYTES, alignment=TMA_ALIGNMENT),
            fake_rows(Float32, 4),
        )
    sets = []
    for number in range(MAX_KEY_SETS):
        there = number < config.sets
        sets += [
            of(there, Uint32, 2, alignment=TMA_ALIGNMENT),
            of(there, Int32, 2),
            of(there and config.lengths[number], Int32, 1),
            Int32(1),
        ]
    return (
        host(config),
        rows(BFloat16, 4, config.head_dim),
        *results,
        of(config.has_sink, Float32, 1),
        of(config.has_lse, Float32, 3),
        of(not config.normalize, Float32, 3 + partial),
        of(not config.normalize, Float32, 3 + partial),
        of(config.rotate_back, Float32, 2, ROPE_DIM),
        of(config.rotate_back, Int32, 1),
        of(config.has_kv_scale, Float32, 1),
        *sets,
        Float32(1.0),
        Int32(1),
        Int32(1),
    )
