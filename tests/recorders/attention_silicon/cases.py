"""Calls of the sm_90a attention kernels whose results on a GPU are recorded: inputs from seeds, small enough for the
simulator. A new case is one more line; ``record_attention.py`` then records it."""

from __future__ import annotations

import hashlib
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from helpers.attention_cases import Case, arguments
from helpers.simulate import choosing

from warpspec.common.launch import SIMULATED
from warpspec.fmha import attention, launch
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.sm90.shapes import Shape

SEED = 7
# Shapes of the kernels that were recorded, by what a case has.
FEW = 12  # queries
RECORDED_SHAPES = {
    ("many", 64): Shape(3, 128, 4, 1, 160, 32),
    ("many", 128): Shape(2, 128, 2, 1, 240, 24),
    ("many", 256): Shape(2, 64, 2, 1, 240, 24),
    ("few", 64): Shape(1, 128, 2, 2, 208, 48),
    ("few", 128): Shape(1, 64, 2, 2, 208, 48),
    ("few", 256): Shape(1, 64, 3, 1, 240, 24),
    ("few", 512): Shape(2, 64, 2, 1, 240, 24, column_groups=2),
    ("split", 64): Shape(1, 128, 3, 2, 208, 48),
    ("split", 128): Shape(1, 64, 3, 2, 208, 48),
    ("biased", 64): Shape(3, 80, 4, 1, 160, 32),
    ("biased", 128): Shape(2, 96, 3, 1, 240, 24),
}


@dataclass(frozen=True)
class Recorded:
    """One call. num_splits: as in ``attention``. page_size: K and V are cut into pages of it, which lie in another
    order. bias: dtype of a bias of its own for every head, with hidden keys. shape: of the kernel that was recorded;
    None: the one that RECORDED_SHAPES has."""

    case: Case
    num_splits: int | None = 1
    page_size: int | None = None
    bias: torch.dtype | None = None
    shape: Shape | None = None

    @property
    def name(self) -> str:
        return f"{self.case.id}-{self.case.head_dim}"

    @cached_property
    def inputs(self) -> dict:
        """Keyword arguments of ``attention``, on the CPU."""
        inputs = {**arguments(self.case, SEED), "num_splits": self.num_splits}
        inputs["return_lse"] = self.case.normalize
        if self.page_size:
            inputs |= paged(inputs, self.page_size)
        if self.bias:
            inputs["bias"] = self.random_bias()
        return inputs

    def random_bias(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(SEED)
        shape = (1, self.case.heads_q, self.case.seq_q, self.case.seq_k)
        bias = torch.randn(shape, generator=generator)
        bias[torch.rand(shape, generator=generator) < 0.3] = -torch.inf
        return bias.to(self.bias)

    def run(self, device: str) -> dict[str, np.ndarray]:
        """The results, o first, as bits. device: "cuda", or "cpu" for the simulator (which must run sm90's kernel)."""
        inputs = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in self.inputs.items()
        }
        with self.recorded_shape():
            result = attention(**inputs)
        names = ("o", "lse") if self.case.normalize else ("o", "row_max", "row_sum")
        return {name: bits(tensor.cpu()) for name, tensor in zip(names, result, strict=True)}

    @contextmanager
    def recorded_shape(self):
        """Plans give the case its shape, and remember nothing of it."""
        queries = "few" if self.case.seq_q <= FEW else "biased" if self.bias else "many"
        kind = "split" if self.num_splits > 1 else queries
        shape = self.shape or RECORDED_SHAPES[kind, self.case.head_dim]
        with choosing(shape=shape):
            yield

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """dtypes of the results."""
        if not self.case.normalize:
            return dict.fromkeys(("o", "row_max", "row_sum"), torch.float32)
        return {"o": self.case.dtype, "lse": torch.float32}

    def inputs_digest(self) -> str:
        """Over every input's bytes: a change of the generators shows before any comparison."""
        tensors = [t.contiguous() for t in self.inputs.values() if isinstance(t, torch.Tensor)]
        return hashlib.sha256(b"".join(bits(t).tobytes() for t in tensors)).hexdigest()

    def kernel_digest(self) -> str:
        """Over the PTX of the kernel, and of split keys' second one, but for where in the source it comes from."""
        with self.recorded_shape():
            kernels = launch.compiled(AttentionProblem.of(**self.inputs), SIMULATED["sm_90a"])
        ptx = "".join(kernel.artifacts.PTX for kernel in kernels)
        ptx = re.sub(r"//.*", "", ptx)
        code = [
            line for line in ptx.splitlines() if line.strip() and not re.match(r"\s*\.(loc|file)\b", line)
        ]
        return hashlib.sha256("\n".join(code).encode()).hexdigest()


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a tensor's elements."""
    return tensor.view({2: torch.int16, 4: torch.int32, 1: torch.int8}[tensor.element_size()]).numpy()


