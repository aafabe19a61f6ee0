"""Seeded defects of public kernels: each in the PTX of one recorded launch, run under seeds 0 to 7, plain and checked.

    defects.py KERNEL [ROW]     KERNEL: a name of CASES below
"""
import os, re, sys, time, collections, copy
from unittest import mock
sys.path.insert(0, "/work/wt/public/scripts")
NAME = sys.argv[1]
ONLY = sys.argv[2] if len(sys.argv) > 2 else ""
SEEDS = int(os.environ.get("SEEDS", 8))
PLAIN, CHECKED = "plain" in os.environ.get("MODES", "plain,order"), "order" in os.environ.get("MODES", "plain,order")
TRY = r"mbarrier\.try_wait"

def delete(ins, line): return ""
def at_once(ins, line):  # the wait says at once that the phase is complete
    p = re.search(r"b64\s+(%?\w+),", line)[1]
    return f"setp.eq.s32 {p}, 0, 0;"
def not_retried(ins, line):
    p = re.search(r"b64\s+(%?\w+),", line)[1]
    return line + f" setp.eq.s32 {p}, 0, 0;"
def parity(ins, line):
    q = re.search(r"\],\s*(%?\w+)", line)[1]
    return "{ .reg .b32 %defect; xor.b32 %defect, " + q + ", 1; " + re.sub(r"(\],\s*)%?\w+", r"\1%defect", line, count=1) + " }"
def more_bytes(n):
    def edit(ins, line):
        q = re.search(r"\],\s*(%?\w+);", line)[1]
        return "{ .reg .b32 %defect; add.s32 %defect, " + q + f", {n}; " + re.sub(r"(\],\s*)%?\w+;", r"\1%defect;", line) + " }"
    return edit
def coordinate(at, change):
    """at: which coordinate of a TMA store; change: PTX that makes %defect of {0}."""
    def edit(ins, line):
        head, coords, tail = re.match(r"(.*?\{)([^}]*)(\}.*)", line.replace("[", "[", 1)).groups()
        c = [x.strip() for x in coords.split(",")]
        old, c[at] = c[at], "%defect"
        return "{ .reg .b32 %defect; " + change.format(old) + " " + head + ", ".join(c) + tail + " }"
    return edit
def to_store(ins, line):
    return re.sub(r"cp\.reduce\.async\.bulk\.(\S*?)\.add\.(?:noftz\.)?\w+(?=\s)", r"cp.async.bulk.\1", line)
def sub(a, b):
    return lambda ins, line: re.sub(a, b, line)

