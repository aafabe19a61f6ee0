"""Running a checked backward problem on a GPU or in the simulator: statistics of rows, the main kernel, results.

``prepare`` does everything that does not depend on the tensors, and remembers its result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from warpspec.common.allocation import Block, allocate, block
from warpspec.common.architecture import Family
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import FP32_BYTES, TMA_ALIGNMENT, VECTOR_BYTES, WARP_THREADS
from warpspec.common.launch import Kernel, Target
from warpspec.common.strides import regular_strides
from warpspec.fmha.backward import apart
from warpspec.fmha.backward.apart import is_apart
from warpspec.fmha.backward.features import UNITS, BackwardKernel
from warpspec.fmha.backward.operands import PIECE_NUMBERS, PLACE_NUMBERS, BackwardOperands
from warpspec.fmha.backward.pieces import PieceLength
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.backward.ranges import seen_by
from warpspec.fmha.backward.rows import RESULTS, ROWS, result_config, row_config
from warpspec.fmha.backward.runs import most_runs
from warpspec.fmha.backward.schedule import (
    CutTiles,
    Order,
    choose_order,
    cut_tiles,
    inner_heads_of,
    piece_length,
    reads_beyond_l2,
    side_by_side,
)
from warpspec.fmha.backward.sm90.apart import KEYS, QUERIES, KeyConfig, QueryConfig
from warpspec.fmha.backward.work import has_short_rows, key_tile_count, query_tile_count
from warpspec.fmha.checks import SIZE_LIMIT
from warpspec.fmha.logits import LogitNumbers
from warpspec.fmha.operands import Operands
from warpspec.fmha.problem import AttentionProblem


class Gradients(NamedTuple):
    """Gradients, each shaped like its tensor in ``Operands``. Kernels read those of o (as ``aligned`` makes them) and
    of lse, and write those of the differentiable arguments that are not None."""

    do: torch.Tensor | None
    dlse: torch.Tensor | None
    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    bias: torch.Tensor | None = None


SINK_ALONE = ("sink",)  # what is wanted of a call that only has a first kernel
# Least query heads of a KV head with which the main kernel makes all gradients although all key tiles are cut.
FINISHED_HEADS = 3
NOT_CUT = PieceLength(0.0, 0.0, 0.0, 0.0, 0)  # where the device cuts nothing
# Packages with ``BackwardConfig`` and ``MAIN``, its ``Kernel``.
GRADIENTS = Family(
    "attention's gradients", sm90="warpspec.fmha.backward.sm90", sm100="warpspec.fmha.backward.sm100"
)


def supported(problem: BackwardProblem, target: Target) -> BackwardKernel:
    """The main kernel's configuration before anything is planned, which is all that a call without rows or keys has.
    UnsupportedProblem names what the kernel does not support."""
    forward = problem.forward
    if forward.mask.key_stride * max(forward.seq_k, 1) > SIZE_LIMIT:
        raise UnsupportedProblem(
            f"attention's gradients: key_stride * Sk must be at most {SIZE_LIMIT}, got {forward.mask.key_stride} * "
            f"{forward.seq_k}"
        )
    config = GRADIENTS.of(target.architecture).BackwardConfig.of(problem)
    if forward.mask.block_size is not None and (
        forward.mask.block_size[0] % config.tile_m or forward.mask.block_size[1] % config.tile_n
    ):
        raise UnsupportedProblem(
            f"attention's gradients: block_mask: blocks must be of multiples of {config.tile_m} queries and "
            f"{config.tile_n} keys at head size {forward.head_dim}, got {forward.mask.block_size}"
        )
    return config


def plan(problem: BackwardProblem, target: Target) -> BackwardKernel:
    """Choose the main kernel's configuration. UnsupportedProblem names what the kernel does not support."""
    main = plan_main(problem, target)
    if apart.gains(problem, main, target):
        keys = replace(problem, wanted=tuple(name for name in problem.wanted if name != "q"))
        config = KeyConfig.of(keys) or plan_main(keys, target)
        if not config.cut and QueryConfig.beside(config):
            return config
    return main


