"""Insert: normalise and rotate queries and keys, quantise keys, store them in a pool. One warp a row."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from warpspec.common.device.host import host_function
from warpspec.common.device.words import load_words, store_words
from warpspec.common.hardware import WARP_THREADS
from warpspec.common.launch import Kernel
from warpspec.common.operands import fakes
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
from warpspec.latent.cache.operands import InsertOperands, PoolNumbers


class Insert:
    """``Insert(config)(...)`` is the host function."""

    def __init__(self, config: InsertConfig):
        self.config = config

    @host_function(InsertOperands, PoolNumbers)
    def __call__(self, operands: InsertOperands, numbers: PoolNumbers, stream: CUstream):
        """Launch the kernel."""
        tokens = operands.kv.shape[0]
        rows = tokens * (1 + operands.q.shape[1]) if self.config.queries else tokens
        self.kernel(operands, numbers, rows).launch(
            grid=(cute.ceil_div(rows, self.config.warps), 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands, numbers, rows: Int32):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread % WARP_THREADS
        row = block * config.warps + thread // WARP_THREADS
        if row < rows:
            if cutlass.const_expr(config.queries):
                heads = operands.q.shape[1]
                token, head = row // (heads + 1), row % (heads + 1)
                if head < heads:
                    insert_query(config, operands, numbers, token, head, lane)
                else:
                    insert_key(config, operands, numbers, token, lane)
            else:
                insert_key(config, operands, numbers, row, lane)


@cute.jit
def insert_query(config: cutlass.Constexpr, operands, numbers, token, head, lane):
    """Normalise, rotate and write one head of one token."""
    source, target = operands.q[token, head, None], operands.q_out[token, head, None]
    position, count = operands.positions[token], config.fmt.dim // WARP_THREADS
    words = load_words(source, lane * (count // 2), count // 2)
    angles = load_angles(operands.cos_sin, position, lane, count)
    values = to_bf16(normalize(unpack(words), numbers.eps, None))
    store_words(target, lane * (count // 2), pack(rotate(values, angles)))


@cute.jit
def insert_key(config: cutlass.Constexpr, operands, numbers, token, lane):
    """Normalise and rotate one token's key where the configuration says so, quantise it, store it at its slot."""
    count = config.fmt.dim // WARP_THREADS
    words = load_words(operands.kv[token, None], lane * (count // 2), count // 2)
    slot = Int32(operands.slots[token])
    values = unpack(words)
    if cutlass.const_expr(config.project):
        position = Int32(operands.positions[token // config.share])
        angles = load_angles(operands.cos_sin, position, lane, count)
        if cutlass.const_expr(config.weight is not None):
            weights = load_weights(operands.weight, lane, count)
            values = to_bf16(normalize(values, numbers.eps, weights))
        values = to_bf16(rotate(values, angles))
        if cutlass.const_expr(config.hadamard):
            values = to_bf16(hadamard_transform(values, lane))
    store_row(config.fmt, operands.pool, numbers.page_size, slot, values, lane)


def load_weights(weight: cute.Tensor, lane, numbers: int) -> list:
    """The norm's weights, fp32, of the lane's numbers."""
    loaded = cute.make_rmem_tensor(numbers, weight.element_type)
    cute.autovec_copy(cute.local_tile(weight, (numbers,), (lane,)), loaded)
    return [loaded[i].to(Float32) for i in range(numbers)]


def host_and_arguments(config: InsertConfig) -> tuple:
    """The host function and its arguments without the stream."""
    return (Insert(config), *fakes(InsertOperands, config), *fakes(PoolNumbers, config))


INSERT = Kernel("cache.insert", host_and_arguments)  # by InsertConfig
