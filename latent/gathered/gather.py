"""The producer: four warps that bring rows from pools into KV tiles, in bf16, by slot; the first also loads Q by TMA,
or all convert its codes.

Two warps have the first half of the columns and two the second half, each for 32 keys of a tile. A lane looks up one
key's slot two tiles ahead and prefetches its row to L2 one tile ahead. Together with three other lanes it then copies
every eighth key (``rows``). FP8 rows are copied to shared memory unchanged and converted from there, eight keys at a
time; bf16 rows are copied straight to their place. A key that is not there (its slot belongs to no row, or lies past
the length) becomes zeros in shared memory and a 0 in the tile's mask. Two CTAs may share this work (``cluster``).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from warpspec.common.device import tma
from warpspec.common.device.pipeline import drain
from warpspec.common.device.words import load_present
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WARPGROUP_THREADS, WORD_BYTES
from warpspec.fmha.device.tiles import each_scheduled
from warpspec.latent.gathered.cluster import fetch_tile, peer_of, send_rows, write_masks
from warpspec.latent.gathered.codes import (
    convert_queries,
    convert_tail,
    copy_codes,
    copy_tails,
    load_codes,
    store_scaled,
)
from warpspec.latent.gathered.config import CLUSTER, PAGE_ROWS
from warpspec.latent.gathered.rows import (
    GROUP_KEYS,
    RAW_PAIR,
    VECTOR_WORDS,
    Loader,
    copy_raw,
    copy_rows,
    load_raw,
    row_of,
    rows_of_groups,
    store_group,
)
from warpspec.latent.gathered.task import each_task, place_of

NO_SLOT = -1
LINE_BYTES = 128  # bytes that one prefetch brings


@cute.jit
def gather(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    shared,
    operands,
    units,
    atom,
    coordinates,
    tasks=None,
):
    """One producer warp: copies its keys of every KV tile; the first warp also loads Q, and finds the tasks if work is
    cut by length. tasks: the records of these, asked for if it writes them.

    Produces q_full (TMA, or one arrival a warp) and k_full, one arrival a warp. Consumes q_empty and k_empty, each
    before the buffer that it guards is filled again. Returns only when all buffers have been released.
    """
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    warp = cute.arch.make_warp_uniform(thread // WARP_THREADS)
    column_group = warp // config.gathers.warps_of_group
    share, peer, rings = warp % config.gathers.warps_of_group, None, (channels["k_empty"],)
    if cutlass.const_expr(config.gathers.cluster > 1):
        peer, rings = peer_of(shared.k), (channels["k_empty"], channels["peer_empty"])
        share += peer.rank * config.gathers.warps_of_group
    loader = Loader(config, operands, column_group, share, thread % WARP_THREADS, peer)
    role = Producer(loader, channels, shared, (atom, coordinates))
    uses = (Int32(0), Int32(0))
    if cutlass.const_expr(config.scheduler.by_producer):
        uses = each_scheduled(config, operands, units, tasks, bring_task, role, uses, Boolean(warp == 0))
    else:
        uses = each_task(config, operands, units, bring_task, role, uses)
    use, _ = uses
    drain(rings, use, config.barrier_groups, loader.ring_use(0))


@dataclass(frozen=True)
class Producer:
    """A producer warp's state for all of its tasks. q_map: TMA's atom and coordinates of Q."""

    loader: Loader
    channels: dict
    shared: tuple
    q_map: tuple

    @property
    def config(self):
        return self.loader.config


@cute.jit
def bring_task(role, task, uses):
    """Bring a task's tiles. uses: (KV tiles, tasks with keys) that came before; returns the counts after."""
    config = role.loader.config
    use, task_use = uses
    bring = convert_tiles
    if cutlass.const_expr(config.gathers.copies):
        bring = copy_tiles
    elif cutlass.const_expr(config.gathers.cluster > 1):
        bring = convert_shared
    elif cutlass.const_expr(config.gathers.tail_apart):
        bring = convert_in_place
    if task.span.count > 0:
        bring(role.loader, role.channels, role.shared, task, use, (role.q_map, task_use))
        use += task.span.count
        task_use += 1
    return use, task_use


