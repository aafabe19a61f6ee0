"""The shapes of sweeps (``sweep_shapes``): drawn at random from published models, and a fixed table."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from warpspec.aot.models import CALLS, FULL, MODELS, PACKED, PAGED, Model, sliding

from .sweep_shapes import (
    FLOAT8,
    GRADIENTS,
    KINDS,
    LIST_GRADIENTS,
    LISTS,
    MLA,
    MOST_BYTES,
    NVFP4,
    SHARES,
    SIZE_GRADIENTS,
    SIZES,
    AttentionShape,
    RowShape,
    Shape,
)

# Models beside those of aot. Soft caps are left out here: most peers have none. SIZES has them.
MORE_MODELS = {
    "llama-3.2-1b": Model(32, 8, 64),
    "llama-3.2-3b": Model(24, 8, 128),
    "llama-3-405b": Model(128, 8, 128),
    "qwen2.5-7b": Model(28, 4, 128),
    "qwen2.5-14b": Model(40, 8, 128),
    "qwen3-0.6b": Model(16, 8, 128),
    "mistral-7b-v0.1": Model(32, 8, 128, layers=(sliding(4096),)),
    "gemma-2-9b": Model(16, 8, 256, layers=(FULL, sliding(4096))),
    "gemma-2-27b": Model(32, 16, 128, layers=(FULL, sliding(4096))),
    "gemma-3-1b": Model(4, 1, 256, layers=(FULL, sliding(512))),
}
SHARED = tuple(name for name, model in MODELS.items() if model.shared_kv and not model.v_dim)  # no MLA
DRAWN = {name: model for name, model in (MODELS | MORE_MODELS).items() if not model.shared_kv}
# Layers of SIZES: models whose head sizes or soft caps are none of the above, towers of images, and D 512.
ODD_MODELS = {
    name: model
    for name, model in MODELS.items()
    if model.v_dim or model.head_dim % 64 or "softcap" in model.layers[0]
} | {
    "stablelm-3b": Model(32, 32, 80),
    "gemma-4-31b-global": Model(32, 4, 512),
    "gemma-4-26b-global": Model(16, 2, 512),
}
TOWERS = {"qwen3-vl": (16, 72), "siglip-so400m": (16, 72), "minimax-m3": (16, 80)}  # heads, head size
LATENT = {name: model for name, model in MODELS.items() if model.shared_kv and model.v_dim}
MLA_PAGE = 64
# Kinds that have calls of few queries.
DECODING = ("speculative", "decode", "shared", FLOAT8, NVFP4, SIZES, MLA)
MOST_DECODED = 8  # queries of a request in such a call
TENSOR_PARALLEL = (1, 1, 1, 1, 2, 4, 8)  # GPUs that share a layer's heads

PAGE_SIZES = (16, 32, 64, 128, 256)
MOST_FLOPS = 1.6e12  # so that a call takes a few milliseconds at most
VOCABULARIES = (32000, 32064, 50257, 128256, 129280, 131072, 151936, 152064, 201088, 256000, 262144)
EXPERTS = (8, 16, 32, 60, 64, 72, 128, 160, 256)
GRADIENT_DIMS = (64, 128, 256)  # head sizes of GRADIENTS, which are tuned for
CODE_DIMS = LIST_DIMS = (64, 128, 256)  # head sizes that have such keys, and lists that are drawn


def counts(total: int, kinds: Sequence[str] = KINDS) -> dict[str, int]:
    """How many shapes of each kind: by SHARES, at least one of each where there are as many, together ``total``."""
    whole = sum(SHARES[kind] for kind in kinds)
    wanted = {kind: total * SHARES[kind] / whole for kind in kinds}
    found = {kind: int(value) for kind, value in wanted.items()}
    if total >= len(kinds):
        found = {kind: max(1, value) for kind, value in found.items()}
    while sum(found.values()) != total:
        step = 1 if sum(found.values()) < total else -1
        kind = max(kinds, key=lambda kind: step * (wanted[kind] - found[kind]))
        found[kind] += step
    return found


def draw_shapes(
    total: int, seed: int, kinds: Sequence[str] = KINDS, few_queries: bool = False
) -> list[Shape]:
    """Different random shapes; the same for the same numbers. Kinds are drawn independently of each other.

    few_queries: only calls of at most MOST_DECODED queries a request; kinds: of DECODING."""
    shapes = []
    for kind, count in counts(total, kinds).items():
        draw, found = random.Random(f"{kind} {seed}"), {}
        while len(found) < count:
            shape = DRAWS[kind](draw)
            wanted = not few_queries or max(shape.queries) <= MOST_DECODED
            if wanted and shape.held_bytes <= MOST_BYTES and shape.flops <= MOST_FLOPS:
                found[shape] = None
        shapes += found
    return shapes


def size(draw: random.Random, least: int, most: int) -> int:
    """Even in its logarithm; half of them round."""
    value = round(least * (most / least) ** draw.random())
    if draw.random() < 0.5:
        step = 1 << max(0, value.bit_length() - 3)
        value = max(least, value // step * step)
    return value


def lengths(draw: random.Random, batch: int, most: int, equal: bool, least: int = 1) -> tuple[int, ...]:
    if equal:
        return (most,) * batch
    return tuple(draw.randint(min(least, most), most) for _ in range(batch))


def layer(draw: random.Random, models: dict[str, Model] = DRAWN) -> dict:
    """Fields of a shape that a model decides, of one of its layers and of one of the GPUs that share it."""
    name = draw.choice(sorted(models))
    model = models[name]
    options = draw.choice(model.layers)
    parts = draw.choice([parts for parts in TENSOR_PARALLEL if model.heads_kv % parts == 0])
    return {
        "model": name,
        "heads_q": model.heads_q // parts,
        "heads_kv": model.heads_kv // parts,
        "head_dim": model.head_dim,
        "window": options["window"][0] + 1 if "window" in options else None,
        "sink": model.sink,
    }


def form(draw: random.Random, *choices: str) -> dict:
    """Fields of a shape: its form, and pages where it has them."""
    chosen = draw.choice(choices)
    return {"form": chosen, "page_size": draw.choice(PAGE_SIZES) if chosen in PAGED else 0}


def prefill(draw: random.Random) -> AttentionShape:
    batch, most, equal = size(draw, 1, 24), size(draw, 128, 32768), draw.random() < 0.5
    queries = lengths(draw, batch, most, equal)
    equal = len(set(queries)) == 1
    taken = form(draw, "packed", "packed-paged", *(("plain", "plain") if equal else ()))
    return AttentionShape("prefill", queries=queries, keys=queries, **layer(draw), **taken)


def chunked(draw: random.Random) -> AttentionShape:
    batch, most = size(draw, 1, 8), size(draw, 16, 4096)
    before, equal = size(draw, 256, 65536), draw.random() < 0.5
    queries = lengths(draw, batch, most, equal)
    keys = tuple(q + k for q, k in zip(queries, lengths(draw, batch, before, equal), strict=True))
    packed = (call for call in CALLS if call in PACKED)
    taken = form(draw, *(("plain", "paged", "packed-paged") if len(set(queries)) == 1 and equal else packed))
    return AttentionShape("chunked", queries=queries, keys=keys, **layer(draw), **taken)


def of_few_queries(draw: random.Random, kind: str, queries: int) -> AttentionShape:
    batch, most, equal = size(draw, 1, 256), size(draw, 256, 65536), draw.random() < 0.4
    keys = lengths(draw, batch, most, equal, least=queries)
    taken = form(draw, "paged", "packed-paged", "packed-paged", "plain" if equal else "ranges")
    return AttentionShape(kind, queries=(queries,) * batch, keys=keys, **layer(draw), **taken)


def speculative(draw: random.Random) -> AttentionShape:
    return of_few_queries(draw, "speculative", draw.randint(2, MOST_DECODED))


def decode(draw: random.Random) -> AttentionShape:
    return of_few_queries(draw, "decode", 1)


def mixed(draw: random.Random) -> AttentionShape:
    """Requests that decode, then some that are in their prefill."""
    decoding, most = size(draw, 4, 192), size(draw, 512, 16384)
    chunks = lengths(draw, draw.randint(1, 4), size(draw, 64, 4096), equal=draw.random() < 0.5)
    before = [draw.choice((0, draw.randint(0, most))) for _ in chunks]
    queries = (1,) * decoding + chunks
    keys = lengths(draw, decoding, most, False) + tuple(q + k for q, k in zip(chunks, before, strict=True))
    return AttentionShape("mixed", queries=queries, keys=keys, **layer(draw), **form(draw, "packed-paged"))


def shared(draw: random.Random) -> AttentionShape:
    """K and V one tensor of one head, as in DeepSeek-V4; without what no peer has: sinks and compressed positions."""
    name = draw.choice(SHARED)
    model = MODELS[name]
    parts = draw.choice((1, 1, 2, 4))
    queries = (1,) * size(draw, 1, 128)
    keys = (size(draw, 256, 16384),) * len(queries)
    heads = {"heads_q": model.heads_q // parts, "heads_kv": 1, "head_dim": model.head_dim}
    return AttentionShape(
        *("shared", name), **heads, form="plain", queries=queries, keys=keys, causal=False, shared_kv=True
    )


def matrix(draw: random.Random) -> dict:
    """Fields of a RowShape: logits of a vocabulary, of a router, or any."""
    what = draw.choice(("vocabulary", "vocabulary", "experts", "any"))
    if what == "vocabulary":
        rows, length = size(draw, 1, 256), draw.choice(VOCABULARIES)
    elif what == "experts":
        rows, length = size(draw, 1000, 32768), draw.choice(EXPERTS)
    else:
        rows, length = size(draw, 1, 8192), size(draw, 17, 999983)
        rows = min(rows, int(1e9) // length + 1)
    return {"rows": rows, "length": length, "dtype": draw.choice(("bfloat16", "bfloat16", "float32"))}


def softmax(draw: random.Random) -> RowShape:
    return RowShape("softmax", **matrix(draw))


def top_k(draw: random.Random) -> RowShape:
    """Draw a top-k: a router's 1 to 8 experts, whose probabilities sum to 1, or up to 100 of something else."""
    fields = matrix(draw)
    router = fields["length"] in EXPERTS
    k = draw.choice((1, 2, 4, 6, 8)) if router else draw.choice((1, 8, 20, 40, 50, 64, 100))
    return RowShape("top-k", **fields, k=min(k, fields["length"]), renormalize=router)


