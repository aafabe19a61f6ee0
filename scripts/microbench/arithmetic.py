"""Issue rate and latency of what runs in a warp's own pipes: FMA, ALU, MUFU, conversions, shuffles, and mixes."""

from __future__ import annotations

from case import Case, keep, loop

ITERATIONS = 32
UNROLLED = 96  # instructions in the loop's body
CHAINS = 8  # of independent values where the rate is measured

# One instruction; {x}: the chain's value, {y}: another value that stays, {h}: a 16-bit register of the chain.
OPERATIONS = {
    "fma": "fma.rn.f32 {x}, {x}, {y}, {y};",
    "fadd": "add.rn.f32 {x}, {x}, {y};",
    "fmul": "mul.rn.f32 {x}, {x}, {y};",
    "fmax": "max.f32 {x}, {x}, {o};",
    "ex2": "ex2.approx.ftz.f32 {x}, {x};",
    "rcp": "rcp.approx.ftz.f32 {x}, {x};",
    "lg2": "lg2.approx.ftz.f32 {x}, {x};",
    "tanh": "tanh.approx.f32 {x}, {x};",
    "pack_bf16": "cvt.rn.bf16x2.f32 {x}, {x}, {y};",
    "pack_f16": "cvt.rn.f16x2.f32 {x}, {x}, {y};",
    "pack_e4m3": "cvt.rn.satfinite.e4m3x2.f32 {h}, {x}, {y}; mov.b32 {x}, {{{h}, {h}}};",
    "f2i": "cvt.rni.s32.f32 {x}, {x};",
    "i2f": "cvt.rn.f32.s32 {x}, {x};",
    "hfma2_bf16": "fma.rn.bf16x2 {x}, {x}, {y}, {y};",
    "iadd3": "add.s32 {x}, {x}, {o}; add.s32 {x}, {x}, {y};",
    "imad": "mad.lo.s32 {x}, {x}, {y}, {y};",
    "lop3": "lop3.b32 {x}, {x}, {o}, {y}, 0x1e;",
    "shift": "shf.l.wrap.b32 {x}, {x}, {o}, {y};",
    "prmt": "prmt.b32 {x}, {x}, {o}, {y};",
    "imax3": "max.s32 {x}, {x}, {o}; max.s32 {x}, {x}, {y};",
    "set_select": "setp.lt.f32 %p1, {x}, {y}; selp.f32 {x}, {o}, {y}, %p1;",
    "shfl": "shfl.sync.bfly.b32 {x}, {x}, 1, 31, -1;",
    "vote": "setp.ne.s32 %p1, {x}, 0; vote.sync.ballot.b32 {x}, %p1, -1;",
    "popc": "popc.b32 {x}, {x};",
    "redux": "redux.sync.add.s32 {x}, {x}, -1;",
}  # fmt: skip

# Instructions of independent chains side by side: what shares an issue slot, what a pipe.
MIXES = {
    "fma4_ex2": ("fma", "fma", "fma", "fma", "ex2"),
    "fma_lop3": ("fma", "lop3"),
    "fma_iadd": ("fma", "iadd3"),
    "fma2_pack": ("fma", "fma", "pack_bf16"),
    "fma_fmax": ("fma", "fmax"),
    "fma_imad": ("fma", "imad"),
    "lop3_ex2": ("lop3", "lop3", "lop3", "ex2"),
    "pack_ex2": ("pack_bf16", "ex2"),
    "pack_lop3": ("pack_bf16", "lop3"),
    "shfl_fma": ("shfl", "fma", "fma"),
    "shfl_ex2": ("shfl", "ex2"),
    "attention": ("fma", "ex2", "fadd", "fmax", "ex2", "fma", "fadd", "fmax", "pack_bf16"),
}


def _line(operation: str, chain: int) -> str:
    return OPERATIONS[operation].format(
        x=f"%f{chain}", y="%f100", o=f"%f{(chain + 1) % 16 + 101}", h=f"%h{chain}"
    )


def _setup(chains: int) -> str:
    lines = [
        "cvt.rn.f32.u32 %f100, %thread; mul.f32 %f100, %f100, 0f3c000000; add.f32 %f100, %f100, 0f3f000000;"
    ]
    for chain in range(chains):
        lines.append(f"fma.rn.f32 %f{chain}, %f100, 0f3f000000, 0f3e{chain + 16:02x}0000;")
    for number in range(17):
        lines.append(f"fma.rn.f32 %f{101 + number}, %f100, 0f3e{number + 32:02x}0000, %f100;")
    return "\n".join(lines)


def _case(name: str, operations: tuple[str, ...], chains: int, warps: int) -> Case:
    body, counted = [], 0
    while counted < UNROLLED:
        for operation in operations:
            body.append(_line(operation, counted % chains))
            counted += 1
    text = loop("\n".join(body), ITERATIONS, f"L_{name}_{chains}_{warps}")
    per_scheduler = max(1, warps // 4)
    return Case(
        f"op_{name}_c{chains}_w{warps}",
        text,
        operations=ITERATIONS * counted * per_scheduler,
        setup=_setup(chains),
        finish=keep([f"%f{chain}" for chain in range(chains)]),
        block=32 * warps,
        about={"kind": "issue", "of": name, "chains": chains, "warps": warps},
    )


def cases() -> list[Case]:
    """Latency by one chain of one warp; issue rate by 8 chains of 4 and of 16 warps."""
    found = []
    for name in OPERATIONS:
        found.append(_case(name, (name,), 1, 1))
        found += [_case(name, (name,), CHAINS, warps) for warps in (4, 16)]
    for name, operations in MIXES.items():
        chains = len(operations) * max(1, -(-CHAINS // len(operations)))
        found += [_case(f"mix_{name}", operations, chains, warps) for warps in (4, 16)]
    return found
