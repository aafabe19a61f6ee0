"""Tensor maps: decoding, encoding, the rules, and tensormap.replace."""

import random
from dataclasses import replace

import pytest
from helpers.tma_model import BASE, SWIZZLES, random_map, valid_map

from warpspec.sim import tma
from warpspec.sim.errors import BadDescriptor, UnsupportedInstruction
from warpspec.sim.tma import Interleave, Swizzle, SwizzleAtomicity, TensorMap
from warpspec.sim.tma.descriptor import ELEMENT_BY_NAME, ELEMENT_TYPES

# Words 0-15 of descriptors that CuTe DSL 4.8.1 host code built, and what they were built from.
RECORDED = [
    (  # fp16 [1000, 512], strides (512, 1), tile 64 x 64, S<3,4,3>, sm_100a
        "00000000 00000001 00246312 00000080 00000000 00000000 00000000 00000000 "
        "000001ff 000003e7 00000000 00000000 00000000 3f000000 0000003f 00000000",
        {
            "element": "f16",
            "dims": (512, 1000),
            "strides": (2048,),
            "box": (64, 64),
            "swizzle": Swizzle.BYTES_128,
        },
    ),
    (  # bf16, tile 64 x 128, not swizzled
        "00000000 00000001 00240512 00000080 00000000 00000000 00000000 00000000 "
        "000001ff 000003e7 00000000 00000000 00000000 7f000000 0000003f 00000000",
        {
            "element": "bf16",
            "dims": (512, 1000),
            "strides": (2048,),
            "box": (128, 64),
            "swizzle": Swizzle.NONE,
        },
    ),
    (  # tf32
        "00000000 00000001 00250392 00000100 00000000 00000000 00000000 00000000 "
        "000001ff 000003e7 00000000 00000000 00000000 7f000000 0000003f 00000000",
        {"element": "tf32", "strides": (4096,), "box": (128, 64)},
    ),
    (  # fp4, packed
        "00000000 00000001 00240592 00000020 00000000 00000000 00000000 00000000 "
        "000001ff 000003e7 00000000 00000000 00000000 7f000000 0000003f 00000000",
        {"element": "b4x16", "dims": (512, 1000), "strides": (512,), "box": (128, 64)},
    ),
    (  # fp4, a byte each in shared memory
        "00000000 00000001 00240612 00000020 00000000 00000000 00000000 00000000 "
        "000001ff 000003e7 00000000 00000000 00000000 7f000000 0000003f 00000000",
        {"element": "b4x16_p64", "dims": (512, 1000), "strides": (512,), "box": (128, 64)},
    ),
    (  # fp6, a byte each in shared memory
        "00000000 00000001 00240692 00000030 00000000 00000000 00000000 00000000 "
        "000001ff 000003e7 00000000 00000000 00000000 7f000000 0000003f 00000000",
        {"element": "b6x16_p32", "strides": (768,), "box": (128, 64)},
    ),
    (  # S<2,5,2>
        "00000000 00000001 002c6312 00000080 00000000 00000000 00000000 00000000 "
        "000001ff 000003e7 00000000 00000000 00000000 3f000000 0000003f 00000000",
        {"element": "f16", "swizzle": Swizzle.BYTES_128, "atomicity": SwizzleAtomicity.BYTES_32},
    ),
    (  # S<2,4,3>
        "00000000 00000001 00244312 00000080 00000000 00000000 00000000 00000000 "
        "000001ff 000003e7 00000000 00000000 00000000 1f000000 00000000 00000000",
        {"swizzle": Swizzle.BYTES_64, "box": (32, 1)},
    ),
    (  # S<1,4,3>
        "00000000 00000001 00242312 00000080 00000000 00000000 00000000 00000000 "
        "000001ff 000003e7 00000000 00000000 00000000 0f000000 00000000 00000000",
        {"swizzle": Swizzle.BYTES_32, "box": (16, 1)},
    ),
    (  # rank 5, dims 10, 11, 12, 13, 128,
        "00000000 00000001 00240342 00000080 00000400 00002000 00010000 00000000 "
        "0000007f 0000000c 0000000b 0000000a 00000009 3f000000 01020304 00000000",
        {"dims": (128, 13, 12, 11, 10), "strides": (2048, 16384, 131072, 1048576), "box": (64, 5, 4, 3, 2)},
    ),
    (  # rank 1, fewer than 128 KiB
        "00000000 00000001 00040302 00000000 00000000 00000000 00000000 00000000 "
        "0000007f 00000000 00000000 00000000 00000000 3f000000 00000000 00000000",
        {"dims": (128,), "strides": (), "box": (64,)},
    ),
    (  # a stride of 2**35 bytes needs the high bits' word; a 47-bit address
        "45678900 0007f123 00240312 80000000 00000000 00000000 00000000 00000003 "
        "0000007f 00000002 00000000 00000000 00000000 1f000000 0000003f 00000000",
        {"address": 0x0007_F123_4567_8900, "strides": (0x3_8000_0000 * 16,), "dims": (128, 3)},
    ),
]


@pytest.mark.parametrize("words, expected", RECORDED)
def test_decodes_descriptors_that_cute_dsl_built(words, expected):
    garbage = bytes(range(64))  # host code leaves the second half uninitialised
    decoded = tma.decode(b"".join(int(w, 16).to_bytes(4, "little") for w in words.split()) + garbage)
    for name, value in expected.items():
        got = decoded.element.name if name == "element" else getattr(decoded, name)
        assert got == value, name


