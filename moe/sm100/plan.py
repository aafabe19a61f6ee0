"""Choose tiles and number of CTAs from shapes alone; only the device knows how rows are distributed over experts.

``estimate`` counts how long a launch keeps each part of the device busy if every row picks its expert at random.
``choose_shape`` takes the tiles with the fewest clocks. The rates below are not measured. scripts/predict_moe.py holds
the choice against the timing model's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from warpspec.common import memory
from warpspec.moe.sm100.config import (
    K_TILE,
    MMA_K,
    MMA_ROWS,
    PAIR,
    SINGLE,
    SWAPPED,
    GemmConfig,
    Shape,
)

SHAPES = (*SWAPPED.values(), SINGLE, PAIR)

# Rates per clock and SM, from the instruction set and data sheets. One assumption goes beyond what is published:
# operand reads of tcgen05.mma, tcgen05.cp and TMA's writes share the bandwidth of shared memory.
MMA_FLOPS = 32768  # 4 bit, 128 rows
SMEM_BYTES = 128
L2_BYTES = 64
HBM_BYTES = 4096  # bytes per clock of the whole device: 8 TB/s at 1.95 GHz

PACKED_BYTES = 0.5 + 1 / 16  # bytes of a value with its share of a scale
OUTPUT_BYTES = 2  # bf16
STEP_BYTES = MMA_K // 2  # bytes along K that an MMA reads of every row
DEVIATIONS = 8  # row counts further than this many standard deviations from the mean are ignored


@dataclass(frozen=True)
class Estimate:
    """Estimated clocks of one launch.

    mma, smem, l2: clocks that a tile keeps the tensor cores, shared memory and L2 busy, in one CTA. tiles: expected
    number of tiles. groups: number of CTAs or pairs that share the tiles. hbm: clocks that the whole launch keeps
    memory busy. loaded_bytes: expected bytes that all CTAs load by TMA.
    """

    mma: float
    smem: float
    l2: float
    tiles: float
    groups: int
    hbm: float
    loaded_bytes: float

    @property
    def tile(self) -> float:
        """Clocks of a tile's loop along K."""
        return max(self.mma, self.smem, self.l2)

    @property
    def busy(self) -> float:
        """Clocks of the CTA with the most tiles."""
        return math.ceil(self.tiles / self.groups) * self.tile

    @property
    def clocks(self) -> float:
        """Lower bound of the launch."""
        return max(self.busy, self.hbm)

    @property
    def bound(self) -> str:
        """The resource that limits the launch."""
        if self.hbm >= self.busy:
            return "HBM"
        return max(("MMA", "SMEM", "L2"), key=lambda unit: getattr(self, unit.lower()))


@lru_cache(maxsize=4096)
def choose_shape(rows: int, experts: int, features: int, k: int, sm_count: int) -> Shape:
    """Tiles for ``rows`` rows over ``experts`` experts of [features, k]: fewest clocks, ties to the least busy CTA."""

    def cost(shape):
        found = estimate(shape, rows, experts, features, k, sm_count)
        return found.clocks, found.busy

    return min(SHAPES, key=cost)


def estimate(shape: Shape, rows: int, experts: int, features: int, k: int, sm_count: int) -> Estimate:
    """Estimated clocks of a launch with these tiles. features: N of each expert's weights."""
    config = GemmConfig(shape)
    steps, k_tiles = -(-k // MMA_K), -(-k // K_TILE)
    scales = config.scale_bytes
    operand_rows = config.token_rows + config.weight_rows
    read = steps * operand_rows * STEP_BYTES + k_tiles * scales
    loaded = k_tiles * config.stage_bytes
    token_tiles, active = expected_tiles(rows, experts, shape.tokens)
    tiles = token_tiles * -(-features // shape.features)
    hbm = active * features * k * PACKED_BYTES + rows * (k * PACKED_BYTES + features * OUTPUT_BYTES)
    return Estimate(
        mma=steps * MMA_K * MMA_ROWS * shape.tile_n * 2 / MMA_FLOPS,
        smem=(read + loaded) / SMEM_BYTES,
        l2=loaded / L2_BYTES,
        tiles=tiles,
        groups=group_count(shape, rows, experts, features, sm_count),
        hbm=hbm / HBM_BYTES,
        loaded_bytes=tiles * loaded * shape.ctas,
    )


@lru_cache(maxsize=4096)
def expected_tiles(rows: int, experts: int, tokens: int) -> tuple[float, float]:
    """Expected (tiles of ``tokens`` rows, experts with any row), if every row picks its expert at random."""
    share = 1 / experts
    deviation = math.sqrt(rows * share * (1 - share))
    first = max(0, math.floor(rows * share - DEVIATIONS * deviation - 1))
    last = min(rows, math.ceil(rows * share + DEVIATIONS * deviation + DEVIATIONS))
    tiles = active = 0.0
    for count in range(first, last + 1):
        chance = binomial(rows, count, share)
        tiles += chance * -(-count // tokens)
        active += chance * (count > 0)
    return experts * tiles, experts * active


def binomial(trials: int, hits: int, share: float) -> float:
    """Chance of ``hits`` hits in ``trials`` trials, each with the chance ``share``."""
    if share == 1.0:
        return float(hits == trials)
    ways = math.lgamma(trials + 1) - math.lgamma(hits + 1) - math.lgamma(trials - hits + 1)
    return math.exp(ways + hits * math.log(share) + (trials - hits) * math.log1p(-share))


def tile_bound(shape: Shape, rows: int, experts: int, features: int) -> int:
    """The most tiles that ``rows`` rows of ``experts`` experts can make; each expert begins a new tile of tokens."""
    return (rows // shape.tokens + min(experts, rows)) * -(-features // shape.features)


def group_count(shape: Shape, rows: int, experts: int, features: int, sm_count: int) -> int:
    """CTAs (or pairs) to launch: one an SM, but no more than there may be tiles."""
    return max(1, min(sm_count // shape.ctas, tile_bound(shape, rows, experts, features)))


assert K_TILE == 2 * memory.ROW_BYTES