def gradients(draw: random.Random) -> AttentionShape:
    """A training step's ``trained`` layer."""
    while (fields := layer(draw))["head_dim"] not in GRADIENT_DIMS:
        pass
    return trained(draw, GRADIENTS, fields)


def trained(draw: random.Random, kind: str, fields: dict) -> AttentionShape:
    """A layer of a training step: equal sequences, or packed documents; a fifth without a causal mask. Without sinks,
    which most peers have no gradients for. fields: what its model decides."""
    batch, most, equal = size(draw, 1, 16), size(draw, 192, 16384), draw.random() < 0.6
    queries = lengths(draw, batch, most, equal)
    causal = fields["window"] is not None or draw.random() < 0.8
    form = "plain" if len(set(queries)) == 1 else "packed"
    fields |= {"sink": False, "causal": causal, "form": form}
    return AttentionShape(kind, queries=queries, keys=queries, **fields)


def size_gradients(draw: random.Random) -> AttentionShape:
    """``trained``, of a model with a head size of its own, or a tower of images."""
    shape = sizes(draw)
    while shape.head_dim in GRADIENT_DIMS or shape.softcap or shape.head_dim > GRADIENT_DIMS[-1]:
        shape = sizes(draw)
    names = ("model", "heads_q", "heads_kv", "head_dim", "v_dim", "window")
    found = trained(draw, SIZE_GRADIENTS, {name: getattr(shape, name) for name in names})
    return replace(found, causal=False) if shape.model in TOWERS else found


