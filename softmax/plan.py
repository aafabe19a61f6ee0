"""Which strategy runs a problem, and how it is configured: the least predicted time among all that could run it.

The model knows rows, length, dtype, the device's SMs and L2, and a few constants measured on an H200 (2026-11-21).
It adds up, in microseconds:

- a launch, and the reduction of the states of a row's parts;
- the traffic at the speed of memory. That speed takes a number of bytes under way in every SM: as many as memory
  delivers while a CTA lives (Little's law), and a CTA of a larger cluster lives longer. Clusters of small shares
  lose a little more, and so do SMs with more under way than that, or with few CTAs to take turns at loading and
  storing. What is read a second time counts as far as it does not fit the L2;
- one CTA's work on its share, which nothing hides at the end of a launch; all CTAs' where an SM has only one.

``scripts/bench_softmax.py --regret`` runs every strategy's best candidate at shapes that had no part in this, and
prints how far the choice is from the best.
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

SMEM_BESIDE_DATA = 1536  # bytes that a CTA takes besides its data: states, barriers, the system's

# Measured.
LAUNCH_US, DEPENDENT_US = 1.7, 0.8  # a launch; a dependent one
WARPS_US = 0.1  # a reduction over the warps of a CTA
WITHIN_WARP_US = -0.3  # where a warp has whole rows, against that
STAGING_US = 0.1  # that a bulk copy takes longer than loads
ALONE_STAGING_US = 0.5  # and more where CTAs of a cluster have SMs to themselves
CLUSTER_US = 0.25  # a reduction over the CTAs of a cluster
MEMORY_BYTES_PER_US = 4.25e6  # read and written
CLUSTER_CTAS_PER_US = 440.0  # started
CLUSTER_SMS = {1: 1.0, 2: 1.0, 4: 0.91, 8: 0.91, 16: 0.85}  # of all SMs, that clusters find room on
SMALL_BYTES_PER_SM = (
    128e3  # read and written: problems up to here count as dependent launches without clusters
)
DEPENDENT_CLUSTER = 16  # clusters of so many CTAs gain by dependent launches even where not all fit at once
CLUSTER_LOSS_BYTES = 165.0  # the memory time grows by this times CTAs of the cluster over the share's bytes


@dataclass(frozen=True)
class Rates:
    """Of CTAs that have one share of one row.

    life_us: of a CTA, besides the work on its share. doubled_us: longer, each time the cluster doubles.
    bytes_per_us: of a share, read, processed and written. excess_loss: the memory time grows by this for every byte
    under way that is not needed; few_loss: and by this over the power ``few_power`` of the CTAs that share an SM.
    """

    life_us: float
    doubled_us: float
    bytes_per_us: float
    excess_loss: float
    few_loss: float
    few_power: float


ALONE = Rates(2.5, 0.0, 22e3, 0.0003 / 1024, 0.4, 3.0)
CLUSTERED = Rates(0.7, 0.28, 11.5e3, 0.0, 0.21, 1.5)  # fitted to rows of 32000 to 256000, 1 to 256 of them
L2_USABLE = 0.4  # of the L2, for what is read again
# Resident shares: one row after another by the same CTAs.
ROUND_GRID_US, ROUND_CLUSTER_US = 4.0, 2.0  # a reduction, and all that waits for it
ROUND_BYTES_PER_US = 30e3  # of a share

# Of the configurations.
# Vectors of a thread of the register kernel, without and with clusters; more of them wait for each other.
ROWS_MOST_VECTORS, CLUSTER_MOST_VECTORS = 5, 5
# Instructions of an element, and what of them nothing hides; counted for lanes that have no element.
ELEMENT_INSTRUCTIONS, EXPOSED = {"float32": 16, "float16": 6, "bfloat16": 6}, 0.75
WARP_INSTRUCTIONS_PER_US = 7020  # of an SM, of warps: 4 a clock
# Lanes of a cluster's register kernels: the states of more warps take too long to exchange; where CTAs have SMs to
# themselves, more lanes have more bytes under way.
CLUSTER_MOST_LANES, ALONE_MOST_LANES = 4096, 8192
# Registers of a thread that has a row's part: some, and for each vector, and where rows have edges; as compiled. By
# whether data are fp32 and whether several warps share a row.
REGISTERS = {
    (True, True): (20, 11, 6),
    (True, False): (13, 9, 7),
    (False, True): (17, 10, 5),
    (False, False): (16, 9, 8),
}
STAGED_THREADS, STAGED_VECTORS, STAGED_REGISTERS = (64, 1024), (7, 6, 4, 2), 40
ONCE_CLUSTER = 8  # CTAs that share a row of fp32, at least, for its exponentials to be taken once
STAGED_LONGER = (8,)  # vectors, in fp32 of many aligned rows of 16 CTAs: one CTA more finds room on an SM
RESIDENT_THREADS, RESIDENT_CHUNKS, STREAMING_CHUNKS = 512, 10, 4
TWO_PASS_THREADS, TWO_PASS_CTAS_PER_SM, TWO_PASS_UNROLL = 512, 2, 4


@dataclass(frozen=True)
class Plan:
    """How one problem is computed.

    strategy: its name. config: of its kernel. groups, group: how many groups of how many CTAs there are (resident
    shares only). microseconds: the predicted time.
    """

    strategy: str
    config: object
    groups: int
    group: int
    microseconds: float

    def workspace_words(self, rows: int) -> int:
        """Words of the workspace that groups need: a counter and, unless groups are clusters, one for each state."""
        return 1 if self.config.cluster else 1 + rows * self.group


@functools.lru_cache(maxsize=4096)
def choose_plan(problem: SoftmaxProblem, target: Target) -> Plan:
    """The candidate of least predicted time; the first of equals."""
    return min(candidates(problem, target), key=lambda plan: plan.microseconds)


def best_of_each(problem: SoftmaxProblem, target: Target) -> dict[str, Plan]:
    """Every strategy that can run the problem, configured as the model likes it best."""
    best: dict[str, Plan] = {}
    for plan in candidates(problem, target):
        if plan.strategy not in best or plan.microseconds < best[plan.strategy].microseconds:
            best[plan.strategy] = plan
    return best


def candidates(problem: SoftmaxProblem, target: Target) -> list[Plan]:
    """All plans that can run the problem; at least one."""
    return [
        *_rows(problem, target),
        *_staged(problem, target),
        *_resident(problem, target),
        *_split(problem, target),
        *_two_pass(problem, target),
    ]


def _vectors(problem: SoftmaxProblem) -> int:
    """Most whole vectors of a row, at any alignment; at least 1."""
    return max(1, problem.bytes // (2 * problem.rows) // VECTOR_BYTES)


def _clusters() -> tuple[int, ...]:
    return tuple(2**i for i in range(MAX_CLUSTER_CTAS.bit_length()))


def _sms(target: Target, cluster: int) -> int:
    """SMs that clusters find room on: a processing cluster's (16 or 18 on an H200) do not always divide."""
    return max(1, int(target.sm_count * CLUSTER_SMS[cluster]) // cluster) * cluster


def _alone(problem: SoftmaxProblem, target: Target, cluster: int) -> bool:
    """Whether all CTAs of clusters have SMs to themselves."""
    return cluster > 1 and problem.rows * cluster <= _sms(target, cluster)


def _memory_us(problem, target, *, rates, share_bytes, occupancy, under_way, cluster, reread=0.0) -> float:
    """Time of the traffic. under_way: bytes that an SM waits for at once. reread: the part of x that is read again from
    memory."""
    life = rates.life_us + share_bytes / rates.bytes_per_us + rates.doubled_us * (cluster.bit_length() - 1)
    needed = life * MEMORY_BYTES_PER_US / 2 / target.sm_count
    microseconds = problem.bytes * (1 + reread / 2) / MEMORY_BYTES_PER_US
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
) -> tuple[float, bool]:
    """(time, whether it is a dependent one) of a launch whose CTAs each take one share of one row.

    occupancy: CTAs that an SM has room for. batch_bytes: that a CTA loads at a time, where it is not the whole share;
    it then does so twice. extra: microseconds.
    """
    sms, rates = _sms(target, cluster), ALONE if cluster == 1 else CLUSTERED
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
    """What else rows cost that ``lanes`` of a CTA share. idle: elements a row that these lanes could have beyond it."""
    instructions = problem.rows * idle * ELEMENT_INSTRUCTIONS[problem.dtype] / WARP_THREADS
    within = WITHIN_WARP_US if lanes <= WARP_THREADS else 0.0
    return EXPOSED * instructions / (WARP_INSTRUCTIONS_PER_US * target.sm_count) + within


