"""One call of a kernel, for ncu: ncu1.py gathered|scores|select."""
import sys, torch
import bench_latent as b
from warpspec.fmha.gathered import KeySet, gathered_attention
from warpspec.indexer import index_queries, index_scores, index_topk
from warpspec.cache import IndexPool, store_rows
which = sys.argv[1]
if which == "gathered":
    pools = [b.random_pool(1 << 14, "v4-fp8"), b.random_pool(1 << 18, "v4-fp8")]
    T, H, ks = 128, 128, (128, 1024)
    sets = [KeySet(p, torch.randint(0, p.capacity, (T, k), dtype=torch.int32, device="cuda")) for p, k in zip(pools, ks)]
    pos = torch.full((T,), 1000, dtype=torch.int32, device="cuda")
    q, cs, sink = b.random_bf16(T, H, 512), b.angles(), torch.randn(H, device="cuda")
    f = lambda: gathered_attention(q, sets, sink=sink, rotate_back=(cs, pos))
elif which == "scores":
    T, E = 64, 32768
    q, w = b.random_bf16(T, 64, 128), torch.randn(T, 64, device="cuda")
    at = torch.arange(T, dtype=torch.int32, device="cuda")
    asked = index_queries(q, w, b.angles(), at, format="mxfp4")
    pool = IndexPool.empty(T * E // 64, 64, "mxfp4", device="cuda")
    pool.data.random_(0, 255); pool.data[:, 4096:] = 127
    tab = torch.randperm(T * E // 64, device="cuda").to(torch.int32).view(T, -1)
    ln = torch.full((T,), E, dtype=torch.int32, device="cuda")
    f = lambda: index_scores(asked, pool, tab, at, ln)
else:
    x = torch.randn(64, 32768, device="cuda")
    f = lambda: index_topk(x, 512)
f(); torch.cuda.synchronize()
torch.cuda.cudart().cudaProfilerStart(); f(); torch.cuda.synchronize(); torch.cuda.cudart().cudaProfilerStop()
