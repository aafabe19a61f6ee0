"""ld, st, atom, red and instructions on addresses in native code (PTX ISA 9.7.9, 9.7.13)."""

from __future__ import annotations

from warpspec.sim.codegen.emitter import Emitter, NotNative, Origin, ivec
from warpspec.sim.codegen.layout import Ctx, Stop
from warpspec.sim.codegen.support import SPACES, atomic_function, load_function, store_function
from warpspec.sim.instruction import Imm, Instr, Mem, Reg, Sym, Vec
from warpspec.sim.memory import CTA_RANK_SHIFT, LOCAL_WINDOW, SHARED_WINDOW, WINDOW_SHIFT
from warpspec.sim.registry import Family, translator

_SPACE_PARTS = {
    "global": "global",
    "const": "global",
    "param": "global",
    "param::entry": "global",
    "shared": "shared",
    "shared::cta": "shared",
    "shared::cluster": "cluster",
    "local": "local",
}


def space_of(ins: Instr) -> str:
    """State space of a memory instruction."""
    for part in ins.parts[1:]:
        if part in _SPACE_PARTS:
            return _SPACE_PARTS[part]
    return "generic"


def element_bits(type_: str) -> int:
    """Width of a PTX fundamental type."""
    if type_ == "pred":
        return 1
    return int(type_.lstrip("bsuf"))


def vector_count(ins: Instr) -> int:
    for part in ins.parts[1:]:
        if part in ("v2", "v4", "v8"):
            return int(part[1:])
    return 1


def addresses(e: Emitter, operand: Mem | Reg) -> str:
    """Store each lane's address to a stack buffer and return it."""
    if isinstance(operand, Reg):
        operand = Mem(operand)
    if not isinstance(operand, Mem) or operand.coords is not None:
        raise NotNative(f"address {operand}")
    match operand.base:
        case Reg(name):
            bits = e.registers.bits[name]
            value = e.current(name)
            if operand.offset:
                value = e.op(f"add {ivec(bits)} {value}, {e.get(Imm(operand.offset), bits)}")
            value = e.resize(value, bits, 64)
            if _in_parameters(e.instruction):
                value = e.in_parameters(value)
        case Sym(name, offset):
            value = e.symbol(name, offset + operand.offset, 64)
        case Imm(value_, _):
            value = e.get(Imm(value_ + operand.offset), 64)
        case _:
            raise NotNative(f"address {operand}")
    buffer = e.buffer(ivec(64))
    e.do(f"store {ivec(64)} {value}, ptr {buffer}, align 64")
    return buffer


def _in_parameters(ins: Instr) -> bool:
    """Whether an instruction addresses .param space."""
    return any(part.startswith("param") for part in ins.parts)


def checked(e: Emitter, function: tuple[str, str], space: str, buffers: str, address: str) -> None:
    """Call a lane loop; leave the block on a fault."""
    name, text = function
    e.intrinsics.add(text)
    index = e.parameter32(e.instruction.index, Origin.INSTRUCTION)
    bad = e.op(
        f"call i32 @{name}(ptr %ctx, i32 {SPACES[space]}, ptr {address}, i32 {e.active()}, {buffers}, i32 {index})"
    )
    failed = e.op(f"icmp ne i32 {bad}, 0")
    stop, go = e.label("fault"), e.label("ok")
    e.do(f"br i1 {failed}, label %{stop}, label %{go}")
    e.lines.append(f"{stop}:")
    e.do(f"ret i32 -{int(Stop.FAULT)}")
    e.lines.append(f"{go}:")
    if e.logging and is_logged(e.instruction):
        e.do(f"call void @record(ptr %ctx, ptr {address}, i32 {e.active()}, i32 {index})")


