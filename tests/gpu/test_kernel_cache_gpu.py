"""Kernels kept on disk, on the GPU of this machine: a second process does not compile, and has the same bits."""

import json
import os
import subprocess
import sys

import pytest

from warpspec.common.disk_cache import CACHE_VARIABLE

pytestmark = pytest.mark.gpu

FIRST_CALL_SECONDS = 0.3  # of a kernel that is on disk, imports and the CUDA context not counted

# Prints, for every call: its name, whether it compiled, its seconds and the hash of its result.
PROCESS = """
import hashlib, json, sys, time
import cutlass.cute, torch, tvm_ffi
from warpspec.common import compile
from warpspec.fmha import attention
from warpspec.moe.permute import sort_tokens
from warpspec.moe.unpermute import unpermute
from warpspec.softmax import softmax, softmax_topk

compiled, compile_host = [], compile.compile_host
compile.compile_host = lambda *arguments, **options: compiled.append(1) or compile_host(*arguments, **options)
torch.manual_seed(0)

def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

def prefill(head_dim):
    q, k, v = random(2, 512, 8, head_dim), random(2, 512, 2, head_dim), random(2, 512, 2, head_dim)
    return lambda: attention(q, k, v, causal=True)

def gradients():
    leaves = [random(2, 512, heads, 128).requires_grad_() for heads in (8, 2, 2)]
    seed = random(2, 512, 8, 128)
    # Torch imports sympy at its own first gradient of a result that is not a scalar.
    torch.autograd.grad(leaves[0] * seed, leaves[0], seed)
    def call():
        return torch.autograd.grad(attention(*leaves, causal=True), leaves, seed)[1]
    return call

def decode():
    q, k = random(4, 1, 64, 512), random(4, 4096, 1, 512)
    return lambda: attention(q, k)

def moe():
    ids = torch.randint(0, 8, (300, 4), device="cuda", dtype=torch.int32)
    tokens, rows, weights = sort_tokens(ids, 8), random(1200, 512), torch.rand(300, 4, device="cuda")
    out = torch.zeros(300, 512, device="cuda", dtype=torch.bfloat16)
    return lambda: (unpermute(rows, tokens.position, weights, out), out)[1]

logits = random(64, 5000)
calls = {f"attention D {d}": prefill(d) for d in (64, 128, 256, 512)}
calls["gradients"] = gradients()
calls |= {"decode D 512, split keys": decode(), "moe": moe(), "softmax": lambda: softmax(logits)}
calls["top-k"] = lambda: softmax_topk(logits, 8)[1]
for name, call in calls.items():
    torch.cuda.synchronize()
    compiled.clear()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    digest = hashlib.sha256(result.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
    print(json.dumps([name, len(compiled), seconds, digest]))
assert "torch._dynamo" not in sys.modules  # which takes seconds
"""


def test_a_second_process_does_not_compile(tmp_path):
    environment = os.environ | {CACHE_VARIABLE: str(tmp_path)}
    runs = []
    for _ in range(2):
        command = [sys.executable, "-W", "error::RuntimeWarning", "-c", PROCESS]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
        assert ran.returncode == 0, ran.stderr
        runs.append([json.loads(line) for line in ran.stdout.splitlines()])
    for (name, made, cold, bits), (_, made_again, warm, bits_again) in zip(*runs, strict=True):
        print(f"{name}: {cold:.2f} s, then {warm * 1e3:.0f} ms")
        assert made and not made_again, name
        assert bits == bits_again, name
        assert warm < FIRST_CALL_SECONDS, f"{name}: the first call took {warm:.2f} s"
