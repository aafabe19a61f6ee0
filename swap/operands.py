"""The tensors of a decode step: torch's on the host, cute's on the device. A kernel gets those that its phase reads or
writes; the others are None."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from warpspec.common.hardware import VECTOR_BYTES
from warpspec.common.operands import BFLOAT16, FLOAT32, INT32, UINT8, Number, Operand
from warpspec.swap.config import SLOTS, SwapConfig


def width(config: SwapConfig) -> int:
    """D."""
    return config.d_model


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

    x: Annotated[Any, Operand(BFLOAT16, 2, None, VECTOR_BYTES)] = None
    core_scale: Annotated[Any, Operand(FLOAT32, 2, width, VECTOR_BYTES)] = None
    core_shift: Annotated[Any, Operand(FLOAT32, 2, width, VECTOR_BYTES)] = None
    core_alpha: Annotated[Any, Operand(FLOAT32, 2, SLOTS, VECTOR_BYTES)] = None
    router_norm: Annotated[Any, Operand(BFLOAT16, 1, None, VECTOR_BYTES)] = None
    router_w: Annotated[Any, Operand(BFLOAT16, 2, width, VECTOR_BYTES)] = None
    swap_w: Annotated[Any, Operand(BFLOAT16, 1)] = None
    swap_b: Annotated[Any, Operand(BFLOAT16, 1)] = None
    bank_w: Annotated[Any, Operand(BFLOAT16, 2)] = None
    bank_b: Annotated[Any, Operand(BFLOAT16, 1)] = None
    w13: Annotated[Any, Operand(BFLOAT16, 2, None, VECTOR_BYTES)] = None
    w2: Annotated[Any, Operand(BFLOAT16, 2, None, VECTOR_BYTES)] = None
    basis: Annotated[Any, Operand(BFLOAT16, 3, width, VECTOR_BYTES)] = None
    decoder: Annotated[Any, Operand(BFLOAT16, 2)] = None
    ram: Annotated[Any, Operand(BFLOAT16, 3, width, VECTOR_BYTES)] = None
    map: Annotated[Any, Operand(UINT8, 1)] = None
    vectors: Annotated[Any, Operand(BFLOAT16, 2, width, VECTOR_BYTES)] = None
    inverse: Annotated[Any, Operand(FLOAT32, 1)] = None
    hidden: Annotated[Any, Operand(BFLOAT16, 2, None, VECTOR_BYTES)] = None
    partial: Annotated[Any, Operand(FLOAT32, 3, width, VECTOR_BYTES)] = None
    pooled: Annotated[Any, Operand(FLOAT32, 3, width, VECTOR_BYTES)] = None
    summed: Annotated[Any, Operand(FLOAT32, 2)] = None
    delta: Annotated[Any, Operand(BFLOAT16, 2, None, VECTOR_BYTES)] = None
    counters: Annotated[Any, Operand(INT32, 1)] = None
    forced: Annotated[Any, Operand(UINT8, 2)] = None
    recorded: Annotated[Any, Operand(UINT8, 2)] = None
    margins: Annotated[Any, Operand(FLOAT32, 3)] = None


class StepNumbers(NamedTuple):
    """The numbers among a kernel's arguments.

    ctas: CTAs of the grid. event: the event of a rows phase. steps, k_ffn: FFN steps in all and in one event, for the
    fused kernel.
    """

    ctas: Annotated[Any, Number(INT32)]
    event: Annotated[Any, Number(INT32)]
    steps: Annotated[Any, Number(INT32)]
    k_ffn: Annotated[Any, Number(INT32)]


ROUTER = ("router_norm", "router_w", "swap_w", "swap_b", "bank_w", "bank_b", "ram", "map")

# Names of each phase's operands.
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


def taken(config: SwapConfig) -> tuple[str, ...]:
    """Names of the operands of a configuration's kernel."""
    decisions = ("forced",) * config.forced + ("recorded", "margins") * config.recorded
    return (*TAKEN[config.phase], *(decisions if config.routes else ()))
