"""The tensors of a decode step: torch's on the host, cute's on the device. A kernel gets those that its phase reads or
writes; the others are None."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Operands(NamedTuple):
    """Tensors of a decode step.

    There are R rows, the vectors of all requests and cores: row b * C + c. F is d_ff, padded; Z is d_router; K and S
    are slots and rank of the collapse.

    x, delta: bf16 [B, D]. core_scale, core_shift: fp32 [C, D]. core_alpha: fp32 [C, K]. router_norm [D], router_w
    [Z, D], swap_w [Z], swap_b [1], bank_w [Z, 4], bank_b [4], basis [K, S, D], decoder [D, S]: bf16. w13: bf16
    [2 F, D], w2: bf16 [D, F]. ram: bf16 [R, 4, D]. map: uint8 [R].

    Between phases: vectors: bf16 [R, D]. inverse: fp32 [R], 1 / RMS of the vectors. hidden: bf16 [R, F]. partial: fp32
    [splits, R, D]. pooled: fp32 [B, K, D]. summed: fp32 [B, S]. counters: see ``flow``.

    forced, recorded: uint8 [events, R], the router's decisions: the logical bank, plus 4 if the gate is open. margins:
    fp32 [events, R, 2]: the gate's logit, and the best bank score less the second best.
    """

    x: torch.Tensor | None = None
    core_scale: torch.Tensor | None = None
    core_shift: torch.Tensor | None = None
    core_alpha: torch.Tensor | None = None
    router_norm: torch.Tensor | None = None
    router_w: torch.Tensor | None = None
    swap_w: torch.Tensor | None = None
    swap_b: torch.Tensor | None = None
    bank_w: torch.Tensor | None = None
    bank_b: torch.Tensor | None = None
    w13: torch.Tensor | None = None
    w2: torch.Tensor | None = None
    basis: torch.Tensor | None = None
    decoder: torch.Tensor | None = None
    ram: torch.Tensor | None = None
    map: torch.Tensor | None = None
    vectors: torch.Tensor | None = None
    inverse: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    partial: torch.Tensor | None = None
    pooled: torch.Tensor | None = None
    summed: torch.Tensor | None = None
    delta: torch.Tensor | None = None
    counters: torch.Tensor | None = None
    forced: torch.Tensor | None = None
    recorded: torch.Tensor | None = None
    margins: torch.Tensor | None = None


ROUTER = ("router_norm", "router_w", "swap_w", "swap_b", "bank_w", "bank_b", "ram", "map")

# phase -> names of its operands
TAKEN = {
    "first": ("x", "core_scale", "core_shift", *ROUTER, "vectors", "inverse"),
    "swap": (*ROUTER, "vectors", "inverse", "partial"),
    "rows": ("vectors", "inverse", "partial"),
    "up": ("w13", "vectors", "inverse", "hidden"),
    "down": ("w2", "hidden", "partial"),
    "pool": ("core_alpha", "vectors", "pooled"),
    "basis": ("basis", "pooled", "summed"),
    "decode": ("decoder", "summed", "delta"),
    "fused": tuple(name for name in Operands._fields if name not in ("forced", "recorded", "margins")),
}