@cute.jit
def convert_tiles(loader, channels: cutlass.Constexpr, shared, task, use, q_load):
    """Bring a task's tiles of FP8 rows: copy them to shared memory, where each lane reads what it copied, and convert.

    use: KV tiles that came before. The copies of a tile's first group of keys start one tile ahead and go to a buffer
    of the warp. The copies of the other groups go to the place of the converted keys; they start as soon as the tile
    may be filled, and run while the first group is converted. Loads are thus never in flight across a loop iteration:
    ptxas gives all of them one scoreboard, where a wait for one is a wait for all.
    """
    config, groups = loader.config, loader.groups
    behind = groups - 1  # groups whose copies may be in flight when the next group is converted
    block_bytes, group_bytes = config.tile_n * tma.ROW_BYTES, GROUP_KEYS * tma.ROW_BYTES
    words = loader.words()
    own = loader.column_group * config.gathers.warps_of_group + loader.share
    first = shared.raw.toint() + own * config.gathers.raw_bytes + loader.lane * VECTOR_BYTES
    slots = Slots.of(loader, task)
    row, scale_at = locate(loader, look_up(loader, task, slots, Int32(0)))
    copy_raw(loader, first, RAW_PAIR, *row_of(loader, row, scale_at, 0))
    cute.arch.cp_async_commit_group()
    slot = look_up(loader, task, slots, Int32(1))
    for step in cutlass.range(task.span.count, unroll=1):
        next_row, next_scale_at = locate(loader, slot)
        prefetch(loader, next_row)
        slot = look_up(loader, task, slots, step + 2)
        rows = [row_of(loader, row, scale_at, group) for group in range(1, groups)]
        base = begin_tile(loader, channels, shared, use + step, row)
        inside = base + loader.share * (groups * group_bytes) + loader.lane * VECTOR_BYTES
        for group in cutlass.range_constexpr(1, groups):
            copy_raw(loader, inside + group * group_bytes, block_bytes, *rows[group - 1])
            cute.arch.cp_async_commit_group()
        load_q_first(loader, channels, shared, task, step, q_load)
        cute.arch.cp_async_wait_group(behind)
        scales = load_raw(loader, first, RAW_PAIR, words)
        store_group(loader, base, 0, words, scales)
        copy_raw(loader, first, RAW_PAIR, *row_of(loader, next_row, next_scale_at, 0))
        cute.arch.cp_async_commit_group()
        for group in cutlass.range(1, groups, unroll=1):
            cute.arch.cp_async_wait_group(behind)
            scales = load_raw(loader, inside + group * group_bytes, block_bytes, words)
            cute.arch.sync_warp()  # lanes write where other lanes have read
            store_group(loader, base, group, words, scales)
            cute.arch.cp_async_commit_group()  # an empty group, so that the same number of groups follows each one
        end_tile(loader, channels, use + step)
        row, scale_at = next_row, next_scale_at
    cute.arch.cp_async_wait_group(0)  # the copies of the tile after the last, which are zeros


