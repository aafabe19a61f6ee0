"""The torch operators behind ``attention`` and ``attention_varlen``: checks, backend choice, outputs, one call of the
backend.

Two operators, one implementation: ``warpspec::fmha_forward`` allocates o, ``warpspec::fmha_forward_out``
writes the caller's. Both return ``stats``, fp32 [n, B, Hq, Sq], packed [n, Hq, T]: nothing (n = 0), lse (n = 1), or
row_max and row_sum (n = 2, un-normalised). Checks run inside, on real tensors, so compiled and eager calls raise the
same.

Calls that nobody watches (``unobserved``) skip torch's dispatcher, which would take longer than the rest of the call;
autograd records them through ``backward.function``. On CUDA tensors, a call like an earlier one skips the checks
(``key_of``, ``recall``), with or without the dispatcher.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch

from warpspec.common.allocation import Block, allocate, block
from warpspec.common.backend import resolve_backend
from warpspec.common.launch import target_of
from warpspec.common.operands import option_schema, tensor_schema
from warpspec.common.outputs import check_apart, note_written, overlap, span_bytes
from warpspec.common.repeated import (
    Likeness,
    Remembered,
    backend_variable,
    observed,
    recorded,
    signatures,
    watched,
)
from warpspec.common.strides import regular_strides
from warpspec.common.transforms import call_operator, takes_gradients
from warpspec.fmha import reference
from warpspec.fmha.expand import Expanded
from warpspec.fmha.launch import Prepared, Timed, check_supported, prepare_new
from warpspec.fmha.logits import LogitOptions
from warpspec.fmha.operands import (
    ARGUMENTS,
    GAPLESS,
    INPUTS,
    PLACES,
    ROWS,
    STATISTICS,
    Operands,
    Options,
)
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.quantized import BLOCK_SCALES, as_bytes, spread
from warpspec.fmha.state import normalized_output
from warpspec.fmha.values import debugging, request_rows

# The operators' arguments: INPUTS, then the options, one by one, with the window's sides apart, then the backend.
SCHEMA = ", ".join(
    (
        tensor_schema(Operands, INPUTS),
        option_schema(Options, window="SymInt? window_left, SymInt? window_right"),
        "str backend",
    )
)
LOGITS = slice(len(INPUTS), len(INPUTS) + len(LogitOptions._fields))  # the options of logits among them


def flat(operands: Operands, options: Options, backend: str) -> tuple:
    """Flatten a call to the arguments of an operator."""
    window = (None, None) if options.window is None else options.window
    logits, causal, _, *others = options
    return (*operands.inputs.values(), *logits, causal, *window, *others, backend)


def unflat(arguments: tuple, out=None) -> tuple[Operands, Options, str]:
    """Rebuild the call from an operator's arguments. out: becomes the operands' o."""
    tensors = dict(zip(INPUTS, arguments, strict=False))
    logits, rest = LogitOptions(*arguments[LOGITS]), arguments[LOGITS.stop :]
    causal, left, right, *others, backend = rest
    window = None if left is None and right is None else (left, right)
    return Operands(**tensors, o=out), Options(logits, causal, window, *others), backend


def new_outputs(problem: AttentionProblem, operands: Operands):
    """(o, stats), uninitialised; o is the operands' if given."""
    q, o = operands.q, operands.o
    if o is None:
        o = q.new_empty(caller_shape(problem, problem.o_shape), dtype=problem.o_dtype)
    shape = caller_shape(problem, problem.stat_shape)
    return o, q.new_empty((problem.stat_count, *shape), dtype=torch.float32)


