"""Attention over pages of e4m3 rows on sm_90a with keys as rows of the products: S^T = K Q^T, O^T = V^T P^T.

A is K or V^T and comes from registers, where codes become fp16; B is Q or P and lies in shared memory. So codes are
loaded as they are and never stored again, a task has 8, 16 or 32 rows, not always 64, and the tensor
cores read little from shared memory: Q or P of one step, not converted keys.
"""
