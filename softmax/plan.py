"""Chooses the strategy that runs a problem, and its configuration: the least predicted time of all candidates.

The model knows rows, length, dtype, the device's SMs, L2 and copy speed, and a few constants measured on an H200
(2026-11-21).
It adds up, in microseconds:

- a launch, and the reduction of the states of a row's parts;
- the traffic at the speed of memory. To reach that speed, every SM needs as many bytes in flight as memory delivers
  during the life of a CTA (Little's law), and CTAs of larger clusters live longer. Clusters with small shares lose a
  little more. So do SMs with more bytes in flight than needed, and SMs with few CTAs to alternate between loading and
  storing. Data that is read a second time counts as far as it does not fit L2;
- one CTA's work on its share, which nothing hides at the end of a launch; if an SM has only one CTA at a time, the work
  of all its CTAs.

``scripts/bench_softmax.py --regret`` runs every strategy's best candidate at shapes that were not used to fit the
model, and prints how far the choice is from the best.
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
    REGISTERS_PER_SM,
    VECTOR_BYTES,
    WARP_THREADS,
)
from warpspec.common.launch import Target
from warpspec.softmax.problem import SoftmaxProblem

# Bytes of shared memory that a CTA needs besides its data: states, barriers, the system's part.
SMEM_BESIDE_DATA = 1536

# Measured.
LAUNCH_US, DEPENDENT_US = 1.7, 0.8  # an ordinary launch; a programmatic dependent launch
WARPS_US = 0.1  # a reduction over the warps of a CTA
WITHIN_WARP_US = -0.3  # difference if rows belong to whole warps, and need no such reduction
STAGING_US = 0.1  # extra time of a bulk copy over loads
# CTAs of large clusters whose shares come by several copies (``_several_copies``): a launch, by size of the cluster;
# bytes of the shares on an SM per microsecond; and how often the traffic goes at a copy's speed. Fitted to 19 problems
# with 1 to 24 rows of 131072 to 700000 numbers, H200, 2026-11-27. Exponentials of 16-bit numbers are taken twice.
SEVERAL_US = {8: 3.74, 16: 3.34}
# Saved by clusters of 8 on at most half of the SMs, if two CTAs fit an SM: launches run side by side.
BESIDE_US = 1.4
SEVERAL_BYTES_PER_US = {"float32": 37e3, "float16": 29e3, "bfloat16": 29e3}
SEVERAL_TRAFFIC = {"float32": 0.39, "float16": 0.79, "bfloat16": 0.79}
CLUSTER_US = 0.25  # a reduction over the CTAs of a cluster
CLUSTER_CTAS_PER_US = 440.0  # CTAs of clusters that the GPU starts
CLUSTER_SMS = {1: 1.0, 2: 1.0, 4: 0.91, 8: 0.91, 16: 0.85}  # fraction of the SMs on which clusters find room
SMALL_BYTES_PER_SM = (
    128e3  # read and written a SM: up to here, launches without clusters count as dependent launches
)
# Clusters of this size gain from dependent launches even if not all of them fit at once.
DEPENDENT_CLUSTER = 16
CLUSTER_LOSS_BYTES = 165.0  # the memory time grows by this times (CTAs of the cluster / bytes of a share)


@dataclass(frozen=True)
class Rates:
    """Rates of CTAs that each have one share of one row.

    life_us: how long a CTA lives, apart from the work on its share. doubled_us: added each time the cluster doubles.
    bytes_per_us: bytes of a share that a CTA reads, processes and writes per microsecond. excess_loss: growth of the
    memory time for every unneeded byte in flight. few_loss: growth of the memory time, divided by the number of CTAs on
    an SM to the power ``few_power``.
    """

    life_us: float
    doubled_us: float
    bytes_per_us: float
    excess_loss: float
    few_loss: float
    few_power: float


ALONE = Rates(2.5, 0.0, 22e3, 0.0003 / 1024, 0.4, 3.0)
# Clusters that have SMs to themselves, whose rows come by one copy or by loads: the part of the traffic's time that
# adds to their work on their shares. Measured on an H200 on 2026-11-26, 1 to 5 rows of 262144 and 524288.
ALONE_MEMORY = 0.41
CLUSTERED = Rates(0.7, 0.28, 11.5e3, 0.0, 0.21, 1.5)  # fitted to 1 to 256 rows of 32000 to 256000
CLUSTERED_ONCE = replace(CLUSTERED, bytes_per_us=16e3)  # exponentials taken once; 8 to 64 rows, 2026-11-27
L2_USABLE = 0.4  # fraction of L2 that serves data read again
# Resident shares: one row after another by the same CTAs.
# A reduction over the grid or a cluster, with everything that waits for it.
ROUND_GRID_US, ROUND_CLUSTER_US = 4.5, 1.7
ROUND_BYTES_PER_US = 28e3  # bytes of a share that a CTA processes
ROUND_OVERLAP = 0.36  # least part of the traffic and the rounds that hide each other (1 to 16 rows of 524288)

# Limits of the configurations that are tried.
# Most vectors of a thread in the register kernel, without and with clusters. With more, they wait for each other.
ROWS_MOST_VECTORS, CLUSTER_MOST_VECTORS = 5, 5
# Instructions that an element takes, and the fraction that nothing hides; lanes without an element count too.
ELEMENT_INSTRUCTIONS, EXPOSED = {"float32": 16, "float16": 6, "bfloat16": 6}, 0.75
WARP_INSTRUCTIONS_PER_US = 7020  # warp instructions that an SM issues: 4 a clock
# Most lanes of a cluster's register kernels. Exchanging states of more warps takes too long; but if CTAs have SMs to
# themselves, more lanes have more bytes in flight.
CLUSTER_MOST_LANES, ALONE_MOST_LANES = 4096, 8192
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
# ptxas counts a CTA's registers by this many threads, since its warps go to the four parts of an SM in turn.
REGISTER_THREADS = 4 * WARP_THREADS
# Of CTAs whose shares come by several copies: the least size of a cluster, most CTAs on an SM, vectors that a thread
# has before there are more threads, and most threads: of more than two CTAs on an SM, of one or two whose share has at
# most SEVERAL_SHARE vectors, and of others.
SEVERAL_CLUSTER, SEVERAL_RESIDENTS, SEVERAL_VECTORS = 8, {8: 2, 16: 4}, 8
SEVERAL_THREADS, SEVERAL_SHARE = (128, 256, 384), 8704
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


def _sms(target: Target, cluster: int) -> int:
    """SMs on which clusters find room.

    The SMs of a GPC (16 or 18 on an H200) are not always divisible by the cluster.
    """
    return max(1, int(target.sm_count * CLUSTER_SMS[cluster]) // cluster) * cluster


def _alone(problem: SoftmaxProblem, target: Target, cluster: int) -> bool:
    """Whether every CTA of the clusters has an SM to itself."""
    return cluster > 1 and problem.rows * cluster <= _sms(target, cluster)


def _memory_us(problem, target, *, rates, share_bytes, occupancy, under_way, cluster, reread=0.0) -> float:
    """Time of the traffic. under_way: bytes that an SM has in flight. reread: the part of x that is read from memory a
    second time."""
    life = rates.life_us + share_bytes / rates.bytes_per_us + rates.doubled_us * (cluster.bit_length() - 1)
    speed = target.speeds.copy * 1e6  # bytes read and written a microsecond
    needed = life * speed / 2 / target.sm_count
    microseconds = problem.bytes * (1 + reread / 2) / speed
    scarcity = needed / under_way
    if scarcity > 1:
        microseconds *= scarcity**0.5 if scarcity < 4 else scarcity / 2
    few = rates.few_loss / occupancy**rates.few_power
    microseconds *= 1 + rates.excess_loss * max(0.0, under_way - needed) + few
    return microseconds * (1 + CLUSTER_LOSS_BYTES * (cluster - 1) / share_bytes)


def _one_row_a_cta(
    problem,
    target,
    *,
    ctas,
    share_bytes,
    occupancy,
    batch_bytes=None,
    cluster,
    reread=0.0,
    extra=0.0,
    rates=None,
) -> tuple[float, bool]:
    """(time, whether it is a dependent launch) if each CTA takes one share of one row.

    occupancy: CTAs that fit an SM. batch_bytes: bytes that a CTA loads at a time if it does not load the whole share at
    once; it then reads the share twice. extra: microseconds to add. rates: None: those of the cluster.
    """
    sms, rates = _sms(target, cluster), rates or (ALONE if cluster == 1 else CLUSTERED)
    waves = -(-ctas // (sms * occupancy))
    dependent = batch_bytes is None and (waves == 1 or cluster == DEPENDENT_CLUSTER)
    passes, loaded = (1, share_bytes) if batch_bytes is None else (2, min(share_bytes, batch_bytes))
    memory = _memory_us(
        problem,
        target,
        rates=rates,
        share_bytes=loaded,
        occupancy=occupancy,
        under_way=(occupancy if cluster == 1 else min(occupancy, -(-ctas // sms))) * loaded,
        cluster=cluster,
        reread=reread,
    )
    if cluster > 1 and ctas <= sms:
        memory *= ALONE_MEMORY
    if cluster > 1:
        memory = max(memory, ctas / CLUSTER_CTAS_PER_US)
        memory = max(memory, (waves - 1) * (rates.life_us + share_bytes / rates.bytes_per_us))
    alone = -(-ctas // target.sm_count) if occupancy == 1 else 1
    reduction = CLUSTER_US if cluster > 1 else WARPS_US
    small = (
        problem.bytes <= SMALL_BYTES_PER_SM * target.sm_count
    )  # some candidates fit at once, others nearly
    launch = DEPENDENT_US if (small if cluster == 1 else dependent) else LAUNCH_US
    work = alone * passes * share_bytes / rates.bytes_per_us
    return launch + extra + reduction + memory + work, dependent


def _beside(problem: SoftmaxProblem, target: Target, lanes: int, idle: int) -> float:
    """Additional time of rows that ``lanes`` threads of a CTA share. idle: elements of a row that these lanes could
    hold beyond its length."""
    instructions = problem.rows * idle * ELEMENT_INSTRUCTIONS[problem.dtype] / WARP_THREADS
    within = WITHIN_WARP_US if lanes <= WARP_THREADS else 0.0
    return EXPOSED * instructions / (WARP_INSTRUCTIONS_PER_US * target.sm_count) + within


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
        for lanes in (4, 8, 16, 32, 64, 128, 256, 512):
            each = -(-vectors // (lanes * cluster))
            if each > (ROWS_MOST_VECTORS if cluster == 1 else CLUSTER_MOST_VECTORS):
                continue
            most = ALONE_MOST_LANES if _alone(problem, target, cluster) else CLUSTER_MOST_LANES
            if cluster > 1 and not 2 * WARP_THREADS <= lanes <= most // cluster:
                continue
            if not problem.aligned and lanes < 2 * elements(problem.dtype):
                continue
            rows = max(1, 4 * WARP_THREADS // lanes) if cluster == 1 else 1
            while lanes * rows > WARP_THREADS and rows > 1 and problem.rows < rows * target.sm_count:
                rows //= 2
            config = RowsConfig(
                lanes=lanes, rows=rows, cluster=cluster, vectors=each, **_row_options(problem)
            )
            by_registers = REGISTERS_PER_SM // (rows_registers(config) * config.threads)
            occupancy = min(MAX_CTAS_PER_SM, MAX_THREADS_PER_SM // config.threads, by_registers)
            if occupancy == 0:
                continue
            microseconds, dependent = _one_row_a_cta(
                problem,
                target,
                ctas=-(-problem.rows // rows) * cluster,
                share_bytes=-(-vectors // cluster) * rows * VECTOR_BYTES,
                occupancy=occupancy,
                cluster=cluster,
                extra=_beside(problem, target, lanes, (lanes * each - vectors) * elements(problem.dtype))
                if cluster == 1
                else 0.0,
            )
            # Loads come in waves in this case too.
            config = replace(config, dependent=dependent or cluster == 1)
            yield SoftmaxPlan("rows" if cluster == 1 else "cluster", config, 0, 0, microseconds)


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
            if problem.rows * cluster <= _sms(target, cluster):
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
            occupancy = min(
                MAX_CTAS_PER_SM, REGISTERS_PER_SM // (STAGED_REGISTERS * threads), MAX_SMEM_PER_CTA // smem
            )
            counted = -(-threads // REGISTER_THREADS) * REGISTER_THREADS
            if wanted in longer and occupancy * counted * STAGED_REGISTERS > REGISTERS_PER_SM:
                continue  # it would spill
            microseconds, dependent = _one_row_a_cta(
                problem,
                target,
                ctas=problem.rows * cluster,
                share_bytes=share * VECTOR_BYTES,
                occupancy=occupancy,
                cluster=cluster,
                extra=STAGING_US,
                rates=CLUSTERED_ONCE if once else None,
            )
            config = StagedConfig(
                threads=threads,
                cluster=cluster,
                vectors=each,
                ctas_per_sm=occupancy,
                dependent=dependent,
                once=once,
                **_row_options(problem),
            )
            yield SoftmaxPlan("staged", config, 0, 0, microseconds)


def _several_copies(problem: SoftmaxProblem, target: Target, cluster: int, once: bool) -> SoftmaxPlan | None:
    """The plan by which shares come by several copies, if all CTAs are on the GPU at once. 16-bit rows have more work,
    and gain only where every CTA has an SM to itself."""
    from warpspec.softmax.staged import GROUP, StagedConfig

    residents = -(-problem.rows * cluster // _sms(target, cluster))
    share = -(-problem.vectors // cluster)
    if cluster < SEVERAL_CLUSTER or residents > (SEVERAL_RESIDENTS[cluster] if once else 1):
        return None
    most = SEVERAL_THREADS[0 if residents > 2 else 1 if share <= SEVERAL_SHARE else 2]
    threads, each, smem = _staged_threads(share, SEVERAL_VECTORS, most)
    if share < STAGED_THREADS[0] or smem * residents > MAX_SMEM_PER_CTA:
        return None
    # Registers leave room for the next launch beside this one.
    room = 2 if problem.aligned and threads <= SEVERAL_THREADS[1] else 1
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
    work = residents * share * VECTOR_BYTES / SEVERAL_BYTES_PER_US[problem.dtype]
    traffic = SEVERAL_TRAFFIC[problem.dtype] * problem.bytes / (target.speeds.copy * 1e6)
    beside = cluster == SEVERAL_CLUSTER and 2 * problem.rows * cluster <= target.sm_count
    saved = BESIDE_US if beside and room == 2 and 2 * smem <= MAX_SMEM_PER_CTA else 0.0
    return SoftmaxPlan("staged", config, 0, 0, SEVERAL_US[cluster] - saved + work + traffic)


def _in_rounds(problem, target, strategy, cluster, groups, group, round_us):
    """The plan for the resident strategy: groups of CTAs take one row after another."""
    from warpspec.softmax.resident import ResidentConfig

    config = ResidentConfig(
        threads=RESIDENT_THREADS,
        resident=RESIDENT_CHUNKS,
        streaming=STREAMING_CHUNKS,
        cluster=cluster,
        **_row_options(problem),
    )
    share = -(-problem.vectors // group)
    rest = max(0, share - config.capacity)  # vectors that are read twice
    fits = min(1.0, L2_USABLE * target.l2_bytes / max(1, rest * VECTOR_BYTES * groups * group))
    memory = _memory_us(
        problem,
        target,
        rates=ALONE,
        share_bytes=share * VECTOR_BYTES,
        occupancy=config.resident,  # chunks alternate as CTAs do elsewhere
        under_way=config.smem_bytes,
        cluster=1,
        reread=(1 - fits) * rest / share,
    )
    rounds = -(-problem.rows // groups)
    working = rounds * (round_us + share * VECTOR_BYTES / ROUND_BYTES_PER_US)
    # Rows overlap as far as the next row's share fits beside this one's.
    overlap = max(min(1.0, max(0.0, config.capacity / share - 1)) * (1 - 1 / rounds), ROUND_OVERLAP)
    microseconds = LAUNCH_US + max(memory, working) + (1 - overlap) * min(memory, working)
    return SoftmaxPlan(strategy, config, groups, group, microseconds)


def _resident(problem: SoftmaxProblem, target: Target):
    for cluster in _clusters()[1:]:
        if cluster <= target.sm_count and problem.vectors >= cluster * RESIDENT_THREADS:
            groups = min(problem.rows, _sms(target, cluster) // cluster)
            if (
                groups == problem.rows
                and -(-problem.vectors // cluster) <= STAGED_VECTORS[0] * STAGED_THREADS[1]
            ):
                continue  # the staged strategy does the same and starts faster
            yield _in_rounds(problem, target, "resident", cluster, groups, cluster, ROUND_CLUSTER_US)


def _split(problem: SoftmaxProblem, target: Target):
    for groups in range(1, MOST_GROUPS + 1):
        group = max(1, target.sm_count // groups)
        if groups <= min(problem.rows, target.sm_count) and problem.vectors >= group * RESIDENT_THREADS:
            yield _in_rounds(problem, target, "split", 0, groups, group, ROUND_GRID_US)


def _two_pass(problem: SoftmaxProblem, target: Target):
    from warpspec.softmax.two_pass import TwoPassConfig

    for cluster in _clusters()[:-1]:
        ctas = problem.rows * cluster
        share = -(-problem.vectors // cluster) * VECTOR_BYTES
        occupancy = TWO_PASS_CTAS_PER_SM
        config = TwoPassConfig(threads=TWO_PASS_THREADS, cluster=cluster, **_row_options(problem))
        between = min(ctas, target.sm_count * occupancy) * share  # read once and not yet twice
        microseconds, _ = _one_row_a_cta(
            problem,
            target,
            ctas=ctas,
            share_bytes=share,
            occupancy=occupancy,
            cluster=cluster,
            batch_bytes=TWO_PASS_THREADS * TWO_PASS_UNROLL * VECTOR_BYTES,
            reread=1 - min(1.0, L2_USABLE * target.l2_bytes / between),
        )
        yield SoftmaxPlan("two-pass", config, 0, 0, microseconds)
