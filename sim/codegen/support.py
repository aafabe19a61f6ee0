"""LLVM functions that every translated kernel carries: address resolution, lane loops of loads and stores, dispatch."""

from __future__ import annotations

from functools import cache

from warpspec.sim.codegen.layout import BUDGET_BIT, HOOKED_BIT, LOG_WORDS, START_BIT, Ctx, Fault, Stop
from warpspec.sim.memory import CTA_RANK_SHIFT, SHARED_BASE_OFFSET, WINDOW_SHIFT

SPACES = {"generic": 0, "global": 1, "shared": 2, "cluster": 3, "local": 4}


def _field(name: str, field: Ctx) -> str:
    return f"""
  %{name}.at = getelementptr i64, ptr %ctx, i64 {int(field)}
  %{name} = load i64, ptr %{name}.at, align 8"""


def _put(field: Ctx, value: str, tag: str) -> str:
    return f"""
  %{tag} = getelementptr i64, ptr %ctx, i64 {int(field)}
  store i64 {value}, ptr %{tag}, align 8"""


RESOLVE = f"""
define internal ptr @resolve(ptr %ctx, i32 %space, i64 %addr, i64 %size, i32 %write, i64 %lane, i32 %instr) noinline {{
entry:
  %low = sub i64 %size, 1
  %misbits = and i64 %addr, %low
  %aligned = icmp eq i64 %misbits, 0
  br i1 %aligned, label %dispatch, label %fault
dispatch:
  switch i32 %space, label %global [ i32 0, label %generic
                                     i32 2, label %own
                                     i32 3, label %cluster
                                     i32 4, label %local ]
generic:
  %top = lshr i64 %addr, {WINDOW_SHIFT}
  switch i64 %top, label %global [ i64 1, label %cluster
                                   i64 2, label %local ]
own:
  %rank.of = lshr i64 %addr, {CTA_RANK_SHIFT}
  %rank.low = and i64 %rank.of, 255{_field("mine", Ctx.CTA_RANK)}
  %is.own = icmp eq i64 %rank.low, %mine
  br i1 %is.own, label %cluster, label %fault
cluster:
  %rank.all = lshr i64 %addr, {CTA_RANK_SHIFT}
  %rank = and i64 %rank.all, 255{_field("ranks", Ctx.CLUSTER_SIZE)}
  %rank.ok = icmp ult i64 %rank, %ranks
  br i1 %rank.ok, label %inside, label %fault
inside:
  %off = and i64 %addr, {(1 << CTA_RANK_SHIFT) - 1}{_field("smem.size", Ctx.SMEM_SIZE)}
  %end = add i64 %off, %size
  %end.ok = icmp ule i64 %end, %smem.size
  %start.ok = icmp uge i64 %off, {SHARED_BASE_OFFSET}
  %both = and i1 %end.ok, %start.ok
  br i1 %both, label %shared, label %fault
shared:{_field("table.raw", Ctx.SMEM_TABLE)}
  %table = inttoptr i64 %table.raw to ptr
  %base.at = getelementptr i64, ptr %table, i64 %rank
  %base = load i64, ptr %base.at, align 8
  %shared.addr = add i64 %base, %off
  %shared.ptr = inttoptr i64 %shared.addr to ptr
  ret ptr %shared.ptr
local:
  %loff = and i64 %addr, 4294967295{_field("lsize", Ctx.LOCAL_SIZE)}
  %lend = add i64 %loff, %size
  %l.ok = icmp ule i64 %lend, %lsize
  br i1 %l.ok, label %local.go, label %fault
local.go:{_field("lbase", Ctx.LOCAL_BASE)}
  %lane.off = mul i64 %lane, %lsize
  %l0 = add i64 %lbase, %lane.off
  %l1 = add i64 %l0, %loff
  %lptr = inttoptr i64 %l1 to ptr
  ret ptr %lptr
global:{_field("ranges.raw", Ctx.RANGES)}{_field("count", Ctx.RANGE_COUNT)}
  %ranges = inttoptr i64 %ranges.raw to ptr
  %gend = add i64 %addr, %size
  br label %scan
scan:
  %i = phi i64 [ 0, %global ], [ %i.next, %scan.more ]
  %more = icmp ult i64 %i, %count
  br i1 %more, label %scan.test, label %fault
scan.test:
  %i3 = mul i64 %i, 3
  %lo.at = getelementptr i64, ptr %ranges, i64 %i3
  %lo = load i64, ptr %lo.at, align 8
  %hi.at = getelementptr i64, ptr %lo.at, i64 1
  %hi = load i64, ptr %hi.at, align 8
  %above = icmp uge i64 %addr, %lo
  %below = icmp ule i64 %gend, %hi
  %hit = and i1 %above, %below
  br i1 %hit, label %found, label %scan.more
scan.more:
  %i.next = add i64 %i, 1
  br label %scan
found:
  %rw.at = getelementptr i64, ptr %lo.at, i64 2
  %rw = load i64, ptr %rw.at, align 8
  %writes = icmp ne i32 %write, 0
  %ro = icmp eq i64 %rw, 0
  %bad = and i1 %writes, %ro
  br i1 %bad, label %fault, label %global.go
global.go:
  %gptr = inttoptr i64 %addr to ptr
  ret ptr %gptr
fault:
  %kind = phi i64 [ {int(Fault.MISALIGNED)}, %entry ], [ {int(Fault.REMOTE_SHARED)}, %own ],
                  [ {int(Fault.OUT_OF_BOUNDS)}, %cluster ], [ {int(Fault.OUT_OF_BOUNDS)}, %inside ],
                  [ {int(Fault.OUT_OF_BOUNDS)}, %local ], [ {int(Fault.OUT_OF_BOUNDS)}, %scan ],
                  [ {int(Fault.READ_ONLY)}, %found ]
  %instr64 = zext i32 %instr to i64{_put(Ctx.FAULT_KIND, "%kind", "f0")}{_put(Ctx.FAULT_LANE, "%lane", "f1")}{
    _put(Ctx.FAULT_ADDRESS, "%addr", "f2")
}{_put(Ctx.FAULT_INSTR, "%instr64", "f3")}{_put(Ctx.FAULT_SIZE, "%size", "f4")}
  ret ptr null
}}
"""

