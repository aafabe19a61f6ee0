"""Host side of the kernels that read rows and write as many."""

from __future__ import annotations

from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream


class SoftmaxHost:
    """Host side of a kernel. A subclass adds ``kernel``; compile with ``cute.compile(Kernel(config), x, out, stream)``.

    carveout: the percentage of L1 and shared memory together that the kernel's CTAs use as shared memory.
    """

    carveout: ClassVar[int]

    def __init__(self, config):
        self.config = config

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: CUstream):
        """Launch the kernel. x, out: (ROW, ELEMENT), elements contiguous; may be the same memory."""
        config = self.config
        self.kernel(x, out).launch(
            grid=(self.clusters(x.shape[0]) * config.cluster, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.cluster, 1, 1) if cutlass.const_expr(config.cluster > 1) else None,
            stream=stream,
            **self.options(),
        )

    def clusters(self, rows):
        """Clusters, or CTAs, that this many rows take."""
        return rows

    def options(self) -> dict:
        """Occupancy, shared memory and dependence on the previous launch."""
        return {
            "min_blocks_per_mp": self.config.ctas_per_sm,
            "preferred_smem_carveout": self.carveout,
            "use_pdl": self.config.dependent,
        }
