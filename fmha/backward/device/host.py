"""The host side of a main kernel: the function that is compiled and called, the same for every architecture."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from warpspec.common.compile import fake_rows
from warpspec.common.hardware import TMA_ALIGNMENT
from warpspec.fmha.backward.features import BackwardFeatures
from warpspec.fmha.backward.operands import BackwardOperands
from warpspec.fmha.device.bias import TYPES
from warpspec.fmha.device.logits import LogitNumbers, fake_numbers


class BackwardHost:
    """``cute.compile(Backward(config), ...)`` makes one kernel. An architecture's ``Backward`` adds ``launch``, which
    gets ``BackwardOperands``, (``LogitNumbers``, scale), the window and the order."""

    def __init__(self, config: BackwardFeatures):
        self.config = config

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        statistics: cute.Tensor,
        dq_sums: cute.Tensor | None,
        turns: cute.Tensor | None,
        dk: cute.Tensor | None,
        dv: cute.Tensor | None,
        kv_lengths: cute.Tensor | None,
        q_start: cute.Tensor | None,
        bias: cute.Tensor | None,
        dbias: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        factor: Float32,
        cap: Float32 | None,
        scale: Float32,
        window_left: Int32,
        window_right: Int32,
        pieces: Int32,
        section: Int32,
        stream: CUstream,
    ):
        """factor, cap: ``LogitNumbers``, the factor with the scale's sign. window_left, window_right: not read where
        unbounded. pieces, section: ``schedule.Order``."""
        tensors = (q, k, v, do, statistics, dq_sums, turns, dk, dv)
        others = (kv_lengths, q_start, bias, dbias, cu_seqlens_q, cu_seqlens_k)
        operands = BackwardOperands(*tensors, *others)
        scales = (LogitNumbers(factor, cap), scale)
        self.launch(operands, scales, (window_left, window_right), (pieces, section), stream)


def fake_arguments(config: BackwardFeatures) -> tuple:
    """What a kernel of a configuration is compiled for: the arguments of ``BackwardHost.__call__`` but the stream."""
    dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]
    fp32, int32 = Float32, Int32

    def rows(last=config.head_dim, dtype=dtype, rank=4):
        return fake_rows(dtype, rank, last, alignment=TMA_ALIGNMENT)

    def keys():
        return rows(config.tile_n * config.head_dim, fp32) if config.cut else rows()

    aligned = TMA_ALIGNMENT if getattr(config, "bias_tiles", False) else None
    stored = TMA_ALIGNMENT if getattr(config, "stores_bias", False) else None
    gradient = {None: None, "sum": fp32, **TYPES}[config.bias_gradient]
    operands = BackwardOperands(
        q=rows(),
        k=rows(),
        v=rows(),
        do=rows(),
        statistics=rows(4, fp32),
        dq_sums=rows(config.tile_m * config.head_dim, fp32, 3) if config.wants_q else None,
        turns=fake_rows(int32, 3) if config.deterministic else None,
        dk=keys() if config.wants_k else None,
        dv=keys() if config.wants_v else None,
        kv_lengths=fake_rows(int32, 1) if config.has_kv_lengths else None,
        q_start=fake_rows(int32, 1) if config.has_q_start else None,
        bias=fake_rows(TYPES[config.bias], 4, alignment=aligned) if config.bias else None,
        dbias=fake_rows(gradient, 4, alignment=stored) if gradient else None,
        cu_seqlens_q=fake_rows(int32, 1) if config.packed_q else None,
        cu_seqlens_k=fake_rows(int32, 1) if config.packed_k else None,
    )
    return (*operands, *fake_numbers(config.logits), 1.0, 0, 0, 1, 1)
