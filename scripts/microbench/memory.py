"""Memory beyond the SM: TMA, plain and asynchronous loads and stores; latency, and bandwidth by bytes in flight."""

from __future__ import annotations

import numpy as np
from case import END, END_NS, MBARRIERS, START, START_NS, Case, keep, loop, wait

KB = 1024
WINDOW = 16 << 20  # bytes that stay in L2
STREAM = 768 << 20  # bytes of the buffer that DRAM's data is read from
LATENCY_ITERATIONS = 16
ALL = 0  # as a grid: one CTA a multiprocessor
SHARERS = (2, 4, 16)  # CTAs that load the same bytes, of "group2" and so on

ONE_THREAD = "setp.ne.s32 %p1, %thread, 0; @%p1 bra END_{name};"
BULK_LOAD = (
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{to}], [%rd1], {bytes}, [{barrier}];"
)
TENSOR_LOAD = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[{to}], [%map, {{0, %r20}}], [{barrier}];"
)
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {bytes};"


def rates(case: Case, times: np.ndarray) -> dict[str, float]:
    """Bytes a clock of an SM while it runs, and GB/s from the first CTA's start to the last one's end."""
    clocks = (times[..., END].max(1) - times[..., START].min(1)).astype(np.int64)
    nanoseconds = int(times[..., END_NS].max() - times[..., START_NS].min())
    total = case.about["bytes"]
    return {
        "bytes_per_clock": total / float(np.median(clocks)),
        "gb_per_s": total * len(times) / nanoseconds,
        "clocks": float(np.median(clocks)),
        "ghz": float(np.median(clocks))
        / max(1, int(np.median(times[..., END_NS].max(1) - times[..., START_NS].min(1)))),
    }


def _place(source: str, nbytes: int) -> str:
    """Address %rd1 and row %r20 of load number %r1: its own bytes of DRAM, or again and again a window in L2.

    In "same", all CTAs load the same bytes at the same time; in "group2", two neighbours do, and so on.
    """
    text = "mov.u32 %r2, %nctaid.x; mad.lo.s32 %r3, %r1, %r2, %cta;"
    if source.startswith("same"):
        text = "mov.u32 %r3, %r1;"
    elif source.startswith("group"):
        sharers = source.removeprefix("group").removesuffix("_dram")
        text = f"mov.u32 %r2, %nctaid.x; div.u32 %r2, %r2, {sharers}; div.u32 %r3, %cta, {sharers};"
        text += "mad.lo.s32 %r3, %r1, %r2, %r3;"
    text += f"mul.wide.u32 %rd1, %r3, {nbytes};"
    if not source.endswith("dram"):
        text += f"and.b64 %rd1, %rd1, {WINDOW - 1};"
    text += "shr.u64 %rd2, %rd1, 7; cvt.u32.u64 %r20, %rd2; add.s64 %rd1, %rd1, %data;"
    return text


def _init(stages: int) -> str:
    lines = ["setp.ne.s32 %p1, %thread, 0;"]
    lines += [f"@!%p1 mbarrier.init.shared::cta.b64 [%s+{8 * stage}], 1;" for stage in range(stages)]
    lines.append("@!%p1 fence.mbarrier_init.release.cluster;")
    return "\n".join(lines)


def _tma_latency(tensor: bool, nbytes: int, source: str, grid: int) -> Case:
    name = f"tma_latency_{'tensor' if tensor else 'bulk'}_{nbytes}_{source}_{'all' if grid == ALL else 'one'}"
    load = (TENSOR_LOAD if tensor else BULK_LOAD).format(to="%r10", bytes=nbytes, barrier="%s")
    body = "mov.b32 %r1, %r62;" + _place(source, nbytes) + EXPECT.format(barrier="%s", bytes=nbytes) + load
    body += wait("%s", "%r11", f"W_{name}") + "xor.b32 %r11, %r11, 1;"
    text = ONE_THREAD.format(name=name) + f"add.s32 %r10, %s, {MBARRIERS}; mov.b32 %r11, 0;"
    text += loop(body, LATENCY_ITERATIONS, f"L_{name}", "%r62") + f"END_{name}:\n"
    return Case(
        name,
        text,
        LATENCY_ITERATIONS,
        setup=_init(1),
        grid=grid,
        block=32,
        shared=MBARRIERS + nbytes,
        map_rows=nbytes // 128 if tensor else 0,
        evaluate=rates,
        about={
            "kind": "tma_latency",
            "tensor": tensor,
            "size": nbytes,
            "source": source,
            "grid": "all" if grid == ALL else grid,
            "bytes": nbytes * LATENCY_ITERATIONS,
            "loads": LATENCY_ITERATIONS,
        },
    )


