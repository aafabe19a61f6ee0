"""Converts rows of e4m3 codes in a producer warp: codes with fp32 scales and a bf16 tail ("v3.2-fp8"), or codes alone
("e4m3"), as Q may have, too.

A column group of a key has four blocks of 64 codes under two scales. A lane has 16 codes of each block; the key's four
lanes have the same scales. A lane copies codes to the place of the converted keys, reads them from there, and stores
them there again in bf16.

The product of code and scale is rounded to bf16 once. For that the scale is the sum of two bf16 numbers, high and low:
code * low is rounded to bf16, which changes nothing near the product's last bit, and one fused operation adds
code * high. If the scale itself were rounded to bf16, a whole block would be off by up to 2**-9.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32

from warpspec.common.device import tma
from warpspec.common.device.float8 import to_fp16
from warpspec.common.device.words import (
    load_present,
    load_shared,
    multiply_add_bf16x2,
    multiply_bf16x2,
    permute,
    scaled_pair,
)
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WARPGROUP_THREADS, WORD_BYTES
from warpspec.fmha.heads import BLOCK
from warpspec.latent.gathered.convert import (
    BF16_EXPONENT_BIT,
    BYTES_HIGH,
    BYTES_LOW,
    EXPONENT_GAP,
    EXPONENT_SHIFT,
    FIELD_BIAS,
    FIELDS,
    HIGH_BITS,
    LOW_BITS,
    NAN_PAIR,
    ONES,
    to_bf16,
)
from warpspec.latent.gathered.rows import (
    GROUP_KEYS,
    VECTOR_WORDS,
    bytes_of,
    copy_vector,
    load_vectors,
    raw_place,
    store_vector,
)

GAP_FACTOR = 2.0**EXPONENT_GAP  # corrects a code's bits after they moved to bf16's fields
GAP_BITS = EXPONENT_GAP + FIELD_BIAS << BF16_EXPONENT_BIT  # GAP_FACTOR's bits in bf16
SMALL_SCALE = 128.0  # bf16 can represent a scale below this times GAP_FACTOR
SCALE_BLOCKS = 2  # blocks of 64 codes that share a scale
PRODUCERS = WARPGROUP_THREADS // WARP_THREADS


def copy_codes(loader, target, pair_bytes: int, address, scale_at) -> None:
    """Issue the copies of the codes and scales of a key that the lane will convert; zeros if the key is not there.
    Arguments as in ``rows.copy_raw``."""
    config = loader.config
    wanted = bytes_of(address, VECTOR_BYTES)
    begin = address + Int64(loader.column_group * (loader.blocks * BLOCK) + loader.member * VECTOR_BYTES)
    for block in range(loader.blocks):
        copy_vector(target, raw_place(block, pair_bytes), begin, block * BLOCK, wanted)
    count = config.gathers.scale_words * WORD_BYTES
    if count == 0:
        return
    cute.arch.inline_ptx(
        f"cp.async.ca.shared.global [{{$r0}}+{raw_place(loader.blocks, pair_bytes)}], [{{$r1}}], {count}, {{$r2}};",
        read_only_args=[
            scales_place(loader, target),
            address + Int64(scale_at + loader.column_group * count),
            bytes_of(address, count),
        ],
    )


def scales_place(loader, target):
    """The lane's base address for its scales, which lie side by side in a warp."""
    return target - loader.lane * (VECTOR_BYTES - loader.config.gathers.scale_words * WORD_BYTES)


def copy_tails(loader, base, addresses: list, share) -> None:
    """Issue the copies of the tails of a share of the keys to the block after both column groups.

    A bf16 tail is copied to its final place, codes to where ``convert_tail`` finds them. Missing keys become zeros.
    base: address of the warp's column group. addresses: address of the lane's key in every group.
    """
    fmt, block = loader.config.gathers.fmt, tail_place(loader, base)
    if fmt.tail == 0:  # codes, to be converted
        for group, address in enumerate(addresses):
            source = address + Int64(loader.member * VECTOR_BYTES)
            target = block + raw_group(loader, group) + loader.lane * VECTOR_BYTES
            offset = loader.config.heads.v
            copy_vector(target, 0, source, offset, bytes_of(address, VECTOR_BYTES))
        return
    key = block + (share * loader.config.gathers.keys_of_warp + loader.key) * tma.ROW_BYTES
    places = [key + (loader.key ^ loader.plain_chunk(i)) * VECTOR_BYTES for i in range(2)]
    for group, address in enumerate(addresses):
        wanted = bytes_of(address, VECTOR_BYTES)
        for i in range(2):
            source = address + Int64(loader.plain_chunk(i) * VECTOR_BYTES)
            copy_vector(places[i], group * GROUP_KEYS * tma.ROW_BYTES, source, fmt.tail_offset, wanted)


