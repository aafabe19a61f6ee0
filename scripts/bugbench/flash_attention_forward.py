"""flash-attn-4's forward pass for Blackwell, one head of 256 queries and keys, D 128, held against torch's."""

import torch
from flash_attn.cute.interface import flash_attn_func

torch.manual_seed(0)
q, k, v = (torch.randn(1, 256, 1, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
out = flash_attn_func(q, k, v, causal=False)
out = out[0] if isinstance(out, tuple) else out
heads_first = (t.transpose(1, 2).float() for t in (q, k, v))
wanted = torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
error = float((out.float() - wanted).norm() / wanted.norm())
assert error < 1e-2, f"relative error {error}"
