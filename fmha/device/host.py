"""The host side of an attention kernel: the function that is compiled and called, the same for every architecture."""

from __future__ import annotations

from cuda.bindings.driver import CUstream
from cutlass import Int32, cute

from warpspec.common.device import tma
from warpspec.common.device.host import host_function
from warpspec.common.operands import fakes
from warpspec.fmha.config import AttentionKernel
from warpspec.fmha.heads import BLOCK, HeadSizes
from warpspec.fmha.numbers import LaunchNumbers
from warpspec.fmha.operands import Operands
from warpspec.fmha.tiles import KvTile

# All of an SM's L1 that can be shared memory: tiles fill it.
SMEM_CARVEOUT_PERCENT = 100


class AttentionHost:
    """``cute.compile(Attention(config), ...)`` makes one kernel, whose arguments ``Operands`` and ``LaunchNumbers``
    declare. An architecture's ``Attention`` adds ``launch``, which gets them."""

    def __init__(self, config: AttentionKernel):
        self.config = config

    @host_function(Operands, LaunchNumbers)
    def __call__(self, operands: Operands, numbers: LaunchNumbers, stream: CUstream):
        self.launch(with_batch(operands, packed_fields(self.config)), numbers, stream)

    def loads(self, operands: Operands) -> list:
        """``tma.make_load`` of Q, and of K and V or the one tensor that is both."""
        config = self.config
        found = [tma.make_load(q_view(config.heads, operands.q), config.q_box)]
        for ring in config.format.rings:
            tensor = operands.v if ring == "v" else operands.k
            view, box = kv_view(config.kv, tensor, ring), config.kv.box(ring)
            found.append(tma.make_load(view, box, swizzled=config.kv.swizzled))
        return found


def packed_fields(config: AttentionKernel) -> list[str]:
    """Names of the operands that callers pack, without a batch dimension."""
    packed = []
    if config.requests.packed_q:
        packed += ["q"] if config.output.splits else ["q", "o", "lse", "row_max", "row_sum"]
    if config.requests.packed_k:
        packed += ["k", "v"]
    return packed


def with_batch(operands, names):
    """The record of operands with a batch dimension of 1 in front of those of these names that are there."""
    changed = {}
    for name in names:
        t = getattr(operands, name)
        if t is not None:
            layout = cute.make_layout((Int32(1), *t.shape), stride=(t.stride[0], *t.stride))
            changed[name] = cute.make_tensor(t.iterator, layout)
    return operands._replace(**changed)


def q_view(heads: HeadSizes, q: cute.Tensor) -> cute.Tensor:
    """View (D, HEAD, QUERY, BLOCK, BATCH) of q, D cut into blocks; one block of all of D if it is not ``whole``."""
    batch, seq_q, heads_q, size = q.shape
    if not heads.whole:
        return cute.make_tensor(
            q.iterator,
            cute.make_layout(
                (size, heads_q, seq_q, 1, batch), stride=(1, q.stride[2], q.stride[1], size, q.stride[0])
            ),
        )
    layout = cute.make_layout(
        (BLOCK, heads_q, seq_q, heads.qk_blocks, batch),
        stride=(1, q.stride[2], q.stride[1], BLOCK, q.stride[0]),
    )
    return cute.make_tensor(q.iterator, layout)


def kv_view(kv: KvTile, t: cute.Tensor, ring: str = "k") -> cute.Tensor:
    """View (D, KEY, BLOCK, KV_HEAD, BATCH) of k or v; paged, (D, KEY of the page, BLOCK, KV_HEAD, PAGE). D as in
    ``q_view``."""
    if not kv.heads.whole:
        size = t.shape[3]
        layout = cute.make_layout(
            (size, t.shape[1], 1, t.shape[2], t.shape[0]),
            stride=(1, t.stride[1], size, t.stride[2], t.stride[0]),
        )
        return cute.make_tensor(t.iterator, layout)
    layout = cute.make_layout(
        (kv.span, t.shape[1], kv.spans(ring), t.shape[2], t.shape[0]),
        stride=(1, t.stride[1], kv.span, t.stride[2], t.stride[0]),
    )
    return cute.make_tensor(t.iterator, layout)


def fake_arguments(config: AttentionKernel) -> tuple:
    """Fake arguments to compile a configuration's kernel with: those of ``AttentionHost.__call__`` except the
    stream."""
    return (*fakes(Operands, config), *fakes(LaunchNumbers, config))
