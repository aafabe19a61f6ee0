"""Memory order: for each class of defect a kernel that has it, which is found, and its correct twin, which is clean
(helpers/order_kernels.py)."""

import re

import pytest
from helpers.order_kernels import (
    AFTER,
    ALLOCATE,
    ALLOCATE_PAIR,
    BEGUN,
    BOTH,
    CLUSTER,
    COMMIT,
    COMMIT_MMA,
    FILL,
    FLAG,
    FREE,
    FREE_PAIR,
    INIT,
    INIT_FENCED,
    LAST,
    LOAD,
    MMA,
    PAIR,
    REMOTE,
    SEND,
    START,
    STORE,
    STORE_TENSOR,
    WGMMA,
    correct,
    defective,
    run,
    wait,
)

from warpspec import sim

SCOPE = "an arrival at CTA scope"
UNORDERED, PROXY = "accesses that nothing orders", "no proxy fence"
# name: (kind of the finding, launch options, body)
CASES = {
    "a barrier between warps": (
        UNORDERED,
        dict(block=(64, 1, 1)),
        START + "@%p2 st.shared.u32 [%r12], %r1; [[bar.sync 0;]] @!%p2 ld.shared.u32 %r4, [%r12+-128];",
    ),
    "a proxy fence before a bulk store": (
        PROXY,
        dict(),
        START + "st.shared.u32 [%r12], %r1; [[fence.proxy.async.shared::cta;]] bar.warp.sync -1;"
        + STORE + COMMIT + "@%p1 cp.async.bulk.wait_group 0;",
    ),
    "a proxy fence of the right space": (
        PROXY,
        dict(),
        START + "st.shared.u32 [%r12], %r1; fence.proxy.async[[.shared::cta||.global]]; bar.warp.sync -1;"
        + STORE + COMMIT + "@%p1 cp.async.bulk.wait_group 0;",
    ),
    "a proxy fence between a read and a bulk load": (
        PROXY,
        dict(),
        START + INIT_FENCED + LOAD + wait(0, "A") + "ld.shared.u32 %r4, [%r12]; [[fence.proxy.async;]]"
        + "bar.warp.sync -1;" + LOAD + wait(1, "B"),
    ),
    "a wait for a bulk load": (
        UNORDERED,
        dict(),
        START + INIT_FENCED + LOAD + "[[" + wait(0, "A") + "]] ld.shared.u32 %r4, [%r12];" + wait(0, "B"),
    ),
    "mbarrier init fence": (
        "mbarrier used before",
        dict(),
        START + INIT + "[[fence.mbarrier_init.release.cluster;]] bar.sync 0;" + LOAD + wait(0, "A"),
    ),
    "a barrier after mbarrier.init": (
        "mbarrier used before",
        dict(block=(64, 1, 1)),
        START + INIT + "[[bar.sync 0;]] mov.u32 %r9, 0;"
        + "delay: add.u32 %r9, %r9, 1; setp.lt.u32 %p7, %r9, 9000; @%p7 bra delay; setp.eq.u32 %p6, %r1, 32;"
        + "@%p6 mbarrier.arrive.shared.b64 %rd9, [%r11];",
    ),
    "a bulk group waited for in full": (
        UNORDERED,
        dict(),
        START + "fence.proxy.async;" + "@%p1 st.shared.v4.u32 [%r10], {%r1, %r1, %r1, %r1}; fence.proxy.async;"
        + STORE.replace("128", "16") + COMMIT
        + "@%p1 cp.async.bulk.wait_group[[||.read]] 0; @%p1 ld.global.u32 %r4, [%rd1];",
    ),
    "a bulk group's reads": (
        UNORDERED,
        dict(),
        START + "@%p1 st.shared.v4.u32 [%r10], {%r1, %r1, %r1, %r1}; fence.proxy.async;"
        + STORE.replace("128", "16") + COMMIT + "[[@%p1 cp.async.bulk.wait_group.read 0;]]"
        + "@%p1 st.shared.u32 [%r10], 5; @%p1 cp.async.bulk.wait_group 0;",
    ),
    "a bulk store's read before the exit": (
        "may have exited",
        dict(),
        START + "st.shared.u32 [%r12], %r1; fence.proxy.async; bar.warp.sync -1;"
        + STORE + "[[" + COMMIT + "@%p1 cp.async.bulk.wait_group.read 0;]]",
    ),
    "cp.async": (
        UNORDERED,
        dict(),
        START + "cp.async.ca.shared.global [%r12], [%rd2], 4; cp.async.commit_group;"
        + "[[cp.async.wait_group 0;]] bar.sync 0; ld.shared.u32 %r4, [%r12]; cp.async.wait_all;",
    ),
    "CTAs that write one place": (
        UNORDERED,
        dict(grid=(2, 1, 1)),
        START + "mov.u32 %r4, %ctaid.x; mul.wide.u32 %rd4, %r4, 128; [[add.u64 %rd2, %rd2, %rd4;]]"
        + "st.global.u32 [%rd2], %r1;",
    ),
    "CTAs of shares that write one place": (
        UNORDERED,
        dict(grid=(8, 1, 1)),
        START + "mov.u32 %r4, %ctaid.x; mul.wide.u32 %rd4, %r4, 128; [[add.u64 %rd2, %rd2, %rd4;]]"
        + "st.global.u32 [%rd2], %r1;",
    ),
    "a cluster barrier": (
        UNORDERED,
        dict(grid=(2, 1, 1), cluster=(2, 1, 1)),
        START + CLUSTER + BEGUN + "st.shared::cluster.u32 [%r6], %r1; [[" + BOTH + "]] ld.shared.u32 %r7, [%r12];"
        + BOTH,
    ),
    "a cluster barrier that releases": (
        UNORDERED,
        dict(grid=(2, 1, 1), cluster=(2, 1, 1)),
        START + CLUSTER + BEGUN + "st.shared::cluster.u32 [%r6], %r1; barrier.cluster.arrive[[||.relaxed]];"
        + "barrier.cluster.wait; ld.shared.u32 %r7, [%r12];" + BOTH,
    ),
    "shared memory of a CTA that has exited": (
        "may have exited",
        dict(grid=(2, 1, 1), cluster=(2, 1, 1)),
        START + CLUSTER + "st.shared.u32 [%r12], %r1;" + BOTH + "ld.shared::cluster.u32 %r7, [%r6]; [[" + BOTH + "]]",
    ),
    "a CTA of the cluster that has started": (
        "may not have started",
        dict(grid=(2, 1, 1), cluster=(2, 1, 1)),
        START + CLUSTER + "[[barrier.cluster.arrive.relaxed; barrier.cluster.wait;]] st.shared::cluster.u32 [%r6], %r1;"
        + BOTH + "ld.shared.u32 %r7, [%r12];" + BOTH,
    ),
    "a release by fence": (
        UNORDERED,
        dict(grid=(2, 1, 1)),
        START + FLAG + "@!%p3 bra take; st.global.u32 [%rd2], %r1; bar.warp.sync -1; [[fence.acq_rel.gpu;]]"
        + "@%p1 st.relaxed.gpu.global.u32 [%rd4], %r5; bra end;"
        + "take: ld.relaxed.gpu.global.u32 %r6, [%rd4]; setp.ne.u32 %p6, %r6, 1; @%p6 bra take;"
        + "fence.acq_rel.gpu; ld.global.u32 %r7, [%rd2]; end:",
    ),
    "an acquire by fence": (
        UNORDERED,
        dict(grid=(2, 1, 1)),
        START + FLAG + "@!%p3 bra take; st.global.u32 [%rd2], %r1; bar.warp.sync -1; fence.acq_rel.gpu;"
        + "@%p1 st.relaxed.gpu.global.u32 [%rd4], %r5; bra end;"
        + "take: ld.relaxed.gpu.global.u32 %r6, [%rd4]; setp.ne.u32 %p6, %r6, 1; @%p6 bra take;"
        + "[[fence.acq_rel.gpu;]] ld.global.u32 %r7, [%rd2]; end:",
    ),
    "the scope of a release": (
        UNORDERED,
        dict(grid=(2, 1, 1)),
        START + FLAG + "@!%p3 bra take; st.global.u32 [%rd2], %r1; bar.warp.sync -1;"
        + "@%p1 st.release.[[gpu||cta]].global.u32 [%rd4], %r5; bra end;"
        + "take: ld.acquire.gpu.global.u32 %r6, [%rd4]; setp.ne.u32 %p6, %r6, 1; @%p6 bra take;"
        + "ld.global.u32 %r7, [%rd2]; end:",
    ),
    "tcgen05.wait::st": (
        UNORDERED,
        dict(),
        START + ALLOCATE + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r20], {%r1}; [[tcgen05.wait::st.sync.aligned;]]"
        + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r20]; tcgen05.wait::ld.sync.aligned;"
        + "tcgen05.wait::st.sync.aligned;" + FREE,
    ),
    "tcgen05.fence::before_thread_sync": (
        "no tcgen05.fence::before_thread_sync",
        dict(block=(160, 1, 1)),
        START + LAST + ALLOCATE + "@!%p2 bra meet; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r20], {%r1};"
        + "tcgen05.wait::st.sync.aligned; meet: [[tcgen05.fence::before_thread_sync;]] bar.sync 0;"
        + "tcgen05.fence::after_thread_sync; @!%p4 bra end; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r20];"
        + "tcgen05.wait::ld.sync.aligned; end:" + FREE,
    ),
    "tcgen05.fence::after_thread_sync": (
        "no tcgen05.fence::after_thread_sync",
        dict(block=(160, 1, 1)),
        START + LAST + ALLOCATE + "@!%p2 bra meet; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r20], {%r1};"
        + "tcgen05.wait::st.sync.aligned; meet: tcgen05.fence::before_thread_sync; bar.sync 0;"
        + "[[tcgen05.fence::after_thread_sync;]] @!%p4 bra end;"
        + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r20]; tcgen05.wait::ld.sync.aligned; end:" + FREE,
    ),
    "tcgen05.wait::ld before tensor memory is freed": (
        "tensor memory is freed",
        dict(),
        START + ALLOCATE + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r20]; [[tcgen05.wait::ld.sync.aligned;]]"
        + FREE + "tcgen05.wait::ld.sync.aligned;",
    ),
    "tcgen05.wait::ld before a use after a move": (
        "no tcgen05.wait::ld",
        dict(),
        START + ALLOCATE + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r20], {%r1}; tcgen05.wait::st.sync.aligned;"
        + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r20]; mov.b32 %r7, %r4; @!%p2 bra meet; meet:"
        + "[[tcgen05.wait::ld.sync.aligned;]] add.u32 %r8, %r7, 1; st.global.u32 [%rd2], %r8;"
        + "tcgen05.wait::ld.sync.aligned;" + FREE,
    ),
    "tcgen05.wait::ld before a use": (
        "no tcgen05.wait::ld",
        dict(),
        START + ALLOCATE + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r20], {%r1}; tcgen05.wait::st.sync.aligned;"
        + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r20]; [[tcgen05.wait::ld.sync.aligned;]]"
        + "st.global.u32 [%rd2], %r4; tcgen05.wait::ld.sync.aligned;" + FREE,
    ),
    "a proxy fence before tcgen05.mma": (
        PROXY,
        dict(block=(128, 1, 1)),
        START + ALLOCATE + INIT_FENCED + FILL + "[[fence.proxy.async.shared::cta;]] bar.sync 0;" + MMA + COMMIT_MMA
        + wait(0, "A") + FREE,
    ),
    "tcgen05.fence::after_thread_sync between MMAs of two accumulators": (
        "may overtake",
        dict(block=(128, 1, 1)),
        START + ALLOCATE + INIT_FENCED + FILL + "fence.proxy.async.shared::cta; bar.sync 0;" + MMA + COMMIT_MMA
        + wait(0, "A") + "bar.sync 0; [[tcgen05.fence::after_thread_sync;]] add.u32 %r20, %r20, 4;" + MMA
        + "sub.u32 %r20, %r20, 4;" + COMMIT_MMA + wait(1, "B") + FREE,
    ),
    "tcgen05.commit before tensor memory is freed": (
        "tensor memory is freed",
        dict(block=(128, 1, 1)),
        START + ALLOCATE + INIT_FENCED + FILL + "fence.proxy.async.shared::cta; bar.sync 0;" + MMA + COMMIT_MMA
        + "[[" + wait(0, "A") + "]]" + FREE + wait(0, "B"),
    ),
    "a warp barrier between lanes": ("lanes of a warp", dict(block=(32, 1, 1)),
        START + "st.shared.u32 [%r12], %r1; [[bar.warp.sync -1;]] xor.b32 %r12, %r12, 4; ld.shared.u32 %r4, [%r12];"
        + "st.global.u32 [%rd2], %r4;"),
    "a warp barrier after a wait on an mbarrier": ("lanes of a warp", dict(block=(32, 1, 1)),
        START + INIT_FENCED + "st.shared.u32 [%r12], %r1; @%p1 mbarrier.arrive.shared.b64 _, [%r11];" + wait(0, "A")
        + "[[bar.warp.sync -1;]] xor.b32 %r12, %r12, 4; ld.shared.u32 %r4, [%r12]; st.global.u32 [%rd2], %r4;"),
    "a warp barrier after bar.arrive": ("lanes of a warp", dict(block=(64, 1, 1)),
        START + "st.shared.u32 [%r12], %r1; @%p2 bar.arrive 1, 64; @!%p2 bar.sync 1, 64; [[bar.warp.sync -1;]]"
        + "xor.b32 %r12, %r12, 4; ld.shared.u32 %r4, [%r12]; st.global.u32 [%rd2], %r4;"),
    "a warp barrier before a read by all lanes": ("lanes of a warp", dict(block=(32, 1, 1)),
        START + "@%p1 st.shared.u32 [%r10], 7; [[bar.warp.sync -1;]] ld.shared.u32 %r4, [%r10];"
        + "st.global.u32 [%rd2], %r4;"),
    "a warp barrier before a write by all lanes": ("lanes of a warp", dict(block=(32, 1, 1)),
        START + "@%p1 ld.shared.u32 %r4, [%r10]; [[bar.warp.sync -1;]] st.shared.u32 [%r10], 7;"),
    "scope of atomics": (UNORDERED, dict(grid=(2, 1, 1)), START + "red.relaxed.[[gpu||cta]].global.add.u32 [%rd1], 1;"),
    "mbarrier init fence of a cluster": ("mbarrier used before", dict(grid=(2, 1, 1), cluster=(2, 1, 1)),
        START + INIT + "[[fence.mbarrier_init.release.cluster;]]" + BOTH + LOAD + wait(0, "A") + BOTH),
    "cp.async between lanes": ("lanes of a warp", dict(),
        START + "cp.async.ca.shared.global [%r12], [%rd2], 4; cp.async.wait_all; [[bar.warp.sync -1;]]"
        + "xor.b32 %r4, %r12, 4; ld.shared.u32 %r5, [%r4];"),
    "a lane's read before another's cp.async": ("lanes of a warp", dict(),
        START + "st.shared.u32 [%r12], %r1; bar.warp.sync -1; xor.b32 %r4, %r12, 4; ld.shared.u32 %r5, [%r4];"
        + "[[bar.warp.sync -1;]] cp.async.ca.shared.global [%r12], [%rd2], 4; cp.async.wait_all;"),
    "a wait for what one lane wrote before it arrived": ("lanes of a warp", dict(),
        START + INIT_FENCED + "st.shared.u32 [%r12], %r1; @%p1 st.shared.u32 [%r10+512], 7;"
        + "@%p1 mbarrier.arrive.shared.b64 _, [%r11];" + "[[" + wait(0, "A") + "]] ld.shared.u32 %r4, [%r10+512];"),
    "the scope of an arrival": (SCOPE, PAIR,
        START + REMOTE + "st.shared::cluster.u32 [%r6], %r1; bar.warp.sync -1;"
        + "@%p1 mbarrier.arrive[[.release.cluster]].shared::cluster.b64 _, [%r7];" + AFTER),
    "a fence before an arrival": (SCOPE, PAIR,
        START + REMOTE + "st.shared::cluster.u32 [%r6], %r1; bar.warp.sync -1; [[fence.acq_rel.cluster;]]"
        + "@%p1 mbarrier.arrive.shared::cluster.b64 _, [%r7];" + AFTER),
    "the scope of a fence before an arrival": (SCOPE, PAIR,
        START + REMOTE + "st.shared::cluster.u32 [%r6], %r1; bar.warp.sync -1; fence.acq_rel.[[cluster||cta]];"
        + "@%p1 mbarrier.arrive.shared::cluster.b64 _, [%r7];" + AFTER),
    "the scope of an arrival after a cp.async": (SCOPE, PAIR,
        START + REMOTE + "cp.async.ca.shared.global [%r12], [%rd2], 4; cp.async.wait_all; bar.warp.sync -1;"
        + "@%p1 mbarrier.arrive[[.release.cluster]].shared::cluster.b64 _, [%r7];" + AFTER.replace("[%r12]", "[%r6]")),
    "the scope of an arrival before an MMA's operands": (SCOPE, PAIR,
        START + REMOTE + "st.shared::cluster.u32 [%r6], %r1; fence.proxy.async; bar.warp.sync -1;"
        + "@%p1 mbarrier.arrive[[.release.cluster]].shared::cluster.b64 _, [%r7];" + wait(0, "A")
        + "shl.b32 %r9, %r4, 7; cvt.u64.u32 %rd5, %r9; add.u64 %rd1, %rd1, %rd5;" + STORE + COMMIT
        + "@%p1 cp.async.bulk.wait_group 0;" + BOTH),
    "the scope of an arrival after fenced stores to own memory": (SCOPE, dict(PAIR, block=(64, 1, 1)),
        START + REMOTE.replace(INIT, INIT + INIT.replace("[%r11]", "[%r11+8]")) + "@!%p2 bra relay;"
        + "st.shared.u32 [%r12], %r1; fence.proxy.async.shared::cta; bar.warp.sync -1;"
        + "@%p1 mbarrier.arrive[[.release.cluster]].shared::cluster.b64 _, [%r7]; bra end; relay:" + wait(0, "A")
        + "setp.eq.u32 %p1, %r1, 32; @%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7+8];"
        + wait(0, "C").replace("[%r11]", "[%r11+8]")
        + "shl.b32 %r9, %r4, 7; cvt.u64.u32 %rd5, %r9; add.u64 %rd1, %rd1, %rd5;" + STORE + COMMIT
        + "@%p1 cp.async.bulk.wait_group 0; end:" + BOTH),
    "the scope of an arrival after a counted st.async": (SCOPE, PAIR,
        START + REMOTE.replace(INIT, INIT + INIT.replace("[%r11]", "[%r11+8]")) + SEND + wait(0, "A")
        + "ld.shared.u32 %r8, [%r12]; add.u32 %r1, %r8, 1; bar.warp.sync -1;"
        + "@%p1 mbarrier.arrive[[.release.cluster]].shared::cluster.b64 _, [%r7+8];"
        + wait(0, "B").replace("[%r11]", "[%r11+8]") + SEND + wait(1, "C") + BOTH),
    "a wait for st.async before the buffer is handed back": (UNORDERED, PAIR,
        START + REMOTE.replace(INIT, INIT + INIT.replace("[%r11]", "[%r11+8]")) + SEND + "[[" + wait(0, "A") + "]]"
        + "@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7+8];"
        + wait(0, "B").replace("[%r11]", "[%r11+8]") + "[[||" + wait(0, "A") + "]]" + SEND + wait(1, "C") + BOTH),
    "the peer's allocation": ("before the other CTA has allocated", PAIR,
        START + ALLOCATE_PAIR + "[[" + BOTH + "]]" + FREE_PAIR),
    "the peer's exit": ("the other CTA may have exited", PAIR,
        START + ALLOCATE_PAIR + BOTH + STORE_TENSOR + "[[" + BOTH + "]]" + FREE_PAIR),
    "a barrier after a pair's dealloc": ("the other CTA may have exited", PAIR,
        START + ALLOCATE_PAIR + BOTH + STORE_TENSOR + FREE_PAIR + "[[" + BOTH + "]]"),
    "a warp's own rows of A": (UNORDERED, dict(block=(128, 1, 1), target="sm_90a"),
        START + FILL + "fence.proxy.async; bar.sync 0; [[mov.b32 %r24, %r2;||xor.b32 %r24, %r2, 1;]]"
        + "and.b32 %r25, %r3, 127; mad.lo.u32 %r24, %r24, 256, %r25; add.u32 %r24, %r24, %r10;"
        + "st.shared.u32 [%r24], 0; "
        + "fence.proxy.async; bar.warp.sync -1;" + correct(WGMMA)
        + "wgmma.wait_group.sync.aligned 0;"),
    "threads that leave before a barrier of all": ("that some of them have left", dict(block=(64, 1, 1)),
        START + "[[bar.sync 0; @%p2 exit;||@%p2 exit; bar.sync 0;]]"),
    "wgmma.fence": ("no wgmma.fence", dict(block=(128, 1, 1), target="sm_90a"),
        START + FILL + "fence.proxy.async; bar.sync 0;" + WGMMA + "wgmma.wait_group.sync.aligned 0;"),
    "a proxy fence before wgmma": (PROXY, dict(block=(128, 1, 1), target="sm_90a"),
        START + FILL + "[[fence.proxy.async;]] bar.sync 0;" + correct(WGMMA)
        + "wgmma.wait_group.sync.aligned 0;"),
    "wgmma.wait_group before a write": ("a register of wgmma", dict(block=(128, 1, 1), target="sm_90a"),
        START + FILL + "fence.proxy.async; bar.sync 0;" + correct(WGMMA)
        + "[[wgmma.wait_group.sync.aligned 0;]] bar.sync 0; mov.b32 %f0, 0; wgmma.wait_group.sync.aligned 0;"),
    "wgmma.wait_group before a use after a move": ("an accumulator of wgmma", dict(block=(128, 1, 1), target="sm_90a"),
        START + FILL + "fence.proxy.async; bar.sync 0;" + correct(WGMMA)
        + "[[wgmma.wait_group.sync.aligned 0;]] mov.b32 %r7, %f0; @!%p2 bra meet; meet: add.u32 %r8, %r7, 1;"
        + "st.global.u32 [%rd2], %r8; wgmma.wait_group.sync.aligned 0;"),
    "wgmma.wait_group for one of two groups": ("an accumulator of wgmma", dict(block=(128, 1, 1), target="sm_90a"),
        START + FILL + "fence.proxy.async; bar.sync 0;" + correct(WGMMA)
        + re.sub(r"\[\[|\]\]|mov.b32 %f.*", "", WGMMA).replace("%f", "%r3") + "wgmma.wait_group.sync.aligned [[1||2]];"
        + "mov.b32 %r7, %f0; add.u32 %r8, %r7, 1; st.global.u32 [%rd2], %r8; wgmma.wait_group.sync.aligned 0;"),
    "wgmma.wait_group": (UNORDERED, dict(block=(128, 1, 1), target="sm_90a"),
        START + FILL + "fence.proxy.async; bar.sync 0;" + correct(WGMMA)
        + "[[wgmma.wait_group.sync.aligned 0;]] bar.sync 0; @%p1 st.shared.u32 [%r10], 7;"
        + "wgmma.wait_group.sync.aligned 0;"),
}  # fmt: skip