def access_bytes(ins: Instr) -> int:
    """Bytes a lane reads or writes; 0 for an instruction that is no load, store or atomic."""
    if ins.parts[0] not in ("ld", "ldu", "st", "atom", "red") or "async" in ins.parts or "bulk" in ins.parts:
        return 0
    kind = ins.parts[-1]
    bits = {"bf16": 16, "f16x2": 32, "bf16x2": 32}.get(kind) or element_bits(kind)
    return max(vector_count(ins) * bits // 8, 1)


def is_logged(ins: Instr) -> bool:
    """Whether a native access may be to memory that other threads reach."""
    return space_of(ins) != "local" and not _in_parameters(ins) and "const" not in ins.parts


def _items(operand, count: int) -> tuple:
    if isinstance(operand, Vec):
        if len(operand.items) != count:
            raise NotNative("vector length")
        return operand.items
    return (operand,)


_ORDERED = frozenset({"volatile", "acquire", "relaxed", "release", "acq_rel", "mmio"})


def says_its_order(ins: Instr) -> bool:
    """Whether a load or store is volatile or has a memory order."""
    return not _ORDERED.isdisjoint(ins.parts)


def note_order(order, w, ins: Instr, mask: int) -> None:
    """Tell the order checker of an atomic, a volatile access or one that says its order. Nothing else reaches .param
    variables."""
    if not _in_parameters(ins):
        order.ordered(w, ins, mask)


def outside_shared(ins: Instr) -> bool:
    """Whether an access may be to global memory: its state space is not shared memory."""
    return not any(part.startswith("shared") for part in ins.parts)


_NO_REDUCTION = frozenset({"async", "exch", "cas", "volatile", "acquire", "release", "acq_rel", "mmio"})


def reduces_in_global(ins: Instr) -> bool:
    """Whether a red, or an atom of which nobody uses what it returns, reduces into global memory and orders nothing."""
    return outside_shared(ins) and _NO_REDUCTION.isdisjoint(ins.parts)


def ordered_in_global(ins: Instr) -> bool:
    """Whether a load or store may be to global memory and others may rely on its order (or it is volatile)."""
    return outside_shared(ins) and not _ORDERED.isdisjoint(ins.parts)


@translator(
    "ld", "ld.param", family=Family.MEMORY, destinations=1, loads=True, shares_memory=ordered_in_global,
    orders=says_its_order, order=note_order,
)  # fmt: skip
@translator("ldu", family=Family.MEMORY, destinations=1, loads=True)
def ld(e: Emitter, ins: Instr) -> None:
    """Loads of 1 to 8 elements a lane; a .b128 must go to a pair of 64-bit registers."""
    space, count, bits = space_of(ins), vector_count(ins), element_bits(ins.parts[-1])
    signed = ins.parts[-1].startswith("s")
    wide = bits == 128
    if wide:
        if not isinstance(ins.operands[0], Vec):
            raise NotNative("128-bit register")
        count, bits = 2 * count, 64
    items = _items(ins.operands[0], count)
    address = addresses(e, ins.operands[1])
    out = e.buffer(f"[{count} x {ivec(bits)}]", 1)
    checked(e, load_function(count, bits), space, f"ptr {out}", address)
    for j, item in enumerate(items):
        if item is None:
            continue
        at = e.op(f"getelementptr {ivec(bits)}, ptr {out}, i64 {j}")
        e.set(item, e.op(f"load {ivec(bits)}, ptr {at}, align 32"), bits, signed)


@translator(
    "st", "st.param", family=Family.MEMORY, destinations=0, shares_memory=ordered_in_global,
    orders=says_its_order, order=note_order,
)  # fmt: skip
def st(e: Emitter, ins: Instr) -> None:
    """Stores of 1 to 8 elements a lane."""
    space, count, bits = space_of(ins), vector_count(ins), element_bits(ins.parts[-1])
    if bits == 128:
        raise NotNative("128-bit register")
    items = _items(ins.operands[1], count)
    data = e.buffer(f"[{count} x {ivec(bits)}]", 2)
    for j, item in enumerate(items):
        at = e.op(f"getelementptr {ivec(bits)}, ptr {data}, i64 {j}")
        e.do(f"store {ivec(bits)} {e.get(item, bits)}, ptr {at}, align 32")
    address = addresses(e, ins.operands[0])
    checked(e, store_function(count, bits), space, f"ptr {data}", address)


_ATOMIC_TYPES = ("u32", "s32", "b32", "f32", "u64", "s64", "b64", "f64")  # the others: families/atomics.py
_ATOMIC_OPS = {"add", "and", "or", "xor", "exch", "cas", "inc", "dec", "min", "max"}


@translator(
    "atom", family=Family.MEMORY, destinations=1, shares_memory=outside_shared, reduces=reduces_in_global, orders=True,
    order=note_order,
)  # fmt: skip
@translator(
    "red", family=Family.MEMORY, destinations=0, shares_memory=outside_shared, reduces=reduces_in_global, orders=True,
    order=note_order,
)  # fmt: skip
def atom(e: Emitter, ins: Instr) -> None:
    """Read-modify-write of a scalar of 32 or 64 bits, one lane after the other."""
    type_ = ins.parts[-1]
    if type_ not in _ATOMIC_TYPES:
        raise NotNative(ins.opcode)
    op = next((p for p in ins.parts[1:-1] if p in _ATOMIC_OPS), None)
    if op is None or vector_count(ins) != 1:
        raise NotNative(ins.opcode)
    if type_[0] == "f":
        if op != "add":
            raise NotNative(ins.opcode)
        op = "fadd"
    elif op in ("min", "max"):
        op = ("s" if type_[0] == "s" else "u") + op
    bits = element_bits(type_)
    operands = list(ins.operands)
    target = operands.pop(0) if ins.parts[0] == "atom" else None
    data = e.buffer(f"[2 x {ivec(bits)}]", 2)
    for j, source in enumerate(operands[1:]):
        at = e.op(f"getelementptr {ivec(bits)}, ptr {data}, i64 {j}")
        e.do(f"store {ivec(bits)} {e.get(source, bits)}, ptr {at}, align 32")
    space = space_of(ins)
    address = addresses(e, operands[0])
    out = e.buffer(ivec(bits), 3)
    checked(e, atomic_function(op, bits), space, f"ptr {data}, ptr {out}", address)
    if target is not None:
        e.set(target, e.op(f"load {ivec(bits)}, ptr {out}, align 32"), bits)


_WINDOWS = {
    "shared": SHARED_WINDOW,
    "shared::cta": SHARED_WINDOW,
    "shared::cluster": SHARED_WINDOW,
    "local": LOCAL_WINDOW,
}


@translator("cvta", family=Family.MEMORY, destinations=1)
def cvta(e: Emitter, ins: Instr) -> None:
    """Generic addresses of shared and local memory lie in windows; global and param addresses are generic already."""
    to = ins.has("to")
    window = next((_WINDOWS[p] for p in ins.parts if p in _WINDOWS), 0)
    if ins.parts[-1] != "u64":
        raise NotNative(ins.opcode)
    value = e.get(ins.operands[1], 64)
    if _in_parameters(ins) and not to:
        value = e.in_parameters(value)
    if window:
        value = e.op(f"{'sub' if to else 'add'} {ivec(64)} {value}, {e.imm(64, window)}")
    e.set(ins.operands[0], value, 64)


@translator("isspacep", family=Family.MEMORY, destinations=1)
def isspacep(e: Emitter, ins: Instr) -> None:
    """isspacep tells in which state space a generic address lies."""
    value = e.get(ins.operands[1], 64)
    top = e.op(f"lshr {ivec(64)} {value}, {e.imm(64, WINDOW_SHIFT)}")
    space = ins.parts[1]
    if space.startswith("shared"):
        result = e.op(f"icmp eq {ivec(64)} {top}, {e.imm(64, SHARED_WINDOW >> WINDOW_SHIFT)}")
        if space != "shared::cluster":
            rank = e.op(f"lshr {ivec(64)} {value}, {e.imm(64, CTA_RANK_SHIFT)}")
            rank = e.op(f"and {ivec(64)} {rank}, {e.imm(64, 255)}")
            own = e.op(f"icmp eq {ivec(64)} {rank}, {e.splat(64, e.ctx(Ctx.CTA_RANK))}")
            result = e.op(f"and {ivec(1)} {result}, {own}")
    elif space == "local":
        result = e.op(f"icmp eq {ivec(64)} {top}, {e.imm(64, LOCAL_WINDOW >> WINDOW_SHIFT)}")
    elif space == "global":
        result = e.op(f"icmp eq {ivec(64)} {top}, {e.imm(64, 0)}")
    else:
        raise NotNative(ins.opcode)
    e.set(ins.operands[0], result, 1)


@translator("mapa", family=Family.MEMORY, destinations=1)
def mapa(e: Emitter, ins: Instr) -> None:
    """Address of a shared variable in another CTA of the cluster: replace the rank bits."""
    bits = element_bits(ins.parts[-1])
    value = e.get(ins.operands[1], bits)
    rank = e.resize(e.get(ins.operands[2], 32), 32, bits)
    keep = ~(255 << CTA_RANK_SHIFT)
    offset = e.op(f"and {ivec(bits)} {value}, {e.imm(bits, keep)}")
    rank = e.op(f"shl {ivec(bits)} {rank}, {e.imm(bits, CTA_RANK_SHIFT)}")
    e.set(ins.operands[0], e.op(f"or {ivec(bits)} {offset}, {rank}"), bits)


@translator("getctarank", family=Family.MEMORY, destinations=1)
def getctarank(e: Emitter, ins: Instr) -> None:
    """getctarank gives the rank of the CTA whose shared memory an address names."""
    bits = element_bits(ins.parts[-1])
    value = e.op(f"lshr {ivec(bits)} {e.get(ins.operands[1], bits)}, {e.imm(bits, CTA_RANK_SHIFT)}")
    value = e.op(f"and {ivec(bits)} {value}, {e.imm(bits, 255)}")
    e.set(ins.operands[0], e.resize(value, bits, 32), 32)


@translator("createpolicy", family=Family.MEMORY, destinations=1)
def createpolicy(e: Emitter, ins: Instr) -> None:
    """A cache policy is opaque and changes nothing here: 0."""
    e.set(ins.operands[0], e.imm(64, 0), 64)
