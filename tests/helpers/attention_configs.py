"""Configurations of attention kernels, and problems, made from single switches, whatever part each belongs to."""

import dataclasses

import torch

from warpspec.fmha.config import Output
from warpspec.fmha.features import Format, Mask, RequestLayout
from warpspec.fmha.heads import HeadSizes
from warpspec.fmha.logits import LogitMap, LogitOptions
from warpspec.fmha.problem import AttentionProblem

PARTS = {"mask": Mask, "requests": RequestLayout, "logits": LogitMap, "output": Output, "format": Format}


def configured(kind: type, dtype: str = "bfloat16", head_dim: int = 64, **switches):
    """An architecture's ``AttentionConfig`` (kind) with the given switches of its parts. Other arguments are fields of
    the configuration itself."""
    heads = HeadSizes(head_dim, head_dim)
    sizes = {
        "format": {"dtype": dtype},
        "output": {
            "dtype": dtype if switches.get("normalize", True) else "float32",
            "size": heads.v_state if switches.get("splits") else heads.v,
        },
    }
    parts = {
        name: part(**own_switches(part, switches), **sizes.get(name, {})) for name, part in PARTS.items()
    }
    return kind(heads=heads, **parts, **switches)


def own_switches(part: type, switches: dict) -> dict:
    """The switches that are a part's, removed from all switches."""
    own = [field.name for field in dataclasses.fields(part) if field.name in switches]
    return {field: switches.pop(field) for field in own}


def made_problem(batch: int, seq_q: int, seq_k: int, heads_q: int, heads_kv: int, head_dim: int, **switches):
    """A problem of tensors on the meta device, in bf16, with the given switches of its parts. Other arguments are
    fields of the problem itself."""
    mask = own_switches(Mask, switches)
    for side in ("left", "right"):
        mask[f"has_{side}"] = switches.get(f"window_{side}") is not None
    parts = {"mask": Mask(**mask)}
    for name in ("requests", "format"):
        parts[name] = PARTS[name](**own_switches(PARTS[name], switches))
    own = {"device": torch.device("meta"), "logits": LogitOptions(0.1), **switches}
    return AttentionProblem(batch, seq_q, seq_k, heads_q, heads_kv, head_dim, **own, **parts)
