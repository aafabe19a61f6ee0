"""Mixture of experts: 4-bit SwiGLU grouped GEMM, routing, activation quantisation."""

from __future__ import annotations

import torch

from warpspec.common.errors import UnsupportedProblem
from warpspec.moe import ops, parallel, streamed_ops
from warpspec.moe.activations import intermediate_scale_of
from warpspec.moe.experts import NVFP4Experts
from warpspec.moe.operands import PreparedWeights, QuantizedRows, prepare_w2, prepare_w13
from warpspec.moe.problem import check_activation, check_precision
from warpspec.moe.routing import route
from warpspec.moe.streamed import StreamedWeights

__all__ = [
    "NVFP4Experts",
    "PreparedWeights",
    "QuantizedRows",
    "StreamedWeights",
    "UnsupportedProblem",
    "grouped_swiglu",
    "intermediate_scale_of",
    "moe_ffn",
    "prepare_w2",
    "prepare_w13",
    "route",
]

OPERATORS = {"sm100": ops, "sm90": streamed_ops}  # by the backend that weights are laid out for


def grouped_swiglu(
    a: torch.Tensor,
    w13: PreparedWeights | StreamedWeights,
    offsets: torch.Tensor,
    *,
    limit: float | None = None,
    activation: str = "swiglu",
    out_format: str = "bf16",
    out_scale: torch.Tensor | None = None,
    check: bool = False,
    backend: str = "auto",
) -> torch.Tensor | QuantizedRows:
    """act(a @ w13^T) of rows sorted by expert, forward only.

    The rows are quantised to NVFP4 first, with one global scale each, unless w13 is laid out for sm_90a, whose kernel
    takes them in bf16 ("w4a16" of `moe_ffn`): no row's result depends on another's.

    Args:
        a: [R, H] bf16, rows contiguous and aligned to 16 bytes: those of expert 0, then those of expert 1, ...
        w13: gate and up of E experts, from `prepare_w13`: [E, 2I, H], with biases if it holds some; for backend "sm90"
            that of `NVFP4Experts.for_backend`.
        offsets: [E] int32, running ends: rows of expert e are offsets[e - 1] to offsets[e]. Rows from offsets[-1] on
            are no one's: not read, and what stands there in the result is undefined.
        limit: positive float or None, no clamp.
        activation: "swiglu": silu(min(gate, limit)) * clamp(up, -limit, limit). "swiglu_oai": g * sigmoid(1.702 g)
            * (u + 1) with g = min(gate, limit) and u = clamp(up, -limit, limit).
        out_format: "bf16", or "nvfp4": a `QuantizedRows` for a second grouped GEMM over the same offsets (sm_100a).
        out_scale: [E] fp32, only with "nvfp4": global scale of each expert's result. Default
            ``intermediate_scale_of(activation, limit)``, at which nothing is cut.
        check: look at the values of offsets, which on CUDA makes the host wait; a CPU tensor's are always checked.
            Unchecked, ends out of range are brought into it.
        backend: "auto", "sm100" or "sm90" (native kernels, CUDA tensors), "sim" (the same kernels, executed on the CPU,
            CPU tensors: those of the GPU that w13 is laid out for) or "reference" (FP32 torch, any device). "auto": the
            device's kernel for CUDA tensors, "sim" for CPU tensors; the environment variable WARPSPEC_BACKEND overrides
            it.

    Returns:
        [R, I] bf16, or QuantizedRows. NaN or Inf in a row makes that row's result NaN.

    Raises:
        TypeError: an argument of the wrong kind or dtype. ValueError: wrong shape, device, strides or value.
        UnsupportedProblem: the backend cannot run this problem (nothing falls back to another).
        NotImplementedError: from backward(). All but the last are raised before anything is launched.
    """
    _check_kinds(tensors={"a": a, "offsets": offsets}, check=check, backend=backend)
    if not isinstance(w13, (PreparedWeights, StreamedWeights)):
        raise TypeError(f"w13: must be PreparedWeights or StreamedWeights, got {type(w13).__name__}")
    check_activation(activation, limit)
    if isinstance(w13, StreamedWeights):
        if out_format != "bf16" or out_scale is not None:
            raise UnsupportedProblem(
                f"out_format: w13 laid out for sm_90a makes bf16 alone, got {out_format!r} with out_scale "
                f"{'None' if out_scale is None else 'given'}"
            )
        limit = None if limit is None else float(limit)
        arguments = (a, offsets, *streamed_ops.flatten(w13), activation, limit, check, backend)
        return ops.call(
            "grouped_swiglu", streamed_ops.moe_grouped_swiglu, streamed_ops.run_grouped, *arguments
        )
    if out_format == "nvfp4" and out_scale is None:
        scale = intermediate_scale_of(activation, limit)
        out_scale = torch.full((w13.experts,), scale, dtype=torch.float32, device=a.device)
    limit = None if limit is None else float(limit)
    arguments = (a, offsets, *ops.flatten(w13), out_scale, out_format, activation, limit, check, backend)
    data, scales = ops.call("grouped_swiglu", ops.moe_grouped_swiglu, ops.run_grouped, *arguments)
    if out_format == "bf16":
        return data
    return QuantizedRows(data, scales, None, -(-w13.width // 16) * 16)


def moe_ffn(
    x: torch.Tensor,
    experts: NVFP4Experts,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    limit: float | None = None,
    activation: str = "swiglu",
    precision: str = "auto",
    group: torch.distributed.ProcessGroup | None = None,
    capacity: int | None = None,
    check: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """A mixture-of-experts layer: sum over a token's k choices of weight * w2 @ act(w13 @ x), forward only.

    Sorts tokens by expert on the device, runs the two grouped GEMMs, the first with the activation, and adds up each
    token's rows in the order of its choices: bitwise repeatable, and no token's result depends on another's. No host
    synchronisation.

    Args:
        x: [T, H] bf16, rows contiguous and aligned to 16 bytes.
        experts: `NVFP4Experts`, laid out for the backend (`NVFP4Experts.for_backend`); its shared experts are taken by
            every token with weight 1.
        topk_ids: [T, k] int32 within 0..E-1, or -1 for none; an expert may occur twice. `route` makes them.
        topk_weights: [T, k] fp32.
        limit, activation, backend: as in `grouped_swiglu`.
        precision: of the activations. "w4a4": NVFP4, with one global scale a token and, between the GEMMs, one an
            expert (what sm_100a's kernels multiply; sm_90a's round to it first). "w4a16": bf16 (sm_90a's alone).
            "auto": "w4a4" on sm_100a, "w4a16" on sm_90a. "reference" has both.
        group: experts are spread over its ranks (`NVFP4Experts.shard`): `experts` are this rank's, as many as every
            other's, and id rank * E + e is the rank's e-th. A collective call: each rank brings its own tokens, or
            none. The host waits once, for the numbers of rows that NCCL is told; the bits are those of one GPU.
        capacity: with a group, how many choices each rank can have for each one; the same for all ranks. Buffers are of
            that size whatever the routing, so the host waits for nothing and the call can be captured in a CUDA graph.
            A token with a choice beyond it is NaN; with ``check`` it is a ValueError, after the exchange. T * k of the
            rank with the most tokens is enough for any routing.
        check: raise ValueError for ids out of range, which on CUDA makes the host wait. Unchecked, they count as -1.

    Returns:
        [T, H] bf16; 0 for a token without choices. NaN or Inf in a token makes its result NaN, and no other's.

    Raises:
        As `grouped_swiglu`.
    """
    tensors = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights}
    _check_kinds(tensors=tensors, check=check, backend=backend)
    if not isinstance(experts, NVFP4Experts):
        raise TypeError(f"experts: must be NVFP4Experts, got {type(experts).__name__}")
    check_activation(activation, limit)
    check_precision(precision)
    limit = None if limit is None else float(limit)

    def run(x, experts, topk_ids, topk_weights, check=check):
        operators = OPERATORS[experts.layout]
        return ops.call(
            *("moe_ffn", operators.moe_ffn, operators.run_layer),
            *(x, topk_ids, topk_weights),
            *(*operators.flatten(experts.w13), *operators.flatten(experts.w2)),
            *(experts.intermediate_scale, experts.shared, activation, limit, check, precision, backend),
        )

    parallel.check_capacity(capacity, group)
    if group is None:
        return run(x, experts, topk_ids, topk_weights)
    return parallel.moe_ffn(
        *(x, experts, topk_ids, topk_weights, group, run), capacity=capacity, check=check, backend=backend
    )


def _check_kinds(*, tensors, check, backend) -> None:
    """Raise TypeError for what torch's dispatcher would complain about in its own words."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: must be a torch.Tensor, got {tensor!r} ({type(tensor).__name__})")
    if not isinstance(check, bool):
        raise TypeError(f"check: must be a bool, got {check!r}")
    if not isinstance(backend, str):
        raise TypeError(f"backend: must be a string, got {backend!r}")
