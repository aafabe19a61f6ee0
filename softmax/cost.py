"""The times of softmax's strategies and configurations, predicted by one model, in microseconds.

The model knows rows, length, dtype, the device's SMs, L2 and copy speed, and a few constants measured on an H200. It
adds up, in microseconds:

- a launch, and the reduction of the states of a row's parts;
- the traffic at the speed of memory. Data that is read a second time counts as far as it does not fit L2;
- one CTA's work on its share, which nothing hides at the end of a launch.

CTAs that do not all fit the GPU at once come in waves. With clusters (``shares``), a wave adds some of the life of a
CTA: all of it with one or two CTAs on an SM, little with four and more, which load while others compute. Without
clusters, and in two passes (``memory_us``), an SM needs as many bytes in flight as memory delivers during the life of
a CTA (Little's law); SMs with more bytes in flight than needed lose a little, and so do SMs with few CTAs to alternate
between loading and storing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.common.launch import Target
from warpspec.softmax.problem import SoftmaxProblem

LAUNCH_US, DEPENDENT_US = 1.7, 0.8  # an ordinary launch; a programmatic dependent launch
WARPS_US = 0.1  # a reduction over the warps of a CTA
WITHIN_WARP_US = -0.3  # difference if rows belong to whole warps, and need no such reduction
STAGING_US = 0.1  # extra time of a bulk copy over loads
# CTAs of large clusters whose shares come by several copies (``several_copies``): a launch, by size of the cluster;
# bytes of the shares on an SM per microsecond; and how often the traffic goes at a copy's speed; both if exponentials
# are taken once, or twice. Fitted to 58 timings of 1 to 24 rows of 50257 to 982800 numbers, H200, 2026-11-27.
SEVERAL_US = {8: 2.70, 16: 2.58}
SEVERAL_BYTES_PER_US = {True: 38e3, False: 23e3}
SEVERAL_TRAFFIC = {True: 0.59, False: 0.53}
# Saved by clusters of 8 on at most half of the SMs, if two CTAs fit an SM: launches run side by side.
BESIDE_US = 0.58
CLUSTER_US = 0.25  # a reduction over the CTAs of a cluster
CLUSTER_CTAS_PER_US = 370.0  # CTAs of clusters that the GPU starts
CLUSTER_SMS = {1: 1.0, 2: 1.0, 4: 0.91, 8: 0.91, 16: 0.91}  # fraction of the SMs on which clusters find room
# Read and written a SM: up to here, launches without clusters count as dependent launches.
SMALL_BYTES_PER_SM = 128e3
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
CLUSTERED = Rates(0.7, 0.28, 11.5e3, 0.0, 0.21, 1.5)  # of two passes
# CTAs of clusters that each have one share, read once (``shares``). Fitted to 594 timings of 121 problems with 2 to 310
# rows of 23640 to 982800 numbers, H200, 2026-11-27: a launch, dependent or not; how long a CTA lives whatever its
# share, for each thread, for each vector of a thread, and if its share is staged; bytes of the shares on an SM per
# microsecond by what is computed: exponentials once, fp32 ones twice, 16-bit ones that are kept, or twice; how much
# faster than a copy the traffic is, because part of the results stay in L2.
SHARES_US = {True: 1.04, False: 1.36}
LIFE_US, THREAD_US, VECTOR_US, STAGED_US = 0.53, 0.00091, 0.083, 0.055
SHARE_BYTES_PER_US = {"once": 126e3, "float32": 69e3, "kept": 231e3, "twice": 85e3}
SHARES_TRAFFIC = 1.03
SHARES_LOSS_BYTES = 60.0  # as CLUSTER_LOSS_BYTES; by 512x16384 and 813x78864 fp32
# A further wave of CTAs adds their life, or this part of it: WAVE_BYTES divided by the bytes of a share and by this
# power of the number of CTAs on an SM. The others' traffic hides the rest.
WAVE_BYTES, WAVE_POWER = 211e3, 2.3
L2_USABLE = 0.4  # fraction of L2 that serves data read again
# Resident shares: one row after another by the same CTAs.
# A reduction over the grid or a cluster, with everything that waits for it.
ROUND_GRID_US, ROUND_CLUSTER_US = 4.25, 1.8
ROUND_BYTES_PER_US = {
    "float32": 28e3,
    "float16": 24e3,
    "bfloat16": 24e3,
}  # bytes of a share that a CTA processes
# Parts of the traffic and the rounds that hide each other: the most, where two rows' shares find room, and the least.
ROUND_OVERLAPS = 0.92, 0.57

# Instructions that an element takes, and the fraction that nothing hides; lanes without an element count too.
ELEMENT_INSTRUCTIONS, EXPOSED = {"float32": 16, "float16": 6, "bfloat16": 6}, 0.75
WARP_INSTRUCTIONS_PER_US = 7020  # warp instructions that an SM issues: 4 a clock


def sms_of(target: Target, cluster: int) -> int:
    """SMs on which clusters find room.

    The SMs of a GPC (16 or 18 on an H200) are not always divisible by the cluster.
    """
    return max(1, int(target.sm_count * CLUSTER_SMS[cluster]) // cluster) * cluster


def clusters_at_once(target: Target, cluster: int, occupancy: int) -> int:
    """Clusters that find room if an SM has room for so many CTAs."""
    return max(1, int(target.sm_count * CLUSTER_SMS[cluster] * occupancy) // cluster)


def memory_us(problem, target, *, rates, share_bytes, occupancy, under_way, cluster, reread=0.0) -> float:
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


def one_row_a_cta(
    problem, target, *, ctas, share_bytes, occupancy, batch_bytes=None, cluster, reread=0.0, extra=0.0
) -> float:
    """Time if each CTA takes one share of one row: without clusters, or in two passes.

    occupancy: CTAs that fit an SM. batch_bytes: bytes that a CTA loads at a time if it does not load the whole share at
    once; it then reads the share twice. extra: microseconds to add.
    """
    sms, rates = sms_of(target, cluster), ALONE if cluster == 1 else CLUSTERED
    waves = -(-ctas // (sms * occupancy))
    passes, loaded = (1, share_bytes) if batch_bytes is None else (2, min(share_bytes, batch_bytes))
    memory = memory_us(
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
    # Some candidates fit at once, others nearly.
    small = problem.bytes <= SMALL_BYTES_PER_SM * target.sm_count
    launch = DEPENDENT_US if small and cluster == 1 else LAUNCH_US
    work = alone * passes * share_bytes / rates.bytes_per_us
    return launch + extra + reduction + memory + work


def shares(problem, target, config, *, occupancy: int, work: str, extra: float = 0.0) -> tuple[float, bool]:
    """(time, whether it is a dependent launch) if each CTA of a cluster takes one share of one row. config: a
    RowsConfig or StagedConfig. occupancy: CTAs that fit an SM. work: of SHARE_BYTES_PER_US. extra: microseconds that a
    CTA lives longer."""
    cluster, ctas = config.cluster, problem.rows * config.cluster
    share_bytes = -(-problem.vectors // cluster) * VECTOR_BYTES
    waves = -(-problem.rows // clusters_at_once(target, cluster, occupancy))
    dependent = waves == 1 or cluster == DEPENDENT_CLUSTER
    started = ctas / CLUSTER_CTAS_PER_US
    traffic = problem.bytes / (SHARES_TRAFFIC * target.speeds.copy * 1e6)
    traffic *= 1 + SHARES_LOSS_BYTES * (cluster - 1) / share_bytes
    together = min(occupancy, -(-ctas // sms_of(target, cluster)))
    life = LIFE_US + THREAD_US * config.threads + VECTOR_US * config.vectors + extra
    life += together * share_bytes / SHARE_BYTES_PER_US[work]
    shown = min(1.0, WAVE_BYTES / (occupancy**WAVE_POWER * share_bytes))
    time = SHARES_US[dependent] + math.cbrt(started**3 + traffic**3)
    return time + life * (1 + (waves - 1) * shown), dependent


def several_copies(problem, target, config, *, residents: int, beside: bool) -> float:
    """Time of a cluster's CTAs whose shares come by several copies, all on the GPU at once. config: a StagedConfig.
    residents: CTAs on an SM. beside: two launches' CTAs fit the GPU."""
    share_bytes = -(-problem.vectors // config.cluster) * VECTOR_BYTES
    work = residents * share_bytes / SEVERAL_BYTES_PER_US[config.once]
    traffic = SEVERAL_TRAFFIC[config.once] * problem.bytes / (target.speeds.copy * 1e6)
    return SEVERAL_US[config.cluster] - (BESIDE_US if beside else 0.0) + work + traffic


def beside(problem: SoftmaxProblem, target: Target, lanes: int, idle: int) -> float:
    """Additional time of rows that ``lanes`` threads of a CTA share. idle: elements of a row that these lanes could
    hold beyond its length."""
    instructions = problem.rows * idle * ELEMENT_INSTRUCTIONS[problem.dtype] / WARP_THREADS
    within = WITHIN_WARP_US if lanes <= WARP_THREADS else 0.0
    return EXPOSED * instructions / (WARP_INSTRUCTIONS_PER_US * target.sm_count) + within


def in_rounds(problem, target, config, *, groups: int, group: int) -> float:
    """Time of groups of CTAs that take one row after another. config: a ResidentConfig. group: CTAs of a group."""
    share = -(-problem.vectors // group)
    rest = max(0, share - config.capacity)  # vectors that are read twice
    fits = min(1.0, L2_USABLE * target.l2_bytes / max(1, rest * VECTOR_BYTES * groups * group))
    memory = memory_us(
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
    round_us = ROUND_CLUSTER_US if config.cluster else ROUND_GRID_US
    working = rounds * (round_us + share * VECTOR_BYTES / ROUND_BYTES_PER_US[problem.dtype])
    # Rows overlap as far as the next row's share fits beside this one's.
    most, least = ROUND_OVERLAPS
    overlap = max(min(most, config.capacity / share - 1) * (1 - 1 / rounds), least)
    return LAUNCH_US + max(memory, working) + (1 - overlap) * min(memory, working)
