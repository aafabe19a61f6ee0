"""Tile shapes of the sm_90a attention kernel by head dimension: the tuning tables, and which of them a problem gets.

``scripts/tune_attention.py`` times these shapes and others; docs/notebook/attention_sm90.md says which were dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from warpspec.common.launch import Target
from warpspec.fmha.heads import class_of
from warpspec.fmha.plan.splits import Loads
from warpspec.fmha.problem import AttentionProblem

# Decoding at D 64 and 128 in CTAs of one consumer: fitted to 22 shapes on an H200
# (docs/records/2026-11-23-packed-batches.md).
DECODE_LOADS = Loads(one=28, two=22.5, all=18, spread=0.75)
# Of FP8 keys, in bytes that the same numbers would have in bf16: the conversion binds, and one CTA on an SM does nearly
# what two do. Measured on an H200 at three shapes.
FLOAT8_LOADS = Loads(one=20, two=25, all=25, spread=1)
WARPGROUP_ROWS = 64  # query rows of a consumer warpgroup: M of wgmma
WARP_ROWS = 16  # query rows of a tile whose KV tiles are shared among warps
COLUMN_ROWS = 8  # query rows that are the columns of one mma.sync: N


@dataclass(frozen=True)
class Shape:
    """consumers: warpgroups of 64 query rows each. tile_n: keys of a KV tile. kv_stages: KV tiles in flight.
    ctas_per_sm: that registers and shared memory are budgeted for. consumer_registers, producer_registers: of a
    thread, set by setmaxnreg. column_parts: consumers that share 64 rows, each with a part of O's columns. raw_stages,
    converter_registers: where K and V are FP8, tiles that are loaded ahead of their conversion, and registers of a
    thread that converts. row_tiles: where each warp of a consumer has KV tiles of its own (``by_warp``), how many times
    8 query rows; else 0."""

    consumers: int
    tile_n: int
    kv_stages: int
    ctas_per_sm: int
    consumer_registers: int
    producer_registers: int
    column_parts: int = 1
    raw_stages: int = 0
    converter_registers: int = 0
    row_tiles: int = 0


# Many rows: O, S and P of 64 rows in a consumer's registers decide how many consumers and keys fit.
PREFILL = {
    64: Shape(3, 128, 4, 1, 160, 32),
    128: Shape(2, 128, 2, 1, 240, 24),
    256: Shape(2, 64, 2, 1, 240, 24),
    512: Shape(2, 32, 2, 1, 240, 24, column_parts=2),
}
# So many rows that the idle ones of a larger tile weigh little, and so many tiles that those of the last round do.
LONG = {128: Shape(3, 80, 2, 1, 160, 32)}  # others: PREFILL
# Many rows of head sizes, (Q and K's, V's), that need fewer registers for O than the tuned size above them: so there is
# room for three consumers. Others have the shapes of V's next tuned size.
OWN = {
    (72, 72): Shape(3, 96, 3, 1, 160, 32),
    (80, 80): Shape(3, 96, 3, 1, 160, 32),
    (96, 96): Shape(3, 96, 3, 1, 160, 32),
}
LONG_ROWS = 2048  # queries times heads that share a tile
# Half of a tile's rows do not see its keys on the diagonal: so its queries, which are fewer where heads share it, must
# be few against a request's. Queries times heads that share a tile, squared.
LONG_CAUSAL = 5500
LONG_TILES = 4  # for each SM
DENSE_SHARE = 0.125  # of the queries that packed requests have at most: of fewer, most requests are decoding
# The same with few keys, of which smaller KV tiles have fewer that no row sees, or at D 64 with a window that is no
# narrow one.
SHORT = {64: Shape(3, 80, 5, 1, 160, 32), 128: Shape(3, 64, 3, 1, 160, 32)}
SHORT_KEYS, SHORT_WINDOW = 1024, 2048
SHORT_TILES = 3  # for each SM
# Or with so many keys to a query that all tiles are alike, and these leave so much less of the last round idle.
ALIKE_KEYS, IDLE_MORE = 16, 1.1
# Few rows (decode): memory binds; two CTAs of one consumer on an SM keep enough loads in flight.
DECODE = {
    64: Shape(1, 128, 2, 2, 208, 48),
    128: Shape(1, 64, 2, 2, 208, 48),
    256: Shape(1, 64, 3, 1, 240, 24),
    512: PREFILL[512],
}
# Narrow windows: few KV tiles a query tile, so that starts and ends weigh most: they lie under other CTAs' loops, and
# tiles of few keys have few that no row sees.
NARROW = {**PREFILL, 64: Shape(1, 64, 3, 3, 136, 24), 128: DECODE[128]}
NARROW_KEYS = 512  # keys of a window up to which it counts as narrow
# With a bias: its elements and addresses take registers, too.
BIASED = {**NARROW, 64: Shape(3, 80, 4, 1, 160, 32), 128: Shape(2, 96, 3, 1, 240, 24)}
# The same for pages that do not fit those.
BIASED_PAGES = {**BIASED, 64: Shape(2, 128, 4, 1, 240, 24), 128: Shape(2, 64, 3, 1, 240, 24)}
# The same with split keys, where an SM may have one CTA only.
SPLIT = {**DECODE, 64: Shape(1, 128, 3, 2, 208, 48), 128: Shape(1, 64, 3, 2, 208, 48)}
# Few tiles, and not so many keys that these are split: tiles of one consumer go to more SMs.
SMALL = {dim: SPLIT[dim] for dim in (128, 256)}
SMALL_TILES = 1  # for each SM
SMALL_KEYS = 1024
# K and V one tensor: a stage holds both, so that the keys of a tile may be twice as many. Nothing else fits.
SHARED = {512: Shape(2, 64, 2, 1, 240, 24, column_parts=2)}

# K and V in FP8. A warpgroup converts them, and needs registers; tiles are loaded ahead of it.
FLOAT8 = {
    64: Shape(2, 128, 3, 1, 208, 24, raw_stages=3, converter_registers=72),
    128: Shape(2, 128, 2, 1, 208, 24, raw_stages=2, converter_registers=72),
    256: Shape(2, 64, 2, 1, 208, 24, raw_stages=1, converter_registers=72),
}
FLOAT8_DECODE = {
    64: Shape(1, 64, 3, 2, 160, 24, raw_stages=4, converter_registers=56),
    128: Shape(1, 64, 2, 2, 160, 24, raw_stages=2, converter_registers=56),
    256: Shape(1, 64, 2, 1, 240, 24, raw_stages=2, converter_registers=120),
}
# So few rows that the warps of a consumer take KV tiles of their own: by how many times 8 rows.
FLOAT8_FEW = {
    1: {
        64: Shape(1, 64, 8, 2, 216, 40, row_tiles=1),
        128: Shape(1, 32, 8, 2, 208, 48, row_tiles=1),
        256: Shape(1, 32, 4, 2, 216, 40, row_tiles=1),
    },
    2: {
        64: Shape(1, 64, 8, 2, 216, 40, row_tiles=2),
        128: Shape(1, 64, 4, 2, 216, 40, row_tiles=2),
    },
}


def choose_shape(problem: AttentionProblem, target: Target, pack: int, splits: bool) -> Shape:
    """The shape for a problem, among others by how many tiles each SM of the target gets.

    pack: heads of a KV group that share a tile. splits: keys are split, which matters for few rows only.
    """
    dim = class_of(problem.heads.v)
    if problem.kv_format is not None:
        rows = problem.group * problem.seq_q
        few = FLOAT8_FEW.get(-(-rows // COLUMN_ROWS), {})
        if dim in few:
            return few[dim]
        return (FLOAT8_DECODE if problem.seq_q <= WARPGROUP_ROWS // pack else FLOAT8)[dim]
    if problem.shared_kv and dim in SHARED:
        return SHARED[dim]
    if problem.seq_q <= WARPGROUP_ROWS // pack:
        return (SPLIT if splits else DECODE)[dim]
    if is_small(problem, target, pack):
        return SMALL[dim]
    found = [table[dim] for table in tables(problem, target, pack) if dim in table]
    return next((shape for shape in found if fits_pages(shape.tile_n, problem.page_size)), found[-1])


def fits_pages(keys: int, page_size: int | None) -> bool:
    """A tile of so many keys consists of whole pages, or a page of whole tiles, so that a tile takes few loads."""
    return not page_size or keys % page_size == 0 or page_size % keys == 0


def tables(problem: AttentionProblem, target: Target, pack: int) -> Iterator[dict[int, Shape]]:
    """What suits many rows, best first."""
    left, right = problem.window_left, 0 if problem.causal else problem.window_right
    if problem.has_bias:
        yield BIASED
        yield BIASED_PAGES
    window = None if left is None or right is None else left + right
    if window is not None and window < NARROW_KEYS:
        yield NARROW
    elif larger_tiles(problem, pack, banded=right is not None):
        few_keys = problem.seq_k <= SHORT_KEYS or (
            class_of(problem.heads.v) == 64 and window is not None and window < SHORT_WINDOW
        )
        if few_keys and right is not None and fills(problem, target, pack, SHORT, SHORT_TILES):
            yield SHORT
        if fills(problem, target, pack, long_table(problem), LONG_TILES):
            yield long_table(problem)
    elif fewer_rounds(problem, target, pack):
        yield long_table(problem)
        yield SHORT
    yield own_table(problem)
    yield PREFILL


def own_table(problem: AttentionProblem) -> dict[int, Shape]:
    """The shape of OWN, if there is one, under the tuned size of V's."""
    own = OWN.get((problem.heads.qk, problem.heads.v))
    return {} if own is None else {class_of(problem.heads.v): own}


