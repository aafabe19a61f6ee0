"""A kernel that finds the cuts of a line as calls do that cut it ahead."""

import cutlass.cute as cute

from warpspec.common.device.storage import allocate
from warpspec.common.hardware import WORD_BYTES
from warpspec.common.launch import Kernel
from warpspec.common.memory import Region
from warpspec.common.operands import fakes
from warpspec.fmha.cuts import FindConfig, FindNumbers, FindOperands
from warpspec.fmha.device.cut_ahead import place_ends
from warpspec.fmha.device.cuts import write_cuts
from warpspec.fmha.device.find_cuts import FindCuts


class FindAhead(FindCuts):
    """``FindCuts``, by one warp's search for both ends of its chunks."""

    @cute.kernel
    def kernel(self, operands, chunks, cuts):
        config = self.config.kernel
        words = config.scheduler.cursor_bytes // WORD_BYTES
        storage = allocate((Region("cursors", words, "int32", 0, "ends of chunks"),))
        chunks = chunks.at(config, storage.cursors.data_ptr())
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            place_ends(config, operands, chunks)
            cute.arch.sync_warp()
            write_cuts(config, operands, chunks, cuts)


def arguments(config: FindConfig) -> tuple:
    return (FindAhead(config), *fakes(FindOperands, config), *fakes(FindNumbers, config))


KERNEL = Kernel("tests.find_ahead", arguments)


def find_ahead(schedule, kv_lengths, cuts) -> None:
    """Write what ``schedule.update`` would write to its cuts."""
    plan = schedule._plan
    KERNEL.run(FindConfig(plan.config), schedule._target, kv_lengths, cuts, *schedule.sizes, plan.ctas)
