"""Tile shapes of the sm_90a attention kernel: those that fit an SM and may be the best for some problem.

``fmha.plan`` chooses among them by a model of the time. docs/notebook/attention_sm90.md says which were dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from warpspec.common.hardware import (
    KIB,
    SMEM_PER_SM,
    SMEM_RESERVED_PER_CTA,
)
from warpspec.fmha.config import shares_lines
from warpspec.fmha.heads import MMA_K, rounded
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.tiles import ELEMENT_BYTES, choose_pack, divides

WARPGROUP_ROWS = 64  # query rows of a consumer warpgroup: M of wgmma
LEFT_OVER = 16  # one CTA of so many may be without work if heads are in step
WARP_ROWS = 16  # query rows of a tile whose KV tiles are shared among warps
COLUMN_ROWS = 8  # query rows that are the columns of one mma.sync: N


@dataclass(frozen=True)
class Shape:
    """consumers: warpgroups of 64 query rows each. tile_n: keys of a KV tile. kv_stages: KV tiles in flight.
    ctas_per_sm: CTAs for which registers and shared memory are budgeted. consumer_registers, producer_registers:
    registers of a thread, set by setmaxnreg. column_groups: consumers that share 64 rows, each with a column group of
    O's columns. raw_stages, converter_registers: if K and V are FP8, tiles that are loaded ahead of their conversion,
    and registers of a converter thread. row_tiles: if each warp of the consumers has KV tiles of its own (``by_warp``),
    query rows in units of 8; else 0. merge_stages: units of 8 rows for whose states there is room where they are
    merged; with two, warps go on while earlier states are still read. heads_apart: whether each consumer has a KV head
    of its own and KV tiles of it (``TileRows``): stages belong to the consumers in turn."""

    consumers: int
    tile_n: int
    kv_stages: int
    ctas_per_sm: int
    consumer_registers: int
    producer_registers: int
    column_groups: int = 1
    raw_stages: int = 0
    converter_registers: int = 0
    row_tiles: int = 0
    merge_stages: int = 1
    heads_apart: bool = False

    @property
    def kv_heads(self) -> int:
        """KV heads of a tile."""
        return self.consumers if self.heads_apart else 1

    @property
    def groups(self) -> int:
        """Groups of query rows: one for each consumer, or for those that share rows."""
        return 1 if self.row_tiles else self.consumers // self.column_groups

    @property
    def group_rows(self) -> int:
        """Query rows of a consumer, or of those that share them."""
        return WARP_ROWS if self.row_tiles else WARPGROUP_ROWS

    @property
    def most_rows(self) -> int:
        """Rows that may belong to a query: warps with KV tiles of their own have products for no more, however
        many queries a packed request turns out to have."""
        return self.row_tiles * COLUMN_ROWS if self.row_tiles else WARPGROUP_ROWS

    @property
    def scheduling(self) -> Shape:
        """The shape of paired consumers with registers for a scheduler warp: it needs 40, and they need 232."""
        return replace(self, consumer_registers=232, producer_registers=40)

    def steps_together(self, heads: int, sms: int) -> bool:
        """Whether CTAs take chunks of work that is cut by length for all heads of a request in step. Rows of codes are
        shorter than what memory sends at a time, the rest of which belongs to other heads. Paired consumers' heads of a
        KV head read the same keys, then all but the first from L2; one kernel serves any number of them. heads: tiles
        of heads of a request. sms: SMs; so few CTAs may be left over."""
        ctas = sms * self.ctas_per_sm
        together = heads > 1 if self.row_tiles else self.column_groups > 1
        return together and heads <= ctas and ctas % heads * LEFT_OVER <= ctas


# Registers of a consumer's and of the producer's thread, by consumers and CTAs an SM: as many as an SM has, or, for one
# consumer alone, as many as the roles need (with 24, the scheduler of a D 256 kernel spills 8 to 16 bytes).
REGISTERS = {(1, 3): (136, 24), (1, 2): (208, 48), (1, 1): (240, 40), (2, 1): (240, 24), (3, 1): (160, 32)}
# By the most columns of O: (consumers, CTAs an SM, most keys of a tile). By the model of ``fmha.plan.cost`` all others
# would save 0.3 percent in the mean of 1500 random problems, and 2 percent in 1 of 20.
TILES = {
    64: ((1, 3, 48), (1, 3, 64), (1, 3, 80), (1, 2, 128), (3, 1, 128)),
    96: ((1, 2, 64), (1, 2, 96), (2, 1, 128), (3, 1, 96)),
    128: ((1, 2, 64), (1, 2, 96), (2, 1, 128), (3, 1, 80)),
    192: ((1, 1, 80), (1, 1, 128), (2, 1, 96)),
    256: ((1, 1, 64), (1, 1, 80), (2, 1, 64), (2, 1, 80)),
}
BLOCK_TILES = {64: ((2, 1, 128),)}  # more, for lists of blocks, which three consumers do not fit
TILE_KEYS = (128, 96, 80, 64, 48)
# Registers of a consumer's thread that are neither S, P nor O: addresses, row statistics, temporaries of the softmax.
# A bias takes more, for its elements and their addresses.
OTHER_REGISTERS, BIAS_REGISTERS = 30, 68
MIN_STAGES = 2  # KV tiles in flight: one is loaded while the other is read
MOST_STAGES = 4
BESIDE_TILES = 1 * KIB  # shared memory of barriers and records
# Keys of a tile of consumers with a KV head each, and the fewest stages of a consumer that they are worth.
APART_TILES = ((64, 3), (32, 2))
TWO_CONSUMERS = Shape(2, 128, 2, 1, 240, 24)
# Two consumers with half of O's columns each: K and V two tensors, or one, of whose tiles twice as many keys have room.
HALVES = Shape(2, 32, 2, 1, 240, 24, column_groups=2)
PAIR = Shape(2, 64, 2, 1, 240, 24, column_groups=2)
# Fits any head size up to 256, with a bias too, and most blocks of keys.
NARROW = Shape(1, 32, 4, 1, 240, 24)
# K and V in codes. A warpgroup converts them, and needs registers; tiles are loaded ahead of it. Small tiles are
# converted sooner, which matters in short calls. FLOAT8_DECODE's shapes are a choice for more rows, too.
FLOAT8 = {
    64: (Shape(2, 128, 3, 1, 208, 24, raw_stages=3, converter_registers=72),),
    128: (
        Shape(2, 128, 2, 1, 208, 24, raw_stages=2, converter_registers=72),
        Shape(2, 64, 2, 1, 208, 24, raw_stages=2, converter_registers=72),
    ),
    256: (Shape(2, 64, 2, 1, 208, 24, raw_stages=1, converter_registers=72),),
}
# Three consumers share the work of converting a tile. Only 8-bit codes are converted fast enough in so few registers.
FLOAT8_THREE = {
    64: Shape(3, 96, 3, 1, 136, 24, raw_stages=3, converter_registers=48),
    128: Shape(3, 48, 3, 1, 136, 24, raw_stages=3, converter_registers=48),
}
FLOAT8_DECODE = {
    64: Shape(1, 64, 3, 2, 160, 24, raw_stages=4, converter_registers=56),
    128: Shape(1, 64, 2, 2, 160, 24, raw_stages=2, converter_registers=56),
    256: Shape(1, 64, 2, 1, 240, 24, raw_stages=2, converter_registers=120),
}
# So few rows that the warps of a consumer take KV tiles of their own: by how many times 8 rows.
FLOAT8_FEW = {
    1: {
        64: Shape(1, 64, 8, 2, 216, 40, row_tiles=1, merge_stages=2),
        128: Shape(1, 32, 8, 2, 208, 48, row_tiles=1, merge_stages=2),
        256: Shape(1, 32, 4, 2, 216, 40, row_tiles=1),
    },
    2: {
        64: Shape(1, 64, 8, 2, 216, 40, row_tiles=2, merge_stages=2),
        128: Shape(1, 64, 4, 2, 216, 40, row_tiles=2, merge_stages=2),
    },
}


# For 4 bits a number: more tiles in flight, for each has half of the bytes.
NVFP4_FEW = {
    1: {
        128: Shape(1, 32, 16, 2, 216, 40, row_tiles=1, merge_stages=2),
        256: Shape(1, 32, 4, 2, 216, 40, row_tiles=1, merge_stages=2),
    },
    2: {128: Shape(1, 32, 16, 2, 216, 40, row_tiles=2)},
}
# A CTA for each SM, where so few tiles of rows have long rows that their keys are split.
NVFP4_SPLIT = {128: Shape(3, 32, 24, 1, 160, 32, row_tiles=1, merge_stages=2)}
SPLIT_TILES, SPLIT_KEYS = 32, 4096  # most tiles of rows, least keys


def shapes_of(problem: AttentionProblem) -> tuple[Shape, ...]:
    """Tile shapes that a problem may get."""
    if problem.format.kv_format is not None:
        return float8_tiles(problem)
    heads = problem.heads
    key_bytes = (heads.qk_room if problem.format.shared_kv else heads.qk_room + heads.v_room) * ELEMENT_BYTES
    columns, row_bytes = rounded(heads.v, MMA_K), heads.qk_room * ELEMENT_BYTES
    block_keys = problem.mask.block_size[1] if problem.mask.has_blocks else 0
    return tiles(
        columns, row_bytes, key_bytes, problem.format.shared_kv, problem.bias is not None, block_keys
    )


@lru_cache(maxsize=64)
def apart_tiles(row_bytes: int, key_bytes: int) -> tuple[Shape, ...]:
    """Tile shapes whose consumers have a KV head each: the one with the most keys of which each has enough stages.
    row_bytes, key_bytes: as for ``tiles``."""
    consumers, ctas = 2, 1
    room = SMEM_PER_SM // ctas - SMEM_RESERVED_PER_CTA - BESIDE_TILES - consumers * WARPGROUP_ROWS * row_bytes
    for keys, least in APART_TILES:
        stages = room // (keys * key_bytes) // consumers
        if stages >= least:
            stages = min(stages, MOST_STAGES) * consumers
            return (Shape(consumers, keys, stages, ctas, *REGISTERS[consumers, ctas], heads_apart=True),)
    return ()


def shapes_apart(problem: AttentionProblem) -> tuple[Shape, ...]:
    """Further tile shapes, for few queries whose rows of keys are no whole lines of L2: the rows of neighbouring heads
    share lines, so a CTA that loads both heads' tiles reads them from memory once."""
    if not shares_lines(problem) or problem.heads_kv % 2 or problem.mask.has_tree:
        return ()
    heads = problem.heads
    return apart_tiles(heads.qk_room * ELEMENT_BYTES, (heads.qk_room + heads.v_room) * ELEMENT_BYTES)


