"""QuACK's GEMM whose rows of A are gathered by cp.async, on pairs of CTAs, held against torch's."""

import argparse

import torch
from quack.gemm import gemm

parser = argparse.ArgumentParser()
parser.add_argument("--add", action="store_true", help="add a matrix to the product")
parser.add_argument("--dynamic", action="store_true", help="tiles are taken by cluster launch control")
options = parser.parse_args()
torch.manual_seed(0)
rows, n, k = 512, 128, 256
a = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda") / 16
b = torch.randn(1, n, k, dtype=torch.bfloat16, device="cuda")
c = torch.randn(rows, n, dtype=torch.bfloat16, device="cuda") if options.add else None
index = torch.randperm(rows, dtype=torch.int32, device="cuda")
bounds = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
out = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
gemm(
    a, b, out, C=c, tile_count_semaphore=None, tile_M=256, tile_N=128, cluster_M=2, cluster_N=1, persistent=True,
    is_dynamic_persistent=options.dynamic, cu_seqlens_m=bounds, A_idx=index,
)  # fmt: skip
wanted = a[index.long()].float() @ b[0].float().T
wanted = wanted + c.float() if options.add else wanted
error = float((out.float() - wanted).norm() / wanted.norm())
assert error < 1e-2, f"relative error {error}"
