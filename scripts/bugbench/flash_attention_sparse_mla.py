"""flash-attn-4's sparse MLA for Blackwell with its gradients: two queries of 128 heads, 256 gathered keys of which the
last 64 are invalid (-1)."""

import torch
from flash_attn.cute.interface import flash_attn_func

QUERIES, KEYS, TOP, INVALID = 2, 256, 256, 64
torch.manual_seed(0)


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda").requires_grad_()


q, qv = leaf(1, QUERIES, 128, 64), leaf(1, QUERIES, 128, 512)
k, v = leaf(1, KEYS, 1, 64), leaf(1, KEYS, 1, 512)
index = torch.arange(TOP, dtype=torch.int32, device="cuda").repeat(1, QUERIES, 1)
index[..., TOP - INVALID :] = -1
out = flash_attn_func(q, k, v, qv=qv, gather_kv_indices=index, causal=False, pack_gqa=True)[0]
given = torch.randn_like(out)
dq, dk, dv, dqv = torch.autograd.grad(out, (q, k, v, qv), given)

exact = [t.detach().float()[0].requires_grad_() for t in (q, k, v, qv)]
eq, ek, ev, eqv = exact
logits = (torch.einsum("qhd,kd->hqk", eq, ek[:, 0]) + torch.einsum("qhd,kd->hqk", eqv, ev[:, 0])) * 576**-0.5
logits[..., TOP - INVALID :] = -torch.inf
wanted = torch.einsum("hqk,kd->qhd", logits.softmax(-1), ev[:, 0])
error = float((out[0].float() - wanted).norm() / wanted.norm())
assert error < 1e-2, f"relative error {error}"
for name, got, exact_one in zip(("dq", "dk", "dv", "dqv"), (dq, dk, dv, dqv),
                                torch.autograd.grad(wanted, exact, given[0].float()), strict=True):  # fmt: skip
    error = float((got[0].float() - exact_one).norm() / exact_one.norm())
    assert error < 3e-2, f"{name}: relative error {error}"