# kernel -> (script, arguments, environment, [(row, what, [(source pattern, opcode pattern, edit)])])
E_, T_ = delete, at_once
STORE = r"cp\.async\.bulk\.tensor\.\dd\.global"
CASES = {
 "persistent": ("gemms", ["persistent((128,256,256,1),(128,64))"], {"PUB_SMS": "1"}, "sm_100a", [
   ("wrong parity", "MMA's wait for TMA", [(":(904|885|927)", TRY, parity)]),
   ("wrong parity", "epilogue's wait", [(":1006", TRY, parity)]),
   ("wrong parity", "TMA's wait for its stage", [(":(807|814|835)", TRY, parity)]),
   ("expect_tx bytes", "16 more", [(":814", "expect_tx", more_bytes(16))]),
   ("expect_tx bytes", "16 fewer", [(":814", "expect_tx", more_bytes(-16))]),
   ("no commit", "of stages", [(":922", "tcgen05.commit", E_)]),
   ("no commit", "of the accumulator", [(":933", "tcgen05.commit", E_)]),
   ("TMEM not freed", "", [("", r"tcgen05\.dealloc", E_)]),
   ("TMA does not wait for its stage", "", [(":(807|814|835)", TRY, T_)]),
   ("MMA does not wait for TMA", "", [(":(904|885|927)", TRY, T_)]),
   ("epilogue does not wait for the accumulator", "", [(":1006", TRY, T_)]),
   ("try_wait not retried", "MMA for TMA", [(":904", TRY, not_retried)]),
   ("try_wait not retried", "epilogue", [(":1006", TRY, not_retried)]),
   ("try_wait not retried", "TMA for its stage", [(":814", TRY, not_retried)]),
   ("MMA does not wait for a free accumulator", "", [(":891", TRY, T_)]),
   ("no bar.sync before a TMA store", "", [("proxy+bar", r"bar\.sync", E_)]),
   ("no wait_group.read before reuse", "", [(":1006", r"wait_group", E_)]),
   ("no bar.sync behind wait_group.read", "", [("read+bar", r"bar\.sync", E_)]),
   ("no fence.proxy.async", "TMA store", [(":1006", r"fence\.proxy", E_)]),
   ("no fence.mbarrier_init", "", [("", r"fence\.mbarrier_init", E_)]),
   ("TMA store past the end", "wholly", [("", STORE, coordinate(0, "add.s32 %defect, {0}, 4096;"))]),
   ("TMA store past the end", "partly", [("", STORE, coordinate(1, "add.s32 %defect, {0}, 16;"))]),
 ]),
 "many": ("gemms", ["persistent((128,256,128,1),(128,64))"], {}, "sm_100a", [
   ("two CTAs write one place", "", [("", STORE, coordinate(0, "mov.u32 %defect, 0;"))]),
   ("two CTAs write one place", "one column group of two", [("", STORE, coordinate(0, "and.b32 %defect, {0}, 0xffffff7f;"))]),
 ]),
 "pair": ("gemms", ["persistent((256,256,256,1),(256,64),(2,1),True)"], {"PUB_SMS": "2"}, "sm_100a", [
   ("missing cluster barrier", "", [("", r"barrier\.cluster", E_)]),
   ("wrong parity", "MMA's wait for TMA", [(":(904|885|927)", TRY, parity)]),
   ("expect_tx bytes", "16 more", [(":814", "expect_tx", more_bytes(16))]),
   ("no commit", "of stages", [(":922", "tcgen05.commit", E_)]),
   ("TMEM not freed", "", [("", r"tcgen05\.dealloc", E_)]),
   ("TMA does not wait for its stage", "", [(":(807|814|835)", TRY, T_)]),
   ("MMA does not wait for TMA", "", [(":(904|885|927)", TRY, T_)]),
   ("epilogue does not wait for the accumulator", "", [(":1006", TRY, T_)]),
   ("try_wait not retried", "MMA for TMA", [(":904", TRY, not_retried)]),
   ("MMA does not wait for a free accumulator", "", [(":891", TRY, T_)]),
   ("no bar.sync before a TMA store", "", [("proxy+bar", r"bar\.sync", E_)]),
   ("no wait_group.read before reuse", "", [(":1006", r"wait_group", E_)]),
   ("no fence.proxy.async", "TMA store", [(":1006", r"fence\.proxy", E_)]),
   ("no fence.mbarrier_init", "", [("", r"fence\.mbarrier_init", E_)]),
   ("TMA store past the end", "wholly", [("", STORE, coordinate(0, "add.s32 %defect, {0}, 4096;"))]),
 ]),
 "grouped": ("gemms", ["grouped(((128,256,256,1),(64,192,128,1)))"], {"PUB_SMS": "1"}, "sm_100a", [
   ("wrong parity", "MMA's wait for TMA", [(":(986|1006|1036)", TRY, parity)]),
   ("expect_tx bytes", "16 more", [(":886", "expect_tx", more_bytes(16))]),
   ("no commit", "of the accumulator", [(":1044", "tcgen05.commit", E_)]),
   ("TMEM not freed", "", [("", r"tcgen05\.dealloc", E_)]),
   ("TMA does not wait for its stage", "", [(":(874|886|922)", TRY, T_)]),
   ("MMA does not wait for TMA", "", [(":(986|1006|1036)", TRY, T_)]),
   ("epilogue does not wait for the accumulator", "", [(":1193", TRY, T_)]),
   ("try_wait not retried", "MMA for TMA", [(":1006", TRY, not_retried)]),
   ("try_wait not retried", "epilogue", [(":1193", TRY, not_retried)]),
   ("MMA does not wait for a free accumulator", "", [(":994", TRY, T_)]),
   ("no bar.sync before a TMA store", "", [(":1235", r"bar\.sync", E_)]),
   ("no wait_group.read before reuse", "", [(":1251", r"wait_group", E_)]),
   ("no bar.sync behind wait_group.read", "", [(":1252", r"bar\.sync", E_)]),
   ("no fence.proxy.async", "TMA store", [(":1231", r"fence\.proxy", E_)]),
   ("no fence.mbarrier_init", "", [("", r"fence\.mbarrier_init", E_)]),
   ("no fence.proxy.tensormap", "acquire", [("", r"fence\.proxy\.tensormap", E_)]),
   ("TMA store past the end", "wholly", [("", STORE, coordinate(0, "add.s32 %defect, {0}, 4096;"))]),
 ]),
 "fmha": ("cut", ["fmha(sq=256,sk=512)"], {"RISING": "1"}, "sm_100a", [
   ("MMA does not wait for TMA", "Q and K", [(":(1295|1298|1332|1307)", TRY, T_)]),
   ("MMA does not wait for a free accumulator", "scores' stage", [(":(1822|1876)", TRY, T_)]),
   ("epilogue does not wait for the accumulator", "O", [(":(3217)", TRY, T_)]),
   ("try_wait not retried", "softmax for scores", [(":2258", TRY, not_retried)]),
   ("no wait::st", "P", [(":(2603|2614)", r"tcgen05\.wait::st", E_)]),
   ("no wait::st", "correction of O", [(":3131", r"tcgen05\.wait::st", E_)]),
   ("no wait::st", "row maxima", [(":(2499|2925)", r"tcgen05\.wait::st", E_)]),
   ("no wait::ld", "row maxima", [(":(3038|3213)", r"tcgen05\.wait::ld", E_)]),
   ("no fence.proxy.async", "TMA store", [(":3272", r"fence\.proxy", E_)]),
   ("no fence.mbarrier_init", "", [("", r"fence\.mbarrier_init", E_)]),
   ("no wait_group.read before reuse", "", [(":(1483|1486)", r"wait_group", E_)]),
   ("TMEM not freed", "", [("", r"tcgen05\.dealloc", E_)]),
 ]),
 "flash": ("fa", ["d128"], {"RISING": "1"}, "sm_100a", [
   ("MMA does not wait for TMA", "Q and K", [(":(1943|1946)", TRY, T_)]),
   ("epilogue does not wait for the accumulator", "O", [(":2963", TRY, T_)]),
   ("try_wait not retried", "softmax for scores", [(":2635", TRY, not_retried)]),
   ("no wait::st", "P", [(":(2717|2720)", r"tcgen05\.wait::st", E_)]),
   ("no wait::st", "correction of O", [(":3148", r"tcgen05\.wait::st", E_)]),
   ("no fence.proxy.async", "TMA store", [(":3248", r"fence\.proxy", E_)]),
   ("no fence.mbarrier_init", "", [("", r"fence\.mbarrier_init", E_)]),
   ("no wait_group.read before reuse", "", [(":3369", r"wait_group", E_)]),
   ("TMEM not freed", "", [("", r"tcgen05\.dealloc", E_)]),
   ("wrong parity", "softmax for scores", [(":2635", TRY, parity)]),
 ]),
 "flash_bwd": ("fab", ["go(128,256,1,1,64,False)"], {}, "sm_100a", [
   ("reduce-add turned into a store", "dQ", [(r":\d+", r"cp\.reduce", to_store)]),
   ("no fence.proxy.async", "all", [(r":\d+", r"fence\.proxy\.async", E_)]),
   ("no wait_group.read before reuse", "", [(r":\d+", r"bulk\.wait_group", E_)]),
   ("no fence.mbarrier_init", "", [(r":\d+", r"fence\.mbarrier_init", E_)]),
   ("no wait::st", "all", [(r":\d+", r"tcgen05\.wait::st", E_)]),
 ]),
 "ours": ("ours", ["fmha-sm100-d512"], {}, "sm_100a", [
   ("no fence.proxy.async", "UMMA reads P", [(r":\d+", r"fence\.proxy\.async", E_)]),
   ("no wait::ld", "all", [(r":\d+", r"tcgen05\.wait::ld", E_)]),
   ("no wait::st", "all", [(r":\d+", r"tcgen05\.wait::st", E_)]),
   ("no fence.mbarrier_init", "", [(r":\d+", r"fence\.mbarrier_init", E_)]),
   ("try_wait not retried", "all", [(r":\d+", TRY, not_retried)]),
   ("TMEM not freed", "", [(r":\d+", r"tcgen05\.dealloc", E_)]),
 ]),
 "hopper": ("qk", ["gemm(m=256,n=256,k=256)"], {"PUB_SMS": "1"}, "sm_90a", [
   ("no bar.sync before a TMA store", "", [("proxy+bar", r"bar\.sync", E_)]),
   ("no wait_group.read before reuse", "", [(r":\d+", r"bulk\.wait_group", E_)]),
   ("no fence.proxy.async", "TMA store", [(r":\d+", r"fence\.proxy\.async", E_)]),
   ("no fence.mbarrier_init", "", [(r":\d+", r"fence\.mbarrier_init", E_)]),
   ("try_wait not retried", "all", [(r":\d+", TRY, not_retried)]),
   ("expect_tx bytes", "16 more", [(r":\d+", "expect_tx", more_bytes(16))]),
   ("TMA store past the end", "wholly", [(r":\d+", STORE, coordinate(0, "add.s32 %defect, {0}, 4096;"))]),
   ("two CTAs write one place", "tiles of one CTA", [(r":\d+", STORE, coordinate(0, "mov.u32 %defect, 0;"))]),
 ]),
}
script, arguments, environment, arch, DEFECTS = CASES[NAME]
os.environ.update({"PUB_ARCH": arch} | environment)
import harness
import warpspec.sim as sim
import numpy as np
from shared import mutants
from warpspec.sim import runtime
from warpspec.sim.order.checker import OrderChecker

