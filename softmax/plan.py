"""Chooses the strategy that runs a problem, and its configuration: the least predicted time of all candidates.

``cost`` predicts the times. ``scripts/bench_softmax.py --regret`` runs every strategy's best candidate at shapes that
were not used to fit the model, and prints how far the choice is from the best.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from warpspec.common.hardware import (
    MAX_CLUSTER_CTAS,
    MAX_CTAS_PER_SM,
    MAX_SMEM_PER_CTA,
    MAX_THREADS_PER_SM,
    REGISTER_STEP,
    VECTOR_BYTES,
    WARP_THREADS,
    ctas_by_registers,
)
from warpspec.common.launch import Target
from warpspec.softmax import cost
from warpspec.softmax.problem import SoftmaxProblem

# Bytes of shared memory that a CTA needs besides its data: states, barriers, the system's part.
SMEM_BESIDE_DATA = 1536

# Limits of the configurations that are tried.
# Most vectors of a thread in the register kernel, without and with clusters. With more, they wait for each other.
ROWS_MOST_VECTORS, CLUSTER_MOST_VECTORS = 5, 5
CLUSTER_REGISTERS = {
    "float32": 64,
    "float16": 80,
    "bfloat16": 80,
}  # most that such a thread of a cluster needs
# Registers of a thread that has a part of a row, as compiled: a constant, a number for each vector, and a number if
# rows have edges. The key tells whether data is fp32, and whether several warps share a row.
REGISTERS = {
    (True, True): (20, 11, 6),
    (True, False): (13, 9, 7),
    (False, True): (17, 10, 5),
    (False, False): (16, 9, 8),
}
STAGED_THREADS, STAGED_VECTORS, STAGED_REGISTERS = (64, 1024), (7, 6, 4, 2), 40
ONCE_CLUSTER = 8  # least number of CTAs sharing an fp32 row for which its exponentials are computed once
# Vectors a thread for fp32 with many aligned rows of 16 CTAs. One more CTA then fits an SM.
STAGED_LONGER = (8,)
# Of CTAs whose shares come by several copies: the least size of a cluster, most CTAs on an SM by its size, vectors that
# a thread has before there are more threads, and most threads: of a share of at most SEVERAL_SHARE vectors, and of
# others.
SEVERAL_CLUSTER, SEVERAL_RESIDENTS, SEVERAL_VECTORS = 8, {8: 2, 16: 4}, 8
SEVERAL_THREADS, SEVERAL_SHARE = (256, 384), 8704
MOST_GROUPS = 8  # of CTAs all over the GPU
RESIDENT_THREADS, RESIDENT_CHUNKS, STREAMING_CHUNKS = 512, 10, 4
TWO_PASS_THREADS, TWO_PASS_CTAS_PER_SM, TWO_PASS_UNROLL = 512, 2, 4


@dataclass(frozen=True)
class SoftmaxPlan:
    """The strategy and configuration chosen for a problem.

    strategy: its name. config: its kernel's. groups, group: number of groups of CTAs and CTAs of a group (resident
    strategy only). microseconds: the predicted time.
    """

    strategy: str
    config: object
    groups: int
    group: int
    microseconds: float

    def workspace_words(self, rows: int) -> int:
        """Words of the groups' workspace: a counter and, unless groups are clusters, one for each state."""
        return 1 if self.config.cluster else 1 + rows * self.group


@functools.lru_cache(maxsize=4096)
def choose_plan(problem: SoftmaxProblem, target: Target) -> SoftmaxPlan:
    """The candidate with the least predicted time; the first of equals."""
    return min(candidates(problem, target), key=lambda plan: plan.microseconds)


def best_of_each(problem: SoftmaxProblem, target: Target) -> dict[str, SoftmaxPlan]:
    """The fastest predicted plan of each strategy that can run the problem, by the strategy's name."""
    best: dict[str, SoftmaxPlan] = {}
    for plan in candidates(problem, target):
        if plan.strategy not in best or plan.microseconds < best[plan.strategy].microseconds:
            best[plan.strategy] = plan
    return best


def candidates(problem: SoftmaxProblem, target: Target) -> list[SoftmaxPlan]:
    """All plans that can run the problem; there is at least one."""
    return [
        *_rows(problem, target),
        *_staged(problem, target),
        *_resident(problem, target),
        *_split(problem, target),
        *_two_pass(problem, target),
    ]


def _clusters() -> tuple[int, ...]:
    return tuple(2**i for i in range(MAX_CLUSTER_CTAS.bit_length()))


