"""The choices of plans for the sm_90a attention kernel: tiles, heads per tile, ways to hand out work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from warpspec.fmha.config import Schedule, shares_lines
from warpspec.fmha.plan.choices import Choices
from warpspec.fmha.plan.cost import HOPPER, Constants, Way
from warpspec.fmha.plan.splits import FLOAT8_LOADS, WARP_LOADS, Loads
from warpspec.fmha.plan.work import Tiling
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.schedule import SORTED_REQUESTS, cuts_partitions
from warpspec.fmha.sm90.calls import has_unknown_lengths
from warpspec.fmha.sm90.config import AttentionConfig
from warpspec.fmha.sm90.shapes import Shape, shapes_apart, shapes_of
from warpspec.fmha.tiles import choose_packs, fits_blocks

SCHEDULES = {
    Way.PERSISTENT: Schedule.PERSISTENT,
    Way.SINGLE: Schedule.PERSISTENT,  # with as many CTAs as there are tiles
    Way.QUEUE: Schedule.QUEUE,
    Way.LINE: Schedule.LINE,
    Way.SPLIT: Schedule.PERSISTENT,
    Way.PARTITIONS: Schedule.QUEUE,
}


# What the constants below were fitted beside: those of 16-bit keys before the first KV tile, few SMs, and relief in a
# last round counted. So great a power makes the greater of two rates count.
EARLIER = replace(
    HOPPER, sm_bytes=47.02, load_power=32.0, reading=1.1, relief=0.0, first_tile=0.0, tile_row=0.1238, hidden=0.1635,
    alone=103.6, latency=697.9, serial_tile=106.8, round_=0.5864, greedy=0.2752, own_sm=0.75, partition_scan=2.0,
    partition_ends=0.6,
)  # fmt: skip
# Constants for warps that convert codes in registers, by bits of a number, with bytes counted as if numbers had 16
# bits. Fitted to lengths drawn at random and to full ones, in pages, on an H100; those of starts, ends and joins to 13
# calls of more than 100 MB on an H200 (docs/measurements.md).
WARP_COSTS = {
    bits: replace(
        EARLIER,
        memory=memory,
        reading=memory,
        sm_bytes=rate,
        l2_bytes=rate,
        line=1.0,
        tile=5000.0,
        single_ends=0.85,
        join=5.0,
    )
    for bits, memory, rate in ((8, HOPPER.memory * 16 / 8, 70), (4, HOPPER.memory * 16 / 4.5, 62))
}


# Constants for a converter, whose chain of instructions is what a step waits for, by bits of a number. Fitted to 31
# calls of 10 to 2330 queries a request, in every shape and dequantised first, on H200s: by them plans lose 1.6% on
# these calls (docs/measurements.md). EXPANDING: what dequantising first takes beside its bytes, in microseconds, by 36
# calls on H200s (docs/notebook/codes.md).
CONVERTER_COSTS = {
    bits: replace(
        EARLIER, serial_mma=mma, serial_key=8.0, serial_tile=50.0, tile=1400.0, hidden=0.3, team_12=1.28,
        team_31=1.05, launch=2.55,
    )
    for bits, mma in ((8, 1.58), (4, 1.94))
}  # fmt: skip
EXPANDING = 1.8
# NVFP4 at D 256, whose tiles have room for one stage of codes. By 10 drawn calls on an H200, on which plans then lose
# nothing, and lost 5% before.
WIDE_NVFP4_COSTS = replace(CONVERTER_COSTS[4], serial_mma=2.25)

# Constants for consumers that share rows, at head sizes above 256. Fitted to 298 calls of MLA on H200s, drawn with
# equal, nearly equal, evenly drawn, log-normal and few long lengths, each with several of its ways
# (docs/measurements.md). Then most of them were fitted to 196 calls of an H100 and an H200, from which lines had become
# cheaper since (docs/records/2026-11-28-mla-line.md).
LATENT_COSTS = replace(
    EARLIER, combine=0.129, combine_bytes=4.74e6, combine_round=0.989, tile=3160.0, tile_row=0.0198, sm_bytes=964.0,
    l2_bytes=1074.0, latency=528.0, alone=29.1, round_=2.67, mma=0.791, serial_mma=0.0324, launch=2.56, reading=1.12,
    memory=0.95, spread=1.7, chunk=3220.0, scan=3.18, scan_requests=0.641, add=0.577, add_more=0.169,
    add_rows=0.0209, line=1.02, uneven=2.51,
)  # fmt: skip


# Constants for consumers that share rows of K and V as two tensors, at D 512. Fitted to 617 timings of 124 problems on
# H200s, of which the choice loses 1.6% (2.9% by the constants above; docs/records/2026-11-28-attention-ways.md).
HALVES_COSTS = replace(
    HOPPER, mma=0.2596, mask=5.93, launch=2.462, round_=0.9968, sm_bytes=88.87, combine=0.7282, combine_bytes=2.818e6,
    partition_last=0.9293, spread=0.4443, uneven=2.5, partition_scan=2.0, partition_ends=0.6,
)  # fmt: skip


# Constants for keys wider than values (192 and 128), whose products take more of a step: three consumers lose
# nothing to two. By 3 problems of prefill on an H200, where three took 0.94 to 0.98 of the time of two. Those of
# partitions are by one call of few queries (docs/records/2026-11-28-attention-ways.md).
WIDE_KEY_COSTS = replace(HOPPER, team_31=1.005, partition_scan=4.0, partition_ends=1.0)


class HopperChoices(Choices):
    """``Choices`` of this kernel."""

    def constants(self, problem: AttentionProblem) -> Constants:
        """The constants for 16-bit keys and one consumer for a row, unless consumers share rows, keys are in codes, or
        keys are wider than values."""
        if shapes_of(problem)[0].column_groups > 1:
            return LATENT_COSTS if problem.format.shared_kv else HALVES_COSTS
        if problem.format.kv_format:
            if not self.converts(problem):
                return WARP_COSTS[problem.format.kv_bits]
            wide = problem.format.kv_bits == 4 and problem.head_dim > 128
            return WIDE_NVFP4_COSTS if wide else CONVERTER_COSTS[problem.format.kv_bits]
        return WIDE_KEY_COSTS if problem.heads.qk > problem.heads.v else self.costs

    def converts(self, problem: AttentionProblem) -> bool:
        return not shapes_of(problem)[0].row_tiles

    def decode_loads(self, problem: AttentionProblem) -> Loads | None:
        """The rates at which an SM loads keys in codes for few queries (``plan.splits``)."""
        if not problem.format.kv_format:
            return None
        return FLOAT8_LOADS if self.converts(problem) else WARP_LOADS[problem.format.kv_bits]

    def tilings(self, problem: AttentionProblem) -> Iterator[tuple[Shape, Tiling]]:
        """Shapes and their tilings, for each number of heads that may share a tile, except shapes in which some
        consumer would have no rows."""
        for shape in (*shapes_of(problem), *shapes_apart(problem)):
            groups, rows, apart = shape.groups // shape.kv_heads, shape.most_rows, shape.kv_heads
            packs = choose_packs(problem, rows)
            if shape.column_groups > 1 and self.pairs_cut(problem):  # a tile with all queries
                packs = dict.fromkeys((*packs, whole_requests(problem, rows)))
            for pack in packs:
                several = groups == 1 or problem.seq_q > (groups - 1) * (rows // pack)
                if several and fits_blocks(problem, groups * (rows // pack), shape.tile_n):
                    sizes = (groups, rows, shape.column_groups, shape.tile_n, shape.kv_stages // apart)
                    yield (
                        shape,
                        Tiling(*sizes, shape.ctas_per_sm * apart, pack, problem.requests.packed_q, apart),
                    )

    @staticmethod
    def pairs_cut(problem: AttentionProblem) -> bool:
        """Whether paired consumers' work may be cut by length: they load K and V, one tensor, of batch rows."""
        requests, mask = problem.requests, problem.mask
        packed = requests.packed_q or requests.packed_k
        others = mask.has_blocks or mask.has_ranges or problem.bias is not None
        return problem.format.shared_kv and not packed and not others

    def ways(self, problem: AttentionProblem, shape: Shape) -> tuple[Way, ...]:
        """The ways in which CTAs of a shape may get their work; the first suits any number of tiles."""
        if shape.column_groups > 1 and not has_unknown_lengths(problem):
            return Way.PERSISTENT, Way.SPLIT, *((Way.LINE,) if self.pairs_cut(problem) else ())
        if problem.bias:
            return Way.PERSISTENT, Way.SINGLE, Way.SPLIT
        if problem.mask.has_blocks:  # the lengths of lists are on the device
            return tuple(way for way in self.schedules if way not in (Way.LINE, Way.PARTITIONS))
        if shape.row_tiles:  # a queue was slower than whole tiles in order, by up to 12%
            return tuple(way for way in self.schedules if way not in (Way.QUEUE, Way.PARTITIONS))
        left_out = {Way.LINE} if shape.heads_apart or shape.column_groups > 1 else set()
        if not (cuts_partitions(problem) or short_partitions(problem)):
            left_out.add(Way.PARTITIONS)
        return tuple(way for way in self.schedules if way not in left_out)


def short_partitions(problem: AttentionProblem) -> bool:
    """Whether partitions of the keys may be worth their second launch although the host knows the lengths: neighbouring
    heads' begin together, so what they share of L2's lines is sent once."""
    return shares_lines(problem) and problem.batch <= SORTED_REQUESTS


def whole_requests(problem: AttentionProblem, rows: int) -> int:
    """Heads of a tile that has all queries of a request, if it can: a power of two, so that few kernels serve any
    number of queries."""
    most = max(1, min(problem.group, rows // max(problem.seq_q, 1)))
    return 1 << most.bit_length() - 1


CHOICES = HopperChoices(AttentionConfig, HOPPER, SCHEDULES, expanding=EXPANDING)
