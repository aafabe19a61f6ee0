"""The unfused baseline: a decode step in torch operations, with weights, activations and state in bf16.

This is what a model runs without this package. ``scripts/bench_swap_ffn.py`` times it eager, captured in a CUDA graph,
and under torch.compile. It never waits for the device.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from warpspec.swap.reference import Decisions, lanes, pack_lanes
from warpspec.swap.weights import SwapFFNWeights


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm, bf16 to bf16; mean and root in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def swap(x, ram, map_, w: SwapFFNWeights, forced=None, seen=None):
    """The router and the exchange, in place in ram and map_. Returns the new x. forced, seen: as in ``decode``."""
    z = rms_norm(x, w["router_norm"], w.eps) @ w["router_w"].T
    logit, scores = z @ w["swap_w"] + w["swap_b"], z @ w["bank_w"] + w["bank_b"]
    gate, logical = logit > 0, scores.argmax(-1)
    if seen is not None:
        best = scores.float().topk(2, dim=-1).values
        seen.append(Decisions(gate, logical, logit.float(), best[..., 0] - best[..., 1]))
    if forced is not None:
        gate, logical = forced
    lanes_ = lanes(map_)
    physical = lanes_.gather(-1, logical[..., None])
    index = physical[..., None].expand(*physical.shape, x.shape[-1])
    read = ram.gather(2, index)[:, :, 0]
    ram.scatter_(2, index, torch.where(gate[..., None], x, read)[:, :, None])
    moved = lanes_.scatter(-1, logical[..., None], lanes_[..., :1])
    moved = torch.cat([physical, moved[..., 1:]], dim=-1)
    map_.copy_(torch.where(gate, pack_lanes(moved), map_))
    return torch.where(gate[..., None], read, x)


def ffn(x: torch.Tensor, w: SwapFFNWeights) -> torch.Tensor:
    n = rms_norm(x, w["ffn_norm"], w.eps)
    return (silu(n @ w["w1"].T) * (n @ w["w3"].T)) @ w["w2"].T


def event(x, ram, map_, w: SwapFFNWeights, k_ffn: int, residual: bool, forced=None, seen=None):
    """A swap, in place in ram and map_, and k_ffn FFN steps. Returns the new x."""
    x = swap(x, ram, map_, w, forced, seen)
    for _ in range(k_ffn):
        x = ffn(x, w) + x if residual else ffn(x, w)
    return x


def decode(
    x,
    ram,
    map_,
    w: SwapFFNWeights,
    *,
    events: int,
    k_ffn: int,
    residual: bool,
    forced=None,
    seen=None,
    step=event,
):
    """delta [B, D] bf16; ram and map_ are changed in place. Arguments as in ``reference.decode``.

    seen: a list to which the router's ``Decisions`` of every event are appended, for tests. step: ``event``, or
    torch.compile's version of it.
    """
    x = x[:, None] * w.core_scale.to(x.dtype) + w.core_shift.to(x.dtype)
    for i in range(events):
        taken = None if forced is None else (forced[0][i], forced[1][i])
        x = step(x, ram, map_, w, k_ffn, residual, taken, seen)
    pooled = torch.einsum("ck,bcd->bkd", w.core_alpha.to(x.dtype), x)
    s = torch.einsum("krd,bkd->br", w["basis"], pooled)
    return silu(s) @ w["decoder"].T