def long_table(problem: AttentionProblem) -> dict[int, Shape]:
    """OWN or LONG; neither where Q and K are larger than V: their smaller tiles would be read too often."""
    wider = problem.heads.qk > class_of(problem.heads.v)
    return own_table(problem) or ({} if wider else LONG)


def fewer_rounds(problem: AttentionProblem, target: Target, pack: int) -> bool:
    """Whether tiles of three consumers leave fewer SMs idle in the last round. Asked where there are far more keys than
    queries, so that all tiles take about as long."""
    if problem.packed_q or problem.seq_k < ALIKE_KEYS * problem.seq_q:
        return False
    two, three = (tile_count(problem, pack, consumers) / target.sm_count for consumers in (2, 3))
    return math.ceil(two) / two > IDLE_MORE * math.ceil(three) / three


def larger_tiles(problem: AttentionProblem, pack: int, banded: bool) -> bool:
    """Rows are many enough for tiles of three consumers."""
    rows = problem.seq_q * pack
    return rows * pack >= LONG_CAUSAL if banded else rows >= LONG_ROWS


def fills(problem: AttentionProblem, target: Target, pack: int, table: dict[int, Shape], tiles: int) -> bool:
    """A table's shape makes at least so many tiles for each SM, most of them full."""
    shape = table.get(class_of(problem.heads.v))
    if shape is None or (problem.packed_q and problem.least_q < DENSE_SHARE * problem.batch * problem.seq_q):
        return False
    return tile_count(problem, pack, shape.consumers) >= tiles * target.sm_count


def is_small(problem: AttentionProblem, target: Target, pack: int) -> bool:
    """SMALL suits it."""
    dim = class_of(problem.heads.v)
    if dim not in SMALL or problem.has_bias or problem.shared_kv or problem.seq_k > SMALL_KEYS:
        return False
    return tile_count(problem, pack, SMALL[dim].consumers) <= SMALL_TILES * target.sm_count


def tile_count(problem: AttentionProblem, pack: int, consumers: int) -> int:
    """Query tiles of a launch; of packed queries as many as there may be, but for a factor of two."""
    queries, heads = consumers * (WARPGROUP_ROWS // pack), problem.heads_kv * -(-problem.group // pack)
    of_batch = problem.batch * -(-problem.seq_q // queries)
    if problem.packed_q:
        of_batch = min(of_batch, problem.batch + problem.least_q // queries)
    return of_batch * heads
