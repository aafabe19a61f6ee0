"""Mixture of experts: 4-bit SwiGLU grouped GEMM, routing, activation quantisation."""

from __future__ import annotations

import torch

from warpspec.common.backend import refuse_tangents
from warpspec.common.checks import check_bool, check_choice, check_kind, check_strided
from warpspec.common.errors import UnsupportedProblem
from warpspec.moe import ops, parallel, streamed_ops
from warpspec.moe.activations import intermediate_scale_of
from warpspec.moe.experts import NVFP4Experts
from warpspec.moe.operands import PreparedWeights, QuantizedRows, prepare_w2, prepare_w13
from warpspec.moe.problem import OUT_FORMATS, check_activation, check_precision
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

OPERATORS = {"sm100": ops, "sm90": streamed_ops}  # key: the backend that weights are laid out for


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
    """act(a @ w13^T) for rows that are sorted by expert. Forward only.

    The rows are first quantised to NVFP4, each with a global scale of its own. The exception is w13 laid out for
    sm_90a, whose kernel takes bf16 rows ("w4a16" of `moe_ffn`). No row's result depends on another row.

    Args:
        a: [R, H] bf16, rows contiguous and aligned to 16 bytes: the rows of expert 0, then those of expert 1, ...
        w13: gate and up of E experts, [E, 2I, H], with biases if it has any. It comes from `prepare_w13`, or for
            backend "sm90" from `NVFP4Experts.for_backend`.
        offsets: [E] int32, running ends: expert e has rows offsets[e - 1] to offsets[e]. Rows from offsets[-1] on
            belong to no expert; they are not read, and their results are undefined.
        limit: positive float, or None for no clamp.
        activation: "swiglu": silu(min(gate, limit)) * clamp(up, -limit, limit). "swiglu_oai": g * sigmoid(1.702 g)
            * (u + 1) with g = min(gate, limit) and u = clamp(up, -limit, limit).
        out_format: "bf16", or "nvfp4": a `QuantizedRows` for a second grouped GEMM with the same offsets (sm_100a).
        out_scale: [E] fp32, the global scale of each expert's result, only with "nvfp4". The default,
            ``intermediate_scale_of(activation, limit)``, cuts no value.
        check: check the values of offsets, which on CUDA makes the host wait for the device. Values of CPU tensors are
            always checked. Without the check, ends out of range are clamped.
        backend: "auto", "sm100" or "sm90" (GPU kernels, CUDA tensors), "sim" (the kernels of the GPU that w13 is laid
            out for, simulated on CPU tensors) or "reference" (FP32 torch, any device). "auto" is the device's kernel
            for CUDA tensors and "sim" for CPU tensors; the environment variable WARPSPEC_BACKEND overrides it.

    Returns:
        [R, I] bf16, or QuantizedRows. NaN or Inf in a row makes that row's result NaN.

    Raises:
        TypeError: an argument of the wrong kind or dtype. ValueError: wrong shape, device, strides or value.
        UnsupportedProblem: the backend cannot run this problem (there is no fallback).
        NotImplementedError: from backward(). All others are raised before anything is launched.
    """
    _check_kinds(tensors={"a": a, "offsets": offsets}, check=check, backend=backend)
    refuse_tangents(a=a)
    check_kind("w13", w13, (PreparedWeights, StreamedWeights))
    check_activation(activation, limit)
    check_choice("out_format", out_format, OUT_FORMATS)
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
    """A mixture-of-experts layer: sum over a token's k choices of weight * w2 @ act(w13 @ x). Forward only.

    Sorts tokens by expert on the device, runs the two grouped GEMMs, the first with the activation, and adds up each
    token's rows in the order of its choices. Results are bitwise repeatable, and no token's result depends on another
    token. There is no host synchronisation.

    Args:
        x: [T, H] bf16, rows contiguous and aligned to 16 bytes.
        experts: `NVFP4Experts`, laid out for the backend (`NVFP4Experts.for_backend`). Every token takes its shared
            experts with weight 1.
        topk_ids: [T, k] int32 within 0..E-1, or -1 for none; an expert may occur twice. `route` makes them.
        topk_weights: [T, k] fp32.
        limit, activation, backend: as in `grouped_swiglu`.
        precision: precision of the activations. "w4a4": NVFP4, with a global scale for each token before GEMM 1 and for
            each expert before GEMM 2; sm_100a's kernels multiply such operands, sm_90a's round to them first. "w4a16":
            bf16, on sm_90a only. "auto": "w4a4" on sm_100a, "w4a16" on sm_90a. "reference" has both.
        group: process group over whose ranks the experts are spread (`NVFP4Experts.shard`). `experts` are this rank's;
            all ranks have equally many, and id rank * E + e is the rank's e-th. The call is collective: each rank
            brings its own tokens, or none. The host waits once, for the row counts that NCCL needs. The bits are those
            of one GPU.
        capacity: with a group, how many choices each rank can send to each other rank; the same number on all ranks.
            Buffers then have a fixed size, so the host does not wait, and a CUDA graph can capture the call. A
            token with a choice beyond the capacity becomes NaN; with ``check``, ValueError is raised after the
            exchange. T * k of the rank with the most tokens is enough for any routing.
        check: raise ValueError for ids out of range, which on CUDA makes the host wait. Without it they count as -1.

    Returns:
        [T, H] bf16; 0 for a token without choices. NaN or Inf in a token makes that token's result NaN and no other's.

    Raises:
        As `grouped_swiglu`.
    """
    tensors = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights}
    _check_kinds(tensors=tensors, check=check, backend=backend)
    refuse_tangents(x=x, topk_weights=topk_weights)
    check_kind("experts", experts, NVFP4Experts)
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
    """Raise TypeError for arguments that torch's dispatcher would reject with a less clear message."""
    for name, tensor in tensors.items():
        check_strided(name, tensor)
    check_bool("check", check)
    check_kind("backend", backend, str)
