"""A process that finds its kernels compiled ahead compiles nothing: latent rows in e4m3, all or those that an indexer
selects, and NVFP4 keys with what stores them."""

import os
import subprocess
import sys

import pytest
import torch

from warpspec.aot import __main__ as aot
from warpspec.common.disk_cache import CACHE_VARIABLE

pytestmark = pytest.mark.gpu

FORBID = """
import torch
from warpspec.common import compile
def refuse(*_, **__):
    raise AssertionError("compiled")
compile.compile_host = refuse
table = torch.arange(8, dtype=torch.int32, device="cuda").view(2, 4)
lengths = torch.tensor([200, 64], dtype=torch.int32, device="cuda")
"""
LATENT = """
from warpspec.latent import mla_decode
q = torch.randn(2, 1, 16, 576, device="cuda").bfloat16()
rows = torch.randn(8, 64, 576, device="cuda").to(torch.float8_e4m3fn)
o = mla_decode(q, rows, table, lengths, scale=0.05)
"""
SELECTED = """
from warpspec.latent.cache import LatentPool
from warpspec.latent.gathered import KeySet, gathered_attention
pool = LatentPool.empty(8, 64, "v3.2-fp8", device="cuda")
q = torch.randn(2, 16, 576, device="cuda").bfloat16()
slots = torch.arange(2 * 2048, dtype=torch.int32, device="cuda").view(2, 2048) % 512
o = gathered_attention(q, [KeySet(pool, slots)], scale=0.05)
"""
NVFP4 = """
from warpspec.cache import insert
from warpspec.fmha import attention_varlen
codes = [torch.zeros(8, 64, 8, 64, dtype=torch.uint8, device="cuda") for _ in range(2)]
blocks = [torch.zeros(8, 64, 8, 8, dtype=torch.uint8, device="cuda") for _ in range(2)]
scale = torch.ones(1, device="cuda")
new = torch.randn(512, 8, 128, device="cuda").bfloat16()
more = dict(k_scale=scale, v_scale=scale, k_block_scales=blocks[0], v_block_scales=blocks[1])
insert(new, new, *codes, torch.arange(512, device="cuda"), format="nvfp4", **more)
q = torch.randn(2, 32, 128, device="cuda").bfloat16()
cu = torch.arange(3, dtype=torch.int32, device="cuda")
o = attention_varlen(q, *codes, cu, max_seqlen_q=1, max_seqlen_k=256, page_table=table, kv_lengths=lengths,
                     causal=True, **more)
"""


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--model", "deepseek-v3-decode", "--ranks", "8", "--calls", "paged", "--kv-cache", "e4m3"), LATENT),
        (("--model", "llama-3-8b", "--calls", "packed-paged", "--kv-cache", "nvfp4"), NVFP4),
        (("--model", "deepseek-v3.2-decode", "--ranks", "8", "--kv-cache", "e4m3"), SELECTED),
    ],
)
def test_nothing_is_compiled(options, code, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    major = torch.cuda.get_device_capability()[0]
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    arch = {9: "sm_90a", 10: "sm_100a"}[major]
    extra = (
        "--page-sizes",
        "64",
        "--arch",
        arch,
        "--sm-count",
        str(sms),
        "--cache",
        str(tmp_path),
        "--jobs",
        "6",
    )
    assert aot.main([*options, *extra]) == 0
    run = subprocess.run(
        [sys.executable, "-c", FORBID + code + "torch.cuda.synchronize(); assert o.isfinite().all()"],
        env={**os.environ, CACHE_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
