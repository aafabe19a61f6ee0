"""flash-attn-4's forward pass for Blackwell, one head of D 128, held against torch's."""

import argparse

import torch
from cutlass.utils import HardwareInfo
from flash_attn.cute.interface import flash_attn_func

parser = argparse.ArgumentParser()
parser.add_argument("--queries", type=int, default=256)
parser.add_argument("--keys", type=int, default=256)
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--one-sm", action="store_true", help="one persistent CTA takes all tiles")
parser.add_argument("--lse", action="store_true", help="return the log-sum-exps, and compare them")
parser.add_argument("--sink", action="store_true", help="a sink, whose logit is 0.5")
options = parser.parse_args()
if options.one_sm:
    HardwareInfo.get_device_multiprocessor_count = HardwareInfo.get_max_active_clusters = lambda *_, **__: 1
torch.manual_seed(0)
q = torch.randn(options.batch, options.queries, 1, 128, dtype=torch.bfloat16, device="cuda")
k, v = (
    torch.randn(options.batch, options.keys, 1, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)
)
sink = torch.full((1,), 0.5, dtype=torch.bfloat16, device="cuda") if options.sink else None
out, lse = flash_attn_func(q, k, v, causal=False, learnable_sink=sink, return_lse=options.lse)[:2]
logits = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * 128**-0.5
if options.sink:
    logits = torch.cat([logits, torch.full((options.batch, 1, options.queries, 1), 0.5)], -1)
weights = logits.softmax(-1)[..., : options.keys].nan_to_num()
wanted = torch.einsum("bhqk,bkhd->bqhd", weights, v.float())
error = float((out.float() - wanted).norm() / wanted.norm().clamp(min=1e-6))
assert error < 1e-2, f"relative error {error}"
if options.lse:
    error = float((lse - logits.logsumexp(-1)).abs().max())
    assert error < 1e-2, f"error {error} of the log-sum-exps"