TRAMPOLINE = f"""
define i64 @run(ptr %ctx, i64 %what) {{
entry:{_field("alive64", Ctx.ALIVE)}{_field("counters.raw", Ctx.COUNTERS)}{_field("regs.raw", Ctx.REGISTERS)}{
    _field("code", Ctx.CODE)
}{_field("flags.raw", Ctx.FLAGS)}{_field("hooked.code", Ctx.HOOKED_CODE)}{
    _field("hooked.flags", Ctx.HOOKED_FLAGS)
}
  %hooked = icmp slt i64 %what, 0
  %table.raw = select i1 %hooked, i64 %hooked.code, i64 %code
  %which.flags = select i1 %hooked, i64 %hooked.flags, i64 %flags.raw
  %regs = inttoptr i64 %regs.raw to ptr
  %table = inttoptr i64 %table.raw to ptr
  %flags = inttoptr i64 %which.flags to ptr
  %mask = trunc i64 %what to i32
  %start64 = lshr i64 %what, {START_BIT}
  %start32 = trunc i64 %start64 to i32
  %start = and i32 %start32, {(1 << (BUDGET_BIT - START_BIT)) - 1}
  %budget64 = lshr i64 %what, {BUDGET_BIT}
  %budget32 = trunc i64 %budget64 to i32
  %budget = and i32 %budget32, {(1 << (HOOKED_BIT - BUDGET_BIT)) - 1}
  %counters = inttoptr i64 %counters.raw to ptr
  %alive = trunc i64 %alive64 to i32
  %whole = icmp eq i32 %mask, %alive
  br label %loop
loop:
  %pc = phi i32 [ %start, %entry ], [ %next, %spend ]
  %left = phi i32 [ %budget, %entry ], [ %left.next, %spend ]
  %pc64 = zext i32 %pc to i64
  %first.at = getelementptr ptr, ptr %table, i64 %pc64
  %first = load ptr, ptr %first.at, align 8
  %none = icmp eq ptr %first, null
  br i1 %none, label %python, label %native
native:
  %flag.at = getelementptr i8, ptr %flags, i64 %pc64
  %flag = load i8, ptr %flag.at, align 1
  %collective = icmp ne i8 %flag, 0
  %partial = xor i1 %whole, true
  %check = and i1 %collective, %partial
  br i1 %check, label %forced, label %go
forced:{_field("force", Ctx.FORCE)}
  %is.forced = icmp ne i64 %force, 0
  br i1 %is.forced, label %unforce, label %stop.collective
unforce:
  store i64 0, ptr %force.at, align 8
  br label %go
go:
  %counter.at = getelementptr i64, ptr %counters, i64 %pc64
  %counter = load i64, ptr %counter.at, align 8
  %counter.next = add i64 %counter, 1
  store i64 %counter.next, ptr %counter.at, align 8
  br label %step
step:
  %record = phi ptr [ %first, %go ], [ %following, %on ]
  %following.at = getelementptr i64, ptr %record, i64 1
  %following = load ptr, ptr %following.at, align 8
  %fn = load ptr, ptr %record, align 8
  %next = call i32 %fn(ptr %regs, ptr %ctx, i32 %mask, ptr %record)
  %stops = icmp slt i32 %next, 0
  br i1 %stops, label %stop.block, label %on
on:
  %last = icmp eq ptr %following, null
  br i1 %last, label %spend, label %step
spend:
  %left.next = sub i32 %left, 1
  %out = icmp eq i32 %left.next, 0
  br i1 %out, label %stop.budget, label %loop
stop.block:
  %neg = sub i32 0, %next
  %why64 = zext i32 %neg to i64
  %why.hi = shl i64 %why64, 32
  %r0 = or i64 %why.hi, %pc64
  ret i64 %r0
stop.budget:
  %next64 = zext i32 %next to i64
  %r1 = or i64 {int(Stop.BUDGET) << 32}, %next64
  ret i64 %r1
stop.collective:
  %r2 = or i64 {int(Stop.COLLECTIVE) << 32}, %pc64
  ret i64 %r2
python:
  ret i64 %pc64
}}
"""


