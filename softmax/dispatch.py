"""Which strategy runs a problem, and how it is configured: the least predicted time among all that could run it.

The model knows rows, length, dtype, the device's SMs and L2, and a few constants measured on an H200 (2026-11-21,
scripts/bench_softmax.py). It adds up, in microseconds:

- a launch, and the exchanges of states within it;
- the traffic at the speed of memory, where reading twice counts once if what is under way fits the L2; or the
  launching of cluster CTAs, if that takes longer;
- a CTA's own work on its share, which nothing hides where it is alone on its SM, and the last CTA's otherwise.

``scripts/bench_softmax.py --regret`` runs every candidate and prints how far the choice is from the best.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from warpspec.softmax.problem import VECTOR_BYTES, SoftmaxProblem

WARP = 32
THREADS_PER_SM = 2048
CTAS_PER_SM = 32
REGISTERS_PER_SM = 65536
SMEM_PER_SM = 227 * 1024  # bytes that CTAs can share out among them
SMEM_PER_CTA = 1536  # what a CTA takes besides its data: states, barriers, the system's
LARGEST_CLUSTER = 16

# Measured.
LAUNCH_US = 1.7
WARPS_US = 0.1  # an exchange within a CTA
CLUSTER_US = 0.3  # within a cluster
GRID_US = 3.5  # between the CTAs of a cooperative launch
MEMORY_BYTES_PER_US = 4.25e6  # read and written
SHARE_BYTES_PER_US = 22e3  # read, processed and written by one CTA
CLUSTER_CTAS_PER_US = 440.0  # started
NO_OVERLAP = 0.08  # of the memory time is lost with one CTA an SM, half of that with two, ...
L2_USABLE = 0.6  # of the L2, for what is read again

# Of the configurations.
REGISTERS_BASE, REGISTERS_PER_VECTOR = 28, 8  # of a thread of the register kernel; 16-bit data
ROWS_MOST_VECTORS = 8
STAGED_MOST_THREADS, STAGED_VECTORS, STAGED_REGISTERS = 512, 4, 40
RESIDENT_THREADS, RESIDENT_CHUNKS, RESIDENT_CHUNK_VECTORS = 480, 14, 2
RESIDENT_REGISTER_VECTORS, RESIDENT_UNROLL = 16, {0: 12, 16: 2}
TWO_PASS_THREADS = 512


@dataclass(frozen=True)
class Plan:
    """strategy: name of it. config: of its kernel. groups, group: how many groups of how many CTAs (resident
    shares only). microseconds: predicted."""

    strategy: str
    config: object
    groups: int
    group: int
    microseconds: float


@dataclass(frozen=True)
class Device:
    """sms: number of SMs. l2_bytes: size of the L2."""

    sms: int
    l2_bytes: int


@functools.lru_cache(maxsize=4096)
def choose(problem: SoftmaxProblem, device: Device) -> Plan:
    """The candidate of least predicted time; the first of equals."""
    return min(candidates(problem, device), key=lambda plan: plan.microseconds)


def best_of_each(problem: SoftmaxProblem, device: Device) -> dict[str, Plan]:
    """Every strategy that can run the problem, configured as the model likes it best."""
    best: dict[str, Plan] = {}
    for plan in candidates(problem, device):
        if plan.strategy not in best or plan.microseconds < best[plan.strategy].microseconds:
            best[plan.strategy] = plan
    return best


def candidates(problem: SoftmaxProblem, device: Device) -> list[Plan]:
    """All plans that can run the problem; at least one."""
    return [
        *_rows(problem, device),
        *_staged(problem, device),
        *_resident(problem, device),
        *_split(problem, device),
        *_two_pass(problem, device),
    ]


def _vectors(problem: SoftmaxProblem) -> int:
    """Most whole vectors of a row, at any alignment; at least 1."""
    return max(1, problem.bytes // (2 * problem.rows) // VECTOR_BYTES)


def _clusters() -> tuple[int, ...]:
    return tuple(2**i for i in range(LARGEST_CLUSTER.bit_length()))


def _time(
    problem, device, *, ctas, share_bytes, occupancy, exchange_us, cluster=1, rounds=1, reread=0
) -> float:
    """The model. ctas: of the launch. share_bytes: that one reads, a round. occupancy: CTAs to an SM. reread: bytes
    that are read a second time from memory."""
    memory = (problem.bytes + reread) / MEMORY_BYTES_PER_US * (1 + NO_OVERLAP / occupancy)
    starting = ctas / CLUSTER_CTAS_PER_US if cluster > 1 else 0.0
    waves = rounds if occupancy > 1 else rounds * -(-ctas // device.sms)
    return LAUNCH_US + rounds * exchange_us + max(memory, starting) + waves * share_bytes / SHARE_BYTES_PER_US


def _rows(problem: SoftmaxProblem, device: Device):
    from warpspec.softmax.rows import RowsConfig
    from warpspec.softmax.vectors import elements

    vectors = _vectors(problem)
    for cluster in _clusters():
        for lanes in (4, 8, 16, 32, 64, 128, 256, 512):
            each = -(-vectors // (lanes * cluster))
            if each > ROWS_MOST_VECTORS or (cluster > 1 and lanes < 2 * WARP):
                continue
            if not problem.aligned and lanes < 2 * elements(problem.dtype):
                continue
            rows = max(1, 4 * WARP // lanes) if cluster == 1 else 1
            while rows > 1 and problem.rows < rows * device.sms:
                rows //= 2
            registers = REGISTERS_BASE + REGISTERS_PER_VECTOR * each
            threads = lanes * rows
            occupancy = min(CTAS_PER_SM, THREADS_PER_SM // threads, REGISTERS_PER_SM // (registers * threads))
            if occupancy == 0:
                continue
            config = RowsConfig(
                problem.dtype, lanes, rows, cluster, each, not problem.aligned, 1, problem.store_bytes
            )
            exchange = CLUSTER_US if cluster > 1 else WARPS_US if lanes > WARP else 0.0
            microseconds = _time(
                problem,
                device,
                ctas=-(-problem.rows // rows) * cluster,
                # A warp's lanes work side by side, a lane's vectors one after another.
                share_bytes=each * lanes * rows * VECTOR_BYTES,
                occupancy=occupancy,
                exchange_us=exchange,
                cluster=cluster,
            )
            yield Plan("rows" if cluster == 1 else "cluster", config, 0, 0, microseconds)


def _staged(problem: SoftmaxProblem, device: Device):
    from warpspec.softmax.staged import StagedConfig

    vectors = _vectors(problem)
    for cluster in _clusters():
        share = -(-vectors // cluster)
        threads = min(STAGED_MOST_THREADS, max(2 * WARP, -(-share // STAGED_VECTORS // WARP) * WARP))
        each = -(-share // threads)
        smem = threads * each * VECTOR_BYTES + SMEM_PER_CTA
        if smem > SMEM_PER_SM or (cluster > 1 and share < 2 * WARP):
            continue
        occupancy = min(CTAS_PER_SM, REGISTERS_PER_SM // (STAGED_REGISTERS * threads), SMEM_PER_SM // smem)
        config = StagedConfig(
            problem.dtype, threads, cluster, each, not problem.aligned, occupancy, problem.store_bytes
        )
        microseconds = _time(
            problem,
            device,
            ctas=problem.rows * cluster,
            share_bytes=share * VECTOR_BYTES,
            occupancy=occupancy,
            exchange_us=CLUSTER_US if cluster > 1 else WARPS_US,
            cluster=cluster,
        )
        yield Plan("staged", config, 0, 0, microseconds)


def _resident_config(problem: SoftmaxProblem, share: int, cluster: int):
    """Of a share of so many vectors: registers hold some where shared memory does not hold all."""
    from warpspec.softmax.resident import ResidentConfig

    room = RESIDENT_CHUNKS * RESIDENT_CHUNK_VECTORS * RESIDENT_THREADS
    held = RESIDENT_REGISTER_VECTORS if cluster and share > room else 0
    return ResidentConfig(
        problem.dtype,
        RESIDENT_THREADS,
        RESIDENT_CHUNKS,
        not problem.aligned,
        cluster,
        RESIDENT_CHUNK_VECTORS,
        held,
        problem.store_bytes,
        RESIDENT_UNROLL[held],
    )


def _shared_out(problem, device, strategy, cluster, groups, group, exchange_us):
    """Plan for groups of CTAs that take one row after another."""
    share = -(-_vectors(problem) // group)
    config = _resident_config(problem, share, cluster)
    rest = max(0, share - config.capacity) * VECTOR_BYTES
    reread = problem.rows * group * rest if device.sms * rest > L2_USABLE * device.l2_bytes else 0
    microseconds = _time(
        problem,
        device,
        ctas=groups * group,
        share_bytes=share * VECTOR_BYTES,
        occupancy=1,
        exchange_us=exchange_us,
        rounds=-(-problem.rows // groups),
        reread=reread,
    )
    return Plan(strategy, config, groups, group, microseconds)


def _resident(problem: SoftmaxProblem, device: Device):
    for cluster in _clusters()[1:]:
        if cluster <= device.sms and _vectors(problem) >= cluster * RESIDENT_THREADS:
            groups = min(problem.rows, device.sms // cluster)
            yield _shared_out(problem, device, "resident", cluster, groups, cluster, CLUSTER_US)


def _split(problem: SoftmaxProblem, device: Device):
    for groups in (1, 2, 4, 8):
        group = device.sms // groups
        if groups <= problem.rows and _vectors(problem) >= group * RESIDENT_THREADS:
            yield _shared_out(problem, device, "split", 0, groups, group, GRID_US)


def _two_pass(problem: SoftmaxProblem, device: Device):
    from warpspec.softmax.two_pass import TwoPassConfig

    for cluster in (1, LARGEST_CLUSTER):
        occupancy = 2
        ctas = problem.rows * cluster
        share = -(-_vectors(problem) // cluster) * VECTOR_BYTES
        under_way = min(ctas, device.sms * occupancy) * share
        reread = problem.bytes // 2 if under_way > L2_USABLE * device.l2_bytes else 0
        config = TwoPassConfig(
            problem.dtype, TWO_PASS_THREADS, cluster, not problem.aligned, problem.store_bytes
        )
        microseconds = _time(
            problem,
            device,
            ctas=ctas,
            share_bytes=2 * share,
            occupancy=occupancy,
            exchange_us=CLUSTER_US if cluster > 1 else WARPS_US,
            cluster=cluster,
            reread=reread,
        )
        yield Plan("two-pass", config, 0, 0, microseconds)
