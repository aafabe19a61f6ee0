"""How the lanes of a producer warp bring rows to shared memory, four lanes a key.

bf16 rows are copied to where the 128-byte swizzle puts them. FP8 rows are copied as they are; then each lane reads what
it copied itself, converts it and stores it where the swizzle puts it.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from warpspec.common.device import tma
from warpspec.common.device.words import permute, shuffle_address
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.fmha.features import BLOCK
from warpspec.latent.cache.formats import BF16_BYTES
from warpspec.latent.gathered.convert import some_large, to_bf16
from warpspec.latent.gathered.task import WORD_BYTES, Gathered

VECTOR_WORDS = VECTOR_BYTES // WORD_BYTES
MEMBERS = 4  # lanes that bring a key together: 64 values of a byte are 16 bytes for each
GROUP_KEYS = WARP_THREADS // MEMBERS  # keys that a warp brings at a time
BYTE_ALONE = 0x4440  # prmt: one byte below three of zeros
ALL_SCALES = 0xFFFFFFFF  # bytes of a part's word that are scales: four in the first part, three in the second
RAW_PAIR = 2 * WARP_THREADS * VECTOR_BYTES  # bytes of two vectors of a warp's lanes


@dataclass(frozen=True)
class Loader:
    """What a producer warp is. part: of the columns; half: of a tile's keys. lane: of the warp.

    All warps run the same instructions, of which there is one copy: the instruction cache holds little. So the parts
    differ in numbers alone, but for the last block of FP8 rows' parts: e4m3 in the first, bf16 in the second.
    """

    config: object
    operands: Gathered
    part: Int32
    half: Int32
    lane: Int32

    def ring_use(self, number):
        """Of the ring of tiles' parts, by the part of the number-th tile."""
        if self.config.barrier_parts > 1:
            return number * self.config.barrier_parts + self.part
        return number

    @property
    def member(self) -> Int32:
        return self.lane % MEMBERS

    @property
    def key(self) -> Int32:
        """Of a group, which this lane brings. It is also what the swizzle turns the key's row by."""
        return self.lane // MEMBERS

    def plain_chunk(self, i: int):
        """Which 16 bytes of a block in bf16 this lane brings i-th: a key's four lanes 64 bytes together, the second
        half first for every other key, so that two keys' stores meet no bank twice."""
        second = self.key % 2 if i == 0 else 1 - self.key % 2
        return self.member + MEMBERS * second

    @property
    def groups(self) -> int:
        """Groups of keys of a tile."""
        return self.config.keys_of_warp // GROUP_KEYS

    @property
    def blocks(self) -> int:
        """Blocks of 64 columns of a part."""
        return self.config.part_blocks

    @property
    def converted(self) -> int:
        """Blocks of FP8 rows, the first, that are e4m3 in every part."""
        return self.blocks - 1

    @property
    def vectors(self) -> int:
        """16-byte vectors of an FP8 key that a lane brings."""
        return self.config.raw_vectors

    def words(self) -> cute.Tensor:
        """(WORD, VECTOR): registers for what a lane has of an FP8 key."""
        return cute.make_rmem_tensor((VECTOR_WORDS, self.vectors), Uint32)


def row_of(loader, row, scale_at, group) -> tuple:
    """(address of the row, bytes from there to its scales) of the lane's key of a group, which another lane has looked
    up. row, scale_at: of the key that this lane looked up."""
    source = group * GROUP_KEYS + loader.key
    return shuffle_address(row, source), Int32(cute.arch.shuffle_sync(scale_at, source))


def bytes_of(address, count: int) -> Int32:
    """How many of a copy's bytes there are: none of a row that is not there."""
    return Int32(cutlass.select_(Boolean(address != 0), Int32(count), Int32(0)))


