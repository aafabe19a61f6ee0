"""Softmax and top-k: main's plan (tree soft0) and the new one's (tree new) in turn, in graphs, beside QuACK and torch."""
import dataclasses, importlib, os, sys, time, traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

HOME = os.environ["HOME_JOB"]
ARCH = "sm_90a"
F, B = "float32", "bfloat16"
LONG = [(57, 201088, F), (31, 256000, F), (200, 50256, F), (256, 256000, F)]
FEW = [(5, 256000, B), (8, 201088, B), (16, 151936, B), (4, 129280, F), (1, 256000, F), (4, 262144, B), (32, 256000, B), (128, 128256, B)]
SHORT = [(1024, 256, F), (24730, 160, F), (128, 1024, B), (2048, 1024, B), (8192, 512, F)]
DEPENDENT = [(2048, 2048, B), (2048, 8192, B), (32768, 4096, B), (30000, 384, B), (8192, 512, B), (100000, 64, B), (8192, 50257, B), (16384, 32768, B), (4096, 4096, F)]
PEERED = [*LONG[:2], LONG[3], FEW[0], FEW[2], FEW[7], *SHORT, DEPENDENT[1]]
SHAPES = [*LONG[:2], *SHORT, *FEW, *DEPENDENT, *LONG[2:]]
TOPKS = [(15248, 32, 8, B, True), (4096, 64, 8, B, True)]
LAST_TREES = ("soft0", "new")


def tree(name):
    for n in [n for n in sys.modules if n == "warpspec" or n.startswith("warpspec.")]:
        del sys.modules[n]
    sys.path[:] = [p for p in sys.path if "/trees/" not in p and not p.endswith("/src")]
    sys.path.insert(0, os.path.join(HOME, "trees", name, "src"))


def width(dtype):
    return 4 if dtype == F else 2


