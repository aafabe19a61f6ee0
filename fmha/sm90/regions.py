"""Shared memory of attention on sm_90a: which regions there are, how large they are, and what they hold."""

from __future__ import annotations

from warpspec.common import memory
from warpspec.common.barriers import MBARRIER_BYTES, barrier_count
from warpspec.common.hardware import FP32_BYTES, WORD_BYTES
from warpspec.fmha.heads import BLOCK
from warpspec.fmha.sm90.barriers import WEIGHT_STAGES
from warpspec.fmha.sm90.shapes import WARPGROUP_ROWS

BARRIER_BYTES = 1024  # room for mbarriers and records, or a multiple of it: what follows is aligned to it


def regions_of(config) -> tuple[memory.Region, ...]:
    """The regions of an ``AttentionConfig``, in order."""
    stages, rows = config.kv_stages, f"{config.kv_stages} x [{config.tile_n}"
    name = "K and V" if config.format.shared_kv else "K"
    p = f"{WEIGHT_STAGES} x [{WARPGROUP_ROWS}, {BLOCK}]; O leaves through it"
    words = config.scheduler.word_bytes
    taken = barrier_count(config.barriers) * MBARRIER_BYTES + words
    room = (-(-taken // BARRIER_BYTES) * BARRIER_BYTES - words) // MBARRIER_BYTES
    return (
        memory.barrier_region(config.barriers, room),
        memory.Region("cursors", config.scheduler.cursor_bytes // WORD_BYTES, "int32", 0, "ends of chunks"),
        memory.Region("records", config.scheduler.record_bytes // WORD_BYTES, "int32", 0, "records", "of tiles"),
        memory.Region("order", config.scheduler.order_bytes // WORD_BYTES, "int32", 0, "sorted requests"),
        memory.tile_region(
            "q", config.rows.groups * config.q_bytes, "Q",
            f"{config.rows.groups} x [{config.rows.group_size}, {config.heads.qk_room}]",
        ),
        memory.tile_region("k", stages * config.kv.k_bytes, name, f"{rows}, {config.heads.qk_room}]"),
        memory.tile_region("v", stages * config.kv.own_v_bytes, "V", f"{rows}, {config.heads.v_room}]"),
        memory.tile_region("p", WEIGHT_STAGES * config.p_bytes, "P", p),
        memory.Region(
            "statistics", config.statistics_bytes // FP32_BYTES, "float32", 0, "", "of the rows of each P"
        ),
        memory.Region(
            "sums", config.sums_bytes // FP32_BYTES, "float32", 0, "",
            "row sums that paired consumers add up, of two tiles",
        ),
        *config.codes.regions,
        *config.merge.regions,
    )  # fmt: skip
