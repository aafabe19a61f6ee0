"""The backward kernel for sm_90a: host side, storage, role dispatch."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from warpspec.common.device import handover, tma
from warpspec.common.device.pipeline import init_barriers
from warpspec.common.device.storage import allocate
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS
from warpspec.fmha.backward.device.finish import finish
from warpspec.fmha.backward.device.host import BackwardHost
from warpspec.fmha.backward.device.load import GradientBuffers, TileLoads, load, wait_before, wait_first
from warpspec.fmha.backward.device.place import ctas_of, own_tile
from warpspec.fmha.backward.sm90.config import CONSUMERS
from warpspec.fmha.backward.sm90.consumer import consume
from warpspec.fmha.backward.sm90.turns import take_turns
from warpspec.fmha.heads import BLOCK


def bias_view(config, bias: cute.Tensor) -> cute.Tensor:
    """(KEY, QUERY, HEAD, BATCH) view of a bias or its gradient; 1 head or batch row if all share it."""
    batch, heads, queries, keys = bias.shape
    steps = bias.stride
    heads, head_step = (heads, steps[1]) if config.logits.bias.heads else (1, steps[2])
    batch, batch_step = (batch, steps[0]) if config.logits.bias.batches else (1, steps[2])
    layout = cute.make_layout((keys, queries, heads, batch), stride=(1, steps[2], head_step, batch_step))
    return cute.make_tensor(bias.iterator, layout)


class Backward(BackwardHost):
    """The kernel of one ``BackwardConfig``."""

    def further(self, operands) -> list:
        """TMA descriptors of the bias and of its gradient, for those that go through shared memory."""
        config = self.config
        if not config.bias_tiles:
            return []
        found = [tma.make_load(bias_view(config, operands.bias), (BLOCK, config.tile_m))]
        if config.stores_bias:
            found.append(tma.make_store(bias_view(config, operands.dbias), (BLOCK, BLOCK)))
        return found

    @cute.kernel
    def kernel(self, operands, atoms, coordinates, scales, window, order):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # 1. Shared memory.
        storage = allocate(config.smem_regions)
        channels = init_barriers(config.barriers, storage.barriers.data_ptr())
        if warp == config.load_warp:
            for atom in atoms:
                cute.nvgpu.cpasync.prefetch_descriptor(atom)
        cute.arch.sync_threads()
        if cutlass.const_expr(config.clustered):
            handover.meet()
        wait_first(config)

        # 2. Roles.
        shared = GradientBuffers.of(config, storage)
        consumer = warp // (WARPGROUP_THREADS // WARP_THREADS)
        arguments = (config, channels, shared, operands, scales, window, order)
        tensors = (atoms, coordinates)
        if cutlass.const_expr(config.finishes):
            pieces, _, _, slices, whole = order
            if cute.arch.block_idx()[0] < ctas_of(config, operands, pieces, slices, whole):
                become_consumer(arguments, consumer, tensors)
            else:
                finish(config, operands, scales[1], order)
        elif cutlass.const_expr(config.threads == config.consumer_threads):
            become_consumer(arguments, consumer, tensors)  # one of the consumers' warps loads
        elif warp >= config.consumer_threads // WARP_THREADS:
            cute.arch.setmaxregister_decrease(config.registers[-1])
            tile = own_tile(config, operands, window, order)
            if cutlass.const_expr(config.paired):  # noqa: SIM102
                if warp == config.load_warp:
                    load(TileLoads(config, channels, shared, operands, *tensors, tile))
            if cutlass.const_expr(config.deterministic):  # noqa: SIM102
                if warp >= config.turn_warp:
                    wait_before(config)
                    take_turns(config, channels, operands, tile, warp - config.turn_warp)
        else:
            cute.arch.setmaxregister_increase(config.registers[0])
            become_consumer(arguments, consumer, tensors)
        if cutlass.const_expr(config.clustered):
            handover.meet()


@cute.jit
def become_consumer(arguments: cutlass.Constexpr, consumer, tensors: cutlass.Constexpr):
    """Run consumer number ``consumer``. arguments: those of ``consume`` before it."""
    if cutlass.const_expr(arguments[0].has_own_code):
        for each in cutlass.range_constexpr(CONSUMERS):
            if consumer == each:
                consume(*arguments, each, tensors)
    else:
        consume(*arguments, consumer, tensors)
