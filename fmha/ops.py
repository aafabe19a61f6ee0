"""The torch operators behind ``attention``: checks, backend choice, outputs, one call of the backend.

Two operators, one implementation: ``warpspec::fmha_forward`` allocates o, ``warpspec::fmha_forward_out``
writes the caller's. Both return ``stats``, fp32 [n, B, Hq, Sq]: nothing (n = 0), lse (n = 1), or row_max and
row_sum (n = 2, un-normalised). Checks run inside, on real tensors, so compiled and eager calls raise the
same.

Where nothing would notice (``unobserved``) calls go past torch's dispatcher, which would take longer than all the rest
of a call; and on CUDA tensors, a call like one before goes past the checks too (``key_of``, ``recall``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from warpspec.common.dispatch import resolve_backend
from warpspec.common.repeated import Remembered, backend_variable, signature, watched
from warpspec.fmha import reference
from warpspec.fmha.problem import ROW_ALIGNMENT, AttentionProblem, check_apart, overlap, span_bytes
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
    return o, new_stats(problem, like)


def new_stats(problem: AttentionProblem, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty((problem.stat_count, *problem.stat_shape), dtype=torch.float32)


TENSORS = ("q", "k", "v", "sink", "bias", "kv_lengths", "page_table", "q_start")


class Call(NamedTuple):
    """A call that was checked. launch: of the backend's package; None: the reference. empty: nothing is to be launched.
    regular: strides of q, k, v and o are such as TMA accepts (``regular_strides``). spans: bytes of each of TENSORS and
    of out (``span_bytes``), 0 for none. The rest: of the problem."""

    problem: AttentionProblem
    launch: Callable | None
    empty: bool
    regular: bool
    spans: tuple[int, ...]
    o_shape: tuple[int, ...]
    o_dtype: torch.dtype
    stat_count: int


_checked = Remembered()  # calls on CUDA tensors (``key_of``): the next call alike needs no checks


def key_of(tensors, options, backend, out) -> tuple | None:
    """What the checks of a call look at; None where each call is to be checked, or may not go past torch's dispatcher.

    tensors: as TENSORS; options: those of ``attention``, unchecked: any kind of object.
    """
    if not unobserved(*tensors, out) or not tensors[0].is_cuda or debugging():
        return None
    # 1, 1.0 and True are equal keys, but not all of them are allowed everywhere.
    kinds = tuple([tuple(map(type, o)) if isinstance(o, tuple) else type(o) for o in options])
    try:
        signatures = [None if t is None else signature(t) for t in (*tensors, out)]
        key = (backend_variable(), backend, options, kinds, *signatures)
        hash(key)
    except (
        TypeError,
        RuntimeError,
    ):  # a list, which the checks take or refuse; a sparse tensor, which has no address
        return None
    return key


def recall(key, tensors, out) -> Call | None:
    """The call that was checked under a key. Addresses are not in the key: those of out are compared each time."""
    call = _checked.get(key)
    if call is not None and out is not None:
        for tensor, span in zip(tensors, call.spans[: len(TENSORS)], strict=True):
            if span and overlap(out, call.spans[-1], tensor, span):
                check_apart(out, dict(zip(TENSORS, tensors, strict=True)))
    return call


def check_call(arguments, backend, out) -> Call:
    """All checks, and the choice of the backend."""
    problem = check(arguments, out, memory=True)
    backend = resolve_backend(backend, problem.device)
    launch = None
    if backend != "reference":
        package = kernels(backend)
        package.AttentionConfig.of(problem)  # raises UnsupportedProblem for what the kernel does not do
        launch = package.run_sim if backend == "sim" else package.run_cuda
    return Call(
        problem,
        launch,
        empty=problem.is_empty or arguments[1].numel() == 0,  # a page table of no pages
        regular=all(t is None or regular_strides(t) is t for t in (*arguments[:3], out)),
        spans=tuple(0 if t is None else span_bytes(t) for t in (*arguments[: len(TENSORS)], out)),
        o_shape=problem.o_shape,
        o_dtype=problem.o_dtype,
        stat_count=problem.stat_count,
    )


def run(call: Call, tensors, out=None):
    """What a checked call computes: (o, stats), stats None where there are none."""
    q, k, v, sink, bias, kv_lengths, page_table, q_start = tensors
    o = torch.empty(call.o_shape, dtype=call.o_dtype, device=q.device) if out is None else out
    stats, lse, row_max, row_sum = None, None, None, None
    if call.stat_count == 2:
        row_max, row_sum = stats = new_stats(call.problem, q)
    elif call.stat_count == 1:
        (lse,) = stats = new_stats(call.problem, q)

    if call.empty:
        o.zero_()
        for stat, value in ((lse, -torch.inf), (row_max, -torch.inf), (row_sum, 0.0)):
            if stat is not None:
                stat.fill_(value)
        return o, stats
    v = k if v is None else v
    if call.launch is None:
        state = reference.forward(call.problem, q, k, v, bias, kv_lengths, page_table, q_start)
        o.copy_(normalized_output(state, sink) if call.problem.normalize else state.o)
        for stat, value in ((lse, state.lse), (row_max, state.row_max), (row_sum, state.row_sum)):
            if stat is not None:
                stat.copy_(value)
        return o, stats

    written = o
    if not call.regular:
        q, k, v, written = (regular_strides(tensor) for tensor in (q, k, v, o))
    if sink is not None:
        sink = sink.detach().to(torch.float32).contiguous()
    if bias is not None:
        bias = regular_strides(bias)
    if kv_lengths is not None:
        kv_lengths = kv_lengths.contiguous()
    if q_start is not None:
        q_start = q_start.contiguous()
    if page_table is not None:
        page_table = page_table.contiguous()
    statistics = (lse, row_max, row_sum)
    call.launch(call.problem, q, k, v, sink, kv_lengths, q_start, written, *statistics, page_table, bias)
    return o, stats


def forward_known(call: Call, tensors, out):
    """(o, stats) of a call that ``recall`` knows, past torch's dispatcher."""
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return run(call, tensors, out)