def rows_registers(config) -> int:
    """Registers that a thread of a ``RowsConfig`` takes."""
    some, for_each, for_edges = REGISTERS[config.dtype == "float32", config.lanes > WARP_THREADS]
    registers = some + for_each * config.vectors + (for_edges if config.edges else 0)
    return -(-registers // REGISTER_STEP) * REGISTER_STEP


def _rows(problem: SoftmaxProblem, target: Target):
    from warpspec.softmax.rows import RowsConfig
    from warpspec.softmax.vectors import elements

    vectors = _vectors(problem)
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
                problem.dtype, lanes, rows, cluster, each, not problem.aligned, 1, problem.store_bytes
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
            config = replace(config, dependent=dependent or cluster == 1)  # loads come in waves then, too
            yield Plan("rows" if cluster == 1 else "cluster", config, 0, 0, microseconds)


def _staged(problem: SoftmaxProblem, target: Target):
    from warpspec.softmax.staged import StagedConfig

    vectors = _vectors(problem)
    fewest, most = STAGED_THREADS
    for cluster in _clusters():
        share = -(-vectors // cluster)
        alone = _alone(problem, target, cluster)
        once = problem.dtype == "float32" and problem.aligned and cluster >= ONCE_CLUSTER
        longer = STAGED_LONGER if once and cluster == MAX_CLUSTER_CTAS and not alone else ()
        for wanted in (*longer, *STAGED_VECTORS):
            threads = min(most, max(fewest, -(-share // (wanted * WARP_THREADS)) * WARP_THREADS))
            each = -(-share // threads)
            smem = threads * each * VECTOR_BYTES + SMEM_BESIDE_DATA
            if (
                each > max(wanted, STAGED_VECTORS[0])
                or smem > MAX_SMEM_PER_CTA
                or (cluster > 1 and share < fewest)
            ):
                continue
            occupancy = min(
                MAX_CTAS_PER_SM, REGISTERS_PER_SM // (STAGED_REGISTERS * threads), MAX_SMEM_PER_CTA // smem
            )
            microseconds, dependent = _one_row_a_cta(
                problem,
                target,
                ctas=problem.rows * cluster,
                share_bytes=share * VECTOR_BYTES,
                occupancy=occupancy,
                cluster=cluster,
                extra=STAGING_US + (ALONE_STAGING_US if alone else 0.0),
            )
            config = StagedConfig(
                problem.dtype,
                threads,
                cluster,
                each,
                not problem.aligned,
                occupancy,
                problem.store_bytes,
                dependent,
                once,
            )
            yield Plan("staged", config, 0, 0, microseconds)


def _in_rounds(problem, target, strategy, cluster, groups, group, round_us):
    """The plan for resident shares: groups of CTAs take one row after another."""
    from warpspec.softmax.resident import ResidentConfig

    config = ResidentConfig(
        problem.dtype,
        RESIDENT_THREADS,
        RESIDENT_CHUNKS,
        STREAMING_CHUNKS,
        not problem.aligned,
        cluster,
        1,
        problem.store_bytes,
    )
    share = -(-_vectors(problem) // group)
    rest = max(0, share - config.capacity)  # read twice
    fits = min(1.0, L2_USABLE * target.l2_bytes / max(1, rest * VECTOR_BYTES * groups * group))
    memory = _memory_us(
        problem,
        target,
        rates=ALONE,
        share_bytes=share * VECTOR_BYTES,
        occupancy=config.resident,  # chunks take turns, as CTAs do elsewhere
        under_way=config.smem_bytes,
        cluster=1,
        reread=(1 - fits) * rest / share,
    )
    rounds = -(-problem.rows // groups)
    working = rounds * (round_us + share * VECTOR_BYTES / ROUND_BYTES_PER_US)
    # Rows overlap as far as the next one's share finds room beside this one's.
    overlap = min(1.0, max(0.0, config.capacity / share - 1)) * (1 - 1 / rounds)
    microseconds = LAUNCH_US + max(memory, working) + (1 - overlap) * min(memory, working)
    return Plan(strategy, config, groups, group, microseconds)


def _resident(problem: SoftmaxProblem, target: Target):
    for cluster in _clusters()[1:]:
        if cluster <= target.sm_count and _vectors(problem) >= cluster * RESIDENT_THREADS:
            groups = min(problem.rows, _sms(target, cluster) // cluster)
            if (
                groups == problem.rows
                and -(-_vectors(problem) // cluster) <= STAGED_VECTORS[0] * STAGED_THREADS[1]
            ):
                continue  # staged shares do the same, and come up faster
            yield _in_rounds(problem, target, "resident", cluster, groups, cluster, ROUND_CLUSTER_US)


def _split(problem: SoftmaxProblem, target: Target):
    for groups in (1, 2, 4, 8):
        group = max(1, target.sm_count // groups)
        if groups <= min(problem.rows, target.sm_count) and _vectors(problem) >= group * RESIDENT_THREADS:
            yield _in_rounds(problem, target, "split", 0, groups, group, ROUND_GRID_US)


def _two_pass(problem: SoftmaxProblem, target: Target):
    from warpspec.softmax.two_pass import TwoPassConfig

    for cluster in _clusters()[:-1]:
        ctas = problem.rows * cluster
        share = -(-_vectors(problem) // cluster) * VECTOR_BYTES
        occupancy = TWO_PASS_CTAS_PER_SM
        config = TwoPassConfig(
            problem.dtype, TWO_PASS_THREADS, cluster, not problem.aligned, problem.store_bytes
        )
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
        yield Plan("two-pass", config, 0, 0, microseconds)
