"""Waits for a parity that a late warp may miss: until it has passed, the next phase must not end."""

import pytest
from helpers.order_kernels import FILL, START, WGMMA, correct, defective, run, wait

from warpspec import sim

OTHER = "[%r11+8]"
BARRIERS = (
    START
    + "@%p1 mbarrier.init.shared.b64 [%r11], 1; @%p1 mbarrier.init.shared.b64 [%r11+8], COUNT;"
    + "fence.mbarrier_init.release.cluster; bar.sync 0;"
)
SLOWLY = "mov.u32 %r9, 0; LABEL: add.u32 %r9, %r9, 1; setp.lt.u32 %p7, %r9, 9000; @%p7 bra LABEL;"


def other(parity: int, label: str) -> str:
    return wait(parity, label).replace("[%r11]", OTHER)


def slowly(label: str) -> str:
    return SLOWLY.replace("LABEL", label)


# Two phases of a barrier, for the first of which warp 1 waits.
TWICE = (
    BARRIERS.replace("COUNT", "1")
    + "@!%p2 bra waits; @%p1 mbarrier.arrive.shared.b64 _, [%r11];"
    + f"[[{other(0, 'B')}||{slowly('Z')}]] @%p1 mbarrier.arrive.shared.b64 _, [%r11]; bra end;"
    + f"waits: {wait(0, 'A')} TELLS end:"
)
TELLS = f"setp.eq.u32 %p6, %r1, 32; @%p6 mbarrier.arrive.shared.b64 _, {OTHER};"
CASES = {
    "an arrival after the wait": (dict(block=(64, 1, 1)), TWICE.replace("TELLS", TELLS)),
    "a relaxed arrival after the wait": (
        dict(block=(64, 1, 1)),
        TWICE.replace("TELLS", TELLS.replace("arrive.", "arrive.relaxed.cluster.")),
    ),
    # Two producer warps wait until a buffer is free, and one of them fills it (TileLang, flashinfer #5048).
    "producers that meet after the wait": (
        dict(block=(96, 1, 1)),
        BARRIERS.replace("COUNT", "1")
        + "setp.eq.u32 %p4, %r2, 2; @%p4 bra consumer;" + wait(1, "A") + "[[bar.sync 1, 64;]]"
        + f"@%p1 mbarrier.arrive.shared.b64 _, {OTHER}; bra end; consumer: {other(0, 'B')} {slowly('Z')}"
        + "setp.eq.u32 %p6, %r1, 64; @%p6 mbarrier.arrive.shared.b64 _, [%r11]; end:",
    ),
    # Four warps wait for a buffer, and one hands it back after the products of all.
    "products of all who waited": (
        dict(block=(160, 1, 1), target="sm_90a"),
        BARRIERS.replace("COUNT", "1") + FILL + "fence.proxy.async; bar.sync 0; setp.eq.u32 %p4, %r2, 4;"
        + f"@%p4 bra producer; {wait(0, 'A')} {correct(WGMMA)} [[wgmma.wait_group.sync.aligned 0;]]"
        + f"@%p1 mbarrier.arrive.shared.b64 _, {OTHER}; wgmma.wait_group.sync.aligned 0; bra end;"
        + f"producer: setp.eq.u32 %p6, %r1, 128; @%p6 mbarrier.arrive.shared.b64 _, [%r11]; {other(0, 'B')}"
        + "@%p6 mbarrier.arrive.shared.b64 _, [%r11]; end:",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_wait_that_the_next_phase_follows(name):
    options, body = CASES[name]
    for seed in range(2):
        assert not run(correct(body), seed, **options).warnings


@pytest.mark.parametrize("name", CASES)
def test_a_wait_that_may_miss_its_phase(name):
    options, body = CASES[name]
    with pytest.raises(sim.OrderError) as caught:
        run(defective(body), 1, **options)
    (found,) = [finding for finding in caught.value.findings if "may miss its phase" in finding.kind]
    assert "mbarrier.try_wait.parity" in found.first and "mbarrier.arrive" in found.second, found


def test_a_deadlock_names_the_phase_that_was_missed():
    """The warp looks at the barrier when both phases have ended."""
    late = defective(TWICE).replace("waits:", f"waits: {slowly('Y')} {slowly('X')}").replace(slowly("Z"), "")
    text = r"phases 0 and 1 have ended since it last passed: the warp may have come too late for the first"
    with pytest.raises(sim.Deadlock, match=text):
        run(late.replace("TELLS", ""), block=(64, 1, 1))
    late = CASES["producers that meet after the wait"][1]
    late = (
        defective(late)
        .replace(slowly("Z"), "")
        .replace(
            "setp.eq.u32 %p4, %r2, 2; @%p4 bra consumer;",
            f"setp.eq.u32 %p4, %r2, 2; @%p4 bra consumer; @%p2 bra at_once; {slowly('Y')} at_once:",
        )
    )
    with pytest.raises(sim.Deadlock, match="lets a wait for parity 1 pass, and phases have ended since"):
        run(late, block=(96, 1, 1))