@cute.jit
def convert_in_place(loader, channels: cutlass.Constexpr, shared, task, use, q_load):
    """``convert_tiles`` where there is no room for keys ahead of their tile: all groups are copied to the place of the
    converted keys once the tile may be filled, from L2, and the tails to where they stay."""
    config, groups = loader.config, loader.groups
    block_bytes, group_bytes = config.tile_n * tma.ROW_BYTES, GROUP_KEYS * tma.ROW_BYTES
    words = loader.words()
    slots = Slots.of(loader, task)
    row, scale_at = locate(loader, look_up(loader, task, slots, Int32(0)))
    prefetch(loader, row)
    slot = look_up(loader, task, slots, Int32(1))
    for step in cutlass.range(task.span.count, unroll=1):
        next_row, next_scale_at = locate(loader, slot)
        prefetch(loader, next_row)
        slot = look_up(loader, task, slots, step + 2)
        rows = [row_of(loader, row, scale_at, group) for group in range(groups)]
        base = begin_tile(loader, channels, shared, use + step, row)
        inside = base + loader.share * (groups * group_bytes) + loader.lane * VECTOR_BYTES
        brings_tails = (
            use + step
        ) % config.gathers.kv_groups != loader.column_group  # its consumer has read P in their place
        if brings_tails:
            copy_tails(loader, base, [address for address, _ in rows], loader.share)
        for group in cutlass.range_constexpr(groups):
            copy_codes(loader, inside + group * group_bytes, block_bytes, *rows[group])
            cute.arch.cp_async_commit_group()
        load_q_first(loader, channels, shared, task, step, q_load)
        for group in cutlass.range(groups, unroll=1):
            cute.arch.cp_async_wait_group(groups - 1)
            scales = load_codes(loader, inside + group * group_bytes, block_bytes, words)
            cute.arch.sync_warp()  # lanes write where other lanes have read
            store_scaled(loader, base, group, words, scales)
            if cutlass.const_expr(config.gathers.fmt.tail == 0):  # noqa: SIM102
                if brings_tails:
                    convert_tail(loader, base, group)
            cute.arch.cp_async_commit_group()  # an empty group, so that the same number of groups follows each one
        end_tile(loader, channels, use + step)
        row, scale_at = next_row, next_scale_at


@cute.jit
def convert_shared(loader, channels: cutlass.Constexpr, shared, task, use, q_load):
    """Bring a task's tiles of FP8 rows together with the peer (``cluster``), which converts the other half of each.

    A tile's bytes are in registers before it may be filled: half of a tile is few enough. The bf16 tails behind both
    column groups are no work, so each CTA copies those of all keys.
    """
    config, groups = loader.config, loader.groups
    words = cute.make_rmem_tensor((VECTOR_WORDS, loader.vectors, groups), Uint32)
    scales = cute.make_rmem_tensor((config.gathers.scale_words, groups), Uint32)
    words.fill(Uint32(0))
    scales.fill(Uint32(0))
    slots = Slots.of(loader, task)
    row, scale_at = locate(loader, look_up(loader, task, slots, Int32(0)))
    fetch_tile(loader, row, scale_at, words, scales)
    slot = look_up(loader, task, slots, Int32(1))
    for step in cutlass.range(task.span.count, unroll=1):
        next_row, next_scale_at = locate(loader, slot)
        prefetch_own(loader, next_row)
        slot = look_up(loader, task, slots, step + 2)
        brings_tails, tails = Boolean(False), []
        if cutlass.const_expr(config.gathers.tail_apart):
            tails = [row_of(loader, row, scale_at, group)[0] for group in range(CLUSTER * groups)]
            brings_tails = (
                use + step
            ) % config.gathers.kv_groups != loader.column_group  # its consumer has read P in their place
        base = begin_tile(loader, channels, shared, use + step, row)
        if brings_tails:
            copy_tails(loader, base, tails[:groups], loader.share)
            copy_tails(loader, base, tails[groups:], loader.peers_share)
            cute.arch.cp_async_commit_group()
        load_q_first(loader, channels, shared, task, step, q_load)
        for group in cutlass.range_constexpr(groups):
            if cutlass.const_expr(config.gathers.tail_apart):
                found = [scales[i, group] for i in range(config.gathers.scale_words)]
                store_scaled(loader, base, group, words[None, None, group], found)
            else:
                store_group(loader, base, group, words[None, None, group], scales[0, group])
        ring_use = loader.ring_use(use + step)
        send_rows(loader, base, channels["k_full"].barrier(ring_use))
        if brings_tails:
            cute.arch.cp_async_wait_group(0)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
        sent = config.gathers.keys_of_warp * tma.ROW_BYTES * loader.blocks
        channels["k_full"].expect_bytes(ring_use, sent)  # as many come from the peer
        row, scale_at = next_row, next_scale_at
        fetch_tile(loader, row, scale_at, words, scales)


