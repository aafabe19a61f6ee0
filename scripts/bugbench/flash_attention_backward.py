"""flash-attn-4's backward pass for Blackwell, one head of 512 queries and 256 keys, D 128, held against torch's."""

import torch
from flash_attn.cute.interface import flash_attn_func

torch.manual_seed(0)
q, k, v = (
    torch.randn(1, length, 1, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for length in (512, 256, 256)
)
out = flash_attn_func(q, k, v, causal=False)
out = out[0] if isinstance(out, tuple) else out
given = torch.randn_like(out)
got = torch.autograd.grad(out, (q, k, v), given)
exact = [t.detach().float().requires_grad_() for t in (q, k, v)]
heads_first = (t.transpose(1, 2) for t in exact)
reference = torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
for name, one, wanted in zip("qkv", got, torch.autograd.grad(reference, exact, given.float()), strict=True):
    error = float((one.float() - wanted).norm() / wanted.norm())
    assert error < 2e-2, f"d{name}: relative error {error}"
