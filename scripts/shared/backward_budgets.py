"""The memory budgets and barrier tables of attention's backward kernels, for ``print_budgets.py``."""

from __future__ import annotations

from warpspec.common.hardware import MAX_SMEM_PER_CTA, REGISTERS_PER_SM, TMEM_COLUMNS
from warpspec.fmha.backward import sm90, sm100
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.backward.sm90.apart import KeyConfig, QueryConfig
from warpspec.fmha.features import Mask
from warpspec.fmha.logits import LogitOptions
from warpspec.fmha.problem import AttentionProblem

from .generated_tables import table

HEAD_DIMS, APART_DIMS = (64, 128, 256, 512), (64, 128)


def problem(wanted: tuple[str, ...], dim: int) -> BackwardProblem:
    """The gradients of a causal bf16 problem."""
    import torch

    kind = {"device": torch.device("cpu"), "mask": Mask(causal=True)}
    sizes = {
        "batch": 1,
        "seq_q": 1024,
        "seq_k": 1024,
        "heads_q": 1,
        "heads_kv": 1,
        "logits": LogitOptions(1.0),
    }
    return BackwardProblem(AttentionProblem(**sizes, **kind, head_dim=dim, return_lse=True), wanted)


def configs(module) -> list:
    """An architecture's kernels of causal bf16 problems, one for each D."""
    return [module.BackwardConfig.of(problem(("q", "k", "v"), d)) for d in HEAD_DIMS]


def apart_configs() -> list[tuple[str, list]]:
    """The kernels of sm_90a that make dK and dV, and dQ, apart, for each D that has both: (what they make, kernels)."""
    problems = [problem(("k", "v"), d) for d in APART_DIMS]
    keys = [KeyConfig.of(each) for each in problems]
    return [("dK and dV", keys), ("dQ", [QueryConfig.beside(each) for each in keys])]


def kernel(name: str, found: list, extra: list[tuple], dims: tuple[int, ...] = HEAD_DIMS) -> str:
    """Tables of an architecture's kernels, for these D. extra: rows about what only it has."""
    regions = zip(*(config.smem_regions for config in found), strict=True)
    rows = [(row[0].title or row[0].name, *(each.bytes for each in row), row[1].holds) for row in regions]
    rows.append(("a CTA", *(config.smem_bytes for config in found), f"of {MAX_SMEM_PER_CTA}"))
    smem = table(("shared memory, bytes", *(f"D {d}" for d in dims), "holds, at D 128"), [*rows, *extra])
    barriers = [
        (f"`{b.name}`", b.stages, b.arrivals, b.producer, b.consumer, b.meaning) for b in found[1].barriers
    ]
    head = ("barrier", "stages", "arrivals", "who arrives", "who waits", "a complete phase means")
    tiles = ", ".join(f"{c.tile_m} by {c.tile_n}" for c in found)
    return f"{name}: tiles of queries by keys {tiles}.\n\n{smem}\n\nD 128:\n\n{table(head, barriers)}"


def markdown() -> str:
    hopper = (
        "registers of a thread",
        *(", ".join(map(str, sorted(set(c.registers), reverse=True))) for c in configs(sm90)),
        f"of {REGISTERS_PER_SM} of an SM; of a consumer's, of the load warpgroup's",
    )
    found = configs(sm100)
    columns = (
        "tensor memory, columns",
        *(c.tmem_columns for c in found),
        f"of {TMEM_COLUMNS}: S and dQ, dP, dV, dK",
    )
    apart = [kernel(f"sm_90a, {what} apart", found, [], APART_DIMS) for what, found in apart_configs()]
    return "\n\n".join(
        [kernel("sm_90a", configs(sm90), [hopper]), *apart, kernel("sm_100a", found, [columns])]
    )
