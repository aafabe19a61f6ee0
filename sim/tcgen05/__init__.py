"""Tensor memory and the 5th-generation tensor core: descriptors, operand layouts, arithmetic and data
movement.

Nothing here knows the machine's scheduler; sim/families/tcgen05.py calls these modules. PTX ISA: "TensorCore
5th Generation Family Instructions".
"""
