"""Calls of a shape of ``sweep_shapes``: its tensors, ours and the peers' functions of them, and what these compile.

Ours is called as an engine calls it, a peer as its documentation says for such a batch. On meta tensors the same code
finds the kernels that we need, on fake tensors those of flash-attn-4.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Hashable
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import create_block_mask

from warpspec.aot.models import PACKED, PAGED, kernels
from warpspec.cache.quantize import quantize_nvfp4
from warpspec.common.hardware import VECTOR_BYTES
from warpspec.common.launch import Kernel, Target
from warpspec.fmha import BlockMask, attention, attention_varlen
from warpspec.fmha.block_mask import WORD_BITS
from warpspec.fmha.lists import ORDER_WORDS
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.quantized import BLOCK_SCALES, dequantized
from warpspec.softmax import softmax, softmax_topk

from . import gpu_bench, mla_peers
from .attention_peers import (
    CUDNN,
    FLASH,
    FLEX,
    SDPA,
    flash_attention,
    flash_lists,
    flex,
    result_of,
    sdpa,
    sdpa_shared,
)
from .row_peers import QUACK, quack_softmax, quack_topk, softmax_peers, topk_peers
from .sweep_masks import BLOCK, WHOLE, compiles, in_cute, in_torch, visits_of
from .sweep_shapes import CODE_BITS, FLOAT8, MOST_BYTES, AttentionShape, RowShape, Shape

OURS = "warpspec"
BF16 = "warpspec, bf16"  # a peer of FP8 and NVFP4 keys
DTYPE = torch.bfloat16
FLASH_MOST_DIM = 256  # of a head, on sm_90
# Of a head, on sm_90, with lists: wider ones get KV tiles of 80 keys, which blocks do not fit.
FLASH_LISTS_DIM = 128
SETS_BYTES, MOST_SETS = 2 * MOST_BYTES, 64  # of all inputs that calls of a shape go round


# Tensors.


def attention_inputs(
    shape: AttentionShape, device: str, seed: int = 0, *, values: bool = True
) -> SimpleNamespace:
    """q, k, v (None where V is K) and the options of our call; of codes also ``wide``, the same in bf16 for peers; of
    lists of blocks ``lists``, FlexAttention's. values: random ones, and pages in random order."""
    draw = random.Random(seed)

    def tensor(*sizes):
        make = torch.randn if values else torch.empty
        return make(sizes, dtype=DTYPE, device=device)

    def integers(found):
        if values:
            return torch.tensor(found, dtype=torch.int32, device=device)
        sizes = (len(found), len(found[0])) if isinstance(found[0], list) else (len(found),)
        return torch.empty(sizes, dtype=torch.int32, device=device)

    options = {"causal": shape.causal}
    if shape.window is not None:
        options["window"] = (shape.window - 1, 0)
    if shape.sink:
        options["sink"] = tensor(shape.heads_q)
    if shape.softcap:
        options["softcap"] = shape.softcap
    if shape.v_dim and shape.shared_kv:
        options["v_dim"] = shape.v_dim
    lists = None
    if shape.mask is not None:
        options["block_mask"], lists = lists_of(shape, device, values)
    if shape.form in PAGED:
        counts = [-(-keys // shape.page_size) for keys in shape.keys]
        pages = list(range(sum(counts)))
        draw.shuffle(pages)
        taken = iter(pages)
        table = [[next(taken) for _ in range(n)] + [0] * (max(counts) - n) for n in counts]
        options["page_table"] = integers(table)
        key_rows = (len(pages), shape.page_size)
    elif shape.form == "packed":
        options["cu_seqlens_k"] = integers(starts(shape.keys))
        key_rows = (sum(shape.keys),)
    else:
        key_rows = (shape.batch, max(shape.keys))
    if shape.form in (*PAGED, "ranges"):
        options["kv_lengths"] = integers(shape.keys)
    if shape.form in PACKED:
        options["cu_seqlens_q"] = integers(starts(shape.queries))
        options["max_seqlen_q"], options["max_seqlen_k"] = max(shape.queries), max(shape.keys)
        query_rows = (sum(shape.queries),)
    else:
        query_rows = (shape.batch, shape.queries[0])
    q = tensor(*query_rows, shape.heads_q, shape.head_dim)
    k = tensor(*key_rows, shape.heads_kv, shape.head_dim)
    v = None if shape.shared_kv else tensor(*key_rows, shape.heads_kv, shape.dims[1])
    if shape.kind in CODE_BITS:
        codes, more = quantized(shape.kind, (k, v), values)
        if values:
            blocks = [more.get(name) for name in BLOCK_SCALES]
            k, v = (dequantized(t, block).to(DTYPE) for t, block in zip(codes, blocks, strict=True))
        wide = SimpleNamespace(q=q, k=k, v=v, options=options)
        return SimpleNamespace(q=q, k=codes[0], v=codes[1], options=options | more, wide=wide)
    return SimpleNamespace(q=q, k=k, v=v, options=options, lists=lists)


def lists_of(
    shape: AttentionShape, device: str, values: bool
) -> tuple[BlockMask, FlexMask | SimpleNamespace]:
    """(Our lists of a shape's mask, FlexAttention's). values: not any of the same shapes, on whatever device."""
    length = shape.keys[0]
    if values:
        return made_lists(shape.mask, length, device)
    count = -(-length // BLOCK)

    def empty(*sizes):
        return torch.empty(sizes, dtype=torch.int32, device=device)

    lists, counts = (1, 1, count, count), (1, 1, count)
    own = [empty(*lists, 2), empty(*counts, 2), empty(*lists, 3), empty(*counts, 4)]
    visited = visits_of(shape.mask, length)
    patterns = [empty(3, BLOCK, BLOCK // WORD_BITS) if visited.masked else None for _ in range(2)]
    more = {"kv_order": empty(*counts, ORDER_WORDS), "visited": visited}
    of_side = {"num_blocks": counts, "indices": lists}
    theirs = {
        f"{side}_{name}": empty(*sizes)
        for side in ("kv", "full_kv", "q", "full_q")
        for name, sizes in of_side.items()
    }
    return BlockMask((BLOCK, BLOCK), (length, length), *own, *patterns, **more), SimpleNamespace(
        BLOCK_SIZE=(BLOCK, BLOCK), **theirs
    )


@functools.cache  # one for all sets of a shape's inputs, and what ``prepare`` compiles: making it takes long
def made_lists(mask: tuple, length: int, device: str) -> tuple[BlockMask, FlexMask]:
    """(Our lists of a mask of this many queries and keys, FlexAttention's)."""
    found = create_block_mask(in_torch(mask, length, device), None, None, length, length, device=device)
    return BlockMask.of(found, length, length), found


def problem_of(x: SimpleNamespace, **more) -> AttentionProblem:
    """The problem of our call on inputs that need no values. more: further options."""
    options = dict(x.options)
    lists = options.pop("block_mask", None)
    if lists is not None:
        options |= lists.operands | lists.options
    return AttentionProblem.of(x.q, x.k, x.v, memory=False, **options, **more)


def quantized(kind: str, tensors: tuple, values: bool) -> tuple[list, dict]:
    """(codes of K and V, what else our call takes of them): e4m3, or NVFP4. kind: of CODE_BITS. values: of the tensors,
    not any."""
    if kind == FLOAT8:
        return [t.to(torch.float8_e4m3fn) for t in tensors], {}
    if values:
        found = [quantize_nvfp4(t, torch.tensor(1.0, device=t.device)) for t in tensors]
        codes, blocks = zip(*found, strict=True)
    else:
        codes, blocks = (
            [t.new_empty(*t.shape[:-1], t.shape[-1] // part, dtype=torch.uint8) for t in tensors]
            for part in (2, 16)
        )
    return list(codes), dict(zip(BLOCK_SCALES, blocks, strict=True))


def starts(lengths: tuple[int, ...]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def row_inputs(shape: RowShape) -> torch.Tensor:
    return torch.randn(shape.rows, shape.length, device="cuda").to(getattr(torch, shape.dtype))


def inputs(shape: Shape, seed: int = 0):
    """On the GPU, of one call."""
    if isinstance(shape, RowShape):
        return row_inputs(shape)
    return attention_inputs(shape, "cuda", seed)


def set_count(shape: Shape) -> int:
    """How many sets of inputs calls of a shape go round: together they exceed the L2, but not SETS_BYTES."""
    most = min(int(SETS_BYTES // shape.held_bytes), MOST_SETS)
    wanted = gpu_bench.L2_MULTIPLES * torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, min(-(-wanted // shape.bytes), most))


def input_sets(shape: Shape) -> list[tuple]:
    """Arguments of calls, ``set_count`` times ``inputs``."""
    return [(inputs(shape, seed),) for seed in range(set_count(shape))]


# Calls: functions of ``inputs``.


def ours(shape: Shape) -> Callable:
    """Our function of ``inputs``; it returns the tensor that peers' results are compared with."""
    if isinstance(shape, RowShape):
        if shape.k:
            return lambda x: softmax_topk(x, shape.k, renormalize=shape.renormalize)[0]
        return softmax
    function = attention_varlen if shape.form in PACKED else attention
    return lambda x: function(x.q, x.k, x.v, **x.options)


def peers(shape: Shape) -> dict[str, Callable]:
    """Name -> function of the same inputs to the same tensor: those that are installed and may run the shape."""
    if isinstance(shape, RowShape):
        if shape.k:
            found = topk_peers(shape.length, shape.k, shape.renormalize)
            if not shape.renormalize:
                found.pop(QUACK, None)  # computes something else
            return {name: lambda x, call=call: call(x)[0] for name, call in found.items()}
        return softmax_peers(shape.length)
    if shape.kind in CODE_BITS:
        plain = replace(shape, kind="decode")  # any kind without peers of its own
        found = {BF16: ours(plain), **peers(plain)}
        return {name: lambda x, call=call: call(x.wide) for name, call in found.items()}
    if shape.shared_kv:
        plain = shape.form == "plain"
        found = {SDPA: lambda x: sdpa_shared(x.q, x.k, shape.v_dim or None)} if plain else {}
        if shape.v_dim and shape.page_size == mla_peers.PAGE:
            decode = mla_peers.paged_decode(shape.head_dim**-0.5, shape.causal)
            if decode is not None:
                found[mla_peers.FLASH_MLA] = lambda x: decode(
                    x.q, x.k, x.options["page_table"], x.options["kv_lengths"]
                )
        return found
    found = {}
    flash = flash_attention()
    if flash is not None and shape.head_dim <= FLASH_MOST_DIM:
        found[FLASH] = lambda x: flash_call(flash, shape, x)
    if shape.mask is not None:
        if not flash_takes_lists(shape):
            found.pop(FLASH, None)
        return found | {FLEX: lambda x: flex(x.q, x.k, x.v, x.lists)}
    if shape.form == "plain" and shape.window is None and not shape.sink and not shape.softcap:
        if shape.queries == shape.keys or shape.queries[0] == 1 or not shape.causal:
            found[CUDNN] = lambda x: sdpa_call(shape, x, SDPBackend.CUDNN_ATTENTION)
        backend = SDPBackend.FLASH_ATTENTION if shape.head_dim <= FLASH_MOST_DIM else None
        found[SDPA] = lambda x: sdpa_call(shape, x, backend)
    return found


def flash_takes_lists(shape: AttentionShape) -> bool:
    """Whether flash-attn-4 is timed at a shape with lists of blocks."""
    return compiles(shape.mask) and shape.head_dim <= FLASH_LISTS_DIM


def flash_call(flash: SimpleNamespace, shape: AttentionShape, x: SimpleNamespace, **more) -> torch.Tensor:
    """flash-attn-4's result. more: further options of its call."""
    options = x.options
    common = {"causal": shape.causal, "learnable_sink": options.get("sink"), **more}
    common["window_size"] = options.get("window", (None, None))
    if shape.softcap:
        common["softcap"] = shape.softcap
    if shape.mask is not None:
        common |= {"mask_mod": in_cute(shape.mask), "block_sparse_tensors": flash_lists(x.lists)[0]}
    if shape.form == "plain":
        return result_of(flash.dense(x.q, x.k, x.v, **common))
    named = {
        "cu_seqlens_q": "cu_seqlens_q",
        "cu_seqlens_k": "cu_seqlens_k",
        "max_seqlen_q": "max_seqlen_q",
        "seqused_k": "kv_lengths",
        "page_table": "page_table",
    }
    common |= {theirs: options[name] for theirs, name in named.items() if name in options}
    return result_of(flash.varlen(x.q, x.k, x.v, max_seqlen_k=max(shape.keys), **common))


def sdpa_call(shape: AttentionShape, x: SimpleNamespace, backend: SDPBackend) -> torch.Tensor:
    options = {}
    if shape.causal and shape.queries[0] > 1:
        if shape.queries == shape.keys:
            options["is_causal"] = True
        else:
            from torch.nn.attention.bias import causal_lower_right

            options["attn_mask"] = causal_lower_right(shape.queries[0], shape.keys[0])
    return sdpa(x.q, x.k, x.v, backend=backend, **options)


# What is compiled.


def our_kernels(shape: Shape, target: Target) -> list[tuple[Kernel, Hashable]]:
    """The kernels, each with its configuration, that our call runs on a target. Needs no GPU.

    Raises UnsupportedProblem naming what the kernel does not do.
    """
    if isinstance(shape, AttentionShape):
        x = attention_inputs(shape, "meta", values=False)
        calls = [x, x.wide] if shape.kind in CODE_BITS else [x]
        return kernels([problem_of(x) for x in calls], target)
    edges = shape.length * getattr(torch, shape.dtype).itemsize % VECTOR_BYTES != 0
    if shape.k:
        from warpspec.softmax.topk.launch import topk_kernel
        from warpspec.softmax.topk.plan import choose_config

        numbers = (shape.rows, shape.length, shape.k, shape.dtype, edges, shape.renormalize)
        return [(topk_kernel, choose_config(*numbers, target.sm_count))]
    from warpspec.softmax.launch import softmax_kernel
    from warpspec.softmax.plan import choose_plan
    from warpspec.softmax.problem import SoftmaxProblem

    problem = SoftmaxProblem(shape.rows, shape.length, shape.dtype, aligned=not edges)
    return [(softmax_kernel, choose_plan(problem, target).config)]


def peer_kernel(shape: Shape) -> Hashable | None:
    """Equal for shapes that may share a peer's kernel; None for one that compiles nothing. Imports nothing."""
    if isinstance(shape, RowShape):
        taken = (
            quack_topk(shape.length, shape.k) and shape.renormalize
            if shape.k
            else quack_softmax(shape.length)
        )
        return (QUACK, shape.kind, shape.length, shape.dtype, shape.k) if taken else None
    if shape.head_dim > FLASH_MOST_DIM or find_spec("flash_attn") is None:
        return None
    if shape.mask is not None:
        compiled = None if shape.mask[0] == WHOLE else shape.mask  # as a function
        return (FLASH, shape.head_dim, shape.group, compiled) if flash_takes_lists(shape) else None
    pages = "whole tiles" if shape.page_size % 128 == 0 else "any"
    form = (shape.form, pages if shape.page_size else None)
    more = (shape.window is None, shape.sink, shape.causal, shape.softcap)
    return (FLASH, *shape.dims, shape.group, *form, *more)


def is_prepared(shape: Shape) -> bool:
    """Whether ``prepare`` has something to do for a shape."""
    return isinstance(shape, AttentionShape) and shape.mask is not None and not flash_takes_lists(shape)


def prepare(shape: AttentionShape) -> None:
    """Compile what only the process that times can compile: FlexAttention, where no other peer is timed."""
    x = inputs(shape)
    peers(shape)[FLEX](x)


def compile_peer(shape: Shape) -> None:
    """Compile the peer's kernel for a shape into the peer's own disk cache. Needs no GPU.

    Raises what the peer raises.
    """
    if isinstance(shape, AttentionShape):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(), torch.no_grad():
            x = attention_inputs(shape, "cuda", values=False)
            flash_call(flash_attention(), shape, x.wide if shape.kind in CODE_BITS else x)
        return
    from quack.cute_dsl_utils import torch2cute_dtype_map

    dtype = torch2cute_dtype_map[getattr(torch, shape.dtype)]
    if shape.k:
        from quack.topk import TopK

        TopK.compile(dtype, shape.length, shape.k, True)
    else:
        from quack.softmax import Softmax

        Softmax.compile(dtype, dtype, shape.length)
