"""Memory order: a happens-before checker over proxies, barriers, fences and asynchronous operations.

`checker.OrderChecker` is told by the instruction handlers what is accessed and what synchronises; `sim.run(...,
check="order")` makes one a launch. Its methods stand by subject: accesses (who may conflict with whom), memory (shared
and global), synchronisation, tensors (tensor memory and tensor maps), checker (the end of a CTA). state: what is kept;
clocks: who knows of what; shadow: who accessed each word last; shares: of two shares of a launch; findings: how two
accesses that nothing orders are shown. wgmma_registers, load_registers: wgmma.fence and tcgen05.wait::ld, which order
registers, along the paths of a kernel (flow); they need no run. pending_loads: loads that an arrival does not wait for.
operand_layouts: matrix descriptors that are not their tile's. stores: who wrote what, for results that are wrong.
"""

from __future__ import annotations


def of_text(program) -> dict:
    """Findings that the kernel's text alone shows, by kind and PTX lines."""
    from warpspec.sim.order import load_registers, wgmma_registers

    return wgmma_registers.check(program) | load_registers.check(program)
