"""Runs a public kernel's own Python interface in warpspec.sim: CPU tensors, cute.compile and the call replaced."""
import os, sys, time
ARCH = os.environ.get("PUB_ARCH", "sm_100a")
CHECK = os.environ.get("PUB_CHECK") or None
os.environ["CUTE_DSL_ARCH"] = ARCH
os.environ["FLASH_ATTENTION_ARCH"] = ARCH.rstrip("a")
os.environ["FLASH_ATTENTION_NUM_SMS"] = "148" if "100" in ARCH else "132"
os.environ["QUACK_CACHE_ENABLED"] = "0"
sys.path.insert(0, "/tmp/public/site")
import types
from unittest.mock import MagicMock
import torch, torch._dynamo, torch._inductor.runtime.hints, cutlass, cutlass.cute as cute
import warpspec.sim as sim
class FCM:
    class cache:
        class FileCacheManager: pass
    def __init__(self, *a, **k): pass
class Stub(types.ModuleType):
    __path__ = []
    def __getattr__(self, k):
        if k.startswith("__"): raise AttributeError(k)
        return FCM
import importlib.abc, importlib.machinery
class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "triton" else None
    def create_module(self, spec): return Stub(spec.name)
    def exec_module(self, m): pass
sys.meta_path.append(Finder())
torch.compile = lambda f=None, **k: f if f else (lambda g: g)
torch.compiler.disable = lambda f=None, **k: f if f else (lambda g: g)
cap = (10, 0) if "100" in ARCH else (9, 0)
torch.cuda.get_device_capability = lambda *a: cap
torch.Tensor.is_cuda = property(lambda self: True)
class P: major, minor = cap; multi_processor_count = int(os.environ.get("PUB_SMS") or (148 if "100" in ARCH else 132)); name="sim"; L2_cache_size=50<<20; shared_memory_per_block_optin=232448
torch.cuda.get_device_properties = lambda *a: P
import contextlib
torch.cuda.device = lambda *a: contextlib.nullcontext()
torch.cuda.current_device = lambda: 0
import cutlass.utils as cu
cu.HardwareInfo.__init__ = lambda self, *a, **k: None
cu.HardwareInfo.get_max_active_clusters = lambda self, cluster_size=1, *a, **k: P.multi_processor_count // cluster_size
cu.HardwareInfo.get_device_multiprocessor_count = lambda self: P.multi_processor_count
if CHECK:  # findings of one launch do not stop those behind it
    import re, collections
    short = lambda t: re.sub(r"CTA \([^)]*\) warp \d+", "warp", re.sub(r"PTX line \d+ ", "", re.sub(r"from .*/", "", t)))
    _execute = sim.execute
    def execute(text, kernel, **options):
        try: return _execute(text, kernel, **options)
        except sim.OrderError as e:
            n = collections.Counter((f.kind, f.place.split(",")[0], short(f.first), short(f.second), f.remedy) for f in e.findings)
            print(f"  ORDER {kernel[:60]}: {len(e.findings)} findings, {len(n)} kinds" + "".join(f"\n  {c} x {k[0]}: {k[1]}\n      {k[2]}\n      {k[3]}\n      {k[4]}" for k, c in n.most_common(14)) + f"\n  first place {e.findings[0].place}", flush=True)
            if e.__cause__ is not None: print("  CAUSE", type(e.__cause__).__name__, str(e.__cause__)[:1500]); raise
            if os.environ.get("PUB_FULL"):
                seen = set()
                for f in e.findings:
                    k = (f.kind, short(f.first), short(f.second))
                    if k not in seen: seen.add(k); print("FULL", f, flush=True)
            return _execute(text, kernel, **options | dict(check=None)) if os.environ.get("PUB_AGAIN") else LastReport
    class LastReport: warnings = []; grid = block = ""
    sim.execute = execute
real = cute.compile
results = []
class Compiled:
    def __init__(self, c, name): self.c, self.name = c, name
    def __getattr__(self, k): return getattr(self.c, k)
    def __call__(self, *args, **kw):
        t = time.time(); r = None
        args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
        try:
            r = sim.run(self.c, *args, check=CHECK, **({"seed": int(os.environ["PUB_SEED"])} if "PUB_SEED" in os.environ else {}), **({"seeds": int(os.environ["PUB_SEEDS"])} if "PUB_SEEDS" in os.environ else {}), **kw)
            say = "ran clean" if CHECK else "ran"
        except sim.OrderError as e:
            import re, collections
            short = lambda t: re.sub(r"CTA \([^)]*\) warp \d+", "warp", re.sub(r"PTX line \d+ ", "", re.sub(r"from .*/", "", t)))
            n = collections.Counter((f.kind, f.place.split(",")[0], short(f.first), short(f.second), f.remedy) for f in e.findings)
            say = f"ORDER {len(e.findings)} findings, {len(n)} kinds" + "".join(f"\n  {c} x {k[0]}: {k[1]}\n      {k[2]}\n      {k[3]}\n      {k[4]}" for k, c in n.most_common(12)) + f"\n  first place {e.findings[0].place}\n"
        print(f"[{self.name} {ARCH} check={CHECK}] {say} {time.time()-t:.1f}s", flush=True)
        r = r or sim.last_report()
        for l in (r.launches if r else []):
            print("   launch", getattr(l, "grid", ""), getattr(l, "block", ""))
            for w in l.warnings[:6]: print("   warning:", w[:260].replace("\n", " | "))
            print("   warnings in all:", len(l.warnings))
class Compile:
    def __getitem__(self, k): return self
    def __call__(self, f, *a, options="", **k):
        t = time.time()
        c = real(f, *a, options=f"{options} --gpu-arch {ARCH} --keep-ptx --keep-cubin --generate-line-info --dump-dir /tmp/public/dumps", **k)
        print(f"[{type(f).__name__}] compiled {time.time()-t:.1f}s", flush=True)
        return Compiled(c, getattr(f, "__name__", type(f).__name__))
os.makedirs("/tmp/public/dumps", exist_ok=True)
cute.compile = Compile()
def err(x, y):
    x, y = x.double(), y.double()
    print(f"   relative error {((x-y).norm()/y.norm()).item():.2e}, finite {bool(x.isfinite().all())}", flush=True)
def fake(t, assumed_align=16, leading_dim=-1, fully_dynamic=False, enable_tvm_ffi=True):
    if t is None: return None
    from quack.cute_dsl_utils import torch2cute_dtype_map as m
    ld = leading_dim % t.ndim
    div = max(1, (assumed_align or t.element_size()) // t.element_size())
    stride = tuple(1 if i == ld and not fully_dynamic else 0 if s == 0 else cute.sym_int64() for i, s in enumerate(t.stride()))
    return cute.runtime.make_fake_tensor(m[t.dtype], tuple(cute.sym_int() for _ in t.shape), stride=stride, memspace=cute.AddressSpace.gmem, assumed_align=assumed_align or t.element_size())
