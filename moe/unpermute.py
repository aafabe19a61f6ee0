"""Un-permute: each token's result is the weighted sum of its choices' rows, added in their order, in fp32.

The order is fixed and one CTA alone writes a token's columns, so results are bitwise repeatable. One kernel for sm_90a
and sm_100a.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32

from warpspec.common.compile import fake_rows
from warpspec.common.hardware import VECTOR_BYTES
from warpspec.common.launch import Kernel, Target, target_of
from warpspec.moe.permute import DROPPED, UNSENT, Routing

THREADS = 128
VECTOR = VECTOR_BYTES // (BFloat16.width // 8)  # bf16 numbers of one access


@dataclass(frozen=True)
class UnpermuteConfig:
    """Configuration of the kernel.

    choices: choices of a token. shared: how many of them, counted from the last, have weight 1. dependent: launch as a
    programmatic dependent launch. unsent: positions may be ``UNSENT``, which makes the token NaN. routing: rows are not
    sorted, and the argument position has ids.
    """

    choices: int
    shared: int = 0
    dependent: bool = False
    unsent: bool = False
    routing: Routing | None = None


class Unpermute:
    """``Unpermute(config)(...)`` is the host function of ``unpermute``."""

    def __init__(self, config: UnpermuteConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        rows: cute.Tensor,
        position: cute.Tensor,
        weights: cute.Tensor,
        out: cute.Tensor,
        stream: CUstream,
    ):
        """rows: [R, H] bf16. position: [T, choices]. weights: [T, choices - shared] fp32. out: [T, H] bf16."""
        tokens, columns = out.shape
        chunks = cute.ceil_div(columns, THREADS * VECTOR)
        self.kernel(rows, position, weights, out).launch(
            grid=(tokens, chunks, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=self.config.dependent
        )

    @cute.kernel
    def kernel(self, rows: cute.Tensor, position: cute.Tensor, weights: cute.Tensor, out: cute.Tensor):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        token, chunk, _ = cute.arch.block_idx()
        column = chunk * THREADS + thread  # counted in VECTORs
        if cutlass.const_expr(config.dependent):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if column * VECTOR < out.shape[1]:
            taken = [row_of(config, position, token, choice) for choice in range(config.choices)]
            loaded = cute.make_rmem_tensor((VECTOR, config.choices), BFloat16)
            for choice in cutlass.range_constexpr(config.choices):  # all loads first: they overlap
                if taken[choice] >= 0:
                    source = cute.local_tile(rows[taken[choice], None], (VECTOR,), (column,))
                    cute.autovec_copy(source, loaded[None, choice])
            total = cute.make_rmem_tensor(VECTOR, Float32)
            total.fill(0.0)
            for choice in cutlass.range_constexpr(config.choices):
                if taken[choice] >= 0:
                    weight = Float32(1.0)
                    if cutlass.const_expr(choice < config.choices - config.shared):
                        weight = Float32(weights[token, choice])
                    for i in cutlass.range_constexpr(VECTOR):
                        total[i] += weight * loaded[i, choice].to(Float32)
            if cutlass.const_expr(config.unsent):
                for choice in cutlass.range_constexpr(config.choices):
                    if taken[choice] == UNSENT:
                        total.fill(math.nan)
            rounded = cute.make_rmem_tensor(VECTOR, BFloat16)
            for i in cutlass.range_constexpr(VECTOR):
                rounded[i] = total[i].to(BFloat16)
            cute.autovec_copy(rounded, cute.local_tile(out[token, None], (VECTOR,), (column,)))


@cute.jit
def row_of(
    config: cutlass.Constexpr, position: cute.Tensor, token: Int32, choice: cutlass.Constexpr
) -> Int32:
    """The row of a token's choice; negative: none."""
    row = Int32(token * config.choices + choice)
    if cutlass.const_expr(config.routing is None):
        row = Int32(position[token, choice])
    elif cutlass.const_expr(choice < config.routing.choices):
        expert = Int32(position[token, choice])
        if (expert < 0) | (expert >= config.routing.experts):
            row = Int32(DROPPED)
    return row


def _host_and_arguments(config: UnpermuteConfig) -> tuple:
    """The host function and its arguments without the stream."""
    return (
        Unpermute(config),
        fake_rows(BFloat16, 2, alignment=VECTOR_BYTES),
        fake_rows(Int32, 2),
        fake_rows(Float32, 2),
        fake_rows(BFloat16, 2, alignment=VECTOR_BYTES),
    )


unpermute_kernel = Kernel("moe.unpermute", _host_and_arguments)  # by UnpermuteConfig


def unpermute(
    rows: torch.Tensor,
    position: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    *,
    dependent: bool = False,
    unsent: bool = False,
    routing: Routing | None = None,
    target: Target | None = None,
):
    """out [T, H] = sum over j of weights[:, j] * rows[position[:, j]], skipping -1; one launch.

    rows: [R, H] bf16; rows that no position names are not read. position: int32 [T, k] and weights: fp32 [T, k],
    contiguous; if weights has fewer columns, the remaining weights are 1. out: bf16. H is a multiple of 8; rows and out
    are contiguous along H and aligned to 16 bytes. dependent: start while the previous kernel, which writes rows, is
    ending. unsent: positions may be ``UNSENT``, which makes the token NaN. routing: rows are the choices in their own
    order, and position is topk_ids. Runs on the tensors' device and its current stream; CPU tensors run in the
    simulator, whose SimReport is returned, otherwise None. target: simulate this architecture instead of the tensors'
    own.
    """
    if out.numel() == 0:
        return None
    choices = routing.taken if routing else position.shape[1]
    if choices == 0:
        out.zero_()
        return None
    target = target or target_of(out.device)
    config = UnpermuteConfig(choices, choices - weights.shape[1], dependent, unsent, routing)
    return unpermute_kernel.run(config, target, rows.detach(), position, weights.detach(), out)
