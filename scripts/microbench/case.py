"""A microbenchmark: PTX text of one small kernel, how it is launched, and what its clocks mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

FIELDS = 5  # 64-bit words a warp writes: clocks at start and end, globaltimer at start and end, its SM
START, END, START_NS, END_NS, SM = range(FIELDS)
MBARRIERS = 0x400  # shared bytes in front of the data: room for barriers

HEADER = """.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 sm[];
"""
ENTRY = """.visible .entry {name}(.param .u64 out, .param .u64 data, .param .u64 size, .param .u32 count,
    .param .align 64 .b8 map[128])
.reqntid {block}
{{
  .reg .pred %p<16>; .reg .b16 %h<64>; .reg .b32 %r<64>; .reg .b32 %f<512>; .reg .b64 %rd<64>; .reg .b64 %t<8>;
  .reg .b32 %s, %thread, %warp, %lane, %n, %cta; .reg .b64 %out, %data, %size, %map;
  mov.u32 %thread, %tid.x; shr.u32 %warp, %thread, 5; and.b32 %lane, %thread, 31; mov.u32 %cta, %ctaid.x;
  mov.u32 %s, sm; ld.param.u64 %out, [out]; ld.param.u64 %data, [data]; ld.param.u64 %size, [size];
  ld.param.u32 %n, [count]; mov.b64 %map, map; cvta.param.u64 %map, %map;
{setup}
  bar.sync 0;
  mov.u64 %t2, %globaltimer; mov.u64 %t0, %clock64;
{body}
  mov.u64 %t1, %clock64; mov.u64 %t3, %globaltimer;
{finish}
  mov.u32 %r60, %ntid.x; shr.u32 %r60, %r60, 5; mad.lo.s32 %r60, %cta, %r60, %warp;
  mul.wide.u32 %rd60, %r60, {stride}; add.s64 %rd60, %rd60, %out; mov.u32 %r61, %smid; cvt.u64.u32 %rd61, %r61;
  setp.ne.u32 %p15, %lane, 0; @%p15 bra DONE_{name};
  st.global.u64 [%rd60], %t0; st.global.u64 [%rd60+8], %t1; st.global.u64 [%rd60+16], %t2;
  st.global.u64 [%rd60+24], %t3; st.global.u64 [%rd60+32], %rd61;
DONE_{name}:
  ret;
}}
"""


@dataclass(frozen=True)
class Case:
    """A kernel of one microbenchmark.

    body: between the two readings of the clock. operations: of what is counted, a warp; `clocks` divides by it.
    count: the kernel's parameter %n. evaluate: clocks of all warps [CTAs, warps, FIELDS] -> figures by name.
    map_rows: of a box of the tensor map, 0: none. size: the parameter %size.
    """

    name: str
    body: str
    operations: float
    setup: str = ""
    finish: str = ""
    grid: int = 1
    block: int = 32
    shared: int = 0
    count: int = 1
    size: int = 0
    map_rows: int = 0
    evaluate: Callable[[Case, np.ndarray], dict[str, float]] | None = None
    about: dict[str, object] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return ENTRY.format(
            name=self.name,
            block=self.block,
            setup=self.setup,
            body=self.body,
            finish=self.finish,
            stride=8 * FIELDS,
        )

    def figures(self, times: np.ndarray) -> dict[str, float]:
        """What the recorded times say: by default the clocks of one operation in the first CTA."""
        if self.evaluate is not None:
            return self.evaluate(self, times)
        first = times[0]
        return {"clocks": float(first[:, END].max() - first[:, START].min()) / self.operations}


def loop(body: str, iterations: int, label: str, counter: str = "%r63", predicate: str = "%p14") -> str:
    """PTX text that repeats a body; the label must be unique in the kernel."""
    return (
        f"mov.b32 {counter}, 0;\n{label}:\n{body}\nadd.s32 {counter}, {counter}, 1;"
        f"setp.lt.s32 {predicate}, {counter}, {iterations}; @{predicate} bra {label};\n"
    )


def keep(registers: list[str]) -> str:
    """PTX text that makes 32-bit registers matter: their values are stored where the sum is one that never comes."""
    lines = ["mov.b32 %r59, 0;"]
    lines += [f"xor.b32 %r59, %r59, {name};" for name in registers]
    lines.append("setp.eq.s32 %p13, %r59, 0x12345677; @%p13 st.global.b32 [%out], %r59;")
    return "\n".join(lines)


def wait(address: str, parity: str, label: str, predicate: str = "%p12") -> str:
    """PTX text that waits for a phase of an mbarrier."""
    return (
        f"{label}:\nmbarrier.try_wait.parity.shared::cta.b64 {predicate}, [{address}], {parity};"
        f"@!{predicate} bra {label};"
    )
