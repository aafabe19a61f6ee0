"""The grouped GEMM's memory budgets and barrier table, for ``print_budgets.py``."""

from __future__ import annotations

from warpspec.common.hardware import MAX_SMEM_PER_CTA
from warpspec.common.memory import budget_rows
from warpspec.moe.sm90 import plan as sm90_plan
from warpspec.moe.sm90.config import StreamConfig
from warpspec.moe.sm100.config import ACCUMULATORS, PAIR, SINGLE, SWAPPED, GemmConfig
from warpspec.moe.sm100.plan import SHAPES

from .generated_tables import table

EXAMPLES = (PAIR, SWAPPED[8])  # shown region by region


def overview_rows():
    """(tiles, tokens, features, output, stages, SMEM, TMEM columns): a row for every shape and size of result."""
    for shape in SHAPES:
        for epilogue, output in (("linear", "bf16"), ("swiglu", "bf16"), ("swiglu", "nvfp4")):
            c = GemmConfig(shape, epilogue, output)
            yield (
                shape,
                shape.tokens,
                shape.features,
                f"{epilogue}, {output}",
                c.stages,
                c.smem_bytes,
                f"{c.tmem_columns} of {c.tmem_allocation}",
            )


def memory_rows(config: GemmConfig):
    """(SMEM rows, TMEM rows) of one kernel."""
    smem = [*budget_rows(config.smem_regions), ("a CTA", config.smem_bytes, f"of {MAX_SMEM_PER_CTA}")]
    rows = "tokens" if not config.swapped else "features"
    columns = "features" if not config.swapped else "tokens"
    tmem = []
    for index in range(ACCUMULATORS):
        first = index * config.accumulator_columns
        shared = f", {config.overlap} of them in both" if config.overlap else ""
        holds = f"[128 {rows}, {config.tile_n} {columns}] fp32{shared}"
        tmem.append((f"accumulator {index}", _columns(first, first + config.tile_n), holds))
    weights = config.tmem_weight_scales
    tmem += [
        ("token scales", _columns(config.tmem_token_scales, weights), "of a stage: 4 columns for each MMA"),
        (
            "weight scales",
            _columns(weights, config.tmem_columns),
            f"{4 * config.weight_atoms} columns for each MMA",
        ),
        ("a CTA", config.tmem_allocation, "allocated"),
    ]
    return smem, tmem


def _columns(first: int, end: int) -> str:
    return f"{first}-{end - 1} ({end - first})"


def streamed_rows():
    """(tiles, threads, registers of a consumer's and a load warp's thread, SMEM): every shape of sm_90a's plan."""
    for shape in (sm90_plan.FEWEST, sm90_plan.FEW, *sm90_plan.SHAPES.values()):
        c = StreamConfig(shape)
        registers = "{}, {}".format(*c.role_registers) if c.role_registers else "shared out evenly"
        yield str(shape), c.threads, registers, c.smem_bytes


def streamed_markdown() -> list[str]:
    """The grouped GEMM of sm_90a."""
    config = StreamConfig(sm90_plan.FEW)
    barriers = [
        (f"`{b.name}`", b.stages, b.arrivals, b.producer, b.consumer, b.meaning) for b in config.barriers
    ]
    rows_head = ("barrier", "stages", "arrivals", "who arrives", "who waits", "a complete phase means")
    smem = [
        *budget_rows(config.smem_regions),
        ("a CTA", config.smem_bytes, f"of {MAX_SMEM_PER_CTA}"),
    ]
    return [
        "sm_90a (features x tokens):",
        table(("tiles", "threads", "registers", "SMEM a CTA"), streamed_rows()),
        f"{sm90_plan.FEW}:",
        table(("shared memory", "bytes", "holds"), smem),
        table(rows_head, barriers),
    ]


def markdown() -> str:
    """All of it."""
    head = ("tiles", "tokens", "features", "result", "stages", "SMEM a CTA", "TMEM columns")
    parts = [table(head, overview_rows())]
    for shape in EXAMPLES:
        config = GemmConfig(shape)
        smem, tmem = memory_rows(config)
        parts += [
            f"{shape}, linear:",
            table(("shared memory", "bytes", "holds"), smem),
            table(("tensor memory", "columns", "holds"), tmem),
        ]
    for shape in (SINGLE, PAIR):
        rows = [
            (f"`{b.name}`", b.stages, b.arrivals, b.producer, b.consumer, b.meaning)
            for b in GemmConfig(shape).barriers
        ]
        rows_head = ("barrier", "stages", "arrivals", "who arrives", "who waits", "a complete phase means")
        parts += [f"{shape}:", table(rows_head, rows)]
    parts += streamed_markdown()
    return "\n\n".join(parts)