def quantized(draw: random.Random, kind: str) -> AttentionShape:
    """A serving layer of any kind, decoding most of all, whose cache has codes. kind: of CODE_BITS."""
    make = draw.choice((decode, decode, decode, speculative, chunked, prefill))
    while (shape := make(draw)).head_dim not in CODE_DIMS:
        pass
    return replace(shape, kind=kind)


def sizes(draw: random.Random) -> AttentionShape:
    """A layer with a head size of its own or a soft cap, or a tower of images: full attention within each image."""
    if draw.random() < 0.25:
        name = draw.choice(sorted(TOWERS))
        heads, dim = TOWERS[name]
        images = lengths(draw, size(draw, 1, 64), size(draw, 64, 8192), draw.random() < 0.5)
        form = "plain" if len(set(images)) == 1 else "packed"
        fields = {"heads_q": heads, "heads_kv": heads, "head_dim": dim, "form": form, "causal": False}
        return AttentionShape(SIZES, name, queries=images, keys=images, **fields)
    shape = draw.choice((prefill, prefill, chunked, decode, mixed))(draw)
    fields = layer(draw, {name: model for name, model in ODD_MODELS.items() if not model.shared_kv})
    model = ODD_MODELS[fields["model"]]
    return replace(shape, kind=SIZES, v_dim=model.v_dim, softcap=model.layers[0].get("softcap"), **fields)


