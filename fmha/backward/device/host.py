"""The host side of a main kernel: the function that is compiled and called, the same for every architecture."""

from __future__ import annotations

import cutlass  # noqa: F401  (as a whole first: tests/test_layers.py)
import cutlass.cute as cute
from cuda.bindings.driver import CUstream

from warpspec.common.device import tma
from warpspec.common.device.host import host_function
from warpspec.common.operands import fakes
from warpspec.fmha.backward.device.place import ctas_of
from warpspec.fmha.backward.features import BackwardKernel
from warpspec.fmha.backward.operands import PACKED, BackwardNumbers, BackwardOperands
from warpspec.fmha.device.host import SMEM_CARVEOUT_PERCENT, kv_view, with_batch
from warpspec.fmha.heads import BLOCK


class BackwardHost:
    """``cute.compile(Backward(config), ...)`` makes one kernel. An architecture's ``Backward`` adds ``kernel``, which
    gets ``BackwardOperands``, copy atoms and coordinates of K, V, Q, dO and what ``further`` adds, (``LogitNumbers``,
    scale), the window and the order."""

    def __init__(self, config: BackwardKernel):
        self.config = config

    @host_function(BackwardOperands, BackwardNumbers)
    def __call__(self, operands: BackwardOperands, numbers: BackwardNumbers, stream: CUstream):
        logits, scale, *window, pieces, section, most_steps, slices, whole, finishers, _ = numbers
        config, order = self.config, (pieces, section, most_steps, slices, whole)
        operands = batched(config, operands)
        blocks = config.room // BLOCK if config.rows is None else 1
        keys, queries = (BLOCK, config.tile_n, blocks), (BLOCK, config.tile_m, blocks)
        boxes = ((operands.k, keys), (operands.v, keys), (operands.q, queries), (operands.do, queries))
        copies = [tma.make_load(row_view(config, tensor), box) for tensor, box in boxes]
        copies += self.further(operands)
        ctas = ctas_of(config, operands, pieces, slices, whole) * config.column_groups
        if config.finishes:
            ctas += finishers
        atoms, views = (tuple(copy[i] for copy in copies) for i in range(2))
        self.kernel(operands, atoms, views, (logits, scale), tuple(window), order).launch(
            grid=(ctas, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.column_groups, 1, 1) if config.clustered else None,
            min_blocks_per_mp=1,
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            use_pdl=True,
            stream=stream,
        )

    def further(self, operands: BackwardOperands) -> list:
        """Further results of ``tma.make_load`` and ``make_store``."""
        return []


def batched(config, operands):
    """A kernel's operands with a batch dimension of 1 in front of those that callers pack."""
    return with_batch(
        operands, [name for name in PACKED if name in operands._fields] if config.packed else ()
    )


def row_view(config: BackwardKernel, tensor: cute.Tensor) -> cute.Tensor:
    """View (D, ROW, BLOCK, HEAD, BATCH) of k, v, q or do. Rows that are smaller than the tuned size have a single
    block, past whose end TMA fills zeros."""
    if config.rows is None:
        return kv_view(config.kv, tensor)
    batch, rows, heads, size = tensor.shape
    strides = (1, tensor.stride[1], size, tensor.stride[2], tensor.stride[0])
    return cute.make_tensor(tensor.iterator, cute.make_layout((size, rows, 1, heads, batch), stride=strides))


def fake_arguments(config: BackwardKernel) -> tuple:
    """Fake arguments to compile a configuration's kernel with: those of ``BackwardHost.__call__`` except the stream."""
    return (*fakes(BackwardOperands, config), *fakes(BackwardNumbers, config))
