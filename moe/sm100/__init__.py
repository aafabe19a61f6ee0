"""NVFP4 grouped GEMM on sm_100a: compiles each configuration once and runs it on a GPU or in the simulator."""

from __future__ import annotations

import torch

from warpspec.common.checks import ANY, check_tensor
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import TMA_ALIGNMENT
from warpspec.common.launch import Kernel, Target, target_of
from warpspec.common.nvfp4 import ATOM_BYTES, ATOM_ROWS, NVFP4_BLOCK
from warpspec.common.operands import fakes
from warpspec.moe.operands import (
    PreparedWeights,
    QuantizedRows,
    row_atoms_bound,
    scale_atoms,
)
from warpspec.moe.sm100.config import EPILOGUES, GemmConfig, Shape
from warpspec.moe.sm100.operands import GemmNumbers, GemmOperands
from warpspec.moe.sm100.plan import choose_shape, group_count

__all__ = ["EPILOGUES", "GemmConfig", "Shape", "choose_config", "gemm_kernel", "grouped_gemm"]

FEATURE_MULTIPLE = 8  # N is a multiple of it, and so are the rows of gate and of up


def choose_config(
    a: QuantizedRows,
    w: PreparedWeights,
    sm_count: int,
    *,
    epilogue="linear",
    nvfp4_out=False,
    limit=None,
    shape: Shape | None = None,
):
    """The configuration for operands, chosen from their shapes and the SMs' number. shape: use these tiles instead."""
    return GemmConfig(
        shape=shape or choose_shape(a.rows, w.experts, w.n, w.k, sm_count),
        epilogue=epilogue,
        output="nvfp4" if nvfp4_out else "bf16",
        has_row_scale=a.row_scale is not None,
        has_limit=limit is not None,
        has_bias=w.bias is not None,
    )


def grouped_gemm(
    a: QuantizedRows,
    w: PreparedWeights,
    offsets: torch.Tensor,
    out: torch.Tensor | QuantizedRows,
    *,
    epilogue: str = "linear",
    limit: float | None = None,
    out_scale: torch.Tensor | None = None,
    shape: Shape | None = None,
    groups: int | None = None,
    target: Target | None = None,
    seed: int = 0,
):
    """out[r] = epilogue(a[r] @ w[e]^T) for every row r of every expert e, in one launch without synchronisation.

    a: R rows sorted by expert. w: w13 (gated) for "swiglu" and "swiglu_oai", any weights for "linear". offsets: int32
    [E], running ends; rows from offsets[-1] on are neither read nor written. out: bf16 [R, width], or QuantizedRows
    of k >= width without row_scale. out_scale: fp32 [E], the fixed global scales of a QuantizedRows. limit: clamps gate
    and up. Runs on the tensors' device and its current stream. CPU tensors run in the simulator, whose SimReport is
    returned; otherwise the result is None. For tests: shape, groups: replace the chosen tiles and number of CTAs (or
    pairs). target: replaces the tensors' own. seed: the simulator's.

    Raises TypeError or ValueError naming the argument, and UnsupportedProblem for a target without the NVFP4 MMA,
    before anything is launched.
    """
    check(a, w, offsets, out, epilogue, limit, out_scale)
    target = target or target_of(offsets.device)
    if not target.architecture.nvfp4_mma:
        raise UnsupportedProblem(f"grouped_gemm: {target.arch} does not have the NVFP4 MMA of sm_100a")
    if a.rows == 0:
        return None
    quantized = isinstance(out, QuantizedRows)
    config = choose_config(
        a, w, target.sm_count, epilogue=epilogue, nvfp4_out=quantized, limit=limit, shape=shape
    )
    return gemm_kernel.run(
        config,
        target,
        *(a.data, a.scales, a.row_scale),
        *(w.data, w.scales, w.global_scale, w.bias),
        offsets,
        *((out.data, out.scales, out_scale) if quantized else (out, None, None)),
        a.k,
        w.width,
        float(limit or 0.0),
        groups or group_count(config.shape, a.rows, w.experts, w.n, target.sm_count),
        seed=seed,
    )


def alignment(tensor: torch.Tensor) -> int:
    """Alignment in bytes of a tensor's rows, which TMA reads and which are stored in vectors of that size. For
    one-dimensional tensors it is the element's."""
    return TMA_ALIGNMENT if tensor.dim() > 1 and tensor.shape[-1] > 2 else tensor.element_size()


def _host_and_arguments(config: GemmConfig) -> tuple:
    """The host function and its arguments without the stream."""
    from warpspec.moe.sm100.kernel import GroupedGemm

    return (GroupedGemm(config), *fakes(GemmOperands, config), *fakes(GemmNumbers, config))


gemm_kernel = Kernel("moe", _host_and_arguments)  # by GemmConfig


