"""Random attention problems in templates: calls that differ in sizes alone, and so share their kernels."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .sweep_shapes import AttentionShape

PROBLEMS = 10  # of a template
LEAST_US, MOST_US = 2.5, 900.0  # of the problems, by bytes and products
MOST_HELD = 2 << 30  # bytes of a problem's tensors
GUESS_BYTES_US, GUESS_FLOPS_US = 4.0e6, 6.0e8


@dataclass(frozen=True)
class Template:
    """Calls that differ in sizes alone. fields: of ``AttentionShape``. peers: whether these are timed, too."""

    kind: str
    fields: tuple
    shapes: tuple[AttentionShape, ...]
    peers: bool


HEADS = (  # query heads of a KV head, D
    *((group, 64) for group in (1, 3, 4, 8, 8, 16)),
    *((group, 128) for group in (1, 2, 4, 4, 5, 7, 8, 8, 16)),
    *((group, 256) for group in (1, 2, 2, 4, 8)),
    *((1, dim) for dim in (96, 192)),
)
WIDE_HEADS = ((1, 192), (16, 192), (1, 192, 128), (16, 192, 128), (8, 512), (8, 512))  # a third number: V's D
FORMS = {
    "prefill": ("packed", "packed-paged", "packed-paged", "plain"),
    "chunked": ("plain", "packed", "packed-paged", "packed-paged", "paged"),
    "mixed": ("packed-paged",),
    "decode": ("paged", "packed-paged", "packed-paged", "plain", "ranges"),
    "speculative": ("paged", "packed-paged", "plain"),
}


def size(draw: random.Random, least: float, most: float) -> int:
    """Even in its logarithm."""
    return round(least * (most / least) ** draw.random())


def lengths(draw: random.Random, count: int, most: int, equal: bool) -> tuple[int, ...]:
    return (most,) * count if equal else tuple(draw.randint(1, most) for _ in range(count))


def template(draw: random.Random, kind: str, head: tuple[int, ...], peers: bool) -> Template:
    group, dim, *v_dim = head
    form = draw.choice(FORMS[kind])
    window = draw.choice((None, None, 128, 512, 1024, 4096))
    fields = {
        "form": form,
        "page_size": draw.choice((16, 16, 64, 128, 256)) if "paged" in form else 0,
        "head_dim": dim,
        "sink": dim == 64 and draw.random() < 0.5,
    } | ({"v_dim": v_dim[0]} if v_dim else {})
    found = {}
    for _ in range(2000):
        if len(found) == PROBLEMS:
            break
        heads_kv = draw.choice((1, 1, 2, 4, 8)) if group > 2 else draw.choice((2, 4, 8, 16))
        shape = draw_shape(draw, kind, form)
        made = AttentionShape(
            kind, "", heads_kv * group, heads_kv, queries=shape[0], keys=shape[1], window=window, **fields
        )
        guess = max(made.bytes / GUESS_BYTES_US, made.flops / GUESS_FLOPS_US)
        if LEAST_US / 4 < guess < MOST_US and made.held_bytes < MOST_HELD and guess < size(draw, 4, MOST_US):
            found[made] = None
    return Template(kind, tuple(fields.items()), tuple(found), peers)


def draw_shape(draw: random.Random, kind: str, form: str) -> tuple:
    """(queries, keys)."""
    equal = draw.random() < 0.5 or form == "plain"
    if kind == "prefill":
        queries = lengths(draw, size(draw, 1, 24), size(draw, 96, 16384), equal)
        return queries, queries
    if kind == "chunked":
        batch = size(draw, 1, 8)
        same = equal or form in ("paged", "ranges")
        queries = lengths(draw, batch, size(draw, 16, 4096), same)
        before = lengths(draw, batch, size(draw, 256, 32768), equal)
        return queries, tuple(q + k for q, k in zip(queries, before, strict=True))
    if kind == "mixed":
        decoding, most = size(draw, 4, 160), size(draw, 512, 12000)
        chunks = lengths(draw, draw.randint(1, 4), size(draw, 64, 3000), equal)
        before = [draw.choice((0, draw.randint(0, most))) for _ in chunks]
        keys = lengths(draw, decoding, most, False)
        return (1,) * decoding + chunks, keys + tuple(q + k for q, k in zip(chunks, before, strict=True))
    queries = 1 if kind == "decode" else draw.randint(2, 8)
    batch, most = size(draw, 1, 200), size(draw, 256, 50000)
    keys = tuple(max(n, queries) for n in lengths(draw, batch, most, equal))
    return (queries,) * batch, keys


def templates(count: int, seed: int, only, peer_share: float, heads=HEADS) -> list[Template]:
    draw, found = random.Random(f"plans {seed}"), []
    for i in range(count):
        kind = only[i % len(only)]
        found.append(template(draw, kind, draw.choice(heads), draw.random() < peer_share))
    return [one for one in found if one.shapes]
