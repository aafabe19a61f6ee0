"""The torch operators behind ``insert_window``, ``store_rows`` and ``compress``: backend choice, launch.

A schema has tensors and numbers only, so the fields of the pool and of the tail are passed one by one.
"""

from __future__ import annotations

import torch

from warpspec.common.backend import resolve_backend
from warpspec.common.launch import Target, target_of
from warpspec.common.repeated import watched
from warpspec.latent.cache import reference
from warpspec.latent.cache.config import CompressConfig, InsertConfig
from warpspec.latent.cache.pools import IndexPool, LatentPool, Pool
from warpspec.latent.cache.problem import (
    check_compress_outputs,
    check_compress_values,
    check_insert_outputs,
    check_insert_values,
)
from warpspec.latent.cache.state import Tail

POOLS = {"latent": LatentPool, "index": IndexPool}
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def run_insert(
    q, kv, cos_sin, positions, weight, eps, data, page_size, kind, name, slots, out, backend, target=None
):
    """K1 on checked arguments. positions None: store rows as they are. out: shaped like q, None without q."""
    device = kv.device
    backend = resolve_backend(backend, device)
    pool = POOLS[kind](data, page_size, name)
    if len(kv) == 0:
        return
    if backend == "reference":
        if positions is None:
            pool.write(slots, kv)
            return
        new = reference.insert_window(
            q, kv, cos_sin, positions, kv_weight=weight, eps=eps, pool=pool, slots=slots
        )
        if out is not None:
            out.copy_(new)
        return
    project = positions is not None
    dtype = DTYPE_NAMES[weight.dtype] if project else "float32"
    config = InsertConfig(kind, name, project=project, queries=q is not None, weight=dtype)
    config.fmt  # noqa: B018  (raises UnsupportedProblem before the DSL is loaded)
    from warpspec.latent.cache.device.insert import INSERT

    words = (None if t is None else t.detach().view(torch.uint32) for t in (q, out, kv))
    weight = None if weight is None else weight.detach()
    small = (weight, cos_sin, positions, slots, pool.words)
    INSERT.run(config, target or target_of(device), *words, *small, page_size, eps)


def run_compress(
    content_gate, ape, weight, cos_sin, tail: Tail, requests, starts, cu_seqlens, pool: Pool, slots, eps, hadamard,
    backend, target: Target | None = None,
):  # fmt: skip
    """K2 on checked arguments."""
    device = content_gate.device
    backend = resolve_backend(backend, device)
    if len(content_gate) == 0:
        return
    if backend == "reference":
        reference.compress(
            content_gate, ape, weight, cos_sin, tail=tail, requests=requests, starts=starts, cu_seqlens=cu_seqlens,
            pool=pool, slots=slots, eps=eps, hadamard=hadamard,
        )  # fmt: skip
        return
    kind = "index" if isinstance(pool, IndexPool) else "latent"
    dtypes = {"weight": DTYPE_NAMES[weight.dtype], "ape": DTYPE_NAMES[ape.dtype]}
    config = CompressConfig(tail.kind, tail.stride, tail.max_draft, kind, pool.format, hadamard, **dtypes)
    from warpspec.latent.cache.device.compress import COMPRESS

    operands = (
        content_gate.detach(),
        ape.detach(),
        weight.detach(),
        cos_sin,
        tail.rows,
        tail.online,
        tail.progress,
    )
    batch = (requests, starts, cu_seqlens, slots, pool.words)
    COMPRESS.run(config, target or target_of(device), *operands, *batch, pool.page_size, eps)


def insert(q, kv, cos_sin, positions, weight, eps, pool: Pool, slots, out, backend) -> None:
    """``run_insert``, through the torch operator while something records operators (a trace, a dispatch mode)."""
    kind = "index" if isinstance(pool, IndexPool) else "latent"
    arguments = (
        q, kv, cos_sin, positions, weight, eps, pool.data, pool.page_size, kind, pool.format, slots, out, backend
    )  # fmt: skip
    tensors = [t for t in arguments if isinstance(t, torch.Tensor)]
    if watched(*tensors):
        insert_operator(*arguments)
    else:
        check_insert_values(positions, cos_sin, slots, pool.capacity)
        run_insert(*arguments)


