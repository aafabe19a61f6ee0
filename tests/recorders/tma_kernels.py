"""Small sm_90a PTX kernels that make one tensor copy, for the simulator and for a GPU alike.

Imports nothing of ours: record_tma.py runs where only numpy and a driver are.

load_<rank>: tensor map, five coordinates, byte offset in shared memory, bytes to expect, output buffer, bytes
of shared memory to dump. The output is 64 bytes of status (word 0: 1 if the copy arrived; word 1: the shared
address of the dumped memory) and the dump.
store_<rank>, <operation>_<rank>: tensor map, five coordinates, byte offset, input buffer, bytes of it to put
into shared memory first.
bulk_<name>: destination, input buffer, its bytes (a multiple of 512).
"""

import numpy as np

MEMORY_BYTES = 1 << 20  # of global memory that tensor maps refer to
DUMP_BYTES = 24 << 10  # of shared memory that a load's kernel dumps, or a store's kernel fills
BULK_BYTES = 8 << 10  # of a bulk reduction
RECORDED_ADDRESS = 1 << 40  # what recorded descriptors count addresses from
STATUS_BYTES = 64
FILL = 0xEE  # what shared memory holds before a load
RESERVED = 1024  # bytes of dynamic shared memory in front of the dumped part; the mbarrier is there
THREADS = 128
HEADER = """.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
"""
BULK = {  # bulk_<name> -> operation and type of cp.reduce.async.bulk
    "add_f32": "add.f32",
    "add_f64": "add.f64",
    "add_f16": "add.noftz.f16",
    "add_bf16": "add.noftz.bf16",
    "min_f16": "min.f16",
    "max_bf16": "max.bf16",
    "add_u64": "add.u64",
    "min_s64": "min.s64",
    "xor_b32": "xor.b32",
    "dec_u32": "dec.u32",
}
REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def pattern(nbytes: int, seed: int, kind: str = "bytes") -> np.ndarray:
    """Reproducible bytes with no regard to numpy's version. "ties": f32 half way between two tf32 values."""
    if kind == "ties":
        bits = pattern(nbytes, seed).view(np.uint32) & np.uint32(0xFFFFE000) | np.uint32(0x1000)
        small = np.arange(bits.size) % 4 == 0  # subnormal
        return np.where(small, bits & np.uint32(0x807FFFFF), bits).view(np.uint8)
    if kind == "subnormal halves":  # f16 and bf16 with small exponents
        bits = pattern(nbytes, seed).view(np.uint16)
        return np.where(np.arange(bits.size) % 2 == 0, bits & np.uint16(0x80FF), bits).view(np.uint8)
    words = (np.arange(nbytes, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    return (words >> np.uint64(56)).astype(np.uint8)


_COMMON = """
    .reg .pred %p<6>;
    .reg .b32 %r<30>;
    .reg .b64 %rd<10>;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, smem;
    add.u32 %r3, %r2, {reserved};
    ld.param.u32 %r10, [c];
    ld.param.u32 %r11, [c+4];
    ld.param.u32 %r12, [c+8];
    ld.param.u32 %r13, [c+12];
    ld.param.u32 %r14, [c+16];
    ld.param.u32 %r4, [offset];
    ld.param.u64 %rd1, [buffer];
    ld.param.u32 %r6, [nbytes];
    mov.b64 %rd2, map;
    cvta.param.u64 %rd3, %rd2;
    cvta.to.global.u64 %rd4, %rd1;
    add.u32 %r7, %r3, %r4;
    setp.eq.u32 %p1, %r1, 0;
"""

_LOAD = """
.visible .entry load_{rank}(
    .param .align 64 .b8 map[128], .param .align 4 .b8 c[20], .param .u32 offset, .param .u32 expected,
    .param .u64 buffer, .param .u32 nbytes)
{{
    .reg .b64 %state;
{common}
    ld.param.u32 %r5, [expected];
    shl.b32 %r15, %r1, 2;
FILL:
    add.u32 %r16, %r3, %r15;
    st.shared.u32 [%r16], {fill};
    add.u32 %r15, %r15, {step};
    setp.lt.u32 %p2, %r15, %r6;
    @%p2 bra FILL;
    @!%p1 bra READY;
    mbarrier.init.shared.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
READY:
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @!%p1 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 %state, [%r2], %r5;
    cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%r7], [%rd3, {{{coords}}}], [%r2];
WAIT:
    mov.u32 %r17, 0;
AGAIN:
    add.u32 %r17, %r17, 1;
    mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 0;
    @%p3 bra DONE;
    setp.lt.u32 %p4, %r17, 20000;
    @%p4 bra AGAIN;
DONE:
    bar.sync 0;
    selp.u32 %r18, 1, 0, %p3;
    @%p1 st.global.u32 [%rd4], %r18;
    @%p1 st.global.u32 [%rd4+4], %r3;
    shl.b32 %r15, %r1, 2;
DUMP:
    add.u32 %r16, %r3, %r15;
    ld.shared.u32 %r19, [%r16];
    cvt.u64.u32 %rd5, %r15;
    add.u64 %rd6, %rd4, %rd5;
    st.global.u32 [%rd6+{status}], %r19;
    add.u32 %r15, %r15, {step};
    setp.lt.u32 %p2, %r15, %r6;
    @%p2 bra DUMP;
    ret;
}}
"""

_STORE = """
.visible .entry {name}_{rank}(
    .param .align 64 .b8 map[128], .param .align 4 .b8 c[20], .param .u32 offset, .param .u64 buffer,
    .param .u32 nbytes)
{{
{common}
    shl.b32 %r15, %r1, 2;
FILL:
    add.u32 %r16, %r3, %r15;
    cvt.u64.u32 %rd5, %r15;
    add.u64 %rd6, %rd4, %rd5;
    ld.global.u32 %r19, [%rd6];
    st.shared.u32 [%r16], %r19;
    add.u32 %r15, %r15, {step};
    setp.lt.u32 %p2, %r15, %r6;
    @%p2 bra FILL;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @!%p1 bra DONE;
    {instruction}
        [%rd3, {{{coords}}}], [%r7];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
DONE:
    ret;
}}
"""


_BULK = """
.visible .entry bulk_{name}(.param .u64 target, .param .u64 buffer, .param .u32 nbytes)
{{
    .reg .pred %p<3>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, smem;
    ld.param.u64 %rd1, [target];
    ld.param.u64 %rd2, [buffer];
    ld.param.u32 %r3, [nbytes];
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    setp.eq.u32 %p1, %r1, 0;
    shl.b32 %r4, %r1, 2;
FILL:
    add.u32 %r5, %r2, %r4;
    cvt.u64.u32 %rd5, %r4;
    add.u64 %rd6, %rd4, %rd5;
    ld.global.u32 %r6, [%rd6];
    st.shared.u32 [%r5], %r6;
    add.u32 %r4, %r4, {step};
    setp.lt.u32 %p2, %r4, %r3;
    @%p2 bra FILL;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @!%p1 bra DONE;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.{suffix} [%rd3], [%r2], %r3;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
DONE:
    ret;
}}
"""


def module() -> str:
    """PTX of all kernels: loads and stores of rank 1 to 5, reductions of rank 2, bulk reductions."""
    common = _COMMON.format(reserved=RESERVED)
    step = 4 * THREADS
    parts = [HEADER]
    for rank in range(1, 6):
        coords = ", ".join(f"%r{10 + i}" for i in range(rank))
        fill = int.from_bytes(bytes([FILL]) * 4, "little")
        parts.append(
            _LOAD.format(rank=rank, common=common, coords=coords, fill=fill, step=step, status=STATUS_BYTES)
        )
        forms = {"store": f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"}
        if rank == 2:
            for name in REDUCTIONS:
                forms[name] = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{name}.tile.bulk_group"
        for name, text in forms.items():
            parts.append(
                _STORE.format(name=name, rank=rank, common=common, coords=coords, step=step, instruction=text)
            )
    parts += [_BULK.format(name=name, suffix=suffix, step=step) for name, suffix in BULK.items()]
    return "".join(parts)
