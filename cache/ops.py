"""The torch operator behind ``insert``: backend choice, launch."""

from __future__ import annotations

import torch

from warpspec.cache import reference
from warpspec.cache.config import InsertConfig
from warpspec.cache.operands import OUTPUTS, Operands, Options
from warpspec.cache.problem import check_insert, check_values, config_of
from warpspec.common.autocast import without_autocast
from warpspec.common.backend import resolve_backend
from warpspec.common.launch import target_of
from warpspec.common.operands import option_schema, tensor_schema
from warpspec.common.outputs import note_written
from warpspec.common.repeated import watched
from warpspec.common.strides import as_words


def run_insert(operands: Operands, options: Options, backend: str, target=None) -> None:
    """Insert on checked arguments."""
    device = operands.k.device
    backend = resolve_backend(backend, device)
    if len(operands.k) == 0:
        return
    operands = operands.detached()
    if backend == "reference":
        run_reference(operands, options)
        return
    config = config_of(operands, options)
    if config.q_heads == 0 and len(operands.slots) == 0:  # nothing to compute, nothing to store
        return
    from warpspec.cache.device.insert import INSERT

    INSERT.run(config, target or target_of(device), *kernel_operands(config, operands), float(options.eps))


def kernel_operands(config: InsertConfig, operands: Operands) -> Operands:
    """The views that kernels take."""
    queries = config.q_heads > 0
    return operands._replace(
        k=words(operands.k),
        v=words(operands.v),
        k_cache=words(paged(operands.k_cache)),
        v_cache=words(paged(operands.v_cache)),
        q=words(operands.q) if queries else None,
        out=words(operands.out) if queries else None,
        q_weight=operands.q_weight if queries else None,
        k_scale=one_dimension(operands.k_scale),
        v_scale=one_dimension(operands.v_scale),
        k_block_scales=as_bytes(paged(operands.k_block_scales)),
        v_block_scales=as_bytes(paged(operands.v_block_scales)),
    )


@without_autocast
def run_reference(operands: Operands, options: Options) -> None:
    """``reference`` on checked arguments."""
    name = config_of(operands, options).format
    rest = (float(options.eps), operands.cos_sin, operands.positions, options.interleaved)
    if operands.q is not None:
        operands.out.copy_(reference.project(operands.q, operands.q_weight, *rest))
    k = reference.project(operands.k, operands.k_weight, *rest)
    count = len(operands.slots)
    for rows, cache, scale, blocks, swizzled in (
        (k, operands.k_cache, operands.k_scale, operands.k_block_scales, False),
        (operands.v, operands.v_cache, operands.v_scale, operands.v_block_scales, options.swizzled),
    ):
        cache = cache if cache.element_size() == 2 else as_bytes(cache)
        blocks = as_bytes(paged(blocks))
        reference.store(
            rows[:count], paged(cache), operands.slots, name, one_dimension(scale), blocks, swizzled
        )


def words(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A view of the tensor's memory as 32-bit words."""
    return None if tensor is None else as_words(tensor)


def as_bytes(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.view(torch.uint8)


def paged(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """[pages, page_size, H, row]; a tensor without pages has one row a page."""
    return tensor if tensor is None or tensor.dim() == 4 else tensor.unsqueeze(1)


def one_dimension(scale: torch.Tensor | None) -> torch.Tensor | None:
    return None if scale is None else scale.reshape(-1)


def insert(operands: Operands, options: Options, backend: str) -> None:
    """``run_insert``, through the torch operator while something records operators (a trace, a dispatch mode)."""
    if watched(*(tensor for tensor in operands if tensor is not None)):
        insert_operator(*operands, *options, backend)
    else:
        check_values(operands)
        note_written(*operands.outputs.values())
        run_insert(operands, options, backend)


SCHEMA = f"{tensor_schema(Operands, Operands._fields)}, {option_schema(Options)}, str backend"


@torch.library.custom_op("warpspec::cache_insert", mutates_args=OUTPUTS, schema=f"({SCHEMA}) -> ()")
def insert_operator(*arguments) -> None:
    """Operator of ``insert``."""
    *call, backend = arguments
    operands, options = (
        Operands(*call[: len(Operands._fields)]),
        Options(*call[len(Operands._fields) :]),
    )
    check_insert(operands, options)
    check_values(operands)
    run_insert(operands, options, backend)


@insert_operator.register_fake
def _(*arguments):
    return None
