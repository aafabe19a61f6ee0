"""Checks, then times of variants in turn."""
import sys, time, torch
T0 = time.time()
def say(*a): print(f"[{time.time()-T0:.1f}]", *a, flush=True)
import variants as v
import shared.gpu_bench as gb
import bench_latent as b
from warpspec.fmha.gathered import KeySet, gathered_attention
from warpspec.fmha.projection import Float8Tensor
from warpspec.indexer import index_queries, index_scores, index_topk
from warpspec.cache import IndexPool, store_rows
say(gb.header())
torch.manual_seed(0)
def rel(a, w):
    a, w = a.float(), w.float()
    return ((a - w).norm() / w.norm()).item()
def check(name, f):
    try: say("check", name, f())
    except Exception as e: say("check", name, "FAILED", type(e).__name__, str(e)[:300])
def case(fmt, heads, ks, T, low=-5, rows=(4096, 16384)):
    pools = [b.random_pool(rows[0], fmt), b.random_pool(rows[1], fmt)]
    sink = torch.randn(heads, device="cuda")
    pos = torch.full((T,), 1000, dtype=torch.int32, device="cuda")
    sets = [KeySet(p, torch.randint(low, p.capacity, (T, k), dtype=torch.int32, device="cuda")) for p, k in zip(pools, ks)]
    return b.random_bf16(T, heads, 512), sets, dict(sink=sink, rotate_back=(b.angles(), pos))
def gathered(fmt, heads, ks, T):
    q, sets, o = case(fmt, heads, ks, T)
    want = gathered_attention(q, sets, **o, backend="reference")
    out = {}
    for name, change in v.GATHERED[fmt].items():
        v.current["gathered"] = change
        got = gathered_attention(q, sets, **o)
        out[name] = (round(rel(got, want), 5), got.isnan().any().item())
    v.current["gathered"] = {}
    return out
def float8(T, heads=128, ks=(128, 512)):
    q, sets, o = case("v4-fp8", heads, ks, T)
    want = Float8Tensor.quantize(gathered_attention(q, sets, **o))
    got = gathered_attention(q, sets, **o, out_format="fp8")
    return torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8)), torch.equal(got.scales, want.scales)
def scorecase(fmt, T, E):
    q, w = b.random_bf16(T, 64, 128), torch.randn(T, 64, device="cuda")
    at = torch.arange(T, dtype=torch.int32, device="cuda")
    asked = index_queries(q, w, b.angles(), at, format=fmt)
    pool = IndexPool.empty(T * E // 64, 64, fmt, device="cuda")
    for first in range(0, pool.capacity, 1 << 18):
        s = torch.arange(first, min(first + (1 << 18), pool.capacity), dtype=torch.int32, device="cuda")
        store_rows(b.random_bf16(len(s), 128), pool, s)
    tab = torch.randperm(T * E // 64, device="cuda").to(torch.int32).view(T, -1)
    ln = torch.full((T,), E, dtype=torch.int32, device="cuda")
    return asked, pool, tab, at, ln, w
def scores(fmt, T=8, E=4096):
    a = scorecase(fmt, T, E)[:5]
    want = index_scores(*a, backend="reference")
    out = {}
    for name, c in v.SCORES[fmt].items():
        v.current["scores"] = c
        out[name] = rel(index_scores(*a), want)
    v.current["scores"] = None
    return out
for a in (("v4-fp8", 128, (128, 512), 128), ("v4-fp8", 64, (128, 512), 16), ("bf16", 128, (128, 512), 128)):
    check(("gathered", a), lambda: gathered(*a))
for f in ("mxfp4", "fp8"): check(("scores", f), lambda: scores(f))
def time_gathered(queries, heads, ks, fmt):
    rows = (1 << 14, (1 << 18) if fmt == "v4-fp8" else 1 << 16)
    sets_ = [case(fmt, heads, ks, queries, 0, rows) for _ in range(3 if queries < 1000 else 1)]
    inputs = [(q, s, o, torch.empty(queries, heads, 512, dtype=torch.bfloat16, device="cuda")) for q, s, o in sets_]
    cands = {}
    for name, change in v.GATHERED[fmt].items():
        def call(q, s, o, out, change=change):
            v.current["gathered"] = change
            gathered_attention(q, s, **o, out=out)
        cands[name] = call
    if fmt == "v4-fp8" and (d := b.flash_mla_decode(queries, heads, ks)):
        cands["FlashMLA"] = lambda q, s, o, out: d(q, s, o["sink"], out)
    if fmt == "bf16" and (p := b.flash_mla_prefill(queries, heads)):
        joined = {id(s): torch.cat([e.slots for e in s], 1) for _, s, _, _ in inputs}
        cands["FlashMLA"] = lambda q, s, o, out: p(q, s[1].pool.data.view(torch.bfloat16).view(-1, 512), joined[id(s)], o["sink"], out)
    t = gb.graph_times(cands, inputs)
    ops = 4 * 512 * heads * queries * sum(ks)
    say((queries, heads, ks, fmt), {n: f"{x:.1f} us {ops/x*1e-6:.0f}" for n, x in t.items()})
def time_scores(fmt, T, E):
    asked, pool, tab, at, ln, w = scorecase(fmt, T, E)
    cands = {}
    for name, c in v.SCORES[fmt].items():
        def call(c=c):
            v.current["scores"] = c
            index_scores(asked, pool, tab, at, ln)
        cands[name] = call
    if fmt == "fp8" and (p := b.deep_gemm_scores(T, E)):
        sc = asked.pool.data[:, 64 * 128:].view(torch.float32)
        vals, scaled = asked.pool.data[:, : 64 * 128].contiguous(), w * sc
        cands["DeepGEMM"] = lambda: p(vals, scaled, pool, tab, ln)
    t = gb.graph_times(cands, [()])
    say((fmt, T, E), {n: round(x, 1) for n, x in t.items()})
for a in ((128, 128, (128, 512), "v4-fp8"), (128, 128, (128, 1024), "v4-fp8"), (128, 128, (128, 2048), "v4-fp8"), (128, 64, (128, 512), "v4-fp8"), (1, 64, (128, 512), "v4-fp8"), (16, 64, (128, 8192), "v4-fp8"), (4096, 128, (128, 1024), "bf16")):
    check("time", lambda: time_gathered(*a))
for f in ("mxfp4", "fp8"):
    for s in b.SCORED: check("time", lambda: time_scores(f, *s))
