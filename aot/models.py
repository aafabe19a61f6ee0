"""The attention kernels that a model's calls need.

``MODELS`` describes models' layers, and ``CALLS`` describes how engines delimit requests. ``kernels`` plans calls of
many sizes as ``warpspec.fmha`` plans them. It collects the configurations that were chosen, and those that nearly were,
because calls of sizes in between may ask for them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from warpspec.cache.config import InsertConfig, heads_per_item
from warpspec.cache.device.insert import INSERT
from warpspec.common.launch import Kernel, Target
from warpspec.fmha.block_mask import BLOCK, OWN_PATTERNS, WORD_BITS, Visits
from warpspec.fmha.cuts import kernels_with_cuts
from warpspec.fmha.expand import EXPAND, expand_config, expanded
from warpspec.fmha.launch import ATTENTION, second_kernel
from warpspec.fmha.lists import KERNELS, ORDER_WORDS, ListsConfig
from warpspec.fmha.plan import likely_kernels
from warpspec.fmha.plan.expanding import likely_ways
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.tree import MOST_DRAFTS
from warpspec.fmha.values import POSITION_LIMIT
from warpspec.latent.gathered.config import PAGE_ROWS
from warpspec.latent.gathered.launch import make_plan
from warpspec.latent.gathered.problem import GatheredProblem
from warpspec.latent.mla.float8 import problem_of

FULL = {}
SELECTED_ROWS = "v3.2-fp8"


def sliding(keys: int) -> dict:
    """A layer whose queries see ``keys`` keys, their own included."""
    return {"window": (keys - 1, 0)}


@dataclass(frozen=True)
class Model:
    """A model's attention.

    layers: options of ``attention`` for each kind of layer. sink: whether rows have sinks. shared_kv: whether V is K.
    strides: for each kind of layer with compressed keys besides its own, the positions that one of them stands for.
    v_dim: head size of V, 0 for head_dim; with shared_kv, V is that part of K's rows (latent rows). images: whether
    tokens of an image see all of it, so that calls have ``ranges``: all of vLLM's, in transformers those of a prompt
    with images. selected: the most rows that an indexer selects for a query, 0 without an indexer. merged: whether vLLM
    and SGLang compute a prompt's long context in parts, by calls of their own, and merge the results by their lse.
    """

    heads_q: int
    heads_kv: int
    head_dim: int
    layers: tuple[dict, ...] = (FULL,)
    sink: bool = False
    shared_kv: bool = False
    strides: tuple[int, ...] = ()
    v_dim: int = 0
    images: bool = False
    selected: int = 0
    merged: bool = False


GPT_OSS = Model(64, 8, 64, layers=(FULL, sliding(128)), sink=True)
DEEPSEEK_V4 = {"layers": (sliding(128),), "sink": True, "shared_kv": True, "strides": (4, 128)}

CAPPED = {"softcap": 50.0}
GEMMA_2 = {"layers": (CAPPED, {**CAPPED, **sliding(4096)})}

MODELS = {
    "gpt-oss-20b": GPT_OSS,
    "gpt-oss-120b": GPT_OSS,
    "deepseek-v4-flash": Model(64, 1, 512, **DEEPSEEK_V4),
    "deepseek-v4-pro": Model(128, 1, 512, **DEEPSEEK_V4),
    "llama-3-8b": Model(32, 8, 128),
    "llama-3-70b": Model(64, 8, 128),
    "mistral-7b": Model(32, 8, 128),
    "qwen3-8b": Model(32, 8, 128),
    "qwen3-32b": Model(64, 8, 128),
    "qwen3-30b-a3b": Model(32, 4, 128),
    "qwen3-235b-a22b": Model(64, 4, 128),
    "phi-3-mini": Model(32, 32, 96),
    "deepseek-v3": Model(128, 128, 192, v_dim=128, merged=True),  # its prefill
    "deepseek-v3-decode": Model(128, 1, 576, shared_kv=True, v_dim=512),
    "kimi-k2": Model(64, 64, 192, v_dim=128, merged=True),  # its prefill
    "kimi-k2-decode": Model(64, 1, 576, shared_kv=True, v_dim=512),
    # Its prefill is that of deepseek-v3.
    "deepseek-v3.2-decode": Model(128, 1, 576, shared_kv=True, v_dim=512, selected=2048),
    "glm-5": Model(64, 64, 256, merged=True),  # its prefill
    "glm-5-decode": Model(64, 1, 576, shared_kv=True, v_dim=512, selected=2048),
    "mimo-v2-flash-full": Model(64, 4, 192, v_dim=128),
    "mimo-v2-flash-window": Model(64, 8, 192, v_dim=128, layers=(sliding(129),), sink=True),
    "gemma-2-2b": Model(8, 4, 256, **GEMMA_2),
    "gemma-2-9b": Model(16, 8, 256, **GEMMA_2),
    "gemma-2-27b": Model(32, 16, 128, **GEMMA_2),
    "gemma-3-4b": Model(8, 4, 256, layers=(FULL, sliding(1024))),
    "gemma-3-12b": Model(16, 8, 256, layers=(FULL, sliding(1024))),
    "gemma-3-27b": Model(32, 16, 128, layers=(FULL, sliding(1024))),
    "gemma-3-4b-images": Model(8, 4, 256, layers=(FULL, sliding(1024)), images=True),
    "gemma-3-12b-images": Model(16, 8, 256, layers=(FULL, sliding(1024)), images=True),
    "gemma-3-27b-images": Model(32, 16, 128, layers=(FULL, sliding(1024)), images=True),
    "gemma-4-26b-global": Model(16, 2, 512),
    "gemma-4-31b-global": Model(32, 4, 512),
    "gemma-4-31b-local": Model(32, 16, 256, layers=(sliding(1024),)),
    "gemma-4-31b-local-images": Model(32, 16, 256, layers=(sliding(1024),), images=True),
}

# How requests are delimited: as rows of a batch with all keys; as rows with lengths and positions, for padding or a
# cache of fixed size; with keys in pages; with queries and keys packed; with queries packed and keys in pages.
CALLS = ("plain", "ranges", "paged", "packed", "packed-paged")
BLOCKS = "blocks"  # rows of a batch with lists of blocks: packed sequences, chunks and masks of a model's own
TREES = "trees"  # drafts of trees, as many of each request, packed, with keys in pages: SGLang's speculative decoding
PAGED, PACKED = ("paged", "packed-paged", TREES), ("packed", "packed-paged", TREES)
KV_CACHES = ("16-bit", "e4m3", "e5m2", "nvfp4")  # what a cache holds
PAGE_SIZES = (16, 64)

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 136, 256)  # 136: a few tiles more than SMs
DECODE_QUERIES = (1, 2, 4, 8)  # more than one query: speculative decoding
PREFILL_QUERIES = (12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 4096, 16384)
KEYS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
MOST_QUERIES = 65536  # most queries of a batch
LIST_SHARES = (1 / 16, 1 / 2)  # shares of all blocks that lists have
NEAR = 0.08  # more than a plan's expected time that kernels take which calls of sizes in between may ask for
# Codes: margin of dequantising first against converting in the kernel, as a multiple of the one among plans. Tiles of
# the two ways end at different numbers of queries, so their times change places within few sizes.
WAYS = 2.5


class Sizes(NamedTuple):
    batch: int
    seq_q: int
    seq_k: int


def sizes() -> Iterator[Sizes]:
    """Sizes of calls: decoding, speculative decoding, prefill with and without earlier keys."""
    for seq_q in (*DECODE_QUERIES, *PREFILL_QUERIES):
        for batch in BATCHES:
            if batch * seq_q <= MOST_QUERIES:
                yield from (Sizes(batch, seq_q, seq_k) for seq_k in (seq_q, *KEYS) if seq_k >= seq_q)


def rank_of(model: Model, ranks: int) -> Model:
    """A rank's share of a model's heads. ValueError if they cannot be shared so."""
    if model.heads_q % ranks or (model.heads_kv % ranks and ranks % model.heads_kv):
        raise ValueError(
            f"{model.heads_q} query heads and {model.heads_kv} KV heads do not go into {ranks} ranks"
        )
    return replace(model, heads_q=model.heads_q // ranks, heads_kv=max(model.heads_kv // ranks, 1))


def problems(
    model: Model, calls: Iterable[str], page_sizes: Iterable[int], kv_cache: str = "16-bit"
) -> Iterator[AttentionProblem]:
    """The problems of a model's calls.

    calls: some of ``CALLS``, ``BLOCKS`` and ``TREES``. page_sizes: keys of a page, for paged calls. kv_cache: one of
    ``KV_CACHES``; a cache of codes gives problems with a scale and without.
    """
    if kv_cache != "16-bit":
        for scaled in (True, False):
            for found in problems(model, calls, page_sizes):
                codes = dict(kv_format=kv_cache, has_k_scale=scaled, has_v_scale=scaled)
                yield replace(found, format=replace(found.format, **codes))
        return
    forms = [(call, page) for call in calls for page in (page_sizes if call in PAGED else (0,))]
    for call, page_size in forms:
        for layer in model.layers:
            for size in sizes():
                if call == TREES and not 1 < size.seq_q <= MOST_DRAFTS:
                    continue
                if call != BLOCKS:
                    yield problem(model, layer, size, call, page_size)
                if call == "packed" and model.merged:
                    for causal in (True, False):  # new tokens; a part of their context, all of which they see
                        part = {"causal": causal, "return_lse": True}
                        yield problem(model, layer | part, size, call, page_size)
                if call == "paged" and size.seq_q == 1:  # some callers do without a mask
                    yield problem(model, layer | {"causal": False}, size, call, page_size)
                if call == BLOCKS:  # lists with patterns say all of a mask, a layer's window included
                    yield from listed(model, layer, size)
                    yield from listed(model, layer | {"causal": False, "window": None}, size)
        for stride in model.strides:  # keys of both kinds, each of which gives a part of the result
            for size in sizes():
                for part in (*model.layers, {"key_stride": stride}):
                    yield problem(model, part | {"normalize": False}, size, call, page_size)


def listed(model: Model, layer: dict, size: Sizes) -> Iterator[AttentionProblem]:
    """The problems of a call with lists of blocks: of unknown lengths, and with some of all blocks."""
    found = problem(model, layer, size, BLOCKS, 0)
    yield found
    for share in LIST_SHARES:
        mean = max(share * size.seq_k / BLOCK, 1.0)
        masked = mean / 2 if found.mask.has_patterns else 1.0
        yield replace(found, visited=Visits(mean, masked, 2 * mean, 2 * mean))


def problem(model: Model, layer: dict, size: Sizes, call: str, page_size: int) -> AttentionProblem:
    """The problem of one call, in bf16. layer: options of ``attention``, or for packed calls ``attention_varlen``."""
    batch, seq_q, seq_k = size

    def tensor(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    per_batch = tensor(batch, dtype=torch.int32)
    options = {"causal": True} | layer
    if "key_stride" in layer:
        seq_k = max(seq_k // layer["key_stride"], 1)
        options["q_start"] = per_batch
    if call == "ranges":
        options |= {"kv_lengths": per_batch, "q_start": per_batch}
    if call == BLOCKS:
        options |= lists_of_blocks(batch, seq_q, seq_k, patterns=not options["causal"])
    packed = call in PACKED
    if call == TREES:
        options |= {"q_start": per_batch, "tree": tensor(batch * seq_q, dtype=torch.int64)}
    if call in PAGED:
        pages = -(-seq_k // page_size)
        options |= {"kv_lengths": per_batch, "page_table": tensor(batch, pages, dtype=torch.int32)}
        key_rows = (batch * pages, page_size)
    else:
        key_rows = (min(batch * seq_k, POSITION_LIMIT),) if packed else (batch, seq_k)
    if packed:
        starts = tensor(batch + 1, dtype=torch.int32)
        options |= {"cu_seqlens_q": starts, "max_seqlen_q": seq_q, "max_seqlen_k": seq_k}
        options["cu_seqlens_k"] = None if call in PAGED else starts
    if model.sink and options.get("normalize", True):
        options["sink"] = tensor(model.heads_q)
    rows = (batch * seq_q,) if packed else (batch, seq_q)
    if model.images and options["causal"] and call not in (BLOCKS, TREES):  # (lists say what images see)
        options["ranges"] = tensor(*rows, 2, dtype=torch.int32)
    q = tensor(*rows, model.heads_q, model.head_dim)
    k = tensor(*key_rows, model.heads_kv, model.head_dim)
    if model.shared_kv and model.v_dim:
        options["v_dim"] = model.v_dim
    v = None if model.shared_kv else tensor(*key_rows, model.heads_kv, model.v_dim or model.head_dim)
    return AttentionProblem.of(q, k, v, memory=False, **options)


def lists_of_blocks(batch: int, seq_q: int, seq_k: int, patterns: bool) -> dict:
    """Arguments of ``AttentionProblem.of`` for lists of blocks that all heads share. patterns: whether partial blocks
    have masks of their own, as those of FlexAttention's BlockMask have."""
    rows, columns = (-(-length // BLOCK) for length in (seq_q, seq_k))
    shapes = {
        "kv_visits": (batch, 1, rows, columns, 2), "kv_counts": (batch, 1, rows, 2),
        "q_visits": (batch, 1, columns, rows, 3), "q_counts": (batch, 1, columns, 4),
        "kv_order": (batch, 1, rows, ORDER_WORDS),
    }  # fmt: skip
    if patterns:
        shapes |= dict.fromkeys(("patterns", "q_patterns"), (OWN_PATTERNS, BLOCK, BLOCK // WORD_BITS))
    tensors = {name: torch.empty(shape, dtype=torch.int32, device="meta") for name, shape in shapes.items()}
    return {"block_queries": BLOCK, "block_keys": BLOCK, **tensors}


def inserts(model: Model, kv_cache: str) -> list[tuple[Kernel, Hashable]]:
    """The kernels that store a model's new keys and values as codes, with a scale and without."""
    sizes = (model.head_dim, model.v_dim or model.head_dim)
    found = []
    for scale in ("tensor", None):
        config = InsertConfig(
            "bfloat16", kv_cache, *sizes, q_heads=0, kv_heads=heads_per_item(model.heads_kv), k_scale=scale,
            v_scale=scale,
        )  # fmt: skip
        found.append((INSERT, config))
    return found


def latent_kernels(model: Model, page_sizes: Iterable[int], target: Target) -> list[tuple[Kernel, Hashable]]:
    """The kernels that read a cache of latent rows in e4m3, which no other calls read: those of ``mla_decode``, or with
    an indexer those of ``gathered_attention`` over rows of 656 bytes, for a query's slots as engines give them."""
    if PAGE_ROWS not in page_sizes:
        raise ValueError(f"--page-sizes: rows in e4m3 need pages of {PAGE_ROWS}")
    wanted: dict[tuple[Kernel, Hashable], None] = {}
    for batch, seq_q, seq_k in sizes():
        found = []
        if model.selected:  # prompts, too
            slots, lengths = (model.selected,), (False,)
            found.append(GatheredProblem(batch * seq_q, model.heads_q, SELECTED_ROWS, slots, lengths, 1.0))
        elif seq_q <= max(DECODE_QUERIES):
            call = (batch, seq_q, model.heads_q, -(-seq_k // PAGE_ROWS) * PAGE_ROWS, 1.0)
            found += [problem_of(*call, has_q_scale=codes) for codes in (False, True)]
        for problem in found:
            plan = make_plan(problem, target)
            wanted[plan.kernel(target), plan.config] = None
            wanted |= dict.fromkeys(kernels_with_cuts(plan.kernel(target), plan.config))
            if plan.combine is not None:
                wanted[plan.combine_kernel, plan.combine] = None
    return list(wanted)


def needed(
    model: Model,
    calls: Iterable[str],
    page_sizes: Iterable[int],
    kv_cache: str,
    target: Target,
    margin: float,
) -> list[tuple[Kernel, Hashable]]:
    """All kernels of a model's calls over a cache, those that store codes included."""
    latent = model.shared_kv and model.v_dim
    if model.selected and kv_cache != "e4m3":
        raise ValueError(f"--kv-cache: rows that an indexer selects must be e4m3, got {kv_cache}")
    if latent and kv_cache != "16-bit":
        if kv_cache != "e4m3":
            raise ValueError(f"--kv-cache: latent rows are e4m3 or 16-bit, got {kv_cache}")
        return latent_kernels(model, page_sizes, target)
    calls = tuple(calls)
    found = kernels(problems(model, calls, page_sizes, kv_cache), target, margin)
    if BLOCKS in calls:  # what converts flash-attn-4's lists
        found += [(kernel, ListsConfig(has_full)) for kernel in KERNELS for has_full in (False, True)]
    return found if kv_cache == "16-bit" else found + inserts(model, kv_cache)


def kernels(
    found: Iterable[AttentionProblem], target: Target, margin: float = 0.0
) -> list[tuple[Kernel, Hashable]]:
    """The kernels with their configurations that a target runs for these problems, each once; with a margin, those,
    too, that the plan's model of time expects to take at most ``1 + margin`` times as long. Keys in codes: those of
    the way (``plan.expanding``) that takes at most ``1 + WAYS * margin`` times as long as the other, too.

    Raises UnsupportedProblem naming what the target's kernel cannot do.
    """
    package = ATTENTION.of(target.architecture)
    wanted: dict[tuple[Kernel, Hashable], None] = {}
    for problem in found:
        for first in likely_ways(package.CHOICES, problem, target, WAYS * margin):
            if first:
                wanted[EXPAND, expand_config(problem)] = None
            attended = expanded(problem) if first else problem
            for config, splits in likely_kernels(package.CHOICES, attended, target, margin):
                wanted[package.ATTENTION, config] = None
                wanted |= dict.fromkeys(kernels_with_cuts(package.ATTENTION, config))
                second = second_kernel(attended, config, splits)
                if second is not None:
                    wanted[second] = None
    return list(wanted)