def plan_main(problem: BackwardProblem, target: Target) -> BackwardKernel:
    """``plan`` with a main kernel that makes all that is wanted."""
    config = supported(problem, target)
    order = choose_order(problem, config, target)
    if order.slices == 1 and reads_beyond_l2(problem, config, target):
        config = replace(config, heads_inside=True)
        order = choose_order(problem, config, target)
    inner_heads = inner_heads_of(problem, config, order.section, target)
    if inner_heads:
        config = replace(config, inner_heads=inner_heads)
        order = choose_order(problem, config, target)
    return ordered(config, order, problem.forward, target)


def ordered(
    config: BackwardKernel, order: Order, forward: AttentionProblem, target: Target
) -> BackwardKernel:
    """The kernel for an order of its CTAs. It makes dQ itself if it can, unless heads are sliced (each CTA then ends in
    additions to dK and dV, for which it would have to wait), or all queries see all keys and key tiles are cut, which
    lost in the one long call that was timed; or all are cut and have so few heads that there is far more of dK and dV
    to make than of dQ; or many rows of one head have few key tiles, so that most of dQ is made in the end, and a kernel
    of its own has more warps for it."""
    slices, group = order.slices > 1, forward.group
    cut = order.pieces > 1 or slices
    keys = cut and order.whole == 0 and group < FINISHED_HEADS
    finishes = config.can_finish and not (slices or keys or has_short_rows(config, forward, target))
    finishes = finishes and (config.mask.band or not cut)
    if (cut, slices, finishes) == (config.cut, config.slices, config.finishes):
        return config  # to make another takes a tenth of a plan's time
    return replace(config, cut=cut, slices=slices, finishes=finishes)


class Prepared(NamedTuple):
    """A problem ready to run. order: order of the main kernel's CTAs. length, cut: how the device, or the host, cuts
    key tiles by length, or None.
    rows, main, results: functions of the kernels' arguments, results None as in ``Kernels``. numbers: the main
    kernel's. window: (left, right), 0 where unbounded. scale: the logits'. queries: numbers of the kernel that makes
    dQ by query tiles, which then stands for ``results``, or for ``rows`` if there are no ``results``; None if there is
    none."""

    target: Target
    config: BackwardKernel
    order: Order
    length: PieceLength | None
    cut: CutTiles | None
    rows: Callable
    main: Callable
    results: Callable | None
    numbers: tuple
    window: tuple[int, int]
    scale: float
    queries: tuple | None = None


class Kernels(NamedTuple):
    """The kernels of a problem, each a (kernel, configuration): row statistics, the main kernel, then results (dQ, and
    the sums of cut key tiles). results: None if another kernel makes them, or if no key tile is cut and dQ is not
    wanted. A kernel that makes dQ by query tiles is the first, or the last."""

    rows: tuple[Kernel, Hashable]
    main: tuple[Kernel, Hashable]
    results: tuple[Kernel, Hashable] | None


def kernels(problem: BackwardProblem, target: Target, config: BackwardKernel | None = None) -> Kernels:
    """Choose the kernels of a problem. config: overrides the planned configuration of the main kernel."""
    config = config or plan(problem, target)
    rows, main = row_config(config, problem), GRADIENTS.of(target.architecture).MAIN
    if is_apart(problem, config):
        main = KEYS if isinstance(config, KeyConfig) else main
        queries = apart.query_config(problem, config)
        if queries.makes_statistics:
            return Kernels((QUERIES, queries), (main, config), None)
        return Kernels((ROWS, rows), (main, config), (QUERIES, queries))
    last = result_config(config)
    results = None if last is None or config.finishes else (RESULTS, last)
    return Kernels((ROWS, rows), (main, config), results)


@lru_cache(maxsize=4096)
def prepare(
    problem: BackwardProblem,
    target: Target,
    order: Order | None = None,
    config: BackwardKernel | None = None,
) -> Prepared:
    """Plan and compile; results are cached. order, config: override those that are chosen."""
    config, forward = config or plan(problem, target), problem.forward
    order = order or choose_order(problem, config, target)
    if isinstance(config, KeyConfig):
        order = apart.balanced(problem, config, order, target)
    config = ordered(config, order, forward, target)
    launchers = [
        None if item is None else item[0].launcher(item[1], target)
        for item in kernels(problem, target, config)
    ]
    window = (forward.window_left or 0, forward.window_right or 0)
    length = None
    if config.cuts_on_device:
        length = piece_length(problem, config, target, order.slices, order.section)
    cut = cut_tiles(problem, config, order) if config.cuts_by_length and length is None else None
    numbers = (
        *LogitNumbers.of(forward.logits, signed=True),
        forward.logits.scale,
        *window,
        launched_pieces(config, forward, order, length, cut),
        order.section,
        cut.most if cut else order.most,
        order.slices,
        order.whole,
        finisher_count(config, forward, order, target),
        apart.most_ctas(problem, config, forward.heads_kv, target),
    )
    queries = apart.query_numbers(problem, config, target, window) if is_apart(problem, config) else None
    return Prepared(
        target, config, order, length, cut, *launchers, numbers, window, forward.logits.scale, queries
    )