def prefetch_own(loader, row) -> None:
    """``prefetch``, but for the keys whose rows the peer prefetches."""
    own = Boolean(loader.lane < loader.config.gathers.keys_of_warp)
    prefetch(loader, Int64(cutlass.select_(own, row, Int64(0))))


@cute.jit
def copy_tiles(loader, channels: cutlass.Constexpr, shared, task, use, q_load):
    """Bring a task's tiles of bf16 rows by copies alone. use: KV tiles that came before.

    One tile's bytes are in flight at a time; the next tile's rows are on their way to L2 meanwhile. All addresses are
    computed before the tile may be filled, so that filling it takes one instruction a copy.
    """
    slots = Slots.of(loader, task)
    row, _ = locate(loader, look_up(loader, task, slots, Int32(0)))
    slot = look_up(loader, task, slots, Int32(1))
    for step in cutlass.range(task.span.count, unroll=1):
        next_row, _ = locate(loader, slot)
        prefetch(loader, next_row)
        slot = look_up(loader, task, slots, step + 2)
        rows = rows_of_groups(loader, row)
        base = begin_tile(loader, channels, shared, use + step, row)
        copy_rows(loader, base, rows)
        cute.arch.cp_async_commit_group()
        load_q_first(loader, channels, shared, task, step, q_load)
        cute.arch.cp_async_wait_group(0)
        end_tile(loader, channels, use + step)
        row = next_row


@cute.jit
def begin_tile(loader, channels: cutlass.Constexpr, shared, number, row) -> Int32:
    """Wait until the number-th tile may be filled and write its mask; returns where the warp's column group of it goes.

    row: address of the lane's row of the tile.
    """
    config = loader.config
    stage = number % config.kv_stages
    mask = cute.arch.vote_ballot_sync(Boolean(row != 0))
    channels["k_empty"].wait_previous(loader.ring_use(number))
    if cutlass.const_expr(config.gathers.cluster > 1):
        channels["peer_empty"].wait_previous(loader.ring_use(number))
        write_masks(loader, shared, stage, mask)
    elif (loader.column_group == 0) & (loader.lane == 0):
        shared.masks[stage * config.gathers.warps_of_group + loader.share] = Uint32(mask)
    base = shared.k.toint() + stage * config.kv.k_bytes
    return base + loader.column_group * config.gathers.group_bytes


def end_tile(loader, channels, number) -> None:
    """Announce that the warp's column group of the number-th tile is in shared memory."""
    cute.arch.fence_view_async_shared()
    channels["k_full"].arrive_warp(loader.ring_use(number))


@cute.jit
def load_q_first(loader, channels: cutlass.Constexpr, shared, task, step, q_load):
    """Let the first producer warp load Q, or all of them convert its codes, once their keys of the task's first tile
    are in flight, because Q's buffer is free only when the previous task is done. q_load: last arguments of
    ``load_q``."""
    if cutlass.const_expr(loader.config.gathers.has_q_scale):
        if step == 0:
            convert_queries(loader, channels, shared, task, q_load[1])
    elif (loader.column_group == 0) & (loader.warp_of_group == 0) & (step == 0):
        load_q(loader.config, channels, shared, task, *q_load)


