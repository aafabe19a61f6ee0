"""Shapes per model and T, in one process."""
import sys, time
sys.path.insert(0, "scripts")
START = time.time()
import bench_moe as b
from bench_moe import parse_shape
from warpspec.common import kernel_cache
A, B, C, D = "1x8x4x3", "1x8x4x4", "2x8x4x2", "1x8x4x2x1x2"
E, F = "4x8x5x1", "1x8x8x1x1x4"
A1, C1 = "1x8x8x3x1x1x1x1", "2x8x8x2x1x1x1x1"  # stages of one step
G, H, I = "1x16x3x3", "2x16x3x2", "4x16x4x1"
J, K = "2x32x3x2", "4x32x4x1"
L, Q, P, R = "2x64x4x1x2", "4x64x4x1x4x1x2x1", "4x128x4x1x4x1x2x1", "2x128x4x1x4x1x1x1"
PLAN = {
    "gpt-oss-120b": {1: (A, B, C, D, F, A1), 4: (A, C, D), 16: (A, B, C, E, A1), 64: (A, B, C, E, H, C1), 512: (H, J, K, Q), 4096: (L, Q, P, R)},
    "flash": {1: (A, C, D), 16: (A, B, C, E), 64: (A, B, C, E, H), 512: (H, J, K), 4096: (Q, P)},
    "pro-48": {1: (A, C, D), 16: (A, C, H), 64: (C, H, I, J), 512: (L, K, Q, P), 4096: (Q, P)},
}

def configs(model):
    from warpspec.moe.sm90.config import StreamConfig
    from warpspec.moe.sort import SortConfig
    from warpspec.moe.unpermute import UnpermuteConfig
    m = b.MODELS[model]
    for tokens, shapes in PLAN[model].items():
        for s in map(parse_shape, shapes):
            yield "stream", StreamConfig(s, m.block, m.activation, True, m.biases, True)
            yield "stream", StreamConfig(s, m.block, has_bias=m.biases, early=True)
            yield "sort", SortConfig(m.experts, m.choices, 0, 4 if tokens * m.choices <= 1024 else 32, s.tokens, True)
    yield "sum", UnpermuteConfig(m.choices, 0, True)

def compile_all():
    from warpspec.moe import sm90, sort, unpermute
    kernel_cache._versions = lambda v=tuple("nvidia-cutlass-dsl-libs-cu12 absent" if "cu12" in x else x for x in kernel_cache._versions()): v
    for model in PLAN:
        for kind, config in dict.fromkeys(configs(model)):
            {"stream": sm90.stream_kernel, "sort": sort.sort_kernel, "sum": unpermute.unpermute_kernel}[kind].compiled(config, "sm_90a", native=True)

def main():
    import faulthandler
    faulthandler.dump_traceback_later(int(sys.argv[1]), exit=True)
    print(kernel_cache._versions(), sorted(kernel_cache.cpu_features()), flush=True)
    sys.argv = ["bench", "--rounds", "3"]
    bandwidth = 4.27
    import argparse
    options = argparse.Namespace(stages=False, peers=False, rounds=3, tflops=740.0, shapes=[])
    for model in PLAN:
        experts = b.random_experts(b.MODELS[model])
        print(f"[{time.time() - START:.1f}] {model}", flush=True)
        for tokens, shapes in PLAN[model].items():
            options.shapes = [parse_shape(s) for s in shapes]
            options.stages = model == "gpt-oss-120b" and tokens in (1, 64) and False
            b.measure(model, experts, tokens, "uniform", options, bandwidth)
            print(f"[{time.time() - START:.1f}]", flush=True)
        if model == "gpt-oss-120b":
            options.stages = True
            for tokens, s in ((1, A), (64, C), (512, J)):
                options.shapes = [parse_shape(s)]
                b.measure(model, experts, tokens, "uniform", options, bandwidth)
            options.stages = False
            options.shapes = [parse_shape(s) for s in (C, H)]
            b.measure(model, experts, 64, "zipf", options, bandwidth)
        del experts

if __name__ == "__main__":
    compile_all() if sys.argv[1] == "compile" else main()
