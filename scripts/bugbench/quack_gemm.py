"""QuACK's GEMM, 256 x 256 x 512 of bf16: more tiles of K than the ring has stages, held against torch's."""

import torch
from quack.gemm_interface import gemm

torch.manual_seed(0)
a = torch.randn(256, 512, dtype=torch.bfloat16, device="cuda")
b = torch.randn(512, 256, dtype=torch.bfloat16, device="cuda")
out, wanted = gemm(a, b, tuned=False), a.float() @ b.float()
error = float((out.float() - wanted).norm() / wanted.norm())
assert error < 1e-2, f"relative error {error}"