def load_ring(load: str, source: str, stages: int, nbytes: int, parity: int) -> tuple[str, str, str]:
    """PTX of a thread that loads tiles through a ring of stages: how it begins, a load into the stage at hand, how it
    goes on to the next stage.

    load: TENSOR_LOAD or BULK_LOAD. %r1 counts tiles, %r10 is the stage, %r12 its mbarrier, %r11 the parity of a wait
    for it (at first ``parity``), %r13 its number.
    """
    issue = _place(source, nbytes) + EXPECT.format(barrier="%r12", bytes=nbytes)
    issue += load.format(to="%r10", bytes=nbytes, barrier="%r12")
    begin = f"mov.b32 %r13, 0; mov.b32 %r11, {parity}; add.s32 %r10, %s, {MBARRIERS}; mov.b32 %r12, %s; mov.b32 %r1, 0;"
    advance = (
        f"add.s32 %r13, %r13, 1; add.s32 %r12, %r12, 8; add.s32 %r10, %r10, {nbytes};"
        f"setp.eq.s32 %p5, %r13, {stages}; @%p5 mov.b32 %r13, 0; @%p5 mov.b32 %r12, %s;"
        f"@%p5 add.s32 %r10, %s, {MBARRIERS}; @%p5 xor.b32 %r11, %r11, 1;"
    )
    return begin, issue, advance