TOLERATED = (  # by hardware: a warning
    "a bulk store's read before the exit",
    "the scope of an arrival after fenced stores to own memory",
    "the scope of an arrival after a counted st.async",
    "a proxy fence between a read and a bulk load",
    "mbarrier init fence",
    "tcgen05.fence::after_thread_sync between MMAs of two accumulators",
    "tcgen05.wait::ld before tensor memory is freed",
    "tcgen05.wait::ld before a use",
    "tcgen05.wait::ld before a use after a move",
    "threads that leave before a barrier of all",
    "tcgen05.fence::before_thread_sync",
    "tcgen05.fence::after_thread_sync",
)


@pytest.mark.parametrize("name", CASES)
def test_the_correct_kernel_is_clean(name):
    _, options, body = CASES[name]
    assert not run(correct(body), **options).warnings


@pytest.mark.parametrize("seed", (0, 2))
@pytest.mark.parametrize("name", CASES)
def test_the_defect_is_found(name, seed):
    kind, options, body = CASES[name]
    body = defective(body)
    if name in TOLERATED:
        assert any(kind in warning for warning in run(body, seed, **options).warnings)
        return
    with pytest.raises(sim.SimError) as caught:
        run(body, seed, **options)
    if name == "tcgen05.commit before tensor memory is freed" and isinstance(caught.value, sim.TmemFault):
        return  # the product was computed after that
    assert any(kind in finding.kind for finding in caught.value.findings), caught.value
