"""Kernels of one rows or collapse phase each, for chains of launches. A CTA has the phase's 256 threads."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from warpspec.common.hardware import FP32_BYTES
from warpspec.swap.config import (
    GROUP_ROWS,
    ROUTER_WIDTH,
    ROWS_PHASES,
    SCRATCH_ALIGNMENT,
    TERMS,
)
from warpspec.swap.device.collapse import basis, decode, pool
from warpspec.swap.device.flow import Flow
from warpspec.swap.device.host import SwapHost
from warpspec.swap.device.row_group import Scratch
from warpspec.swap.device.rows import rows_phase


def make_scratch(config, smem) -> Scratch:
    """Allocate the scratch of rows and collapse phases in shared memory."""
    terms, z = None, None
    if config.routes:
        layout = cute.make_layout((config.d_model, GROUP_ROWS * TERMS), stride=(1, config.term_pitch))
        terms = smem.allocate_tensor(BFloat16, layout, byte_alignment=SCRATCH_ALIGNMENT)
        layout = cute.make_layout((ROUTER_WIDTH, GROUP_ROWS))
        z = smem.allocate_tensor(Float32, layout, byte_alignment=SCRATCH_ALIGNMENT)
    layout = cute.make_layout(config.sums_bytes // FP32_BYTES)
    return Scratch(terms, z, smem.allocate_tensor(Float32, layout, byte_alignment=SCRATCH_ALIGNMENT))


class SmallPhase(SwapHost):
    """The kernel of a phase without products."""

    def launch(self, ops, ctas, event, steps, k_ffn, stream):
        """Host side. A programmatic dependent launch: the kernel waits for the end of the previous one."""
        self.kernel(ops, event).launch(
            grid=(ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, ops, event):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        cute.arch.griddepcontrol_launch_dependents()
        scratch = make_scratch(config, cutlass.memory.SmemAllocator())
        place, flow = (thread, block, blocks), Flow.of(config, ops)
        if cutlass.const_expr(config.phase in ROWS_PHASES):
            rows_phase(config, config.phase, ops, scratch, flow, place, event, Int32(0))
        elif cutlass.const_expr(config.phase == "pool"):
            cute.arch.griddepcontrol_wait()
            pool(config, ops, scratch.sums, flow, place, Int32(0))
        elif cutlass.const_expr(config.phase == "basis"):
            basis(config, ops, scratch.sums, flow, place)
        else:
            cute.arch.griddepcontrol_wait()
            decode(config, ops, flow, place)
