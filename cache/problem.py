"""Checks of ``insert``: each argument once.

They raise TypeError (wrong kind of object or dtype) or ValueError (wrong value) with the argument's name, its value and
what is allowed, before anything is launched or written. Values in slots and positions are checked on the CPU only; on a
GPU, kernels write nothing out of bounds whatever those values are.
"""

from __future__ import annotations

import torch

from warpspec.cache.config import (
    MAX_DIM,
    InsertConfig,
    heads_per_item,
    numbers_per_lane,
)
from warpspec.cache.operands import Operands, Options
from warpspec.common.checks import check_number, check_operand, check_range
from warpspec.common.hardware import VECTOR_BYTES
from warpspec.common.kv_formats import FORMATS, QUANTIZED, SCALE_ROWS, SIXTEEN_BITS, CacheFormat
from warpspec.common.outputs import check_apart, check_elements, has_memory

DTYPES = tuple(getattr(torch, name) for name in SIXTEEN_BITS)
WEIGHT_DTYPES = (torch.float32, *DTYPES)
INDEX_DTYPES = (torch.int32, torch.int64)
BYTE_DTYPES = (torch.uint8, torch.float8_e4m3fn)  # dtypes of block scales
DTYPE_FORMATS = {one.dtype: name for name, one in FORMATS.items() if one.dtype != torch.uint8}
BYTE_FORMATS = tuple(QUANTIZED)  # formats that a cache of bytes can have
COUNT_LIMIT = 2**31 - 2**12  # kernels count items and slots in int32, including items of idle groups


def check_insert(operands: Operands, options: Options) -> None:
    """Check all arguments but the values of slots and positions."""
    k, v = operands.k, operands.v
    for name in ("interleaved", "swizzled"):
        if not isinstance(getattr(options, name), bool):
            raise TypeError(f"{name}: must be a bool, got {getattr(options, name)!r}")
    check_number("eps", options.eps)
    if not isinstance(k, torch.Tensor):
        raise TypeError(f"k: must be a torch.Tensor, got {k!r} ({type(k).__name__})")
    device = k.device
    check_operand("k", k, DTYPES, (-1, -1, -1), device, aligned=True)
    tokens, heads, dim = k.shape
    check_dim("k", dim)
    check_operand("v", v, (k.dtype,), (tokens, heads, -1), device, aligned=True)
    check_dim("v", v.shape[-1])
    if heads < 1:
        raise ValueError(f"k: must have at least one head, got shape {list(k.shape)}")
    fmt = check_format(operands, options)
    check_cache("k_cache", operands.k_cache, fmt, heads, dim, device)
    check_cache("v_cache", operands.v_cache, fmt, heads, v.shape[-1], device)
    pages = tuple(operands.k_cache.shape[:-2])
    if tuple(operands.v_cache.shape[:-2]) != pages or operands.v_cache.dtype != operands.k_cache.dtype:
        raise ValueError(
            f"v_cache: slots and dtype must be k_cache's, {list(pages)} {operands.k_cache.dtype}, got "
            f"{list(operands.v_cache.shape[:-2])} {operands.v_cache.dtype}"
        )
    check_block_scales(operands, options, fmt)
    check_scales(operands, fmt, heads, device)
    check_operand("slots", operands.slots, INDEX_DTYPES, (-1,), device)
    if len(operands.slots) > tokens:
        raise ValueError(f"slots: at most one for each of the {tokens} tokens, got {len(operands.slots)}")
    check_queries(operands, tokens, dim, k.dtype, device)
    check_projection(operands, options, tokens, dim, device)
    check_outputs(operands)


def check_dim(name: str, dim: int) -> None:
    step = numbers_per_lane(dim)
    if not 0 < dim <= MAX_DIM or dim % step:
        raise ValueError(f"{name}: head size must be a multiple of {step}, at most {MAX_DIM}, got {dim}")


