"""Prints the memory budgets and barrier tables of the kernels, as they stand in ARCHITECTURE.md.

    python scripts/print_budgets.py                 print them
    python scripts/print_budgets.py --check FILE    exit 1 unless FILE holds them between its markers
    python scripts/print_budgets.py --write FILE    put them there

The markers are the lines BEGIN and END below. Everything comes from the configuration the kernel is compiled
from.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from warpspec.common.tmem import TMEM_COLUMNS
from warpspec.fmha.sm100 import config as fmha

BEGIN = "<!-- scripts/print_budgets.py: begin -->"
END = "<!-- scripts/print_budgets.py: end -->"


def table(header: tuple[str, ...], rows) -> str:
    """A Markdown table."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def attention_budgets(config: fmha.AttentionConfig) -> str:
    """Markdown: shared memory, tensor memory, registers and barriers of one attention kernel."""
    smem = table(
        ("shared memory", "bytes", "holds"),
        [
            *config.smem_regions,
            ("a CTA", config.smem_bytes, f"of {fmha.SMEM_PER_CTA}"),
            (
                f"{config.ctas_per_sm} CTAs an SM",
                config.ctas_per_sm * (config.smem_bytes + fmha.SMEM_RESERVED_PER_CTA),
                f"of {fmha.SMEM_PER_SM}, with {fmha.SMEM_RESERVED_PER_CTA} a CTA for the system",
            ),
        ],
    )
    tmem = table(
        ("tensor memory", "columns", "holds"),
        [
            ("S", _columns(config.tmem_s, config.tmem_p), f"[{fmha.TILE_M}, {fmha.TILE_N}] fp32"),
            ("P", _columns(config.tmem_p, config.tmem_o), f"[{fmha.TILE_M}, {fmha.TILE_N}] 16 bits"),
            ("O", _columns(config.tmem_o, config.tmem_columns), f"[{fmha.TILE_M}, {fmha.HEAD_DIM}] fp32"),
            ("a CTA", config.tmem_allocation, "allocated"),
            (
                f"{config.ctas_per_sm} CTAs an SM",
                config.ctas_per_sm * config.tmem_allocation,
                f"of {TMEM_COLUMNS}",
            ),
        ],
    )
    registers = table(
        ("registers", "a thread", "threads"),
        [
            ("at launch", config.launch_registers, config.threads),
            ("softmax warps 0-3", config.softmax_registers, config.softmax_threads),
            ("MMA and load warps 4-5", config.other_registers, config.threads - config.softmax_threads),
            ("a CTA", f"{config.role_registers} in all", f"of {config.register_pool}"),
        ],
    )
    barriers = table(
        ("barrier", "stages", "arrivals", "who arrives", "who waits", "a complete phase means"),
        [(f"`{b.name}`", b.stages, b.arrivals, b.producer, b.consumer, b.meaning) for b in config.barriers],
    )
    return "\n\n".join((smem, tmem, registers, barriers))


def _columns(first: int, end: int) -> str:
    return f"{first}-{end - 1} ({end - first})"


def budgets() -> str:
    """Everything this script generates."""
    return attention_budgets(fmha.AttentionConfig("bfloat16"))


def replaced(text: str, generated: str) -> str:
    """``text`` with what lies between its markers replaced. SystemExit where it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"no lines {BEGIN!r} and {END!r} in the file")
    return f"{before}{BEGIN}\n\n{generated}\n\n{END}{after}"


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--check", type=Path, metavar="FILE")
    target.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.write:
        options.write.write_text(replaced(options.write.read_text(), budgets()))
    elif options.check:
        text = options.check.read_text()
        if replaced(text, budgets()) != text:
            print(f"{options.check} is stale: run scripts/print_budgets.py --write {options.check}")
            return 1
    else:
        print(budgets())
    return 0


if __name__ == "__main__":
    sys.exit(main())