def finisher_count(config: BackwardKernel, forward: AttentionProblem, order: Order, target: Target) -> int:
    """CTAs of the main kernel that make gradients from sums: one for each SM, or fewer if their warps have an item each
    (``device.finish``)."""
    if not config.finishes:
        return 0
    rows, queries = forward.batch * forward.heads_kv, forward.group * -(-forward.seq_q // config.tile_m)
    items = rows * -(-queries // UNITS) * config.query_shares
    if config.cut:
        tiles = (rows - order.whole) * -(-forward.seq_k // config.tile_n)
        items += tiles * config.key_shares * (config.wanted.k + config.wanted.dv)
    return min(-(-items // (config.threads // WARP_THREADS)), target.sm_count)


def launched_pieces(
    config: BackwardKernel,
    forward: AttentionProblem,
    order: Order,
    length: PieceLength | None,
    cut: CutTiles | None,
) -> int:
    """``BackwardNumbers.pieces``."""
    if config.keeps_requests:
        return length.further if length else 0
    if config.cuts_last_rows:
        return length.further * forward.heads_kv * order.slices
    if length:
        return 1  # each has a place of its own
    return cut.pieces if cut else order.pieces


class Workspace(NamedTuple):
    """What a call allocates beside its gradients: operands of the kernels, None where they need none. Either ``Block``s
    or tensors. The fields are named as in ``operands``; the key tiles' sums come last."""

    statistics: Block | torch.Tensor
    dq_sums: Block | torch.Tensor | None
    turns: Block | torch.Tensor | None
    done: Block | torch.Tensor | None
    dsink: Block | torch.Tensor | None
    tile_order: Block | torch.Tensor | None
    tile_pieces: Block | torch.Tensor | None
    dk_sums: Block | torch.Tensor | None
    dv_sums: Block | torch.Tensor | None


def workspace_of(prepared: Prepared, problem: BackwardProblem, operands: Operands) -> Workspace:
    """The workspace of a call. operands: as for ``run_kernels``; only their shapes matter."""
    config, forward, length = prepared.config, problem.forward, prepared.length
    rows, key_tiles = query_tile_count(config, operands), key_tile_count(config, operands)
    heads, fp32, int32 = forward.heads_q, torch.float32, torch.int32

    def each(wanted, *shape, dtype=fp32):
        return block(shape, dtype) if wanted else None

    pieces = each(config.cuts_by_length, key_tiles, PIECE_NUMBERS, dtype=int32)
    sums, ordered_rows = (forward.heads_kv, key_tiles, prepared.order.pieces), key_tiles + 1
    if config.keeps_requests:
        further, all_rows = length.further if length else 0, forward.heads_kv * prepared.order.slices
        ctas, sms = key_tiles * all_rows + further, side_by_side(config, prepared.target)
        ordered_rows = most_runs(len(operands.cu_seqlens_q) - 1, ctas, sms) + 1
        pieces = each(config.cut, len(operands.cu_seqlens_q) - 1, PIECE_NUMBERS, dtype=int32)
        sums = (1, 2 * further, 1)  # a key tile of n pieces has n - 1 further ones
    elif length is not None:
        places = key_tiles + length.further + (key_tiles if config.heads_inside and config.ends_early else 0)
        sums, ordered_rows = (forward.heads_kv, places, 1), places + 1
        if config.cuts_last_rows:
            further = length.further * forward.heads_kv
            sums = (1, forward.heads_kv * key_tiles + further, 1)
            ordered_rows = 2 * key_tiles + further * prepared.order.slices + 1
    elif prepared.cut is not None:
        sums = (forward.heads_kv, operands.q.shape[0] * prepared.cut.pieces, 1)
    if config.slices:
        sums = (forward.heads_kv, key_tiles, 1)
    sums = (*sums, config.tile_n * config.heads.qk)
    return Workspace(
        each(True, heads, rows, config.statistics_bytes // VECTOR_BYTES, VECTOR_BYTES // FP32_BYTES),
        each(config.wanted.q, heads, rows, config.tile_m * config.heads.qk),
        each(config.deterministic, heads, rows, config.turn_counts, dtype=int32),
        each(config.finishes, forward.batch * forward.heads_kv + 1, dtype=int32),
        each("sink" in problem.wanted, heads, rows),
        each(config.requests.packed_k, ordered_rows, PLACE_NUMBERS, dtype=int32),
        pieces,
        each(config.leaves_k, *sums),
        each(config.leaves_v, *sums),
    )


def run_kernels(
    prepared: Prepared,
    problem: BackwardProblem,
    operands: Operands,
    gradients: Gradients,
    workspace: Workspace | None = None,
) -> None:
    """Launch on the tensors' device and its current stream; no synchronisation. Writes the gradients that are not None.

    problem: what was prepared. operands: as ``fmha.ops.kernel_operands`` makes them for native kernels, with o and lse.
    workspace: of blocks, where it is known (``workspace_of``).
    """
    if workspace is None:
        workspace = workspace_of(prepared, problem, operands)
    dlse = gradients.dlse
    with prepared.target.current():
        operands = operands._replace(lse=operands.lse.contiguous())
        gradients = gradients._replace(dlse=None if dlse is None else dlse.contiguous())
        run_prepared(prepared, problem, operands, gradients, workspace)


def run_prepared(
    prepared: Prepared,
    problem: BackwardProblem,
    operands: Operands,
    gradients: Gradients,
    workspace: Workspace,
) -> None:
    """Like ``run_kernels``, for a prepared problem on the current device; kernels can read all tensors as they are."""
    config, dbias = prepared.config, gradients.bias
    made = Workspace._make(allocate(workspace, operands.q.device))
    seen = seen_by(problem.forward, operands) if config.mask.has_ranges else None
    rows, main, results = arguments_of(prepared, operands, gradients, made, seen)
    prepared.rows(*rows)
    if made.dsink is not None:
        add_up_sink(made.dsink, gradients.sink)
        if problem.wanted == SINK_ALONE:
            return
    if main.do is None:
        main = main._replace(do=torch.zeros_like(operands.o))
    if dbias is not None:
        if config.wanted.bias == "sum" and dbias.dtype != torch.float32:
            dbias = torch.zeros(dbias.shape, dtype=torch.float32, device=dbias.device)
        elif config.wanted.bias == "sum" or not config.whole:
            dbias.zero_()  # of tiles that nobody sees
        main = main._replace(dbias=dbias)
    parts = parts_of(prepared, problem, main) if config.wanted.bias == "sum" else (main,)
    for part in parts:
        prepared.main(*part, *prepared.numbers)
    if results is not None:
        prepared.results(*results)
    if dbias is not gradients.bias:
        gradients.bias.copy_(dbias)


def add_up_sink(parts: torch.Tensor, gradient: torch.Tensor) -> None:
    """Write the gradient [Hq] of the sink, whose parts are the tiles'."""
    gradient.copy_(parts.sum(dim=1))


class Arguments(NamedTuple):
    """The arguments of a call's kernels, those of the main one without its numbers; results: None if there is none."""

    rows: tuple
    main: BackwardOperands
    results: tuple | None


def arguments_of(
    prepared: Prepared, operands: Operands, gradients: Gradients, workspace: Workspace, seen_by=None
) -> Arguments:
    """The arguments of a call's kernels. None of what is given is looked at, so that anything may stand for it.
    seen_by: see ``BackwardOperands``."""
    config, order = prepared.config, prepared.order
    statistics, dq_sums, turns, done, dsink, tile_order, tile_pieces, *sums = workspace
    dk, dv = gradients.k if config.wanted.k else None, gradients.v if config.wanted.dv else None
    ranges, lengths = (operands.ranges, seen_by), (operands.cu_seqlens_q, operands.cu_seqlens_k)
    requests = (None,) * 10
    if config.packed:
        dq = gradients.q
        tables = (tile_order, tile_pieces)
        requests = (operands.k, lengths[1], operands.q_start, *ranges, *tables, dq, dk, dv)
    read = (operands.o, gradients.do, operands.lse, gradients.dlse, operands.sink, lengths[0])
    written = (statistics, dq_sums, turns, done, dsink, *(sums if config.slices else (None, None)))
    cuts = NOT_CUT if prepared.length is None else prepared.length
    main = BackwardOperands(
        operands.q,
        operands.k,
        operands.v,
        gradients.do,
        statistics,
        dq_sums,
        turns,
        done,
        gradients.q if config.finishes else None,
        gradients.k if config.writes_k else None,
        gradients.v if config.writes_v else None,
        *sums,
        operands.kv_lengths,
        operands.q_start,
        operands.bias,
        gradients.bias,
        *lengths,
        tile_order,
        tile_pieces,
        *ranges,
        operands.q_visits,
        operands.q_counts,
        operands.q_patterns,
    )
    inverse = 1.0 / prepared.numbers[0] if config.subtracts else 1.0
    rows = (*read, *written, *requests, *prepared.window, *cuts, order.slices, inverse)
    results = None
    if prepared.queries is not None:
        first = prepared.results is None
        stated = (operands.o, operands.lse) if first else (None, None)
        places = (operands.kv_lengths, operands.q_start, *lengths)
        queries = (*main[:5], gradients.q, *stated, *places, *prepared.queries)
        rows, results = (queries, None) if first else (rows, queries)
    elif prepared.results is not None:
        some = any(each is not None for each in sums) and not config.slices
        read = some and (config.keeps_requests or config.cuts_last_rows)
        tables = (tile_order if read else None, tile_pieces if some else None)
        keys = (*sums, gradients.q, *((dk, dv) if config.cut else (None, None)))
        results = (dq_sums, *keys, *lengths, *tables, prepared.scale, order.whole)
    return Arguments(rows, main, results)


def parts_of(prepared: Prepared, problem: BackwardProblem, main: BackwardOperands):
    """Split the main kernel into launches: one; or, if a bias's gradient is summed in a fixed order, one after another
    for the batch rows and KV heads that add to the same elements."""
    if not (problem.deterministic and prepared.config.wanted.bias == "sum"):
        yield main
        return
    forward, tile_count = problem.forward, main.statistics.shape[1] // problem.forward.batch
    batches = [slice(b, b + 1) for b in range(forward.batch)] if not forward.bias.batches else [slice(None)]
    heads = [slice(h, h + 1) for h in range(forward.heads_kv)] if not forward.bias.heads else [slice(None)]
    for b in batches:
        for h in heads:
            own = slice(None) if h == slice(None) else slice(h.start * forward.group, h.stop * forward.group)
            of_tiles = slice(None) if b == slice(None) else slice(b.start * tile_count, b.stop * tile_count)

            def cut_lists(tensor, *index):
                """Lists may be the same for all batch rows or heads."""
                if tensor is None:
                    return None
                sizes = zip(tensor.shape, index, strict=False)
                return tensor[tuple(part if size > 1 else slice(None) for size, part in sizes)].contiguous()

            def cut(tensor, *index):
                return None if tensor is None else regular_strides(tensor[index])

            yield main._replace(
                q=cut(main.q, b, slice(None), own),
                do=cut(main.do, b, slice(None), own),
                **{name: cut(getattr(main, name), b, slice(None), h) for name in ("k", "v", "dk", "dv")},
                **{
                    name: cut(getattr(main, name), own, of_tiles)
                    for name in ("statistics", "dq_sums", "turns")
                },
                kv_lengths=cut(main.kv_lengths, b),
                **{name: cut(getattr(main, name), b) for name in ("q_start", "ranges", "seen_by")},
                **{name: cut_lists(getattr(main, name), b, own) for name in ("q_visits", "q_counts")},
                bias=cut(
                    main.bias,
                    b if forward.bias.batches else slice(None),
                    own if forward.bias.heads else slice(None),
                ),
                dbias=cut(
                    main.dbias,
                    b if forward.bias.batches else slice(None),
                    own if forward.bias.heads else slice(None),
                ),
            )


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient itself if TMA can read it, else a copy."""
    steps = [
        step * tensor.element_size()
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1
    ]
    fits = tensor.stride(-1) == 1 and all(step % TMA_ALIGNMENT == 0 and step > 0 for step in steps[:-1])
    if not fits or tensor.data_ptr() % TMA_ALIGNMENT:
        tensor = tensor.contiguous()
    return regular_strides(tensor)