@pytest.mark.parametrize("seed", range(60))
def test_encode_then_decode_is_the_identity(seed):
    rng = random.Random(seed)
    t = random_map(rng, 1 + seed % 5, *SWIZZLES[seed % len(SWIZZLES)])
    assert tma.decode(tma.encode(t)) == t


@pytest.mark.parametrize(
    "change, words",
    [
        ({"address": BASE + 8}, "global address is not a multiple of 16"),
        ({"box": (128, 8)}, "wider than the swizzle"),
        ({"box": (63, 8)}, "not a multiple of 16 bytes"),
        ({"element": ELEMENT_BY_NAME["b4x16_p64"], "box": (64, 8)}, "is not 128 elements"),
        ({"element": ELEMENT_BY_NAME["u16"], "nan_fill": True}, "NaN fill of u16"),
        (
            {"swizzle": Swizzle.BYTES_64, "box": (32, 8), "atomicity": SwizzleAtomicity.BYTES_32},
            "only the 128-byte swizzle",
        ),
    ],
)
def test_bad_descriptors_are_named(change, words):
    with pytest.raises(BadDescriptor, match=words):
        tma.decode(tma.encode(replace(valid_map(), **change)))


def test_bytes_that_are_no_descriptor_are_refused():
    with pytest.raises(BadDescriptor, match="all zeros"):
        tma.decode(bytes(128))
    with pytest.raises(BadDescriptor, match="rank 8"):
        tma.decode(bytes([0xF0]) * 128)
    with pytest.raises(BadDescriptor, match="element type code 15"):
        tma.decode(bytes([0x80]) * 9 + bytes([0x07]) + bytes(118))
    with pytest.raises(UnsupportedInstruction, match="im2col"):
        raw = bytearray(tma.encode(valid_map()))
        raw[8] |= 1
        tma.decode(raw)
    with pytest.raises(BadDescriptor, match="has 128 bytes, not 16"):
        tma.decode(bytes(16))


def _replaced(*changes) -> TensorMap:
    raw = bytearray(tma.encode(valid_map()))
    for change in changes:
        tma.replace_field(raw, *change)
    return tma.decode(raw)


def test_replace_every_field():
    assert _replaced(("global_address", 0, BASE + 4096)).address == BASE + 4096
    assert _replaced(("rank", 0, 0)).rank == 1
    assert _replaced(("global_dim", 0, 17), ("global_dim", 1, 1 << 32)).dims == (17, 1 << 32)
    assert _replaced(("global_stride", 0, (1 << 40) - 16)).strides == ((1 << 40) - 16,)
    assert _replaced(("box_dim", 0, 8), ("box_dim", 1, 256)).box == (8, 256)
    assert _replaced(("element_stride", 1, 8)).element_strides == (1, 8)
    deep = _replaced(("rank", 0, 4), *(("global_dim", i, 5 + i) for i in range(2, 5)))
    deep_strides = _replaced(("rank", 0, 4), *(("global_stride", i, 16 << 30 + i) for i in range(4)))
    assert deep.dims == (64, 64, 7, 8, 9)
    assert deep_strides.strides == tuple(16 << 30 + i for i in range(4))
    boxes = _replaced(("rank", 0, 4), *(("box_dim", i, 2 * i) for i in range(1, 5)))
    steps = _replaced(("rank", 0, 4), *(("element_stride", i, i + 1) for i in range(5)))
    assert boxes.box == (64, 2, 4, 6, 8)
    assert steps.element_strides == (1, 2, 3, 4, 5)
    for element in ELEMENT_TYPES:
        if element.bits == 16:
            assert _replaced(("elemtype", 0, element.code)).element == element
    assert _replaced(("box_dim", 0, 32), ("elemtype", 0, 11)).element.name == "tf32"
    assert _replaced(("box_dim", 0, 32), ("elemtype", 0, 12)).element.name == "tf32.ftz"
    assert _replaced(("elemtype", 0, 13)).element.name == "b4x16"
    wide = (("box_dim", 0, 128), ("global_dim", 0, 128))
    assert _replaced(*wide, ("elemtype", 0, 14)).element.name == "b4x16_p64"
    assert _replaced(*wide, ("elemtype", 0, 15)).element.name == "b6x16_p32"
    for mode in (Swizzle.NONE, Swizzle.BYTES_128):
        assert _replaced(("swizzle_mode", 0, mode)).swizzle == mode
    for mode in (Swizzle.BYTES_32, Swizzle.BYTES_64, Swizzle.BYTES_96):
        assert _replaced(("box_dim", 0, 16), ("swizzle_mode", 0, mode)).swizzle == mode
    for atomicity in SwizzleAtomicity:
        assert _replaced(("swizzle_atomicity", 0, atomicity)).atomicity == atomicity
    assert _replaced(("fill_mode", 0, 1)).nan_fill
    assert not _replaced(("fill_mode", 0, 1), ("fill_mode", 0, 0)).nan_fill
    interleaved = _replaced(("rank", 0, 2), ("interleave_layout", 0, 1))
    assert interleaved.interleave == Interleave.BYTES_16
    assert _replaced(("swizzle_mode", 0, 0)) == replace(valid_map(), swizzle=Swizzle.NONE)


def test_replace_refuses_what_does_not_exist():
    with pytest.raises(BadDescriptor, match="ordinal 4"):
        _replaced(("global_stride", 4, 16))
    with pytest.raises(BadDescriptor, match="swizzle_mode with value 5"):
        _replaced(("swizzle_mode", 0, 5))
    with pytest.raises(UnsupportedInstruction, match="nothing_such"):
        _replaced(("nothing_such", 0, 0))