def compress(
    content_gate, ape, weight, cos_sin, tail: Tail, requests, starts, cu_seqlens, pool: Pool, slots, eps, hadamard,
    backend,
) -> None:  # fmt: skip
    """``run_compress``, through the torch operator while something records operators (a trace, a dispatch mode)."""
    inputs = (content_gate, ape, weight, cos_sin)
    batch = (requests, starts, cu_seqlens)
    if not watched(*inputs, *batch, slots, tail.rows, pool.data):
        check_compress_values(cos_sin, tail, *batch, slots, pool.capacity)
        run_compress(*inputs, tail, *batch, pool, slots, eps, hadamard, backend)
        return
    kind = "index" if isinstance(pool, IndexPool) else "latent"
    numbers = (tail.kind, tail.stride, tail.dim, tail.max_draft)
    state = (tail.rows, tail.online, tail.progress)
    compress_operator(
        *inputs,
        *numbers,
        *state,
        *batch,
        pool.data,
        pool.page_size,
        kind,
        pool.format,
        slots,
        eps,
        hadamard,
        backend,
    )


@torch.library.custom_op(
    "warpspec::insert_window",
    mutates_args=("data", "out"),
    schema="(Tensor? q, Tensor kv, Tensor? cos_sin, Tensor? positions, Tensor? weight, float eps, Tensor(a!) data, "
    "SymInt page_size, str kind, str name, Tensor slots, Tensor(b!)? out, str backend) -> ()",
)
def insert_operator(
    q, kv, cos_sin, positions, weight, eps, data, page_size, kind, name, slots, out, backend
) -> None:
    """Operator of ``insert_window`` and ``store_rows``."""
    check_insert_outputs(q, kv, cos_sin, positions, weight, data, slots, out)
    check_insert_values(positions, cos_sin, slots, len(data) * page_size)
    run_insert(q, kv, cos_sin, positions, weight, eps, data, page_size, kind, name, slots, out, backend)


@insert_operator.register_fake
def _(q, kv, cos_sin, positions, weight, eps, data, page_size, kind, name, slots, out, backend):
    return None


@torch.library.custom_op(
    "warpspec::compress",
    mutates_args=("rows", "online", "progress", "data"),
    schema="(Tensor content_gate, Tensor ape, Tensor weight, Tensor cos_sin, str tail_kind, int stride, int dim, "
    "int max_draft, Tensor(a!) rows, Tensor(b!)? online, Tensor(c!) progress, Tensor requests, Tensor starts, "
    "Tensor cu_seqlens, Tensor(d!) data, SymInt page_size, str kind, str name, Tensor slots, float eps, bool hadamard, "
    "str backend) -> ()",
)
def compress_operator(
    content_gate, ape, weight, cos_sin, tail_kind, stride, dim, max_draft, rows, online, progress, requests, starts,
    cu_seqlens, data, page_size, kind, name, slots, eps, hadamard, backend,
) -> None:  # fmt: skip
    """Operator of ``compress``."""
    tail = Tail(tail_kind, stride, dim, max_draft, rows, online, progress)
    pool = POOLS[kind](data, page_size, name)
    inputs = (content_gate, ape, weight, cos_sin)
    check_compress_outputs(*inputs, tail, requests, starts, cu_seqlens, data, slots)
    check_compress_values(cos_sin, tail, requests, starts, cu_seqlens, slots, pool.capacity)
    run_compress(*inputs, tail, requests, starts, cu_seqlens, pool, slots, eps, hadamard, backend)


@compress_operator.register_fake
def _(*arguments):
    return None
