"""The fixed shapes that scripts/bench_*.py time, and docs/measurements.md has tables of.

Shapes of calls that engines make, drawn at random, are in ``sweep_shapes``.
"""

from __future__ import annotations

import torch

# Attention, in bf16.
# (batch, heads, length, D, causal, window)
PREFILL = [
    (2, 32, 8192, 128, True, None),
    (2, 32, 8192, 64, True, None),
    (2, 16, 8192, 256, True, None),
    (2, 32, 8192, 128, False, None),
    (2, 32, 8192, 128, True, 128),
    (2, 32, 8192, 64, True, 128),
]
# (batch, keys, D) of 64 query and 8 KV heads
DECODE = [(batch, keys, d) for d in (128, 64) for batch, keys in ((32, 8192), (128, 1024), (1, 65536))]
# (batch, heads, length, D, causal)
BACKWARD = [
    (2, 32, 8192, 128, True),
    (2, 32, 8192, 128, False),
    (2, 32, 8192, 64, True),
    (2, 32, 8192, 64, False),
    (2, 16, 8192, 256, True),
    (2, 16, 8192, 256, False),
    (8, 32, 2048, 128, True),
    (8, 32, 2048, 64, True),
]
# (batch, query heads, KV heads, length, D of Q and K, D of V); causal
GRADIENT_HEADS = [
    (2, 16, 16, 4096, 72, 72),
    (2, 16, 16, 4096, 80, 80),
    (2, 16, 16, 4096, 96, 96),
    (2, 16, 16, 4096, 192, 128),
    (2, 16, 16, 4096, 512, 512),
    (1, 16, 2, 8192, 512, 512),
]
BACKWARD_BIAS = (2, 16, 4096, 128)  # batch, heads, length, D; a bias of each head's own
# (batch, heads, length, D of Q and K, D of V, soft cap); causal
HEADS = [
    (2, 16, 8192, 256, 256, 50.0),
    (2, 32, 8192, 128, 128, 50.0),
    (2, 32, 8192, 128, 128, None),
    (2, 32, 8192, 96, 96, None),
    (2, 32, 8192, 80, 80, None),
    (2, 32, 8192, 72, 72, None),
    (1, 128, 8192, 192, 128, None),
    (2, 16, 4096, 512, 512, None),
]
PAGES = (16, 32, 64, 128)
PAGED_PREFILL = [(2, 4096, d) for d in (128, 64, 256)]  # batch, length, D of 32 query and 8 KV heads
# (batch, heads, queries, keys) of D 512, K and V one tensor of one head, not causal
SHARED = [
    (128, 128, 1, 1152),
    (128, 128, 1, 4096),
    (1, 128, 1, 8192),
    (128, 64, 1, 640),
    (1, 128, 4096, 4096),
]
SHARED_DIM = 512
# (batch, drafts, keys, D, window) of 64 query and 8 KV heads, pages of 64
TREES = [
    (32, 16, 8192, 128, None),
    (32, 16, 8192, 64, None),
    (4, 64, 8192, 128, None),
    (32, 8, 8192, 256, None),
    (32, 16, 8192, 128, 1024),
]
# (mask of ``block_rows``, batch, query heads, KV heads, length, D) of lists of blocks
BLOCKS = [
    ("documents", 2, 16, 16, 8192, 128),
    ("drawn", 2, 16, 16, 8192, 128),
    ("documents", 2, 32, 8, 8192, 64),
    ("window", 2, 16, 16, 8192, 128),
]
BLOCK_GRADIENTS = BLOCKS[:2]
# (batch, query heads, KV heads, length, D) of causal queries with images
RANGES = [(1, 8, 4, 4096, 256), (2, 32, 8, 8192, 128)]
# (batch, heads, queries, most keys, whether requests' lengths are random, rows' type) of MLA's decode, pages of 64
MLA = [
    (128, 128, 1, 4096, False, "bf16"),
    (128, 64, 1, 4096, False, "bf16"),
    (128, 16, 1, 4096, False, "bf16"),
    (128, 8, 1, 4096, False, "bf16"),
    (128, 16, 2, 4096, False, "bf16"),
    (128, 128, 1, 1024, False, "bf16"),
    (32, 16, 1, 8192, False, "bf16"),
    (1, 128, 1, 8192, False, "bf16"),
    (1, 16, 1, 65536, False, "bf16"),
    (128, 128, 1, 4096, True, "bf16"),
    (128, 16, 1, 4096, True, "bf16"),
    (128, 128, 1, 4096, False, "e4m3"),
    (128, 64, 1, 4096, False, "e4m3"),
    (128, 16, 1, 4096, False, "e4m3"),
    (128, 8, 1, 4096, False, "e4m3"),
]
MLA_PAGE = 64

