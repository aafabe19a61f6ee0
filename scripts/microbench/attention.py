"""The inner loop of attention without its loads: clocks of a KV tile with products in bf16 and in e4m3.

Two warpgroups of 64 query rows each take KV tiles one after another, as a kernel for prefill would: QK of the next tile
and PV of this one are issued together, and the softmax runs under PV. There are no loads, masks or waits for other
warps, and V counts as transposed already, which e4m3 needs. So e4m3 can gain no more than these loops differ.

With "promoted", each tile's PV goes to registers of its own and is added to O in fp32: the tensor cores' sums of e4m3
products keep 13 bits of mantissa. O and that sum do not fit the registers at D 256.
"""

from __future__ import annotations

import numpy as np
import wgmma
from case import END, END_NS, START, START_NS, Case, keep, loop

TILES = 12000  # of a warpgroup: long enough for the power limit to act
SCORES, OUTPUT, PARTIAL, P, NEXT_P = 0, 64, 192, 320, 352  # numbers of the first registers
FILL = 0x3F3F3F3F  # bits of the operands that are random: e4m3 and bf16 numbers below 2
SHAPES = ((64, 128), (128, 128), (256, 64))  # head size, keys of a tile


def _products(kind: str, width: int, into: int, steps: int, a: int | None, fresh: bool) -> str:
    """``steps`` wgmmas of a warpgroup. into: first register of the sums. a: first register of A; None: A is in shared
    memory. fresh: the sums begin at 0."""
    types, depth = {"bf16": ("f32.bf16.bf16", 16), "e4m3": ("f32.e4m3.e4m3", 32)}[kind]
    sums = ", ".join(f"%f{into + i}" for i in range(width // 2))
    found = ""
    for step in range(steps):
        first = f"%rd{10 + step % 4}"
        if a is not None:
            first = "{" + ", ".join(f"%f{a + 4 * step + i}" for i in range(4)) + "}"
        flags = "p, 1, 1"
        if kind == "bf16":
            flags += ", 1" if a is not None else ", 0, 0"  # V's rows are keys
        found += f"{{ .reg .pred p; setp.ne.b32 p, %n, {int(fresh and step == 0)};\n"
        found += f"wgmma.mma_async.sync.aligned.m64n{width}k{depth}.{types} "
        found += f"{{{sums}}}, {first}, %rd{20 + step % 4}, {flags}; }}\n"
    return found + "wgmma.commit_group.sync.aligned;\n"


def _softmax(kind: str, keys: int) -> str:
    """Row maxima, exponentials, row sums; P to NEXT_P. A thread has keys / 2 scores of two rows."""
    count = keys // 2
    lines = [f"mov.b32 %f{500 + row}, %f{SCORES + 2 * row};" for row in range(2)]
    for i in range(count):
        row = i % 4 // 2
        lines.append(f"max.f32 %f{500 + row}, %f{500 + row}, %f{SCORES + i};")
    for row in range(2):
        for distance in (1, 2):
            lines.append(f"shfl.sync.bfly.b32 %f{502 + row}, %f{500 + row}, {distance}, 31, -1;")
            lines.append(f"max.f32 %f{500 + row}, %f{500 + row}, %f{502 + row};")
        # The reference of the exponentials; it is moved seldom, and never here.
        lines.append(
            f"max.f32 %f{506 + row}, %f{506 + row}, %f{500 + row}; mul.f32 %f{504 + row}, %f{506 + row}, 0fBDB504F3;"
        )
    for i in range(count):
        row = i % 4 // 2
        lines.append(f"fma.rn.f32 %f{SCORES + i}, %f{SCORES + i}, 0f3DB504F3, %f{504 + row};")
        lines.append(f"ex2.approx.ftz.f32 %f{SCORES + i}, %f{SCORES + i};")
        lines.append(f"add.f32 %f{508 + row}, %f{508 + row}, %f{SCORES + i};")
    if kind == "bf16":
        lines += [
            f"cvt.rn.bf16x2.f32 %f{NEXT_P + i}, %f{SCORES + 2 * i + 1}, %f{SCORES + 2 * i};"
            for i in range(count // 2)
        ]
    else:
        # Keys in the order that leaves two neighbours of two groups of eight in a thread's word.
        for i in range(count // 4):
            first = SCORES + 4 * (i // 2 * 2) + 2 * (i % 2)
            for half, at in enumerate((first, first + 4)):
                lines.append(f"cvt.rn.satfinite.e4m3x2.f32 %h{half}, %f{at + 1}, %f{at};")
            lines.append(f"mov.b32 %f{NEXT_P + i}, {{%h0, %h1}};")
    return "\n".join(lines) + "\n"


def _tile(kind: str, dim: int, keys: int, promoted: bool) -> str:
    depth = 16 if kind == "bf16" else 32
    lines = "wgmma.fence.sync.aligned;\n" + _products(kind, keys, SCORES, dim // depth, None, True)
    lines += _products(kind, dim, PARTIAL if promoted else OUTPUT, keys // depth, P, promoted)
    lines += (
        "wgmma.wait_group.sync.aligned 1;\n" + _softmax(kind, keys) + "wgmma.wait_group.sync.aligned 0;\n"
    )
    if promoted:
        lines += "".join(
            f"add.f32 %f{OUTPUT + i}, %f{OUTPUT + i}, %f{PARTIAL + i};\n" for i in range(dim // 2)
        )
    words = keys // 4 if kind == "bf16" else keys // 8
    return lines + "".join(f"mov.b32 %f{P + i}, %f{NEXT_P + i};\n" for i in range(words))


def _clocks(case: Case, times: np.ndarray) -> dict[str, float]:
    """Clocks and nanoseconds of a tile of both warpgroups: the median over the SMs."""
    clocks = times[:, :, END].max(axis=1) - times[:, :, START].min(axis=1)
    nanoseconds = times[:, :, END_NS].max(axis=1) - times[:, :, START_NS].min(axis=1)
    return {"clocks": float(np.median(clocks)) / TILES, "ns": float(np.median(nanoseconds)) / TILES}


def _case(kind: str, dim: int, keys: int, promoted: bool = False) -> Case:
    name = f"attention_{kind}_d{dim}" + "_promoted" * promoted
    fill = f"""mov.u32 %r40, %thread; mad.lo.u32 %r41, %thread, 747796405, 2891336453;
FILL_{name}: shl.b32 %r42, %r40, 2; add.s32 %r42, %r42, %s; mad.lo.u32 %r41, %r41, 1664525, 1013904223;
shr.u32 %r43, %r41, 8; xor.b32 %r43, %r43, %r41; and.b32 %r43, %r43, {FILL};
st.shared.b32 [%r42], %r43; add.s32 %r40, %r40, 256; setp.lt.u32 %p10, %r40, 40960; @%p10 bra FILL_{name};
fence.proxy.async.shared::cta;
"""
    clear = "".join(f"mov.b32 %f{i}, 0;" for i in range(512))
    setup = fill + clear + wgmma._setup(8, False)
    return Case(
        name,
        loop(_tile(kind, dim, keys, promoted), TILES, f"L_{name}"),
        TILES,
        setup=setup,
        finish=keep([f"%f{OUTPUT + i}" for i in range(dim // 2)] + ["%f508", "%f509"]),
        grid=0,
        block=256,
        shared=160 * 1024,
        evaluate=_clocks,
        about={"kind": "attention", "type": kind, "dim": dim, "keys": keys, "promoted": promoted},
    )


def cases() -> list[Case]:
    """Head sizes 64, 128 and 256 in bf16, in e4m3, and in e4m3 with sums in fp32."""
    found = [_case(kind, dim, keys) for dim, keys in SHAPES for kind in ("bf16", "e4m3")]
    return found + [_case("e4m3", dim, keys, True) for dim, keys in SHAPES if dim < 256]