def _tma_stream(tensor: bool, stages: int, nbytes: int, source: str, grid: int) -> Case:
    """Loads through a ring of stages, each reissued as soon as it has arrived."""
    which = f"{'tensor' if tensor else 'bulk'}_{stages}x{nbytes}_{source}_{'all' if grid == ALL else 'one'}"
    name = f"tma_stream_{which}"
    total = max(2 * stages, min((1 << 20) // nbytes, 256) // stages * stages)
    begin, issue, advance = load_ring(TENSOR_LOAD if tensor else BULK_LOAD, source, stages, nbytes, parity=0)
    fill = issue + "add.s32 %r1, %r1, 1;" + advance.replace("@%p5 xor.b32 %r11, %r11, 1;", "")
    steady = wait("%r12", "%r11", f"W_{name}") + f"setp.ge.s32 %p6, %r1, {total}; @%p6 bra SKIP_{name};"
    steady += issue + f"SKIP_{name}:\nadd.s32 %r1, %r1, 1;" + advance
    text = ONE_THREAD.format(name=name) + begin + loop(fill, stages, f"F_{name}", "%r62")
    text += loop(steady, total, f"L_{name}", "%r62") + f"END_{name}:\n"
    return Case(
        name,
        text,
        total,
        setup=_init(stages),
        grid=grid,
        block=32,
        shared=MBARRIERS + stages * nbytes,
        map_rows=nbytes // 128 if tensor else 0,
        evaluate=rates,
        about={
            "kind": "tma_stream",
            "tensor": tensor,
            "size": nbytes,
            "stages": stages,
            "source": source,
            "grid": "all" if grid == ALL else grid,
            "bytes": nbytes * total,
        },
    )


def _bulk_store(operation: str, wait_for: str, nbytes: int, in_flight: int, grid: int) -> Case:
    name = f"bulk_{operation}_{wait_for}_{in_flight}x{nbytes}_{'all' if grid == ALL else 'one'}"
    line = {
        "store": "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r10], {bytes};",
        "add": "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r10], {bytes};",
    }[operation].format(bytes=nbytes)
    total = 32
    read = ".read" if wait_for == "read" else ""
    body = "mov.b32 %r1, %r62;" + _place("l2", nbytes) + line + "cp.async.bulk.commit_group;"
    body += f"cp.async.bulk.wait_group{read} {in_flight - 1};"
    text = (
        ONE_THREAD.format(name=name)
        + f"add.s32 %r10, %s, {MBARRIERS};"
        + loop(body, total, f"L_{name}", "%r62")
    )
    text += f"cp.async.bulk.wait_group{read} 0;END_{name}:\n"
    return Case(
        name,
        text,
        total,
        grid=grid,
        shared=MBARRIERS + nbytes,
        evaluate=rates,
        about={
            "kind": "bulk_store",
            "operation": operation,
            "wait": wait_for,
            "size": nbytes,
            "in_flight": in_flight,
            "grid": "all" if grid == ALL else grid,
            "bytes": nbytes * total,
            "loads": total,
        },
    )


def first_and_second(case: Case, times: np.ndarray) -> dict[str, float]:
    """Clocks of the first load of each CTA and of its second."""
    first = (times[..., END] - times[..., START]).astype(np.int64)
    # END_NS holds a third reading of the clock.
    second = (times[..., END_NS] - times[..., END]).astype(np.int64)
    return {
        "first": float(np.median(first)),
        "first_worst": float(first.max()),
        "second": float(np.median(second)),
    }


def _tma_first(tensor: bool, nbytes: int, grid: int) -> Case:
    """One load from DRAM, then another: what the first costs beside, its tensor map's way to the SM included."""
    name = f"tma_first_{'tensor' if tensor else 'bulk'}_{nbytes}_{'all' if grid == ALL else 'one'}"
    load = (TENSOR_LOAD if tensor else BULK_LOAD).format(to="%r10", bytes=nbytes, barrier="%s")

    def once(number: int) -> str:
        text = f"mov.b32 %r1, {number};" + _place("dram", nbytes) + EXPECT.format(barrier="%s", bytes=nbytes)
        return text + load + wait("%s", "%r11", f"W{number}_{name}") + "xor.b32 %r11, %r11, 1;"

    skip = f"setp.ne.s32 %p1, %thread, 0; @%p1 bra END_{name};"
    body = f"{skip} add.s32 %r10, %s, {MBARRIERS}; mov.b32 %r11, 0;{once(0)}END_{name}:\n"
    finish = f"@%p1 bra SECOND_{name};{once(64)}SECOND_{name}:\nmov.u64 %t3, %clock64;"
    return Case(
        name,
        body,
        1,
        setup=_init(1),
        finish=finish,
        grid=grid,
        block=32,
        shared=MBARRIERS + nbytes,
        map_rows=nbytes // 128 if tensor else 0,
        evaluate=first_and_second,
        about={"kind": "tma_first", "tensor": tensor, "size": nbytes, "source": "dram"},
    )


def _chase(name: str, stride: int, modifier: str) -> Case:
    line = f"ld.global{modifier}.u64 %rd2, [%rd1]; add.s64 %rd1, %rd1, %rd2; add.s64 %rd1, %rd1, {stride};"
    return Case(
        f"global_latency_{name}",
        "mov.b64 %rd1, %data;" + loop(line * 4, 64, f"L_{name}"),
        256,
        finish="cvt.u32.u64 %r58, %rd1;" + keep(["%r58"]),
        about={"kind": "latency", "of": f"global_{name}"},
    )


def _plain(kind: str, warps: int, unrolled: int, source: str, rounds: int = 0, grid: int = ALL) -> Case:
    """Loads, stores, copies or additions of 16 bytes a lane, `unrolled` of them in flight a thread.

    rounds: how often; 0: enough for a rate that starting does not matter to.
    """
    name = f"global_{kind}_{warps}x{unrolled}_{source}" + f"_{rounds}r" * bool(rounds) + "_one" * (grid == 1)
    nbytes = 512 * warps * unrolled  # of a CTA in an iteration
    iterations = rounds or max(4, min(64, (2 << 20) // nbytes))
    lines = [
        "mov.b32 %r1, %r62;",
        _place(source, nbytes),
        "mul.wide.u32 %rd3, %thread, 16; add.s64 %rd1, %rd1, %rd3;",
    ]
    regs = [[f"%f{4 * u + i}" for i in range(4)] for u in range(unrolled)]
    for u, group in enumerate(regs):
        at, vector = f"[%rd1+{512 * warps * u}]", "{" + ", ".join(group) + "}"
        if kind in ("load", "copy"):
            lines.append(f"ld.global.L1::no_allocate.v4.b32 {vector}, {at};")
    for u, group in enumerate(regs):
        at, vector = f"[%rd4+{512 * warps * u}]", "{" + ", ".join(group) + "}"
        if u == 0:
            lines.append(f"add.s64 %rd4, %rd1, {STREAM // 2};")
        if kind in ("store", "copy"):
            lines.append(f"st.global.v4.b32 {at}, {vector};")
        elif kind == "red":
            lines.append(f"red.global.add.f32 [%rd4+{128 * warps * u}], {group[0]};")
        elif kind == "red4":
            lines.append(f"red.relaxed.gpu.global.add.v4.f32 {at}, {vector};")
        else:
            lines.append("".join(f"xor.b32 %r58, %r58, {register};" for register in group))
    setup = "mov.b32 %r58, 0;" + "".join(f"mov.b32 {r}, 0;" for group in regs for r in group)
    return Case(
        name,
        loop("\n".join(lines), iterations, f"L_{name}", "%r62"),
        iterations,
        setup=setup,
        finish=keep(["%r58"]),
        grid=grid,
        block=32 * warps,
        evaluate=rates,
        about={
            "kind": f"global_{kind}",
            "warps": warps,
            "unrolled": unrolled,
            "source": source,
            "grid": "all" if grid == ALL else grid,
            "bytes": (nbytes // 4 if kind == "red" else nbytes) * iterations,
        },
    )


def _stores_then_load(rounds: int, grid: int) -> Case:
    """Stores of 4 KB a round by 8 warps, then a load of a line in L2: how long it waits for the stores before it."""
    name = f"stores_then_load_{rounds}r_{'all' if grid == ALL else 'one'}"
    nbytes = 512 * 8
    store = (
        "mov.b32 %r1, %r62;"
        + _place("l2", nbytes)
        + "mul.wide.u32 %rd3, %thread, 16; add.s64 %rd1, %rd1, %rd3;"
    )
    store += f"add.s64 %rd4, %rd1, {STREAM // 2}; st.global.v4.b32 [%rd4], {{%f0, %f0, %f0, %f0}};"
    load = "mul.wide.u32 %rd3, %thread, 16; add.s64 %rd5, %data, %rd3;"
    load += "ld.global.cg.b32 %f1, [%rd5]; xor.b32 %r58, %r58, %f1;"
    warm = "mul.wide.u32 %rd3, %thread, 16; add.s64 %rd5, %data, %rd3; ld.global.cg.b32 %f1, [%rd5];"
    return Case(
        name,
        (loop(store, rounds, f"L_{name}", "%r62") if rounds else "") + load,
        1,
        setup="mov.b32 %f0, 0;" + warm + "mov.b32 %r58, %f1;",
        finish=keep(["%r58"]),
        grid=grid,
        block=256,
        evaluate=whole,
        about={"kind": "stores_then_load", "bytes": nbytes * rounds, "grid": "all" if grid == ALL else grid},
    )


def whole(case: Case, times: np.ndarray) -> dict[str, float]:
    """Clocks of the median CTA, and of its slowest warp and its fastest one."""
    clocks = (times[..., END] - times[..., START]).astype(np.int64)
    return {
        "clocks": float(
            np.median(times[..., END].max(1).astype(np.int64) - times[..., START].min(1).astype(np.int64))
        ),
        "slowest_warp": float(np.median(clocks.max(1))),
        "fastest_warp": float(np.median(clocks.min(1))),
    }


def _async_copy(warps: int, unrolled: int, grid: int) -> Case:
    """cp.async of 16 bytes a lane from L2, waited for in each iteration."""
    name = f"cp_async_{warps}x{unrolled}_{'all' if grid == ALL else 'one'}"
    nbytes = 512 * warps * unrolled
    iterations = 32
    lines = [
        "mov.b32 %r1, %r62;",
        _place("l2", nbytes),
        "mul.wide.u32 %rd3, %thread, 16; add.s64 %rd1, %rd1, %rd3;",
    ]
    for u in range(unrolled):
        offset = 512 * warps * u
        lines.append(f"cp.async.cg.shared.global [%r10+{offset}], [%rd1+{offset}], 16;")
    lines.append("cp.async.commit_group; cp.async.wait_group 0;")
    return Case(
        name,
        "mad.lo.s32 %r10, %thread, 16, %s;" + loop("\n".join(lines), iterations, f"L_{name}", "%r62"),
        iterations,
        grid=grid,
        block=32 * warps,
        shared=nbytes,
        evaluate=rates,
        about={
            "kind": "cp_async",
            "warps": warps,
            "unrolled": unrolled,
            "grid": "all" if grid == ALL else grid,
            "bytes": nbytes * iterations,
            "loads": iterations,
        },
    )


SHARED = ("same", *(f"group{sharers}" for sharers in SHARERS))
SHARED_RINGS = ((2, 16 * KB), (4, 16 * KB), (4, 32 * KB))


def cases() -> list[Case]:
    """Latencies, rates of one SM, and rates of all of them."""
    found = []
    for source in ("l2", "dram"):
        for grid in (1, ALL):
            found += [_tma_latency(False, n, source, grid) for n in (512, 4 * KB, 8 * KB, 16 * KB, 32 * KB)]
            found += [_tma_latency(True, n, source, grid) for n in (KB, 8 * KB, 16 * KB, 32 * KB)]
        rings = ((1, 16 * KB), (2, 16 * KB), (4, 16 * KB), (8, 16 * KB), (12, 16 * KB))
        rings += ((4, 32 * KB), (6, 32 * KB), (8, 8 * KB), (8, 4 * KB), (8, 2 * KB), (16, KB))
        for stages, nbytes in rings:
            found.append(_tma_stream(True, stages, nbytes, source, ALL))
        found += [
            _tma_stream(False, stages, nbytes, source, ALL)
            for stages, nbytes in ((4, 16 * KB), (8, 16 * KB), (8, 2 * KB))
        ]
    for source in [f"{which}{dram}" for which in SHARED for dram in ("", "_dram")]:
        found += [_tma_stream(True, stages, nbytes, source, ALL) for stages, nbytes in SHARED_RINGS]
    found += [
        _tma_first(tensor, n, grid) for tensor in (True, False) for n in (KB, 16 * KB) for grid in (1, ALL)
    ]
    for tensor in (True, False):
        found += [
            _tma_stream(tensor, s, n, "l2", 1) for s, n in ((4, 16 * KB), (8, 16 * KB), (8, 4 * KB), (16, KB))
        ]
    for operation in ("store", "add"):
        for waits in ("read", "done"):
            found += [_bulk_store(operation, waits, n, 1, 1) for n in (4 * KB, 16 * KB)]
        found += [_bulk_store(operation, "read", 16 * KB, 4, grid) for grid in (1, ALL)]
    found += [_chase("l1", 0, ".ca"), _chase("l2", 4224, ".cg"), _chase("dram", 1 << 20, ".cg")]
    for kind in ("load", "store", "copy"):
        for warps, unrolled in ((8, 1), (8, 4), (16, 4), (32, 4)) + (((32, 8),) if kind == "load" else ()):
            found.append(_plain(kind, warps, unrolled, "dram"))
        found.append(_plain(kind, 32, 4, "l2"))
    found.append(_plain("red", 16, 4, "l2"))
    found += [_plain("red4", 8, 4, source) for source in ("l2", "group2", "group4", "group16", "same")]
    found += [_plain("red4", warps, unrolled, "l2", grid=1) for warps, unrolled in ((8, 1), (8, 4))]
    for kind in ("store", "red4"):  # how much goes before a warp waits
        found += [_plain(kind, 8, 1, "l2", rounds, 1) for rounds in (1, 2, 3, 4, 6, 8, 12, 16, 32)]
    found += [_plain("store", 8, 1, "l2", rounds) for rounds in (1, 2, 4, 8, 16, 32)]
    for warps in (16, 24, 32):  # whether more goes before with more warps
        for grid in (1, ALL):
            found += [_plain("store", warps, 1, "l2", rounds, grid) for rounds in (1, 2, 3, 4, 6, 8, 12)]
    found += [_stores_then_load(rounds, grid) for grid in (1, ALL) for rounds in (0, 1, 2, 4, 8, 16, 32)]
    for kind in ("load", "copy"):
        found += [_plain(kind, warps, 4, "dram", rounds) for warps in (8, 32) for rounds in (1, 2, 4, 8, 16)]
    found += [_async_copy(w, u, g) for g in (1, ALL) for w, u in ((1, 1), (4, 4), (8, 8))]
    return found
