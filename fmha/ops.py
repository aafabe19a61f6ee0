"""The torch operators behind ``attention``: checks, backend choice, outputs, one call of the backend.

Two operators, one implementation: ``warpspec::fmha_forward`` allocates o, ``warpspec::fmha_forward_out``
writes the caller's. Both return ``stats``, fp32 [n, B, Hq, Sq]: nothing (n = 0), lse (n = 1), or row_max and
row_sum (n = 2, un-normalised). Checks run inside, on real tensors, so compiled and eager calls raise the
same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch

from warpspec.common.dispatch import BACKEND_VARIABLE, resolve_backend
from warpspec.fmha import reference
from warpspec.fmha.problem import ROW_ALIGNMENT, AttentionProblem, check_apart
from warpspec.fmha.state import normalized_output
from warpspec.fmha.values import debugging

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor? v, Tensor? sink, Tensor? bias, Tensor? kv_lengths, Tensor? page_table, "
    "Tensor? q_start, float? scale, bool causal, SymInt? window_left, SymInt? window_right, "
    "SymInt key_stride, bool normalize, bool return_lse, SymInt? num_splits, str backend"
)


def check(arguments, out, memory) -> AttentionProblem:
    """The problem of the operators' arguments (in the schema's order, without the backend)."""
    q, k, v, sink, bias, kv_lengths, page_table, q_start, scale, causal, left, right, *rest = arguments
    key_stride, normalize, return_lse, num_splits = rest
    return AttentionProblem.check(
        q,
        k,
        v,
        scale=scale,
        causal=causal,
        window=None if left is None and right is None else (left, right),
        sink=sink,
        bias=bias,
        kv_lengths=kv_lengths,
        page_table=page_table,
        q_start=q_start,
        key_stride=key_stride,
        normalize=normalize,
        return_lse=return_lse,
        num_splits=num_splits,
        out=out,
        memory=memory,
    )


def new_outputs(problem: AttentionProblem, like: torch.Tensor, out=None):
    """(o, stats), uninitialised; o is ``out`` where given."""
    o = like.new_empty(problem.o_shape, dtype=problem.o_dtype) if out is None else out
    stats = like.new_empty((problem.stat_count, *problem.stat_shape), dtype=torch.float32)
    return o, stats


TENSORS = ("q", "k", "v", "sink", "bias", "kv_lengths", "page_table", "q_start")


class Call(NamedTuple):
    """A call that was checked. launch: of the backend's package; None: the reference."""

    problem: AttentionProblem
    launch: Callable | None


# Calls on CUDA tensors by signature: the next call alike needs no checks. Few models have so many.
_checked: dict[tuple, Call] = {}
MOST_CHECKED = 4096


def checked(arguments, backend, out) -> Call:
    """The call for some arguments; raises for those that cannot be run. Values on CUDA are looked at every time."""
    if not arguments[0].is_cuda or debugging():
        return check_call(arguments, backend, out)
    key = (os.environ.get(BACKEND_VARIABLE), backend, arguments[8:], *map(signature, (*arguments[:8], out)))
    call = _checked.get(key)
    if call is None:
        if len(_checked) >= MOST_CHECKED:
            _checked.clear()
        call = _checked[key] = check_call(arguments, backend, out)
    elif out is not None and out.numel() > 0:
        check_apart(out, dict(zip(TENSORS, arguments, strict=False)))  # addresses are not in the key
    return call


def signature(tensor: torch.Tensor | None) -> tuple | None:
    """What the checks look at, of a CUDA tensor."""
    if tensor is None:
        return None
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % ROW_ALIGNMENT)


def check_call(arguments, backend, out) -> Call:
    """All checks, and the choice of the backend."""
    problem = check(arguments, out, memory=True)
    backend = resolve_backend(backend, problem.device)
    if backend == "reference":
        return Call(problem, None)
    package = kernels(backend)
    package.AttentionConfig.of(problem)  # raises UnsupportedProblem for what the kernel does not do
    return Call(problem, package.run_sim if backend == "sim" else package.run_cuda)


def run(arguments, backend, out=None):
    """Check, choose the backend, compute: (o, stats). Nothing is launched or written before all checks."""
    problem, launch = checked(arguments, backend, out)
    q, k, v, sink, bias, kv_lengths, page_table, q_start = arguments[:8]
    o, stats = new_outputs(problem, q, out)
    lse, row_max, row_sum = None, None, None
    if not problem.normalize:
        row_max, row_sum = stats
    elif problem.return_lse:
        (lse,) = stats

    if problem.is_empty or k.numel() == 0:  # a page table of no pages
        o.zero_()
        for stat, value in ((lse, -torch.inf), (row_max, -torch.inf), (row_sum, 0.0)):
            if stat is not None:
                stat.fill_(value)
        return o, stats
    v = k if v is None else v
    if launch is None:
        state = reference.forward(problem, q, k, v, bias, kv_lengths, page_table, q_start)
        o.copy_(normalized_output(state, sink) if problem.normalize else state.o)
        for stat, value in ((lse, state.lse), (row_max, state.row_max), (row_sum, state.row_sum)):
            if stat is not None:
                stat.copy_(value)
        return o, stats

    q, k, v, o = (regular_strides(tensor) for tensor in (q, k, v, o))
    sink = None if sink is None else sink.detach().to(torch.float32).contiguous()
    bias = None if bias is None else regular_strides(bias)
    small = (kv_lengths, q_start, page_table)
    kv_lengths, q_start, page_table = (None if t is None else t.contiguous() for t in small)
    results = (o, lse, row_max, row_sum)
    launch(problem, q, k, v, sink, kv_lengths, q_start, *results, page_table=page_table, bias=bias)
    return o, stats


def kernels(backend: str):
    """The package of a backend's kernels. Imported here: it loads the DSL, which the reference does without."""
    if backend == "sm90":
        from warpspec.fmha import sm90

        return sm90
    from warpspec.fmha import sm100

    return sm100


def regular_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements; a dimension of size 1, whose stride means nothing, gets one that TMA accepts."""
    strides = list(tensor.stride())
    vector = ROW_ALIGNMENT // tensor.element_size()
    step = -(-tensor.shape[-1] // vector) * vector
    strides[-1] = 1
    for dim in reversed(range(tensor.dim() - 1)):
        if tensor.shape[dim] == 1:
            strides[dim] = step
        step = max(step, strides[dim] * tensor.shape[dim])
    return tensor if tuple(strides) == tensor.stride() else tensor.as_strided(tensor.shape, strides)


@torch.library.custom_op(
    "warpspec::fmha_forward", mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor, Tensor)"
)
def fmha_forward(*arguments):
    """(o, stats) of ``attention``."""
    return run(arguments[:-1], arguments[-1])


@torch.library.custom_op(
    "warpspec::fmha_forward_out", mutates_args=("out",), schema=f"({ARGUMENTS}, Tensor(a!) out) -> Tensor"
)
def fmha_forward_out(*arguments):
    """stats of ``attention``; o is written to out."""
    return run(arguments[:-2], arguments[-2], arguments[-1])[1]


@fmha_forward.register_fake
def _(*arguments):
    return new_outputs(check(arguments[:-1], None, memory=False), arguments[0])


@fmha_forward_out.register_fake
def _(*arguments):
    return new_outputs(check(arguments[:-2], arguments[-1], memory=False), arguments[0], arguments[-1])[1]


def _backward(context, *gradients):
    raise NotImplementedError("warpspec.fmha.attention: gradients are not implemented (forward only)")


fmha_forward.register_autograd(_backward)
