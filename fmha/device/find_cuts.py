"""Finds the cuts of a line for the launches that will read them (``fmha.cuts``), as those would do it themselves: a CTA
here stands for each of theirs."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream

from warpspec.common.device.host import host_function
from warpspec.common.device.storage import allocate
from warpspec.common.hardware import WORD_BYTES
from warpspec.common.memory import Region
from warpspec.fmha.cuts import FindConfig, FindNumbers, FindOperands, LineSizes
from warpspec.fmha.device.cuts import Shaped, write_cuts
from warpspec.fmha.device.line import chunks_of, place_chunks
from warpspec.fmha.operands import Operands


class Launch(NamedTuple):
    """The numbers of a launch that ``line.chunks_of`` looks at."""

    ctas: object
    window: tuple


class FindCuts:
    """``FindCuts(config)(...)`` launches the kernel."""

    def __init__(self, config: FindConfig):
        self.config = config

    @host_function(FindOperands, FindNumbers)
    def __call__(self, operands: FindOperands, numbers: FindNumbers, stream: CUstream):
        """Host side."""
        config, sizes = self.config.kernel, numbers.sizes
        source = config.line_source
        if source is None:
            asked = operands_of(config, operands.kv_lengths, sizes)
            chunks = chunks_of(config, asked, Launch(numbers.ctas, (cutlass.Int32(0),) * 2))
        else:
            asked = source.operands(config, operands.kv_lengths, sizes)
            chunks = source.chunks(config, asked)
        self.kernel(asked, chunks, operands.cuts).launch(
            grid=(numbers.ctas, 1, 1), block=(config.threads, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(self, operands, chunks, cuts):
        config = self.config.kernel
        words = config.scheduler.cursor_bytes // WORD_BYTES
        storage = allocate((Region("cursors", words, "int32", 0, "ends of chunks"),))
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        chunks = chunks.at(config, storage.cursors.data_ptr())
        place_chunks(config, operands, chunks)
        cute.arch.sync_threads()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            write_cuts(config, operands, chunks, cuts)


def operands_of(config, kv_lengths, sizes: LineSizes) -> Operands:
    """Operands of a call of these sizes, of which the line asks for shapes and lengths."""
    keys = (sizes.requests, sizes.extent, sizes.heads_kv, 0)
    q = Shaped((sizes.requests, sizes.queries, sizes.heads, 0))
    table = Shaped((sizes.requests, sizes.extent)) if config.requests.page_size else None
    return Operands(q, Shaped(keys), kv_lengths=kv_lengths, page_table=table)