def forward(arguments, backend, out, key):
    """(o, stats) of ``attention``: through torch's operators where something may notice, else directly. key:
    ``key_of`` the call."""
    if key is not None or unobserved(*arguments[: len(TENSORS)], out):
        call = check_call(arguments, backend, out)
        if key is not None:
            _checked.remember(key, call)
        return forward_known(call, arguments[: len(TENSORS)], out)
    if out is None:
        return fmha_forward(*arguments, backend)
    return out, fmha_forward_out(*arguments, backend, out)


def unobserved(*tensors: torch.Tensor | None) -> bool:
    """Whether a call may go past torch's dispatcher: the first is there, and none is ``watched`` (nor anything that is
    no tensor)."""
    return tensors[0] is not None and not watched(*[t for t in tensors if t is not None])


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
    o, stats = run(check_call(arguments[:-1], arguments[-1], None), arguments[: len(TENSORS)])
    return o, no_stats(o, arguments[0]) if stats is None else stats


@torch.library.custom_op(
    "warpspec::fmha_forward_out", mutates_args=("out",), schema=f"({ARGUMENTS}, Tensor(a!) out) -> Tensor"
)
def fmha_forward_out(*arguments):
    """stats of ``attention``; o is written to out."""
    call = check_call(arguments[:-2], arguments[-2], arguments[-1])
    o, stats = run(call, arguments[: len(TENSORS)], arguments[-1])
    return no_stats(o, arguments[0]) if stats is None else stats


def no_stats(o: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What an operator returns where no statistics are asked for: [0, B, Hq, Sq]."""
    batch, seq_q, heads, _ = o.shape
    return like.new_empty((0, batch, heads, seq_q), dtype=torch.float32)


@fmha_forward.register_fake
def _(*arguments):
    return new_outputs(check(arguments[:-1], None, memory=False), arguments[0])


@fmha_forward_out.register_fake
def _(*arguments):
    return new_outputs(check(arguments[:-2], arguments[-1], memory=False), arguments[0], arguments[-1])[1]


def _backward(context, *gradients):
    raise NotImplementedError("warpspec.fmha.attention: gradients are not implemented (forward only)")


fmha_forward.register_autograd(_backward)
