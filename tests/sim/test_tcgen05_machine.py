"""tcgen05 and mma.sync as whole kernels: asynchrony, both CTA groups, and what a missing wait does."""

import numpy as np
import pytest
from helpers.ptx_launch import launch
from helpers.tcgen05_model import Layout, smem_matrix

from warpspec.sim import BadDescriptor, Deadlock, TmemFault, UnsupportedInstruction
from warpspec.sim.tcgen05 import smem_descriptor

SMEM = 0x400  # shared offset of the variable `sm`: the first one
DATA = SMEM + 1024  # operands; the first KiB holds barriers and the tensor-memory address
OPERAND = 128 * 128  # bytes: 128 rows of 128 bytes, 128B swizzle
VARIABLES = ".shared .align 1024 .b8 sm[66560];"

PROLOGUE = """
  mov.b32 %r10, sm; mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5;
  mov.u32 %r3, %cluster_ctarank;
  ld.param.u64 %rd1, [data]; ld.param.u64 %rd2, [out];
  mul.wide.u32 %rd3, %r3, {data_bytes}; add.s64 %rd1, %rd1, %rd3;
  shl.b32 %r4, %r1, 4;
COPY: setp.ge.u32 %p1, %r4, {data_bytes}; @%p1 bra COPIED;
  cvt.u64.u32 %rd3, %r4; add.s64 %rd4, %rd1, %rd3; ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%rd4];
  add.u32 %r5, %r10, %r4; st.shared.v4.b32 [%r5+1024], {{%r20, %r21, %r22, %r23}};
  add.u32 %r4, %r4, {threads16}; bra COPY;
COPIED:
  setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
  mbarrier.init.shared::cta.b64 [%r10], 1;
READY:
  fence.proxy.async.shared::cta;
  setp.ne.u32 %p2, %r2, 0; @%p2 bra ALLOCATED;
  tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r10+16], {columns};
ALLOCATED:
  {barrier}
  ld.shared.b32 %r6, [%r10+16];
"""
EPILOGUE = """
  {barrier}
  @%p2 bra DONE;
  tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r6, {columns};
  tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
DONE:
"""
WAIT = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r10], 0; @!%p3 bra WAIT;\n"
ISSUER = "setp.ne.u32 %p1, %r1, 0; @%p1 bra ISSUED;\n"
CLUSTER_BARRIER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


def store_accumulator(columns):
    """Each thread writes `columns` words of its lane to row cta * threads + thread of `out`."""
    text = (
        f"mad.lo.u32 %r7, %r3, 128, %r1; mul.wide.u32 %rd5, %r7, {4 * columns}; add.s64 %rd5, %rd2, %rd5;\n"
    )
    for first in range(0, columns, 8):
        names = ", ".join(f"%r{40 + i}" for i in range(8))
        text += f"add.u32 %r8, %r6, {first}; tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{names}}}, [%r8];\n"
        text += "tcgen05.wait::ld.sync.aligned;\n"
        text += "".join(f"st.global.b32 [%rd5+{4 * (first + i)}], %r{40 + i};\n" for i in range(8))
    return text


