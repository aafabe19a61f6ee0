"""Sort choices by expert in one launch, for sm_90a and sm_100a: from ids to rows, offsets and the list of work.

One CTA or a cluster does a stable counting sort (``counting``). The result is deterministic; the order of rows is that
of ``permute.sort_tokens``, bit for bit. If there are further CTAs, they meanwhile write the tokens as activations, with
columns in the order of ``streamed.column_order``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Uint32

from warpspec.common.device.host import host_function
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import MAX_SMEM_PER_CTA, QUAD, VECTOR_BYTES, WARP_THREADS, WORD_BYTES
from warpspec.common.launch import Kernel, Target, target_of
from warpspec.common.operands import INT32, UINT32, Number, Operand, fakes
from warpspec.moe.counting import BATCH, allocate, sort
from warpspec.moe.permute import WORK_COLUMNS, SortedTokens, head_rows
from warpspec.moe.streamed import CHUNK, padded_k

COPY_THREADS = 1024  # most threads of an SM in CTAs that write activations
VECTOR_WORDS = VECTOR_BYTES // WORD_BYTES
VECTOR_COLUMNS = VECTOR_BYTES // 2  # bf16 columns of a vector
COPIES = 4  # vectors of a lane whose loads are issued together
SEGMENT = COPIES * WARP_THREADS  # vectors that a warp copies at a time
CHUNK_WORDS = CHUNK // 2
CHUNK_VECTORS = CHUNK // VECTOR_COLUMNS


@dataclass(frozen=True)
class SortShape:
    """Threads that sort. warps: warps of a CTA. ctas: CTAs of the cluster."""

    warps: int
    ctas: int

    def __str__(self):
        return f"sort {self.ctas} x {self.warps} warps"


FEW_CHOICES, FEW, CLUSTER = 1024, SortShape(warps=4, ctas=1), SortShape(warps=32, ctas=8)


def choose_sort(choices: int) -> SortShape:
    """The shape for a number of choices."""
    return FEW if choices <= FEW_CHOICES else CLUSTER


@dataclass(frozen=True)
class SortConfig:
    """Configuration of the sort.

    experts: E, including the shared ones. shared: how many of them, counted from the last, every token takes. choices:
    k, without the shared ones. widths: widths of the classes of work entries, the widest first; (): make no list of
    work. An entry has at most as many rows as its class is wide, and an expert's last entry belongs to the narrowest
    class that holds it. reorders: whether tokens are written as activations. each: how many adjacent ids count as one
    expert (a rank of ``parallel``).
    """

    experts: int
    choices: int
    shared: int = 0
    shape: SortShape = FEW
    widths: tuple[int, ...] = ()
    reorders: bool = False
    each: int = 1

    def __post_init__(self):
        if self.smem_bytes > MAX_SMEM_PER_CTA:
            raise UnsupportedProblem(f"experts: {self.experts} are more than the sort has room for")

    @property
    def taken(self) -> int:
        """Choices of a token, including the shared experts."""
        return self.choices + self.shared

    @property
    def threads(self) -> int:
        return self.shape.warps * WARP_THREADS

    @property
    def granule(self) -> int:
        """A warp's stretch is a multiple of this many choices."""
        return WARP_THREADS * (BATCH if self.shape.ctas == 1 else 1)

    @property
    def bins(self) -> int:
        """Bins: the experts, and one for choices without an expert."""
        return self.experts + 1

    @property
    def pitch(self) -> int:
        """Counters from one bin to the next. An odd number, so that lanes that count different bins have no bank
        conflicts."""
        return self.shape.warps | 1

    @property
    def counters(self) -> int:
        return self.bins * self.pitch

    @property
    def smem_bytes(self) -> int:
        of_cluster = 3 * self.bins if self.shape.ctas > 1 else 0
        return (self.counters + 2 * self.shape.warps + of_cluster) * WORD_BYTES


class SortOperands(NamedTuple):
    """Arguments of the sort.

    ids: [T, k]. source: [T * taken]. position: [T, taken]. offsets: [E]. work: [heads + entries, 4]. x: [T, H/2] words.
    activations: [T, padded H / 2] words. ctas: number of CTAs, in whole clusters: first those that sort, then those
    that write activations.
    """

    ids: Annotated[Any, Operand(INT32, 2)]
    source: Annotated[Any, Operand(INT32, 1)]
    position: Annotated[Any, Operand(INT32, 2)]
    offsets: Annotated[Any, Operand(INT32, 1)]
    work: Annotated[Any, Operand(INT32, 2, WORK_COLUMNS, when="widths")]
    x: Annotated[Any, Operand(UINT32, 2, when="reorders")]
    activations: Annotated[Any, Operand(UINT32, 2, alignment=VECTOR_BYTES, when="reorders")]
    ctas: Annotated[Any, Number(INT32)]


