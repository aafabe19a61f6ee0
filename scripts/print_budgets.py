"""Prints the memory budgets and barrier tables of the kernels, as they stand in docs/budgets.md.

    python scripts/print_budgets.py                 print them
    python scripts/print_budgets.py --check FILE    exit 1 unless FILE holds them between its markers
    python scripts/print_budgets.py --write FILE    put them there

The markers are MARKERS below. Everything comes from the configuration the kernel is compiled from.
"""

from __future__ import annotations

import itertools
import sys

import torch
from shared import backward_budgets, moe_budgets, swap_budgets
from shared.generated_tables import Section, main, table

from warpspec.common.hardware import (
    MAX_SMEM_PER_CTA,
    REGISTERS_PER_SM,
    SMEM_PER_SM,
    SMEM_RESERVED_PER_CTA,
    TMEM_COLUMNS,
)
from warpspec.common.kv_formats import FORMATS
from warpspec.common.launch import SIMULATED
from warpspec.common.memory import budget_rows
from warpspec.fmha.config import Schedule, TileScheduler
from warpspec.fmha.features import Format
from warpspec.fmha.heads import BLOCK, HeadSizes
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.sm90 import config as hopper_config
from warpspec.fmha.sm90 import shapes as hopper_shapes
from warpspec.fmha.sm100 import config as fmha
from warpspec.fmha.sm100 import shapes as blackwell_shapes
from warpspec.fmha.tiles import ELEMENT_BYTES, KvTile
from warpspec.latent.gathered.config import CLUSTER, E4M3_ROWS, GatheredConfig, Sm100GatheredConfig
from warpspec.latent.gathered.raw.config import RawConfig
from warpspec.latent.gathered.transposed.config import TransposedConfig

MARKERS = (  # begin and end: attention for sm_100a and sm_90a, the grouped GEMM, Swap-FFN, gradients
    ("<!-- scripts/print_budgets.py: begin -->", "<!-- scripts/print_budgets.py: end -->"),
    ("<!-- scripts/print_budgets.py, sm_90a: begin -->", "<!-- scripts/print_budgets.py, sm_90a: end -->"),
    (
        "<!-- scripts/print_budgets.py, grouped GEMM: begin -->",
        "<!-- scripts/print_budgets.py, grouped GEMM: end -->",
    ),
    (
        "<!-- scripts/print_budgets.py, Swap-FFN: begin -->",
        "<!-- scripts/print_budgets.py, Swap-FFN: end -->",
    ),
    (
        "<!-- scripts/print_budgets.py, attention's gradients: begin -->",
        "<!-- scripts/print_budgets.py, attention's gradients: end -->",
    ),
)


BARRIER_COLUMNS = ("barrier", "stages", "arrivals", "who arrives", "who waits", "a complete phase means")


def attention_budgets(config: fmha.AttentionConfig, barriers: bool = True) -> str:
    """Markdown: shared memory, tensor memory, registers and, if asked for, barriers of one attention kernel."""
    an_sm = config.ctas_per_sm * (config.smem_bytes + SMEM_RESERVED_PER_CTA)
    smem = [
        *budget_rows(config.smem_regions),
        ("a CTA", config.smem_bytes, f"of {MAX_SMEM_PER_CTA}"),
        (
            f"{config.ctas_per_sm} CTAs an SM",
            an_sm,
            f"of {SMEM_PER_SM}, with {SMEM_RESERVED_PER_CTA} a CTA for the system",
        ),
    ]
    tables = [
        table(("shared memory", "bytes", "holds"), smem),
        table(("tensor memory", "columns", "holds"), tensor_memory(config)),
    ]
    if config.moves_registers:  # a CTA with an SM to itself has registers enough without setmaxnreg
        tables.append(table(("registers", "a thread", "threads"), registers(config)))
    if barriers:
        tables.append(table(BARRIER_COLUMNS, barrier_rows(config)))
    return "\n\n".join(tables)