RECORD = f"""
define internal void @record(ptr %ctx, ptr %addrs, i32 %mask, i32 %instr) noinline {{
entry:{_field("log.raw", Ctx.LOG)}{_field("count", Ctx.LOG_COUNT)}
  %log = inttoptr i64 %log.raw to ptr
  %first = mul i64 %count, {LOG_WORDS}
  %at = getelementptr i64, ptr %log, i64 %first
  %instr64 = zext i32 %instr to i64
  %mask64 = zext i32 %mask to i64
  %high = shl i64 %mask64, 32
  %head = or i64 %high, %instr64
  store i64 %head, ptr %at, align 8
  %to = getelementptr i64, ptr %at, i64 1
  %all = load <32 x i64>, ptr %addrs, align 64
  store <32 x i64> %all, ptr %to, align 8
  %next = add i64 %count, 1
  store i64 %next, ptr %count.at, align 8
  ret void
}}
"""


# A trampoline that returns, too, when the log of accesses might not hold those of another block.
LOGGING_TRAMPOLINE = TRAMPOLINE.replace(
    "  %out = icmp eq i32 %left.next, 0",
    "  %spent = icmp eq i32 %left.next, 0"
    + _field("logged", Ctx.LOG_COUNT)
    + _field("log.limit", Ctx.LOG_LIMIT)
    + """
  %full = icmp uge i64 %logged, %log.limit
  %out = or i1 %spent, %full""",
)


def _lane_loop(name: str, arguments: str, size: int, write: int, body: str) -> str:
    """A function that runs `body` for each executing lane with %p the resolved host address; 1 on a fault."""
    return f"""
define internal i32 @{name}(ptr %ctx, i32 %space, ptr %addrs, i32 %mask, {arguments}, i32 %instr) noinline {{
entry:
  br label %loop
loop:
  %lane = phi i64 [ 0, %entry ], [ %lane.next, %next ]
  %lane32 = trunc i64 %lane to i32
  %shifted = lshr i32 %mask, %lane32
  %bit = trunc i32 %shifted to i1
  br i1 %bit, label %work, label %next
work:
  %addr.at = getelementptr i64, ptr %addrs, i64 %lane
  %addr = load i64, ptr %addr.at, align 8
  %p = call ptr @resolve(ptr %ctx, i32 %space, i64 %addr, i64 {size}, i32 {write}, i64 %lane, i32 %instr)
  %bad = icmp eq ptr %p, null
  br i1 %bad, label %fault, label %access
access:
{body}
  br label %next
next:
  %lane.next = add i64 %lane, 1
  %done = icmp eq i64 %lane.next, 32
  br i1 %done, label %end, label %loop
end:
  ret i32 0
fault:
  ret i32 1
}}
"""


def _slot(buffer: str, j: int, bits: int) -> str:
    return f"""  %s{j}.row = getelementptr <32 x i{bits}>, ptr %{buffer}, i64 {j}
  %s{j} = getelementptr i{bits}, ptr %s{j}.row, i64 %lane"""


