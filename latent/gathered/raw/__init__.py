"""Attention over pages of e4m3 rows on sm_90a with Q in e4m3, too: S^T = K Q^T of the codes as they are.

Keys are rows of the products, as in ``transposed``. One warpgroup computes scores and P, two compute O^T = V^T P^T,
half of the value columns each, so that conversions of V to fp16, exponentials and both products overlap. K, as TMA has
brought it, and Q are read by the tensor cores themselves; only V passes registers.
"""