def check_format(operands: Operands, options: Options) -> CacheFormat:
    """The format of the cache: by its dtype, or for bytes by the option."""
    cache, name = operands.k_cache, options.format
    if not isinstance(cache, torch.Tensor):
        raise TypeError(f"k_cache: must be a torch.Tensor, got {cache!r} ({type(cache).__name__})")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"format: must be a str or None, got {name!r} ({type(name).__name__})")
    if cache.dtype == torch.uint8:
        if name not in BYTE_FORMATS:
            allowed = ", ".join(map(repr, BYTE_FORMATS))
            raise ValueError(f"format: a cache of bytes needs one of {allowed}, got {name!r}")
        return FORMATS[name]
    found = DTYPE_FORMATS.get(cache.dtype)
    if found is None:
        allowed = ", ".join(map(str, (*DTYPE_FORMATS, torch.uint8)))
        raise TypeError(f"k_cache: dtype must be one of {allowed}, got {cache.dtype}")
    if name not in (None, found):
        raise ValueError(f"format: a cache of {cache.dtype} has the format {found!r}, got {name!r}")
    if found in SIXTEEN_BITS and cache.dtype != operands.k.dtype:
        raise TypeError(
            f"k_cache: a cache of 16 bits must have k's dtype, {operands.k.dtype}, got {cache.dtype}"
        )
    return FORMATS[found]


def check_cache(name: str, cache, fmt: CacheFormat, heads: int, dim: int, device) -> None:
    """Check a cache: [slots, H, row] or [pages, page_size, H, row], and rows that lanes can write whole words to."""
    if fmt.block and dim % fmt.block:
        raise ValueError(
            f"{name[0]}: head size must be a multiple of {fmt.block} for {fmt.name!r}, got {dim}"
        )
    row = fmt.row_bytes(dim) // cache.element_size() if isinstance(cache, torch.Tensor) else 0
    dims = cache.dim() if isinstance(cache, torch.Tensor) else 3
    if dims not in (3, 4):
        raise ValueError(
            f"{name}: must be [slots, H, row] or [pages, page_size, H, row], got shape {list(cache.shape)}"
        )
    dtypes = (torch.uint8, *(dtype for dtype, found in DTYPE_FORMATS.items() if found == fmt.name))
    check_operand(name, cache, dtypes, (-1,) * (dims - 2) + (heads, row), device)
    if cache.shape[:-2].numel() > COUNT_LIMIT:
        raise ValueError(f"{name}: at most {COUNT_LIMIT} slots, got {cache.shape[:-2].numel()}")
    width = min(VECTOR_BYTES, fmt.row_bytes(max(numbers_per_lane(dim), fmt.block)))
    strides = [step for step, n in zip(cache.stride()[:-1], cache.shape[:-1], strict=True) if n > 1]
    address = cache.data_ptr() if has_memory(cache) else 0
    if any(step * cache.element_size() % width for step in strides) or address % width:
        raise ValueError(
            f"{name}: rows must be aligned to {width} bytes, got strides {list(cache.stride())} at an address of "
            f"{address % width} past a multiple"
        )


