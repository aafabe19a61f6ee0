"""The work of a launch, counted: query tiles and the KV tiles that they visit, the longest and the shortest query tile,
tiles with a mask, loads of pages, bytes. ``cost`` says how long it takes."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from warpspec.common.hardware import LINE_BYTES
from warpspec.fmha.block_mask import Visits
from warpspec.fmha.config import shares_lines
from warpspec.fmha.schedule import sorts_tiles
from warpspec.fmha.tiles import ELEMENT_BYTES

FAR = 1 << 30
# Lists of blocks of which the host knows nothing are taken to have this share of all blocks, and twice as many at most.
UNKNOWN_SHARE = 0.25
FEWEST_VISITS = 1 / 16  # blocks of a mean list that the model of the time still tells from none
# Half of an interval, over the standard deviation of numbers spread evenly in it.
EVEN_DEVIATION = math.sqrt(3)


class Tiling(NamedTuple):
    """The properties of a kernel's configuration that decide its time.

    row_groups: number of row groups in a CTA. rows: query rows of a row group. column_groups: warpgroups that share a
    row group, each with a column group of the output. tile_n: keys of a KV tile. stages: KV tiles that the ring
    holds. ctas_per_sm: CTAs that are resident on an SM. pack: query heads that share a query tile. skips: whether a row
    group without a query takes no time. apart: KV heads that a CTA works on, each of which counts as a CTA with a share
    of the SM.
    """

    row_groups: int
    rows: int
    column_groups: int
    tile_n: int
    stages: int
    ctas_per_sm: int
    pack: int
    skips: bool = False
    apart: int = 1

    @property
    def group_queries(self) -> int:
        return self.rows // self.pack

    @property
    def queries(self) -> int:
        """Queries of a query tile."""
        return self.row_groups * self.group_queries


class Work(NamedTuple):
    """What a launch has to do, in counts.

    tiles: query tiles that have a query. idle: query tiles that have none and come between these. kv: KV tiles
    visited by all query tiles together. longest, shortest: KV tiles visited by the longest and by the shortest query
    tile. spread: standard deviation, among query tiles, of the KV tiles before their request's own queries. masked:
    visits of KV tiles that need a mask. groups: visits of KV tiles, counted once for each row group that has a query.
    rows: query rows of all heads. bytes: bytes of Q, K, V and O that must be moved. boxes: TMA loads that fetch one K
    tile or one V tile. depth: elements of a row, the mean of Q and K's and V's. tensors: 2, or 1 if K and V are one
    tensor. requests: number of requests. number: bytes of an element of K and V. lines: bytes of the L2 lines that a
    load touches, divided by the bytes that it needs. sorts: 1 if a queue hands out the query tiles in order of length
    and without idle ones, otherwise 0. again: bytes of K and V that query tiles of the same keys read after the first
    one. again_often: the same, each request's bytes times the number of its tiles that read them. waste: bytes of K
    and V that memory sends if it sends each line of L2 to each CTA that reads part of it, divided by those needed.
    """

    tiles: float
    idle: float
    kv: float
    longest: float
    shortest: float
    spread: float
    masked: float
    groups: float
    rows: float
    bytes: float
    boxes: float
    depth: float
    tensors: float
    requests: float
    number: float
    lines: float
    sorts: float
    again: float
    again_often: float
    waste: float = 1.0


def _clipped_mean(first: float, last: float) -> float:
    """The mean of max(x, 0) over x that are spread evenly from first to last."""
    if first >= 0:
        return (first + last) / 2
    if last <= 0:
        return 0.0
    return last * last / (2 * (last - first))


class Spans(NamedTuple):
    """Lengths, in KV tiles, of the spans of a request's query tiles.

    mean, longest, shortest: of its tiles. masked: KV tiles of a span that need a mask, on average.
    """

    mean: float
    longest: float
    shortest: float
    masked: float


def spans_of(problem, tiling: Tiling, queries: float, keys: float) -> Spans:
    """The ``Spans`` of a request with these queries and keys, both more than 0."""
    if problem.mask.has_blocks:
        return listed_spans(problem, tiling, keys)
    queries_of, keys_of, stride = tiling.queries, tiling.tile_n, problem.mask.key_stride
    left, right = bounds_of(problem)
    number = -(-queries // queries_of)
    last = queries - (number - 1) * queries_of  # queries of the last tile
    if right is None:
        mean_end, first_end = keys, keys
    else:
        first_end = min(max((keys * stride - queries + min(queries_of, queries) + right) // stride, 0), keys)
        last_end = min(keys + right // stride, keys)
        mean_end = (first_end + last_end) / 2
    mean_start = first_start = last_start = 0.0
    if left is not None:
        first_start, last_start = keys - queries - left, keys - last - left
        mean_start = _clipped_mean(first_start, last_start)
        first_start, last_start = max(first_start, 0), max(last_start, 0)
    if number == 1:
        long = -(-mean_end // keys_of) + 0.5 * (mean_start > 0) - mean_start / keys_of
        mean = short = max(long, 0.0)
    else:
        ragged = 0.5 * (right is not None and number > 1) + 0.5 * (mean_start > 0)
        if left is not None and right is not None and mean_start > 0:
            ragged = window_edges(keys - queries - left, left + right, queries_of, keys_of)
        end = -(-keys // keys_of)
        mean = (mean_end - mean_start) / keys_of + ragged if right is not None else end - mean_start / keys_of
        ends = (first_end - first_start) / keys_of + 0.5, end - last_start / keys_of
        long, short = max(ends), max(min(ends), 0.0)
        if left is not None:  # between the first tile and the last one, tiles see a whole window
            long = max(long, min((left + queries_of + (right or 0)) / keys_of + 0.5, end))
    bands = (0 if right is None else (queries_of - 1) / keys_of / stride + 1) + (
        (queries_of - 1) / keys_of + 1 if mean_start > 0 else 0
    )
    ends_within = (problem.requests.has_kv_lengths or keys % keys_of != 0) * (right is None)
    return Spans(mean, long, short, min(mean, bands + ends_within))


def listed_spans(problem, tiling: Tiling, keys: float) -> Spans:
    """``spans_of`` query tiles that visit listed blocks. The shortest list is taken to be as far from the mean as the
    longest one."""
    visited, of_block = visits_of(problem, keys), problem.mask.block_size[1] / tiling.tile_n
    mean, most = max(visited.mean, FEWEST_VISITS), max(visited.most, FEWEST_VISITS)
    shortest = max(2 * mean - most, 0.0)
    return Spans(*(number * of_block for number in (mean, most, shortest, visited.masked)))


def visits_of(problem, keys: float) -> Visits:
    """The ``Visits`` of a request with so many keys."""
    blocks, found = max(-(-keys // problem.mask.block_size[1]), 1), problem.visited
    if found is None:
        mean = max(UNKNOWN_SHARE * blocks, 1.0)
        masked = mean / 2 if problem.mask.has_patterns or problem.mask.band else 0.0
        found = Visits(mean, masked, 2 * mean, 2 * mean)
    return Visits(*(min(number, blocks) for number in found))


def bounds_of(problem) -> tuple[int | None, int | None]:
    """(left, right) of the window that a causal mask or a window makes; None: unbounded."""
    plain = problem.mask.key_stride == 1
    return problem.window_left if plain else None, 0 if problem.mask.causal else problem.window_right


def work_of(problem, tiling: Tiling, requests) -> Work:
    """Count the work of a problem that has these requests and is cut into tiles as ``tiling`` says."""
    queries_of, keys_of, group_queries = tiling.queries, tiling.tile_n, tiling.group_queries
    stride, (left, _) = problem.mask.key_stride, bounds_of(problem)
    heads = problem.heads_kv * -(-problem.group // tiling.pack)
    tiles = kv = masked = groups = rows = moved = squares = offsets = again = often = 0.0
    longest, shortest = 0.0, math.inf
    for count, queries, keys in requests:
        if queries <= 0 or keys <= 0:
            continue
        spans = spans_of(problem, tiling, queries, keys)
        of_all = count * -(-queries // queries_of) * heads
        tiles += of_all
        kv += of_all * spans.mean
        masked += of_all * spans.masked
        groups += count * heads * spans.mean * -(-queries // group_queries)
        rows += count * queries * problem.heads_q
        seen = keys if left is None else min(keys, left + queries)
        moved += count * seen
        readers = of_all / count / problem.heads_kv * spans.mean * keys_of / seen
        again += count * seen * max(readers - 1, 0.0)
        often += count * seen * max(readers - 1, 0.0) * readers
        longest, shortest = max(longest, spans.longest), min(shortest, spans.shortest)
        if problem.mask.has_blocks:  # lists without an order: as if their lengths were spread evenly
            offset = 0.0 if problem.mask.has_order else (spans.longest - spans.mean) / EVEN_DEVIATION
            squares += of_all * offset * offset
            continue
        offset = min(max(keys * stride - queries, 0.0), FAR if left is None else left) / (keys_of * stride)
        offsets += of_all * offset
        squares += of_all * offset * offset
    spread = math.sqrt(max(squares / tiles - (offsets / tiles) ** 2, 0.0)) if tiles else 0.0
    tensors, depth = 1 if problem.format.shared_kv else 2, (problem.heads.qk + problem.heads.v) / 2
    total = sum(one.count * one.queries for one in requests)
    idle = 0.0
    if problem.requests.packed_q and problem.seq_q > queries_of:  # else idle tiles come last
        idle = max((total // queries_of + problem.batch) * heads - tiles, 0.0)
    number = problem.format.kv_bits / 8
    key_bytes = problem.heads_kv * tensors * number * depth
    return Work(
        tiles, idle, kv, longest, 0.0 if shortest == math.inf else shortest, spread, masked, groups, rows,
        moved * key_bytes + 2 * rows * ELEMENT_BYTES * depth,
        boxes_of(problem, tiling.tile_n), depth, tensors, problem.batch, number,
        touched_lines(problem.heads.qk, number), float(sorts_tiles(problem) or problem.mask.has_order),
        again * key_bytes, often * key_bytes, sent_lines(problem, tiling.apart),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def window_edges(first: int, width: int, queries: int, keys: int) -> float:
    """KV tiles that a tile of ``queries`` queries visits, less the tiles that its keys would fill, on average.

    first: the first key of the first query's window, counted from the first key; it may lie before that. width: keys of
    a query's window but one. keys: keys of a KV tile. Windows of some sizes begin and end with KV tiles.
    """
    period, span = keys // math.gcd(queries, keys), width + queries
    begins = [first + i * queries for i in range(period)]
    visited = sum(-(-(begin + span) // keys) - begin // keys for begin in begins)
    return visited / period - span / keys


@lru_cache(maxsize=256)
def touched_lines(columns: int, number: float) -> float:
    """Bytes of the L2 lines that loading a row touches, divided by the row's bytes: 1 if rows are whole lines.

    columns: elements of a row. number: bytes of an element. A row is loaded in spans of one line's size. It may begin
    at any multiple of the greatest common divisor of its own size and a line's; the result is the mean over these. A
    row of 192 bytes touches 2.5 lines on average, and calls with such rows that are bound by L2 take longer by that
    ratio (docs/notebook/attention.md).
    """
    row = int(columns * number)
    step = math.gcd(row, LINE_BYTES)
    found = 0
    for begin in range(0, LINE_BYTES, step):
        for span in range(0, row, LINE_BYTES):
            length = min(LINE_BYTES, row - span)
            found += -(-((begin + span) % LINE_BYTES + length) // LINE_BYTES)
    return found * step / row


def sent_lines(problem, together: int) -> float:
    """``Work.waste``. together: neighbouring KV heads whose keys are loaded at the same time."""
    if not shares_lines(problem) or problem.heads_kv <= together:
        return 1.0
    sizes = problem.heads.qk, problem.heads.v
    return sum(size * sent_of_row(together * size * ELEMENT_BYTES) for size in sizes) / sum(sizes)


@lru_cache(maxsize=256)
def sent_of_row(row: int) -> float:
    """Bytes of the whole L2 lines that hold a row of so many bytes, divided by it; the mean over the places where rows
    begin."""
    begins = range(0, LINE_BYTES, math.gcd(row, LINE_BYTES))
    lines = sum(-(-(begin + row) // LINE_BYTES) for begin in begins) / len(begins)
    return lines * LINE_BYTES / row


def boxes_of(problem, tile_n: int) -> int:
    """Number of TMA loads that fetch one K tile or one V tile."""
    pages = tile_n // math.gcd(problem.requests.page_size or tile_n, tile_n)
    return 1 if pages == 1 and problem.heads.whole else pages * problem.heads.qk_blocks
