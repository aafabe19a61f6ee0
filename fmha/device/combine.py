"""Split KV, second launch: the partial results of all splits of a row become one.

Arch-neutral (sm_90a and sm_100a). Split s of a row left o_s = sum of exp(logit - m_s) v, m_s and
l_s = sum of exp(logit - m_s) over its keys, natural units, all fp32 (``AttentionState``). The row's result is
o = sum of w_s o_s and l = sum of w_s l_s with w_s = exp(m_s - max of m), divided or not. If o_s is in 16 bits, it was
divided by l_s (``Output.means``), and o = sum of w_s l_s o_s; groups of its columns may have been multiplied by powers
of two besides (``CombineConfig.mean_groups``).

A split without keys has m_s = -inf and l_s = 0; its o_s is ignored. A row with only such splits gives o = 0, lse =
-inf. A NaN in any other split reaches the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32

from warpspec.common.device.host import host_function
from warpspec.common.hardware import FP32_BYTES
from warpspec.common.logarithms import LN_2, LOG2_E
from warpspec.fmha.combine import BATCH, THREADS, VECTOR, CombineConfig, CombineOperands
from warpspec.fmha.device.results import sink_of

SMEM_CARVEOUT_PERCENT = 25  # percent of an SM's L1 used as shared memory: the sums of eight CTAs
CTAS_PER_SM = 4  # at least: only further threads hide the latency of loads
WIDE_CTAS_PER_SM = 3  # if threads also have powers of two, and more columns


class Combine:
    """``Combine(config)(...)`` in a ``cute.jit`` host function launches the kernel after that function's own launches;
    ``fmha.combine.combine_splits`` launches it alone."""

    def __init__(self, config: CombineConfig):
        self.config = config

    @host_function(CombineOperands)
    def __call__(self, operands: CombineOperands, stream: CUstream):
        """Host side. A programmatic dependent launch: the kernel starts once every CTA of the previous launch has ended
        or has run ``griddepcontrol.launch_dependents``, which attention kernels run at their start; it then waits for
        the end of that launch.
        """
        launch_on_rows(self, operands, stream)

    @cute.kernel
    def kernel(self, operands, row_segments: Int32):
        partial_o, partial_max, partial_sum, results, cu_seqlens_q = operands
        found = combine_row(
            self.config, partial_o, partial_max, partial_sum, results.sink, cu_seqlens_q, row_segments
        )
        writes, place, column, maximum, total, values, sink = found
        write_row(self.config, writes, place, column, maximum, total, values, sink, results)


def launch_on_rows(combine, operands, stream: CUstream) -> None:
    """Launch the kernel of ``combine``, a class like ``Combine``, on all segments of rows."""
    _, batch, seq_q, heads, _ = operands.partial_o.shape
    config = combine.config
    row_segments = batch * seq_q * heads * config.segments
    combine.kernel(operands, row_segments).launch(
        grid=(cute.ceil_div(row_segments, config.row_segments), 1, 1),
        block=(THREADS, 1, 1),
        smem=config.smem_bytes,
        stream=stream,
        min_blocks_per_mp=WIDE_CTAS_PER_SM if config.mean_groups and config.vector > VECTOR else CTAS_PER_SM,
        preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
        use_pdl=True,
    )


@cute.jit
def combine_row(
    config: cutlass.Constexpr, partial_o, partial_max, partial_sum, sink, cu_seqlens_q, row_segments
) -> tuple:
    """Combine a row's splits: (whether this thread writes, (batch, query, head), column in units of ``config.vector``,
    maximum, sum, O (vector), the sink of the row's head or None).

    Waits for the previous launch.
    """
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane, group = thread % config.lanes, thread // config.lanes
    way, row_segment = group % config.ways, block * config.row_segments + group // config.ways
    in_range = Boolean(row_segment < row_segments)
    # Idle threads take part in shuffles and barriers.
    row_segment = cutlass.min(row_segment, row_segments - 1)
    segment, row = row_segment % config.segments, row_segment // config.segments
    _, _, seq_q, heads, _ = partial_o.shape
    head, query, batch = row % heads, row // heads % seq_q, row // heads // seq_q
    column = segment * config.lanes + lane  # in units of ``vector``
    if cutlass.const_expr(config.packed):
        in_range = in_range & Boolean(query < cu_seqlens_q[cute.size(cu_seqlens_q) - 1])

    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    logit = sink_of(sink, head)
    maxima = partial_max[None, batch, head, query]  # (SPLIT)
    sums = partial_sum[None, batch, head, query]  # (SPLIT)
    vectors = cute.local_tile(
        partial_o[None, batch, query, head, None], (1, config.vector), (None, column)
    )  # (1, vector, SPLIT)
    source = Splits(config, maxima, sums, vectors, segment * config.segment)
    loads = load_batch(source, way)  # first: nothing of the row is known yet
    maximum = row_maximum(maxima, lane, config.lanes)
    total, values = weighted_sums(source, maximum, way, loads)
    if cutlass.const_expr(config.ways > 1):
        total = add_ways(config, thread, total, values)

    return in_range & (way == 0), (batch, query, head), column, maximum, total, values, logit


@cute.jit
def write_row(
    config: cutlass.Constexpr,
    writes,
    place: cutlass.Constexpr,
    column,
    maximum,
    total,
    values,
    sink: cutlass.Constexpr,
    results,
):
    """Write a thread's columns of a row, and once per row its statistics.

    config: ``CombineConfig`` or ``JoinConfig``. place: (batch, query, head). column: in units of as many as
    there are. maximum, total, values (n): the row's state. results: ``Results``.
    """
    (batch, query, head), (_, o, lse, row_max, row_sum) = place, results
    if cutlass.const_expr(config.columns < config.head_dim):
        writes = writes & Boolean(column < config.columns // cute.size(values))
    if writes:
        scaled = divided(config, sink, maximum, total, values)
        count = cute.size(values)
        target = cute.local_tile(o[batch, query, head, None], (count,), (column,))  # (n)
        converted = cute.make_rmem_tensor(count, o.element_type)
        for i in cutlass.range_constexpr(count):
            converted[i] = scaled[i].to(o.element_type)
        cute.autovec_copy(converted, target)
        if column == 0:
            if cutlass.const_expr(config.has_lse):
                lse[batch, head, query] = log_sum(maximum, total)
            if cutlass.const_expr(not config.normalize):
                row_max[batch, head, query] = maximum
                row_sum[batch, head, query] = total


@cute.jit
def divided(config: cutlass.Constexpr, sink: cutlass.Constexpr, maximum, total, values: cute.Tensor) -> list:
    """A row's columns (n), divided by its sum and the sink if results are normalised; zeros for a row without
    keys."""
    factor = Float32(1.0)
    if cutlass.const_expr(config.normalize):
        divisor = total
        if cutlass.const_expr(config.has_sink):
            exponent = (sink - finite(maximum)) * LOG2_E
            divisor = total + cute.math.exp2(exponent, fastmath=True)
        factor = Float32(1.0) / divisor
    empty = Boolean(total == Float32(0.0))
    return [
        Float32(cutlass.select_(empty, Float32(0.0), values[i] * factor)) for i in range(cute.size(values))
    ]


def log_sum(maximum, total) -> Float32:
    """lse of a row's state."""
    return maximum + cute.math.log2(total, fastmath=True) * LN_2