def caller_shape(problem: AttentionProblem, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The caller's shape of a tensor, from the kernels' shape: packed tensors lose the batch dimension of one."""
    return shape[1:] if problem.requests.packed_q else shape


class Call(NamedTuple):
    """The cached result of checking a call.

    prepared: the kernels, None for the reference. empty: there is nothing to launch. regular: kernels take inputs and
    out as they are (``regular_operands``). as_given: they do, and need no view of one (``takes_views``). spans: bytes
    that each of INPUTS spans (``span_bytes``), 0 for an absent one; out_span: those of out. results: o and statistics,
    allocated unless they are given, in the caller's shape. recorded: autograd records the call, and lse is a result
    even if nobody asked for it. gradients: the checked calls of its backward pass. present: the places of the input
    tensors that are given, without out.
    """

    problem: AttentionProblem
    prepared: Prepared | Expanded | Timed | None
    empty: bool
    regular: bool
    as_given: bool
    spans: tuple[int, ...]
    out_span: int
    results: tuple[Block, ...]
    recorded: bool
    gradients: Remembered
    present: tuple[int, ...]


class Latest(NamedTuple):
    """A call, and what tells that the next one is like it: its tensors, and ``kinds_of`` all else."""

    call: Call
    tensors: Likeness
    kinds: tuple


OPERATOR = "operator"  # in front of the keys of calls that came through torch's dispatcher
_checked = Remembered()  # calls on CUDA tensors (``key_of``): the next identical call needs no checks


def key_of(operands: Operands, options: Options, backend) -> tuple | None:
    """Everything that the checks of a call look at; None if each call must be checked, or may not skip torch's
    dispatcher.

    Nothing is checked yet: operands, options and backend may be any kind of object.
    """
    if observed() or debugging():
        return None
    try:
        seen = signatures(operands[:ARGUMENTS])
        if seen is None or not operands.q.is_cuda:
            return None
    except (AttributeError, RuntimeError):  # q is None; a sparse tensor, which has no address
        return None
    kinds = kinds_of(options, backend)
    return None if kinds is None else (*kinds, *seen)


def kinds_of(options: Options, backend) -> tuple | None:
    """All of a call's key but its tensors."""
    # 1, 1.0 and True are equal keys, but not all of them are allowed everywhere.
    window, sides = options.window, None
    if window is not None:
        if not isinstance(window, tuple):  # a list, which the checks take or refuse
            return None
        sides = tuple(map(type, window))
    # Kinds stand before values: an array in place of a number differs by its kind, and is not compared with one.
    kinds, of_logits = map(type, options), map(type, options.logits)
    return (backend_variable(), type(backend), *kinds, *of_logits, sides, backend, options)


def find(operands: Operands, options: Options, backend) -> tuple[tuple | None, Call | None]:
    """(``key_of`` a call, what was remembered under it). A call like the one before needs no key, and has None."""
    latest = _checked.latest
    if latest is not None and is_like(latest, operands, options, backend):
        return None, latest.call
    key = key_of(operands, options, backend)
    call = None if key is None else recall(key, operands)
    if call is not None and operands.o is None:  # with out, its address matters
        _checked.latest = _checked.recalled.get(id(call))
        if _checked.latest is None:
            latest = Latest(call, Likeness(operands[:ARGUMENTS]), kinds_of(options, backend))
            _checked.latest = _checked.recalled[id(call)] = latest
    return key, call


def is_like(latest: Latest, operands: Operands, options: Options, backend) -> bool:
    """Whether a call has the key of the latest one."""
    if observed() or debugging():
        return False
    try:
        return kinds_of(options, backend) == latest.kinds and latest.tensors.fits(operands[:ARGUMENTS])
    except (RuntimeError, TypeError, ValueError):  # something odd, which the checks refuse
        return False


def remember(key, call: Call) -> None:
    """Cache a checked call. key: from ``key_of``; None: do not cache."""
    if key is not None:
        _checked.remember(key, call)


def forget_calls() -> None:
    """Check the next call of every kind again."""
    _checked.clear()


def recall(key, operands: Operands) -> Call | None:
    """The checked call of a key. Addresses are not part of the key: out's are compared each time."""
    try:
        call = _checked.recall(key)
    except TypeError:  # something unhashable, which the checks refuse
        return None
    out = operands.o
    if call is not None and out is not None:
        for name, span in zip(INPUTS, call.spans, strict=True):
            if span and overlap(out, call.out_span, getattr(operands, name), span):
                check_apart({"out": out}, operands.inputs)
    return call


def check_call(operands: Operands, options: Options, backend: str, records: bool = False) -> Call:
    """Check everything, choose the backend, and prepare its kernels. records: see ``Call``."""
    if records and options.normalize:
        options = options._replace(return_lse=True)  # what gradients are computed from
    problem = AttentionProblem.check(operands, options)
    backend = resolve_backend(backend, problem.device)
    empty = problem.is_empty or operands.k.numel() == 0  # a page table of no pages
    prepared = None
    if backend != "reference":
        target = target_of(problem.device)
        # Both raise UnsupportedProblem for what the kernel does not support.
        prepared = check_supported(problem, target) if empty else prepare_new(problem, target)
        if problem.cut_for is not None and not empty and len(operands.cuts) != prepared.plan.ctas:
            raise ValueError(
                f"schedule: must have the cuts of {prepared.plan.ctas} CTAs, got {len(operands.cuts)}"
            )
    out = operands.o
    regular = (out is None or regular_strides(out) is out) and is_regular(operands)
    stat = block(caller_shape(problem, problem.stat_shape), torch.float32)
    return Call(
        problem,
        prepared,
        empty=empty,
        regular=regular,
        as_given=regular and prepared is not None and not takes_views(problem, operands),
        spans=tuple(0 if t is None else span_bytes(t) for t in operands.inputs.values()),
        out_span=0 if out is None else span_bytes(out),
        results=(
            block(caller_shape(problem, problem.o_shape), problem.o_dtype),
            *[stat] * problem.stat_count,
        ),
        recorded=records,
        gradients=Remembered(),
        present=tuple(getattr(PLACES, name) for name, t in operands.inputs.items() if t is not None),
    )


def run(call: Call, operands: Operands, stats: tuple[torch.Tensor, ...] | None = None):
    """Compute a checked call: (o, stats), with stats tensors: none, lse, or row_max and row_sum. o is the operands' if
    given, and so are stats."""
    o, device = operands.o, call.problem.device
    if o is None and stats is None:
        o, *stats = allocate(call.results, device)
    elif o is None:
        (o,) = allocate(call.results[:1], device)
    elif stats is None:
        stats = allocate(call.results[1:], device)
    lse = row_max = row_sum = None
    if len(stats) == 2:
        row_max, row_sum = stats
    elif stats:
        (lse,) = stats

    if call.empty:
        clear(o, operands.cu_seqlens_q)
        for stat, value in ((lse, -torch.inf), (row_max, -torch.inf), (row_sum, 0.0)):
            if stat is not None:
                stat.fill_(value)
        return o, stats
    if call.as_given:
        record = list(operands)
        record[PLACES.o], record[STATISTICS] = o, (lse, row_max, row_sum)
        if operands.v is None:
            record[PLACES.v] = operands.k
        call.prepared.run(record)
        return o, stats
    native = call.prepared is not None
    record = kernel_operands(call.problem, operands, (o, lse, row_max, row_sum), call.regular, not native)
    if not native:
        run_reference(call.problem, record)
    else:
        if call.problem.format.kv_format is not None:
            record = record._replace(
                **{name: as_bytes(getattr(record, name)) for name in ("k", "v", *BLOCK_SCALES)}
            )
        call.prepared.run(record)
    return o, stats


def takes_views(problem: AttentionProblem, operands: Operands) -> bool:
    """Whether kernels take views of some of a call's tensors: what ``run`` does, or ``kernel_operands`` to regular
    ones."""
    if problem.format.kv_format is not None or problem.v_dim:
        return True
    return problem.requests.packed_q and (operands.tree is not None or operands.ranges is not None)


def kernel_operands(
    problem: AttentionProblem,
    operands: Operands,
    outputs: tuple,
    regular: bool = False,
    batched: bool = True,
) -> Operands:
    """A checked call's tensors in the form kernels take. outputs: replace the operands' own. regular: see ``Call``.
    batched: packed q, k, v and results have a batch dimension of 1; False: as native kernels take them."""
    if not regular:
        operands, outputs = regular_operands(operands), (regular_strides(outputs[0]), *outputs[1:])
    q, k, v = operands.q, operands.k, operands.v
    o, *statistics = outputs
    if v is None:
        v = k[..., : problem.v_dim * k.shape[-1] // problem.head_dim] if problem.v_dim else k
    if problem.requests.packed_q and batched:
        q, o = q[None], o[None]
        if problem.requests.packed_k:
            k, v = k[None], v[None]
        statistics = [None if each is None else each[None] for each in statistics]
    found = list(operands)
    found[ROWS], found[STATISTICS] = (q, k, v, o), statistics
    if problem.requests.packed_q:
        for at in (PLACES.tree, PLACES.ranges):
            found[at] = None if found[at] is None else found[at][None]
    if problem.format.kv_format is not None:
        sizes = (problem.batch, problem.heads_kv)
        found[PLACES.k_scale] = spread(operands.k_scale, *sizes)
        found[PLACES.v_scale] = spread(operands.v_scale, *sizes)
        if problem.requests.packed_k:
            for at in (PLACES.k_block_scales, PLACES.v_block_scales):
                found[at] = None if found[at] is None else found[at][None]
    return Operands._make(found)


def regular_operands(operands: Operands) -> Operands:
    """The inputs in the form kernels take; the same tensors if none has to change."""
    sink = operands.sink
    # Others are taken as they are: a conversion is a launch.
    if sink is not None and sink.dtype is torch.float64:
        sink = sink.detach().to(torch.float32)
    changed = {name: getattr(operands, name) for name in ("q", "k", "v", "bias", *BLOCK_SCALES)}
    changed = {name: None if each is None else regular_strides(each) for name, each in changed.items()}
    operands = operands._replace(sink=sink, **changed)
    gapless = {name: getattr(operands, name) for name in GAPLESS}
    return operands._replace(
        **{name: None if each is None else each.contiguous() for name, each in gapless.items()}
    )


def is_regular(operands: Operands) -> bool:
    """Whether kernels take the inputs as they are."""
    return all(map(operator.is_, operands, regular_operands(operands)))


def run_reference(problem: AttentionProblem, operands: Operands):
    """Write the outputs among the operands."""
    state = reference.forward(problem, operands)
    o = normalized_output(state, operands.sink) if problem.normalize else state.o
    if problem.requests.packed_q:
        for rows in request_rows(operands.cu_seqlens_q, problem.total_q):
            operands.o[:, rows].copy_(o[:, rows])
    else:
        operands.o.copy_(o)
    for name in ("lse", "row_max", "row_sum"):
        if getattr(operands, name) is not None:
            getattr(operands, name).copy_(getattr(state, name))


def clear(o: torch.Tensor, cu_seqlens_q: torch.Tensor | None):
    """Zero the rows that belong to a batch row or request."""
    if cu_seqlens_q is None:
        o.zero_()
    else:
        row = torch.arange(len(o), device=o.device)
        o.masked_fill_((row < cu_seqlens_q[-1])[:, None, None], 0)


def forward_known(call: Call, operands: Operands):
    """Run a call that ``recall`` knows without torch's dispatcher: (o, stats)."""
    note_written(operands.o)
    return run(call, operands)


def forward_watched(operands: Operands, options: Options, backend: str):
    """Run ``attention`` through torch's operators: (o, stats), with stats one tensor of all statistics."""
    if operands.o is not None:
        return operands.o, fmha_forward_out(*flat(operands, options, backend), operands.o)
    if options.normalize and (needs_gradient(operands) or takes_gradients()):
        options = options._replace(return_lse=True)  # what gradients are computed from
    return call_operator(fmha_forward, *flat(operands, options, backend))


def needs_gradient(operands: Operands) -> bool:
    """Whether autograd records a call."""
    return recorded(operands.q, operands.k, operands.v, operands.sink, operands.bias, operands.o)


def unobserved(operands: Operands) -> bool:
    """Whether a call may skip torch's dispatcher: q is given, and no operand is ``watched`` or a non-tensor."""
    return operands.q is not None and not watched(*[t for t in operands if t is not None])


@torch.library.custom_op("warpspec::fmha_forward", mutates_args=(), schema=f"({SCHEMA}) -> (Tensor, Tensor)")
def fmha_forward(*arguments):
    """(o, stats) of ``attention``."""
    return run_operator(*unflat(arguments))


@torch.library.custom_op(
    "warpspec::fmha_forward_out", mutates_args=("out",), schema=f"({SCHEMA}, Tensor(a!) out) -> Tensor"
)
def fmha_forward_out(*arguments):
    """stats of ``attention``; o is written to out."""
    return run_operator(*unflat(arguments[:-1], arguments[-1]))[1]


def run_operator(operands: Operands, options: Options, backend: str):
    """(o, stats) of an operator's call, stats one tensor: [0, B, Hq, Sq], packed [0, Hq, T], where there are none."""
    key = key_of(operands, options, backend)
    if key is not None:
        key = (OPERATOR, *key)  # autograd records the operator, not the call
    call = None if key is None else recall(key, operands)
    if call is None:
        call = check_call(operands, options, backend)
        remember(key, call)
    problem = call.problem
    shape = (problem.stat_count, *caller_shape(problem, problem.stat_shape))
    stats = operands.q.new_empty(shape, dtype=torch.float32)
    o, _ = run(call, operands, stats.unbind())
    return o, stats


@fmha_forward.register_fake
def _(*arguments):
    operands, options, _ = unflat(arguments)
    return new_outputs(AttentionProblem.check(operands, options, memory=False), operands)


@fmha_forward_out.register_fake
def _(*arguments):
    operands, options, _ = unflat(arguments[:-1], arguments[-1])
    return new_outputs(AttentionProblem.check(operands, options, memory=False), operands)[1]
