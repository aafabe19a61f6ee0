"""Lanes exchange values, in native code: shfl, vote, redux, elect, activemask (PTX ISA 9.7.9, 9.7.13)."""

from __future__ import annotations

from warpspec.sim.codegen.emitter import Emitter, NotNative, ivec
from warpspec.sim.instruction import Imm, Instr, Pair
from warpspec.sim.registry import Collective, Family, translator


def _lane_numbers(e: Emitter) -> str:
    return "<" + ", ".join(f"i32 {i}" for i in range(32)) + ">"


@translator("shfl.sync", family=Family.WARP, destinations=1, collective=Collective.MEMBERS)
def shfl(e: Emitter, ins: Instr) -> None:
    """shfl.sync.mode.b32 d[|p], a, b, c, membermask (9.7.9.6): c holds the segment mask (bits 8-12) and the clamp."""
    mode, (a, b, c) = ins.parts[2], ins.operands[1:4]
    value, lane = e.get(a, 32), _lane_numbers(e)
    t = ivec(32)
    segment = e.op(f"lshr {t} {e.get(c, 32)}, {e.imm(32, 8)}")
    segment = e.op(f"and {t} {segment}, {e.imm(32, 31)}")
    clamp = e.op(f"and {t} {e.get(c, 32)}, {e.imm(32, 31)}")
    amount = e.op(f"and {t} {e.get(b, 32)}, {e.imm(32, 31)}")
    inverse = e.op(f"xor {t} {segment}, {e.imm(32, 31)}")
    fixed = e.op(f"and {t} {lane}, {segment}")
    top = e.op(f"or {t} {fixed}, {e.op(f'and {t} {clamp}, {inverse}')}")
    if mode == "up":
        source = e.op(f"sub {t} {lane}, {amount}")
        valid = e.op(f"icmp sge {t} {source}, {top}")
    elif mode == "down":
        source = e.op(f"add {t} {lane}, {amount}")
        valid = e.op(f"icmp sle {t} {source}, {top}")
    elif mode == "bfly":
        source = e.op(f"xor {t} {lane}, {amount}")
        valid = e.op(f"icmp sle {t} {source}, {top}")
    elif mode == "idx":
        source = e.op(f"or {t} {fixed}, {e.op(f'and {t} {amount}, {inverse}')}")
        valid = e.op(f"icmp sle {t} {source}, {top}")
    else:
        raise NotNative(ins.opcode)
    source = e.select(valid, source, lane, t)
    target = ins.operands[0]
    pair = target if isinstance(target, Pair) else Pair(target, None)
    e.set(pair.first, gather(e, value, source), 32)
    if pair.second is not None:
        e.set(pair.second, valid, 1)


def gather(e: Emitter, value: str, source: str) -> str:
    """value[source[lane]] for each lane, through stack memory."""
    t = ivec(32)
    data, index = e.buffer(t, 4), e.buffer(t, 5)
    e.do(f"store {t} {value}, ptr {data}, align 64")
    e.do(f"store {t} {source}, ptr {index}, align 64")
    e.intrinsics.add(_GATHER)
    e.do(f"call void @gather_lanes(ptr {data}, ptr {index})")
    return e.op(f"load {t}, ptr {index}, align 64")


_GATHER = """
define internal void @gather_lanes(ptr %data, ptr %index) noinline {
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  %at = getelementptr i32, ptr %index, i64 %i
  %j = load i32, ptr %at, align 4
  %j64 = zext i32 %j to i64
  %from = getelementptr i32, ptr %data, i64 %j64
  %x = load i32, ptr %from, align 4
  store i32 %x, ptr %at, align 4
  %next = add i64 %i, 1
  %done = icmp eq i64 %next, 32
  br i1 %done, label %end, label %loop
end:
  ret void
}
"""


def _members(e: Emitter, ins: Instr) -> str:
    """<32 x i32>: the executing lanes that each lane's membermask names (tiles of a warp name different ones)."""
    named = e.get(ins.membermask, 32)
    return e.op(f"and {ivec(32)} {named}, {e.splat(32, e.active())}")


@translator("elect.sync", family=Family.WARP, destinations=1, collective=Collective.MEMBERS)
def elect(e: Emitter, ins: Instr) -> None:
    """elect.sync d|p, membermask: the lowest member is elected (the ISA leaves the choice open)."""
    leader = e.call(ivec(32), "llvm.cttz.v32i32", f"{ivec(32)} {_members(e, ins)}", "i1 false")
    pair = ins.operands[0]
    e.set(pair.second, e.op(f"icmp eq {ivec(32)} {_lane_numbers(e)}, {leader}"), 1)
    e.set(pair.first, leader, 32)


@translator("vote.sync", family=Family.WARP, destinations=1, collective=Collective.MEMBERS)
def vote(e: Emitter, ins: Instr) -> None:
    """vote.sync.all, any, uni and ballot: what the members' predicates are."""
    mode = ins.parts[2]
    members = _members(e, ins)
    setting = e.splat(32, e.op(f"bitcast {ivec(1)} {e.pred(ins.operands[1])} to i32"))
    setting = e.op(f"and {ivec(32)} {setting}, {members}")
    if mode == "ballot":
        return e.set(ins.operands[0], setting, 32)
    every = e.op(f"icmp eq {ivec(32)} {setting}, {members}")
    none = e.op(f"icmp eq {ivec(32)} {setting}, zeroinitializer")
    if mode == "all":
        result = every
    elif mode == "any":
        result = e.op(f"xor {ivec(1)} {none}, splat (i1 true)")
    elif mode == "uni":
        result = e.op(f"or {ivec(1)} {every}, {none}")
    else:
        raise NotNative(ins.opcode)
    e.set(ins.operands[0], result, 1)


_REDUCE = {
    ("add", "u32"): ("add", 0), ("add", "s32"): ("add", 0),
    ("min", "u32"): ("umin", 0xFFFFFFFF), ("max", "u32"): ("umax", 0),
    ("min", "s32"): ("smin", 0x7FFFFFFF), ("max", "s32"): ("smax", 0x80000000),
    ("and", "b32"): ("and", 0xFFFFFFFF), ("or", "b32"): ("or", 0), ("xor", "b32"): ("xor", 0),
}  # fmt: skip


@translator("redux.sync", family=Family.WARP, destinations=1, collective=Collective.MEMBERS)
def redux(e: Emitter, ins: Instr) -> None:
    """redux.sync over integers: lanes outside the (immediate) membermask contribute the identity."""
    key = (ins.parts[2], ins.parts[-1])
    if key not in _REDUCE or not isinstance(ins.membermask, Imm):
        raise NotNative(ins.opcode)
    name, identity = _REDUCE[key]
    members = e.op(f"and i32 {ins.membermask.value & 0xFFFFFFFF}, {e.active()}")
    inside = e.op(f"bitcast i32 {members} to {ivec(1)}")
    value = e.select(inside, e.get(ins.operands[1], 32), e.imm(32, identity), ivec(32))
    result = e.call("i32", f"llvm.vector.reduce.{name}.v32i32", f"{ivec(32)} {value}")
    e.set(ins.operands[0], e.splat(32, result), 32)


@translator("activemask", family=Family.WARP, destinations=1)
def activemask(e: Emitter, ins: Instr) -> None:
    """activemask gives the lanes that execute it together."""
    e.set(ins.operands[0], e.splat(32, "%mask"), 32)