# Softmax: rows, columns.
SOFTMAX = (
    *((rows, 1024) for rows in (128, 2048)),
    *((2048, length) for length in (2048, 4096, 8192)),
    *((4, length) for length in (16384, 32768, 65536, 114688, 262144, 1048576, 8388608, 33554432)),
    (32768, 4096),
    (8192, 50257),
    (16384, 32768),
    (4096, 131072),
)
SOFTMAX_DTYPES = (torch.float16, torch.bfloat16)

# Softmax and top-k.
TOPK = (  # rows, columns, k, dtype, bar in microseconds (None: QuACK's)
    (8192, 50257, 10, torch.float32, 450.0),
    (64, 129280, 8, torch.float32, 20.0),
    (8192, 384, 6, torch.float32, 8.0),
    (512, 2048, 8, torch.bfloat16, None),
)
TOPK_MORE = (
    (8192, 50257, 10, torch.bfloat16, None),
    (8192, 50257, 128, torch.float32, None),
    (8192, 256, 8, torch.bfloat16, None),
    (128, 384, 6, torch.float32, None),
    (1, 129280, 8, torch.float32, None),
    (1024, 129280, 64, torch.bfloat16, None),
)
# A router's logits have just been written: these are also measured on one set of inputs, which the L2 holds.
TOPK_RESIDENT = ((8192, 384, 6, torch.float32, 8.0),)

# DeepSeek-V4's serving path.
INSERTED = [(1, 64), (128, 64), (128, 128), (8192, 64)]  # (tokens, query heads)
COMPRESSED = [
    ("csa", 128, 1),
    ("csa", 1, 8192),
    ("hca", 128, 1),
    ("hca", 1, 8192),
]  # (kind, requests, tokens of each)
# (queries, heads, slots of the window and of the selected or compressed entries, format)
GATHERED = [
    (128, 128, (128, 512), "v4-fp8"),
    (128, 128, (128, 1024), "v4-fp8"),
    (128, 128, (128, 2048), "v4-fp8"),
    (128, 64, (128, 512), "v4-fp8"),
    (1, 64, (128, 512), "v4-fp8"),
    (16, 64, (128, 8192), "v4-fp8"),
    (4096, 128, (128, 1024), "bf16"),
    (128, 128, (2048,), "v3.2-fp8"),
    (128, 64, (2048,), "v3.2-fp8"),
    (128, 16, (2048,), "v3.2-fp8"),
    (128, 8, (2048,), "v3.2-fp8"),
]
SELECTED = [
    (64, 32768, 512),
    (64, 32768, 1024),
    (64, 32768, 2048),
    (1, 262144, 1024),
    (512, 4096, 512),
]  # (rows, logits, k)
SCORED = [(64, 32768), (1, 262144), (256, 8192)]  # (queries, entries of each)
PROJECTED = [(1, 8), (64, 8), (128, 8), (128, 16), (4096, 8), (4096, 16)]  # (tokens, groups); K 4096, N 1024

# Experts: tokens of a layer.
EXPERTS_TOKENS = (1, 2, 4, 16, 64, 256, 512, 2048, 4096)

# Swap-FFN: requests of a step.
SWAP_BATCHES = (1, 2, 4, 16)
