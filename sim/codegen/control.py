"""The ends of blocks in native code: bra, brx.idx, ret, exit, trap (PTX ISA 9.7.12)."""

from __future__ import annotations

from collections.abc import Sequence

from warpspec.sim.codegen.emitter import Emitter, Form, ivec
from warpspec.sim.codegen.layout import Ctx, Fault, Stop
from warpspec.sim.instruction import Instr, Not
from warpspec.sim.registry import Control, Family, declare

declare("bra", family=Family.CONTROL, destinations=0, control=Control.BRANCH)
declare("brx.idx", family=Family.CONTROL, destinations=0, control=Control.INDEXED_BRANCH)
declare("ret", "exit", family=Family.CONTROL, destinations=0, control=Control.EXIT)
declare("trap", family=Family.CONTROL, destinations=0, control=Control.TRAP)


def ending(e: Emitter, last: Instr, control: Control, targets: Sequence[int], through: int) -> Form:
    """The form of a block's last instruction.

    targets: the blocks to which `last` may go, for an exit the one that leaves the kernel. through: the block after it
    in the text.
    """
    return e.form(_ending(e, last, control, targets, through))


def jump(e: Emitter, target: int) -> Form:
    """The form that ends a block whose last instruction is none of these."""
    return e.form(f"  ret i32 {e.parameter32(target)}")


def _ending(e: Emitter, last: Instr, control: Control, targets: Sequence[int], through: int) -> str:
    """Emit it; returns the text of the function's return at its end."""
    taking = "%mask"
    if last.guard is not None:
        condition = e.pred(Not(last.guard) if last.guard_negated else last.guard)
        taking = e.op(f"and i32 {e.op(f'bitcast {ivec(1)} {condition} to i32')}, %mask")
    elif control is Control.TRAP:
        return _fault(e, last, Fault.TRAP)
    elif control is not Control.INDEXED_BRANCH:
        return f"  ret i32 {e.parameter32(targets[0])}"
    none = e.op(f"icmp eq i32 {taking}, 0")
    e.do(f"br i1 {none}, label %through, label %some")
    e.lines.append("through:")
    e.lines += [f"  ret i32 {e.parameter32(through)}", "some:"]
    if control is Control.TRAP:
        return _fault(e, last, Fault.TRAP)
    if control is Control.INDEXED_BRANCH:
        taking, target = _indexed(e, last, targets, taking)
        e.ctx_store(Ctx.TARGET, e.op(f"zext i32 {target} to i64"))
    else:
        target = e.parameter32(targets[0])
    every = e.op(f"icmp eq i32 {taking}, %mask")
    e.do(f"br i1 {every}, label %take, label %split")
    e.lines += ["take:", f"  ret i32 {target}", "split:"]
    e.ctx_store(Ctx.TAKEN, e.op(f"zext i32 {taking} to i64"))
    return f"  ret i32 -{int(Stop.DIVERGED)}"


def _indexed(e: Emitter, last: Instr, targets: Sequence[int], taking: str) -> tuple[str, str]:
    """(lanes that share the first one's index, block that it picks); the other lanes execute brx.idx again."""
    index = e.get(last.operands[0], 32)
    first = e.call("i32", "llvm.cttz.i32", f"i32 {taking}", "i1 true")
    chosen = e.op(f"extractelement {ivec(32)} {index}, i32 {first}")
    alike = e.op(f"icmp eq {ivec(32)} {index}, {e.splat(32, chosen)}")
    together = e.op(f"and i32 {e.op(f'bitcast {ivec(1)} {alike} to i32')}, {taking}")
    cases = " ".join(f"i32 {i}, label %go" for i in range(len(targets)))
    e.do(f"switch i32 {chosen}, label %beyond [ {cases} ]")
    e.lines.append("beyond:")
    e.lines.append(_fault(e, last, Fault.BRANCH_INDEX))
    e.lines.append("go:")
    place = e.buffer(f"[{len(targets)} x i32]")
    for position, target in enumerate(targets):
        at = e.op(f"getelementptr i32, ptr {place}, i32 {position}")
        e.do(f"store i32 {e.parameter32(target)}, ptr {at}")
    at = e.op(f"getelementptr i32, ptr {place}, i32 {chosen}")
    return together, e.op(f"load i32, ptr {at}")


def _fault(e: Emitter, ins: Instr, kind: Fault) -> str:
    e.ctx_store(Ctx.FAULT_KIND, str(int(kind)))
    e.ctx_store(Ctx.FAULT_INSTR, e.parameter(ins.index))
    return f"  ret i32 -{int(Stop.FAULT)}"
