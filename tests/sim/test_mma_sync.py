"""mma.sync, ldmatrix, stmatrix and movmatrix against the ISA's fragment tables, element by element."""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers.tcgen05_model import BITS, cached_value

from warpspec.sim.errors import MemoryFault, UnsupportedInstruction
from warpspec.sim.families import matrix, mma_sync
from warpspec.sim.instruction import Instr, Mem, Reg, Vec

FULL = 0xFFFFFFFF
BASE = 1024


class FakeWarp:
    """Registers by name, uint32[32] each; addresses as given."""

    def __init__(self, **registers):
        self.registers = dict(registers)

    def read_vec(self, vec):
        items = vec.items if isinstance(vec, Vec) else (vec,)
        return np.stack([self.registers[item.name] for item in items])

    def write_vec(self, vec, values, mask):
        items = vec.items if isinstance(vec, Vec) else (vec,)
        assert values.shape == (len(items), 32) and mask == FULL
        for item, row in zip(items, values, strict=True):
            self.registers[item.name] = np.array(row, np.uint32)

    def address(self, operand):
        return self.registers[operand.base.name].astype(np.uint64)


def fake_machine(smem):
    cta = SimpleNamespace(smem=smem)

    def shared(w, address, nbytes):
        offset = address & 0xFFFFFF
        if offset < BASE or offset + nbytes > len(smem):
            raise MemoryFault("outside")
        return smem[offset : offset + nbytes]

    return SimpleNamespace(
        order=None, stats=SimpleNamespace(mma_flops=0), shared=shared, cta_at=lambda w, a: (cta, a & 0xFFFFFF)
    )


def instr(opcode, *operands):
    return Instr(0, opcode, tuple(opcode.split(".")), operands)


def vec(name, count):
    return Vec(tuple(Reg(f"{name}{i}") for i in range(count)))


def random_words(rng, fmt, count):
    words = rng.integers(0, 1 << 32, (count, 32), dtype=np.uint32)
    if fmt in ("f16", "bf16", "tf32", "f32"):
        words &= np.uint32(0xBFFFBFFF if fmt != "tf32" else 0xBFFFFFFF)  # no infinities, moderate
        words = np.where(words & 0x7F800000 > 0x40000000, words & 0xC0FFC0FF, words)
    if fmt in ("e4m3", "e5m2"):
        words &= np.uint32(0xB7B7B7B7)
    return words.astype(np.uint32)


def element(words, fmt, register, thread, position):
    bits = BITS[fmt]
    return cached_value(int(words[register, thread]) >> position * bits & ((1 << bits) - 1), fmt)


