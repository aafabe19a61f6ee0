"""The line: all M tiles of a launch one after another, each as long as its work, cut into chunks of equal length.

If only the device knows the lengths of keys or queries, this balances the work (``device.line``). CTAs take chunks in
rounds: chunk number round * ctas + cta. This module is arithmetic that kernels and tests share: ints, or Int32 and
Int64 in a kernel.

The line holds the requests in order, each request's heads, each head's query tiles, and each query tile's KV tiles. A
query tile's length is the number of key positions that it visits, without rounding, so that sums over many have a
closed form, plus a constant for its start and end. Cuts need not know how many KV tiles a length stands for: a cut
through a tile divides its KV tiles in the same proportion (``cut``), or what is left of it behind that constant.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_OVERHEAD = 2  # length of a query tile's start and end, in KV tiles
PAIR_OVERHEAD = 4  # the same with paired consumers (``sm90.pair``)
FEW_ROWS_OVERHEAD, FEW_HEADS = 2, 8  # the same of tiles of one query with at most so many heads
FEW_MEANS = 16  # heads of tiles of one query up to which bf16 pieces leave sums, not means (``sm90.add_up``)
FEW_MEAN_ROWS = 32  # rows of a tile up to which splits leave sums (``sm90.calls.splits_as_means``)
STATES = 2  # most that a CTA leaves: of the first piece of one tile, and of a further one of another
FEW_PIECES = 3  # most of a tile that the CTA with the last one adds up alone (``sm90.add_up.adds_alone``)
PAIR_WORDS = 2  # of a CTA whose consumers are paired, at which the pieces of a tile meet
LEAST_TILES = 4  # length of the shortest chunk, in KV tiles
ROUND_TILES = 20  # query tiles of a chunk where there are several rounds
MOST_ROUNDS = 23  # the ends of so many chunks fit shared memory
EDGE_TILES = 1  # KV tiles: a cut this close to an end of a query tile moves there, since a piece costs more
FAR = 1 << 30  # positions that count as no end
AHEAD_REQUESTS = 512  # most whose lengths are read before the launch before has ended (``device.cut_ahead``)
KEPT_WORDS = 16  # words in global memory of a chunk that is found once for many launches (``device.cuts``)
JOIN_WORDS = 8  # words of a join record, in global memory (``device.line.Join``)


def round_count(query_tiles, ctas, minimum=min, maximum=max):
    """Rounds of chunks for so many query tiles, which leave ROUND_TILES tiles to a chunk. Chunks of one round then
    share keys in L2, and chunks of whole tiles balance."""
    return maximum(minimum(query_tiles // (ctas * ROUND_TILES), MOST_ROUNDS), 1)


def clamped_sum(count, first, step: int, limit, wide=int, minimum=min, maximum=max):
    """Sum of first + step i, at least 0 and at most limit, over 0 <= i < count, as a ``wide`` integer; first and limit
    within FAR of 0."""
    below = minimum((maximum(-first, 0) + step - 1) // step, count)
    rising = maximum(minimum((maximum(limit - first, 0) + step - 1) // step, count), below)
    number = rising - below
    last_two = wide(first) * 2 + wide(below + rising - 1) * step  # first and last of the increasing terms
    return wide(number) * last_two // 2 + wide(count - rising) * wide(limit)


@dataclass(frozen=True)
class Stretch:
    """The query tiles of one head of a request.

    tiles: number of tiles. queries: queries of a tile. overhead: length of a tile without keys. first_end: one past the
    last key position that the first tile sees, None if all tiles see all; first_start: the first such position, None if
    it is 0. Both move up by a tile's queries from tile to tile. limit: positions of the request's keys. arithmetic:
    ``wide``, ``minimum`` and ``maximum`` of ``clamped_sum``.
    """

    tiles: int
    queries: int
    overhead: int
    first_end: int | None
    first_start: int | None
    limit: int
    arithmetic: dict

    def upto(self, count):
        """Length of the first ``count`` tiles, wide."""
        wide = self.arithmetic["wide"]

        def edges(first):
            return clamped_sum(count, first, self.queries, self.limit, **self.arithmetic)

        if self.first_end is None:
            total = wide(count) * wide(self.limit + self.overhead)
        else:
            total = wide(count) * wide(self.overhead) + edges(self.first_end)
        return total if self.first_start is None else total - edges(self.first_start)


def stretch(
    start,
    length,
    tiles,
    *,
    queries,
    tile_n,
    bounds: dict,
    overhead=TILE_OVERHEAD,
    wide=int,
    minimum=min,
    maximum=max,
) -> Stretch:
    """``Stretch`` of a request whose query 0 stands at ``start`` and that has so many keys.

    bounds: the compile-time arguments of ``mask.key_range``. overhead: length of a tile's start and end, in KV tiles.
    """
    causal, left, right, key_stride = (bounds[name] for name in ("causal", "left", "right", "key_stride"))
    start = maximum(minimum(start, FAR // 2), -FAR // 2)
    limit, first_end, first_start = minimum(length, FAR // key_stride) * key_stride, None, None
    if causal or right is not None:
        first_end = start + queries
        if right is not None:
            right = maximum(minimum(right, 0 if causal else FAR // 4), -FAR // 4)
            first_end = first_end + right
    if left is not None:
        first_start = start - maximum(minimum(left, FAR // 4), -FAR // 4)
        if first_end is not None:
            first_start = minimum(first_start, first_end)  # no tile has a negative length
    arithmetic = {"wide": wide, "minimum": minimum, "maximum": maximum}
    return Stretch(tiles, queries, overhead * tile_n * key_stride, first_end, first_start, limit, arithmetic)


def cut(
    fraction,
    kv_tiles,
    integer=int,
    minimum=min,
    select=lambda condition, yes, no: yes if condition else no,
    overhead=0,
):
    """How many of a query tile's KV tiles lie before a cut at this fraction of its length, a number from 0 to 1.
    overhead: KV tiles that the length in front of all KV tiles stands for; 0: the tile's start and end count as spread
    over all, and cuts close to its ends move there."""
    edge = 0 if overhead else EDGE_TILES
    before = integer(fraction * (kv_tiles + overhead) - overhead + 0.5)  # rounds to 0 from below
    before = minimum(before, kv_tiles)
    before = select(before <= edge, 0, before)
    return select(before >= kv_tiles - edge, kv_tiles, before)
