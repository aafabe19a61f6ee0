"""Tiles of attention kernels: the query rows of an M tile, and the loads and layout of a KV tile's keys."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from warpspec.common.errors import UnsupportedProblem
from warpspec.fmha.block_mask import WORD_BITS
from warpspec.fmha.heads import BLOCK, HeadSizes
from warpspec.fmha.problem import AttentionProblem

ELEMENT_BYTES = 2  # bf16 and fp16
# Keys: a page holds a multiple of the first up to the second, or a multiple of the second, the most of a KV tile. So
# the boxes that a tile is loaded in begin where the 128-byte swizzle does, every 8 rows, and are few.
PAGE_STEP, PAGE_LARGE = 16, 128


@dataclass(frozen=True)
class TileRows:
    """Query rows of an M tile: ``groups`` row groups of ``group_size`` rows each.

    pack: query heads of one KV group that share a tile; row r of a group is head r % pack of query r // pack.
    most: rows of a group that may be a query's; None: all. heads_apart: whether each row group has a KV head of its
    own, and all have the same queries; otherwise row groups have one KV head and queries of their own.
    """

    pack: int
    groups: int
    group_size: int
    most: int | None = None
    heads_apart: bool = False

    @property
    def kv_heads(self) -> int:
        """KV heads of an M tile."""
        return self.groups if self.heads_apart else 1

    @property
    def group_queries(self) -> int:
        """Queries of a row group; its rows past pack * group_queries are idle."""
        return (self.most or self.group_size) // self.pack

    @property
    def busy_rows(self) -> int:
        """Rows of a row group that belong to a query."""
        return self.group_queries * self.pack

    @property
    def queries(self) -> int:
        """Queries of an M tile."""
        return self.groups // self.kv_heads * self.group_queries

    @property
    def count(self) -> int:
        """Rows of an M tile."""
        return self.groups * self.group_size


@dataclass(frozen=True)
class KvTile:
    """Keys of a KV tile in shared memory, and the boxes that TMA loads it in.

    keys: keys of a tile. shared: one tile serves as K and V. page_size: keys of a page, 0 if they are not paged. bits:
    bits of a number in shared memory. per_element: numbers per loaded element, two for NVFP4. span: elements of a row
    in one box; a box holds at most ``box_spans`` spans (None: a row's). swizzled: whether TMA swizzles them. box_keys:
    keys of which a box holds a divisor; 0: any number.
    """

    keys: int
    heads: HeadSizes
    shared: bool = False
    page_size: int = 0
    bits: int = 16
    per_element: int = 1
    span: int = BLOCK
    box_spans: int | None = None
    swizzled: bool = True
    box_keys: int = 0

    @property
    def k_bytes(self) -> int:
        """Bytes of a tile of K in shared memory."""
        return self.keys * self.heads.qk_room * self.bits // 8

    @property
    def v_bytes(self) -> int:
        """Bytes of a tile of V in shared memory."""
        return self.keys * self.heads.v_room * self.bits // 8

    def bytes_of(self, ring: str) -> int:
        """Shared memory of a tile of a ring's, "k" or "v"."""
        return self.v_bytes if ring == "v" else self.k_bytes

    @property
    def v_stage_bytes(self) -> int:
        """Bytes from one stage of V to the next: K's stage if V is K."""
        return self.k_bytes if self.shared else self.v_bytes

    @property
    def own_v_bytes(self) -> int:
        """Bytes that a tile of V takes besides K's: none if V is K."""
        return 0 if self.shared else self.v_bytes

    @property
    def page_keys(self) -> int:
        """Keys of a box, which are contiguous in memory wherever the tile begins: all of the tile's, a page's, or, if
        neither of tile and page is a multiple of the other or boxes are small, those of a part."""
        return math.gcd(self.page_size, self.keys, self.box_keys)

    @property
    def pages(self) -> int:
        """Pages, or parts of pages or of the tile, that the keys of a tile come from."""
        return self.keys // self.page_keys

    def spans(self, ring: str = "k") -> int:
        """Spans of a row of a ring's."""
        numbers = self.heads.v if ring == "v" else self.heads.qk
        return -(-numbers // (self.span * self.per_element))

    def box(self, ring: str = "k") -> tuple[int, int, int]:
        """(D, KEY, SPAN) of a load of a ring's: a whole tile, or the keys of (a part of) one page in one span of D."""
        spans = self.spans(ring) if self.pages == 1 and self.heads.whole else 1
        return (self.span, self.page_keys, min(spans, self.box_spans or spans))

    def boxes(self, ring: str = "k") -> tuple[int, int]:
        """(SPAN, PAGE): loads of one tile of a ring's. Shared memory has a tile's pages side by side in each span of D,
        so a box of several spans would leave no room between them for the other pages."""
        return (self.spans(ring) // self.box(ring)[2], self.pages)

    def of_codes(self, fmt) -> KvTile:
        """This tile as loaded in FP8 or NVFP4 for conversion: a page's rows as in memory. fmt: ``features.Format``."""
        per_element = 8 // fmt.kv_bits
        return replace(
            self, per_element=per_element, span=self.heads.qk // per_element, box_spans=1, swizzled=False
        )

    def place_of(self, row, span, source) -> tuple:
        """Coordinates of a box of K or V, in boxes. row: row of the keys. source: batch row or page."""
        return (row, span, source) if self.heads.whole else (span, row, source)


def takes_pages(page_size: int) -> bool:
    """Whether kernels read pages of this many keys."""
    return page_size > 0 and page_size % (PAGE_STEP if page_size < PAGE_LARGE else PAGE_LARGE) == 0


def check_page_size(kernel: str, page_size: int) -> None:
    """Raise UnsupportedProblem, saying what is allowed, for pages that kernels do not read. 0: there are none."""
    if page_size == 0 or takes_pages(page_size):
        return
    advice = ""
    if page_size < PAGE_STEP:
        advice = f"; set the page size (block size) of the engine's KV cache to {PAGE_STEP} or more"
    raise UnsupportedProblem(
        f"{kernel} attention: page_size={page_size} is not supported: pages must hold a multiple of {PAGE_STEP} keys "
        f"up to {PAGE_LARGE}, or a multiple of {PAGE_LARGE}{advice}"
    )


def fits_blocks(problem: AttentionProblem, queries: int, keys: int) -> bool:
    """Whether an M tile of this many queries and a KV tile of this many keys lie in one block each, where there are
    blocks."""
    if not problem.mask.has_blocks:
        return True
    block_queries, block_keys = problem.mask.block_size
    one = block_queries % queries == 0 or (problem.seq_q <= block_queries and not problem.requests.packed_q)
    return one and divides(keys, block_keys)


def divides(keys: int, block_keys: int) -> bool:
    """Whether KV tiles of this many keys divide a block, and begin at words of its patterns."""
    return block_keys % keys == 0 and keys % WORD_BITS == 0


@functools.lru_cache(maxsize=4096)
def choose_pack(group: int, seq_q: int, tile_m: int, block_queries: int = 0) -> int:
    """Choose the heads of a KV group that share an M tile: the fewest tiles, then the most heads.

    block_queries: queries of a block, no two of which share a tile; 0: there are no blocks.

    A tile with more heads has fewer queries: under a causal or window mask its rows then see more similar keys, so at
    equal tile count more heads never cost and often save KV tiles.
    """

    def tiles(pack):
        return -(-group // pack) * -(-seq_q // (tile_m // pack))

    packs = [
        pack
        for pack in range(1, min(group, tile_m) + 1)
        if pack == 1 or not block_queries or block_queries % (tile_m // pack) == 0
    ]
    return min(packs, key=lambda pack: (tiles(pack), -pack))


def choose_packs(problem: AttentionProblem, tile_m: int) -> tuple[int, ...]:
    """Numbers of heads of a KV group that may share an M tile: the best for the longest request, and, with packed
    queries, the best for a request of one query."""
    group, queries, packed_q = problem.group, 0, problem.requests.packed_q
    if problem.mask.has_blocks:
        several = packed_q or problem.seq_q > problem.mask.block_size[0]
        group = 1 if problem.block_heads else group
        queries = problem.mask.block_size[0] if several else 0
    most = choose_pack(group, problem.seq_q, tile_m, queries)
    few = choose_pack(group, 1, tile_m, queries) if packed_q else most
    return (most,) if few == most else (most, few)
