"""Gradients of a shape of a kind of ``sweep_shapes.BACKWARD``: ours and the peers', and what these compile.

What is timed is the backward pass alone, as ``torch.autograd.grad`` runs it, to dQ, dK and dV. A candidate's forward
pass is recorded once for every set of inputs, at its first call, on a stream of its own: autograd runs a backward pass
on its forward pass's stream, and a graph can be captured across streams, but not across the default one. The functions
are named as in ``sweep_calls``, and ``bench_sweep`` calls either module's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from types import SimpleNamespace

import torch

from warpspec.aot.models import kernels
from warpspec.common.launch import Kernel, Target
from warpspec.fmha.backward import launch
from warpspec.fmha.backward.problem import BackwardProblem

from . import sweep_calls
from .attention_peers import FLASH, flash_attention, flash_lists
from .sweep_shapes import AttentionShape

WANTED = ("q", "k", "v")
SINGLE_BLOCK = 128  # queries up to which flash-attn-4 has kernels of one block


@cache
def recording_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def inputs(shape: AttentionShape, device: str, seed: int = 0, *, values: bool = True) -> SimpleNamespace:
    """As ``sweep_calls.attention_inputs``, and do, the gradient of the result."""
    x = sweep_calls.attention_inputs(shape, device, seed, values=values)
    make = torch.randn if values else torch.empty
    x.do = make((*x.q.shape[:-1], shape.dims[1]), dtype=x.q.dtype, device=x.q.device)
    for tensor in (x.q, x.k, x.v):
        tensor.requires_grad_(values)
    return x


def input_sets(shape: AttentionShape) -> list[tuple]:
    """As ``sweep_calls.input_sets``. Each set knows all of them as ``sets``."""
    sets = [inputs(shape, "cuda", seed) for seed in range(sweep_calls.set_count(shape))]
    for x in sets:
        x.sets = sets
    return [(x,) for x in sets]


class Gradients:
    """A function of ``inputs`` to (dQ, dK, dV). forward: a candidate's forward pass, a function of ``inputs``."""

    def __init__(self, forward: Callable):
        self.forward, self.results = forward, {}

    def __call__(self, x: SimpleNamespace) -> tuple[torch.Tensor, ...]:
        if id(x) not in self.results:
            self.record(x.sets)
        result, leaves = self.results[id(x)]
        return torch.autograd.grad(result, leaves, x.do, retain_graph=True)

    def record(self, sets: list[SimpleNamespace]) -> None:
        """The forward pass of every set."""
        on_gpu = sets[0].q.is_cuda
        if on_gpu:
            torch.cuda.synchronize()
        with torch.cuda.stream(recording_stream() if on_gpu else None), torch.enable_grad():
            for x in sets:
                self.results[id(x)] = self.forward(x), (x.q, x.k, x.v)
        if on_gpu:
            torch.cuda.synchronize()


def ours(shape: AttentionShape) -> Callable:
    return Gradients(sweep_calls.ours(shape))


def peers(shape: AttentionShape) -> dict[str, Callable]:
    found = sweep_calls.peers(shape)
    flash = flash_attention()
    if shape.mask is not None and FLASH in found:
        found[FLASH] = lambda x: sweep_calls.flash_call(
            flash, shape, x, block_sparse_tensors_bwd=flash_lists(x.lists)[1]
        )
    return {name: Gradients(call) for name, call in found.items()}


def our_kernels(shape: AttentionShape, target: Target) -> list[tuple[Kernel, Hashable]]:
    """The kernels of the forward and of the backward pass. Raises UnsupportedProblem as ``sweep_calls.our_kernels``."""
    x = sweep_calls.attention_inputs(shape, "meta", values=False)
    forward = sweep_calls.problem_of(x, return_lse=True)
    backward = launch.kernels(BackwardProblem.check(forward, WANTED).padded, target)
    return [*kernels([forward], target), *(item for item in backward if item is not None)]


def peer_kernel(shape: AttentionShape) -> Hashable | None:
    """As ``sweep_calls.peer_kernel``."""
    key = sweep_calls.peer_kernel(shape)
    return None if key is None else (*key, max(shape.queries) <= SINGLE_BLOCK)


def compile_peer(shape: AttentionShape) -> None:
    """Compile flash-attn-4's kernels for a shape's forward and backward pass into its disk cache. Needs no GPU: no
    gradients are recorded, for which torch would ask for one.

    Raises what flash-attn-4 raises.
    """
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert flash_attention() is not None
    with FakeTensorMode(), torch.no_grad():
        x = inputs(shape, "cuda", values=False)
        options = {"causal": shape.causal}
        options["window_size_left"], options["window_size_right"] = x.options.get("window", (None, None))
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        options |= {name: x.options[name] for name in names if name in x.options}
        ways = ({}, {})  # options of the forward pass, and of the backward pass
        if shape.mask is not None:
            options["mask_mod"] = sweep_calls.in_cute(shape.mask)
            ways = tuple({"block_sparse_tensors": lists} for lists in flash_lists(x.lists))
        result, lse, *_ = _flash_attn_fwd(x.q, x.k, x.v, return_lse=True, **options, **ways[0])
        _flash_attn_bwd(x.q, x.k, x.v, result, x.do, lse, **options, **ways[1])