def finite(maximum) -> Float32:
    """Reference of the weights: the maximum, or 0 if there is none (-inf - -inf would be NaN)."""
    return Float32(cutlass.select_(Boolean(maximum == -Float32.inf), Float32(0.0), maximum))


def common_reference(reference, other) -> tuple:
    """(reference, factor, the other's factor) of two states that become one, whose references are in log2 units."""
    highest = cute.arch.fmax(reference, other)
    factors = (cute.math.exp2(one - finite(highest), fastmath=True) for one in (reference, other))
    return highest, *factors


@cute.jit
def row_maximum(maxima: cute.Tensor, lane, lanes: cutlass.Constexpr) -> Float32:
    """Largest of maxima (SPLIT), in every lane of the group; NaN is ignored."""
    maximum = -Float32.inf
    for split in cutlass.range(lane, cute.size(maxima), lanes, unroll=BATCH):
        maximum = cute.arch.fmax(maximum, maxima[split])
    return cute.arch.warp_reduction_max(maximum, threads_in_group=lanes)


@dataclass(frozen=True)
class Splits:
    """A row's splits. maxima (SPLIT), sums (SPLIT, or with the powers of two of means behind them). vectors: (1, n,
    SPLIT), this thread's columns; column: the first one of its segment."""

    config: CombineConfig
    maxima: cute.Tensor
    sums: cute.Tensor
    vectors: cute.Tensor
    column: Int32

    @property
    def count(self):
        """Number of splits."""
        return cute.size(self.maxima)

    @property
    def powers(self):
        """Number of the power of two of the first split."""
        return self.count * (1 + self.column // (self.config.head_dim // self.config.mean_groups))


@cute.jit
def load_batch(source, first) -> tuple:
    """Load splits first, first + ways, ... of a batch: (their o (n, BATCH), their maxima, sums and powers of two
    (3, BATCH)). Past the last split, the last one is loaded again."""
    config, vectors = source.config, source.vectors
    loaded = cute.make_rmem_tensor((vectors.shape[1], BATCH), vectors.element_type)
    stats = cute.make_rmem_tensor((3, BATCH), Float32)
    for i in cutlass.range_constexpr(BATCH):
        split = cutlass.min(first + i * config.ways, source.count - 1)
        cute.autovec_copy(vectors[0, None, split], loaded[None, i])
        stats[0, i], stats[1, i] = source.maxima[split], source.sums[split]
        if cutlass.const_expr(config.mean_groups > 0):
            stats[2, i] = source.sums[source.powers + split]
    return loaded, stats


@cute.jit
def add_batch(source, batch: cutlass.Constexpr, base, first, total, values: cute.Tensor):
    """Add a loaded batch to values (n); returns total plus its weighted sums."""
    (loaded, stats), config = batch, source.config
    for i in cutlass.range_constexpr(BATCH):
        row_sum = stats[1, i]
        # Select instead of multiplying by 0: o of a split that saw no key may never have been written.
        skipped = Boolean(row_sum == Float32(0.0)) | Boolean(first + i * config.ways >= source.count)
        weight = cute.math.exp2((stats[0, i] - base) * LOG2_E, fastmath=True)
        weight = Float32(cutlass.select_(skipped, Float32(0.0), weight))
        total += row_sum * weight
        if cutlass.const_expr(loaded.element_type is not Float32):
            weight = row_sum * weight
        if cutlass.const_expr(config.mean_groups > 0):
            weight = weight * Float32(cutlass.select_(skipped, Float32(0.0), stats[2, i]))
        for j in cutlass.range_constexpr(cute.size(values)):
            value = loaded[j, i].to(Float32)
            values[j] += Float32(cutlass.select_(skipped, Float32(0.0), value)) * weight
    return total


@cute.jit
def weighted_sums(source, maximum, way, batch: cutlass.Constexpr):
    """Over splits way, way + ways, ...: (sum of weights times row sums, sum of weights times o (n)). batch: the first
    ones, loaded."""
    base, step = finite(maximum), source.config.ways * BATCH
    values = cute.make_rmem_tensor(source.vectors.shape[1], Float32)
    values.fill(0.0)
    total = add_batch(source, batch, base, way, Float32(0.0), values)
    for first in cutlass.range(way + step, source.count, step, unroll=1):
        batch = load_batch(source, first)
        total = add_batch(source, batch, base, first, total, values)
    return total, values


@cute.jit
def add_ways(config: cutlass.Constexpr, thread, total, values: cute.Tensor) -> Float32:
    """In way 0: values (n) and the returned total become the sums over all ways, in their order."""
    smem, count = cutlass.memory.SmemAllocator(), cute.size(values)
    shared = smem.allocate_tensor(
        Float32, cute.make_layout((count, THREADS)), byte_alignment=count * FP32_BYTES
    )  # (n, THREAD)
    totals = smem.allocate_tensor(Float32, cute.make_layout(THREADS), byte_alignment=FP32_BYTES)  # (THREAD)
    cute.autovec_copy(values, shared[None, thread])
    totals[thread] = total
    cute.arch.sync_threads()
    first = thread // (config.lanes * config.ways) * (config.lanes * config.ways) + thread % config.lanes
    total = Float32(0.0)
    values.fill(0.0)
    for way in cutlass.range(config.ways, unroll=BATCH):
        other = first + way * config.lanes
        total += totals[other]
        for j in cutlass.range_constexpr(count):
            values[j] += shared[j, other]
    return total
