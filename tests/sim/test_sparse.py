"""mma.sp and wgmma.mma_async.sp against products of the dense matrix, whose elements are placed one by one."""

import numpy as np
import pytest
import torch
from helpers.ptx_launch import launch

from warpspec.sim.errors import BadDescriptor
from warpspec.sim.families import sparse

TYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "s8": torch.int8,
    "e4m3": torch.float8_e4m3fn,
}
SHAPES = [
    ("f16", 16, 0), ("f16", 16, 2), ("f16", 32, 1), ("bf16", 32, 0), ("tf32", 8, 3), ("tf32", 16, 1), ("s8", 32, 1),
    ("s8", 64, 0), ("e4m3", 64, 0),
]  # fmt: skip


def sparse_matrix(rng, rows, k, element):
    """Small integers, of each four (of tf32: two) columns half zero, and which columns are kept, by row."""
    group, keep = (2, 1) if element == "tf32" else (4, 2)
    full, kept = np.zeros((rows, k)), np.zeros((rows, k * keep // group), int)
    for row in range(rows):
        for first in range(0, k, group):
            columns = first + np.sort(rng.permutation(group)[:keep])
            at = first // group * keep
            kept[row, at : at + keep] = columns
            full[row, columns] = rng.integers(1, 5, keep) * rng.choice([-1, 1], keep)
    return full, kept


def fours(kept, element):
    """Each row's fours of bits: for 2:4 the two positions of four, for tf32 01 00 or 11 10."""
    if element == "tf32":
        return np.where(kept % 2, 0b1110, 0b0100)
    return kept[:, ::2] % 4 | kept[:, 1::2] % 4 << 2


def metadata_words(marks, element, selector, rng):
    """A warp's registers: which thread of each four has the marks of row g and of row g + 8. Other threads' do not
    matter. CUTLASS's comment (mma_sparse_sm89.h): with 8-bit elements thread 0 has row g, thread 1 row g + 8, threads 2
    and 3 their other columns; else a thread has four marks of row g, then four of row g + 8."""
    words = rng.integers(0, 1 << 32, (8, 4), dtype=np.uint32)
    threads = marks.shape[1] // 4
    for group in range(8):
        for thread in range(threads):
            if TYPES[element].itemsize == 1:
                own = marks[group + 8 * (thread % 2), thread // 2 * 8 : thread // 2 * 8 + 8]
            else:
                own = np.concatenate(
                    [marks[group + 8 * half, thread * 4 : thread * 4 + 4] for half in range(2)]
                )
            words[group, selector * threads + thread] = sum(int(m) << 4 * i for i, m in enumerate(own))
    return words.reshape(32)


def coded(values, element):
    return (
        torch.from_numpy(np.ascontiguousarray(values, np.float32))
        .to(TYPES[element])
        .view(torch.uint8)
        .numpy()
    )


def fragments(rows, row_halves):
    """Registers [n, 32] of a matrix as bytes [rows, bytes of K]: 4 bytes a thread, 16 a quad, rows 8 apart first."""
    parts = rows.reshape(row_halves, 8, -1, 4, 4)  # [row half, group, column half, thread, byte]
    return np.ascontiguousarray(parts.transpose(2, 0, 1, 3, 4)).view(np.uint32).reshape(-1, 32)


def names(first, count):
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


@pytest.mark.parametrize("ordered", ["", "::ordered_metadata"])
@pytest.mark.parametrize(("element", "k", "selector"), SHAPES)
def test_mma(element, k, selector, ordered):
    rng = np.random.default_rng(k + selector)
    a, kept = sparse_matrix(rng, 16, k, element)
    b = rng.integers(-4, 5, (8, k)).astype(float)
    arrays = {
        "a": fragments(coded(np.take_along_axis(a, kept, 1), element).reshape(16, -1), 2),
        "b": fragments(coded(b, element).reshape(8, -1), 1),
        "e": metadata_words(fours(kept, element), element, selector, rng),
        "d": np.zeros((4, 32), np.uint32),
    }
    d = "s32" if element == "s8" else "f32"
    body = "mov.u32 %r1, %laneid; mul.wide.u32 %rd9, %r1, 4;"
    for name, first in (("a", 10), ("b", 20), ("e", 30)):
        body += f"ld.param.u64 %rd1, [{name}]; add.u64 %rd1, %rd1, %rd9;"
        count = arrays[name].size // 32
        body += "".join(f"ld.global.b32 %r{first + i}, [%rd1+{128 * i}];" for i in range(count))
    body += (
        "".join(f"mov.b32 %r{i}, 0;" for i in range(40, 44))
        + (
            f"mma.sp{ordered}.sync.aligned.m16n8k{k}.row.col.{d}.{element}.{element}.{d} {names(40, 4)}, "
            f"{names(10, len(arrays['a']))}, {names(20, len(arrays['b']))}, {names(40, 4)}, %r30, {selector};"
            "ld.param.u64 %rd1, [d]; add.u64 %rd1, %rd1, %rd9;"
        )
        + "".join(f"st.global.b32 [%rd1+{128 * i}], %r{40 + i};" for i in range(4))
    )
    launch(body, arrays)
    got = arrays["d"].view(np.int32 if d == "s32" else np.float32).reshape(2, 2, 8, 4)
    assert (got.transpose(0, 2, 3, 1).reshape(16, 8) == a @ b.T).all()


def test_metadata_without_meaning():
    words = np.full(32, 0x44444444, np.uint32)
    words[5] = 0x44454444
    with pytest.raises(BadDescriptor, match="0b0101 of row 9"):
        sparse.dense(np.ones((16, 16), np.float32), sparse.fours(words, 0, 16, 32), 16)
    with pytest.raises(BadDescriptor, match="selector 2; with K = 32 of 16-bit elements it may be 0 to 1"):
        sparse.fours(words, 2, 16, 32)


CORE = 8 * 16  # bytes of a core matrix: 8 rows of 16 bytes
B_AT = 64 * 32  # of B in shared memory, after A
WARPGROUP = 128


def core_matrices(rows):
    """Bytes of K-major core matrices without a swizzle: those of all rows, then the next 16 bytes of K."""
    return np.ascontiguousarray(rows.reshape(len(rows), -1, 16).transpose(1, 0, 2)).reshape(-1)


@pytest.mark.parametrize(("element", "k", "selector"), [("f16", 32, 1), ("tf32", 16, 0), ("s8", 64, 0)])
def test_wgmma(element, k, selector):
    rng = np.random.default_rng(k)
    a, kept = sparse_matrix(rng, 64, k, element)
    b = rng.integers(-4, 5, (8, k)).astype(float)
    stored = coded(np.take_along_axis(a, kept, 1), element).reshape(64, -1)
    smem = np.concatenate([core_matrices(stored), core_matrices(coded(b, element).reshape(8, -1))])
    marks = fours(kept, element)
    words = [metadata_words(marks[16 * w : 16 * w + 16], element, selector, rng) for w in range(4)]
    arrays = {"smem": smem, "e": np.concatenate(words), "d": np.zeros((4, WARPGROUP), np.uint32)}
    descriptors = [at >> 4 | (leading >> 4) << 16 | (CORE >> 4) << 32
                   for at, leading in ((1024, 64 * 16), (1024 + B_AT, CORE))]  # fmt: skip
    d, signs = ("s32", "") if element == "s8" else ("f32", ", 1, 1" + ", 0, 0" * (element == "f16"))
    copies = "".join(
        f"ld.global.b32 %r3, [%rd1+{at}]; st.shared.b32 [%r2+{at}], %r3;" for at in range(0, smem.size, 512)
    )
    body = (
        "mov.u32 %r1, %tid.x; mul.wide.u32 %rd9, %r1, 4; mov.b32 %r2, sm; mad.lo.u32 %r2, %r1, 4, %r2;"
        f"ld.param.u64 %rd1, [smem]; add.u64 %rd1, %rd1, %rd9; {copies} fence.proxy.async; bar.sync 0;"
        "ld.param.u64 %rd1, [e]; add.u64 %rd1, %rd1, %rd9; ld.global.b32 %r4, [%rd1]; setp.ne.b32 %p1, 0, 0;"
        + "".join(f"mov.b32 %f{i}, 0;" for i in range(4))
        + f"mov.b64 %rd2, {descriptors[0]}; mov.b64 %rd3, {descriptors[1]}; wgmma.fence.sync.aligned;"
        f"wgmma.mma_async.sp.sync.aligned.m64n8k{k}.{d}.{element}.{element} {{%f0, %f1, %f2, %f3}}, %rd2, %rd3, %r4, "
        f"{selector}, %p1{signs}; wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
        "ld.param.u64 %rd1, [d]; add.u64 %rd1, %rd1, %rd9;"
        + "".join(f"st.global.b32 [%rd1+{4 * WARPGROUP * i}], %f{i};" for i in range(4))
    )
    launch(body, arrays, block=(WARPGROUP, 1, 1), target="sm_90a")
    got = arrays["d"].view(np.int32 if d == "s32" else np.float32).reshape(2, 2, 4, 8, 4)
    assert (got.transpose(2, 0, 3, 4, 1).reshape(64, 8) == a @ b.T).all()
