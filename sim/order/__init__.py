"""Memory order: a happens-before checker over proxies, barriers, fences and asynchronous operations.

`checker.OrderChecker` is told by the instruction handlers what is accessed and what synchronises; `sim.run(...,
check="order")` makes one a launch. Its methods are grouped by subject: accesses (who may conflict with whom), memory
(shared and global), synchronisation, tensors (tensor memory and tensor maps), checker (the end of a CTA). state: the
checker's data; clocks: who knows of what; shadow: who accessed each word last; shares: conflicts between two shares of
a launch; findings: reports of two unordered accesses. wgmma_registers, load_registers: checks of wgmma.fence and
tcgen05.wait::ld, which order registers, along the paths of a kernel (flow), without a run. pending_loads: loads that an
arrival does not wait for. operand_layouts: matrix descriptors that do not match their tile. stores: who wrote what, to
explain wrong results.
"""

from __future__ import annotations


def of_text(program) -> dict:
    """Findings from the kernel's text alone, by kind and PTX lines."""
    from warpspec.sim.order import load_registers, wgmma_registers

    return wgmma_registers.check(program) | load_registers.check(program)
