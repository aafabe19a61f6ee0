"""The barrier table of attention on sm_90a: every mbarrier, who arrives, how often, who waits, and what then holds."""

from __future__ import annotations

from warpspec.common.barriers import Barrier
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS
from warpspec.fmha.sm90.float8 import warp_barriers

WARPGROUP_WARPS = WARPGROUP_THREADS // WARP_THREADS
WEIGHT_STAGES = 2  # P tiles in shared memory: one from each of two consumers
LOAD, FILLED = "load warp", "load warp, expect_tx + TMA bytes"
CONSUMERS = "consumers, one thread a warp"


def barriers_of(config) -> tuple[Barrier, ...]:
    """The mbarriers of an ``AttentionConfig``: of Q, of tile records, then of K, V and P."""
    found = query_barriers(config)
    if config.scheduler.has_warp:
        readers = (
            config.consumer_warps + config.kv_groups + config.loads_apart + config.converts * WARPGROUP_WARPS
        )
        roles = "consumers, converter and load warp" if config.converts else "consumers and load warps"
        found += config.scheduler.barriers("scheduler", roles, readers)
    if config.paired:
        return found + pair_barriers(config)
    if config.converts:
        codes = config.codes.barriers(
            config.kv_stages, "consumers", "consumers", CONSUMERS, config.consumer_warps
        )
        return (*found, *codes)
    if config.by_warp:
        return (*found, *warp_barriers(config.codes, config.merge))
    return found + kv_barriers(config)


def query_barriers(config) -> tuple[Barrier, ...]:
    groups, own = config.rows.groups, "the rows' consumers, one thread a warp"
    readers = config.consumer_warps // config.shape.groups
    return (
        Barrier("q_full", groups, config.kv_groups, FILLED, own, "the rows' Q is in shared memory"),
        Barrier("q_empty", groups, readers, own, LOAD, "the consumers of these rows have read their Q"),
    )


def kv_barriers(config) -> tuple[Barrier, ...]:
    """The mbarriers of K and V that all consumers read, or each its own."""
    stages, warps = config.kv_stages, config.consumer_warps // config.rows.kv_heads
    if config.format.shared_kv:
        return (
            Barrier("k_full", stages, 1, FILLED, "consumers", "KV tile is in shared memory"),
            Barrier("k_empty", stages, warps, CONSUMERS, LOAD, "QK and PV have read the KV tile"),
        )
    return (
        Barrier("k_full", stages, 1, FILLED, "consumers", "K tile is in shared memory"),
        Barrier("k_empty", stages, warps, CONSUMERS, LOAD, "QK has read the K tile"),
        Barrier("v_full", stages, 1, FILLED, "consumers", "V tile is in shared memory"),
        Barrier("v_empty", stages, warps, CONSUMERS, LOAD, "PV has read the V tile"),
    )


def pair_barriers(config) -> tuple[Barrier, ...]:
    """The mbarriers of paired consumers: those of K and V, whose tiles belong to one consumer or, by column group, to
    both, and those of P, which they exchange."""
    stages, warps = config.kv_stages, WARPGROUP_WARPS
    mine, other = "the tile's consumer, one thread a warp", "the other consumer"
    held = "P and statistics are in shared memory"
    exchanged = (Barrier("p_full", WEIGHT_STAGES, warps, mine, other, held),)
    if not config.p_in_keys:
        exchanged += (
            Barrier("p_empty", WEIGHT_STAGES, warps, other, "the tile's consumer", "PV has read P"),
        )
    if config.in_groups:
        subtiles, groups = stages * config.subtiles, stages * config.kv_groups
        arrived = "the subtile of 64 columns is in shared memory"
        return (
            Barrier("k_full", subtiles, 1, FILLED, "consumers", arrived),
            Barrier(
                "k_empty",
                groups,
                warps,
                "the column group's consumer",
                "its load warp",
                "QK and PV have read it",
            ),
            *exchanged,
        )
    return (
        Barrier("k_full", stages, 1, FILLED, "the tile's consumer", "K tile is in shared memory"),
        Barrier("k_empty", stages, warps, mine, LOAD, "QK has read the K tile"),
        Barrier("v_full", stages, 1, FILLED, "consumers", "V tile is in shared memory"),
        Barrier("v_empty", stages, 2 * warps, CONSUMERS, LOAD, "both PVs have read the V tile"),
        *exchanged,
    )
