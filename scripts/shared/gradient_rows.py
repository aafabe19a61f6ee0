"""Rows of ``bench_attention.py``: attention's gradients against their peers'."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence

import torch
from torch.nn.attention import SDPBackend

from shared import bench_shapes, gpu_bench
from shared.attention_peers import FLASH, flash_attention, result_of, sdpa
from shared.attention_rows import BF16, agree, columns, random, without_failing
from warpspec.fmha import attention

# Relative difference from a peer's gradients; SDPA may multiply in bf16 where it has no kernel of its own.
WRONG_GRADIENTS = 2e-2


def backward_calls(batch, heads, length, d, causal, bias=None) -> dict:
    """Calls that compute the gradients, ours and the peers', results of the forward passes at hand."""
    leaves = [random(batch, length, heads, d).requires_grad_() for _ in range(3)]
    do = random(batch, length, heads, d)
    extra = [] if bias is None else [bias.requires_grad_()]
    o = attention(*leaves, causal=causal, bias=bias)
    calls = {"warpspec": lambda: torch.autograd.grad(o, leaves + extra, do, retain_graph=True)}
    own = [t.detach().requires_grad_() for t in leaves]
    kind, name = (
        (SDPBackend.CUDNN_ATTENTION, "cuDNN")
        if bias is None
        else (SDPBackend.EFFICIENT_ATTENTION, "torch efficient")
    )
    theirs = sdpa(*own, backend=kind, attn_mask=bias, is_causal=causal)
    calls[name] = lambda: torch.autograd.grad(theirs, own + extra, do, retain_graph=True)
    found, expected = calls["warpspec"](), calls[name]()
    for mine, peers in zip(found[:3], expected[:3], strict=True):
        agree(f"backward D {d}", mine, peers)
    flash = flash_attention()
    if flash is not None and bias is None:
        from flash_attn.cute.interface import _flash_attn_bwd

        with torch.no_grad():
            result, lse = attention(*leaves, causal=causal, return_lse=True)
        inputs = [t.detach() for t in leaves]
        calls["flash-attn-4"] = lambda: _flash_attn_bwd(*inputs, result, do, lse, d**-0.5, causal)
    return calls


def backward() -> list[list]:
    rows = []
    for batch, heads, length, d, causal in bench_shapes.BACKWARD:
        calls = backward_calls(batch, heads, length, d, causal)
        times = gpu_bench.gpu_times(calls, [()], **gpu_bench.SHORT_ROUNDS)
        flops = 10 * batch * heads * length * length * d // (2 if causal else 1)
        name = f"B{batch} H{heads} S{length} D{d} {'causal' if causal else 'full'}"
        rows.append([name, *columns(times, flops * 1e-6, ("flash-attn-4", "cuDNN")), None, None])
    batch, heads, length, d = bench_shapes.BACKWARD_BIAS
    bias = torch.randn(batch, heads, length, length, device="cuda", dtype=BF16)
    calls = backward_calls(*bench_shapes.BACKWARD_BIAS, False, bias)
    times = gpu_bench.gpu_times(calls, [()], **gpu_bench.SHORT_ROUNDS)
    flops = 10 * batch * heads * length * length * d
    peers = ("flash-attn-4", "cuDNN", "torch efficient")
    rows.append([f"B{batch} H{heads} S{length} D{d} full, bias", *columns(times, flops * 1e-6, peers)])
    return rows


def gradient_heads(
    shapes: Sequence[int] = (), seconds: float = math.inf, *, once: bool = False
) -> list[list]:
    """Gradients of other head sizes, causal, as ``torch.autograd.grad`` computes them. FLOPs are those of the true
    sizes.

    Prints each row as it is measured, and begins none after this many seconds. shapes: indices in ``GRADIENT_HEADS``;
    (): all. once: calls are compared but not timed, which leaves what they compiled in the caches on disk."""
    rows, flash, start = [], flash_attention(), time.monotonic()
    for index in shapes or range(len(bench_shapes.GRADIENT_HEADS)):
        batch, heads_q, heads_kv, length, d, d_v = bench_shapes.GRADIENT_HEADS[index]
        name = f"B{batch} {heads_q}/{heads_kv} S{length} D{d if d == d_v else f'{d}/{d_v}'}"
        if time.monotonic() - start > seconds:
            print(f"{name}: out of time", flush=True)
            continue
        sizes = ((heads_q, d), (heads_kv, d), (heads_kv, d_v))
        leaves = [random(batch, length, *size).requires_grad_() for size in sizes]
        do = random(batch, length, heads_q, d_v)
        forwards = {"warpspec": functools.partial(attention, causal=True)}
        forwards["SDPA"] = functools.partial(sdpa, is_causal=True)
        if flash is not None:
            forwards[FLASH] = lambda *tensors: result_of(flash.dense(*tensors, causal=True))
        calls = without_failing({name: recorded(each, leaves, do) for name, each in forwards.items()})
        found = {each: call() for each, call in calls.items()}
        for pair in zip(found["warpspec"], found.get("SDPA", ()), strict=False):
            agree(name, *pair, WRONG_GRADIENTS)
        if once:
            print(f"{name}: {', '.join(calls)} after {time.monotonic() - start:.0f} s", flush=True)
            continue
        times = gpu_bench.gpu_times(calls, [()], **gpu_bench.SHORT_ROUNDS)
        flops = batch * heads_q * length * length * (3 * d + 2 * d_v)
        rows.append([name, *columns(times, flops * 1e-6, (FLASH, "SDPA"))])
        print(name, {each: round(us, 1) for each, us in times.items()}, flush=True)
        del calls, found, leaves, do
        torch.cuda.empty_cache()
    return rows


def recorded(forward, leaves: list[torch.Tensor], do: torch.Tensor):
    """A function of nothing to a forward call's gradients; the call is made when it is first asked."""
    results = []

    def gradients():
        if not results:
            results.append(forward(*leaves))
        return torch.autograd.grad(results[0], leaves, do, retain_graph=True)

    return gradients