def copy_vector(target, at: int, source, offset: int, wanted) -> None:
    """16 bytes of source + offset to target + at in shared memory, those beyond the first ``wanted`` zeros."""
    cute.arch.inline_ptx(
        f"cp.async.cg.shared.global [{{$r0}}+{at}], [{{$r1}}+{offset}], {VECTOR_BYTES}, {{$r2}};",
        read_only_args=[target, source, wanted],
    )


# Rows of bf16.


def rows_of_groups(loader, row) -> list:
    """(address of its row's part, bytes that a copy brings) of the lane's key of every group of a tile. row: address of
    the row that this lane looked up."""
    begin = loader.part * (loader.blocks * BLOCK * BF16_BYTES)
    rows = []
    for group in range(loader.groups):
        address = shuffle_address(row, group * GROUP_KEYS + loader.key)
        rows.append((address + Int64(begin), bytes_of(address, VECTOR_BYTES)))
    return rows


def copy_rows(loader, base, rows: list) -> None:
    """Issue the copies of a warp's keys, into the tile's part at ``base``; zeros of keys that are not there. rows: of
    ``rows_of_groups``."""
    row_bytes, group_bytes = BLOCK * BF16_BYTES, GROUP_KEYS * tma.ROW_BYTES
    block_bytes = loader.config.tile_n * tma.ROW_BYTES
    target = base + loader.half * (loader.groups * group_bytes) + loader.key * tma.ROW_BYTES
    places = [target + (loader.key ^ loader.plain_chunk(i)) * VECTOR_BYTES for i in range(2)]
    for group, (address, wanted) in enumerate(rows):
        for i in range(2):
            source = address + Int64(loader.plain_chunk(i) * VECTOR_BYTES)
            for block in range(loader.blocks):
                at = block * block_bytes + group * group_bytes
                copy_vector(places[i], at, source, block * row_bytes, wanted)


# Rows of FP8, as they are. What a lane has of a key: a vector of e4m3 of each of the ``converted`` blocks, then two of
# the last block, of which the first part needs one, e4m3, and the second part both, bf16; then a word of scales.


def copy_raw(loader, target, pair_bytes: int, address, scale_at) -> None:
    """Issue the copies of what the lane converts of its FP8 key, as it is; zeros of a key that is not there. target: of
    the lane's first vector, in shared memory; two vectors of every lane stand together, pair_bytes from the next."""
    fmt = loader.config.fmt
    wanted = bytes_of(address, VECTOR_BYTES)
    begin = address + Int64(loader.part * (loader.blocks * BLOCK) + loader.member * VECTOR_BYTES)
    for block in range(loader.converted):
        copy_vector(target, raw_place(block, pair_bytes), begin, block * BLOCK, wanted)
    # The last block: e4m3 of the first part, the tail of the second.
    chunk = fmt.tail_offset + loader.plain_chunk(0) * VECTOR_BYTES
    value = loader.converted * BLOCK + loader.member * VECTOR_BYTES
    offset = Int32(cutlass.select_(Boolean(loader.part == 1), chunk, value))
    at = raw_place(loader.converted, pair_bytes)
    copy_vector(target, at, address + Int64(offset), 0, wanted)
    chunk = address + Int64(loader.plain_chunk(1) * VECTOR_BYTES)
    at = raw_place(loader.converted + 1, pair_bytes)
    copy_vector(target, at, chunk, fmt.tail_offset, wanted * loader.part)
    cute.arch.inline_ptx(
        f"cp.async.ca.shared.global [{{$r0}}+{raw_place(loader.vectors, pair_bytes)}], [{{$r1}}], {WORD_BYTES}, "
        "{$r2};",
        read_only_args=[
            scales_place(loader, target),
            address + Int64(scale_at + loader.part * loader.blocks),
            wanted // VECTOR_WORDS,
        ],
    )


def raw_place(vector: int, pair_bytes: int) -> int:
    """Bytes from a lane's first vector to another; from ``scales_place`` to its scales, which are the last."""
    return vector // 2 * pair_bytes + vector % 2 * (WARP_THREADS * VECTOR_BYTES)


