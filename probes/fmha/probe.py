"""Variants of plans of attention at shapes of the sweep: compiled ahead in processes, timed in turn in graphs."""
import sys, os, json, time
ROOT=os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(ROOT,"scripts"))
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from dataclasses import replace
import torch
from shared import gpu_bench, sweep_calls, sweep_report
from shared.sweep_shapes import AttentionShape, RowShape, draw_shapes, cliffs
from warpspec.aot.workers import compile_ahead
from warpspec.common.launch import target_of
from warpspec.fmha import launch, ops
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.plan import Plan, choose_section
from warpspec.fmha.sm90 import AttentionConfig, ATTENTION
from warpspec.fmha.sm90.shapes import Shape, PREFILL, LONG, DECODE, NARROW
import bench_sweep

def problem_of(shape):
    x=sweep_calls.attention_inputs(shape,"meta",values=False)
    return AttentionProblem.of(x.q,x.k,x.v,memory=False,**x.options)

def make_plan(problem,target,v):
    """v: dict(shape=, chunked=, ...config fields)"""
    base=launch.plan(problem,target)
    if not v: return base
    v=dict(v)
    shape=v.pop("shape",None); chunked=v.pop("chunked",base.config.chunked); splits=v.pop("splits",1)
    ps=v.pop("plan",{})
    cfg=AttentionConfig.of(problem,shape=shape or base.config.shape,chunked=chunked,splits=splits>1)
    if "shape_" in v: cfg=replace(cfg,shape=replace(cfg.shape,**v.pop("shape_")))
    if v: cfg=replace(cfg,**v)
    ctas=target.sm_count*cfg.shape.ctas_per_sm
    return Plan(cfg,splits,ctas,choose_section(problem,cfg,ctas))._replace(**ps)

def prepared_of(problem,plan,target):
    attention=ATTENTION.launcher(plan.config,target)
    if plan.config.queued: launch.prepare_reserve(target.device)
    combine=None
    if plan.splits>1: combine=launch.COMBINE.launcher(launch.combine_config(problem,plan.splits),target)
    if plan.config.chunked: combine=launch.JOIN.launcher(launch.join_config(problem,plan.config),target)
    return launch.Prepared(target,plan,launch.launch_numbers(problem,plan),attention,combine)

def kernels(problem,plan):
    found=[(ATTENTION,plan.config)]
    if plan.splits>1: found.append((launch.COMBINE,launch.combine_config(problem,plan.splits)))
    if plan.config.chunked: found.append((launch.JOIN,launch.join_config(problem,plan.config)))
    return found

CURRENT=None
original=ops.prepare
def prepare(problem,target):
    return CURRENT if CURRENT is not None else original(problem,target)
ops.prepare=prepare

def call_of(shape,prepared):
    inner=sweep_calls.ours(shape)
    def call(x):
        global CURRENT
        CURRENT=prepared; ops._checked.clear()
        try: return inner(x)
        finally: CURRENT=None; ops._checked.clear()
    return call

def run(cases, seconds, out=None):
    """cases: [(shape, {name: variant}, peers?)]"""
    target=target_of(torch.device("cuda",0)); start=time.monotonic()
    todo=[]; jobs={}; place={}
    for shape,variants,peers in cases:
        try: problem=problem_of(shape)
        except Exception as e: print("BAD",shape.name,e); continue
        plans={}
        for name,v in variants.items():
            try: plans[name]=make_plan(problem,target,v)
            except Exception as e: print("no",name,shape.name,repr(e)[:150],flush=True)
        todo.append((shape,problem,plans,peers))
    pool=ProcessPoolExecutor(int(os.environ.get("WORKERS","14")),mp_context=get_context("spawn"),initializer=bench_sweep.quiet)
    with bench_sweep.blind(target):
        for shape,problem,plans,peers in todo:
            for plan in plans.values():
                for item in kernels(problem,plan):
                    if item not in jobs: jobs[item]=pool.submit(compile_ahead,*item,target.arch)
            if peers:
                key=("peer",sweep_calls.peer_kernel(shape))
                if key not in jobs: jobs[key]=pool.submit(bench_sweep.compile_peers,[shape])
    results=[]
    for shape,problem,plans,peers in todo:
        if time.monotonic()-start>seconds: print("left out",shape.name,flush=True); continue
        wanted=[jobs[i] for plan in plans.values() for i in kernels(problem,plan)]
        if peers: wanted.append(jobs["peer",sweep_calls.peer_kernel(shape)])
        wait(wanted,timeout=max(1,seconds+30-(time.monotonic()-start)))
        inputs=sweep_calls.input_sets(shape)
        calls={}; expected=None; bad={}
        with torch.no_grad():
            for name,plan in plans.items():
                try:
                    call=call_of(shape,prepared_of(problem,plan,target))
                    got=call(*inputs[0]); torch.cuda.synchronize()
                    if expected is None: expected=got
                    error=bench_sweep.difference(got,expected)
                    if not error<1e-2: bad[name]=error
                    calls[name]=call
                except Exception as e: print("failed",name,shape.name,repr(e)[:200],flush=True)
            if peers:
                for name,call in sweep_calls.peers(shape).items():
                    if name=="SDPA": continue
                    try:
                        error=bench_sweep.difference(call(*inputs[0]),expected)
                        gpu_bench.captured(call,inputs,1)
                        calls[name]=call
                        if not error<1e-2: bad[name]=error
                    except Exception as e: print("peer",name,repr(e)[:120])
            limited=shape.flops/sweep_report.FLOPS_US>shape.bytes/sweep_report.BYTES_US
            rounds=gpu_bench.SHORT_ROUNDS if limited else {}
            try: times=gpu_bench.graph_times(calls,inputs,**(rounds | {"rounds":9,"round_ms":2.0}))
            except Exception as e: print("timing failed",shape.name,repr(e)[:300],flush=True); continue
        print(f"{shape.kind} {shape.name} bytes {shape.bytes/sweep_report.BYTES_US:.1f}us: "+", ".join(f"{n} {t:.1f}" for n,t in times.items())+(f"  WRONG {bad}" if bad else ""),flush=True)
        results.append({"name":shape.name,"times":times})
        del inputs,calls,expected
        torch.cuda.empty_cache()
    pool.shutdown(wait=False,cancel_futures=True)
    print(f"{time.monotonic()-start:.0f} s",flush=True)
    if out: json.dump(results,open(out,"w"))
