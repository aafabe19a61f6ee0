"""`sim.triton`: runs a kernel that Triton compiled, with the arguments that the Python function takes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from warpspec.sim.errors import HostError
from warpspec.sim.host_tensor import host_tensor
from warpspec.sim.ptx_run import launch
from warpspec.sim.report import SimReport
from warpspec.sim.tensor_maps import TensorMapOf
from warpspec.sim.tma.descriptor import ELEMENT_TYPES, Swizzle, TensorMap, check

WARP_THREADS = 32
NUMBERS = {
    "i1": np.int8, "u1": np.uint8, "fp16": np.float16, "fp32": np.float32, "fp64": np.float64,
    **{f"{sign}{bits}": getattr(np, f"{'u' if sign == 'u' else ''}int{bits}")
       for sign in "iu" for bits in (8, 16, 32, 64)},
}  # fmt: skip
TF32 = next(element.code for element in ELEMENT_TYPES if element.name == "tf32")


def triton(
    kernel: object,
    *args: object,
    grid: int | Sequence[int],
    seed: int = 0,
    seeds: int | None = None,
    check: str | None = None,
    timeline: str | os.PathLike | None = None,
    **named: object,
) -> SimReport:
    """Run a kernel that `triton.compile` made for "cuda"; CPU tensors among the arguments are written in place.

    kernel: a triton.compiler.CompiledKernel (what `triton.compile(ASTSource(...), target=GPUTarget("cuda", 90 or 100,
    32))` returns, or `jit_function.warmup(...)`); compiling needs no GPU.
    args, named: the function's arguments except constexpr ones, in order or by name: CPU torch tensors, numbers,
    Triton's TensorDescriptor. grid: one to three ints, as in `kernel[grid]`.
    seed, seeds, check, timeline: as for `sim.run`.

    Block, cluster and shared memory come from the metadata; the scratch buffers that Triton passes last are allocated.
    Returns a SimReport. Raises HostError for arguments that do not fit, and what `sim.launch` raises.
    """
    try:
        ptx, metadata, source = kernel.asm["ptx"], kernel.metadata, kernel.src
        signature = source.signature
    except (AttributeError, KeyError, TypeError) as error:
        raise HostError(
            f"kernel is a {type(kernel).__name__}, not a compiled Triton kernel: {error}"
        ) from None
    metas = iter(getattr(metadata, "tensordesc_meta", None) or ())
    values = _bound(signature, args, named)
    packed = [item for name, kind, value in values for item in _packed(name, kind, value, metas)]
    shape = (grid,) if isinstance(grid, int) else tuple(grid)
    if len(shape) == 0:
        raise HostError("grid is empty; one to three ints are needed")
    ctas = getattr(metadata, "num_ctas", 1)
    programs = int(np.prod(shape)) * ctas
    for which in ("global", "profile"):
        nbytes = getattr(metadata, f"{which}_scratch_size", 0) * programs
        packed.append(torch.zeros(nbytes, dtype=torch.uint8) if nbytes else None)
    return launch(
        ptx, metadata.name, grid=(shape[0] * ctas, *shape[1:]), block=_threads(ptx, metadata), cluster=(ctas, 1, 1),
        smem=metadata.shared, args=packed, seed=seed, seeds=seeds, check=check, timeline=timeline,
        cubin=kernel.asm.get("cubin"),
    )  # fmt: skip


def _threads(ptx: str, metadata) -> int:
    """Threads of a CTA: .reqntid if the PTX has it, because it includes the warps that specialisation adds."""
    found = ptx.partition(".reqntid")[2].split(None, 1)
    return int(found[0].rstrip(",")) if found else WARP_THREADS * metadata.num_warps


def _bound(signature: dict, args: Sequence[object], named: dict) -> list[tuple[str, object, object]]:
    """(name, Triton type, value) of each argument that the kernel takes."""
    wanted = {name: kind for name, kind in signature.items() if kind != "constexpr"}
    given = dict(zip(wanted, args, strict=False))
    twice = given.keys() & named.keys()
    if len(args) > len(wanted) or twice or given.keys() | named.keys() != wanted.keys():
        raise HostError(
            f"the kernel takes {', '.join(wanted) or 'no arguments'}; {len(args)} are given in order"
            f"{f', {chr(44).join(named)} by name' if named else ''}"
        )
    return [(name, kind, (given | named)[name]) for name, kind in wanted.items()]


def _packed(name: str, kind: object, value: object, metas: Iterator) -> Iterator[object]:
    """The kernel's parameters for one argument of the function."""
    if isinstance(kind, tuple):
        if not isinstance(value, tuple) or len(value) != len(kind):
            raise HostError(f"{name} is {value!r:.60}; a tuple of {len(kind)} is needed")
        for i, (inner, item) in enumerate(zip(kind, value, strict=True)):
            if inner != "constexpr":
                yield from _packed(f"{name}[{i}]", inner, item, metas)
    elif kind.startswith("tensordesc"):
        yield from _descriptor(name, value, next(metas, None))
    elif kind.startswith("*"):
        if value is not None and not isinstance(value, torch.Tensor | np.ndarray):
            raise HostError(f"{name} is {value!r:.60}; the kernel takes a {kind} tensor")
        yield value
    elif kind == "bf16":
        yield torch.tensor([value], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    elif kind in NUMBERS:
        number = NUMBERS[kind]
        exact = kind.startswith("fp") or int(value) == number(int(value))
        if isinstance(value, torch.Tensor) or not exact:
            raise HostError(f"{name} is {value!r:.60}; the kernel takes a number of type {kind}")
        yield number(value)
    else:
        raise HostError(f"{name}: arguments of Triton type {kind} are not supported")


def _descriptor(name: str, value: object, meta: dict | None) -> Iterator[object]:
    """A TensorDescriptor's parameters: its tensor map (pieces of it, where the target has no TMA), sizes, strides."""
    if not all(hasattr(value, field) for field in ("base", "shape", "strides", "padding")):
        raise HostError(f"{name} is a {type(value).__name__}; a triton TensorDescriptor is needed")
    shape, strides = list(map(int, value.shape)), list(map(int, value.strides))
    is_nan, to_tf32 = value.padding == "nan", bool(getattr(value, "round_f32_to_tf32", False))
    numbers = [np.int32(n) for n in shape] + [np.int64(n) for n in strides]
    if meta is None:
        yield value.base
        yield from (np.int64(n) for n in (*shape, *strides))
        yield from (np.int8(is_nan), np.int8(to_tf32))
    elif meta.get("is_im2col"):
        raise HostError(f"{name}: a tensor descriptor in im2col mode is not supported")
    else:
        yield _tensor_map(name, value.base, shape, strides, meta, is_nan, to_tf32)
    yield from numbers


def _tensor_map(name: str, base: torch.Tensor, shape, strides, meta: dict, is_nan: bool, to_tf32: bool):
    nbytes = meta["elem_size"]
    tensor = host_tensor(torch.as_strided(base, shape, strides), name)
    element = ELEMENT_TYPES[TF32 if to_tf32 else meta["elem_type"]]
    dims = [*shape[:-1], shape[-1] * 2] if meta["fp4_padded"] else shape
    made = TensorMap(
        address=0,
        element=element,
        dims=tuple(reversed(dims)),
        strides=tuple(step * nbytes for step in reversed(strides[:-1])),
        box=tuple(reversed(meta["block_size"])),
        element_strides=(1,) * len(dims),
        swizzle=Swizzle(meta["swizzle"]),
        nan_fill=is_nan,
    )
    return TensorMapOf(tensor, base, check(made))
