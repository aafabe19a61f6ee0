"""wgmma of one warpgroup while others compute, or multiply too: how much each slows the other down.

Every warpgroup repeats its own work until a span of clocks is over. What is measured is how many clocks a round takes.
"""

from __future__ import annotations

import numpy as np
import wgmma
from arithmetic import MIXES, _line
from case import END_NS, Case, keep

SPAN = 30000  # clocks
COUNTED = 192  # instructions of a round of arithmetic
FIRST_VALUE = 320  # number of the first register of the values that arithmetic works on
MMAS = {"n128ss": (128, False), "n128rs": (128, True), "n64rs": (64, True), "n256ss": (256, False)}
ARITHMETIC = ("fma", "fmax", "ex2", "lop3", "shfl", "pack_bf16", "attention", "fma4_ex2")


def rounds(case: Case, times: np.ndarray) -> dict[str, float]:
    """Clocks of a round: of each warpgroup of the first CTA."""
    first = times[0]
    return {f"group{i // 4}": SPAN / max(1.0, float(first[i, END_NS])) for i in range(0, len(first), 4)}


def _until(body: str, label: str) -> str:
    again = "add.s32 %r58, %r58, 1; mov.u64 %rd40, %clock64; sub.s64 %rd41, %rd40, %t0; "
    again += f"setp.lt.s64 %p11, %rd41, {SPAN}; @%p11 bra {label};"
    return f"{label}:\n{body}\n{again}\n"


def _mma(width: int, registers: bool, length: int) -> str:
    lines = "wgmma.fence.sync.aligned;\n"
    lines += "".join(wgmma._instruction("bf16", width, registers, n, False) for n in range(length))
    return lines + "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"


def _arithmetic(name: str) -> str:
    operations = MIXES.get(name, (name,))
    lines, chains = [], 12
    while len(lines) < COUNTED:
        for operation in operations:
            chain = len(lines) % chains
            text = _line(operation, chain)
            for number in range(127, -1, -1):  # registers that are nobody else's
                text = text.replace(f"%f{number},", f"%g{number},").replace(f"%f{number};", f"%g{number};")
            lines.append(text)
    return "\n".join(lines)


def _case(name: str, width: int, registers: bool, length: int, other: str, groups: int) -> Case:
    """The first warpgroup multiplies; the others do `other`: arithmetic, or mma4 or mma16, or nothing."""
    rest = {"mma4": _mma(width, registers, 4), "mma16": _mma(width, registers, 16), "nothing": ""}.get(other)
    rest = _arithmetic(other) if rest is None else rest
    values = "".join(
        f"cvt.rn.f32.u32 %g{i}, %thread; mul.f32 %g{i}, %g{i}, 0f3c{i:02x}0000;\n" for i in range(128)
    )
    body = f"""mov.b32 %r58, 0; setp.ge.u32 %p9, %warp, 4; @%p9 bra OTHERS_{name};
{_until(_mma(width, registers, length), f"MMA_{name}") if length else ""}bra DONE_BODY_{name};
OTHERS_{name}:
{_until(rest, f"REST_{name}") if rest else ""}DONE_BODY_{name}:
"""
    finish = "mov.b32 %r59, 0;" + "".join(f"xor.b32 %r59, %r59, %f{i};" for i in range(width // 2))
    finish += "setp.eq.s32 %p13, %r59, 0x12345677; @%p13 st.global.b32 [%out], %r59;"
    finish += keep([f"%g{i}" for i in range(16)]) + "cvt.u64.u32 %t3, %r58;"
    return Case(
        name,
        body,
        1,
        setup=f".reg .b32 %g<128>;\n{values}{wgmma._setup(width, registers)}",
        finish=finish,
        block=128 * groups,
        shared=160 * 1024,
        evaluate=rounds,
        about={
            "kind": "overlap",
            "n": width,
            "a": registers,
            "length": length,
            "others": other,
            "groups": groups,
        },
    )


def cases() -> list[Case]:
    """Each width beside each kind of arithmetic, by one and by two other warpgroups; alone; beside other wgmmas."""
    found = []
    for which, (width, registers) in MMAS.items():
        for other in ("nothing", *ARITHMETIC):
            groups = (2, 3) if other in ("attention", "fma") else (2,)
            for count in groups:
                name = f"overlap_{which}_{other}_g{count}"
                found.append(_case(name, width, registers, 16, other, count))
        found.append(_case(f"overlap_{which}_4_mma16", width, registers, 4, "mma16", 2))
        found.append(_case(f"overlap_{which}_16_mma4", width, registers, 16, "mma4", 2))
    found += [
        _case(f"overlap_none_{other}_g{count}", 128, False, 0, other, count)
        for other in ARITHMETIC
        for count in (2, 3)
    ]
    return found