def check(a, w, offsets, out, epilogue, limit, out_scale) -> None:
    """Raise TypeError or ValueError naming the argument that this kernel cannot take."""
    if epilogue not in EPILOGUES:
        raise ValueError(f"epilogue: must be one of {EPILOGUES}, got {epilogue!r}")
    gated = epilogue != "linear"
    if gated and not w.gated:
        raise ValueError(
            f"w: {epilogue} needs gate and up, two global scales an expert, got {w.global_scale.shape[1]}"
        )
    if not gated and w.gated:
        raise ValueError("w: linear takes weights of one global scale an expert, got two")
    if limit is not None and not gated:
        raise ValueError(f"limit: a clamp belongs to swiglu, got {limit} with linear")
    if limit is not None and not limit >= 0:
        raise ValueError(f"limit: must not be negative, got {limit}")
    if a.k != w.k:
        raise ValueError(f"a: k must be that of w, {w.k}, got {a.k}")
    if a.k % NVFP4_BLOCK or a.k <= 0:
        raise ValueError(f"a: k must be a positive multiple of {NVFP4_BLOCK}, got {a.k}")
    multiple = 2 * FEATURE_MULTIPLE if gated else FEATURE_MULTIPLE
    if w.n % multiple or w.n <= 0:
        raise ValueError(f"w: n must be a positive multiple of {multiple}, got {w.n}")
    shapes = [
        ("offsets", offsets, torch.int32, (w.experts,)),
        ("a.scales", a.scales, torch.uint8, (ANY, scale_atoms(a.k), ATOM_BYTES)),
        ("a.row_scale", a.row_scale, torch.float32, (a.rows,)),
        ("w.scales", w.scales, torch.uint8, (w.experts, -(-w.n // ATOM_ROWS), scale_atoms(w.k), ATOM_BYTES)),
        ("w.global_scale", w.global_scale, torch.float32, (w.experts, 2 if gated else 1)),
        ("w.bias", w.bias, torch.float32, (w.experts, w.n)),
        ("a.data", a.data, torch.uint8, (a.rows, ANY)),
        ("w.data", w.data, torch.uint8, (w.experts, w.n, ANY)),
    ]
    width = w.n // 2 if gated else w.n
    if isinstance(out, QuantizedRows):
        if not gated:
            raise ValueError("out: linear writes bf16, got QuantizedRows")
        if out.row_scale is not None:
            raise ValueError("out: row_scale must be None, its global scales are out_scale")
        if out.k != -(-width // NVFP4_BLOCK) * NVFP4_BLOCK:
            raise ValueError(f"out: k must be {width} in whole blocks of {NVFP4_BLOCK}, got {out.k}")
        if out_scale is None:
            raise ValueError("out_scale: quantised results need their global scales, got None")
        shapes += [
            ("out.data", out.data, torch.uint8, (a.rows, ANY)),
            ("out.scales", out.scales, torch.uint8, (ANY, scale_atoms(out.k), ATOM_BYTES)),
            ("out_scale", out_scale, torch.float32, (w.experts,)),
        ]
        if out.data.shape[-1] * 2 < out.k:
            raise ValueError(f"out.data: rows of {out.k // 2} bytes needed, got {out.data.shape[-1]}")
        check_atoms("out.scales", out.scales, a.rows, w.experts)
    else:
        if out_scale is not None:
            raise ValueError("out_scale: belongs to quantised results, out is bf16")
        shapes.append(("out", out, torch.bfloat16, (a.rows, width)))
    for name, tensor, dtype, shape in shapes:
        if tensor is not None:
            check_operand(name, tensor, dtype, shape, offsets.device)
    check_atoms("a.scales", a.scales, a.rows, w.experts)
    for name, tensor in (("a.data", a.data), ("w.data", w.data)):
        if tensor.shape[-1] * 2 < a.k:
            raise ValueError(f"{name}: rows of {a.k // 2} bytes needed, got {tensor.shape[-1]}")


def check_atoms(name: str, scales: torch.Tensor, rows: int, experts: int) -> None:
    """Raise ValueError unless the scales have room for any distribution of the rows over the experts."""
    needed = row_atoms_bound(rows, experts)
    if scales.shape[0] < needed:
        raise ValueError(f"{name}: {needed} atoms of rows needed for {rows} rows, got {scales.shape[0]}")


def check_operand(name, tensor, dtype, shape, device) -> None:
    """``check_tensor``, and that the tensor is contiguous with rows that are aligned for TMA and 16-byte stores."""
    check_tensor(name, tensor, (dtype,), shape, device)
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: must be contiguous, got strides {list(tensor.stride())}")
    if alignment(tensor) == TMA_ALIGNMENT:
        row = tensor.shape[-1] * tensor.element_size()
        if row % TMA_ALIGNMENT or tensor.data_ptr() % TMA_ALIGNMENT:
            raise ValueError(
                f"{name}: rows must be multiples of {TMA_ALIGNMENT} bytes at such addresses, got rows of {row}, "
                f"address {tensor.data_ptr():#x}"
            )
