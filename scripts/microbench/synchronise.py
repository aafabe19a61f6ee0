"""Barriers: what a passage costs, and how long a signal takes from one warp to another."""

from __future__ import annotations

from case import Case, loop, wait

ITERATIONS = 64
INIT = """
  setp.ne.s32 %p1, %thread, 0;
  @!%p1 mbarrier.init.shared::cta.b64 [%s], {count};
  @!%p1 mbarrier.init.shared::cta.b64 [%s+8], {count};
  @!%p1 fence.mbarrier_init.release.cluster;
  add.s32 %r10, %s, 8; mov.b32 %r11, 0; setp.eq.s32 %p2, %lane, 0; setp.eq.s32 %p3, %warp, 0;
"""
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [{at}];"


def _case(name: str, body: str, operations: int = ITERATIONS, **facts) -> Case:
    facts = {"shared": 4096, **facts}
    return Case(name, body, operations, about={"kind": "synchronise", "of": name}, **facts)


def _named(threads: int) -> Case:
    body = loop("bar.sync 1, " + str(threads) + ";\n" * 1, ITERATIONS, f"L_bar_{threads}")
    return _case(f"bar_sync_{threads}", body, block=threads)


def _named_ping_pong(threads: int) -> Case:
    """Two groups of threads in turn: arrive at the other's barrier, wait at one's own; clocks of a round trip."""
    both = 2 * threads
    first = f"bar.arrive 1, {both}; bar.sync 2, {both};"
    second = f"bar.sync 1, {both}; bar.arrive 2, {both};"
    body = f"setp.ge.s32 %p4, %thread, {threads}; @%p4 bra SECOND_{threads};\n"
    body += loop(first, ITERATIONS, f"L_first_{threads}") + f"bra.uni END_{threads};\nSECOND_{threads}:\n"
    body += loop(second, ITERATIONS, f"L_second_{threads}") + f"END_{threads}:\n"
    return _case(f"bar_ping_pong_{threads}", body, block=both)


def _mbarrier_ping_pong(all_lanes: bool) -> Case:
    """Two warps in turn through two mbarriers; clocks of a round trip."""
    name = "mbarrier_ping_pong" + ("_32" if all_lanes else "")
    arrive = ARRIVE if all_lanes else "@%p2 " + ARRIVE
    flip = "xor.b32 %r11, %r11, 1;"
    first = arrive.format(at="%s") + wait("%r10", "%r11", f"W1_{name}") + flip
    second = wait("%s", "%r11", f"W2_{name}") + arrive.format(at="%r10") + flip
    body = f"@!%p3 bra SECOND_{name};\n" + loop(first, ITERATIONS, f"L1_{name}")
    body += (
        f"bra.uni END_{name};\nSECOND_{name}:\n" + loop(second, ITERATIONS, f"L2_{name}") + f"END_{name}:\n"
    )
    return _case(name, body, setup=INIT.format(count=32 if all_lanes else 1), block=64)


def _mbarrier_alone(name: str, count: int, arrive: str) -> Case:
    """One warp arrives and waits for its own arrival."""
    body = arrive.format(at="%s") + wait("%s", "%r11", f"W_{name}") + "xor.b32 %r11, %r11, 1;"
    return _case(name, loop(body, ITERATIONS, f"L_{name}"), setup=INIT.format(count=count))


def cases() -> list[Case]:
    """Named barriers by threads, mbarriers between warps and alone, fences, a warp's own barrier."""
    found = [_named(threads) for threads in (64, 128, 256, 384, 512)]
    found += [_named_ping_pong(threads) for threads in (32, 128)]
    found += [_mbarrier_ping_pong(False), _mbarrier_ping_pong(True)]
    found += [
        _mbarrier_alone("mbarrier_self_1", 1, "@%p2 " + ARRIVE),
        _mbarrier_alone("mbarrier_self_32", 32, ARRIVE),
    ]
    passed = wait("%s", "1", "W_{n}")
    passing = "".join(passed.format(n=n).replace("W_", f"W{n}_") for n in range(8))
    found.append(
        _case(
            "mbarrier_passed",
            loop(passing, ITERATIONS, "L_passed"),
            8 * ITERATIONS,
            setup=INIT.format(count=1),
        )
    )
    arrivals = loop(ARRIVE.format(at="%s") * 8, ITERATIONS, "L_arrive")
    found.append(_case("mbarrier_arrive_32", arrivals, 8 * ITERATIONS, setup=INIT.format(count=32)))
    single = loop(("@%p2 " + ARRIVE.format(at="%s")) * 8, ITERATIONS, "L_arrive1")
    found.append(_case("mbarrier_arrive_1", single, 8 * ITERATIONS, setup=INIT.format(count=1)))
    for name, line in (
        ("fence_async", "fence.proxy.async.shared::cta;"),
        ("warp_sync", "bar.warp.sync -1;"),
        ("elect", "elect.sync %r1|%p5, -1;"),
        ("setmaxnreg", "setmaxnreg.inc.sync.aligned.u32 160; setmaxnreg.dec.sync.aligned.u32 152;"),
    ):
        found.append(_case(name, loop(line * 8, ITERATIONS, f"L_{name}"), 8 * ITERATIONS, block=128))
    return found