def paged(inputs: dict, page_size: int) -> dict:
    """K, V and what finds their pages; the last page of a batch row may reach past its keys."""
    generator = torch.Generator().manual_seed(SEED)
    batch, keys, heads, dim = inputs["k"].shape
    slots = -(-keys // page_size)
    order = torch.randperm(batch * slots, generator=generator)
    found = {"page_table": order.view(batch, slots).int()}
    if inputs["kv_lengths"] is None:
        found["kv_lengths"] = torch.full((batch,), keys, dtype=torch.int32)
    for name in "kv":
        whole = torch.full((batch, slots * page_size, heads, dim), torch.nan, dtype=inputs[name].dtype)
        whole[:, :keys] = inputs[name]
        found[name] = torch.empty(batch * slots, page_size, heads, dim, dtype=whole.dtype)
        found[name][order] = whole.view(batch * slots, page_size, heads, dim)
    return found


PREFILL = Case("causal", seq_q=140, seq_k=200, heads_q=2, heads_kv=1, causal=True)
WINDOW = Case(
    "window-sink", seq_q=90, seq_k=300, heads_q=2, heads_kv=1, causal=True, window=(70, 0), sink=True
)
DECODE = Case("decode", batch=2, seq_q=1, seq_k=300, heads_q=16, heads_kv=2, kv_lengths=(300, 97))
SHARED = Case("shared-kv", seq_q=3, seq_k=150, heads_q=16, heads_kv=1, shared_kv=True, causal=True)

CASES = [
    *(Recorded(replace(PREFILL, head_dim=dim)) for dim in (64, 128, 256)),
    Recorded(replace(WINDOW, head_dim=64), shape=Shape(2, 128, 4, 1, 240, 24)),
    Recorded(replace(WINDOW, head_dim=128), shape=Shape(2, 128, 2, 1, 240, 24)),
    *(Recorded(replace(DECODE, id="splits", head_dim=dim), num_splits=3) for dim in (64, 128)),
    Recorded(replace(DECODE, id="pages-of-16", head_dim=64), page_size=16),
    Recorded(replace(DECODE, id="pages-of-64", head_dim=128), page_size=64),
    Recorded(replace(PREFILL, id="bias-bf16", seq_q=70, causal=False, head_dim=64), bias=torch.bfloat16),
    Recorded(replace(PREFILL, id="bias-fp32", seq_q=70, head_dim=128), bias=torch.float32),
    Recorded(replace(PREFILL, id="fp16", seq_q=70, head_dim=128, dtype=torch.float16)),
    Recorded(replace(PREFILL, id="state", seq_q=40, head_dim=128, normalize=False)),
    Recorded(replace(PREFILL, id="negative-scale", seq_q=40, head_dim=64, scale=-0.2)),
    Recorded(replace(SHARED, head_dim=64)),
    Recorded(replace(SHARED, head_dim=512)),
    Recorded(replace(SHARED, id="shared-kv-prefill", seq_q=12, head_dim=512)),
    Recorded(replace(DECODE, id="decode", head_dim=256)),
]
