"""Raw GEMM 1 + GEMM 2 of the w4a16 kernel: variants of Shape, per model and T."""
import concurrent.futures as cf, itertools, os, sys, time, multiprocessing as mp
import torch

MODELS = {  # E, H, I, k, block, activation, limit, bias
    "gpt-oss-120b": (128, 2880, 2880, 4, 32, "swiglu_oai", 7.0, True),
    "flash": (256, 4096, 2048, 6, 16, "swiglu", 10.0, False),
    "pro48": (48, 7168, 3072, 6, 16, "swiglu", 10.0, False),
}
from warpspec.moe.sm90.config import Shape, StreamConfig
S = Shape
CASES = {
    1: [S(1, 8, 10, 3), S(1, 8, 7, 4), S(2, 8, 9, 2)],
    16: [S(1, 8, 10, 3), S(1, 8, 7, 4), S(2, 8, 9, 2), S(1, 16, 8, 3), S(2, 16, 8, 2)],
    64: [S(1, 8, 10, 3), S(1, 8, 7, 4), S(2, 8, 9, 2), S(1, 16, 8, 3), S(2, 16, 8, 2)],
}

def configs(model, shape):
    E, H, I, k, block, act, limit, bias = MODELS[model]
    one = StreamConfig(shape, block, act, True, bias, True, True, False)
    two = StreamConfig(shape, block, "linear", False, bias, False, False, True)
    return one, two

def compile_one(config):
    from warpspec.moe import sm90
    sm90.stream_kernel.compiled(config, "sm_90a", native=True)

