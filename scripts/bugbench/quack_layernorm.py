"""QuACK's LayerNorm of rows of 1000 elements, far from zero, held against torch's."""

import torch
from quack.rmsnorm import layernorm_fwd

torch.manual_seed(0)
x = torch.randn(4, 1000, device="cuda") + 3.0
weight = torch.ones(1000, device="cuda")
got, wanted = layernorm_fwd(x, weight), torch.nn.functional.layer_norm(x, (1000,))
error = float((got - wanted).norm() / wanted.norm())
assert error < 1e-3, f"relative error {error}"