def load_codes(loader, target, pair_bytes: int, words: cute.Tensor) -> list:
    """Load what ``copy_codes`` copied into words (WORD, VECTOR); returns the scales' words."""
    load_vectors(loader, target, pair_bytes, words)
    if loader.config.gathers.scale_words == 0:
        return []
    place = scales_place(loader, target) + raw_place(loader.blocks, pair_bytes)
    scales = cute.make_tensor(
        cute.make_ptr(Uint32, Int32(place), cute.AddressSpace.smem, assumed_align=2 * WORD_BYTES),
        cute.make_layout(loader.config.gathers.scale_words),
    )
    found = cute.make_rmem_tensor(loader.config.gathers.scale_words, Uint32)
    cute.autovec_copy(scales, found)
    return [found[i] for i in range(loader.config.gathers.scale_words)]


@cute.jit
def store_scaled(loader, base, group, words: cute.Tensor, scales: cutlass.Constexpr):
    """Store the lane's numbers of one key, converted to bf16, in the tile's column group at ``base``, with the 128-byte
    swizzle."""
    if cutlass.const_expr(len(scales) == 0):
        store_codes(loader, base, group, words)
    else:
        store_blocks(loader, base, group, words, [float_of(word) for word in scales])


@cute.jit
def store_blocks(loader, base, group, words: cute.Tensor, values: cutlass.Constexpr):
    """``store_scaled`` of codes under scales."""
    large = Boolean(False)
    for value in values:
        large = large | ~Boolean(value < Float32(SMALL_SCALE))  # NaN, too
    if cute.arch.vote_any_sync(large):
        store_key(loader, base, group, words, values, False)
    else:
        store_key(loader, base, group, words, values, True)


@cute.jit
def store_key(loader, base, group, words: cute.Tensor, scales: cutlass.Constexpr, small: cutlass.Constexpr):
    """``store_blocks`` once it is known whether all scales of the warp's keys are below SMALL_SCALE."""
    first = chunk_place(loader, base, group)
    for number in cutlass.range_constexpr(loader.config.gathers.scale_words):
        high, low = split_scale(scales[number], small)
        for i in cutlass.range_constexpr(SCALE_BLOCKS):
            block = number * SCALE_BLOCKS + i
            out = scaled([words[j, block] for j in range(VECTOR_WORDS)], high, low, small)
            at = first + block * loader.config.tile_n * tma.ROW_BYTES
            store_vector(at, out[:VECTOR_WORDS])
            store_vector(at ^ VECTOR_BYTES, out[VECTOR_WORDS:])


@cute.jit
def store_codes(loader, base, group, words: cute.Tensor):
    """``store_scaled`` of codes without scales, which is exact."""
    first = chunk_place(loader, base, group)
    for block in cutlass.range_constexpr(loader.blocks):
        store_plain_codes(
            loader.config,
            first + block * loader.config.tile_n * tma.ROW_BYTES,
            [words[j, block] for j in range(VECTOR_WORDS)],
        )


@cute.jit
def convert_tail(loader, base, group):
    """Convert the lane's codes of one key's last block, where ``copy_tails`` has put them, in their place."""
    block = tail_place(loader, base)
    codes = load_shared(block + raw_group(loader, group) + loader.lane * VECTOR_BYTES)
    cute.arch.sync_warp()  # lanes write where other lanes have read
    place = chunk_place(loader, block, group)
    store_plain_codes(loader.config, place, [codes[j] for j in range(VECTOR_WORDS)])


