"""The torch operators behind ``insert_window``, ``store_rows`` and ``compress``: backend choice, launch.

A schema has tensors and numbers only, so the fields of the pool and of the tail are passed one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpspec.common.backend import resolve_backend
from warpspec.common.launch import Target, target_of
from warpspec.common.outputs import note_written
from warpspec.common.repeated import watched
from warpspec.common.strides import as_words
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


def kind_of(pool: Pool) -> str:
    """A pool's key in ``POOLS``."""
    return "index" if isinstance(pool, IndexPool) else "latent"


def pool_fields(pool: Pool) -> tuple:
    """A pool as arguments of an operator."""
    return pool.data, pool.page_size, kind_of(pool), pool.format


def pool_of(data, page_size, kind, name) -> Pool:
    """The pool of ``pool_fields``."""
    return POOLS[kind](data, page_size, name)


class InsertCall(NamedTuple):
    """A checked call of ``insert_window`` or, without positions, of ``store_rows``, whose rows are kv. out: shaped like
    q, None without q."""

    q: torch.Tensor | None
    kv: torch.Tensor
    cos_sin: torch.Tensor | None
    positions: torch.Tensor | None
    weight: torch.Tensor | None
    slots: torch.Tensor
    out: torch.Tensor | None
    pool: Pool
    eps: float
    backend: str

    @property
    def tensors(self) -> tuple:
        """The tensors but the pool's."""
        return self[: InsertCall._fields.index("pool")]

    def check_values(self) -> None:
        """Check values in small tensors, on the CPU."""
        check_insert_values(self.positions, self.cos_sin, self.slots, self.pool.capacity)


class CompressCall(NamedTuple):
    """A checked call of ``compress``."""

    content_gate: torch.Tensor
    ape: torch.Tensor
    weight: torch.Tensor
    cos_sin: torch.Tensor
    requests: torch.Tensor
    starts: torch.Tensor
    cu_seqlens: torch.Tensor
    slots: torch.Tensor
    tail: Tail
    pool: Pool
    eps: float
    hadamard: bool
    backend: str

    @property
    def tensors(self) -> tuple:
        """The tensors but the tail's and the pool's."""
        return self[: CompressCall._fields.index("tail")]

    @property
    def batch(self) -> tuple:
        """The tensors that assign tokens to requests: requests, starts, cu_seqlens."""
        return self.requests, self.starts, self.cu_seqlens

    def check_values(self) -> None:
        """Check values in small tensors, on the CPU."""
        check_compress_values(self.cos_sin, self.tail, *self.batch, self.slots, self.pool.capacity)


def insert(call: InsertCall) -> None:
    """``run_insert``, through the torch operator while something records operators (a trace, a dispatch mode)."""
    if watched(*(t for t in call.tensors if t is not None), call.pool.data):
        insert_operator(*call.tensors, *pool_fields(call.pool), call.eps, call.backend)
    else:
        call.check_values()
        note_written(call.out, call.pool.data)
        run_insert(call)


def compress(call: CompressCall) -> None:
    """``run_compress``, through the torch operator while something records operators (a trace, a dispatch mode)."""
    tail = call.tail
    if watched(*call.tensors, tail.rows, call.pool.data):
        numbers = (tail.kind, tail.stride, tail.dim, tail.max_draft)
        state = (*numbers, tail.rows, tail.online, tail.progress)
        options = (call.eps, call.hadamard, call.backend)
        compress_operator(*call.tensors, *state, *pool_fields(call.pool), *options)
    else:
        call.check_values()
        note_written(tail.rows, tail.online, tail.progress, call.pool.data)
        run_compress(call)


def run_insert(call: InsertCall, target: Target | None = None) -> None:
    """K1 on checked arguments."""
    backend = resolve_backend(call.backend, call.kv.device)
    q, kv, cos_sin, positions, weight, slots, out, pool, eps, _ = call
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
    config = InsertConfig(kind_of(pool), pool.format, project=project, queries=q is not None, weight=dtype)
    config.fmt  # noqa: B018  (raises UnsupportedProblem before the DSL is loaded)
    from warpspec.latent.cache.device.insert import INSERT

    words = (None if t is None else as_words(t) for t in (q, out, kv))
    weight = None if weight is None else weight.detach()
    small = (weight, cos_sin, positions, slots, pool.words)
    INSERT.run(config, target or target_of(kv.device), *words, *small, pool.page_size, eps)


def run_compress(call: CompressCall, target: Target | None = None) -> None:
    """K2 on checked arguments."""
    device, tail, pool = call.content_gate.device, call.tail, call.pool
    backend = resolve_backend(call.backend, device)
    if len(call.content_gate) == 0:
        return
    if backend == "reference":
        arguments = call._asdict()
        del arguments["backend"]
        reference.compress(**arguments)
        return
    dtypes = {"weight": DTYPE_NAMES[call.weight.dtype], "ape": DTYPE_NAMES[call.ape.dtype]}
    sizes = (tail.kind, tail.stride, tail.max_draft)
    config = CompressConfig(*sizes, kind_of(pool), pool.format, call.hadamard, **dtypes)
    from warpspec.latent.cache.device.compress import COMPRESS

    given = (call.content_gate.detach(), call.ape.detach(), call.weight.detach(), call.cos_sin)
    state = (tail.rows, tail.online, tail.progress)
    numbers = (call.slots, pool.words, pool.page_size, call.eps)
    COMPRESS.run(config, target or target_of(device), *given, *state, *call.batch, *numbers)


POOL_SCHEMA = "Tensor({alias}!) data, SymInt page_size, str kind, str name"


@torch.library.custom_op(
    "warpspec::insert_window",
    mutates_args=("data", "out"),
    schema="(Tensor? q, Tensor kv, Tensor? cos_sin, Tensor? positions, Tensor? weight, Tensor slots, Tensor(b!)? out, "
    f"{POOL_SCHEMA.format(alias='a')}, float eps, str backend) -> ()",
)
def insert_operator(*arguments) -> None:
    """Operator of ``insert_window`` and ``store_rows``."""
    *tensors, data, page_size, kind, name, eps, backend = arguments
    call = InsertCall(*tensors, pool_of(data, page_size, kind, name), eps, backend)
    q, kv, cos_sin, positions, weight, slots, out = call.tensors
    check_insert_outputs(q, kv, cos_sin, positions, weight, data, slots, out)
    call.check_values()
    run_insert(call)


@torch.library.custom_op(
    "warpspec::compress",
    mutates_args=("rows", "online", "progress", "data"),
    schema="(Tensor content_gate, Tensor ape, Tensor weight, Tensor cos_sin, Tensor requests, Tensor starts, "
    "Tensor cu_seqlens, Tensor slots, str tail_kind, int stride, int dim, int max_draft, Tensor(a!) rows, "
    f"Tensor(b!)? online, Tensor(c!) progress, {POOL_SCHEMA.format(alias='d')}, float eps, bool hadamard, "
    "str backend) -> ()",
)
def compress_operator(*arguments) -> None:
    """Operator of ``compress``."""
    tensors, tail, pool, options = arguments[:8], arguments[8:15], arguments[15:19], arguments[19:]
    call = CompressCall(*tensors, Tail(*tail), pool_of(*pool), *options)
    *inputs, slots = call.tensors
    check_compress_outputs(*inputs[:4], call.tail, *call.batch, call.pool.data, slots)
    call.check_values()
    run_compress(call)


@insert_operator.register_fake
@compress_operator.register_fake
def _(*arguments):
    return None
