"""Swap-FFN decode in FP32: the definition.

It computes one token of each of B requests. Every core c has a vector x[c]. An event exchanges some of the vectors with
a bank of memory and then applies k_ffn FFN steps; the collapse combines the cores into the block's output. Everything
is FP32 except the stored weights and state, which are bf16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import silu

from warpspec.common.autocast import without_autocast
from warpspec.swap.weights import BANKS, LANE_BITS, SwapFFNWeights


class Decisions(NamedTuple):
    """The router's decisions, [events, B, C] each.

    gate: bool, whether x and a bank change places. logical: int64, that bank's number under the map. gate_logit: fp32;
    the gate is open if it is positive. margin: fp32, best bank score less the second best.
    """

    gate: torch.Tensor
    logical: torch.Tensor
    gate_logit: torch.Tensor
    margin: torch.Tensor


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight, over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def lanes(map_: torch.Tensor) -> torch.Tensor:
    """uint8 [...] -> int64 [..., 4]: the physical bank under each logical one."""
    shifts = torch.arange(BANKS, device=map_.device) * LANE_BITS
    return map_.long()[..., None] >> shifts & (BANKS - 1)


def pack_lanes(lanes_: torch.Tensor) -> torch.Tensor:
    """Inverse of ``lanes``."""
    shifts = torch.arange(BANKS, device=lanes_.device) * LANE_BITS
    return (lanes_ << shifts).sum(-1).to(torch.uint8)


def route(x: torch.Tensor, w: SwapFFNWeights) -> Decisions:
    """The router's decisions for x [B, C, D].

    sigmoid(v) > 0.5 means v > 0. The bank with the highest score is taken, the lowest of equal ones.
    """
    z = rms_norm(x, w["router_norm"].float(), w.eps) @ w["router_w"].float().T
    gate_logit = z @ w["swap_w"].float() + w["swap_b"].float()
    scores = z @ w["bank_w"].float() + w["bank_b"].float()
    best = scores.topk(2, dim=-1).values
    # torch.argmax does not specify which of equal scores it returns
    logical = (scores == best[..., :1]).int().argmax(-1)
    return Decisions(gate_logit > 0, logical, gate_logit, best[..., 0] - best[..., 1])


def swap(x, ram, map_, gate, logical):
    """Where gate is set, exchange x [B, C, D] with ram[lane[logical]], and lane 0 with lane[logical] of the map."""
    lanes_ = lanes(map_)
    physical = lanes_.gather(-1, logical[..., None])
    index = physical[..., None].expand(*physical.shape, x.shape[-1])
    read = ram.gather(2, index)[:, :, 0]
    gate_x = gate[..., None]
    ram = torch.where(gate_x[..., None], ram.scatter(2, index, x[:, :, None]), ram)
    moved = lanes_.scatter(-1, logical[..., None], lanes_[..., :1])
    moved[..., 0] = physical[..., 0]
    return torch.where(gate_x, read, x), ram, torch.where(gate, pack_lanes(moved), map_)


def ffn(x: torch.Tensor, w: SwapFFNWeights) -> torch.Tensor:
    """w2 . (silu(w1 . n) * (w3 . n)) of the normalised n [..., D]."""
    n = rms_norm(x, w["ffn_norm"].float(), w.eps)
    return (silu(n @ w["w1"].float().T) * (n @ w["w3"].float().T)) @ w["w2"].float().T


def collapse(x: torch.Tensor, w: SwapFFNWeights) -> torch.Tensor:
    """Combine the cores: x [B, C, D] -> [B, D]."""
    pooled = torch.einsum("ck,bcd->bkd", w.core_alpha, x)
    s = torch.einsum("krd,bkd->br", w["basis"].float(), pooled)
    return silu(s) @ w["decoder"].float().T


@without_autocast
def decode(
    x: torch.Tensor,
    ram: torch.Tensor,
    map_: torch.Tensor,
    w: SwapFFNWeights,
    *,
    events: int,
    k_ffn: int,
    residual: bool,
    forced: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Decisions]:
    """(delta [B, D], ram, map, decisions); all but the map in fp32.

    x: [B, D]. ram: [B, C, 4, D]. map_: uint8 [B, C]. forced: (gate, logical), [events, B, C] each, used instead of the
    router's decisions, which are returned nevertheless.
    """
    x = x.float()[:, None] * w.core_scale + w.core_shift
    ram, made = ram.float(), []
    for event in range(events):
        made.append(route(x, w))
        gate, logical = made[-1][:2] if forced is None else (forced[0][event], forced[1][event])
        x, ram, map_ = swap(x, ram, map_, gate, logical)
        for _ in range(k_ffn):
            x = ffn(x, w) + x if residual else ffn(x, w)
    return collapse(x, w), ram, map_, Decisions(*map(torch.stack, zip(*made, strict=True)))
