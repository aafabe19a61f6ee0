"""Configurations of attention kernels made from single switches, whatever part each belongs to."""

import dataclasses

from warpspec.fmha.features import Format, Mask, Output, RequestLayout
from warpspec.fmha.heads import HeadSizes
from warpspec.fmha.logits import LogitMap

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
    parts = {}
    for name, part in PARTS.items():
        own = [field.name for field in dataclasses.fields(part) if field.name in switches]
        parts[name] = part(**{field: switches.pop(field) for field in own}, **sizes.get(name, {}))
    return kind(heads=heads, **parts, **switches)