def configs(which, rows, length, dtype):
    """name -> config of a tree."""
    from warpspec.common.launch import SIMULATED
    from warpspec.softmax.plan import choose_plan, SMEM_BESIDE_DATA
    from warpspec.softmax.problem import SoftmaxProblem
    from warpspec.softmax.rows import RowsConfig
    from warpspec.softmax.staged import StagedConfig
    gpu = dataclasses.replace(SIMULATED["sm_90a"], sm_count=132)
    aligned = length * width(dtype) % 16 == 0
    plan = choose_plan(SoftmaxProblem(rows, length, dtype, aligned), gpu)
    if plan.group:
        return {}
    c = plan.config
    found = {f"{which} PLAN {describe(c)}": c}
    def put(c):
        found[f"{which} {describe(c)}"] = c
    if which == "soft0":
        return found
    if (rows, length, dtype) in DEPENDENT:
        put(dataclasses.replace(c, dependent=not c.dependent))
    vectors = -(-length * width(dtype) // 16)
    def staged(cluster, v, dependent=True):
        share = -(-vectors // cluster)
        threads = -(-share // (v * 32)) * 32
        if 64 <= threads <= 1024:
            smem = threads * v * 16 + SMEM_BESIDE_DATA
            per_sm = min(32, 65536 // (40 * threads), 232448 // smem)
            if per_sm:
                put(StagedConfig(dtype, threads, cluster, v, False, per_sm, 16, dependent))
    def R(lanes, r, cluster=1, dependent=True):
        v = -(-vectors // (lanes * cluster))
        put(RowsConfig(dtype, lanes, r, cluster, v, False, 1, 16, dependent))
    if (rows, length, dtype) in LONG[:2]:
        for v in (4, 6, 7, 8):
            staged(16, v)
        for v in (8, 10):
            staged(8, v)
    elif (rows, length, dtype) in FEW:
        if -(-vectors // (256 * 16)) <= 5:
            R(256, 1, 16)
        staged(16, 7)
    elif (rows, length, dtype) in SHORT[2:]:
        for lanes, r in ((32, 4), (64, 2)):
            if 1 <= -(-vectors // lanes) <= 5:
                R(lanes, r)
    return found


def topk_configs(which, rows, length, k, dtype, renormalize):
    from warpspec.softmax.topk.plan import choose_config
    plan = choose_config(rows, length, k, dtype, length * width(dtype) % 16 != 0, renormalize, 132)
    found = {f"{which} PLAN": plan}
    if plan.sorts and which != "soft0":
        for r in (16, 64, 128):
            found[f"{which} r{r}"] = dataclasses.replace(plan, rows=r)
    return found


def describe(c):
    names = dict(lanes="l", rows="r", threads="t", vectors="v", cluster="c", ctas_per_sm="x")
    words = [f"{short}{getattr(c, n)}" for n, short in names.items() if hasattr(c, n)]
    return type(c).__name__.removesuffix("Config") + " " + " ".join(words) + (" dep" if getattr(c, "dependent", False) else "")


def compile_one(index):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    which, kind, config = ITEMS[index]
    try:
        if kind == "peer":
            os.environ.update(CUTE_DSL_ARCH=ARCH, QUACK_ARCH="90")
            from quack.cute_dsl_utils import torch2cute_dtype_map
            import torch
            dtype = torch2cute_dtype_map[getattr(torch, config[1])]
            if len(config) == 3:
                from quack.topk import TopK
                TopK.compile(dtype, config[0], config[2], True)
            else:
                from quack.softmax import Softmax
                Softmax.compile(dtype, dtype, config[0])
            return None
        tree(which)
        module, name = ("softmax.launch", "softmax_kernel") if kind == "softmax" else ("softmax.topk.launch", "topk_kernel")
        kernel = getattr(importlib.import_module(f"warpspec.{module}"), name)
        cls = getattr(importlib.import_module(type(config).__module__), type(config).__name__)
        kernel.compiled(cls(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)}), ARCH, native=True)
    except Exception as error:
        return f"{which} {kind} {config}: {type(error).__name__}: {str(error)[:300]}"


def compile_all():
    global ITEMS
    t, ITEMS = time.time(), []
    lists = []
    for which in ("soft0", "new"):
        tree(which)
        lists.append([(which, "topk", c) for t5 in TOPKS for c in topk_configs(which, *t5).values()])
        lists.append([(which, "softmax", c) for s in SHAPES for c in configs(which, *s).values()])
    tree("early")
    lists[0] += [("early", "topk", c) for t5 in TOPKS for c in topk_configs("early", *t5).values()]
    peers = [("-", "peer", (n, d)) for _, n, d in PEERED] + [("-", "peer", (n, d, k)) for _, n, k, d, r in TOPKS if r]
    every = [*peers[:6], *lists[0], *lists[2], *lists[1], *lists[3], *peers[6:]]
    ITEMS = list({(w, k, repr(c)): (w, k, c) for w, k, c in every}.values())
    print(len(ITEMS), "kernels", flush=True)
    if sys.argv[1:] == ["count"]:
        return
    if sys.argv[1:] == ["peers"]:
        ITEMS = [item for item in ITEMS if item[1] == "peer"]
    if sys.argv[1:] == ["ours"]:
        ITEMS = [item for item in ITEMS if item[1] != "peer"]
    workers = max(2, len(os.sched_getaffinity(0)) - 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        for error in pool.map(compile_one, range(len(ITEMS))):
            if error:
                print("COMPILE", error, flush=True)
    print(f"{len(ITEMS)} kernels, {time.time() - t:.1f} s, {workers} workers", flush=True)


def report(title, bytes_, times):
    peer = min((t for n, t in times.items() if n.startswith("*")), default=float("nan"))
    print(f"== {title}: bytes {bytes_ / 4.25e6:.2f} us, best peer {peer:.2f}", flush=True)
    for name, t in sorted(times.items(), key=lambda x: x[1]):
        print(f"   {t:7.3f} {peer / t:6.3f}  {name}", flush=True)


def one_softmax(gpu_bench, rows, length, dtype):
    import torch
    try:
        torch_dtype = getattr(torch, dtype)
        nbytes = 2 * rows * length * width(dtype)
        sets = max(1, min(64, -(-200_000_000 // nbytes)))
        inputs = [(torch.randn(rows, length, device="cuda").to(torch_dtype),) for _ in range(sets)]
        x = inputs[0][0][: min(rows, 256)]
        exact = torch.softmax(x.double(), -1)
        own = ((torch.softmax(x, -1).double() - exact).norm() / exact.norm()).item()
        calls, errors = {}, {}
        def ours(kernel):
            def call(x):
                out = torch.empty_like(x)
                kernel(x, out)
                return out
            return call
        for which in ("soft0", "new"):
            tree(which)
            from warpspec.common.launch import target_of
            from warpspec.softmax.launch import softmax_kernel
            target = target_of(torch.device("cuda", 0))
            for name, config in configs(which, rows, length, dtype).items():
                try:
                    call = ours(softmax_kernel.launcher(config, target))
                    errors[name] = ((call(inputs[0][0])[: len(x)].double() - exact).norm() / exact.norm()).item() / own
                    if not errors[name] <= 1.25 + 1e-9:
                        print(f"WRONG {rows}x{length} {name}: {errors[name]:.3f} of torch's {own:.2e}", flush=True)
                        continue
                    calls[name] = call
                except Exception as error:
                    print(f"FAILED {rows}x{length} {name}: {str(error)[:200]}", flush=True)
        if rows * length < 2e6 * 8:
            calls["*torch"] = lambda x: torch.softmax(x, -1)
        if (rows, length, dtype) in PEERED:
            try:
                from quack.softmax import softmax_fwd
                if not softmax_fwd(inputs[0][0]).isfinite().all():
                    print("QuACK not finite", flush=True)
                calls["*QuACK"] = softmax_fwd
            except Exception as error:
                print("QuACK", str(error)[:200], flush=True)
        del exact
        print("errors against torch's:", {n: round(e, 2) for n, e in errors.items() if "PLAN" in n}, flush=True)
        report(f"softmax {rows}x{length} {dtype}", nbytes, gpu_bench.graph_times(calls, inputs, rounds=5, round_ms=2.5))
    except Exception:
        traceback.print_exc()
    torch.cuda.empty_cache()


def one_topk(gpu_bench, rows, length, k, dtype, renormalize):
    import torch
    try:
        torch_dtype = getattr(torch, dtype)
        sets = max(4, min(64, 250_000_000 // (rows * length * width(dtype))))
        inputs = [(torch.randn(rows, length, device="cuda").to(torch_dtype),) for _ in range(sets)]
        x = inputs[0][0]
        if renormalize:
            values, _ = torch.topk(x, k)
            wanted = torch.softmax(values.float(), -1)
        else:
            wanted = torch.topk(torch.softmax(x.float(), -1), k)[0]
        order = torch.sort(x.float(), dim=-1, descending=True, stable=True).indices[:, :k]
        calls = {}
        for which in ("soft0", "new", "early"):
            tree(which)
            from warpspec.common.launch import target_of
            from warpspec.softmax.topk.launch import topk_kernel
            target = target_of(torch.device("cuda", 0))
            for name, config in topk_configs(which, rows, length, k, dtype, renormalize).items():
                try:
                    kernel = topk_kernel.launcher(config, target)
                    def call(x, kernel=kernel):
                        probs = torch.empty(rows, k, device="cuda")
                        indices = torch.empty(rows, k, dtype=torch.int32, device="cuda")
                        kernel(x, probs, indices)
                        return probs, indices
                    p, i = call(x)
                    if not (torch.allclose(p, wanted, rtol=1e-5) and torch.equal(i.long(), order)):
                        print(f"WRONG top-k {name}", flush=True)
                        continue
                    calls[name] = call
                except Exception as error:
                    print(f"FAILED top-k {name}: {str(error)[:200]}", flush=True)
        try:
            if renormalize:
                from quack.topk import topk
                topk(x, k, softmax=True)
                calls["*QuACK"] = lambda x: topk(x, k, softmax=True)
        except Exception as error:
            print("QuACK", str(error)[:200], flush=True)
        report(f"top-k {rows}x{length} k{k}", rows * length * width(dtype) // 2 * 2, gpu_bench.graph_times(calls, inputs, rounds=7, round_ms=3.0))
    except Exception:
        traceback.print_exc()


def main():
    sys.path.insert(0, os.path.join(HOME, "tree", "scripts"))
    import torch
    from shared import gpu_bench
    print(gpu_bench.header(), flush=True)
    t0 = time.time()
    for t5 in TOPKS:
        one_topk(gpu_bench, *t5)
    for shape in SHAPES:
        one_softmax(gpu_bench, *shape)
        print(f"{time.time() - t0:.1f} s", flush=True)


if __name__ == "__main__":
    compile_all() if sys.argv[1:] in (["compile"], ["count"], ["peers"], ["ours"]) else main()
