"""The host side of an attention kernel: the function that is compiled and called, the same for every architecture."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from warpspec.common.compile import fake_rows
from warpspec.common.device import tma
from warpspec.common.hardware import TMA_ALIGNMENT
from warpspec.fmha.device.bias import TYPES
from warpspec.fmha.device.logits import LogitNumbers, fake_numbers
from warpspec.fmha.features import BLOCK, JOIN_WORDS, KernelFeatures, Schedule
from warpspec.fmha.operands import Operands

# Of an SM's L1 and shared memory, all it can have as shared memory: tiles fill it.
SMEM_CARVEOUT_PERCENT = 100


class LaunchNumbers(NamedTuple):
    """The numbers among the arguments of ``AttentionHost.__call__``; window: (left, right)."""

    logits: LogitNumbers
    window: tuple[Int32, Int32]
    ctas: Int32
    section: Int32


class AttentionHost:
    """``cute.compile(Attention(config), ...)`` makes one kernel; the arguments are those of ``__call__``.

    An architecture's ``Attention`` adds ``launch``, which gets them as ``Operands`` and ``LaunchNumbers``.
    """

    def __init__(self, config: KernelFeatures):
        self.config = config

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        sink: cute.Tensor | None,
        kv_lengths: cute.Tensor | None,
        q_start: cute.Tensor | None,
        lse: cute.Tensor | None,
        row_max: cute.Tensor | None,
        row_sum: cute.Tensor | None,
        page_table: cute.Tensor | None,
        bias: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        k_scale: cute.Tensor | None,
        v_scale: cute.Tensor | None,
        pieces: cute.Tensor | None,
        joins: cute.Tensor | None,
        queue: cute.Tensor | None,
        factor: Float32,
        cap: Float32 | None,
        window_left: Int32,
        window_right: Int32,
        ctas: Int32,
        section: Int32,
        stream: CUstream,
    ):
        """Launch the kernel for tensors as in ``Operands``, flat: TVM FFI converts nested ones slowly.

        factor, cap: ``LogitNumbers``. window_left, window_right: not read where unbounded. ctas: most persistent CTAs
        to launch. section: of ``TileGrid.decode``. There must be at least one tile; ctas and section are at least 1.
        """
        operands = Operands(
            q,
            k,
            v,
            o,
            sink,
            kv_lengths,
            q_start,
            lse,
            row_max,
            row_sum,
            page_table,
            bias,
            cu_seqlens_q,
            cu_seqlens_k,
            k_scale,
            v_scale,
            pieces,
            joins,
            queue,
        )
        numbers = LaunchNumbers(LogitNumbers(factor, cap), (window_left, window_right), ctas, section)
        self.launch(operands, numbers, stream)

    def loads(self, operands: Operands) -> list:
        """``tma.make_load`` of Q, and of K and V or the one tensor that is both."""
        config = self.config
        found = [tma.make_load(q_view(config, operands.q), config.q_box)]
        for ring in config.rings:
            tensor = operands.v if ring == "v" else operands.k
            view, box = kv_view(config, tensor, ring), config.kv_box(ring)
            found.append(tma.make_load(view, box, swizzled=not config.kv_format))
        return found


def q_view(config: KernelFeatures, q: cute.Tensor) -> cute.Tensor:
    """(D, HEAD, QUERY, BLOCK, BATCH) of q, D cut into blocks; one of all of D where it is not ``whole``."""
    batch, seq_q, heads, size = q.shape
    if not config.heads.whole:
        return cute.make_tensor(
            q.iterator,
            cute.make_layout(
                (size, heads, seq_q, 1, batch), stride=(1, q.stride[2], q.stride[1], size, q.stride[0])
            ),
        )
    layout = cute.make_layout(
        (BLOCK, heads, seq_q, config.blocks, batch), stride=(1, q.stride[2], q.stride[1], BLOCK, q.stride[0])
    )
    return cute.make_tensor(q.iterator, layout)


def kv_view(config: KernelFeatures, t: cute.Tensor, ring: str = "k") -> cute.Tensor:
    """(D, KEY, BLOCK, KV_HEAD, BATCH) of k or v; paged, (D, KEY of the page, BLOCK, KV_HEAD, PAGE). D as in
    ``q_view``."""
    if not config.heads.whole:
        size = t.shape[3]
        layout = cute.make_layout(
            (size, t.shape[1], 1, t.shape[2], t.shape[0]),
            stride=(1, t.stride[1], size, t.stride[2], t.stride[0]),
        )
        return cute.make_tensor(t.iterator, layout)
    block = config.head_dim if config.kv_format else BLOCK  # FP8 rows are loaded whole
    layout = cute.make_layout(
        (block, t.shape[1], config.heads.blocks(ring) * BLOCK // block, t.shape[2], t.shape[0]),
        stride=(1, t.stride[1], block, t.stride[2], t.stride[0]),
    )
    return cute.make_tensor(t.iterator, layout)


def fake_arguments(config: KernelFeatures) -> tuple:
    """What a kernel of a configuration is compiled for: the arguments of ``AttentionHost.__call__`` but the stream."""
    dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]
    fp32, int32 = cutlass.Float32, cutlass.Int32
    kv_dtype = cutlass.Uint8 if config.kv_format else dtype

    def rows(dtype, rank, size=config.head_dim):
        return fake_rows(dtype, rank, size, alignment=TMA_ALIGNMENT)

    sizes = config.heads
    partial, line = 1 if config.splits else 0, config.schedule is Schedule.LINE
    operands = Operands(
        q=rows(dtype, 4),
        k=rows(kv_dtype, 4),
        v=rows(kv_dtype, 4, sizes.v),
        o=rows(dtype if config.normalize else fp32, 4 + partial, sizes.v_state if partial else sizes.v),
        sink=fake_rows(fp32, 1) if config.has_sink else None,
        kv_lengths=fake_rows(int32, 1) if config.has_kv_lengths else None,
        q_start=fake_rows(int32, 1) if config.has_q_start else None,
        lse=fake_rows(fp32, 3) if config.has_lse else None,
        row_max=None if config.normalize else fake_rows(fp32, 3 + partial),
        row_sum=None if config.normalize else fake_rows(fp32, 3 + partial),
        page_table=fake_rows(int32, 2) if config.page_size else None,
        bias=fake_rows(TYPES[config.bias], 4, alignment=config.bias_alignment) if config.bias else None,
        cu_seqlens_q=fake_rows(int32, 1) if config.packed_q else None,
        cu_seqlens_k=fake_rows(int32, 1) if config.packed_k else None,
        k_scale=fake_rows(fp32, 3, 1) if config.has_k_scale else None,
        v_scale=fake_rows(fp32, 3, 1) if config.has_v_scale else None,
        pieces=fake_rows(fp32, 3, config.piece_columns, alignment=TMA_ALIGNMENT) if line else None,
        joins=fake_rows(int32, 2, JOIN_WORDS) if line else None,
        queue=fake_rows(cutlass.Int64, 1) if config.schedule is Schedule.QUEUE else None,
    )
    return (*operands, *fake_numbers(config.logits), 0, 0, 1, 1)  # window_left, window_right, ctas, section
