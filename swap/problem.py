"""Checks a decode step's arguments once. ``SwapProblem`` has every size and switch, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpspec.common.checks import ANY, check_bool, check_int, check_kind, check_tensor
from warpspec.common.hardware import VECTOR_BYTES
from warpspec.common.outputs import check_apart
from warpspec.swap.reference import lanes
from warpspec.swap.weights import BANKS, MOST_ROWS, SwapFFNWeights, SwapState

MOST_STEPS = 1 << 16  # events of a token, or FFN steps of an event


@dataclass(frozen=True)
class SwapProblem:
    """Sizes and switches of a call.

    batch: number of requests. cores, d_model, d_ff (padded), d_router, collapse_k, collapse_r, eps: sizes and epsilon
    of the weights. events, k_ffn, residual: the call's arguments. device: the device of all tensors.
    """

    batch: int
    cores: int
    d_model: int
    d_ff: int
    d_router: int
    collapse_k: int
    collapse_r: int
    events: int
    k_ffn: int
    residual: bool
    eps: float
    device: torch.device

    @property
    def rows(self) -> int:
        """Vectors: one for each request and core."""
        return self.batch * self.cores

    @property
    def ffn_steps(self) -> int:
        return self.events * self.k_ffn

    @property
    def flops(self) -> int:
        """Floating-point operations of the FFN's products, which are nearly all."""
        return self.ffn_steps * self.rows * 3 * 2 * self.d_ff * self.d_model

    @classmethod
    def check(
        cls,
        x,
        state,
        weights,
        *,
        events=8,
        k_ffn=2,
        residual=False,
        values: bool = True,
        memory: bool = True,
    ) -> SwapProblem:
        """The problem of these arguments. Raises TypeError or ValueError naming the argument, its value and what is
        allowed.

        values: also check that CPU maps are permutations (for a GPU the host would have to wait; any map is safe
        there). memory: False for tensors without storage.
        """
        check_kind("weights", weights, SwapFFNWeights)
        check_kind("state", state, SwapState)
        for name, number in (("events", events), ("k_ffn", k_ffn)):
            check_int(name, number, 1, MOST_STEPS)
        check_bool("residual", residual)
        cores, d_model = weights.cores, weights.d_model
        check_tensor("x", x, (torch.bfloat16,), (ANY, d_model))
        batch = x.shape[0]
        if batch * cores > MOST_ROWS:
            raise ValueError(f"x: B times cores must be at most {MOST_ROWS}, got {batch} times {cores}")
        for name, tensor, dtype, shape in (
            ("state.ram", state.ram, torch.bfloat16, (batch, cores, BANKS, d_model)),
            ("state.map", state.map, torch.uint8, (batch, cores)),
        ):
            check_tensor(name, tensor, (dtype,), shape)
            if not tensor.is_contiguous():
                raise ValueError(f"{name}: must be contiguous, got strides {tensor.stride()}")
        for name, tensor in (("state.ram", state.ram), ("state.map", state.map), ("weights", weights)):
            if tensor.device != x.device:
                raise ValueError(f"{name}: must be on x's device, {x.device}, got {tensor.device}")
        if memory and state.ram.numel() and state.ram.data_ptr() % VECTOR_BYTES:
            raise ValueError(f"state.ram: must be aligned to {VECTOR_BYTES} bytes")
        if memory:
            check_apart({"state.ram": state.ram, "state.map": state.map}, {"x": x})
        if values and memory and x.device.type == "cpu":
            ordered = lanes(state.map).sort(-1).values
            if not (ordered == torch.arange(BANKS)).all():
                raise ValueError("state.map: lanes must be a permutation of 0..3 in every map")
        return cls(
            batch=batch,
            cores=cores,
            d_model=d_model,
            d_ff=weights.d_ff_padded,
            d_router=weights.d_router,
            collapse_k=weights.collapse_k,
            collapse_r=weights.collapse_r,
            events=events,
            k_ffn=k_ffn,
            residual=residual,
            eps=weights.eps,
            device=x.device,
        )
