"""wgmma against element-by-element models of its fragments and shared-memory layouts, and its asynchrony."""

import numpy as np
import pytest
from helpers.ptx_launch import launch

from warpspec.sim import formats
from warpspec.sim.errors import BadDescriptor, Deadlock, RegisterHazard, UnsupportedInstruction

M, THREADS = 64, 128
ROW_BYTES = 32  # of one instruction's K
SWIZZLE_WIDTH = {
    0: 16,
    1: 128,
    2: 64,
    3: 32,
}  # bytes of the contiguous dimension in an atom, by descriptor field
B_AT = 16 * 1024  # offset of B in the shared array, A is at 0
SMEM_BYTES = 48 * 1024
SPARE = 512  # a fifth warp copies beyond the 48 KB
NUMPY = {"f16": np.float16, "s8": np.int8, "u8": np.uint8}


def encode(values, fmt):
    """Bytes of small integers in a format, one element a row of the last axis."""
    if fmt in NUMPY:
        return values.astype(NUMPY[fmt])[..., None].view(np.uint8)
    if fmt in ("bf16", "tf32"):
        words = values.astype(np.float32)[..., None].view(np.uint8)
        return words[..., 2:] if fmt == "bf16" else words
    return formats.encode(values.astype(np.float32), formats.FORMATS[fmt]).astype(np.uint8)[..., None]


