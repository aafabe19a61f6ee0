"""Pieces of PTX for kernels of memory order: tests/sim/test_order.py and its neighbours.

In a kernel's text, [[good]] is what the defective one lacks, and [[good||bad]] what it has instead.
"""

import re

import numpy as np

from helpers.ptx_launch import launch
from warpspec.sim.tcgen05 import smem_descriptor

SHARED = ".shared .align 1024 .b8 sm[8192];"
SHARED_AT = 1024  # of `sm` in a CTA's shared memory
BARRIER = 8160  # of the mbarrier in `sm`

# Every thread: %r1 its number, %r2 its warp, %r10 sm, %r11 the mbarrier, %rd1 out; %p1 thread 0, %p2 warp 0.
START = f"""
  mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.b32 %r10, sm; add.u32 %r11, %r10, {BARRIER};
  ld.param.u64 %rd1, [out]; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r2, 0;
  shl.b32 %r3, %r1, 2; add.u32 %r12, %r10, %r3; cvt.u64.u32 %rd3, %r3; add.u64 %rd2, %rd1, %rd3;
"""
INIT = "@%p1 mbarrier.init.shared.b64 [%r11], 1;\n"
INIT_FENCED = INIT + "fence.mbarrier_init.release.cluster;\nbar.sync 0;\n"
LOAD = """
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r11], 128;
  @%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r10], [%rd1], 128, [%r11];
"""
STORE = "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r10], 128;\n"
COMMIT = "@%p1 cp.async.bulk.commit_group;\n"


def wait(parity: int, label: str) -> str:
    return f"""
  {label}: mbarrier.try_wait.parity.shared.b64 %p9, [%r11], {parity};
  @!%p9 bra {label};
"""


CLUSTER = "mov.u32 %r4, %cluster_ctarank; xor.b32 %r5, %r4, 1; mapa.shared::cluster.u32 %r6, %r12, %r5;\n"
BOTH = "barrier.cluster.arrive; barrier.cluster.wait;\n"
BEGUN = "barrier.cluster.arrive.relaxed; barrier.cluster.wait;\n"
FLAG = "mov.u32 %r4, %ctaid.x; setp.eq.u32 %p3, %r4, 0; add.u64 %rd4, %rd1, 256; mov.u32 %r5, 1;\n"
ALLOCATE = """
  @%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10], 32;
  bar.sync 0; ld.shared.u32 %r20, [%r10];
"""
FREE = "bar.sync 0;\n@%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32;\n"
LAST = "setp.eq.u32 %p4, %r2, 4;\n"  # the fifth warp has the first one's lanes of tensor memory


def operand(at: int, rows: int) -> int:
    """A K-major operand of 32 bytes a row, not swizzled, at a byte of `sm`."""
    return smem_descriptor.encode(SHARED_AT + at, leading_offset=rows * 16, stride_offset=128, swizzle_mode=0)


MMA = f"""
  mov.b64 %rd10, {operand(0, 128)}; mov.b64 %rd11, {operand(4096, 8)};
  mov.b32 %r21, {1 << 4 | 1 << 17 | 8 << 24}; setp.ne.u32 %p5, %r10, %r10;
  @%p1 tcgen05.mma.cta_group::1.kind::f16 [%r20], %rd10, %rd11, %r21, %p5;
"""
COMMIT_MMA = "@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r11];\n"
FILL = """
  mov.u32 %r22, %r1;
fill: shl.b32 %r23, %r22, 2; add.u32 %r23, %r10, %r23; st.shared.u32 [%r23+16], 0;
  add.u32 %r22, %r22, %ntid.x; setp.lt.u32 %p8, %r22, 1200; @%p8 bra fill;
  @%p1 st.shared.v4.u32 [%r10], {%r4, %r4, %r4, %r4};
"""
NAMES = ", ".join(f"%f{i}" for i in range(4))
WGMMA = f"""
  mov.b64 %rd10, {(SHARED_AT >> 4) | (64 * 16 >> 4) << 16 | (128 >> 4) << 32};
  mov.b64 %rd11, {(SHARED_AT + 4096) >> 4 | (8 * 16 >> 4) << 16 | (128 >> 4) << 32};
  mov.b32 %f0, 0; mov.b32 %f1, 0; mov.b32 %f2, 0; mov.b32 %f3, 0;
  [[wgmma.fence.sync.aligned;]]
  wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{{NAMES}}}, %rd10, %rd11, 1, 1, 1, 0, 0;
  wgmma.commit_group.sync.aligned;
"""

PAIR = dict(grid=(2, 1, 1), cluster=(2, 1, 1))
# %r6 and %r7: the peer's word of each thread and its mbarrier; all barriers are initialised.
REMOTE = (
    CLUSTER
    + "mapa.shared::cluster.u32 %r7, %r11, %r5;"
    + INIT
    + "fence.mbarrier_init.release.cluster;\n"
    + BOTH
)
SEND = (  # a word of each thread to the peer's word; each CTA's mbarrier counts the bytes that arrive there
    "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r11], 128;"
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r6], %r1, [%r7];"
)
AFTER = wait(0, "A") + "ld.shared::cluster.u32 %r8, [%r12];" + BOTH
ALLOCATE_PAIR = ALLOCATE.replace("cta_group::1", "cta_group::2")
FREE_PAIR = FREE.replace("cta_group::1", "cta_group::2")
STORE_TENSOR = (
    "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r20], {%r1}; tcgen05.wait::st.sync.aligned;"
    "tcgen05.fence::before_thread_sync;"
)


def run(body: str, seed: int = 0, **options):
    return launch(
        body, {"out": np.zeros(1024, np.uint32)}, variables=SHARED, seed=seed, check="order", **options
    )


def correct(body: str) -> str:
    """The kernel without its defect."""
    return re.sub(r"\[\[(.*?)(\|\|.*?)?\]\]", r"\1", body, flags=re.S)


def defective(body: str) -> str:
    """The kernel with its defect."""
    return re.sub(r"\[\[.*?(?:\|\|(.*?))?\]\]", lambda m: m.group(1) or "", body, flags=re.S)
