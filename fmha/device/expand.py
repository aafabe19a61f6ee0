"""Dequantises keys and values into dense 16-bit tensors (``fmha.expand``), without k_scale and v_scale.

A thread takes vectors of VECTOR numbers. Neighbouring threads take neighbouring vectors, through a key's heads one
after another, so that a warp's write is contiguous. In CTA (x, y), y chooses between K and V, and x chooses the batch
row and the vectors, because only a grid's first dimension holds any number of batch rows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Uint8, Uint32

from warpspec.common.device.host import host_function
from warpspec.common.device.words import scaled_pair
from warpspec.fmha.device.codes import codes_of
from warpspec.fmha.device.packed import extent_of
from warpspec.fmha.device.pages import address_of
from warpspec.fmha.device.request import first_position
from warpspec.fmha.device.scales import is_nvfp4, kv_row
from warpspec.fmha.expand import VECTOR, ExpandConfig, ExpandNumbers, ExpandOperands

THREADS = 256
VECTORS = 4  # vectors of a thread
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
        ctas = cute.ceil_div(keys * heads * self.config.vectors, THREADS * VECTORS)  # of a batch row
        self.kernel(operands, numbers, ctas).launch(
            grid=(ctas * batch, 2, 1), block=(THREADS, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(self, operands, numbers, ctas):
        thread, _, _ = cute.arch.thread_idx()
        cta, side, _ = cute.arch.block_idx()
        batch, first = cta // ctas, cta % ctas * VECTORS * THREADS
        key_vectors = operands.wide_k.shape[2] * self.config.vectors
        cute.arch.griddepcontrol_wait()  # the launch before may read the memory that this one writes
        cute.arch.griddepcontrol_launch_dependents()  # attention's start, until its own wait, takes no time then
        begin, end = wanted_keys(self.config, operands, numbers, batch)
        first += begin * key_vectors
        if first < end * key_vectors:
            if side == 0:
                expand_vectors(self.config, operands, "k", batch, first + thread, end)
            else:
                expand_vectors(self.config, operands, "v", batch, first + thread, end)


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


@cute.jit
def expand_vectors(config: cutlass.Constexpr, operands, ring: cutlass.Constexpr, batch, first, end):
    """Dequantise VECTORS vectors of a batch row's K or V, THREADS apart. All addresses are found before any vector is
    read, and all are read before any is written, so that their latencies pass together. first: number of the first one.
    end: of the batch row's keys, of which the first vector is one's."""
    wide = operands.wide_k if ring == "k" else operands.wide_v
    key_vectors, size = wide.shape[2] * config.vectors, config.format.kv_row(VECTOR)
    vectors = [first + i * THREADS for i in range(VECTORS)]
    keys = [vector // key_vectors for vector in vectors]
    rests = [vector - key * key_vectors for vector, key in zip(vectors, keys, strict=True)]
    # In place of keys that do not exist, the last one is read and not used.
    near = [cutlass.min(key, end - 1) for key in keys]
    places = [address_of(config, operands, batch, key) for key in near]
    codes = [cute.make_rmem_tensor(size, Uint8) for _ in range(VECTORS)]
    scales = [Uint8(0)] * VECTORS
    for i in cutlass.range_constexpr(VECTORS):
        head, number = rests[i] // config.vectors, rests[i] % config.vectors
        source = kv_row(config, operands, ring, places[i][0], head)
        cute.autovec_copy(cute.local_tile(source.codes, (size,), (number,)), codes[i])
        if cutlass.const_expr(is_nvfp4(config)):
            scales[i] = source.scale(number * VECTOR // config.format.kv_block)
    for i in cutlass.range_constexpr(VECTORS):
        if keys[i] == near[i]:
            out = cute.make_rmem_tensor(VECTOR, wide.element_type)
            halves, exists = cute.recast_tensor(out, Uint32), places[i][1]
            words = wide_vector(config, cute.recast_tensor(codes[i], Uint32), scales[i])
            for n in cutlass.range_constexpr(VECTOR // 2):
                halves[n] = Uint32(cutlass.select_(exists, words[n], Uint32(0)))
            target = wide[batch, keys[i], rests[i] // config.vectors, None]
            cute.autovec_copy(out, cute.local_tile(target, (VECTOR,), (rests[i] % config.vectors,)))


def wide_vector(config, codes, scale) -> list:
    """VECTOR numbers in 16 bits, two neighbours in a word. codes: words of their codes. scale: their e4m3 scale, if
    they are NVFP4."""
    kind = codes_of(config, config.format.dtype)
    pair = kind.scale_pair(Uint32(scale)) if is_nvfp4(config) else None
    wide = kind.in_order([codes[i] for i in range(cute.size(codes))], pair)
    if is_nvfp4(config):  # exact: seven bits, and fp16 represents the largest and the smallest of them
        wide = [scaled_pair(word, *UNITS[config.format.dtype]) for word in wide]
    return wide