def tensor_memory(config: fmha.AttentionConfig) -> list[tuple]:
    """Rows of the table of tensor memory."""
    p = (
        "P",
        _columns(config.tmem_p, config.tmem_p + config.p_columns),
        f"[{config.tile_m}, {config.tile_n}] 16 bits",
    )
    halves = ", half in lanes 0-15, half in lanes 16-31 of each quarter" if config.column_groups > 1 else ""
    o = f"[{config.tile_m}, {config.heads.qk}] fp32{halves}"
    return [
        ("S", _columns(config.tmem_s, config.tmem_p), f"[{config.tile_m}, {config.tile_n}] fp32"),
        *([] if config.p_in_smem else [p]),
        ("O", _columns(config.tmem_o, config.tmem_columns), o),
        ("a CTA", config.tmem_allocation, "allocated"),
        (f"{config.ctas_per_sm} CTAs an SM", config.ctas_per_sm * config.tmem_allocation, f"of {TMEM_COLUMNS}"),
    ]  # fmt: skip


def registers(config: fmha.AttentionConfig) -> list[tuple]:
    """Rows of the table of registers."""
    others = "MMA and load warps 4-5, converter 8-11" if config.converts else "MMA and load warps 4-5"
    return [
        ("at launch", config.launch_registers, config.threads),
        ("softmax warps 0-3", config.softmax_registers, config.softmax_threads),
        (others, config.other_registers, config.threads - config.softmax_threads),
        ("a CTA", f"{config.role_registers} in all", f"of {config.register_pool}"),
    ]


def barrier_rows(config) -> list[tuple]:
    """Rows of the table of barriers of a configuration."""
    return [(f"`{b.name}`", b.stages, b.arrivals, b.producer, b.consumer, b.meaning) for b in config.barriers]


def _columns(first: int, end: int) -> str:
    return f"{first}-{end - 1} ({end - first})"


def of_shape(
    kind: type, head_dim: int, shape, v_dim: int = 0, shared_kv: bool = False, kv_format=None, **options
):
    """The configuration (kind: an architecture's ``AttentionConfig``) for bf16 queries that has such tiles."""
    heads, numbers = HeadSizes(head_dim, v_dim or head_dim), Format(kv_format=kv_format, shared_kv=shared_kv)
    return kind(heads=heads, format=numbers, shape=shape, **options)


def config_of(shape, head_dim: int, **options) -> fmha.AttentionConfig:
    """The kernel for sm_100a of a shape, for bf16 queries."""
    if options.get("kv_format"):
        registers = blackwell_shapes.FLOAT8_REGISTERS[shape.ctas_per_sm]
        options |= dict(zip(("softmax_registers", "other_registers"), registers, strict=True))
    return of_shape(fmha.AttentionConfig, head_dim, shape, **options)


def overview() -> str:
    """Markdown: every shape of every head dimension in a row; the first of a head dimension is its default."""
    rows = []
    tables = [
        ("two", blackwell_shapes.SHAPES, {}),
        ("one", blackwell_shapes.SHARED_SHAPES, {"shared_kv": True}),
    ]
    for title, fmt in (("two, FP8", "e4m3"), ("two, NVFP4", "nvfp4")):
        quantized = blackwell_shapes.QUANTIZED_SHAPES[FORMATS[fmt].bits]
        shapes = {dim: (shape,) for dim, shape in quantized.items()}
        tables.append((title, shapes, {"kv_format": fmt}))
    for tensors, shapes, options in tables:
        for head_dim, choices in shapes.items():
            for shape in choices:
                c = config_of(shape, head_dim, **options)
                smem_left = SMEM_PER_SM // c.ctas_per_sm - SMEM_RESERVED_PER_CTA - c.smem_bytes
                stage = len(c.format.rings) * (c.codes.tile_bytes if c.converts else c.kv.k_bytes)
                tmem_left = TMEM_COLUMNS // c.ctas_per_sm - c.tmem_columns
                limit = (
                    "SMEM: no further stage fits" if smem_left < stage else "TMEM" if tmem_left < 64 else "-"
                )
                rows.append(
                    (
                        head_dim,
                        tensors,
                        f"{c.tile_m} x {c.tile_n}",
                        shape.p_in.upper(),
                        f"{c.kv_stages}, {shape.raw_stages} of codes" if c.converts else c.kv_stages,
                        c.ctas_per_sm,
                        c.smem_bytes,
                        f"{c.tmem_columns} of {c.tmem_allocation}",
                        limit,
                    )
                )
    head = (
        "D",
        "K, V tensors",
        "tile",
        "P in",
        "KV stages",
        "CTAs an SM",
        "SMEM a CTA",
        "TMEM columns",
        "limit",
    )
    return table(head, rows)


