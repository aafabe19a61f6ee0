"""What operators write to: no element twice and no argument's memory. Views between an argument's rows are taken."""

from dataclasses import replace

import pytest
import torch
from helpers.cache_cases import Compressor, Run
from helpers.swap_cases import small

from warpspec import cache
from warpspec.common.launch import Kernel
from warpspec.common.outputs import check_apart, check_output
from warpspec.fmha import attention
from warpspec.fmha.flash_attn import flash_attn_with_kvcache
from warpspec.latent import mla_decode
from warpspec.latent.cache import LatentPool, compress, insert_window, rope_table, store_rows
from warpspec.latent.gathered import KeySet, gathered_attention
from warpspec.latent.projection import Float8Tensor, output_projection
from warpspec.softmax import softmax
from warpspec.swap import swap_ffn_decode

TOKENS, HEADS = 3, 2
SLOTS = torch.arange(TOKENS, dtype=torch.int32)
TABLE = rope_table(1e4 ** (-torch.arange(32) / 32), 16)
POOL_BYTES = 4096 * 2


def wide(*shape):
    return torch.randn(shape).bfloat16()


def bf16_pool(memory: torch.Tensor) -> LatentPool:
    """A page of 4 rows on bf16 memory."""
    return LatentPool(memory.view(-1)[: POOL_BYTES // 2].view(torch.uint8).view(1, -1), 4, "bf16")


def insert(q=None, kv=None, out=None, pool=None, backend="reference"):
    q, kv = wide(TOKENS, HEADS, 512) if q is None else q, wide(TOKENS, 512) if kv is None else kv
    pool = pool or LatentPool.empty(2, 4, "v4-fp8")
    options = dict(weight=torch.ones(512), pool=pool, slots=SLOTS, out=out, backend=backend)
    return insert_window(q, kv, TABLE, SLOTS, **options)


def gathered(q=None, out=None, pool=None, backend="reference", **options):
    q = wide(TOKENS, HEADS, 512) if q is None else q
    pool = pool or LatentPool.empty(2, 4, "v4-fp8")
    return gathered_attention(q, [KeySet(pool, SLOTS[:, None].clone())], out=out, backend=backend, **options)


def project(o=None, out=None, weight=None, backend="reference"):
    o = wide(TOKENS, HEADS, 512) if o is None else o
    weight = wide(HEADS, 512, 512) if weight is None else weight
    return output_projection(o, weight, out=out, backend=backend)


def compressed(**changes):
    arguments = Run.start(Compressor.random("csa", 2, 8), "bf16", 2).arguments([5, 3])
    compress(**{**arguments, **changes}, backend="reference")


def swap_own_ram():
    _, state, weights = small(2, cores=4, d_model=32, d_ff=16)
    return swap_ffn_decode(state.ram[:, 0, 0], state, weights, in_place=True, backend="reference")


def decode(k_cache, k=None):
    k = k_cache[:, :1] if k is None else k
    lengths, v_cache = torch.zeros(2, dtype=torch.int32), torch.zeros_like(k_cache)
    return flash_attn_with_kvcache(wide(2, 1, 1, 64), k_cache, v_cache, k, k, cache_seqlens=lengths)


def own_starts():
    tail = Run.start(Compressor.random("csa", 2, 8), "bf16", 2).tail
    compressed(tail=tail, starts=tail.progress.view(-1)[:2])


def expanded_tail():
    tail = Run.start(Compressor.random("csa", 2, 8), "bf16", 2).tail
    compressed(tail=replace(tail, rows=tail.rows[:1].expand_as(tail.rows)))


ROWS = wide(5, HEADS, 512)  # of [3, HEADS, 512], from the first row on or from the third on
ITSELF, SHARED = "elements must not overlap each other", "must not overlap another argument's memory.* with"
NEGATED = "must not be a negated view"
FLAT = wide(8192)
REFUSED = {
    "insert-expanded": (lambda: insert(out=wide(TOKENS, 1, 512).expand(-1, HEADS, -1)), f"out: {ITSELF}"),
    "insert-kv": (lambda: insert(q=wide(TOKENS, 1, 512), kv=ROWS[:3, 0], out=ROWS[:3, :1]), f"out: {SHARED} kv"),
    "insert-shifted-q": (
        lambda: insert(q=FLAT[:3072].view(3, 2, 512), out=FLAT[512:3584].view(3, 2, 512)),
        "out: must be q itself or not share memory with it, got one that overlaps q",
    ),
    "insert-out-pool": (lambda: insert(out=FLAT[:3072].view(3, 2, 512), pool=bf16_pool(FLAT)), f"out: {SHARED} pool"),
    "insert-kv-pool": (lambda: insert(kv=FLAT[:1536].view(3, 512), pool=bf16_pool(FLAT)), f"pool: {SHARED} kv"),
    "store-pool": (lambda: store_rows(FLAT[:1536].view(3, 512), bf16_pool(FLAT), SLOTS), f"pool: {SHARED} rows"),
    "gathered-expanded": (lambda: gathered(out=wide(TOKENS, 1, 512).expand(-1, HEADS, -1)), f"out: {ITSELF}"),
    "gathered-q": (lambda: gathered(q=ROWS[:3], out=ROWS[2:]), f"out: {SHARED} q"),
    "gathered-pool": (
        lambda: gathered(out=FLAT[1024:4096].view(3, 2, 512), pool=bf16_pool(FLAT)),
        f"out: {SHARED} key_sets: pool of set 0",
    ),
    "gathered-fp8": (
        lambda: gathered(
            out=Float8Tensor(ROWS[:3].view(torch.float8_e4m3fn)[..., :512], torch.ones(3, 2, 4)),
            q=ROWS[:3],
            out_format="fp8",
        ),
        f"out data: {SHARED} q",
    ),
    "project-expanded": (lambda: project(out=wide(TOKENS, 1, 512).expand(-1, HEADS, -1)), f"out: {ITSELF}"),
    "project-o": (lambda: project(o=ROWS[:3], out=ROWS[:3]), f"out: {SHARED} o"),
    "compress-tail": (expanded_tail, f"tail rows: {ITSELF}"),
    "compress-starts": (own_starts, f"tail progress: {SHARED} starts"),
    "swap-x": (swap_own_ram, rf"state\.ram: {SHARED} x"),
    "cache-expanded": (
        lambda: decode(wide(1, 8, 1, 64).expand(2, -1, -1, -1), wide(2, 1, 1, 64)),
        f"k_cache: {ITSELF}",
    ),
    "cache-k": (lambda: decode(wide(2, 8, 1, 64)), f"k_cache: {SHARED} k"),
    "insert-negated": (lambda: insert(out=torch._neg_view(wide(TOKENS, HEADS, 512))), f"out: {NEGATED}"),
    "gathered-negated": (lambda: gathered(out=torch._neg_view(wide(TOKENS, HEADS, 512))), f"out: {NEGATED}"),
    "softmax-negated": (lambda: softmax(FLAT[:24].view(4, 6), out=torch._neg_view(wide(4, 6))), f"out: {NEGATED}"),
    "attention-negated": (
        lambda: attention(*[wide(1, 5, 2, 64)] * 3, out=torch._neg_view(wide(1, 5, 2, 64)), backend="reference"),
        f"out: {NEGATED}",
    ),
    "softmax-shifted": (lambda: softmax(FLAT[:24].view(4, 6), out=FLAT[6:30].view(4, 6)), "out: must be x itself"),
}  # fmt: skip


@pytest.mark.parametrize("call, message", REFUSED.values(), ids=REFUSED.keys())
def test_refused(call, message):
    kept = ROWS.clone(), FLAT.clone()
    with pytest.raises(ValueError, match=f"^{message}"):
        call()
    assert torch.equal(ROWS, kept[0]) and torch.equal(FLAT, kept[1])


def between(shape) -> torch.Tensor:
    """[2, *shape]: two tensors whose rows lie side by side."""
    return wide(*shape[:-1], 2 * shape[-1]).unflatten(-1, (2, -1)).movedim(-2, 0)


@pytest.mark.parametrize(
    ("operator", "argument", "shape"),
    [
        (insert, "q", (TOKENS, HEADS, 512)),
        (gathered, "q", (TOKENS, HEADS, 512)),
        (project, "o", (TOKENS, HEADS * 512)),
        (lambda x, out: softmax(x, out=out, backend="reference"), "x", (4, 6)),
        (lambda q, out: attention(q, q, out=out, backend="reference"), "q", (1, 5, 2, 64)),
    ],
    ids=["insert", "gathered", "project", "softmax", "attention"],
)
def test_side_by_side(operator, argument, shape):
    """Address ranges that intersect without a common address: the result is that of memory apart."""
    x, out = between(shape)
    out = out.unflatten(-1, (HEADS, 512)) if operator is project else out
    torch.manual_seed(0)
    expected = operator(**{argument: x}, out=torch.empty(out.shape, dtype=out.dtype))
    torch.manual_seed(0)
    assert operator(**{argument: x}, out=out) is out
    assert torch.equal(out, expected)


CACHES = wide(2, 4, HEADS, 64), wide(2, 4, HEADS, 64)
LATENT_ROWS = wide(2, 64, 576).to(torch.float8_e4m3fn)
WRITES = {  # calls of kernels that write the tensor they are given
    "attention": ((1, 5, 2, 64), lambda out: attention(wide(1, 5, 2, 64), wide(1, 5, 2, 64), out=out)),
    "softmax": ((4, 8), lambda out: softmax(wide(4, 8), out=out)),
    "softmax-itself": ((4, 8), lambda out: softmax(out, out=out)),
    "insert-window": ((TOKENS, HEADS, 512), lambda out: insert(out=out, backend="sim")),
    "gathered": ((TOKENS, HEADS, 512), lambda out: gathered(out=out, backend="sim")),
    "project": ((TOKENS, HEADS, 512), lambda out: project(out=out, backend="sim")),
    "mla": (
        (2, 1, 16, 512),
        lambda out: mla_decode(wide(2, 1, 16, 576), LATENT_ROWS, SLOTS[:2, None], SLOTS[:2], scale=1.0, out=out),
    ),
    "insert": ((2, 4, HEADS, 64), lambda out: cache.insert(*wide(2, TOKENS, HEADS, 64), out, CACHES[1], SLOTS)),
}  # fmt: skip


@pytest.mark.parametrize("shape, call", WRITES.values(), ids=WRITES.keys())
def test_autograd_hears_of_a_write(shape, call, monkeypatch):
    """Kernels write memory behind torch's back; if backward() needs what was there, it must not use what is."""
    monkeypatch.setattr(Kernel, "launcher", lambda *_, **__: lambda *_: None)
    saved = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True).exp()
    call(saved.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_in_place():
    q = wide(TOKENS, HEADS, 512)
    torch.manual_seed(0)
    expected = insert(q=q.clone())
    torch.manual_seed(0)
    assert insert(q=q, out=q) is q and torch.equal(q, expected)


def test_no_shared_address_is_missed():
    """Random views of one buffer, against the sets of their addresses."""
    generator = torch.Generator().manual_seed(0)
    memory, found = torch.zeros(4096, dtype=torch.int16), {True: 0, False: 0}

    def draw(*options):
        return options[int(torch.randint(len(options), (), generator=generator))]

    def view():
        sizes = [draw(1, 2, 3, 4) for _ in range(3)]
        return memory.as_strided(sizes, [draw(0, 4, 6, 12, 24), draw(2, 4, 6, 8), 1], draw(*range(40)))

    def addresses_of(tensor):
        places = torch.cartesian_prod(*map(torch.arange, tensor.shape)) * torch.tensor(tensor.stride())
        return set((tensor.storage_offset() + places.sum(1)).tolist())

    for _ in range(1000):
        a, b = view(), view()
        addresses = addresses_of(a), addresses_of(b)
        shared = bool(addresses[0] & addresses[1])
        try:
            check_apart({"out": a}, {"x": b})
            assert not shared, (a.shape, a.stride(), b.shape, b.stride())
            found[shared] += 1
        except ValueError:
            found[True] += 1
        try:
            check_output("out", a, {})
            assert len(addresses[0]) == a.numel(), (a.shape, a.stride())
        except ValueError:
            pass
    assert min(found.values()) > 100
