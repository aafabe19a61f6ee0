"""The kernels for sm_90a that make dQ by query tiles, and dK and dV by key tiles: host side, storage, role dispatch.
CTAs are persistent."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream

from warpspec.common.device import tma
from warpspec.common.device.host import host_function
from warpspec.common.device.pipeline import init_barriers
from warpspec.common.device.storage import allocate
from warpspec.common.hardware import WARP_ROWS, WARP_THREADS, WARPGROUP_THREADS
from warpspec.fmha.backward.device.host import batched, row_view
from warpspec.fmha.backward.device.place import ctas_of
from warpspec.fmha.backward.operands import BackwardNumbers, BackwardOperands, QueryOperands
from warpspec.fmha.backward.sm90.apart import keys, queries
from warpspec.fmha.backward.sm90.apart.config import LOAD_WARPS
from warpspec.fmha.backward.sm90.apart.load import NAMES, Loads, load_keys, load_queries, wait_and_launch
from warpspec.fmha.backward.sm90.apart.tile import launch_of
from warpspec.fmha.device.host import SMEM_CARVEOUT_PERCENT
from warpspec.fmha.heads import BLOCK


class Apart:
    """What both kernels have in common. gradients: names of those that a kernel makes."""

    gradients = ()

    def __init__(self, config):
        self.config = config

    def copies(self, operands) -> tuple:
        """(TMA descriptors, their coordinate tensors) of K, V, Q and dO, of the gradients, and of what else a kernel
        reads."""
        config = self.config
        blocks = config.room // BLOCK if config.rows is None else 1
        tensors = {"k": operands.k, "v": operands.v, "q": operands.q, "do": operands.do}
        boxes = {name: (BLOCK, config.rows_of(name), blocks) for name in NAMES}
        copies = [tma.make_load(row_view(config, tensors[name]), boxes[name]) for name in NAMES]
        made = [getattr(operands, name) for name in self.gradients if config.stores_tiles]
        copies += [tma.make_store(row_view(config, tensor), (BLOCK, WARP_ROWS, 1)) for tensor in made]
        copies += [tma.make_load(row_view(config, tensor), boxes["do"]) for tensor in self.further(operands)]
        return tuple(tuple(copy[i] for copy in copies) for i in range(2))

    def further(self, operands) -> tuple:
        """Further tensors that are read in tiles like dO's."""
        return ()

    def launch(self, ctas, stream, follows: bool = True) -> dict:
        """The arguments of a launch. follows: it may begin before the one before it has ended."""
        return {
            "grid": (ctas, 1, 1),
            "block": (self.config.threads, 1, 1),
            "min_blocks_per_mp": 1,
            "preferred_smem_carveout": SMEM_CARVEOUT_PERCENT,
            "use_pdl": follows,
            "stream": stream,
        }

    def begin(self, atoms, warp) -> tuple:
        """(channels, regions of shared memory by name). Called by all threads."""
        storage = allocate(self.config.smem_regions)
        channels = init_barriers(self.config.barriers, storage.barriers.data_ptr())
        prefetch(self.config, atoms, warp)
        cute.arch.sync_threads()
        names = [region.name for region in self.config.smem_regions]
        return channels, {name: getattr(storage, name).data_ptr() for name in names}


def stores_of(atoms, coordinates) -> tuple:
    """(TMA descriptor, coordinate tensor) of each gradient."""
    first = len(NAMES)
    return tuple(zip(atoms[first:], coordinates[first:], strict=True))


@cute.jit
def prefetch(config: cutlass.Constexpr, atoms: cutlass.Constexpr, warp):
    """Prefetch TMA descriptors."""
    if warp == config.load_warp:
        for atom in atoms:
            cute.nvgpu.cpasync.prefetch_descriptor(atom)


class Queries(Apart):
    """The kernel of one ``QueryConfig``."""

    gradients = ("dq",)

    @host_function(QueryOperands)
    def __call__(self, operands: QueryOperands, stream: CUstream):
        operands = batched(self.config, operands)
        launch = launch_of(self.config, operands, operands)
        ctas = cutlass.min(launch.count, operands.ctas)
        arguments = self.launch(ctas, stream, not self.config.makes_statistics)
        self.kernel(operands, *self.copies(operands), launch).launch(**arguments)

    def further(self, operands) -> tuple:
        return (operands.o,) if self.config.makes_statistics else ()

    @cute.kernel
    def kernel(self, operands, atoms, coordinates, launch):
        config, warp = self.config, cute.arch.make_warp_uniform(cute.arch.warp_idx())
        channels, shared = self.begin(atoms, warp)
        # The launch before began this one behind its own wait for the first kernel, whose statistics are all that is
        # read. It is waited for in the end, so that what comes next begins behind both.
        if cutlass.const_expr(config.makes_statistics):
            cute.arch.griddepcontrol_launch_dependents()
        elif cutlass.const_expr(not config.begins_early):
            cute.arch.griddepcontrol_wait()
        if warp >= config.load_warp:
            cute.arch.setmaxregister_decrease(config.registers[-1])
            loads = Loads(config, channels, shared, operands, atoms, coordinates)
            for number in cutlass.range_constexpr(LOAD_WARPS):
                if warp == config.load_warp + number:
                    load_queries(loads, number, launch)
        else:
            cute.arch.setmaxregister_increase(config.registers[0])
            consumer = warp // (WARPGROUP_THREADS // WARP_THREADS)
            queries.consume(
                config, channels, shared, operands, stores_of(atoms, coordinates), launch, consumer
            )
        if cutlass.const_expr(config.begins_early):
            cute.arch.griddepcontrol_wait()


class Keys(Apart):
    """The kernel of one ``KeyConfig``."""

    gradients = ("dk", "dv")

    @host_function(BackwardOperands, BackwardNumbers)
    def __call__(self, operands: BackwardOperands, numbers: BackwardNumbers, stream: CUstream):
        config, operands = self.config, batched(self.config, operands)
        logits, scale, *window, pieces, section, most, slices, whole, _, most_ctas = numbers
        order = (pieces, section, most, slices, whole)
        ctas = cutlass.min(ctas_of(config, operands, pieces, slices, whole), most_ctas)
        arguments = (operands, *self.copies(operands), (logits, scale), tuple(window), order)
        self.kernel(*arguments).launch(**self.launch(ctas, stream))

    @cute.kernel
    def kernel(self, operands, atoms, coordinates, scales, window, order):
        config, warp = self.config, cute.arch.make_warp_uniform(cute.arch.warp_idx())
        channels, shared = self.begin(atoms, warp)
        if cutlass.const_expr(config.packed):  # the first kernel sorts the tiles
            wait_and_launch()
        if warp >= config.load_warp:
            cute.arch.setmaxregister_decrease(config.registers[-1])
            loads = Loads(config, channels, shared, operands, atoms, coordinates)
            for number in cutlass.range_constexpr(LOAD_WARPS):
                if warp == config.load_warp + number:
                    load_keys(loads, number, window, order)
        else:
            cute.arch.setmaxregister_increase(config.registers[0])
            consumer = warp // (WARPGROUP_THREADS // WARP_THREADS)
            stores = stores_of(atoms, coordinates)
            keys.consume(config, channels, shared, operands, stores, scales, window, order, consumer)
