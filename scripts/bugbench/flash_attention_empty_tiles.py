"""flash-attn-4's forward pass for Blackwell with block sparsity: a persistent CTA with tiles that have no keys.

--infinite: a value is infinite, so that every tile with keys leaves infinite elements of O in tensor memory.
"""

import sys

import torch
from cutlass.utils import HardwareInfo
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import _flash_attn_fwd

TILE, TILES = 256, 6


def one(*_, **__):
    """The number of SMs: one persistent CTA takes all tiles."""
    return 1


HardwareInfo.get_device_multiprocessor_count = HardwareInfo.get_max_active_clusters = one
torch.manual_seed(0)
q = torch.randn(1, TILE * TILES, 1, 128, dtype=torch.bfloat16, device="cuda")
k, v = (torch.randn(1, 128, 1, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
counts = torch.tensor([1, 0, 0, 1, 0, 1], dtype=torch.int32, device="cuda").view(1, 1, TILES)
blocks = BlockSparseTensorsTorch(
    mask_block_cnt=torch.zeros_like(counts),
    mask_block_idx=torch.zeros(1, 1, TILES, 1, dtype=torch.int32, device="cuda"),
    full_block_cnt=counts,
    full_block_idx=torch.zeros(1, 1, TILES, 1, dtype=torch.int32, device="cuda"),
    block_size=(TILE, 128),
)
if "--infinite" in sys.argv:
    v[0, 0, 0, 0] = float("inf")
out = _flash_attn_fwd(q, k, v, causal=False, block_sparse_tensors=blocks, return_lse=True)[0]
filled = counts.view(TILES).repeat_interleave(TILE) == 1
assert (out[:, ~filled] == 0).all(), "a row without keys is not 0"
heads_first = (t.transpose(1, 2).float() for t in (q, k, v))
wanted = torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
finite = wanted[0, 0, 0].isfinite()
got, wanted = (t[:, filled][..., finite].float() for t in (out, wanted))
error = float((got - wanted).norm() / wanted.norm())
assert error < 1e-2, f"relative error {error}"