def run_kernel(middle, data, out, *, group=1, seed=0, columns=64, ctas=None, epilogue=EPILOGUE):
    ctas = ctas or group
    barrier = "bar.sync 0;" if ctas == 1 else CLUSTER_BARRIER
    values = {"group": group, "columns": columns, "barrier": barrier}
    prologue = PROLOGUE.format(data_bytes=data.nbytes // ctas, threads16=128 * 16, **values)
    body = prologue + middle.replace("BARRIER", barrier) + epilogue.format(**values)
    shape = {"grid": (ctas, 1, 1), "cluster": (ctas, 1, 1), "block": (128, 1, 1)}
    return launch(body, {"data": data, "out": out}, variables=VARIABLES, seed=seed, **shape)


def operand_bytes(rng, count):
    """`count` bf16 operands as they stand in shared memory, [count * OPERAND] bytes, small integers."""
    values = rng.integers(-4, 5, count * OPERAND // 2).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def descriptor(offset):
    return smem_descriptor.encode(DATA + offset, 16, 1024, 2)


def mma_lines(n, m=128, group=1, steps=4, b_at=OPERAND):
    """K = 16 * steps of a bf16 product; A at 0, B at `b_at`; accumulates from zero."""
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | n >> 3 << 17 | m >> 4 << 24
    text = f"mov.b32 %r11, {idesc};\n"
    for step in range(steps):
        text += f"mov.b64 %rd10, {descriptor(32 * step)}; mov.b64 %rd11, {descriptor(b_at + 32 * step)};\n"
        text += f"setp.ne.u32 %p4, {step}, 0;\n"
        text += f"tcgen05.mma.cta_group::{group}.kind::f16 [%r6], %rd10, %rd11, %r11, %p4;\n"
    return text


COMMIT = "tcgen05.commit.cta_group::{}.mbarrier::arrive::one.shared::cluster{}.b64 [%r10]{};\n"


def reference(data, m, n, b_at=OPERAND):
    smem = np.zeros(DATA, np.uint8)
    smem = np.concatenate([smem, data])
    a = smem_matrix(smem, Layout(DATA, 16, 1024, 2), "bf16", m, 64)
    b = smem_matrix(smem, Layout(DATA + b_at, 16, 1024, 2), "bf16", n, 64)
    return a, b


@pytest.mark.parametrize("seed", range(4))
def test_mma_commit_wait_load(seed):
    rng = np.random.default_rng(seed)
    data, out = operand_bytes(rng, 2), np.zeros((128, 32), np.float32)
    middle = ISSUER + mma_lines(32) + COMMIT.format(1, "", "") + "ISSUED:\n" + WAIT + store_accumulator(32)
    report = run_kernel(middle, data, out, seed=seed)
    a, b = reference(data, 128, 32)
    np.testing.assert_array_equal(out, a @ b.T)
    assert report.mma_flops == 2 * 128 * 32 * 64 and report.tmem_columns == 64


@pytest.mark.parametrize("seed", range(4))
def test_mma_on_a_pair_of_ctas(seed):
    """M = 256: each CTA brings half of A and of B and gets half of D; the leader's commit reaches both."""
    rng = np.random.default_rng(seed)
    data, out = operand_bytes(rng, 4), np.zeros((256, 32), np.float32)
    issue = "setp.ne.u32 %p5, %r3, 0; @%p5 bra ISSUED;\n" + ISSUER
    middle = (
        issue + mma_lines(32, 256, 2) + "mov.b16 %h1, 3;\n" + COMMIT.format(2, ".multicast::cluster", ", %h1")
    )
    middle += "ISSUED:\n" + WAIT + store_accumulator(32)
    run_kernel(middle, data, out, group=2, seed=seed)
    parts = [reference(half, 128, 16) for half in data.reshape(2, -1)]
    a, b = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    np.testing.assert_array_equal(out, a @ b.T)


def outcomes(middle, data, shape, seeds=range(12), **options):
    results = []
    for seed in seeds:
        out = np.zeros(shape, np.float32)
        run_kernel(middle, data, out, seed=seed, **options)
        results.append(out)
    return results


def test_last_bits_do_not_depend_on_the_seed():
    """Instructions that are pending together run as one operation, but each product is added by itself."""
    values = np.random.default_rng(0).standard_normal(2 * OPERAND // 2).astype(np.float32)
    data = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    middle = ISSUER + mma_lines(32) + COMMIT.format(1, "", "") + "ISSUED:\n" + WAIT + store_accumulator(32)
    first, *others = outcomes(middle, data, (128, 32), seeds=range(8))
    for out in others:
        np.testing.assert_array_equal(out, first)


def test_reading_the_accumulator_without_waiting_shows():
    data = operand_bytes(np.random.default_rng(0), 2)
    middle = (
        ISSUER + mma_lines(32) + COMMIT.format(1, "", "") + "ISSUED:\nbar.sync 0;\n" + store_accumulator(32)
    )
    middle += WAIT
    a, b = reference(data, 128, 32)
    assert any(not np.array_equal(out, a @ b.T) for out in outcomes(middle, data, (128, 32)))


def test_a_commit_tracks_only_its_own_warps_work():
    """Warp 0 issues the product, warp 1 commits: the barrier may complete long before the product does."""
    data = operand_bytes(np.random.default_rng(1), 2)
    middle = ISSUER + mma_lines(32) + "ISSUED:\nbar.sync 0;\n"
    middle += (
        "setp.ne.u32 %p6, %r1, 32; @%p6 bra COMMITTED;\n" + COMMIT.format(1, "", "") + "COMMITTED:\n" + WAIT
    )
    a, b = reference(data, 128, 32)
    shown = 0
    for seed in range(12):
        try:
            (out,) = outcomes(middle + store_accumulator(32), data, (128, 32), [seed])
            shown += not np.array_equal(out, a @ b.T)
        except TmemFault as fault:  # the product came after the deallocation
            assert "matrix D" in str(fault)
            shown += 1
    assert shown


STORE_OWN = """
  mov.b32 %r12, 0; shl.b32 %r13, %r1, 8;
FILL: add.u32 %r14, %r6, %r12; add.u32 %r15, %r13, %r12;
  tcgen05.st.sync.aligned.32x32b.x1.b32 [%r14], {{%r15}};
  add.u32 %r12, %r12, 1; setp.lt.u32 %p6, %r12, 8; @%p6 bra FILL;
  {wait}
"""


def test_store_wait_load_round_trip():
    data, out = np.zeros(2048, np.uint8), np.zeros((128, 8), np.uint32)
    for seed in range(4):
        run_kernel(
            STORE_OWN.format(wait="tcgen05.wait::st.sync.aligned;") + store_accumulator(8),
            data,
            out,
            seed=seed,
        )
        np.testing.assert_array_equal(out, np.arange(128)[:, None] * 256 + np.arange(8))


def test_a_in_tensor_memory_needs_the_store_wait():
    """A is written with tcgen05.st; without tcgen05.wait::st the product sees poison under some seed."""
    data = operand_bytes(np.random.default_rng(2), 2)
    fill = "mov.b32 %r15, 0x40003F80;\n"  # bf16 1.0 and 2.0
    fill += "".join(
        f"add.u32 %r14, %r6, {40 + i}; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r14], {{%r15}};\n"
        for i in range(8)
    )
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | 32 >> 3 << 17 | 128 >> 4 << 24
    product = f"mov.b32 %r11, {idesc}; mov.b64 %rd11, {descriptor(OPERAND)}; setp.ne.u32 %p4, 0, 0;\n"
    product += "add.u32 %r16, %r6, 40;\n"
    product += "tcgen05.mma.cta_group::1.kind::f16.collector::a::discard "
    product += "[%r6], [%r16], %rd11, %r11, {0, 0, 0, 0}, %p4;\n"
    rest = (
        "tcgen05.fence::before_thread_sync;\nbar.sync 0;\ntcgen05.fence::after_thread_sync;\n"
        + ISSUER
        + product
    )
    rest += COMMIT.format(1, "", "") + "ISSUED:\n" + WAIT + store_accumulator(32)
    _, b = reference(data, 128, 32)
    expected = np.broadcast_to(b[:, 0:16:2].sum(1) + 2 * b[:, 1:16:2].sum(1), (128, 32))
    for out in outcomes(fill + "tcgen05.wait::st.sync.aligned;\n" + rest, data, (128, 32), range(4)):
        np.testing.assert_array_equal(out, expected)
    assert any(not np.array_equal(out, expected) for out in outcomes(fill + rest, data, (128, 32)))


def test_block_scaled_product_with_scales_copied_by_cp():
    """NVFP4: tcgen05.cp of both scale tiles and the product run in order in one queue."""
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, 3 * OPERAND, dtype=np.uint8)
    tiles = data[2 * OPERAND :]  # scale tiles: 128 rows x 4 scales, row r at 16 * (r % 32) + 4 * (r / 32)
    tiles[:1024] = rng.integers(0x20, 0x48, 1024)
    idesc = 1 << 7 | 1 << 10 | 64 >> 3 << 17 | 128 >> 4 << 24
    text = (
        ISSUER
        + f"mov.b32 %r11, {idesc}; add.u32 %r16, %r6, 64; add.u32 %r17, %r6, 68; setp.ne.u32 %p4, 0, 0;\n"
    )
    for register, at in (("%r16", 0), ("%r17", 512)):
        bits = smem_descriptor.encode(DATA + 2 * OPERAND + at, 16, 128, 0)
        text += f"mov.b64 %rd12, {bits}; tcgen05.cp.cta_group::1.32x128b.warpx4 [{register}], %rd12;\n"
    text += f"mov.b64 %rd10, {descriptor(0)}; mov.b64 %rd11, {descriptor(OPERAND)};\n"
    text += "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X "
    text += "[%r6], %rd10, %rd11, %r11, [%r16], [%r17], %p4;\n"
    text += COMMIT.format(1, "", "") + "ISSUED:\n" + WAIT + store_accumulator(64)
    out = np.zeros((128, 64), np.float32)
    run_kernel(text, data, out, columns=128)
    smem = np.concatenate([np.zeros(DATA, np.uint8), data])
    a = smem_matrix(smem, Layout(DATA, 16, 1024, 2), "e2m1", 128, 64, packed=True)
    b = smem_matrix(smem, Layout(DATA + OPERAND, 16, 1024, 2), "e2m1", 64, 64, packed=True)
    scale = np.array([[(1 + (c & 7) / 8) * 2.0 ** ((c >> 3) - 7) for c in tiles[:1024].astype(int)]]).reshape(
        2, 512
    )
    row = np.arange(128)
    sa, sb = (s[(16 * (row % 32) + 4 * (row // 32))[:, None] + np.arange(4)] for s in scale)
    expected = (a * np.repeat(sa, 16, 1)) @ (b * np.repeat(sb[:64], 16, 1)).T
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)


def test_sparse_product_with_metadata_from_threads():
    """bf16 with K = 64 in two steps, the metadata of both in the two columns of one address. Even rows keep the first
    two of each four elements, odd rows the last two."""
    data = operand_bytes(np.random.default_rng(4), 2)
    lanes = "mov.u32 %r12, %laneid; and.b32 %r12, %r12, 1; setp.eq.u32 %p5, %r12, 0;\n"
    # 01 00 or 11 10; a lane holds rows r, r + 8.
    fill = lanes + "selp.b32 %r15, 0x44444444, 0xEEEEEEEE, %p5;\n"
    for column in (40, 41):
        fill += f"add.u32 %r14, %r6, {column}; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r14], {{%r15}};\n"
    fill += "tcgen05.wait::st.sync.aligned;\ntcgen05.fence::before_thread_sync;\nbar.sync 0;\n"
    fill += "tcgen05.fence::after_thread_sync;\n" + ISSUER + "add.u32 %r16, %r6, 40;\n"
    idesc = 1 << 2 | 1 << 4 | 1 << 7 | 1 << 10 | 32 >> 3 << 17 | 128 >> 4 << 24
    for step in range(2):
        fill += f"mov.b64 %rd10, {descriptor(32 * step)}; mov.b64 %rd11, {descriptor(OPERAND + 64 * step)};\n"
        fill += f"mov.b32 %r11, {idesc | step}; setp.ne.u32 %p4, {step}, 0;\n"
        fill += (
            "tcgen05.mma.sp.cta_group::1.kind::f16 [%r6], %rd10, %rd11, [%r16], %r11, {0, 0, 0, 0}, %p4;\n"
        )
    rest = COMMIT.format(1, "", "") + "ISSUED:\n" + WAIT + store_accumulator(32)
    stored, b = reference(data, 128, 32)
    full = np.zeros((128, 16, 4))
    full[::2, :, :2] = stored[::2, :32].reshape(64, 16, 2)
    full[1::2, :, 2:] = stored[1::2, :32].reshape(64, 16, 2)
    for out in outcomes(fill + rest, data, (128, 32), range(2)):
        np.testing.assert_array_equal(out, full.reshape(128, 64) @ b.T)


# ---- allocation --------------------------------------------------------------------------------------------


def test_allocation_waits_for_a_deallocation():
    body = """
  mov.b32 %r10, sm; mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; shl.b32 %r3, %r2, 2; add.u32 %r4, %r10, %r3;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], 512;
  ld.shared.b32 %r6, [%r4];
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 512;
"""
    for seed in range(4):
        report = launch(body, block=(128, 1, 1), seed=seed)
        assert report.tmem_columns == 512


def test_allocation_that_can_never_succeed_is_a_deadlock():
    body = (
        "mov.b32 %r10, sm;\n" + "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10], 512;\n" * 2
    )
    with pytest.raises(Deadlock, match=r"tcgen05\.alloc of 512 columns; allocated columns: 0-511"):
        launch(body)


PAIR = "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r10], {};\n"
TWO = {"grid": (2, 1, 1), "cluster": (2, 1, 1)}


def test_pair_allocation_needs_both_ctas():
    lonely = "mov.b32 %r10, sm; mov.u32 %r3, %cluster_ctarank; setp.ne.u32 %p1, %r3, 0; @%p1 bra END;\n"
    with pytest.raises(Deadlock, match="for the peer CTA's to join"):
        launch(lonely + PAIR.format(64) + "END:\n", **TWO)
    with pytest.raises(TmemFault, match="has no peer"):
        launch("mov.b32 %r10, sm;\n" + PAIR.format(64))
    sizes = "mov.b32 %r10, sm; mov.u32 %r3, %cluster_ctarank; shl.b32 %r4, 32, %r3;\n"
    with pytest.raises(TmemFault, match=r"but (32|64) in the peer CTA"):
        launch(sizes + PAIR.format("%r4"), **TWO)


F16_MMA = "tcgen05.mma.cta_group::1.kind::f16 [%r6], %rd9, %rd9, %r9, %p9"
NVF4_MMA = "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale [%r6], %rd9, %rd9, %r9, [%r6], [%r6], %p9;"
SPARSE_SHIFT = "tcgen05.mma.sp.cta_group::1.kind::f16.ashift [%r6], [%r6], %rd9, [%r6], %r9, %p9;"


@pytest.mark.parametrize(
    "line, error, message",
    [
        (COMMIT.format(2, "", ""), TmemFault, "cta_group::2 after"),
        ("tcgen05.shift.cta_group::1.down [%r7];", TmemFault, "multiple of 32"),
        ("tcgen05.cp.cta_group::1.32x128b [%r6], %rd9;", UnsupportedInstruction, "32x128b"),
        (SPARSE_SHIFT, UnsupportedInstruction, r"mma\.sp with \.ashift"),
        (F16_MMA + ", 16;", BadDescriptor, "scale-input-d 16"),
        (F16_MMA + ";", BadDescriptor, "M = 0"),
        (NVF4_MMA, UnsupportedInstruction, "scale vector size unspecified"),
    ],
)
def test_misuse_is_named(line, error, message):
    middle = f"mov.b32 %r9, 0; mov.b64 %rd9, 0; setp.eq.u32 %p9, 0, 1; add.u32 %r7, %r6, {16 << 16};\n"
    with pytest.raises(error, match=message) as caught:
        run_kernel(middle + ISSUER + line + "\nISSUED:\n", np.zeros(2048, np.uint8), np.zeros(4, np.uint32))
    assert caught.value.where.kernel == "kernel" and caught.value.where.ptx_line


# ---- warp-level matrices -----------------------------------------------------------------------------------


def test_ldmatrix_and_mma_sync():
    """A 16x16 row-major times B 16x8 row-major: B is loaded transposed."""
    body = """
  mov.b32 %r10, sm; mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [data]; ld.param.u64 %rd2, [out];
  mul.wide.u32 %rd3, %r1, 16; add.s64 %rd4, %rd1, %rd3; shl.b32 %r2, %r1, 4; add.u32 %r3, %r10, %r2;
  ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd4]; st.shared.v4.b32 [%r3], {%r20, %r21, %r22, %r23};
  ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd4+512]; st.shared.v4.b32 [%r3+512], {%r20, %r21, %r22, %r23};
  bar.sync 0;
  and.b32 %r4, %r1, 15; shl.b32 %r5, %r4, 5; shr.u32 %r6, %r1, 4; shl.b32 %r6, %r6, 4;
  add.u32 %r7, %r10, %r5; add.u32 %r8, %r7, %r6;
  ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r30, %r31, %r32, %r33}, [%r8];
  shl.b32 %r9, %r4, 4; add.u32 %r9, %r9, %r10;
  ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r34, %r35}, [%r9+512];
  mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4},
    {%r30, %r31, %r32, %r33}, {%r34, %r35}, {0f3F800000, 0f3F800000, 0f3F800000, 0f3F800000};
  shr.u32 %r11, %r1, 2; and.b32 %r12, %r1, 3; shl.b32 %r13, %r11, 3; mad.lo.u32 %r13, %r12, 2, %r13;
  mul.wide.u32 %rd5, %r13, 4; add.s64 %rd6, %rd2, %rd5;
  st.global.v2.b32 [%rd6], {%f1, %f2}; st.global.v2.b32 [%rd6+256], {%f3, %f4};
"""
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 9, (16, 16)).astype(np.float16), rng.integers(-8, 9, (16, 8)).astype(np.float16)
    data = np.zeros(1024, np.uint8)
    data[:512], data[512:768] = a.view(np.uint8).reshape(-1), b.view(np.uint8).reshape(-1)
    out = np.zeros((16, 8), np.float32)
    report = launch(body, {"data": data, "out": out})
    np.testing.assert_array_equal(out, a.astype(np.float32) @ b.astype(np.float32) + 1)
    assert report.mma_flops == 2 * 16 * 8 * 16
