"""Reductions of bulk and tensor copies against Python integers and exact sums."""

import itertools

import numpy as np
import pytest
from helpers.tma_model import BASE, Memory

from warpspec.sim import tma
from warpspec.sim.errors import UnsupportedInstruction
from warpspec.sim.tma import TensorMap, reduction
from warpspec.sim.tma.descriptor import ELEMENT_BY_NAME


def _bf16(bits: int) -> float:
    return float(np.array([bits << 16], np.uint32).view(np.float32)[0])


def _to_bf16(value: float) -> int:
    """Nearest even by search, for finite values."""
    candidates = np.arange(0x7F80, dtype=np.uint32)
    magnitudes = (candidates << 16).view(np.float32).astype(np.float64)
    at = int(np.searchsorted(magnitudes, abs(value)))
    best = min(
        (c for c in (at - 1, at) if 0 <= c < 0x7F80), key=lambda c: (abs(magnitudes[c] - abs(value)), c & 1)
    )
    return best | (0x8000 if np.signbit(value) else 0)


def _reduce(operation: str, element: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Through a padded 2-D destination, as a tensor reduction does it."""
    rows = 4
    destination = np.full((rows, old.nbytes // rows + 32), 0xAB, np.uint8)
    view = destination[:, : old.nbytes // rows]
    view[...] = old.view(np.uint8).reshape(rows, -1)
    reduction.combine(operation, element)(view, new.view(np.uint8).reshape(rows, -1))
    assert (destination[:, old.nbytes // rows :] == 0xAB).all()
    return np.ascontiguousarray(view).reshape(-1).view(old.dtype)


INTEGER_OPERATIONS = {
    "add": lambda a, b: a + b,
    "min": min,
    "max": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "inc": lambda a, b: 0 if a >= b else a + 1,
    "dec": lambda a, b: b if a == 0 or a > b else a - 1,
}


@pytest.mark.parametrize(
    "element, operation",
    [
        *itertools.product(("u32", "s32", "u64", "s64"), ("min", "max")),
        *itertools.product(("u32", "s32", "u64"), ("add",)),
        *itertools.product(("b32", "b64"), ("and", "or", "xor")),
        ("u32", "inc"),
        ("u32", "dec"),
    ],
)
def test_integer_reductions(element, operation):
    dtype = np.dtype(reduction.INTEGERS[element])
    rng = np.random.default_rng(1)
    bits = dtype.itemsize * 8
    info = np.iinfo(dtype)
    old = rng.integers(info.min, info.max, 64, dtype=dtype, endpoint=True)
    new = rng.integers(info.min, info.max, 64, dtype=dtype, endpoint=True)
    old[:6], new[:6] = [0, 1, 5, info.max, info.min, 7], [0, 5, 1, 1, info.max, 7]
    got = _reduce(operation, element, old, new)
    for a, b, c in zip(old.tolist(), new.tolist(), got.tolist(), strict=True):
        assert INTEGER_OPERATIONS[operation](a, b) % 2**bits == c % 2**bits


def test_bf16_and_f16_add_round_to_nearest_even_and_keep_subnormals():
    rng = np.random.default_rng(2)
    old = rng.integers(0, 1 << 16, 512, dtype=np.uint16)
    new = rng.integers(0, 1 << 16, 512, dtype=np.uint16)
    close = slice(0, 128)  # exponents near each other, where rounding happens
    old[close] = (old[close] & 0x80FF) | 0x3F00
    new[close] = (new[close] & 0x80FF) | 0x3B00
    old[128:160], new[128:160] = old[128:160] & 0x807F, new[128:160] & 0x807F
    got = _reduce("add", "bf16", old, new)
    for a, b, c in zip(old.tolist(), new.tolist(), got.tolist(), strict=True):
        total = _bf16(a) + _bf16(b)
        if np.isnan(total):
            assert c == 0x7FFF
        elif abs(total) < 3.39e38:
            assert c == _to_bf16(total), (hex(a), hex(b))
    half_old, half_new = old.view(np.float16), new.view(np.float16)
    with np.errstate(all="ignore"):
        exact = (half_old.astype(np.float64) + half_new.astype(np.float64)).astype(np.float16)
    half = _reduce("add", "f16", old, new).view(np.float16)
    nan = np.isnan(exact)
    assert np.array_equal(half[~nan].view(np.uint16), exact[~nan].view(np.uint16))
    assert (half[nan].view(np.uint16) == 0x7FFF).all()


@pytest.mark.parametrize("element, one", [("f16", 0x3C00), ("bf16", 0x3F80)])
def test_half_minimum_and_maximum_prefer_numbers_and_order_zeros(element, one):
    nan, negative_zero = 0x7FFF, 0x8000
    old = np.array([one, nan, nan, negative_zero, 0, one | 0x8000, one, one], np.uint16)
    new = np.array([nan, one, nan, 0, negative_zero, one, one + 1, one], np.uint16)
    smaller = [one, one, nan, negative_zero, negative_zero, one | 0x8000, one, one]
    larger = [one, one, nan, 0, 0, one, one + 1, one]
    assert _reduce("min", element, old, new).tolist() == smaller
    assert _reduce("max", element, old, new).tolist() == larger


def test_f32_add_keeps_subnormals_and_f32_ftz_flushes_them():
    tiny = np.float32(1e-40)
    old = np.array([tiny, 1.5, -tiny, 1.2e-38], np.float32)
    new = np.array([tiny, tiny, -tiny, -1.19e-38], np.float32)
    assert np.array_equal(_reduce("add", "f32", old, new), old + new)
    flushed = _reduce("add", "f32.ftz", old, new)
    assert flushed.tolist() == [0.0, 1.5, -0.0, 0.0]
    assert np.signbit(flushed).tolist() == [False, False, True, False]


def test_nan_sums():
    signalling = np.array([0x7F800001, 0x7F800000, 0xFFC00000, 0], np.uint32).view(np.float32)
    other = np.array([0x3F800000, 0xFF800000, 0x3F800000, 0x7FC12345], np.uint32).view(np.float32)
    for element in ("f32", "f32.ftz", "tf32"):
        assert _reduce("add", element, signalling, other).view(np.uint32).tolist() == [0x7FFFFFFF] * 4
    wide = np.array([0xFFF3_56DD_A526_82F1, 0x3FF0 << 48] * 2, np.uint64).view(np.float64)
    one = np.array([0x3FF0 << 48, 0x7FF8_0000_0000_0001] * 2, np.uint64).view(np.float64)
    got = _reduce("add", "f64", wide, one).view(np.uint64).tolist()
    assert got == [0xFFF3_56DD_A526_82F1, 0x7FF8_0000_0000_0001] * 2


@pytest.mark.parametrize(
    "operation, element",
    [("min", "f32"), ("inc", "s32"), ("and", "f16"), ("add", "b4x16"), ("add", "s64"), ("and", "s64")],
)
def test_reductions_the_isa_lacks_are_unsupported(operation, element):
    with pytest.raises(UnsupportedInstruction, match=f"{operation} of .{element}"):
        reduction.combine(operation, element)


def test_tensor_reduction_skips_what_lies_outside():
    memory = Memory(1 << 12)
    before = memory.data.copy()
    t = TensorMap(BASE, ELEMENT_BY_NAME["u32"], (12, 3), (64,), (8, 4), (1, 1))
    data = np.full(8 * 4, 5, np.uint32).view(np.uint8)
    assert tma.store_box(t, (8, 1), data, memory, reduction.combine("add", "u32")) == 4 * 2 * 4
    was, now = before.view(np.uint32).reshape(-1, 16), memory.data.view(np.uint32).reshape(-1, 16)
    expected = was.copy()
    expected[1:3, 8:12] += np.uint32(5)
    assert np.array_equal(now, expected)


def test_overlapping_rows_are_reduced_one_after_the_other():
    memory = Memory(256)
    memory.data[:] = 0
    t = TensorMap(BASE, ELEMENT_BY_NAME["u32"], (8, 4), (0,), (8, 4), (1, 1))
    tma.store_box(t, (0, 0), np.ones(32, np.uint32).view(np.uint8), memory, reduction.combine("add", "u32"))
    assert memory.data.view(np.uint32)[:9].tolist() == [4] * 8 + [0]