def weights(E, n, k, block, parts, bias, pair):
    from warpspec.moe import streamed
    tiles = -(-n // (128 if pair else 64)) * (2 if pair else 1)
    size = streamed.tile_bytes(k, block)
    data = torch.empty(E, tiles, size, dtype=torch.uint8, device="cuda")
    data.view(torch.int64).random_()
    step = streamed.scale_bytes(block) + 4096
    for s in range(streamed.steps_of(k)):
        at = s * step
        data[:, :, at : at + streamed.scale_bytes(block)] = (22 << 3) + (data[:, :, at : at + streamed.scale_bytes(block)] & (7 if block == 16 else 0))
    scale = torch.full((E, parts), 0.5 / k**0.5, device="cuda")
    return streamed.StreamedWeights(data, scale, n, k, block, torch.randn(E, n, device="cuda") if bias else None)

def work_of(ids, E, tile):
    flat = ids.flatten()
    key, source = torch.sort(flat, stable=True)
    counts = torch.bincount(flat.cpu(), minlength=E).tolist()
    rows, first = [], 0
    for e, c in enumerate(counts):
        for at in range(0, c, tile):
            rows.append((e, first + at, min(tile, c - at), 0))
        first += c
    bound = flat.numel() // tile + min(E, flat.numel())
    rows = [(len(rows), 0, 0, 0)] + rows
    rows += [(0, 0, 0, 0)] * (bound + 1 - len(rows))
    return torch.tensor(rows, dtype=torch.int32, device="cuda"), source.int()

START = time.time()
def say(*words):
    print(f"[{time.time() - START:.1f}]", *words, flush=True)

def main():
    import faulthandler
    faulthandler.dump_traceback_later(int(sys.argv[2]), exit=True)
    from warpspec.moe import sm90, streamed
    from warpspec.moe.activations import activate
    from warpspec.moe.operands import deinterleave
    models = sys.argv[1].split(",")
    torch.manual_seed(0)
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda"); b = torch.empty_like(a)
    for _ in range(3): b.copy_(a)
    t0, t1 = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    t0.record(); [b.copy_(a) for _ in range(10)]; t1.record(); torch.cuda.synchronize()
    print(f"copy {2 * 10 * (1 << 30) / t0.elapsed_time(t1) * 1e-9:.2f} TB/s", flush=True)
    del a, b
    say("copied")
    for model in models:
        E, H, I, k, block, act, limit, bias = MODELS[model]
        w13 = weights(E, 2 * I, H, block, 2, bias, True)
        w2 = weights(E, H, I, block, 1, bias, False)
        say("weights")
        for T, shapes in CASES.items():
            calls = 8
            sets = []
            for c in range(calls):
                ids = torch.rand(T, E, device="cuda").topk(k, dim=1).indices.int()
                x = streamed.reorder(torch.randn(T, H, device="cuda")).bfloat16()
                sets.append((ids, x))
            active = sum(len(torch.unique(ids)) for ids, _ in sets) / calls
            nbytes = active * (w13.data.shape[1] * w13.data.shape[2] + w2.data.shape[1] * w2.data.shape[2])
            runs = {}
            for shape in shapes:
                one, two = configs(model, shape)
                R = T * k
                prepared = []
                for ids, x in sets:
                    work, source = work_of(ids, E, shape.tokens)
                    h = torch.full((R, streamed.padded_k(I)), float("nan"), dtype=torch.bfloat16, device="cuda")
                    y = torch.full((R, H), float("nan"), dtype=torch.bfloat16, device="cuda")
                    prepared.append((work, source, x, h, y))
                def run(prepared=prepared, one=one, two=two, which=3):
                    for work, source, x, h, y in prepared:
                        if which & 1: sm90.grouped_gemm(one, x, source, w13, work, h, choices=k, limit=limit)
                        if which & 2: sm90.grouped_gemm(two, h, None, w2, work, y)
                say("launch", T, shape)
                run(); torch.cuda.synchronize(); say("ran")
                work, source, x, h, y = prepared[0]
                worst = 0
                flat = sets[0][0].flatten()
                for r in range(0, R, max(1, R // 2)):
                    src = source[r].item(); e = flat[src].item()
                    p = streamed.restore(x, H)[src // k].float() @ w13.dequantize(slice(e, e + 1))[0].T
                    if bias: p = p + w13.bias[e]
                    g, u = (q[0, :, 0] for q in deinterleave(p[None, :, None]))
                    want_h = activate(g, u, act, limit)
                    got_h = streamed.restore(h, I)[r].float()
                    want = got_h @ w2.dequantize(slice(e, e + 1))[0].T
                    if bias: want = want + w2.bias[e]
                    worst = max(worst, ((got_h - want_h).norm() / want_h.norm()).item(), ((y[r].float() - want).norm() / want.norm()).item())
                say("checked", worst)
                graphs = {}
                for which in (3, 1, 2):
                    g = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(g): run(which=which)
                    graphs[which] = g
                runs[shape] = (graphs, worst, prepared)
            times = {s: {w: [] for w in (3, 1, 2)} for s in runs}
            for _ in range(4):
                for s, (graphs, _, _) in runs.items():
                    for w, g in graphs.items():
                        t0.record(); g.replay(); g.replay(); t1.record(); torch.cuda.synchronize()
                        times[s][w].append(t0.elapsed_time(t1) * 1e3 / (2 * calls))
            for s, (graphs, worst, _) in runs.items():
                best = {w: sorted(times[s][w])[len(times[s][w]) // 2] for w in times[s]}
                print(f"{model} T {T} {s}: {best[3]:.1f} us ({best[1]:.1f} + {best[2]:.1f}), floor {nbytes / 4.25e6:.1f}, {nbytes / best[3] * 1e-6:.2f} TB/s, error {worst:.4f}", flush=True)
            del runs
        del w13, w2

if __name__ == "__main__":
    if sys.argv[1] == "compile":
        every = {c for m in sys.argv[2].split(",") for shapes in CASES.values() for s in shapes for c in configs(m, s)}
        start = time.time()
        with cf.ProcessPoolExecutor(14, mp_context=mp.get_context("spawn")) as pool:
            list(pool.map(compile_one, every))
        print(len(every), "compiled in", time.time() - start)
    else:
        main()
