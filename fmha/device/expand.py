"""Dequantises keys and values into dense 16-bit tensors (``fmha.expand``), without k_scale and v_scale.

A thread takes one vector of VECTOR numbers of some neighbouring keys, which are in one page, so that it finds their
addresses by one. Neighbouring threads take neighbouring vectors, through a key's heads one after another, so that a
warp's writes are contiguous. In CTA (x, y), y chooses between K and V, and x chooses the batch row and the vectors,
because only a grid's first dimension holds any number of batch rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Int32, Int64, Uint32

from warpspec.common.device.host import host_function
from warpspec.common.device.words import load_present, load_present_byte, scaled_pair, store_present
from warpspec.common.hardware import WORD_BYTES
from warpspec.common.kv_formats import swizzled_place
from warpspec.fmha.device.codes import codes_of
from warpspec.fmha.device.packed import extent_of
from warpspec.fmha.device.pages import address_of
from warpspec.fmha.device.request import first_position
from warpspec.fmha.device.scales import KvRow, is_nvfp4, kv_row
from warpspec.fmha.expand import BYTES, VECTOR, ExpandConfig, ExpandNumbers, ExpandOperands

THREADS = 256
KEYS = 4  # keys of a thread; pages have a multiple of them
WORDS = VECTOR // 2  # of a vector in 16 bits
# By dtype: float4.UNIT in 16 bits, and the kind of a pair.
UNITS = {"bfloat16": ((127 + 14) << 7, "bf16x2"), "float16": ((15 + 14) << 10, "f16x2")}


class Expand:
    """``Expand(config)(...)`` launches the kernel."""

    def __init__(self, config: ExpandConfig):
        self.config = config

    @host_function(ExpandOperands, ExpandNumbers)
    def __call__(self, operands: ExpandOperands, numbers: ExpandNumbers, stream: CUstream):
        """Host side."""
        batch, keys, heads, _ = operands.wide_k.shape
        # Without q_start, the last key is some query's own.
        if cutlass.const_expr(self.config.window and operands.q_start is None):
            keys = cutlass.min(keys, numbers.total_q + numbers.window_left)
        key_vectors = heads * self.config.vectors
        # Of a batch row. Its first keys may be the last of a thread's.
        ctas = cute.ceil_div(cute.ceil_div(keys + KEYS - 1, KEYS) * key_vectors, THREADS)
        self.kernel(operands, numbers, ctas, cute.FastDivmodDivisorV2(Int32(key_vectors))).launch(
            grid=(ctas * batch, 2, 1), block=(THREADS, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(self, operands, numbers, ctas, key_vectors):
        thread, _, _ = cute.arch.thread_idx()
        cta, side, _ = cute.arch.block_idx()
        batch, first = cta // ctas, cta % ctas * THREADS
        cute.arch.griddepcontrol_wait()  # the launch before may read the memory that this one writes
        cute.arch.griddepcontrol_launch_dependents()  # attention's start, until its own wait, takes no time then
        begin, end = wanted_keys(self.config, operands, numbers, batch)
        first_key = begin // KEYS * KEYS
        if first_key + first // key_vectors * KEYS < end:
            number = first + thread
            place = (batch, first_key + number // key_vectors * KEYS, begin, end)
            if side == 0:
                expand_vector(self.config, operands, "k", place, number % key_vectors)
            else:
                expand_vector(self.config, operands, "v", place, number % key_vectors)


@cute.jit
def expand_vector(config: cutlass.Constexpr, operands, ring: cutlass.Constexpr, place, vector):
    """Dequantise a vector of KEYS keys of K or V. place: (batch row, first key, the keys that are dequantised)."""
    write_wide(config, operands, ring, place, vector, read_codes(config, operands, ring, place, vector, KEYS))


@cute.jit
def wanted_keys(config: cutlass.Constexpr, operands, numbers, batch) -> tuple:
    """(first, end) of the keys of a batch row that are dequantised: those within its KV length, with a window only from
    the first that some query sees."""
    begin, end = Int32(0), Int32(operands.wide_k.shape[1])
    if cutlass.const_expr(config.requests.has_kv_lengths):
        end = cutlass.max(cutlass.min(end, operands.kv_lengths[batch]), 0)
    if cutlass.const_expr(config.window):
        queries = numbers.total_q
        if cutlass.const_expr(config.requests.packed_q):
            _, queries = extent_of(operands.cu_seqlens_q, batch, queries)
        position = first_position(operands, batch, end, queries)
        begin = cutlass.max(position - numbers.window_left, 0)
    return begin, end


@dataclass(frozen=True)
class Read:
    """A vector of codes of some neighbouring keys. present: of each key, whether it is dequantised. codes: words of
    each. scales: the scale of each one's block, of NVFP4."""

    present: list
    codes: list
    scales: list


