"""Chooses the kernel for a problem: every way to divide a row gets a predicted time, the shortest wins. Plain Python.

The model has one set of constants, measured on an H200 (2026-11-21; ``scripts/bench_topk.py --variants`` shows how good
it is). All times are in microseconds:

    launch + bytes / bandwidth + instructions that memory does not hide + what the last row takes by itself
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.softmax.cost import CLUSTER_SMS
from warpspec.softmax.topk.config import (
    AGAIN_CLUSTER,
    HELD_ELEMENTS,
    HELD_MOST_K,
    MAX_CLUSTER,
    MAX_WARPS,
    SORTED_ELEMENTS,
    SORTED_LANES,
    TopkConfig,
    smallest_capacity,
)

BYTES_PER_SM = 32.2e3  # bytes that an SM loads per microsecond
WARP_INSTRUCTIONS_PER_SM = 7020  # instructions that an SM issues per microsecond: 4 a clock

HELD_LAUNCH = 2.0
HELD_WARP = 450  # instructions of a warp, whatever it holds
HELD_ELEMENT = 7  # instructions for each element of a lane
HELD_EXPOSED = 0.6  # fraction of the instructions that memory does not hide
HELD_INSTRUCTION = 0.00085  # an instruction of one warp, if nothing else is running
SORTED_WARP, SORTED_MERGE = 330, 130  # instructions of a warp; and for every doubling of the lanes
HELD_WARPS = 0.5  # a reduction over the warps of a row

# Streamed rows whose candidates are picked meanwhile.
STREAM_LAUNCH = 3.0
STREAM_WARP = 120  # instructions of a warp for its candidates
STREAM_CANDIDATE = 60  # and for each of k
STREAM_TURN = 0.35  # a tile of one warp, if nothing else is running
CLUSTER_STEP = 0.3  # a reduction over a cluster, for every doubling
LONGEST_UNROLL = 4

# Streamed rows whose candidates are fetched again. That is faster for few rows, and slower if memory is the limit and k
# is small: by 7 percent at 64 x 129280 k 8, 8 at 8192 x 50257 k 10, 12 at 1272 x 786432 k 8 (H200, 2026-11-23). More
# rows were not measured.
AGAIN_ROWS = 1024  # most rows
AGAIN_LEAST_K, AGAIN_LENGTH = 11, 32768  # k at least this large, or rows shorter than this
AGAIN_LAUNCH = 0.5
AGAIN_BYTES_PER_SM = 26e3  # bytes that an SM loads per microsecond
AGAIN_ELEMENT = 10.7  # instructions for each element of a lane
AGAIN_TURN = 24  # and for each tile
AGAIN_TURN_LATENCY = 1.5  # a tile of a CTA, if nothing else is running
# Time after the rows have been read, for threshold, candidates and ranks: a constant for a CTA, and more for each warp
# of an SM, for each of k, and for a cluster.
TAIL, TAIL_WARP, TAIL_K, TAIL_CLUSTER = 2.3, 0.08, 0.04, 1.4
TAIL_LARGEST = 1.0  # extra time of the largest cluster, for each of its CTAs that share an SM
AGAIN_UNROLLS = {"float32": (1, 2, 3), "float16": (1, 2, 4), "bfloat16": (1, 2, 4)}

# Least warps of a row, with the largest k for which they are enough.
LEAST_WARPS = {1: 10, 2: 32, 4: 64, 8: 128}

CLUSTER_CTAS = 440  # CTAs of clusters that the GPU starts per microsecond
CTA_LANES = 128  # lanes of a CTA whose rows are each held by some lanes of a warp
# Lanes of a CTA whose lanes sort, if such CTAs fill this fraction of the SMs.
SORTED_CTA_LANES, MOST_SMS = 512, 0.9
STREAM_ROWS = 4  # rows of a CTA, if each warp has one


@lru_cache(maxsize=4096)
def choose_config(
    rows: int, length: int, k: int, dtype: str, edges: bool, renormalize: bool, sm_count: int
) -> TopkConfig:
    """The kernel for ``rows`` rows of ``length`` logits on a device of ``sm_count`` SMs."""
    return timed_configs(rows, length, k, dtype, edges, renormalize, sm_count)[0][1]


def timed_configs(
    rows: int, length: int, k: int, dtype: str, edges: bool, renormalize: bool, sm_count: int
) -> list[tuple[float, TopkConfig]]:
    """Every way to divide the rows, with its predicted time, shortest first."""
    base = TopkConfig(
        dtype=dtype, k_capacity=smallest_capacity(k), warps=MAX_WARPS, edges=edges, renormalize=renormalize
    )
    vectors = -(-length // base.per_vector)
    memory = rows * vectors * VECTOR_BYTES / (BYTES_PER_SM * sm_count)
    timed = [
        *(
            (memory + held_time(config, rows, sm_count), config)
            for config in (*sorts(base, rows, length, k, sm_count), *held(base, length, k))
        ),
    ]
    if rows <= AGAIN_ROWS and (k >= AGAIN_LEAST_K or length < AGAIN_LENGTH):
        timed += [
            (again_time(config, rows, vectors, k, sm_count), config) for config in again(base, vectors, k)
        ]
    else:
        timed += [
            (memory + stream_time(config, rows, vectors, k, sm_count), config)
            for config in streams(base, vectors, k)
        ]
    return sorted(timed, key=lambda pair: pair[0])


def held(base: TopkConfig, length: int, k: int):
    """Configurations that hold the row."""
    vectors = -(-length // base.per_vector)
    for lanes, warps in ((8, 1), (16, 1), (WARP_THREADS, 1), (WARP_THREADS, 2), (WARP_THREADS, 4)):
        unroll = -(-vectors // (lanes * warps))
        if unroll > HELD_ELEMENTS // base.per_vector or k > HELD_MOST_K[lanes]:
            continue
        if base.edges and lanes * warps < 2 * base.per_vector:
            continue
        full = not base.edges and length == unroll * lanes * warps * base.per_vector
        per_cta = CTA_LANES // lanes if warps == 1 else 1
        yield replace(base, held=True, lanes=lanes, warps=warps, rows=per_cta, unroll=unroll, full=full)


def sorts(base: TopkConfig, rows: int, length: int, k: int, sm_count: int):
    """Configurations whose lanes sort the row."""
    vectors, unroll = -(-length // base.per_vector), SORTED_ELEMENTS // base.per_vector
    lanes = next((lanes for lanes in SORTED_LANES if lanes * unroll >= vectors), None)
    if lanes and k <= SORTED_ELEMENTS and not base.edges:
        fill = rows * lanes >= MOST_SMS * sm_count * SORTED_CTA_LANES
        per_cta = (SORTED_CTA_LANES if fill else CTA_LANES) // lanes
        yield replace(base, held=True, sorts=True, warps=1, lanes=lanes, rows=per_cta, unroll=unroll)


def held_time(config: TopkConfig, rows: int, sm_count: int) -> float:
    instructions = HELD_WARP + HELD_ELEMENT * config.unroll * config.per_vector
    if config.sorts:
        instructions = SORTED_WARP + SORTED_MERGE * (config.lanes.bit_length() - 1)
    warps = -(-rows * config.lanes // WARP_THREADS) * config.warps
    exposed = HELD_EXPOSED * warps * instructions / (WARP_INSTRUCTIONS_PER_SM * sm_count)
    reduction = HELD_WARPS if config.warps > 1 else 0.0
    return HELD_LAUNCH + exposed + HELD_INSTRUCTION * instructions + reduction


def streams(base: TopkConfig, vectors: int, k: int):
    """Configurations that stream the row."""
    for warps, cluster in divisions(k, MAX_CLUSTER):
        unroll = min(LONGEST_UNROLL, -(-vectors // (warps * cluster * WARP_THREADS)))
        per_cta = STREAM_ROWS if warps * cluster == 1 else 1
        yield replace(base, warps=warps, cluster=cluster, rows=per_cta, unroll=max(unroll, 1))


def divisions(k: int, most: int):
    """(warps, CTAs) that may share a row, with at most ``most`` CTAs."""
    warps = next(warps for warps, most_k in LEAST_WARPS.items() if k <= most_k)
    while warps <= MAX_WARPS:
        cluster = 1
        while cluster <= most:
            yield warps, cluster
            cluster *= 2
        warps *= 2


def stream_time(config: TopkConfig, rows: int, vectors: int, k: int, sm_count: int) -> float:
    warps = config.warps * config.cluster
    instructions = STREAM_WARP + STREAM_CANDIDATE * k
    candidates = rows * warps * instructions / (WARP_INSTRUCTIONS_PER_SM * sm_count)
    turns = -(-vectors // config.tile_vectors)
    time = STREAM_LAUNCH + candidates + STREAM_TURN * turns
    if config.cluster > 1:
        time += CLUSTER_STEP * (config.cluster.bit_length() - 1) + rows * config.cluster / CLUSTER_CTAS
    return time


def again(base: TopkConfig, vectors: int, k: int):
    """Configurations that stream the row and fetch candidates again."""
    for warps, cluster in divisions(k, AGAIN_CLUSTER):
        needed = -(-vectors // (warps * cluster * WARP_THREADS))  # for a single turn
        for unroll in AGAIN_UNROLLS[base.dtype]:
            per_cta = STREAM_ROWS if warps * cluster == 1 else 1
            yield replace(base, again=True, warps=warps, cluster=cluster, rows=per_cta, unroll=unroll)
            if unroll >= needed:
                break


def again_time(config: TopkConfig, rows: int, vectors: int, k: int, sm_count: int) -> float:
    """Predicted time if candidates are fetched again. CTAs come in waves.

    In each wave all tiles of a row are read at the speed of the slowest of three: memory, the chain of loads, the
    instructions of all warps of an SM. Then every CTA still has to process its candidates.
    """
    ctas = -(-rows // config.rows) * config.cluster
    sms = int(sm_count * CLUSTER_SMS[config.cluster]) // config.cluster * config.cluster or config.cluster
    room = config.room
    waves, at_once = -(-ctas // (sms * room)), min(room, -(-ctas // sms))
    warps = at_once * config.warps * config.rows
    turns = -(-vectors // config.tile_vectors)
    instructions = AGAIN_TURN + AGAIN_ELEMENT * config.unroll * config.per_vector
    turn = max(AGAIN_TURN_LATENCY, warps * instructions / WARP_INSTRUCTIONS_PER_SM)
    stream = max(rows * vectors * VECTOR_BYTES / (AGAIN_BYTES_PER_SM * sm_count), waves * turns * turn)
    tail = TAIL + TAIL_WARP * warps + TAIL_K * k + (TAIL_CLUSTER if config.cluster > 1 else 0.0)
    if config.cluster == AGAIN_CLUSTER:
        tail += TAIL_LARGEST * at_once
    starting = ctas / CLUSTER_CTAS if config.cluster > 1 else 0.0
    return AGAIN_LAUNCH + max(stream, starting) + waves * tail