@cute.jit
def convert_queries(loader, channels: cutlass.Constexpr, shared, task, task_use):
    """Bring the warp's rows of a task's Q, whose codes it converts, to where TMA would put them; rows without a query
    become zeros. task_use: number of the task. Consumes q_empty; produces q_full, one arrival a warp."""
    config, blocks = loader.config, loader.config.heads.qk_blocks
    warp = loader.column_group * config.gathers.warps_of_group + loader.warp_of_group
    if cutlass.const_expr(not config.scheduler.single):
        channels["q_empty"].wait_previous(task_use)
    for turn in cutlass.range_constexpr(config.tile_m // (PRODUCERS * GROUP_KEYS)):
        row = (turn * PRODUCERS + warp) * GROUP_KEYS + loader.key
        place = task.place(row)
        source = loader.operands.q[0, place.query, place.head, None].iterator.toint()
        source = source + Int64(loader.member * VECTOR_BYTES)
        codes = [
            load_present(source, place.in_range, VECTOR_WORDS, offset=block * BLOCK)
            for block in range(blocks)
        ]
        target = shared.q.toint() + row * tma.ROW_BYTES + (loader.key ^ (2 * loader.member)) * VECTOR_BYTES
        for block in cutlass.range_constexpr(blocks):
            store_plain_codes(config, target + block * (config.q_bytes // blocks), codes[block])
    cute.arch.fence_view_async_shared()
    channels["q_full"].arrive_warp(task_use)


def store_plain_codes(config, address, words: list) -> None:
    """Store 16 codes in the dtype of products. address: address of the first chunk."""
    if config.p_dtype == "float16":
        halves = to_fp16(words, "e4m3")
        out = [halves[i] for i in range(2 * len(words))]
    else:
        out = to_bf16(words, Uint32(FIELD_BIAS), True)
    store_vector(address, out[:VECTOR_WORDS])
    store_vector(address ^ VECTOR_BYTES, out[VECTOR_WORDS:])


def chunk_place(loader, block, group):
    """Address of the lane's first converted chunk of one key in a block of columns."""
    key = loader.share * loader.config.gathers.keys_of_warp + group * GROUP_KEYS + loader.key
    return block + key * tma.ROW_BYTES + (loader.key ^ (2 * loader.member)) * VECTOR_BYTES


def raw_group(loader, group):
    """Bytes from a block of columns to the warp's keys of a group."""
    return (loader.share * loader.config.gathers.keys_of_warp + group * GROUP_KEYS) * tma.ROW_BYTES


def tail_place(loader, base):
    """Address of the block behind both column groups. base: address of the warp's."""
    return base + (loader.config.gathers.kv_groups - loader.column_group) * loader.config.gathers.group_bytes


def float_of(word: Uint32) -> Float32:
    """The fp32 number with these bits."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])


def split_scale(scale: Float32, small: bool) -> tuple:
    """(high, low): words of two bf16 each, whose sum is the scale, or the scale times GAP_FACTOR if ``small``."""
    if small:
        scale = scale * Float32(GAP_FACTOR)
    high = scale.to(BFloat16).to(Float32)
    return pair_of(high), pair_of(scale - high)


def pair_of(value: Float32) -> Uint32:
    """A word of twice a number, rounded to bf16."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r0};", write_only_types=[Uint32], read_only_args=[value]
    )


def scaled(words: list, high: Uint32, low: Uint32, small: bool) -> list:
    """Words of four codes times a scale to words of two bf16. A NaN among the codes makes all numbers NaN, because its
    bits would otherwise be read as 480."""
    marks = Uint32(0)
    for word in words:
        marks = marks | ((word & Uint32(LOW_BITS)) + Uint32(ONES))
    bad = Boolean((marks & Uint32(HIGH_BITS)) != 0)
    high = Uint32(cutlass.select_(bad, Uint32(NAN_PAIR), high))
    out = []
    for word in words:
        for order in (BYTES_LOW, BYTES_HIGH):
            moved = (permute(word, order) << EXPONENT_SHIFT) & Uint32(FIELDS)
            if not small:
                moved = scaled_pair(moved, GAP_BITS, "bf16x2")
            out.append(multiply_add_bf16x2(moved, high, multiply_bf16x2(moved, low)))
    return out
