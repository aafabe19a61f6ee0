"""Runs a PTX kernel body on the simulated machine: what the tests of asynchronous copies share."""

import struct

import numpy as np

from helpers.tma_model import swizzle_by_words
from warpspec.sim import runtime, tma
from warpspec.sim.memory import GlobalMemory
from warpspec.sim.tma import Swizzle, SwizzleAtomicity, TensorMap
from warpspec.sim.tma.descriptor import ELEMENT_BY_NAME

SEEDS = range(6)  # of schedules
SHARED = 16 << 10
IN_BYTES = 8 << 10
OUT_BYTES = 16 << 10

# %r1 thread, %r2 rank in the cluster, %r3 own shared memory (mbarrier at 0, data from 1024), %rd1 tensor map,
# %rd2 input, %rd3 output of this CTA; %p1: thread 0.
KERNEL = """.version 8.6
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 input, .param .u64 output, .param .u32 each)
{{
    .reg .pred %p<9>;
    .reg .b16 %h<4>;
    .reg .b32 %r<30>;
    .reg .b64 %rd<20>;
    .reg .b64 %state;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %cluster_ctarank;
    mov.u32 %r3, smem;
    mov.b64 %rd1, map;
    ld.param.u64 %rd2, [input];
    ld.param.u64 %rd3, [output];
    ld.param.u32 %r4, [each];
    mad.wide.u32 %rd3, %r2, %r4, %rd3;
    setp.eq.u32 %p1, %r1, 0;
{init}
{body}
    ret;
}}
"""
INIT = """
    @!%p1 bra READY;
    mbarrier.init.shared.b64 [%r3], {count};
    fence.mbarrier_init.release.cluster;
READY:
    fence.proxy.async.shared::cta;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
"""
READY = INIT.format(count=1)
WAIT = """
WAIT{n}:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r3], {parity};
    @!%p2 bra WAIT{n};
"""
# Every thread writes bytes [16 tid, 16 tid + 16) of the data to the output, or reads them from the input.
DUMP = """
    shl.b32 %r20, %r1, 4;
    add.u32 %r21, %r3, %r20;
    ld.shared.v4.u32 {%r22, %r23, %r24, %r25}, [%r21+1024];
    cvt.u64.u32 %rd9, %r20;
    add.u64 %rd10, %rd3, %rd9;
    st.global.v4.u32 [%rd10], {%r22, %r23, %r24, %r25};
"""
FILL = """
    shl.b32 %r20, %r1, 4;
    add.u32 %r21, %r3, %r20;
    cvt.u64.u32 %rd9, %r20;
    add.u64 %rd10, %rd2, %rd9;
    ld.global.v4.u32 {%r22, %r23, %r24, %r25}, [%rd10];
    st.shared.v4.u32 [%r21+1024], {%r22, %r23, %r24, %r25};
    fence.proxy.async.shared::cta;
    bar.sync 0;
"""
LEAVE = """
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
"""


class Run:
    """One run of a kernel: `input` and `output` as uint8, output [CTAs, each]."""

    def __init__(
        self,
        body,
        *,
        init=READY,
        seed=0,
        ctas=1,
        threads=128,
        make_map=None,
        each=2048,
        grid=None,
        check=None,
    ):
        self.gmem = GlobalMemory()
        data = np.random.default_rng(5).integers(0, 256, IN_BYTES, dtype=np.uint8)
        self.source = self.gmem.allocate(IN_BYTES, "input", data=data.tobytes())
        self.target = self.gmem.allocate(OUT_BYTES, "output", data=bytes(OUT_BYTES))
        self.raw = tma.encode(make_map(self)) if make_map else bytes(128)
        params = self.raw + struct.pack("<QQI", self.source.address, self.target.address, each)
        self.report = runtime.execute(
            KERNEL.format(init=init, body=body),
            "k",
            grid=grid or (ctas, 1, 1),
            block=(threads, 1, 1),
            cluster=(ctas, 1, 1),
            dynamic_smem=SHARED,
            params=params,
            gmem=self.gmem,
            seed=seed,
            check=check,
        )
        self.input, self.output = self.source.array, self.target.array.reshape(-1, each)


def source_map(run: Run) -> TensorMap:
    """The input as u16 [32, 128], box 8 x 64 elements, 128-byte swizzle."""
    return TensorMap(
        run.source.address,
        ELEMENT_BY_NAME["u16"],
        (128, 32),
        (256,),
        (64, 8),
        (1, 1),
        swizzle=Swizzle.BYTES_128,
    )


def expected_box(run: Run, column: int, row: int, at: int = 2048) -> np.ndarray:
    """1 KiB of shared memory after a load through source_map to shared offset `at`."""
    box = run.input.reshape(32, 256)[row : row + 8, 2 * column : 2 * column + 128].reshape(-1)
    out = np.zeros(1024, np.uint8)
    for i, byte in enumerate(box):
        out[swizzle_by_words(at + i, Swizzle.BYTES_128, SwizzleAtomicity.BYTES_16) - at] = byte
    return out


LOAD = """
    @!%p1 bra L1;
    mbarrier.arrive.expect_tx.shared.b64 %state, [%r3], 1024;
    mov.u32 %r5, 64;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [%r3+1024], [%rd1, {%r5, 16}], [%r3];
L1:
"""
