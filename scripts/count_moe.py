"""Counted bytes and clocks of the NVFP4 grouped GEMMs of a MoE layer, for each choice of tiles.

    python scripts/count_moe.py                 print the tables
    python scripts/count_moe.py --write FILE    put them between FILE's markers
    python scripts/count_moe.py --check FILE    exit 1 unless they stand there

Nothing is timed. The counts are those of ``warpspec.moe.sm100.plan``, by which the kernel chooses its tiles; a test
holds them against what the simulator counts. Rows pick their experts at random.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from shared.generated_tables import Section, main, table

from warpspec.common.hardware import GPUS
from warpspec.moe.sm100.config import PAIR, SINGLE, SWAPPED, GemmConfig, Shape
from warpspec.moe.sm100.plan import SHAPES, choose_shape, estimate

SM_COUNT = GPUS["sm_100a"].sm_count
BEGIN = "<!-- scripts/count_moe.py: begin -->"
END = "<!-- scripts/count_moe.py: end -->"

TOKENS = (1, 8, 64, 512, 4096)
MEGA, KILO = 1e6, 1e3
STEPS = 64  # K tiles over which a tile's clocks are taken
FEATURES = 256  # rows of weights that the first table's clocks are given for


@dataclass(frozen=True)
class Layer:
    """A model's experts. k: choices of a token."""

    name: str
    experts: int
    k: int
    hidden: int
    width: int

    def gemms(self) -> tuple[tuple[int, int], ...]:
        """(features, K) of both GEMMs."""
        return ((2 * self.width, self.hidden), (self.hidden, self.width))


LAYERS = (
    Layer("gpt-oss-20b", 32, 4, 2880, 2880),
    Layer("gpt-oss-120b", 128, 4, 2880, 2880),
    Layer("DeepSeek-V4 Flash", 256, 6, 4096, 2048),
    Layer("DeepSeek-V4 Pro", 384, 6, 7168, 3072),
)


def tiles_table() -> str:
    """Clocks of an MMA step (64 of K) of each shape, in one CTA, and what 256 features of a tile of tokens take."""
    rows = []
    for shape in SHAPES:
        config = GemmConfig(shape)
        found = estimate(shape, shape.tokens, 1, shape.features, 64 * STEPS, SM_COUNT)
        per_step = [value / STEPS for value in (found.mma, found.smem, found.l2)]
        whole = found.tile / STEPS * shape.ctas * FEATURES / shape.features
        rows.append(
            (
                shape,
                shape.tokens,
                shape.features,
                config.stages,
                *(f"{value:.0f}" for value in per_step),
                f"{whole:.0f}",
                f"{whole / shape.tokens:.1f}",
            )
        )
    head = (
        "tiles",
        "tokens",
        "features",
        "stages",
        "MMA",
        "SMEM",
        "L2",
        "SM clocks a tile of tokens",
        "a token",
    )
    return table(head, rows)


def best_swapped(layer: Layer, rows: int, features: int, k: int) -> Shape:
    """The swapped tiles with the fewest clocks."""

    def cost(shape):
        found = estimate(shape, rows, layer.experts, features, k, SM_COUNT)
        return found.clocks, found.busy

    return min(SWAPPED.values(), key=cost)


def choice_cells(layer: Layer, tokens: int, shapes) -> tuple[str, str, str]:
    """(TMA megabytes, thousand MMA clocks of an SM, thousand clocks and what bounds them) of both GEMMs together.

    shapes: of each GEMM.
    """
    loaded = mma = clocks = 0.0
    bounds = []
    for shape, (features, k) in zip(shapes, layer.gemms(), strict=True):
        found = estimate(shape, tokens * layer.k, layer.experts, features, k, SM_COUNT)
        loaded += found.loaded_bytes
        mma += found.tiles * found.mma * shape.ctas / SM_COUNT
        clocks += found.clocks
        bounds.append(found.bound)
    bound = bounds[0] if bounds[0] == bounds[1] else " / ".join(bounds)
    return f"{loaded / MEGA:.0f}", f"{mma / KILO:.1f}", f"{clocks / KILO:.1f} {bound}"


def layers_table() -> str:
    """Both GEMMs of each layer, for each number of tokens and choice of tiles."""
    rows = []
    for layer in LAYERS:
        for tokens in TOKENS:
            routed = tokens * layer.k
            swapped = [best_swapped(layer, routed, *gemm) for gemm in layer.gemms()]
            chosen = [choose_shape(routed, layer.experts, *gemm, SM_COUNT) for gemm in layer.gemms()]
            names = dict.fromkeys(str(shape) for shape in chosen)
            cells = [
                cell
                for shapes in ((SINGLE, SINGLE), (PAIR, PAIR), swapped)
                for cell in choice_cells(layer, tokens, shapes)
            ]
            widths = dict.fromkeys(str(shape.tile_n) for shape in swapped)
            cells[-3] = f"{cells[-3]} (N {', '.join(widths)})"
            rows.append((layer.name, tokens, f"{routed / layer.experts:.2g}", *cells, ", ".join(names)))
    head = ["model", "T", "rows an expert"]
    for name in ("single", "pair", "swapped"):
        head += [f"{name}: MB", "MMA", "clocks"]
    return table((*head, "chosen"), rows)


def sections() -> list[Section]:
    """Everything this script generates."""
    return [(BEGIN, END, "\n\n".join((tiles_table(), layers_table())))]


if __name__ == "__main__":
    sys.exit(main(__doc__, "scripts/count_moe.py", sections))