def positions(fmt, k, operand):
    """(register, thread, position in the register) -> (row, k) of A or (column, k) of B, from the ISA."""
    bits = BITS[fmt]
    per_word = 32 // bits
    out = {}
    registers = (16 if operand == "a" else 8) * k * bits // 32 // 32
    for register in range(registers):
        for thread in range(32):
            for i in range(per_word):
                group, in_group = thread >> 2, thread & 3
                if operand == "a":
                    row = group + 8 * (register % 2)
                    column = in_group * per_word + i + 4 * per_word * (register // 2)
                    out[register, thread, i] = (row, column)
                else:
                    out[register, thread, i] = (group, in_group * per_word + i + 4 * per_word * register)
    return out


FLOAT_CASES = [
    ("m16n8k16", "f16", "f32"),
    ("m16n8k8", "f16", "f32"),
    ("m16n8k16", "f16", "f16"),
    ("m16n8k16", "bf16", "f32"),
    ("m16n8k8", "bf16", "f32"),
    ("m16n8k4", "tf32", "f32"),
    ("m16n8k8", "tf32", "f32"),
    ("m16n8k32", "e4m3", "f32"),
    ("m16n8k32", "e5m2", "f16"),
    ("m16n8k16", "e4m3", "f32"),
]


def operands_of(rng, fmt_a, fmt_b, k):
    where_a, where_b = positions(fmt_a, k, "a"), positions(fmt_b, k, "b")
    a_words = random_words(rng, fmt_a, 1 + max(r for r, _, _ in where_a))
    b_words = random_words(rng, fmt_b, 1 + max(r for r, _, _ in where_b))
    a, b = np.full((16, k), np.nan), np.full((8, k), np.nan)
    for (register, thread, i), (row, column) in where_a.items():
        a[row, column] = element(a_words, fmt_a, register, thread, i)
    for (register, thread, i), (column, row) in where_b.items():
        b[column, row] = element(b_words, fmt_b, register, thread, i)
    assert not np.isnan(a).any() and not np.isnan(b).any()
    return a_words, b_words, a, b


def run_mma(opcode, a_words, b_words, c_words):
    registers = {
        f"{n}{i}": row
        for n, words in (("a", a_words), ("b", b_words), ("c", c_words))
        for i, row in enumerate(words)
    }
    w = FakeWarp(**registers)
    m = fake_machine(np.zeros(2048, np.uint8))
    count = len(c_words)
    mma_sync.mma_sync(
        m,
        w,
        instr(opcode, vec("d", count), vec("a", len(a_words)), vec("b", len(b_words)), vec("c", count)),
        FULL,
    )
    return np.stack([w.registers[f"d{i}"] for i in range(count)]), m.stats.mma_flops


@pytest.mark.parametrize("shape, fmt, accumulator", FLOAT_CASES)
def test_float_mma(shape, fmt, accumulator):
    rng = np.random.default_rng(len(shape) + len(fmt))
    k = int(shape[6:])
    a_words, b_words, a, b = operands_of(rng, fmt, fmt, k)
    c = rng.normal(size=(16, 8)).astype(np.float32)
    c_words = np.zeros((4 if accumulator == "f32" else 2, 32), np.uint32)
    for thread in range(32):
        for i in range(4):
            row, column = (thread >> 2) + 8 * (i // 2), (thread & 3) * 2 + i % 2
            if accumulator == "f32":
                c_words[i, thread] = c[row, column].view(np.uint32)
            else:
                c[row, column] = np.float16(c[row, column])
                c_words[i // 2, thread] |= int(np.float16(c[row, column]).view(np.uint16)) << 16 * (i % 2)
    got, flops = run_mma(
        f"mma.sync.aligned.{shape}.row.col.{accumulator}.{fmt}.{fmt}.{accumulator}", a_words, b_words, c_words
    )
    expected = a @ b.T + c
    tolerance = (
        1e-5 * (np.abs(a) @ np.abs(b).T + np.abs(c))
        if accumulator == "f32"
        else np.abs(expected) / 1024 + 1e-4
    )
    for thread in range(32):
        for i in range(4):
            row, column = (thread >> 2) + 8 * (i // 2), (thread & 3) * 2 + i % 2
            if accumulator == "f32":
                value = float(got[i, thread].view(np.float32))
            else:
                value = float(np.uint16(got[i // 2, thread] >> 16 * (i % 2) & 0xFFFF).view(np.float16))
            assert abs(value - expected[row, column]) <= tolerance[row, column]
    assert flops == 2 * 16 * 8 * k


@pytest.mark.parametrize("k", [16, 32])
@pytest.mark.parametrize("fmt_a, fmt_b", [("s8", "s8"), ("u8", "s8"), ("u8", "u8")])
@pytest.mark.parametrize("saturate", [False, True])
def test_integer_mma(fmt_a, fmt_b, k, saturate):
    rng = np.random.default_rng(k)
    a_words, b_words, a, b = operands_of(rng, fmt_a, fmt_b, k)
    c_words = rng.integers(0, 1 << 32, (4, 32), dtype=np.uint32)
    c_words[0] = 0x7FFFFFF0
    c_words[1] = 0x80000010
    opcode = f"mma.sync.aligned.m16n8k{k}.row.col.{'satfinite.' if saturate else ''}s32.{fmt_a}.{fmt_b}.s32"
    got, _ = run_mma(opcode, a_words, b_words, c_words)
    product = (a @ b.T).astype(np.int64)
    for thread in range(32):
        for i in range(4):
            total = int(product[(thread >> 2) + 8 * (i // 2), (thread & 3) * 2 + i % 2])
            total += int(c_words[i, thread].view(np.int32))
            expected = max(-(1 << 31), min((1 << 31) - 1, total)) if saturate else total
            assert got[i, thread] == expected & FULL


@pytest.mark.parametrize(
    "opcode",
    [
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16",
        "mma.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64",
        "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32",
        "mma.sp::ordered_metadata.sync.aligned.kind::f8f6f4.m16n8k64.row.col.f32.e4m3.e4m3.f32",
    ],
)
def test_unsupported_forms_are_named(opcode):
    with pytest.raises(UnsupportedInstruction, match="mma"):
        mma_sync.form(tuple(opcode.split(".")))


# ---- ldmatrix and its kin ----------------------------------------------------------------------------------


def scattered_rows(rng, count):
    """Row addresses in random order, and shared memory with random bytes."""
    smem = rng.integers(0, 256, 8192, dtype=np.uint8)
    address = (BASE + 16 * rng.permutation(400)[:32]).astype(np.uint32)
    address[count:] = 7  # addresses that must not be used
    return smem, address


def load(opcode, smem, address, registers):
    w = FakeWarp(p=address)
    matrix.ldmatrix(fake_machine(smem), w, instr(opcode, vec("r", registers), Mem(Reg("p"))), FULL)
    return np.stack([w.registers[f"r{i}"] for i in range(registers)])


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_8x8(count, trans):
    smem, address = scattered_rows(np.random.default_rng(count), 8 * count)
    opcode = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16"
    got = load(opcode, smem, address, count)
    for i in range(count):
        for thread in range(32):
            for half in range(2):
                row, column = thread // 4, thread % 4 * 2 + half
                if trans:
                    row, column = column, row
                at = int(address[8 * i + row]) + 2 * column
                assert got[i, thread] >> 16 * half & 0xFFFF == int(smem[at]) | int(smem[at + 1]) << 8


@pytest.mark.parametrize("count", [1, 2])
def test_ldmatrix_16x16_bytes(count):
    smem, address = scattered_rows(np.random.default_rng(count), 16 * count)
    got = load(f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8", smem, address, 2 * count)
    for i in range(count):
        for half in range(2):
            for thread in range(32):
                for byte in range(4):  # thread holds row GROUP of the transposed matrix, four columns
                    row, column = thread % 4 * 4 + byte, thread // 4 + 8 * half
                    assert (
                        got[2 * i + half, thread] >> 8 * byte & 0xFF == smem[address[16 * i + row] + column]
                    )


@pytest.mark.parametrize("source, bits", [("b4x16_p64", 4), ("b6x16_p32", 6)])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_8x16_decompresses(source, bits, count):
    smem, address = scattered_rows(np.random.default_rng(bits), 8 * count)
    got = load(f"ldmatrix.sync.aligned.m8n16.x{count}.shared.b8x16.{source}", smem, address, count)
    for i in range(count):
        for thread in range(32):
            row = int.from_bytes(smem[address[8 * i + thread // 4] :][:16].tobytes(), "little")
            for byte in range(4):
                code = row >> bits * (thread % 4 * 4 + byte) & ((1 << bits) - 1)
                assert got[i, thread] >> 8 * byte & 0xFF == code


def store(opcode, smem, address, values):
    w = FakeWarp(p=address, **{f"r{i}": row for i, row in enumerate(values)})
    matrix.stmatrix(fake_machine(smem), w, instr(opcode, Mem(Reg("p")), vec("r", len(values))), FULL)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_stmatrix_8x8_undoes_ldmatrix(count, trans):
    rng = np.random.default_rng(count)
    smem, address = scattered_rows(rng, 8 * count)
    before = smem.copy()
    values = rng.integers(0, 1 << 32, (count, 32), dtype=np.uint32)
    suffix = f"m8n8.x{count}{'.trans' if trans else ''}.shared.b16"
    store(f"stmatrix.sync.aligned.{suffix}", smem, address, values)
    np.testing.assert_array_equal(load(f"ldmatrix.sync.aligned.{suffix}", smem, address, count), values)
    touched = {int(a) + i for a in address[: 8 * count] for i in range(16)}
    outside = [i for i in range(len(smem)) if i not in touched]
    assert (smem[outside] == before[outside]).all()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_16x8_bytes(count):
    rng = np.random.default_rng(count)
    smem, address = scattered_rows(rng, 8 * count)
    values = rng.integers(0, 1 << 32, (count, 32), dtype=np.uint32)
    store(f"stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8", smem, address, values)
    for i in range(count):
        for thread in range(32):
            for byte in range(4):  # the fragment of a 16x8 accumulator, stored by columns
                row, column = thread // 4 + byte // 2 * 8, thread % 4 * 2 + byte % 2
                assert smem[address[8 * i + column] + row] == values[i, thread] >> 8 * byte & 0xFF


def test_movmatrix_transposes():
    values = np.random.default_rng(0).integers(0, 1 << 32, 32, dtype=np.uint32)
    w = FakeWarp(a=values)
    matrix.movmatrix(None, w, instr("movmatrix.sync.aligned.m8n8.trans.b16", Reg("d"), Reg("a")), FULL)
    for thread in range(32):
        for half in range(2):
            row, column = thread // 4, thread % 4 * 2 + half
            source = int(values[column * 4 + row // 2]) >> 16 * (row % 2) & 0xFFFF
            assert int(w.registers["d"][thread]) >> 16 * half & 0xFFFF == source


def test_matrix_rows_are_checked():
    smem, address = scattered_rows(np.random.default_rng(0), 32)
    with pytest.raises(MemoryFault, match="aligned"):
        load("ldmatrix.sync.aligned.m8n8.x1.shared.b16", smem, address + np.uint32(8), 1)
    address[3] = 8192 - 8 & ~15
    load("ldmatrix.sync.aligned.m8n8.x1.shared.b16", smem, address, 1)
    address[3] = 8192
    with pytest.raises(MemoryFault):
        load("ldmatrix.sync.aligned.m8n8.x1.shared.b16", smem, address, 1)
    with pytest.raises(UnsupportedInstruction):
        load("ldmatrix.sync.aligned.m16n16.x4.trans.shared.b8", smem, address, 8)