@cache
def load_function(count: int, bits: int) -> tuple[str, str]:
    """(name, text) of a load of `count` elements of `bits` bits a lane into consecutive 32-lane vectors."""
    body = []
    for j in range(count):
        body.append(f"  %q{j} = getelementptr i{bits}, ptr %p, i64 {j}")
        body.append(f"  %x{j} = load i{bits}, ptr %q{j}, align {bits // 8}")
        body.append(_slot("out", j, bits))
        body.append(f"  store i{bits} %x{j}, ptr %s{j}, align {bits // 8}")
    name = f"ld_{count}x{bits}"
    return name, _lane_loop(name, "ptr %out", count * bits // 8, 0, "\n".join(body))


@cache
def store_function(count: int, bits: int) -> tuple[str, str]:
    """(name, text) of a store of `count` elements of `bits` bits a lane from consecutive 32-lane vectors."""
    body = []
    for j in range(count):
        body.append(_slot("in", j, bits))
        body.append(f"  %x{j} = load i{bits}, ptr %s{j}, align {bits // 8}")
        body.append(f"  %q{j} = getelementptr i{bits}, ptr %p, i64 {j}")
        body.append(f"  store i{bits} %x{j}, ptr %q{j}, align {bits // 8}")
    name = f"st_{count}x{bits}"
    return name, _lane_loop(name, "ptr %in", count * bits // 8, 1, "\n".join(body))


_ATOMS = {
    "add": "%new = add i{b} %old, %x0",
    "and": "%new = and i{b} %old, %x0",
    "or": "%new = or i{b} %old, %x0",
    "xor": "%new = xor i{b} %old, %x0",
    "exch": "%new = or i{b} %x0, 0",
    "cas": "%same = icmp eq i{b} %old, %x0\n  %new = select i1 %same, i{b} %x1, i{b} %old",
    "inc": "%wrap = icmp uge i{b} %old, %x0\n  %plus = add i{b} %old, 1\n"
    "  %new = select i1 %wrap, i{b} 0, i{b} %plus",
    "dec": "%zero = icmp eq i{b} %old, 0\n  %big = icmp ugt i{b} %old, %x0\n  %wrap = or i1 %zero, %big\n"
    "  %minus = sub i{b} %old, 1\n  %new = select i1 %wrap, i{b} %x0, i{b} %minus",
    "umin": "%c = icmp ult i{b} %old, %x0\n  %new = select i1 %c, i{b} %old, i{b} %x0",
    "umax": "%c = icmp ugt i{b} %old, %x0\n  %new = select i1 %c, i{b} %old, i{b} %x0",
    "smin": "%c = icmp slt i{b} %old, %x0\n  %new = select i1 %c, i{b} %old, i{b} %x0",
    "smax": "%c = icmp sgt i{b} %old, %x0\n  %new = select i1 %c, i{b} %old, i{b} %x0",
    "fadd": "%fo = bitcast i{b} %old to {f}\n  %fx = bitcast i{b} %x0 to {f}\n  %fn = fadd {f} %fo, %fx\n"
    "  %new = bitcast {f} %fn to i{b}",
}


def _flush(source: str, name: str) -> str:
    """%name: the f32 bits %source, subnormals as zeros of the same sign where %ftz."""
    return f"""  %{name}.e = and i32 %{source}, {0x7F800000}
  %{name}.z = icmp eq i32 %{name}.e, 0
  %{name}.f = and i1 %{name}.z, %ftz
  %{name}.s = and i32 %{source}, {1 << 31}
  %{name} = select i1 %{name}.f, i32 %{name}.s, i32 %{source}"""


# atom.add.f32 flushes subnormals in global memory and keeps them in shared memory (PTX ISA 9.7.13.5).
_F32_SUM = f"""  %is.global = icmp eq i32 %space, {SPACES["global"]}
  %is.generic = icmp eq i32 %space, {SPACES["generic"]}
  %no.window = icmp ult i64 %addr, {1 << WINDOW_SHIFT}
  %generic.global = and i1 %is.generic, %no.window
  %ftz = or i1 %is.global, %generic.global
{_flush("old", "fo.bits")}
{_flush("x0", "fx.bits")}
  %fo = bitcast i32 %fo.bits to float
  %fx = bitcast i32 %fx.bits to float
  %fn = fadd float %fo, %fx
  %fn.bits = bitcast float %fn to i32
{_flush("fn.bits", "new")}"""


def _update(op: str, bits: int) -> str:
    """Lines that compute %new from %old, %x0 and, for cas, %x1."""
    if (op, bits) == ("fadd", 32):
        return _F32_SUM
    return "  " + _ATOMS[op].format(b=bits, f="double")


@cache
def atomic_function(op: str, bits: int) -> tuple[str, str]:
    """(name, text) of a lane-by-lane read-modify-write; operands in rows 0 (and 1) of %in, old values to %out."""
    body = []
    for j in range(2 if op == "cas" else 1):
        body += [_slot("in", j, bits), f"  %x{j} = load i{bits}, ptr %s{j}, align {bits // 8}"]
    body.append(f"  %old = load i{bits}, ptr %p, align {bits // 8}")
    body.append(_update(op, bits))
    body.append(f"  store i{bits} %new, ptr %p, align {bits // 8}")
    body.append(f"  %o.at = getelementptr i{bits}, ptr %out, i64 %lane")
    body.append(f"  store i{bits} %old, ptr %o.at, align {bits // 8}")
    name = f"atom_{op}_{bits}"
    return name, _lane_loop(name, "ptr %in, ptr %out", bits // 8, 1, "\n".join(body))