class SortChoices:
    """``SortChoices(config)(...)`` is the host function of ``sort_choices``."""

    def __init__(self, config: SortConfig):
        self.config = config

    @host_function(SortOperands)
    def __call__(self, operands: SortOperands, stream: CUstream):
        """Launch the kernel."""
        together = self.config.shape.ctas
        self.kernel(operands._replace(ctas=None)).launch(
            grid=(operands.ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            cluster=(together, 1, 1) if cutlass.const_expr(together > 1) else None,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        shared = allocate(config)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if block < config.shape.ctas:
            sort(config, operands, shared, thread, block)
        elif cutlass.const_expr(config.reorders):
            reorder(config, operands.x, operands.activations, thread, block - config.shape.ctas)


@cute.jit
def reorder(config: cutlass.Constexpr, x, activations, thread, block):
    """The CTAs that write activations: a warp takes a segment of a token at a time. 16 bytes of an activation row are
    four words of the token, at fixed distances."""
    lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
    warps = (cute.arch.grid_dim()[0] - config.shape.ctas) * config.shape.warps
    vectors = activations.shape[1] // VECTOR_WORDS
    segments = cute.ceil_div(vectors, SEGMENT)
    for index in cutlass.range(
        block * config.shape.warps + warp, activations.shape[0] * segments, warps, unroll=1
    ):
        row, written = x[index // segments, None], activations[index // segments, None]
        begin = index % segments * SEGMENT + lane
        words = cute.make_rmem_tensor((VECTOR_WORDS, COPIES), Uint32)
        words.fill(Uint32(0))
        for i in cutlass.range_constexpr(COPIES):  # issue all loads first, so that they overlap
            vector = begin + i * WARP_THREADS
            first = vector // CHUNK_VECTORS * CHUNK_WORDS + vector % CHUNK_VECTORS
            for q in cutlass.range_constexpr(QUAD):
                if first + q * CHUNK_VECTORS < x.shape[1]:
                    words[q, i] = row[first + q * CHUNK_VECTORS]
        for i in cutlass.range_constexpr(COPIES):
            vector = begin + i * WARP_THREADS
            if vector < vectors:
                cute.autovec_copy(words[None, i], cute.local_tile(written, (VECTOR_WORDS,), (vector,)))


def _host_and_arguments(config: SortConfig) -> tuple:
    """The host function and its arguments without the stream."""
    return (SortChoices(config), *fakes(SortOperands, config))


sort_kernel = Kernel("moe.sort", _host_and_arguments)  # by SortConfig


def entries_bound(rows: int, experts: int, most: int) -> int:
    """The most entries of work that rows of experts can make if each entry has at most ``most`` rows."""
    return rows // most + min(experts, rows)


def sort_choices(
    topk_ids: torch.Tensor,
    experts: int,
    *,
    shared: int = 0,
    widths: tuple[int, ...] = (),
    x: torch.Tensor | None = None,
    each: int = 1,
    shape: SortShape | None = None,
    target: Target | None = None,
) -> tuple[SortedTokens, torch.Tensor | None, torch.Tensor | None, object]:
    """Sort the choices topk_ids [T, k] (int32) by expert, in one launch without synchronisation.

    experts: E. Every token takes the last ``shared`` of them as further choices, and no id names them. Ids that name no
    other expert are dropped. widths, each: as in ``SortConfig``. x: bf16 [T, H], to be written as activations. shape:
    replaces the chosen one.

    Returns (sorted tokens of k + shared choices; work int32 [heads + entries, 4]: where each class ends, then (expert,
    first row, rows, -), by class and expert, or None; activations bf16 [T, padded H] or None; the simulator's report
    or None).
    """
    tokens, choices = topk_ids.shape
    taken = choices + shared
    count = tokens * taken
    target = target or target_of(topk_ids.device)

    def empty(*shape, dtype=torch.int32):
        return torch.empty(*shape, dtype=dtype, device=topk_ids.device)

    result = SortedTokens(empty(count), empty(tokens, taken), empty(experts))
    entries = entries_bound(count, experts, widths[0]) + head_rows(widths) if widths else 0
    work = empty(entries, WORK_COLUMNS) if widths else None
    shape = shape or choose_sort(count)
    activations, ctas = None, shape.ctas
    config = SortConfig(experts, choices, shared, shape, widths, x is not None, each)
    if x is not None:
        activations = empty(tokens, padded_k(x.shape[1]), dtype=torch.bfloat16)
        most = target.sm_count * COPY_THREADS // config.threads
        segments = tokens * -(-activations.shape[1] // (VECTOR_COLUMNS * SEGMENT))
        others = min(-(-segments // shape.warps), max(1, most))
        ctas += -(-others // shape.ctas) * shape.ctas
    words = [None if t is None else t.view(torch.uint32) for t in (x, activations)]
    report = sort_kernel.run(
        config, target, topk_ids, result.source, result.position, result.offsets, work, *words, ctas
    )
    return result, work, activations, report
