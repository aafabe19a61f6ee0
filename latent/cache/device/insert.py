"""Insert: normalise and rotate queries and keys, quantise keys, store them in a pool. One warp a row."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Uint32

from warpspec.common.compile import fake_rows
from warpspec.common.device.words import load_words, store_words
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.common.launch import Kernel
from warpspec.latent.cache.config import InsertConfig
from warpspec.latent.cache.device.rows import (
    hadamard_transform,
    load_angles,
    normalize,
    pack,
    rotate,
    store_row,
    to_bf16,
    unpack,
)

ROPE_DIM = 64  # numbers of a row of the table of angles
DTYPES = {"float32": Float32, "bfloat16": BFloat16}


class Insert:
    """``Insert(config)(...)`` is the host function."""

    def __init__(self, config: InsertConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        q,
        q_out,
        kv: cute.Tensor,
        weight,
        cos_sin,
        positions,
        slots: cute.Tensor,
        pool: cute.Tensor,
        page_size: Int32,
        eps: Float32,
        stream: CUstream,
    ):
        """Launch the kernel; tensors that the configuration does not use are None.

        q, q_out: [T, H, dim/2] words of two bf16. kv: [T, dim/2] words. weight: [dim]. cos_sin: [N, R] fp32. positions,
        slots: int32 [T]. pool: [pages, words].
        """
        tokens = kv.shape[0]
        rows = tokens * (1 + q.shape[1]) if cutlass.const_expr(self.config.queries) else tokens
        self.kernel(q, q_out, kv, weight, cos_sin, positions, slots, pool, page_size, eps, rows).launch(
            grid=(cute.ceil_div(rows, self.config.warps), 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, q, q_out, kv, weight, cos_sin, positions, slots, pool, page_size, eps, rows: Int32):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread % WARP_THREADS
        row = block * config.warps + thread // WARP_THREADS
        if row < rows:
            if cutlass.const_expr(config.queries):
                heads = q.shape[1]
                token, head = row // (heads + 1), row % (heads + 1)
                if head < heads:
                    insert_query(
                        config,
                        q[token, head, None],
                        q_out[token, head, None],
                        cos_sin,
                        positions[token],
                        eps,
                        lane,
                    )
                else:
                    insert_key(
                        config, kv, weight, cos_sin, positions, slots, pool, page_size, eps, token, lane
                    )
            else:
                insert_key(config, kv, weight, cos_sin, positions, slots, pool, page_size, eps, row, lane)


@cute.jit
def insert_query(config: cutlass.Constexpr, source, target, cos_sin, position, eps, lane):
    """Normalise, rotate and write one head of one token. source, target: (dim/2) words."""
    numbers = config.fmt.dim // WARP_THREADS
    words = load_words(source, lane * (numbers // 2), numbers // 2)
    angles = load_angles(cos_sin, position, lane, numbers)
    values = to_bf16(normalize(unpack(words), eps, None))
    store_words(target, lane * (numbers // 2), pack(rotate(values, angles)))


@cute.jit
def insert_key(
    config: cutlass.Constexpr, kv, weight, cos_sin, positions, slots, pool, page_size, eps, token, lane
):
    """Normalise and rotate one token's key where the configuration says so, quantise it, store it at its slot."""
    numbers = config.fmt.dim // WARP_THREADS
    words = load_words(kv[token, None], lane * (numbers // 2), numbers // 2)
    slot = Int32(slots[token])
    values = unpack(words)
    if cutlass.const_expr(config.project):
        angles = load_angles(cos_sin, Int32(positions[token // config.share]), lane, numbers)
        if cutlass.const_expr(config.weight is not None):
            values = to_bf16(normalize(values, eps, load_weights(weight, lane, numbers)))
        values = to_bf16(rotate(values, angles))
        if cutlass.const_expr(config.hadamard):
            values = to_bf16(hadamard_transform(values, lane))
    store_row(config.fmt, pool, page_size, slot, values, lane)


def load_weights(weight: cute.Tensor, lane, numbers: int) -> list:
    """The norm's weights, fp32, of the lane's numbers."""
    loaded = cute.make_rmem_tensor(numbers, weight.element_type)
    cute.autovec_copy(cute.local_tile(weight, (numbers,), (lane,)), loaded)
    return [loaded[i].to(Float32) for i in range(numbers)]


def host_and_arguments(config: InsertConfig) -> tuple:
    """The host function and its arguments without the stream."""

    def words(rank):
        return fake_rows(Uint32, rank, alignment=VECTOR_BYTES)

    dim = config.fmt.dim
    queries = words(3) if config.queries else None
    projected = (None, None, None)
    if config.project:
        projected = (
            fake_rows(DTYPES[config.weight], 1, dim, alignment=VECTOR_BYTES) if config.weight else None,
            fake_rows(Float32, 2, ROPE_DIM, alignment=VECTOR_BYTES),
            fake_rows(Int32, 1),
        )
    return (
        Insert(config),
        queries,
        queries if queries is None else words(3),
        words(2),
        *projected,
        fake_rows(Int32, 1),
        words(2),
        Int32(1),
        Float32(0.0),
    )


INSERT = Kernel("cache.insert", host_and_arguments)  # by InsertConfig