def mla(draw: random.Random) -> AttentionShape:
    """MLA's decode: a rank's heads on latent rows, whose first part V is. Half of them without pages, as peers can."""
    name = draw.choice(sorted(LATENT))
    model, parts = LATENT[name], draw.choice((1, 2, 4, 8))
    batch, most, equal = size(draw, 1, 160), size(draw, 256, 32768), draw.random() < 0.6
    keys = lengths(draw, batch, most, equal, least=2)
    taken = draw.choice(("plain", "paged")) if equal else "paged"
    queries = 1 if taken == "plain" else draw.choice((1, 1, 2, 4))
    return AttentionShape(
        *(MLA, name, model.heads_q // parts, 1, model.head_dim, taken),
        queries=(queries,) * batch,
        keys=keys,
        page_size=MLA_PAGE if taken == "paged" else 0,
        causal=queries > 1,
        shared_kv=True,
        v_dim=model.v_dim,
    )


def listed(draw: random.Random, kind: str = LISTS) -> AttentionShape:
    """Equal sequences under a mask that is given as lists of blocks."""
    while (fields := layer(draw))["head_dim"] not in LIST_DIMS:
        pass
    batch, length = size(draw, 1, 4), size(draw, 1024, 16384)
    name = draw.choice(("documents", "equal", "sliding", "dilated", "blocks", "blocks"))
    number = {
        "documents": size(draw, 128, 4096),
        "equal": size(draw, 128, 4096),
        "sliding": size(draw, 128, 4096),
        "dilated": draw.choice((2, 4, 8)),
        "blocks": draw.randint(0, 9999),
    }[name]
    fields |= {"window": None, "sink": False, "form": "plain", "causal": False, "mask": (name, number)}
    return AttentionShape(kind, queries=(length,) * batch, keys=(length,) * batch, **fields)


DRAWS = {
    "prefill": prefill,
    "chunked": chunked,
    "speculative": speculative,
    "decode": decode,
    "mixed": mixed,
    "shared": shared,
    "softmax": softmax,
    "top-k": top_k,
    GRADIENTS: gradients,
    FLOAT8: partial(quantized, kind=FLOAT8),
    NVFP4: partial(quantized, kind=NVFP4),
    SIZES: sizes,
    MLA: mla,
    LISTS: listed,
    SIZE_GRADIENTS: size_gradients,
    LIST_GRADIENTS: partial(listed, kind=LIST_GRADIENTS),
}


# The fixed table.


def cliffs() -> list[Shape]:
    """Shapes at which calls were slower than a peer's, or than memory allows, when they were first swept."""
    draw = random.Random("cliffs")
    gpt_oss = {"model": "gpt-oss-120b", "heads_q": 64, "heads_kv": 8, "head_dim": 64, "sink": True}
    llama = {"model": "llama-3-8b", "heads_q": 32, "heads_kv": 8, "head_dim": 128}
    large = {"model": "llama-3-70b", "heads_q": 64, "heads_kv": 8, "head_dim": 128}
    split_keys = [(llama, (8, 1, 4096)), (large, (4, 1, 8192)), (llama, (2, 1, 16384))]

    def packed(heads, most):
        queries = lengths(draw, 16, most, False)
        return AttentionShape("prefill", form="packed", queries=queries, keys=queries, **heads)

    def decoding(heads, batch, most, page_size, form):
        keys = lengths(draw, batch, most, False)
        taken = {"form": form, "page_size": page_size}
        return AttentionShape("decode", queries=(1,) * batch, keys=keys, **heads, **taken)

    def packed_decode(heads, batch, each):
        taken = {"form": "packed-paged", "page_size": 64}
        return AttentionShape("decode", queries=(1,) * batch, keys=(each,) * batch, **heads, **taken)

    def mixed(heads):
        queries = (1,) * 64 + (2048,) * 2
        keys = (*lengths(draw, 64, 8192, False), 2048, 8192)
        return AttentionShape("mixed", form="packed-paged", page_size=16, queries=queries, keys=keys, **heads)

    def plain(kind, heads, batch, queries, keys, **more):
        fields = {"form": "plain", "queries": (queries,) * batch, "keys": (keys,) * batch}
        return AttentionShape(kind, **fields, **heads, **more)

    return [
        *(plain("prefill", gpt_oss, 1, 8192, 8192, window=window) for window in (64, 128, 256, 1024)),
        plain("prefill", gpt_oss, 1, 16384, 16384),
        plain("chunked", llama, 1, 512, 8192),
        plain("chunked", llama, 1, 2048, 32768),
        *(decoding(llama, 32, 8192, 16, form) for form in ("paged", "packed-paged")),
        *(decoding(gpt_oss, 128, 4096, 64, form) for form in ("paged", "packed-paged")),
        plain("decode", gpt_oss, 64, 1, 8192, window=128),
        *(plain("decode", heads, *row) for heads, row in split_keys),
        *(packed_decode(llama, 64, each) for each in (512, 1024)),
        *(mixed(heads) for heads in (llama, gpt_oss)),
        *(packed(heads, 4096) for heads in (gpt_oss, llama)),
        RowShape("softmax", 16, 151936, "bfloat16"),
        RowShape("softmax", 128, 128256, "bfloat16"),
        RowShape("top-k", 1, 129280, "float32", k=50),
        RowShape("top-k", 17, 999983, "float32", k=100),
    ]