def matching(program, text, place, opcode):
    found, last = [], ""
    lines = text.split("\n")
    for ins in program.kernel.instrs:
        src = (ins.source or "").split("/")[-1].split(" ")[0]
        if place in ("proxy+bar", "read+bar"):  # a barrier just behind a proxy fence, or behind a wait for reads
            want = r"fence\.proxy" if place == "proxy+bar" else r"wait_group"
            if re.match(opcode, ins.opcode) and re.search(want, last): found.append(ins)
        elif re.search(place + "$" if place else "", src) and re.search(opcode, ins.opcode): found.append(ins)
        if mutants.group_of(ins): last = ins.opcode
    return found

def differs(result, expected):
    n = 0
    for got, right in zip(result, expected):
        words = len(got) // 4 * 4
        a, b = (x[:words].view(np.uint16).astype(np.int32) for x in (got, right))
        n += int((np.abs(a - b) > 2).sum())
    return n

def keys(error): return {(f.kind, re.sub(r"CTA \([^)]*\) warp \d+|PTX line \d+ ", "", f.first), re.sub(r"CTA \([^)]*\) warp \d+|PTX line \d+ ", "", f.second)) for f in error.findings}

def execute(launch, program, seed, check):
    """(outcome, memory, findings, warnings)"""
    reports, original = [], runtime.execute
    def kept(*a, **k):
        r = original(*a, **k); reports.append(r); return r
    try:
        with mock.patch.object(runtime, "execute", kept), mutants._time_limit(60):
            memory = launch.run(program, seed, check)
        return "ran", memory, set(), [w for r in reports for w in r.warnings]
    except sim.OrderError as e:
        if e.__cause__ is not None: return "order", type(e.__cause__).__name__, keys(e), []
        return "order", [a.array.copy() for a, _ in launch.memory], keys(e), []
    except sim.SimError as e: return type(e).__name__, str(e), set(), []
    except TimeoutError: return "hangs", None, set(), []