def check_block_scales(operands: Operands, options: Options, fmt: CacheFormat) -> None:
    """Check NVFP4's block scales, and that nothing else has any."""
    for name, cache, rows in (
        ("k_block_scales", operands.k_cache, operands.k),
        ("v_block_scales", operands.v_cache, operands.v),
    ):
        blocks = getattr(operands, name)
        if not fmt.block:
            if blocks is not None:
                raise ValueError(f"{name}: only 'nvfp4' has block scales, the cache's format is {fmt.name!r}")
            continue
        if blocks is None:
            raise ValueError(f"{name}: 'nvfp4' needs block scales, got None")
        shape = (*cache.shape[:-1], rows.shape[-1] // fmt.block)
        check_operand(name, blocks, BYTE_DTYPES, shape, cache.device)
    if not options.swizzled:
        return
    if not fmt.block:
        raise ValueError(f"swizzled: only block scales of 'nvfp4' can be, the cache's format is {fmt.name!r}")
    size = operands.v_cache.shape[1] if operands.v_cache.dim() == 4 else 1
    count = operands.v.shape[-1] // fmt.block
    if size % SCALE_ROWS or count % SCALE_ROWS:
        raise ValueError(
            f"swizzled: needs pages of a multiple of {SCALE_ROWS} rows and as many blocks a row, got {size} rows and "
            f"{count} blocks"
        )


def check_scales(operands: Operands, fmt: CacheFormat, heads: int, device) -> None:
    """Check k_scale and v_scale: fp32 of one number or of one a head, on the device."""
    for name in ("k_scale", "v_scale"):
        scale = getattr(operands, name)
        if scale is None:
            continue
        if not fmt.scaled:
            raise ValueError(f"{name}: numbers of {fmt.name!r} have no scale")
        if not isinstance(scale, torch.Tensor):
            raise TypeError(
                f"{name}: must be an fp32 tensor on {device}, where the kernel reads it, got {scale!r} "
                f"({type(scale).__name__})"
            )
        shapes = ((), (1,), (heads,))
        if tuple(scale.shape) not in shapes:
            raise ValueError(f"{name}: shape must be [], [1] or [{heads}], got {list(scale.shape)}")
        check_operand(name, scale, (torch.float32,), tuple(scale.shape), device)


def check_queries(operands: Operands, tokens: int, dim: int, dtype, device) -> None:
    """Check q and out."""
    q, out = operands.q, operands.out
    if q is None:
        for name in ("out", "q_weight"):
            if getattr(operands, name) is not None:
                raise ValueError(f"{name}: there are no queries (q is None)")
        return
    check_operand("q", q, (dtype,), (tokens, -1, dim), device, aligned=True)
    if out is not None:
        check_operand("out", out, (dtype,), tuple(q.shape), device, aligned=True)
    if operands.positions is None and operands.q_weight is None:
        raise ValueError("q: there is nothing to do with queries without positions and q_weight")


def check_projection(operands: Operands, options: Options, tokens: int, dim: int, device) -> None:
    """Check what normalises and rotates rows, and how many there are."""
    for name in ("q_weight", "k_weight"):
        weight = getattr(operands, name)
        if weight is not None:
            check_operand(name, weight, WEIGHT_DTYPES, (dim,), device, aligned=True)
    if (operands.positions is None) != (operands.cos_sin is None):
        missing = "positions" if operands.positions is None else "cos_sin"
        raise ValueError(f"{missing}: positions and cos_sin belong together, got None")
    if operands.positions is not None:
        check_operand("positions", operands.positions, INDEX_DTYPES, (tokens,), device)
        check_operand("cos_sin", operands.cos_sin, WEIGHT_DTYPES, (-1, -1), device, aligned=True)
        rotated = operands.cos_sin.shape[1]
        step = numbers_per_lane(dim) * (1 if options.interleaved else 2)
        if not 0 < rotated <= dim or rotated % step:
            raise ValueError(
                f"cos_sin: a row must have a multiple of {step} numbers, at most the head size {dim}, got {rotated}"
            )
    heads = max(1 if operands.q is None else operands.q.shape[1], operands.k.shape[1])
    if tokens * heads > COUNT_LIMIT:
        raise ValueError(f"k: at most {COUNT_LIMIT} rows at a time, got {tokens} tokens of {heads} heads")


def check_outputs(operands: Operands) -> None:
    """Check that outputs overlap nothing; the queries' may be the queries."""
    for name, tensor in operands.outputs.items():
        if tensor is not None:
            check_elements(name, tensor)
    check_apart(operands.outputs, operands.inputs, in_place=("q",))


def check_values(operands: Operands) -> None:
    """Check on the CPU that scales are finite and above 0, that the table has all positions, and that no slot is given
    twice."""
    slots = operands.slots
    if slots.device.type != "cpu" or torch.compiler.is_compiling():
        return
    for name in ("k_scale", "v_scale"):
        scale = getattr(operands, name)
        if scale is not None and not ((scale > 0) & (scale != torch.inf)).all():
            raise ValueError(f"{name}: values must be finite and above 0, got {scale.tolist()}")
    if operands.positions is not None:
        last = len(operands.cos_sin) - 1
        check_range("positions", operands.positions, 0, last, "rows of cos_sin")
    capacity = operands.k_cache.shape[:-2].numel()
    found, counts = slots[(slots >= 0) & (slots < capacity)].unique(return_counts=True)
    for slot in found[counts > 1][:1].tolist():
        raise ValueError(f"slots: each may be given once, got {slot} twice")


def config_of(operands: Operands, options: Options) -> InsertConfig:
    """The configuration of checked arguments."""

    def named(tensor) -> str | None:
        return None if tensor is None else str(tensor.dtype).removeprefix("torch.")

    def scale(tensor) -> str | None:
        return None if tensor is None else "tensor" if tensor.numel() == 1 else "head"

    k, cos_sin, rotates = operands.k, operands.cos_sin, operands.positions is not None
    return InsertConfig(
        named(k),
        check_format(operands, options).name,
        k.shape[-1],
        operands.v.shape[-1],
        0 if operands.q is None or operands.q.shape[1] == 0 else heads_per_item(operands.q.shape[1]),
        heads_per_item(k.shape[1]),
        cos_sin.shape[1] if rotates else 0,
        options.interleaved and rotates,
        named(cos_sin) if rotates else "float32",
        named(operands.positions) if rotates else "int64",
        named(operands.slots),
        named(operands.q_weight),
        named(operands.k_weight),
        scale(operands.k_scale),
        scale(operands.v_scale),
        options.swizzled,
    )