def with_bias() -> str:
    """Markdown: what a streamed bias leaves of every default shape."""
    rows = []
    for shared, shapes in ((False, blackwell_shapes.SHAPES), (True, blackwell_shapes.SHARED_SHAPES)):
        for head_dim, dtype in itertools.product(shapes, (torch.bfloat16, torch.float32)):
            c = fmha.AttentionConfig.of(_problem(head_dim, shared, dtype), SIMULATED["sm_100a"])
            rows.append(
                (
                    head_dim,
                    "one" if shared else "two",
                    c.logits.bias.dtype,
                    f"{c.tile_m} x {c.tile_n}",
                    c.kv_stages,
                    f"{c.bias_stages} x {c.bias_tile_bytes}",
                    c.ctas_per_sm,
                    c.smem_bytes,
                )
            )
    head = (
        "D",
        "K, V tensors",
        "bias",
        "tile",
        "KV stages",
        "bias stages, bytes",
        "CTAs an SM",
        "SMEM a CTA",
    )
    return table(head, rows)


def _problem(head_dim, shared, bias_dtype) -> AttentionProblem:
    """One head with a bias, queries and keys for whole tiles."""
    q, k = (torch.empty(1, 128, 1, head_dim, dtype=torch.bfloat16, device="meta") for _ in "qk")
    bias = torch.empty(1, 1, 128, 128, dtype=bias_dtype, device="meta")
    return AttentionProblem.of(q, k, None if shared else k, bias=bias, memory=False)


PAGE_SIZES = (16, 32, 64, 128)  # keys; those that engines use


def with_pages() -> str:
    """Markdown: TMA boxes of a K or V tile by page size; memory is that of the same shape without pages."""
    rows = []
    for head_dim, shapes in blackwell_shapes.SHAPES.items():
        cells = []
        for page_size in PAGE_SIZES:
            kv = KvTile(shapes[0].tile_n, HeadSizes(head_dim, head_dim), page_size=page_size)
            blocks, pages = kv.boxes()
            _, keys, depth = kv.box()
            cells.append(f"{blocks * pages} of [{keys}, {depth * BLOCK}]")
        rows.append((head_dim, f"{shapes[0].tile_n}", *cells))
    return table(("D", "keys of a tile", *(f"pages of {size}" for size in PAGE_SIZES)), rows)


def attention() -> str:
    """Everything generated of attention."""
    default = fmha.AttentionConfig()
    large = of_shape(fmha.AttentionConfig, 512, blackwell_shapes.SHARED_SHAPES[512][0], shared_kv=True)
    return "\n\n".join(
        (
            overview(),
            "D = 64:",
            attention_budgets(default),
            "D = 512, K and V one tensor (its barriers are those above without V's):",
            attention_budgets(large, barriers=False),
            "D = 512, rows gathered by slot (its `k_full` has four arrivals, of the producer warps):",
            attention_budgets(Sm100GatheredConfig.of(), barriers=False),
            "D = 128, K and V in FP8:",
            attention_budgets(config_of(blackwell_shapes.FLOAT8_SHAPES[128], 128, kv_format="e4m3")),
            "With a bias that TMA streams, of every row of a tile (heads that share it need one row a query, at most "
            "8 KB in decode); tensor memory is as above:",
            with_bias(),
            "With pages, memory is as above; TMA boxes of a K or V tile, [keys, elements of D]:",
            with_pages(),
        )
    )


def hopper_tiles(size: int, shared: bool = False) -> tuple:
    """Tile shapes of sm_90a for a head size of Q, K and V."""
    row = ELEMENT_BYTES * HeadSizes(size, size).qk_room
    return hopper_shapes.tiles(size, row, row if shared else 2 * row, shared, False)