def rows_registers(config) -> int:
    """Registers of a thread with a ``RowsConfig``."""
    some, for_each, for_edges = REGISTERS[config.dtype == "float32", config.lanes > WARP_THREADS]
    registers = some + for_each * config.vectors + (for_edges if config.edges else 0)
    return -(-registers // REGISTER_STEP) * REGISTER_STEP


def _rows(problem: SoftmaxProblem, target: Target):
    from warpspec.softmax.rows import RowsConfig
    from warpspec.softmax.vectors import elements

    vectors = problem.vectors
    for cluster in _clusters():
        for lanes in (4, 8, 16, 32, 64, 128, 256, 512, 1024):
            each = -(-vectors // (lanes * cluster))
            if each > (ROWS_MOST_VECTORS if cluster == 1 else CLUSTER_MOST_VECTORS):
                continue
            if cluster > 1 and (lanes < 2 * WARP_THREADS or 2 * vectors <= lanes * cluster):
                continue  # half as many lanes would have a vector each
            if not problem.aligned and lanes < 2 * elements(problem.dtype):
                continue
            rows = max(1, 4 * WARP_THREADS // lanes) if cluster == 1 else 1
            while lanes * rows > WARP_THREADS and rows > 1 and problem.rows < rows * target.sm_count:
                rows //= 2
            config = RowsConfig(
                lanes=lanes, rows=rows, cluster=cluster, vectors=each, **_row_options(problem)
            )
            registers = rows_registers(config)
            if cluster > 1:
                registers = min(registers, CLUSTER_REGISTERS[problem.dtype])
            by_registers = ctas_by_registers(config.threads, registers)
            occupancy = min(MAX_CTAS_PER_SM, MAX_THREADS_PER_SM // config.threads, by_registers)
            if occupancy == 0:
                continue
            if cluster > 1:
                config = replace(config, ctas_per_sm=occupancy)
                work = (
                    problem.dtype
                    if problem.dtype == "float32"
                    else "kept"
                    if config.keeps_exponentials
                    else "twice"
                )
                microseconds, dependent = cost.shares(problem, target, config, occupancy=occupancy, work=work)
                yield SoftmaxPlan("cluster", replace(config, dependent=dependent), 0, 0, microseconds)
                continue
            microseconds = cost.one_row_a_cta(
                problem,
                target,
                ctas=-(-problem.rows // rows),
                share_bytes=vectors * rows * VECTOR_BYTES,
                occupancy=occupancy,
                cluster=1,
                extra=cost.beside(problem, target, lanes, (lanes * each - vectors) * elements(problem.dtype)),
            )
            # Loads come in waves in this case too.
            yield SoftmaxPlan("rows", replace(config, dependent=True), 0, 0, microseconds)


def _row_options(problem: SoftmaxProblem) -> dict[str, object]:
    """What each strategy's configuration takes from the rows as they are."""
    return {"dtype": problem.dtype, "edges": not problem.aligned, "store_bytes": problem.store_bytes}


def _staged_threads(share: int, wanted: int, most: int) -> tuple[int, int, int]:
    """(threads of a CTA, vectors of a thread, bytes of shared memory) that stage a share of this many vectors. wanted:
    vectors of a thread, where the limits of threads allow it. most: threads."""
    threads = -(-share // (wanted * WARP_THREADS)) * WARP_THREADS
    threads = min(most, max(STAGED_THREADS[0], threads))
    each = -(-share // threads)
    return threads, each, threads * each * VECTOR_BYTES + SMEM_BESIDE_DATA


def _staged(problem: SoftmaxProblem, target: Target):
    from warpspec.softmax.staged import StagedConfig

    vectors = problem.vectors
    fewest, most = STAGED_THREADS
    for cluster in _clusters():
        share = -(-vectors // cluster)
        once = problem.dtype == "float32" and problem.aligned and cluster >= ONCE_CLUSTER
        several = _several_copies(problem, target, cluster, once)
        if several is not None:
            yield several
            continue
        longer = STAGED_LONGER if once and cluster == MAX_CLUSTER_CTAS else ()
        for wanted in (*longer, *STAGED_VECTORS):
            threads, each, smem = _staged_threads(share, wanted, most)
            if (
                each > max(wanted, STAGED_VECTORS[0])
                or smem > MAX_SMEM_PER_CTA
                or (cluster > 1 and share < fewest)
            ):
                continue
            by_registers = ctas_by_registers(threads, STAGED_REGISTERS)
            occupancy = min(MAX_CTAS_PER_SM, by_registers, MAX_SMEM_PER_CTA // smem)
            config = StagedConfig(
                threads=threads,
                cluster=cluster,
                vectors=each,
                ctas_per_sm=occupancy,
                once=once,
                **_row_options(problem),
            )
            if cluster > 1:
                work = "once" if once else "float32" if problem.dtype == "float32" else "twice"
                microseconds, dependent = cost.shares(
                    problem, target, config, occupancy=occupancy, work=work, extra=cost.STAGED_US
                )
                config = replace(config, dependent=dependent)
            else:
                microseconds = cost.one_row_a_cta(
                    problem,
                    target,
                    ctas=problem.rows,
                    share_bytes=share * VECTOR_BYTES,
                    occupancy=occupancy,
                    cluster=1,
                    extra=cost.STAGING_US,
                )
                config = replace(config, dependent=problem.rows <= target.sm_count * occupancy)
            yield SoftmaxPlan("staged", config, 0, 0, microseconds)


def _several_copies(problem: SoftmaxProblem, target: Target, cluster: int, once: bool) -> SoftmaxPlan | None:
    """The plan by which shares come by several copies, if all CTAs are on the GPU at once. 16-bit rows have more work,
    and gain only where every CTA has an SM to itself."""
    from warpspec.softmax.staged import GROUP, StagedConfig

    residents = -(-problem.rows * cluster // cost.sms_of(target, cluster))
    share = -(-problem.vectors // cluster)
    if cluster < SEVERAL_CLUSTER or residents > (SEVERAL_RESIDENTS[cluster] if once else 1):
        return None
    if share > SEVERAL_SHARE and not problem.aligned:
        return None  # with edges it would spill
    most = SEVERAL_THREADS[share > SEVERAL_SHARE]
    threads, each, smem = _staged_threads(share, SEVERAL_VECTORS, most)
    if share < STAGED_THREADS[0] or smem * residents > MAX_SMEM_PER_CTA:
        return None
    # Registers leave room for the next launch beside this one.
    room = 2 if problem.aligned and threads <= SEVERAL_THREADS[0] else 1
    config = StagedConfig(
        threads=threads,
        cluster=cluster,
        vectors=each,
        ctas_per_sm=max(residents, room),
        dependent=True,
        once=once,
        copies=-(-each // GROUP),
        **_row_options(problem),
    )
    beside = cluster == SEVERAL_CLUSTER and 2 * problem.rows * cluster <= target.sm_count
    beside = beside and room == 2 and 2 * smem <= MAX_SMEM_PER_CTA
    microseconds = cost.several_copies(problem, target, config, residents=residents, beside=beside)
    return SoftmaxPlan("staged", config, 0, 0, microseconds)


def _in_rounds(problem, target, strategy, cluster, groups, group):
    """The plan for the resident strategy: groups of CTAs take one row after another."""
    from warpspec.softmax.resident import ResidentConfig

    config = ResidentConfig(
        threads=RESIDENT_THREADS,
        resident=RESIDENT_CHUNKS,
        streaming=STREAMING_CHUNKS,
        cluster=cluster,
        **_row_options(problem),
    )
    microseconds = cost.in_rounds(problem, target, config, groups=groups, group=group)
    return SoftmaxPlan(strategy, config, groups, group, microseconds)


def _resident(problem: SoftmaxProblem, target: Target):
    for cluster in _clusters()[1:]:
        if cluster <= target.sm_count and problem.vectors >= cluster * RESIDENT_THREADS:
            groups = min(problem.rows, cost.sms_of(target, cluster) // cluster)
            if (
                groups == problem.rows
                and -(-problem.vectors // cluster) <= STAGED_VECTORS[0] * STAGED_THREADS[1]
            ):
                continue  # the staged strategy does the same and starts faster
            yield _in_rounds(problem, target, "resident", cluster, groups, cluster)


def _split(problem: SoftmaxProblem, target: Target):
    for groups in range(1, MOST_GROUPS + 1):
        group = max(1, target.sm_count // groups)
        if groups <= min(problem.rows, target.sm_count) and problem.vectors >= group * RESIDENT_THREADS:
            yield _in_rounds(problem, target, "split", 0, groups, group)


def _two_pass(problem: SoftmaxProblem, target: Target):
    from warpspec.softmax.two_pass import TwoPassConfig

    for cluster in _clusters()[:-1]:
        ctas = problem.rows * cluster
        share = -(-problem.vectors // cluster) * VECTOR_BYTES
        occupancy = TWO_PASS_CTAS_PER_SM
        config = TwoPassConfig(threads=TWO_PASS_THREADS, cluster=cluster, **_row_options(problem))
        between = min(ctas, target.sm_count * occupancy) * share  # read once and not yet twice
        microseconds = cost.one_row_a_cta(
            problem,
            target,
            ctas=ctas,
            share_bytes=share,
            occupancy=occupancy,
            cluster=cluster,
            batch_bytes=TWO_PASS_THREADS * TWO_PASS_UNROLL * VECTOR_BYTES,
            reread=1 - min(1.0, cost.L2_USABLE * target.l2_bytes / between),
        )
        yield SoftmaxPlan("two-pass", config, 0, 0, microseconds)