def read_codes(config: ExpandConfig, operands, ring: str, place: tuple, vector, count: int) -> Read:
    """Read a vector of ``count`` keys of K or V, which are in one page; zeros, if it does not exist. vector: its
    number in a key, of all heads. place: (batch row, first key, the keys [begin, end) that are wanted)."""
    batch, key, begin, end = place
    head, vector = vector // config.vectors, vector % config.vectors
    # In place of keys that do not exist, a page is looked up that does.
    where, exists = address_of(config, operands, batch, cutlass.min(key, end - 1))
    source, tensor = kv_row(config, operands, ring, where, head), operands.k if ring == "k" else operands.v
    address = cute.local_tile(source.codes, (config.format.kv_row(VECTOR),), (vector,)).iterator.toint()
    words, step = config.format.kv_row(VECTOR) // WORD_BYTES, Int64(tensor.stride[1])
    present = [Boolean(key + i >= begin) & Boolean(key + i < end) for i in range(count)]
    codes = [load_present(address + i * step, present[i] & exists, words) for i in range(count)]
    scales = [None] * count
    if is_nvfp4(config):
        block = vector * VECTOR // config.format.kv_block
        bytes_at = [scale_address(source, where[1] + i, block) for i in range(count)]
        scales = [load_present_byte(bytes_at[i], present[i] & exists) for i in range(count)]
    return Read(present, codes, scales)


def scale_address(source: KvRow, row, block) -> Int64:
    """Address of the scale of a block of a row."""
    if source.swizzled:
        row, block = swizzled_place(row, block, source.blocks.shape[1])
    return (
        source.blocks.iterator.toint()
        + Int64(row) * source.blocks.stride[0]
        + block * source.blocks.stride[1]
    )


def write_wide(config: ExpandConfig, operands, ring: str, place: tuple, vector, read: Read) -> None:
    """Write in 16 bits what ``read_codes`` has read. Arguments as there."""
    batch, key, _, _ = place
    wide = operands.wide_k if ring == "k" else operands.wide_v
    if is_nvfp4(config):
        wider = [
            wide_words(config, codes, scale) for codes, scale in zip(read.codes, read.scales, strict=True)
        ]
    else:  # together: a look for NaN is a branch
        words = wide_words(config, [word for codes in read.codes for word in codes], None)
        wider = [words[i : i + WORDS] for i in range(0, len(words), WORDS)]
    rows = wide[batch, None, vector // config.vectors, None]
    target = cute.domain_offset((key, vector % config.vectors * VECTOR), rows).iterator.toint()
    for i, (present, words) in enumerate(zip(read.present, wider, strict=True)):
        store_present(target + i * Int64(wide.stride[1]) * BYTES, present, words)


def wide_words(config, codes: list, scale) -> list:
    """Numbers in 16 bits, two neighbours in a word. codes: words of their codes, of NVFP4 one block's. scale: its e4m3
    scale."""
    kind = codes_of(config, config.format.dtype)
    pair = kind.scale_pair(Uint32(scale)) if is_nvfp4(config) else None
    wide = kind.in_order(codes, pair)
    if is_nvfp4(config):  # exact: seven bits, and fp16 represents the largest and the smallest of them
        wide = [scaled_pair(word, *UNITS[config.format.dtype]) for word in wide]
    return wide