def visit(launch):
    if launch.text in seen: return
    seen.add(launch.text)
    launch.options["fuse"] = False
    for a, before in launch.memory:
        if os.environ.get("POISON", "1") == "1" and a.name and False: pass
    p = launch.program
    if not any(matching(p, launch.text, place, opcode) for _, _, edits in DEFECTS for place, opcode, _ in edits if place): 
        if NAME not in ("many",): return
    if any(skip in p.name for skip in ("Preprocess", "Postprocess", "combine")): return
    print("KERNEL", p.name, launch.options.get("grid"), flush=True)
    if True:
        t = time.process_time(); plain_program = runtime.load_program(launch.text, launch.kernel, False); right = [execute(launch, plain_program, s, None) for s in range(SEEDS)]; t1 = time.process_time() - t
    t = time.process_time(); base = [execute(launch, p, s, "order") for s in range(SEEDS)] if CHECKED else []; t2 = time.process_time() - t
    known = set().union(*[b[2] for b in base]) if base else set()
    warned = {w.split("\n")[0][:60] for r in right for w in r[3]}
    assert all(r[0] == "ran" for r in right), [r[:2] for r in right if r[0] != "ran"]
    expected = right[0][1]
    print(f"  plain {t1:.1f} s, checked {t2:.1f} s of {SEEDS} seeds; right differ between seeds in {[differs(r[1], expected) for r in right]}; {len(known)} findings without a defect", flush=True)
    for row, what, edits in DEFECTS:
        if ONLY and not re.search(ONLY, row + " " + what): continue
        lines = launch.text.split("\n")
        n = 0
        for place, opcode, edit in edits:
            for ins in matching(p, launch.text, place, opcode):
                old = lines[ins.line - 1]; new = edit(ins, old.strip()); n += 1
                lines[ins.line - 1] = new
        if not n: print(f"  {row} ({what}): NO INSTRUCTION", flush=True); continue
        if os.environ.get("SHOW"): print("\n".join(f"      {a.strip()} -> {b}" for a, b in zip(launch.text.split("\n"), lines) if a != b))
        program = runtime._program.__wrapped__(runtime._Text("\n".join(lines)), launch.kernel, False) if PLAIN else None
        checked = runtime._program.__wrapped__(runtime._Text("\n".join(lines)), launch.kernel, True) if CHECKED else None
        plain, order = [], []
        for seed in range(SEEDS):
            if PLAIN:
                o, memory, _, warnings = execute(launch, program, seed, None)
                if o == "ran":
                    o = "wrong" if differs(memory, expected) else "warned" if {w.split("\n")[0][:60] for w in warnings} - warned else "-"
                plain.append(o)
            if CHECKED:
                o, memory, found, warnings = execute(launch, checked, seed, "order")
                if o == "order" and not found - known: o = memory if isinstance(memory, str) else "ran"
                if o == "ran": o = "-" if not differs(memory, expected) else "wrong"
                order.append(o)
        short = lambda xs: " ".join(f"{k} {v}" for k, v in collections.Counter(xs).most_common())
        print(f"  {row} ({what}, {n}): plain [{short(plain)}] {''.join('-' if o == '-' else 'w' if o == 'wrong' else '!' if o == 'warned' else 'D' for o in plain)} | order [{short(order)}] {''.join('-' if o in ('-','old') else 'w' if o == 'wrong' else 'O' if o == 'order' else 'D' for o in order)}", flush=True)
seen = set()
import runpy
with mutants.recorded(visit):
    sys.argv = [script + ".py"] + arguments
    with open(os.devnull, "w") as null:
        real_out = sys.stdout
        runpy.run_path(f"/tmp/public/probe/{script}.py", run_name="__main__")
