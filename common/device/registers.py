"""How many registers a kernel's threads have at launch."""

from __future__ import annotations

from cutlass._mlir import ir

MODULE = "gpu.module"  # the operation that has kernels directly in it


def set_launch_registers(count: int) -> None:
    """Have ptxas give every thread of the kernel that is being traced so many registers (PTX: ".maxnreg"). The launch
    must not ask for a least number of CTAs an SM, which ptxas does not take beside it."""
    operation = ir.InsertionPoint.current.block.owner.operation
    while operation.parent is not None and operation.parent.name != MODULE:
        operation = operation.parent.operation
    operation.attributes["nvvm.maxnreg"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), count)
