"""FlashInfer's tinygemm2, 8 x 64 x 4096 of bf16, from the PTX of its kernel, held against torch's."""

import re
import sys
from pathlib import Path

import numpy as np
import torch

from warpspec import sim
from warpspec.sim.order.findings import OrderError
from warpspec.sim.pretend import active

TILE_M, TILE_N, TILE_K, STAGES, UNROLL = 16, 8, 64, 16, 4
text = Path(sys.argv[1]).read_text()
entry = re.search(rf"\.entry (\w+tinygemm_kernelILi16ELi16ELi8ELi64ELi{STAGES}ELi{UNROLL}ELb0E\w*)", text)[1]
torch.manual_seed(0)
batch, features, depth = 8, 64, 4096
x, weight = torch.randn(batch, depth).bfloat16(), torch.randn(features, depth).bfloat16()
bias, out = torch.randn(features).bfloat16(), torch.zeros(batch, features).bfloat16()
session = active()
try:
    session.report += sim.launch(
        text, entry, grid=(features // TILE_M, batch // TILE_N), block=384,
        smem=STAGES * UNROLL * (TILE_M + TILE_N) * TILE_K * 2, seed=session.seed, check=session.check,
        args=[out, weight, x, bias, np.int32(features), np.int32(batch), np.int32(depth),
              sim.tensor_map(weight, (TILE_M, TILE_K), swizzle=128), sim.tensor_map(x, (TILE_N, TILE_K), swizzle=128)],
    )  # fmt: skip
except OrderError as error:
    session.errors.append(error)
wanted = x.float() @ weight.float().T + bias.float()
error = float((out.float() - wanted).norm() / wanted.norm())
assert error < 1e-2, f"relative error {error}"