def hopper() -> str:
    """Everything generated of attention for sm_90a: its shapes, and memory and barriers of some kernels."""
    head = (
        "D", "rows x keys", "consumers", "KV stages", "CTAs an SM", "SMEM a CTA",
        "registers a thread: consumer, producer", "registers of an SM",
    )  # fmt: skip
    found = [table(head, hopper_shape_rows())]
    for title, config in hopper_kernels():
        smem = [*budget_rows(config.smem_regions), ("a CTA", config.smem_bytes, f"of {config.smem_limit}")]
        found += [
            title,
            table(("shared memory", "bytes", "holds"), smem),
            table(BARRIER_COLUMNS, barrier_rows(config)),
        ]
    return "\n\n".join(found)


def hopper_shape_rows() -> list[tuple]:
    """Rows of the table of attention's tile shapes for sm_90a."""
    rows = []
    for columns, shared in [(columns, False) for columns in (64, 96, 128, 192, 256, 512)] + [(512, True)]:
        for shape in hopper_tiles(columns, shared):
            c = of_shape(hopper_config.AttentionConfig, columns, shape, shared_kv=shared)
            rows.append(
                (
                    f"{columns}, K and V one tensor" if shared else columns,
                    f"{c.rows.groups} x {hopper_shapes.WARPGROUP_ROWS} x {c.tile_n}",
                    f"{c.consumers} of {c.o_columns} columns",
                    c.kv_stages,
                    shape.ctas_per_sm,
                    f"{c.smem_bytes} of {c.smem_limit}",
                    f"{shape.consumer_registers}, {shape.producer_registers}",
                    f"{c.role_registers * shape.ctas_per_sm} of {REGISTERS_PER_SM}",
                )
            )
    return rows


def hopper_kernels() -> list[tuple]:
    """(title, configuration) of the sm_90a kernels whose memory and barriers are printed."""
    kind = hopper_config.AttentionConfig
    prefill = of_shape(
        kind, 128, hopper_shapes.TWO_CONSUMERS, scheduler=TileScheduler(Schedule.PERSISTENT, has_warp=True)
    )
    shared = of_shape(kind, 512, hopper_shapes.PAIR, shared_kv=True)
    ways = {"in_step": True, "adds_up": True, "cuts_ahead": True}
    line = TileScheduler(Schedule.LINE, has_warp=True, record_count=2, **ways)
    mla = of_shape(kind, 576, hopper_shapes.PAIR.scheduling, v_dim=512, shared_kv=True, scheduler=line)
    gathered = GatheredConfig.of()
    codes = {"row_format": E4M3_ROWS.name, "paged": True, "has_kv_scale": True}
    transposed = TransposedConfig.of(16, pack=16, **codes)
    raw = RawConfig.of(64, has_q_scale=True, **codes)
    of_gathered, of_mla, of_transposed = (
        f"{config.shape.consumer_registers}, {config.shape.producer_registers} registers a thread"
        for config in (gathered, mla, transposed)
    )
    return [
        ("D = 128, prefill:", prefill),
        ("D = 512, K and V one tensor:", shared),
        (
            f"D = 576, V the first 512 (MLA), work cut by length ({of_mla}: consumers, producers; what a scheduler "
            "warp takes is missing where requests stay whole):",
            mla,
        ),
        (f"D = 512, rows gathered by slot ({of_gathered}: consumers, producers):", gathered),
        (
            f"D = 512, rows gathered by slot, clusters of {CLUSTER} CTAs that share the keys:",
            GatheredConfig.of(cluster=CLUSTER),
        ),
        (
            f"MLA over e4m3 rows, {transposed.count} rows a task, keys as rows of the products ({of_transposed}: "
            "consumers, load warp):",
            transposed,
        ),
        (
            f"MLA over e4m3 rows with Q in e4m3, {raw.count} rows a task ({', '.join(map(str, raw.registers))} "
            "registers a thread: score warpgroup, value warpgroups, load warp):",
            raw,
        ),
    ]


def sections() -> list[Section]:
    """Everything this script generates."""
    generated = (
        attention(),
        hopper(),
        moe_budgets.markdown(),
        swap_budgets.markdown(),
        backward_budgets.markdown(),
    )
    return [(*markers, text) for markers, text in zip(MARKERS, generated, strict=True)]


if __name__ == "__main__":
    sys.exit(main(__doc__, "scripts/print_budgets.py", sections))
