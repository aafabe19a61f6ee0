"""Swap-FFN: a block that exchanges vectors with banks of memory, decoded one token at a time."""

from __future__ import annotations

import torch

from warpspec.common.checks import check_bool, refuse_gradients
from warpspec.swap import ops
from warpspec.swap.problem import SwapProblem
from warpspec.swap.weights import SwapFFNWeights, SwapState

__all__ = ["SwapFFNWeights", "SwapState", "swap_ffn_decode"]


def swap_ffn_decode(
    x: torch.Tensor,
    state: SwapState,
    weights: SwapFFNWeights,
    *,
    events: int = 8,
    k_ffn: int = 2,
    residual: bool = False,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, SwapState]:
    """One token of each of B requests through a Swap-FFN block: (delta, new state).

    x: bf16 [B, D], the tokens. state: ``SwapState`` of the B requests. weights: ``SwapFFNWeights``. All on one device.

    Every core c of a request begins with x * core_scale[c] + core_shift[c]. Then there are ``events`` events, each of
    which does

    - a swap: z = router_w . n of the RMS-normalised vector n. If sigmoid(z . swap_w + swap_b) > 0.5, the vector changes
      places with a physical bank: the one that the core's map has under the logical bank argmax(z . bank_w + bank_b);
      of equal scores the lowest bank wins. Lane 0 and the selected lane of the map change places, too.
    - ``k_ffn`` FFN steps: w2 . (silu(w1 . n) * (w3 . n)) of the RMS-normalised vector n replaces the vector or, with
      ``residual``, is added to it.

    The collapse pools the cores: pooled[k] = sum over c of core_alpha[c, k] x[c], where core_alpha is a softmax over
    the K slots; s = sum over k of basis[k] . pooled[k]; delta = decoder . silu(s). ``reference.decode`` is the
    definition.

    delta: bf16 [B, D]. The new state is a new object, or with ``in_place`` the given one, changed.

    Arithmetic is fp32 on bf16 weights and vectors. Implementations that round differently may decide differently, if
    the margin of a gate or bank is within rounding. Results are bitwise repeatable. Their bits depend on B, which
    determines how sums are split, but not on what other requests hold.

    backend: "sm100", "sm90", "sim", "reference" or "auto" (README). Kernels take D 256, 512, 768 or 1024, d_router 64,
    K 8, any d_ff (padded to whole tiles), any number of cores; other sizes raise UnsupportedProblem. On sm_90a a step
    of few requests is one cooperative launch, which raises RuntimeError if the GPU has no room for all of its CTAs at
    once; other steps are chains of launches. It can be captured in CUDA graphs after a first call. There are no
    gradients: arguments that require them raise NotImplementedError.

    Raises TypeError or ValueError naming a bad argument, before anything is launched or written.
    """
    check_bool("in_place", in_place)
    SwapProblem.check(
        x, state, weights, events=events, k_ffn=k_ffn, residual=residual, values=False, memory=False
    )
    given = {f"weights.{name}": tensor for name, tensor in weights.tensors.items()}
    refuse_gradients(x=x, **{"state.ram": state.ram}, **given)
    if not in_place:
        state = state.clone()
    delta = ops.call(
        x, state.ram, state.map, weights.flatten(), weights.eps, events, k_ffn, residual, backend
    )
    return delta, state