@cute.jit
def load_q(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, task, q_map, task_use):
    """Load Q of the task's heads; heads that q does not have arrive as zeros. q_map: TMA's atom and coordinates."""
    atom, coordinates = q_map
    q = coordinates[None, None, None, None, 0]  # (D, HEAD, QUERY, BLOCK)
    q = cute.domain_offset((0, task.head_group * config.rows.pack, task.token, 0), q)
    tiles = cute.local_tile(q, config.q_box, (0, 0, 0, None))
    box_bytes = config.q_bytes // config.heads.qk_blocks
    stages = tma.shared_tiles(shared.q, config_dtype(config), config.q_box, config.heads.qk_blocks, box_bytes)
    ring = tma.TileRing.make(atom, tiles, stages)
    if cutlass.const_expr(not config.scheduler.single):
        channels["q_empty"].wait_previous(task_use)
    channels["q_full"].expect_bytes(task_use, config.q_bytes)
    for block in cutlass.range_constexpr(config.heads.qk_blocks):
        ring.load(block, block, channels["q_full"].barrier(task_use))


def config_dtype(config):
    return {"bfloat16": cutlass.BFloat16}[config.format.dtype]


@dataclass(frozen=True)
class Slots:
    """The places of a lane's slots in a task.

    addresses: for each key set, the address of the lane's slot in the set's first tile. limits: how many slots from
    there on are within the length.
    """

    addresses: tuple
    limits: tuple

    @classmethod
    def of(cls, loader, task):
        own = loader.lane_key
        addresses, limits = [], []
        for each, length in zip(loader.operands.sets, task.lengths, strict=True):
            row = Int64(each.request(task.token)) * Int64(each.slots.stride[0])
            # One entry of a page table serves a tile.
            row = row if loader.config.gathers.paged else row + Int64(own)
            addresses.append(each.slots.iterator.toint() + row * Int64(WORD_BYTES))
            limits.append(length - own)
        return cls(tuple(addresses), tuple(limits))


def look_up(loader, task, slots: Slots, step) -> tuple:
    """(slot, key set) of this lane's key in the task's step-th tile; slot -1 past the last key.

    There are no branches, so that only the load has to be waited for.
    """
    tile, begin, which = task.span.first + step, Int32(0), Int32(0)
    address, here = slots.addresses[0], Boolean(False)
    for number in range(loader.config.gathers.sets):
        inside = Boolean(tile >= begin) & Boolean(tile < task.ends[number])
        at = (tile - begin) * loader.config.tile_n
        here = here | (inside & Boolean(at < slots.limits[number]))
        if loader.config.gathers.paged:
            address = address + Int64(tile * WORD_BYTES)
        elif number == 0:
            address = address + Int64(at * WORD_BYTES)
        else:
            there = slots.addresses[number] + Int64(at * WORD_BYTES)
            address = Int64(cutlass.select_(inside, there, address))
            which = Int32(cutlass.select_(inside, Int32(number), which))
        begin = task.ends[number]
    here = here & Boolean(step < task.span.count)
    slot = Int32(load_present(address, here, 1, missing=NO_SLOT)[0])
    if loader.config.gathers.paged:
        known = Boolean(slot >= 0) & Boolean(slot < loader.operands.sets[0].pool.shape[0])
        own = loader.lane_key
        slot = Int32(cutlass.select_(known, slot * PAGE_ROWS + own, Int32(NO_SLOT)))
    return slot, which


@cute.jit
def locate(loader, found) -> tuple:
    """(address of the row, bytes from there to its scales) of this lane's slot; address 0 if there is no such row."""
    config, (slot, which) = loader.config, found
    row, scale_at = Int64(0), Int32(0)
    for number in cutlass.range_constexpr(config.gathers.sets):
        if which == number:
            row, scale_at = place_of(config.gathers.fmt, loader.operands.sets[number], slot)
    return row, scale_at


@cute.jit
def prefetch(loader, row):
    """Prefetch the column group of the lane's row to L2, about one tile before its copies begin."""
    fmt = loader.config.gathers.fmt
    group_bytes = (fmt.data_bytes if fmt.apart else fmt.row_bytes) // loader.config.gathers.kv_groups
    if row != 0:
        at = row + Int64(loader.column_group * group_bytes)
        for offset in cutlass.range_constexpr(0, group_bytes, LINE_BYTES):
            cute.arch.inline_ptx(f"prefetch.global.L2 [{{$r0}}+{offset}];", read_only_args=[at])