def float8_tiles(problem: AttentionProblem) -> tuple[Shape, ...]:
    """The tile shapes for FP8 or NVFP4 keys: one for few rows of a KV head, by their number, and for more rows those
    that were timed (docs/measurements.md)."""
    dim, eights = problem.head_dim, -(-problem.group * problem.seq_q // COLUMN_ROWS)
    few = {} if problem.mask.has_blocks else FLOAT8_FEW.get(eights, {})
    if problem.format.kv_bits == 4 and not problem.mask.has_blocks:
        few = few | NVFP4_FEW.get(eights, {})
        requests = problem.requests
        known = not (requests.has_kv_lengths or requests.packed_k)
        if (
            eights == 1
            and known
            and problem.seq_k >= SPLIT_KEYS
            and problem.batch * problem.heads_kv <= SPLIT_TILES
        ):
            few = few | NVFP4_SPLIT
    if dim in few and problem.bias is None:
        return (few[dim],)
    pack = choose_pack(problem.group, problem.seq_q, WARPGROUP_ROWS)
    if problem.seq_q <= WARPGROUP_ROWS // pack:
        return (FLOAT8_DECODE[dim],)
    return for_many_rows(dim, problem.format.kv_bits)


def for_many_rows(dim: int, bits: float) -> tuple[Shape, ...]:
    """The tile shapes for codes of this many bits and more rows of a KV head than a consumer has."""
    three = (FLOAT8_THREE[dim],) if bits == 8 and dim in FLOAT8_THREE else ()
    return (*FLOAT8[dim], *three, FLOAT8_DECODE[dim])


@lru_cache(maxsize=64)
def tiles(
    columns: int, row_bytes: int, key_bytes: int, one_tensor: bool, bias: bool, block_keys: int = 0
) -> tuple[Shape, ...]:
    """Tile shapes whose S, P and O fit a consumer's registers, and of which at least MIN_STAGES stages fit an SM.

    columns: columns of O. row_bytes: bytes of a row of Q. key_bytes: bytes of K and V of a key. one_tensor: V is K.
    block_keys: keys of a listed block, or 0. Where no tile for these columns, of one group of rows, divides a block,
    the shapes are those for more columns, or NARROW.
    """
    if columns > max(TILES):
        return (PAIR if one_tensor else HALVES,)
    for wanted in (
        TILES[most] + BLOCK_TILES.get(most, ()) * bool(block_keys) for most in TILES if columns <= most
    ):
        found = (fitting(*tile, columns, row_bytes, key_bytes, bias) for tile in wanted)
        found = tuple(dict.fromkeys(shape for shape in found if shape is not None))
        if not block_keys or any(one.groups == 1 and divides(one.tile_n, block_keys) for one in found):
            return found
    return (NARROW,)


def fitting(
    consumers: int, ctas: int, most_keys: int, columns: int, row_bytes: int, key_bytes: int, bias: bool
) -> Shape | None:
    """The tile shape of so many consumers and CTAs with the most keys that fit; None if too few do."""
    beside = SMEM_RESERVED_PER_CTA + BESIDE_TILES + consumers * WARPGROUP_ROWS * row_bytes
    room = SMEM_PER_SM // ctas - beside
    for keys in TILE_KEYS:
        stages = room // (keys * key_bytes)
        operands = columns // 2 + keys // 2 + keys // 4  # fp32 O and S, 16-bit P
        others = BIAS_REGISTERS if bias else OTHER_REGISTERS
        if keys <= most_keys and stages >= MIN_STAGES and operands + others <= REGISTERS[consumers, ctas][0]:
            return Shape(consumers, keys, min(stages, MOST_STAGES), ctas, *REGISTERS[consumers, ctas])
    return None
