"""The memory budgets and barrier tables of Swap-FFN's kernels, for ``print_budgets.py``."""

from __future__ import annotations

from warpspec.common.hardware import MAX_SMEM_PER_CTA, REGISTERS_PER_SM
from warpspec.swap.config import PHASES, THREADS, SwapConfig, Tiles

from .generated_tables import table

D_MODEL = 1024


def configs() -> list[SwapConfig]:
    """A kernel of every phase; those with products for both architectures."""
    found = []
    for phase in PHASES:
        found.append(SwapConfig("sm90", phase, D_MODEL))
        if phase in ("up", "down"):
            found.append(SwapConfig("sm100", phase, D_MODEL, tiles=Tiles(cluster_m=1, cluster_n=1)))
    return found


def overview() -> str:
    rows = []
    for c in configs():
        registers = "-"
        if c.multiplies and c.arch == "sm90":
            registers = (
                f"{c.consumer_registers}, {c.producer_registers} ({c.role_registers} of {REGISTERS_PER_SM})"
            )
        rows.append(
            (
                c.phase,
                ("sm_90a" if c.arch == "sm90" else "sm_100a") if c.multiplies else "both",
                c.threads,
                f"{c.smem_bytes} of {MAX_SMEM_PER_CTA}",
                f"{c.accumulator_columns}" if c.multiplies and c.arch == "sm100" else "-",
                registers,
            )
        )
    head = (
        *("kernel", "for", "threads", "SMEM a CTA, with alignment", "TMEM columns"),
        "registers a thread: consumer, producer",
    )
    return table(head, rows)


def regions(config: SwapConfig) -> str:
    return table(("shared memory", "bytes", "holds"), [r for r in config.smem_regions if r[1]])


def barriers(config: SwapConfig) -> str:
    rows = [(f"`{b.name}`", b.stages, b.arrivals, b.producer, b.consumer, b.meaning) for b in config.barriers]
    return table(
        ("barrier", "stages", "arrivals", "who arrives", "who waits", "a complete phase means"), rows
    )


def markdown() -> str:
    """All of it."""
    fused = SwapConfig("sm90", "fused", D_MODEL)
    other = SwapConfig("sm100", "up", D_MODEL, tiles=Tiles(cluster_m=1, cluster_n=1))
    tiles = fused.tiles
    return "\n\n".join(
        (
            overview(),
            f"The fused kernel, tiles of 128 rows and {tiles.up_n} (up) or {tiles.down_n} (down) columns, clusters of "
            f"{tiles.cluster}; {THREADS} threads are consumers:",
            regions(fused),
            barriers(fused),
            "A product on sm_100a:",
            barriers(other),
        )
    )
