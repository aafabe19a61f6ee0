"""Runs a checked decode step: plan, compile, launch; as a chain of kernels or as one, on a GPU or simulated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from warpspec.common.architecture import Family
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import Kernel, Target
from warpspec.common.simulator import joined
from warpspec.swap.config import (
    GRID_COUNTERS,
    GROUP_ROWS,
    GROUP_TILES,
    K_TILE,
    PHASES,
    POOL_COLUMNS,
    ROUTER_WIDTH,
    SLOTS,
    TILE_M,
    TILE_NS,
    WARPS,
    SwapConfig,
    Tiles,
)
from warpspec.swap.operands import Operands, taken
from warpspec.swap.problem import SwapProblem
from warpspec.swap.weights import SwapFFNWeights

D_MODELS = (256, 512, 768, 1024)  # values of D that kernels take
MOST_SPLITS = 8  # parts of K of the down product
# How compiled host functions report cudaErrorCooperativeLaunchTooLarge, in lower case.
TOO_LARGE = "error code: 720"
CTAS_PER_SM_SMALL = 2  # CTAs an SM of a phase without products: as many as its registers allow


def _host_and_arguments(config: SwapConfig) -> tuple:
    from warpspec.swap.device.host import host_and_arguments

    return host_and_arguments(config)


SWAP = Kernel("swap", _host_and_arguments)


class SwapKernels(NamedTuple):
    """The kernels of one architecture.

    arch: as in ``SwapConfig``. fuses: whether it can run the step as one kernel, with tiles shared in clusters.
    """

    arch: str
    fuses: bool


SWAP_FFN = Family(
    "swap_ffn_decode", sm90=SwapKernels("sm90", fuses=True), sm100=SwapKernels("sm100", fuses=False)
)


@dataclass(frozen=True)
class SwapPlan:
    """The host's decisions for a problem on a target.

    fused: run one kernel, otherwise a chain of kernels. tiles: tiles of both products. splits: parts of K that the down
    product is cut into. ctas: the most CTAs of a kernel with products.
    """

    fused: bool
    tiles: Tiles
    splits: int
    ctas: int


def check_supported(problem: SwapProblem) -> None:
    """Raise UnsupportedProblem, naming the constraint, for a problem that no kernel runs."""
    for name, value, allowed in (
        ("d_model", problem.d_model, D_MODELS),
        ("d_router", problem.d_router, (ROUTER_WIDTH,)),
        ("collapse_k", problem.collapse_k, (SLOTS,)),
    ):
        if value not in allowed:
            raise UnsupportedProblem(f"{name}: kernels take {' or '.join(map(str, allowed))}, got {value}")


def make_plan(problem: SwapProblem, target: Target, tiles: Tiles | None = None) -> SwapPlan:
    """The plan for a problem that kernels run, as measured at the published sizes (docs/measurements.md).

    tiles: replaces the chosen ones. On sm_90a a step is one kernel if every CTA has at most one tile of the up product,
    as with one request. Otherwise it is a chain, whose down product has tiles of 256 columns if these fill the GPU.
    """
    fused, row_tiles = False, -(-problem.rows // TILE_M)
    if not SWAP_FFN.of(target.architecture).fuses:
        tiles = tiles or Tiles(cluster_m=1)
    else:
        fused = row_tiles * (2 * problem.d_ff // Tiles().up_n) <= target.sm_count
        wide = max(TILE_NS)
        fills = problem.d_model % wide == 0 and row_tiles * (problem.d_model // wide) >= target.sm_count
        tiles = tiles or Tiles(down_n=wide if fills and not fused else Tiles().down_n)
    ctas = max(target.sm_count // tiles.cluster, 1) * tiles.cluster
    units = row_tiles * (problem.d_model // tiles.down_n)
    splits = max(1, min(MOST_SPLITS, ctas // units, problem.d_ff // K_TILE))
    return SwapPlan(fused, tiles, splits, ctas)


class Step:
    """A problem ready to run on a target: ``Step(problem, target, plan)``, then ``run`` as often as wanted.

    forced: the router's decisions are an argument, for tests. recorded: the router writes its decisions, for tests.
    seed: the simulator's.
    """

    def __init__(
        self,
        problem: SwapProblem,
        target: Target,
        plan: SwapPlan | None = None,
        *,
        forced: bool = False,
        recorded: bool = False,
        seed: int = 0,
    ):
        check_supported(problem)
        self.problem, self.target = problem, target
        self.plan = plan or make_plan(problem, target)
        self.forced, self.recorded = forced, recorded
        phases = ("fused",) if self.plan.fused else PHASES[:-1]
        self.launchers = {
            phase: SWAP.launcher(self.config(phase), target, seed=seed)
            for phase in phases
            if phase != "swap" or problem.events > 1
        }
        self.taken = {phase: taken(self.config(phase)) for phase in self.launchers}

    def config(self, phase: str) -> SwapConfig:
        """The configuration of a phase's kernel."""
        plan, routes = self.plan, phase in ("first", "swap", "fused")
        sums = phase in ("swap", "rows", "fused")
        return SwapConfig(
            arch=SWAP_FFN.of(self.target.architecture).arch,
            phase=phase,
            d_model=self.problem.d_model,
            tiles=plan.tiles if phase in ("up", "down", "fused") else Tiles(),
            splits=plan.splits if sums else 1,
            residual=self.problem.residual and sums,
            eps=self.problem.eps,
            forced=self.forced and routes,
            recorded=self.recorded and routes,
        )

    def ctas(self, phase: str) -> int:
        """CTAs of a phase's grid."""
        problem, plan = self.problem, self.plan
        if phase == "fused":
            return plan.ctas
        if phase in ("up", "down"):
            tiles = plan.tiles
            groups = -(-problem.rows // (TILE_M * tiles.cluster_m))
            columns = 2 * problem.d_ff if phase == "up" else problem.d_model
            items = groups * (columns // (self.config(phase).columns(phase) * tiles.cluster_n))
            items *= plan.splits if phase == "down" else 1
            return min(items * tiles.cluster, plan.ctas)
        most = {
            "pool": problem.batch * problem.d_model // POOL_COLUMNS,
            "basis": problem.collapse_r,
            "decode": -(-problem.d_model // WARPS),
        }.get(phase, -(-problem.rows // GROUP_ROWS))
        return min(most, CTAS_PER_SM_SMALL * self.target.sm_count)

    def operands(self, x, ram, map_, w: SwapFFNWeights, delta, forced=None, recorded=None, margins=None):
        """All tensors of a call: the caller's, the weights', and newly allocated ones between phases."""
        p, plan = self.problem, self.plan

        def empty(*shape, dtype=torch.float32):
            return torch.empty(*shape, dtype=dtype, device=x.device)

        return Operands(
            x=x,
            core_scale=w.core_scale,
            core_shift=w.core_shift,
            core_alpha=w.core_alpha,
            **{name: w[name] for name in ("router_norm", "router_w", "swap_w", "swap_b", "bank_w", "bank_b")},
            w13=w.w13,
            w2=w.w2,
            basis=w["basis"],
            decoder=w["decoder"],
            ram=ram.view(p.rows, *ram.shape[2:]),
            map=map_.view(p.rows),
            vectors=empty(p.rows, p.d_model, dtype=torch.bfloat16),
            inverse=empty(p.rows),
            hidden=empty(p.rows, p.d_ff, dtype=torch.bfloat16),
            partial=empty(plan.splits, p.rows, p.d_model),
            pooled=empty(p.batch, p.collapse_k, p.d_model),
            summed=empty(p.batch, p.collapse_r),
            delta=delta,
            counters=self.counters(x.device) if plan.fused else None,
            forced=forced,
            recorded=recorded,
            margins=margins,
        )

    def counters(self, device: torch.device) -> torch.Tensor:
        """Counters that are zero before a launch; the fused kernel leaves them zero.

        Each stream has its own, because it runs its launches one after another. A launch that is captured into a graph
        gets its own, which the graph fills with zeros at every replay.
        """
        row_tiles = -(-self.problem.rows // TILE_M)
        column_tiles = 2 * self.problem.d_ff // self.plan.tiles.up_n
        words = (2 + -(-column_tiles // GROUP_TILES)) * row_tiles + len(GRID_COUNTERS)
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return torch.zeros(words, dtype=torch.int32, device=device)
        key = (device.index, torch.cuda.current_stream(device).cuda_stream, words)
        if key not in _counters:
            _counters[key] = torch.zeros(words, dtype=torch.int32, device=device)
        return _counters[key]

    def launch(self, phase: str, operands: Operands, event: int = 0):
        """Launch one phase's kernel. Returns the simulator's report, or None on a GPU."""
        names = self.taken[phase]
        given = (
            tensor if name in names else None for name, tensor in zip(Operands._fields, operands, strict=True)
        )
        ctas = self.ctas(phase)
        try:
            return self.launchers[phase](*given, ctas, event, self.problem.ffn_steps, self.problem.k_ffn)
        except Exception as error:
            if phase == "fused" and TOO_LARGE in str(error).lower():
                raise RuntimeError(
                    f"swap_ffn_decode: the GPU has no room for all {ctas} CTAs of the step at once, an SM each (a "
                    "green context or MPS may hold SMs): the cooperative launch was refused, nothing was written"
                ) from error
            raise

    def phases(self):
        """(phase, event) of every launch, in order."""
        if self.plan.fused:
            return [("fused", 0)]
        found = []
        for event in range(self.problem.events):
            for step in range(self.problem.k_ffn):
                rows = "rows" if step else "swap" if event else "first"
                found += [(rows, event), ("up", event), ("down", event)]
        return [*found, ("rows", 0), ("pool", 0), ("basis", 0), ("decode", 0)]

    def run(self, operands: Operands):
        """Make all launches, on the tensors' device and its current stream, without synchronisation. Returns the
        simulator's ``SimReport``, or None on a GPU."""
        with self.target.current():
            reports = [self.launch(phase, operands, event) for phase, event in self.phases()]
        return joined(*reports)


_counters: dict[tuple, torch.Tensor] = {}


@lru_cache(maxsize=256)
def prepare(problem: SwapProblem, target: Target) -> Step:
    """The compiled step of a problem; reused if it has been prepared before."""
    return Step(problem, target)
