"""Counted clocks of the sm100 attention kernel's main loop, per 128 queries x 128 keys, by unit of the SM.

    python scripts/count_clocks.py                          every tile shape there is, as a Markdown table
    python scripts/count_clocks.py --head-dim 64 128        only these head dimensions
    python scripts/count_clocks.py --polynomial-every 8/3   with another share of exponentials on FMA units
    python scripts/count_clocks.py --write FILE             put the table between FILE's markers
    python scripts/count_clocks.py --check FILE             exit 1 unless it stands there

Nothing is timed. The kernel runs in the simulator on two numbers of KV tiles; the difference in executed
instructions and bytes, divided by the tiles, is what one tile costs each unit at the rates below. The unit
with the most clocks binds: a bound that no schedule beats, and latencies come on top.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections import Counter
from fractions import Fraction
from unittest import mock

import torch
from shared import generated_tables

from warpspec import sim
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import SIMULATED
from warpspec.fmha import attention
from warpspec.fmha.heads import CLASSES as HEAD_DIMS
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.sm100.config import AttentionConfig
from warpspec.fmha.sm100.shapes import SHAPES, SHARED_SHAPES

BEGIN = "<!-- scripts/count_clocks.py: begin -->"
END = "<!-- scripts/count_clocks.py: end -->"

# Per clock and SM of compute capability 10.0. Assumed beyond what is published: a packed FMA takes its lanes
# one clock, like a single one (if it took two, FMA would nearly double); tcgen05.ld and st move 4 bytes a
# lane; TMA's writes, stores and operand reads of tcgen05.mma share the bandwidth of shared memory.
MMA_FLOPS = 8192  # bf16 and fp16, 128 rows
MMA_FULL_ROWS = 128  # 64 rows: half the rate
SPECIAL_LANES = 16
FMA_LANES = 128
ALU_LANES = 64
ISSUED_WARPS = 4
SMEM_BYTES = 128
TMEM_BYTES = 4 * 128
L2_BYTES = 64

WARP_LANES = 32
ELEMENT_BYTES = 2
TILE = 128 * 128  # scores that the clocks are given for
SHORT, LONG = 2, 4  # KV tiles of the two runs

SPECIAL = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh")
ARITHMETIC = ("fma", "mul", "add", "sub")
LOGIC = ("min", "max", "setp", "selp", "cvt", "shl", "shr", "shf", "prmt", "lop3")
BITWISE = ("and", "or", "xor", "not", "neg", "abs")
# ptxas makes register renaming of a move, and one three-input maximum of two.
COST = {"mov": Fraction(0), "max.f32": Fraction(1, 2)}

UNITS = ("MMA", "exponentials", "FMA", "ALU", "issue", "SMEM", "TMEM", "L2")


@dataclasses.dataclass(frozen=True)
class TileCost:
    """What one KV tile of one M tile costs, all warps together. opcodes: warp instructions by opcode."""

    config: AttentionConfig
    opcodes: dict[str, Fraction]
    mma_flops: Fraction
    tma_bytes: Fraction

    def instructions(self, *kinds: str) -> Fraction:
        """Warp instructions whose unit is one of ``kinds`` ("special", "fma", "alu", "other")."""
        return sum((count * cost(op) for op, count in self.opcodes.items() if unit(op) in kinds), Fraction(0))

    @property
    def smem_bytes(self) -> int:
        """Read by tcgen05.mma, written by TMA and, where P lies there, by the softmax warps."""
        config = self.config
        rows, keys, depth = config.tile_m, config.tile_n, config.head_dim
        elements = (rows + keys) * depth  # QK: Q and K
        elements += keys * depth  # PV: V
        written = self.tma_bytes + stored_bytes(self.opcodes)
        if getattr(config, "p_in_smem", False):
            # P is read again for every column tile of O.
            elements += rows * keys * -(-depth // config.pv_instruction[1])
        return elements * ELEMENT_BYTES + written

    @property
    def clocks(self) -> dict[str, float]:
        """Clocks by unit, for TILE scores."""
        config = self.config
        rate = MMA_FLOPS if config.tile_m >= MMA_FULL_ROWS else MMA_FLOPS // 2
        clocks = {
            "MMA": self.mma_flops / rate,
            "exponentials": self.instructions("special") * WARP_LANES / SPECIAL_LANES,
            "FMA": self.instructions("fma") * WARP_LANES / FMA_LANES,
            "ALU": self.instructions("alu") * WARP_LANES / ALU_LANES,
            "issue": self.instructions("special", "fma", "alu", "other") / ISSUED_WARPS,
            "SMEM": Fraction(self.smem_bytes) / SMEM_BYTES,
            "TMEM": tmem_bytes(self.opcodes) / TMEM_BYTES,
            "L2": self.tma_bytes / L2_BYTES,
        }
        scale = Fraction(TILE, config.tile_m * config.tile_n)
        return {name: float(value * scale) for name, value in clocks.items()}


def unit(opcode: str) -> str:
    """Which unit executes it: "special", "fma", "alu", or "other" (control, memory, MMA: issue only)."""
    name, *modifiers = opcode.split(".")
    if name in SPECIAL:
        return "special"
    if name in ARITHMETIC:
        return "fma" if modifiers[-1].startswith("f32") else "alu"
    return "alu" if name in (*LOGIC, *BITWISE) else "other"


def cost(opcode: str) -> Fraction:
    """Machine instructions that one PTX instruction becomes, roughly."""
    return COST.get(opcode, COST.get(opcode.split(".")[0], Fraction(1)))


def tmem_bytes(opcodes) -> Fraction:
    """Moved by tcgen05.ld and tcgen05.st of shape LANESxBITSb.xTIMES."""
    total = Fraction(0)
    for opcode, count in opcodes.items():
        match = re.match(r"tcgen05\.(?:ld|st)\..*\.(\d+)x(\d+)b\.x(\d+)\b", opcode)
        if match:
            lanes, bits, times = map(int, match.groups())
            total += count * lanes * bits // 8 * times
    return total


def stored_bytes(opcodes) -> Fraction:
    """Written by st.shared."""
    total = Fraction(0)
    for opcode, count in opcodes.items():
        match = re.match(r"st\.(?:\w+\.)*?shared(?:::cta)?\.(?:v(\d)\.)?[a-z](\d+)$", opcode)
        if match:
            total += count * WARP_LANES * int(match[1] or 1) * int(match[2]) // 8
    return total


def measure(head_dim: int, shape, *, shared_kv: bool = False, dtype=torch.bfloat16) -> TileCost:
    """Run the kernel of a tile shape on SHORT and on LONG whole KV tiles, one M tile, nothing masked.

    Raises UnsupportedProblem for what the kernel does not do yet.
    """
    generator = torch.Generator().manual_seed(0)

    def tensor(length):
        return torch.randn(1, length, 1, head_dim, generator=generator).to(dtype)

    reports = []
    table = SHARED_SHAPES if shared_kv else SHAPES
    with mock.patch.dict(table, {head_dim: (shape,)}):
        for tiles in (SHORT, LONG):
            q, k = tensor(shape.tile_m), tensor(tiles * shape.tile_n)
            v = None if shared_kv else tensor(tiles * shape.tile_n)
            config = AttentionConfig.of(AttentionProblem.of(q, k, v, num_splits=1), SIMULATED["sm_100a"])
            attention(q, k, v, num_splits=1, backend="sim")
            (launch,) = sim.last_report().launches
            assert launch.grid == (1, 1, 1)
            reports.append(launch)
    short, long = reports
    difference = Counter(long.opcodes)
    difference.subtract(short.opcodes)
    tiles = LONG - SHORT
    return TileCost(
        config,
        {opcode: Fraction(count, tiles) for opcode, count in difference.items() if count},
        Fraction(long.mma_flops - short.mma_flops, tiles),
        Fraction(long.tma_bytes_loaded - short.tma_bytes_loaded, tiles),
    )


def rows(head_dims, polynomial_every=None):
    """(table row, reason why there is none) by shape, in order."""
    for head_dim in head_dims:
        for name, shapes in (("K, V", SHAPES), ("shared", SHARED_SHAPES)):
            for shape in shapes.get(head_dim, ()):
                if polynomial_every is not None:
                    shape = dataclasses.replace(shape, polynomial_every=polynomial_every)
                label = (head_dim, name, f"{shape.tile_m} x {shape.tile_n}", shape.p_in, share(shape))
                try:
                    clocks = measure(head_dim, shape, shared_kv=name == "shared").clocks
                except (UnsupportedProblem, AssertionError) as error:
                    yield (*label, *("",) * len(UNITS), f"not supported: {error}")
                    continue
                binding = max(UNITS, key=clocks.get)
                yield (*label, *(round(clocks[unit]) for unit in UNITS), f"{binding}, {clocks[binding]:.0f}")
            if head_dim not in shapes:
                yield (head_dim, name, *("",) * (3 + len(UNITS)), "not supported")


def share(shape) -> str:
    """Share of exponentials that the FMA units take."""
    every = getattr(shape, "polynomial_every", 0)
    return str(1 / Fraction(every)) if every else "0"


def markdown(head_dims=HEAD_DIMS, polynomial_every=None) -> str:
    header = ("D", "keys", "rows x keys", "P in", "by polynomial", *UNITS, "binds")
    return generated_tables.table(header, rows(head_dims, polynomial_every))


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEAD_DIMS, default=HEAD_DIMS, metavar="D")
    parser.add_argument(
        "--polynomial-every", type=Fraction, metavar="PAIRS", help="one of so many pairs; 0: none"
    )
    generated_tables.add_file_options(parser)
    options = parser.parse_args(arguments)
    generated = markdown(options.head_dim, options.polynomial_every)
    return generated_tables.deliver(options, "scripts/count_clocks.py", [(BEGIN, END, generated)])


if __name__ == "__main__":
    sys.exit(main())
