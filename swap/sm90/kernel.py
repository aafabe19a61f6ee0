"""Kernels for sm_90a: one product phase, or the whole step.

ARCHITECTURE.md, "Swap-FFN", has the picture.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32

from warpspec.common.device import tma
from warpspec.common.device.pipeline import drain, init_barriers
from warpspec.swap.config import BARRIER_BYTES
from warpspec.swap.device.collapse import basis, decode, pool
from warpspec.swap.device.flow import Flow, finish
from warpspec.swap.device.host import SwapHost
from warpspec.swap.device.load import ProductLoads, load_phase, load_router, make_sources, router_ring
from warpspec.swap.device.phase import make_scratch
from warpspec.swap.device.router import RouterTile
from warpspec.swap.device.rows import rows_phase
from warpspec.swap.device.work import SwapWork
from warpspec.swap.sm90.consumer import product_phase, release

# Per cent of L1 and shared memory that are used as shared memory: all, because the ring fills it.
SMEM_CARVEOUT_PERCENT = 100


class ProductPhase(SwapHost):
    """The kernel of a product phase, or the fused one."""

    def launch(self, ops, ctas, event, steps, k_ffn, stream):
        """Host side. ctas: whole clusters.

        The fused kernel is a cooperative launch, which fails if not all CTAs can be resident at once. A product phase
        is a programmatic dependent launch.
        """
        config = self.config
        self.kernel(ops, make_sources(config, ops), steps, k_ffn).launch(
            grid=(ctas, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.tiles.cluster, 1, 1),
            cooperative=config.fused,
            use_pdl=not config.fused,
            min_blocks_per_mp=1,
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, ops, sources, steps, k_ffn):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # 1. Shared memory: barriers, the ring, what rows and collapse phases need.
        smem = cutlass.memory.SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, BARRIER_BYTES // 8)
        base = smem.allocate(config.ring_bytes, byte_alignment=tma.TILE_ALIGNMENT)
        scratch = make_scratch(config, smem) if cutlass.const_expr(config.fused) else None
        channels = init_barriers(config.barriers, barriers)
        if warp == config.load_warp:
            for pair in sources:
                for source in pair:
                    cute.nvgpu.cpasync.prefetch_descriptor(source.atom)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if cutlass.const_expr(not config.fused):
            cute.arch.griddepcontrol_launch_dependents()

        # 2. Roles. Each computes its own tiles.
        if warp >= config.load_warp:
            cute.arch.setmaxregister_decrease(config.producer_registers)
            if warp == config.load_warp:
                works = {phase: SwapWork.of(config, ops, phase) for phase in config.products}
                loads = {
                    phase: ProductLoads.make(config, phase, pair, base, BFloat16, works[phase])
                    for phase, pair in zip(config.products, sources, strict=False)
                }
                if cutlass.const_expr(config.fused):
                    loads["router"] = router_ring(config, sources[-1].a, base, BFloat16)
                load(config, channels, loads, works, ops, Flow.of(config, ops), steps, k_ffn)
        else:
            cute.arch.setmaxregister_increase(config.consumer_registers)
            consume(config, channels, base, ops, scratch, steps, k_ffn)

        # 3. No CTA may exit while others may arrive at its barriers or write into its stages.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if cutlass.const_expr(config.fused):
            finish(Flow.of(config, ops))


@cute.jit
def load(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    loads: cutlass.Constexpr,
    works: cutlass.Constexpr,
    ops,
    flow,
    steps,
    k_ffn,
):
    """The load warp: loads the phase's tiles; if fused, those of both products of every FFN step, and the router's
    weights before every swap."""
    if cutlass.const_expr(config.fused):
        up, down, router = Int32(0), Int32(0), Int32(0)
        router = load_router(config, channels, loads["router"], router)
        for step in cutlass.range(steps, unroll=1):
            drain((channels["router_empty"],), router)
            up = load_phase(config, "up", channels, loads["up"], works["up"], ops, flow, step, up)
            drain((channels["up_empty"],), up)
            down = load_phase(config, "down", channels, loads["down"], works["down"], ops, flow, step, down)
            drain((channels["down_empty"],), down)
            if swaps_after(step, steps, k_ffn):
                router = load_router(config, channels, loads["router"], router)
    else:
        phase = config.phase
        use = load_phase(config, phase, channels, loads[phase], works[phase], ops, flow, Int32(0), Int32(0))
        drain((channels[f"{phase}_empty"],), use)


@cute.jit
def consume(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    base: cutlass.Constexpr,
    ops,
    scratch: cutlass.Constexpr,
    steps,
    k_ffn,
):
    """Both consumers: compute the phase's tiles; if fused, every phase in order."""
    thread, _, _ = cute.arch.thread_idx()
    works = {phase: SwapWork.of(config, ops, phase) for phase in config.products}
    flow = Flow.of(config, ops)
    if cutlass.const_expr(config.fused):
        every_phase(config, channels, base, works, ops, scratch, flow, thread, steps, k_ffn)
    else:
        cute.arch.griddepcontrol_wait()
        phase = config.phase
        product_phase(config, phase, channels, base, works[phase], ops, flow, thread, Int32(0))


@cute.jit
def every_phase(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    base: cutlass.Constexpr,
    works: cutlass.Constexpr,
    ops,
    scratch: cutlass.Constexpr,
    flow,
    thread,
    steps,
    k_ffn,
):
    """The consumers of the fused kernel."""
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    place, full = (thread, block, blocks), channels["router_full"]
    up, down, router = Int32(0), Int32(0), Int32(0)
    rows_phase(config, "first", ops, scratch, flow, place, Int32(0), Int32(0), RouterTile(base, full, router))
    router = release_router(config, channels, works["up"], router)
    for step in cutlass.range(steps, unroll=1):
        up = product_phase(config, "up", channels, base, works["up"], ops, flow, thread, up)
        down = product_phase(config, "down", channels, base, works["down"], ops, flow, thread, down)
        done = step + 1
        if swaps_after(step, steps, k_ffn):
            tile = RouterTile(base, full, router)
            rows_phase(config, "swap", ops, scratch, flow, place, done // k_ffn, done, tile)
            router = release_router(config, channels, works["up"], router)
        else:
            rows_phase(config, "rows", ops, scratch, flow, place, Int32(0), done)
    pool(config, ops, scratch.sums, flow, place, steps)
    basis(config, ops, scratch.sums, flow, place)
    decode(config, ops, flow, place)


def swaps_after(step, steps, k_ffn):
    """Whether an event begins after FFN step ``step``."""
    return ((step + 1) % k_ffn == 0) & (step + 1 < steps)


@cute.jit
def release_router(config: cutlass.Constexpr, channels: cutlass.Constexpr, work, use) -> Int32:
    """Release the router's weights after the warp's last read, if it had rows. use: how often before; returns the new
    count."""
    channels["router_full"].wait(use)
    cute.arch.fence_view_async_shared()  # orders these reads before the copy engine's writes
    release(config, channels["router_empty"], work, use)
    return use + 1
