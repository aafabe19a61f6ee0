"""The torch operator behind ``output_projection``: backend choice, output, launch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpspec.common.architecture import Family
from warpspec.common.backend import resolve_backend
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import Kernel, Target, target_of
from warpspec.common.outputs import note_written
from warpspec.common.repeated import watched
from warpspec.common.strides import as_words, regular_strides
from warpspec.latent.projection import reference
from warpspec.latent.projection.config import ProjectionConfig, Sm90Config, Sm100Config, choose
from warpspec.latent.projection.float8 import FP8_BLOCK, Float8Tensor
from warpspec.latent.projection.problem import ProjectionProblem, check_apart_out, parts_of

COLUMN_STEP = 64  # kernels require N to be a multiple of this


class ProjectionKernels(NamedTuple):
    """The projection kernels of one architecture: the class of their configurations and the kernel class."""

    config: type[ProjectionConfig]
    kernel: Kernel


PROJECTION = Family(
    "output_projection",
    sm90=ProjectionKernels(
        Sm90Config, Kernel("projection.sm90", "warpspec.latent.projection.sm90:host_and_arguments")
    ),
    sm100=ProjectionKernels(
        Sm100Config, Kernel("projection.sm100", "warpspec.latent.projection.sm100:host_and_arguments")
    ),
)


def call(problem: ProjectionProblem, o, weight, out, backend) -> torch.Tensor:
    """The result of a checked call, through the torch operator while something records it."""
    if out is None:
        out = torch.empty(
            problem.tokens,
            problem.groups,
            problem.columns,
            dtype=torch.bfloat16,
            device=(o.data if problem.float8 else o).device,
        )
    parts = (*parts_of(o), *parts_of(weight))
    seen = [part for part in parts if part is not None]
    if watched(*seen):
        projection_operator(*parts, out, backend)
    else:
        note_written(out)
        compute(*parts, out, backend)
    return out


def compute(o, o_scales, weight, weight_scales, out, backend) -> None:
    """Compute a checked call into ``out`` [T, G, N]. Scales are None in bf16."""
    float8 = o_scales is not None
    groups, columns, depth = weight.shape
    backend = resolve_backend(backend, o.device)
    if backend == "reference":
        if float8:
            numbers = Float8Tensor(o, o_scales).values.reshape(len(o), groups, depth)
            weights = Float8Tensor(weight, weight_scales).values
        else:
            numbers, weights = o.detach().float().reshape(len(o), groups, depth), weight.detach().float()
        out.copy_(reference.forward(numbers, weights))
        return
    problem = ProjectionProblem(len(o), groups, columns, depth, float8)
    target = target_of(o.device)
    if problem.tokens:
        check_kernels(problem)
        launch(problem, target, o, o_scales, weight, weight_scales, out)


def check_kernels(problem: ProjectionProblem) -> None:
    """Raise UnsupportedProblem for sizes that no kernel computes."""
    step = FP8_BLOCK if problem.float8 else COLUMN_STEP
    if problem.depth % FP8_BLOCK or problem.columns % step:
        raise UnsupportedProblem(
            f"output_projection: kernels take K a multiple of {FP8_BLOCK} and N of {step}, got K {problem.depth} and N "
            f"{problem.columns} (backend 'reference' takes all)"
        )


def launch(problem: ProjectionProblem, target: Target, o, o_scales, weight, weight_scales, out):
    """Launch on the tensors' device and its current stream. Returns the simulator's report, or None on a GPU."""
    kind, kernel = PROJECTION.of(target.architecture)
    config = choose(kind, problem.float8, problem.tokens, problem.groups, problem.columns, target.sm_count)
    a = o.detach().as_strided(
        (problem.tokens, problem.groups, problem.depth), (o.stride(0), problem.depth, 1), o.storage_offset()
    )
    weight = weight.detach()
    if problem.float8:
        a, weight = a.view(torch.uint8), weight.view(torch.uint8)
        o_scales = o_scales.contiguous().view(problem.tokens, problem.groups, problem.depth // FP8_BLOCK)
    a, out = regular_strides(a), regular_strides(out)
    return kernel.run(config, target, a, weight, o_scales, weight_scales, out, target.sm_count)


def quantize(o: torch.Tensor, backend) -> Float8Tensor:
    """``quantize_output`` of a checked tensor, through the torch operator while something records it."""
    parts = (quantize_operator if watched(o) else run_quantize)(o, backend)
    return Float8Tensor(*parts)


def run_quantize(o, backend) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; returns (data, scales)."""
    backend = resolve_backend(backend, o.device)
    if backend == "reference":
        made = Float8Tensor.quantize(o.detach())
        return made.data, made.scales
    data, scales = quantized_like(o)
    if o.numel():
        from warpspec.latent.projection.quantize import QUANTIZE

        rows = o.detach().reshape(-1, o.shape[-1])
        flat = (data.view(torch.uint8).flatten(0, 1).view(torch.uint32), scales.flatten(0, 1))
        QUANTIZE.run(None, target_of(o.device), as_words(rows), *flat)
    return data, scales


def quantized_like(o) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (data, scales)."""
    scales = torch.empty(*o.shape[:-1], o.shape[-1] // FP8_BLOCK, dtype=torch.float32, device=o.device)
    return torch.empty(o.shape, dtype=torch.float8_e4m3fn, device=o.device), scales


@torch.library.custom_op(
    "warpspec::output_projection",
    mutates_args=("out",),
    schema="(Tensor o, Tensor? o_scales, Tensor weight, Tensor? weight_scales, Tensor(a!) out, str backend) -> ()",
)
def projection_operator(o, o_scales, weight, weight_scales, out, backend) -> None:
    """Operator of ``output_projection``."""
    check_apart_out(out, o, o_scales, weight, weight_scales)
    compute(o, o_scales, weight, weight_scales, out, backend)


@projection_operator.register_fake
def _(*arguments):
    return None


@torch.library.custom_op(
    "warpspec::quantize_output", mutates_args=(), schema="(Tensor o, str backend) -> (Tensor, Tensor)"
)
def quantize_operator(o, backend):
    """Operator of ``quantize_output``."""
    return run_quantize(o, backend)


@quantize_operator.register_fake
def _(o, backend):
    return quantized_like(o)
