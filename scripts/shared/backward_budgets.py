"""The memory budgets and barrier tables of attention's backward kernels, for ``print_budgets.py``."""

from __future__ import annotations

from warpspec.common.hardware import MAX_SMEM_PER_CTA, REGISTERS_PER_SM, TMEM_COLUMNS
from warpspec.fmha.backward import sm90, sm100
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.features import Mask
from warpspec.fmha.logits import LogitOptions
from warpspec.fmha.problem import AttentionProblem

from .generated_tables import table

HEAD_DIMS = (64, 128, 256, 512)


def configs(module) -> list:
    """An architecture's kernels of causal bf16 problems, one for each D."""
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
    forwards = [AttentionProblem(**sizes, **kind, head_dim=d, return_lse=True) for d in HEAD_DIMS]
    return [module.BackwardConfig.of(BackwardProblem(forward, ("q", "k", "v"))) for forward in forwards]


def kernel(name: str, found: list, extra: list[tuple]) -> str:
    """Tables of an architecture's kernels. extra: rows about what only it has."""
    regions = zip(*(config.smem_regions for config in found), strict=True)
    rows = [(row[0].title or row[0].name, *(each.bytes for each in row), row[1].holds) for row in regions]
    rows.append(("a CTA", *(config.smem_bytes for config in found), f"of {MAX_SMEM_PER_CTA}"))
    smem = table(("shared memory, bytes", *(f"D {d}" for d in HEAD_DIMS), "holds, at D 128"), [*rows, *extra])
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
    return "\n\n".join([kernel("sm_90a", configs(sm90), [hopper]), kernel("sm_100a", found, [columns])])
