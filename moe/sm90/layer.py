"""The layer on sm_90a: sort, GEMM 1 with the activation, GEMM 2, weighted sum; each starts as the one before ends.

"w4a4" rounds activations to NVFP4, in a launch of its own before each GEMM (``round_rows``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from warpspec.common.launch import Target
from warpspec.moe.permute import WORK_COLUMNS, Routing, SortedTokens, head_rows
from warpspec.moe.problem import GroupedProblem, LayerProblem
from warpspec.moe.sm90 import grouped_gemm
from warpspec.moe.sm90.config import Shape, StreamConfig
from warpspec.moe.sm90.plan import UNSORTED_ROWS, choose_shape
from warpspec.moe.sm90.round_rows import round_middle, round_tokens
from warpspec.moe.sort import SortShape, sort_choices
from warpspec.moe.streamed import StreamedWeights, padded_k, reorder, restore
from warpspec.moe.unpermute import unpermute

stream_config = lru_cache(maxsize=1024)(StreamConfig)  # checking one takes longer than a launch


def gated_config(w13: StreamedWeights, shape: Shape, problem, **flags) -> StreamConfig:
    return stream_config(
        shape=shape,
        block=w13.block,
        epilogue=problem.activation,
        has_limit=problem.limit is not None,
        has_bias=w13.bias is not None,
        **flags,
    )


class Layer:
    """The stages of a checked problem with at least one row.

    precision: "w4a16" or "w4a4". shapes (both GEMMs' tiles), sort_shape, unsorted: replace what is chosen. If unsorted,
    every choice is the only row of a tile, in the order of choices, and GEMM 1 reads the tokens themselves; the bits
    are the same. ``run`` does all stages on the current stream: four launches, six for "w4a4", three if unsorted.
    reports: the simulator's for each stage, None on a GPU.
    """

    def __init__(
        self,
        problem: LayerProblem,
        w13,
        w2,
        target: Target,
        shapes: tuple[Shape, Shape] | None = None,
        precision: str = "w4a16",
        sort_shape: SortShape | None = None,
        unsorted: bool | None = None,
    ):
        self.sort_shape = sort_shape
        self.keeps_fp32 = precision == "w4a4"
        self.problem, self.target, self.experts = problem, target, w13.experts
        first, second = shapes or (
            choose_shape(problem.rows, w.experts, w.row_tiles, target.sm_count) for w in (w13, w2)
        )
        routing = Routing(problem.experts, problem.choices, problem.shared)
        if unsorted is None:
            unsorted = problem.rows <= UNSORTED_ROWS and problem.choices > 0 and not self.keeps_fp32
        self.routing = routing if unsorted else None
        self.gate_config = gated_config(
            w13, first, problem, choices=routing.taken, keeps_fp32=self.keeps_fp32, routing=self.routing
        )
        self.down_config = stream_config(
            second, w2.block, has_bias=w2.bias is not None, early=True, routing=self.routing
        )
        self.reports = []

    def buffers(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Uninitialised (activations between the GEMMs, [R, padded I] in the kernel's order; rows of GEMM 2 [R, H]),
        bf16. For "w4a4" the first is fp32."""
        rows, hidden = self.problem.rows, self.problem.hidden
        middle = torch.float32 if self.keeps_fp32 else x.dtype
        return x.new_empty(rows, padded_k(self.problem.width), dtype=middle), x.new_empty(rows, hidden)

    def sort(self, x: torch.Tensor, topk_ids: torch.Tensor) -> tuple:
        """Sort: (sorted tokens, list of work, activations, their scales or None); if unsorted (None, topk_ids, x,
        None)."""
        if x.shape[0] == 1:
            x = x[0][None]  # the stride of a dimension of size 1 need not be even
        if self.routing:
            return None, topk_ids.contiguous(), x, None
        *found, report = sort_choices(
            topk_ids.contiguous(),
            self.experts,
            shared=self.problem.shared,
            widths=self.gate_config.widths,
            x=None if self.keeps_fp32 else x,
            shape=self.sort_shape,
            target=self.target,
        )
        self.reports.append(report)
        scale = None
        if self.keeps_fp32:
            found[-1], scale, report = round_tokens(x, self.target)
            self.reports.append(report)
        return *found, scale

    def first(self, found: tuple, w13: StreamedWeights, h: torch.Tensor) -> None:
        """GEMM 1 and the activation. found: what ``sort`` returned."""
        tokens, work, activations, scale = found
        options = dict(row_scale=scale, limit=self.problem.limit, target=self.target)
        source = tokens.source if tokens else None
        self.reports.append(grouped_gemm(self.gate_config, activations, source, w13, work, h, **options))

    def second(self, found: tuple, h: torch.Tensor, w2: StreamedWeights, y: torch.Tensor) -> None:
        """GEMM 2."""
        self.reports.append(grouped_gemm(self.down_config, h, None, w2, found[1], y, target=self.target))

    def sum(self, found: tuple, y: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
        """The weighted sum of every token."""
        position = found[1] if self.routing else found[0].position
        options = dict(dependent=True, routing=self.routing, target=self.target)
        self.reports.append(unpermute(y, position, topk_weights.contiguous(), out, **options))

    def round(self, found: tuple, h: torch.Tensor, intermediate_scale: torch.Tensor) -> torch.Tensor:
        """Round GEMM 2's activations, for "w4a4"."""
        rounded, report = round_middle(h, found[0].offsets, intermediate_scale, self.target)
        self.reports.append(report)
        return rounded

    def run(self, x, topk_ids, topk_weights, w13, w2, out, intermediate_scale=None) -> None:
        """Run all stages. out: [T, H]. intermediate_scale: fp32 [E], used by "w4a4"."""
        self.reports = []
        if self.keeps_fp32:
            w2 = replace(w2, global_scale=w2.global_scale * intermediate_scale[:, None])
        with self.target.current():
            found = self.sort(x, topk_ids)
            h, y = self.buffers(x)
            self.first(found, w13, h)
            if self.keeps_fp32:
                h = self.round(found, h, intermediate_scale.contiguous())
            self.second(found, h, w2, y)
            self.sum(found, y, topk_weights, out)


def run_grouped(
    problem: GroupedProblem,
    a: torch.Tensor,
    tokens: SortedTokens,
    w13: StreamedWeights,
    out: torch.Tensor,
    *,
    target: Target,
) -> list:
    """Write out [R, I] for rows that are sorted already. Returns the simulator's reports, or Nones."""
    shape = choose_shape(problem.rows, problem.experts, w13.row_tiles, target.sm_count)
    config = gated_config(w13, shape, problem)
    work = list_work(tokens.offsets, config.widths, problem.rows)
    h = a.new_empty(problem.rows, padded_k(problem.width))
    report = grouped_gemm(config, reorder(a), None, w13, work, h, limit=problem.limit, target=target)
    out.copy_(restore(h, problem.width))
    return [report]


def list_work(offsets: torch.Tensor, widths: tuple[int, ...], rows: int) -> torch.Tensor:
    """The list of work of running ends, in torch operations, as ``sort.sort_choices`` makes it."""
    from warpspec.moe.sort import entries_bound

    experts, most = len(offsets), widths[0]
    starts = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    whole, left = (offsets - starts) // most, (offsets - starts) % most
    counts = [
        ((left > low) & (left <= high)).int() for high, low in zip(widths, (*widths[1:], 0), strict=True)
    ]
    counts[0] = counts[0] + whole
    counts = torch.cat(counts)  # [class, expert]
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    bound = entries_bound(rows, experts, most)
    entry = torch.arange(bound, dtype=torch.int32, device=offsets.device)
    kind = torch.searchsorted(ends, entry, right=True).clamp(max=len(ends) - 1)
    expert = kind % experts
    first = starts[expert] + (entry - (ends - counts)[kind]) * most
    first += torch.where(kind >= experts, whole[expert] * most, 0)
    heads = head_rows(widths)
    work = offsets.new_zeros(heads + bound, WORK_COLUMNS)
    work[:heads].view(-1)[: len(widths)] = ends[experts - 1 :: experts]
    work[heads:, 0] = expert
    work[heads:, 1] = first
    work[heads:, 2] = (offsets[expert] - first).clamp(max=most)
    return work