def place(values, fmt, swizzle, mn_major):
    """(bytes of shared memory, leading offset, stride offset) of a [rows, K] operand in a canonical layout."""
    raw = encode(values.T if mn_major else values, fmt)  # [outer, contiguous, element bytes]
    outer, inner, size = raw.shape
    width = SWIZZLE_WIDTH[swizzle]
    atom = 8 * width
    blocks_in, blocks_out = -(-inner * size // width), -(-outer // 8)
    smem = np.zeros(blocks_in * blocks_out * atom, np.uint8)
    for o in range(outer):
        for i in range(inner):
            block = (i * size // width) * blocks_out + o // 8  # blocks along the outer dimension are adjacent
            address = block * atom + o % 8 * width + i * size % width
            if swizzle:
                address ^= (address >> 7 & (width // 16 - 1)) << 4
            smem[address : address + size] = raw[o, i]
    along_in, along_out = blocks_out * atom, atom
    if swizzle == 0 and mn_major:
        return smem, along_out, along_in
    return smem, along_in, along_out


def descriptor(start, leading, stride, swizzle):
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | swizzle << 62


def accumulator_places(n):
    """(row, column) arrays [registers, threads] of a float32 or int32 accumulator, from the ISA's figure."""
    register, thread = np.meshgrid(np.arange(n // 2), np.arange(THREADS), indexing="ij")
    warp, lane = thread // 32, thread % 32
    row = 16 * warp + lane // 4 + 8 * (register // 2 % 2)
    return row, 8 * (register // 4) + 2 * (lane % 4) + register % 2


def fragment_words(a, fmt):
    """uint32[4, 128]: A [64, K] as the threads' four registers, from the ISA's figure."""
    raw = encode(a, fmt)
    per_word = 4 // raw.shape[-1]
    words = np.zeros((4, THREADS), np.uint32)
    for register in range(4):
        for thread in range(THREADS):
            lane = thread % 32
            row = 16 * (thread // 32) + lane // 4 + 8 * (register % 2)
            column = (lane % 4 + 4 * (register // 2)) * per_word
            words[register, thread] = raw[row, column : column + per_word].reshape(4).view(np.uint32)[0]
    return words


def names(prefix, count, first=0):
    return "{" + ", ".join(f"{prefix}{i}" for i in range(first, first + count)) + "}"


COPY_IN = (
    "mov.u32 %r126, %tid.x; mov.u32 %r125, sm; mad.lo.u32 %r125, %r126, 16, %r125;"
    "ld.param.u64 %rd60, [smem]; mul.wide.u32 %rd61, %r126, 16; add.u64 %rd60, %rd60, %rd61;"
    + "".join(
        f"ld.global.v4.b32 {{%r120, %r121, %r122, %r123}}, [%rd60+{at}]; "
        f"st.shared.v4.b32 [%r125+{at}], {{%r120, %r121, %r122, %r123}};"
        for at in range(0, SMEM_BYTES, THREADS * 16)
    )
    + "fence.proxy.async; bar.sync 0; mov.u32 %r125, sm; shr.u32 %r125, %r125, 4; cvt.u64.u32 %rd62, %r125;"
    "mul.wide.u32 %rd63, %r126, 4;"
)


def memory_registers(kind, name, count, first=0, register="%f", at=0):
    """Loads or stores registers from or to rows `at` on of uint32[rows, 128]."""
    out = f"ld.param.u64 %rd59, [{name}]; add.u64 %rd59, %rd59, %rd63;"
    for i in range(count):
        place_ = f"[%rd59+{(at + i) * THREADS * 4}]"
        if kind == "ld":
            out += f"ld.global.b32 {register}{first + i}, {place_};"
        else:
            out += f"st.global.b32 {place_}, {register}{first + i};"
    return out


def run(
    a, b, c, *, d="f32", fmt="bf16", fmt_b=None, swizzle=1, majors=(0, 0), registers=False, negate=1, seed=0
):
    """D [64, N] of one instruction; c None: the accumulator is not read (and is NaN)."""
    n, fmt_b = len(b), fmt_b or fmt
    words = n // 4 if d == "f16" else n // 2
    row, column = accumulator_places(n)
    accumulator = np.full((n // 2, THREADS), np.nan, np.float32)
    if c is not None:
        accumulator = c[row, column].astype(np.int32 if d == "s32" else np.float32)
    if d == "f16":  # registers 2i and 2i + 1 of the picture share a word
        halves = np.ascontiguousarray(
            accumulator.astype(np.float16).reshape(-1, 2, THREADS).transpose(0, 2, 1)
        )
        accumulator = halves.view(np.uint32)[..., 0]
    arrays = {
        "smem": np.zeros(SMEM_BYTES + SPARE, np.uint8),
        "d": np.ascontiguousarray(accumulator).view(np.uint32).copy(),
    }
    k = a.shape[1]
    left = names("%r", 4)
    body = COPY_IN + memory_registers("ld", "d", words)
    if registers:
        arrays["a"] = fragment_words(a, fmt)
        body += memory_registers("ld", "a", 4, register="%r")
    else:
        image, leading, stride = place(a, fmt, swizzle, majors[0])
        arrays["smem"][: image.size] = image
        body += f"add.u64 %rd1, %rd62, {descriptor(0, leading, stride, swizzle):#x};"
        left = "%rd1"
    image, leading, stride = place(b, fmt_b, swizzle, majors[1])
    arrays["smem"][B_AT : B_AT + image.size] = image
    body += f"add.u64 %rd2, %rd62, {descriptor(B_AT, leading, stride, swizzle):#x};"
    flags = "" if d == "s32" else f", {negate}, 1"
    if fmt in ("f16", "bf16"):
        flags += f", {majors[1]}" if registers else f", {majors[0]}, {majors[1]}"
    body += (
        f"setp.ne.b32 %p1, {int(c is not None)}, 0; wgmma.fence.sync.aligned;"
        f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d}.{fmt}.{fmt_b} {names('%f', words)}, {left}, %rd2, %p1{flags};"
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
        + memory_registers("st", "d", words)
    )
    launch(body, arrays, variables=VARIABLES, block=(THREADS, 1, 1), seed=seed)
    got = arrays["d"]
    out = np.empty((M, n))
    if d == "f16":
        got = got[..., None].view(np.float16).transpose(0, 2, 1).reshape(n // 2, THREADS)
    else:
        got = got.view(np.int32 if d == "s32" else np.float32)
    out[row, column] = got
    return out


VARIABLES = f".shared .align 1024 .b8 sm[{SMEM_BYTES + SPARE}];"
DEPTH = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}


def problem(n, k, seed=0, low=-3):
    """Small integers, exact in every format."""
    rng = np.random.default_rng(seed)
    return [rng.integers(low, 4, shape) for shape in ((M, k), (n, k), (M, n))]


@pytest.mark.parametrize("registers", [False, True], ids=["A shared", "A registers"])
@pytest.mark.parametrize("n", [8, 24, 128, 248, 256])
@pytest.mark.parametrize("fmt", ["bf16", "f16"])
def test_shapes(fmt, n, registers):
    a, b, c = problem(n, 16, n)
    np.testing.assert_array_equal(run(a, b, c, fmt=fmt, registers=registers), a @ b.T + c)


@pytest.mark.parametrize("fmt,fmt_b,d", [
    ("tf32", "tf32", "f32"), ("e4m3", "e5m2", "f32"), ("e5m2", "e5m2", "f16"), ("f16", "f16", "f16"),
    ("e4m3", "e4m3", "f16"),
    ("s8", "u8", "s32"), ("u8", "s8", "s32"),
])  # fmt: skip
@pytest.mark.parametrize("registers", [False, True], ids=["A shared", "A registers"])
def test_formats(fmt, fmt_b, d, registers):
    a, b, c = problem(16, DEPTH[fmt])
    a, b = (np.abs(x) if f == "u8" else x for x, f in ((a, fmt), (b, fmt_b)))
    np.testing.assert_array_equal(run(a, b, c, d=d, fmt=fmt, fmt_b=fmt_b, registers=registers), a @ b.T + c)


@pytest.mark.parametrize("swizzle", SWIZZLE_WIDTH)
@pytest.mark.parametrize("majors", [(0, 0), (1, 0), (0, 1), (1, 1)], ids=["KK", "MK", "KN", "MN"])
def test_layouts(swizzle, majors):
    a, b, c = problem(64, 16, swizzle)
    np.testing.assert_array_equal(run(a, b, c, swizzle=swizzle, majors=majors), a @ b.T + c)


def test_b_mn_major_with_a_in_registers():
    a, b, c = problem(128, 16)
    np.testing.assert_array_equal(run(a, b, c, majors=(0, 1), registers=True), a @ b.T + c)


def test_accumulator_not_read_and_negated():
    a, b, c = problem(32, 16)
    np.testing.assert_array_equal(run(a, b, None), a @ b.T)
    np.testing.assert_array_equal(run(a, b, c, negate=-1), c - a @ b.T)


# ---- several instructions, groups, hazards ------------------------------------------------------------------

N = 32
WORDS = N // 2


def multiply(d_first, offset=0, use_d=1):
    """wgmma of A and B, both `offset` bytes on, into %f registers from d_first."""
    return (
        f"setp.ne.b32 %p1, {use_d}, 0; add.u64 %rd3, %rd1, {offset >> 4}; add.u64 %rd4, %rd2, {offset >> 4};"
        f"wgmma.mma_async.sync.aligned.m64n{N}k16.f32.bf16.bf16 {names('%f', WORDS, d_first)}, "
        "%rd3, %rd4, %p1, 1, 1, 0, 0;"
    )


COMMIT = "wgmma.commit_group.sync.aligned;"


def wait(newest):
    return f"wgmma.wait_group.sync.aligned {newest};"


def run_body(body, seed=0, block=THREADS, outputs=1, draw=lambda rng, shape: rng.integers(-3, 4, shape)):
    """([outputs, 64, N], A [64, 64], B [N, 64]) of a body that stores with memory_registers('st', 'd', ...)."""
    rng = np.random.default_rng(7)
    a, b = draw(rng, (M, 64)), draw(rng, (N, 64))
    arrays = {
        "smem": np.zeros(SMEM_BYTES + SPARE, np.uint8),
        "d": np.full((outputs * WORDS, THREADS), 0x7FC00000, np.uint32),
    }
    start = ""
    for register, at, values in (("%rd1", 0, a), ("%rd2", B_AT, b)):
        image, leading, stride = place(values, "bf16", 1, False)
        arrays["smem"][at : at + image.size] = image
        start += f"add.u64 {register}, %rd62, {descriptor(at, leading, stride, 1):#x};"
    launch(COPY_IN + start + body, arrays, variables=VARIABLES, block=(block, 1, 1), seed=seed)
    row, column = accumulator_places(N)
    out = np.empty((outputs, M, N))
    out[:, row, column] = arrays["d"].view(np.float32).reshape(outputs, WORDS, THREADS)
    return out, a, b


STEPS = range(0, 128, ROW_BYTES)  # byte offsets of the K-16 slices in a 128-byte row
STORE = memory_registers("st", "d", WORDS)


@pytest.mark.parametrize("seed", range(3))
def test_a_chain_accumulates(seed):
    chain = "".join(multiply(0, at, use_d=int(at > 0)) for at in STEPS)
    out, a, b = run_body(chain + COMMIT + wait(0) + STORE, seed)
    np.testing.assert_array_equal(out[0], a @ b.T)


@pytest.mark.parametrize("seed", range(4))
def test_wait_lets_the_newest_groups_pend(seed):
    body = multiply(0, 0, 0) + COMMIT + multiply(32, 32, 0) + COMMIT + wait(1) + STORE
    body += wait(0) + memory_registers("st", "d", WORDS, first=32, at=WORDS)
    out, a, b = run_body(body, seed, outputs=2)
    np.testing.assert_array_equal(out[0], a[:, :16] @ b[:, :16].T)
    np.testing.assert_array_equal(out[1], a[:, 16:32] @ b[:, 16:32].T)


@pytest.mark.parametrize(
    "use", ["add.f32 %f64, %f3, %f3;", "st.shared.b32 [sm], %f3;", "setp.gt.f32 %p2, %f3, 0f00000000;"]
)
@pytest.mark.parametrize(
    "before", [COMMIT, COMMIT + wait(1), ""], ids=["no wait", "waits for an older group", "not committed"]
)
def test_an_accumulator_read_too_early(before, use):
    with pytest.raises(RegisterHazard, match=r"%f3 is read before wgmma.wait_group"):
        run_body(multiply(0, 0, 0) + before + use + (COMMIT if not before else "") + wait(0))


def test_an_accumulator_in_flight_may_be_moved():
    moves = "".join(f"mov.b32 %f{32 + i}, %f{i};" for i in range(WORDS))
    body = multiply(0, 0, 0) + moves + multiply(32, 32) + COMMIT + wait(0)
    body += "".join(f"mov.b32 %f{i}, %f{32 + i};" for i in range(WORDS)) + STORE
    out, a, b = run_body(body)
    np.testing.assert_array_equal(out[0], a[:, :32] @ b[:, :32].T)


def test_last_bits_do_not_depend_on_when_a_warp_moves_its_accumulator():
    """A warp that gets there before the product has taken effect has its own rows computed at once."""
    moves = "".join(f"mov.b32 %f{64 + i}, %f{i};" for i in range(WORDS))
    body = "".join(multiply(0, at, use_d=int(at > 0)) for at in STEPS) + COMMIT
    body += "bar.sync 0;" + moves + wait(0) + STORE
    first, *others = (
        run_body(body, seed, draw=lambda rng, shape: rng.standard_normal(shape))[0] for seed in range(8)
    )
    for out in others:
        np.testing.assert_array_equal(out, first)


def test_a_chain_goes_on_after_its_accumulator_was_moved():
    body = multiply(0, 0, 0) + "mov.b32 %f64, %f0;" + multiply(0, 32) + COMMIT + wait(0) + STORE
    out, a, b = run_body(body)
    np.testing.assert_array_equal(out[0], a[:, :32] @ b[:, :32].T)


def test_shared_memory_overwritten_before_the_wait_is_seen():
    clear = "mov.b32 %r100, 0; mov.u32 %r101, sm; mad.lo.u32 %r101, %r126, 64, %r101;" + "".join(
        f"st.shared.v4.b32 [%r101+{at}], {{%r100, %r100, %r100, %r100}};" for at in range(0, 64, 16)
    )
    broken = multiply(0, 0, 0) + COMMIT + clear + wait(0) + STORE
    right = multiply(0, 0, 0) + COMMIT + wait(0) + "bar.sync 0;" + clear + STORE
    wrong = 0
    for seed in range(6):
        out, a, b = run_body(right, seed)
        np.testing.assert_array_equal(out[0], a[:, :16] @ b[:, :16].T)
        out, a, b = run_body(broken, seed)
        wrong += not np.array_equal(out[0], a[:, :16] @ b[:, :16].T)
    assert wrong >= 3


# ---- what is refused ----------------------------------------------------------------------------------------


def test_a_warp_outside_every_warpgroup():
    with pytest.raises(BadDescriptor, match=r"warp 4 .* no whole warpgroup"):
        run_body(multiply(0, 0, 0) + COMMIT + wait(0), block=THREADS + 32)


def test_warps_that_execute_different_instructions():
    skewed = (
        "shr.u32 %r100, %r126, 5; cvt.u64.u32 %rd5, %r100; and.b64 %rd5, %rd5, 2; add.u64 %rd1, %rd1, %rd5;"
    )
    with pytest.raises(BadDescriptor, match=r"different wgmma\.mma_async"):
        run_body(skewed + multiply(0, 0, 0) + COMMIT + wait(0))


def test_a_warp_that_stays_away():
    body = "setp.lt.u32 %p3, %r126, 32; @%p3 bra END;" + multiply(0, 0, 0) + COMMIT + wait(0) + "END:"
    with pytest.raises(Deadlock, match="1 other warps of the warpgroup have not committed"):
        run_body(body)


@pytest.mark.parametrize("bit", [14, 30, 47, 52, 61])
def test_reserved_bits_of_a_descriptor(bit):
    with pytest.raises(BadDescriptor, match="bits that must be 0"):
        run_body(f"or.b64 %rd1, %rd1, {1 << bit:#x};" + multiply(0, 0, 0) + COMMIT + wait(0))


def test_a_descriptor_beyond_shared_memory():
    with pytest.raises(Exception, match="a matrix descriptor reaches shared-memory byte"):
        run_body("or.b64 %rd1, %rd1, 0x3fff;" + multiply(0, 0, 0) + COMMIT + wait(0))


@pytest.mark.parametrize("opcode", [
    "wgmma.mma_async.sp.sync.aligned.m64n16k32.f32.bf16.bf16",
    "wgmma.mma_async.sync.aligned.m64n16k256.s32.b1.b1.and.popc",
    "wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16", "wgmma.mma_async.sync.aligned.m64n16k16.f16.bf16.bf16",
])  # fmt: skip
def test_unsupported_forms(opcode):
    body = f"setp.ne.b32 %p1, 1, 0; {opcode} {names('%f', WORDS)}, %rd1, %rd2, %p1, 1, 1, 0, 0;"
    with pytest.raises(UnsupportedInstruction, match="wgmma"):
        run_body(body)
