"""Memory order: a happens-before checker over proxies, barriers, fences and asynchronous operations.

`checker.OrderChecker` is told by the instruction handlers what is accessed and what synchronises; `sim.run(...,
check="order")` makes one a launch. clocks: who knows of what. shadow: who accessed each word last. findings: how two
accesses that nothing orders are shown. wgmma_registers: wgmma.fence, which orders registers.
"""