def scales_place(loader, target):
    """As target is of a lane's vectors: of words, which lanes have side by side."""
    return target - loader.lane * (VECTOR_BYTES - WORD_BYTES)


def load_raw(loader, target, pair_bytes: int, words: cute.Tensor) -> Uint32:
    """words (WORD, VECTOR) become what ``copy_raw`` brought; returns the scales."""
    outputs = ", ".join(f"{{$w{i}}}" for i in range(VECTOR_WORDS))
    for vector in range(loader.vectors):
        loaded = cute.arch.inline_ptx(
            f"ld.shared.v4.b32 {{{outputs}}}, [{{$r0}}+{raw_place(vector, pair_bytes)}];",
            write_only_types=[Uint32] * VECTOR_WORDS,
            read_only_args=[target],
        )
        for i in range(VECTOR_WORDS):
            words[i, vector] = loaded[i]
    return cute.arch.inline_ptx(
        f"ld.shared.b32 {{$w0}}, [{{$r0}}+{raw_place(loader.vectors, pair_bytes)}];",
        write_only_types=[Uint32],
        read_only_args=[scales_place(loader, target)],
    )


# Rows of FP8, converted.


@cute.jit
def store_group(loader, base, group, words: cute.Tensor, scales):
    """The lane's part of one key, in bf16, into the tile's part at ``base``: where the 128-byte swizzle puts it."""
    used = Uint32(cutlass.select_(Boolean(loader.part == 0), Uint32(ALL_SCALES), Uint32(ALL_SCALES >> 8)))
    if cute.arch.vote_any_sync(some_large(scales & used)):
        store_key(loader, base, group, words, scales, False)
    else:
        store_key(loader, base, group, words, scales, True)


@cute.jit
def store_key(loader, base, group, words: cute.Tensor, scales, small: cutlass.Constexpr):
    """As ``store_group``. small: so are all scales of the warp's keys (``to_bf16``)."""
    key = loader.half * loader.config.keys_of_warp + group * GROUP_KEYS + loader.key
    row = base + key * tma.ROW_BYTES
    block_bytes = loader.config.tile_n * tma.ROW_BYTES
    # Of the lane's first of two 16-byte chunks; the second of converted ones differs in bit 0, of plain ones in bit 2.
    converted = row + (loader.key ^ (2 * loader.member)) * VECTOR_BYTES
    plain = row + (loader.key ^ loader.plain_chunk(0)) * VECTOR_BYTES
    for block in cutlass.range_constexpr(loader.converted):
        store_converted(converted + block * block_bytes, words, block, scales, small)
    at = loader.converted * block_bytes
    if loader.part == 0:
        store_converted(converted + at, words, loader.converted, scales, small)
    else:
        store_plain(plain + at, words, loader.converted)


def store_converted(address, words: cute.Tensor, block: int, scales, small: bool) -> None:
    """16 numbers of the part's block, converted. address: of the first chunk."""
    scale = permute(scales, BYTE_ALONE | block)
    out = to_bf16([words[i, block] for i in range(VECTOR_WORDS)], scale, small)
    store_vector(address, out[:VECTOR_WORDS])
    store_vector(address ^ VECTOR_BYTES, out[VECTOR_WORDS:])


def store_plain(address, words: cute.Tensor, vector: int) -> None:
    """Two vectors as they are. address: of the first chunk."""
    for half in range(2):
        at = address ^ (half * MEMBERS * VECTOR_BYTES)
        store_vector(at, [words[i, vector + half] for i in range(VECTOR_WORDS)])


def store_vector(address, words: list) -> None:
    """16 bytes to shared memory."""
    pointer = cute.make_ptr(Uint32, Int32(address), cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
    vector = cute.make_rmem_tensor(VECTOR_WORDS, Uint32)
    for i in range(VECTOR_WORDS):
        vector[i] = words[i]
    cute.autovec_copy(vector, cute.make_tensor(pointer, cute.make_layout(VECTOR_WORDS)))
