"""DeepGEMM's bf16 GEMM of pairs of CTAs, 256 x 128 x 256, from the PTX of its kernel, held against torch's."""

import sys

import torch

from warpspec import sim
from warpspec.sim.order.findings import OrderError
from warpspec.sim.pretend import active

M, N, K = 256, 128, 256
torch.manual_seed(0)
a, b = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16()
d = torch.zeros(M, N).bfloat16()
session = active()
boxes = ((a, (128, 64)), (b, (64, 64)), (d, (128, 64)))
try:
    sim.launch(
        sys.argv[1], grid=2, block=256, cluster=2, smem=220_000, seed=session.seed, check=session.check,
        args=[None, M, N, K, *(sim.tensor_map(t, box, swizzle=128) for t, box in boxes)],
    )  # fmt: skip
except OrderError as error:
    session.errors.append(error)
wanted = a.float() @ b.float().T
error = float((d.float() - wanted).norm() / wanted.norm())
assert error < 1e-2, f"relative error {error}"
