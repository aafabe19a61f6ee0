"""The producer: four warps that bring rows from pools into KV tiles, in bf16, by slot. And Q, by TMA.

Two warps have the first half of the columns, two the second half; each of them 32 keys of a tile. A lane looks up one
key's slot, has its row brought to L2 ahead of time, and with three others brings 16 bytes at a time of every eighth
key. FP8 rows are converted on their way through registers, eight keys at a time; bf16 rows are copied. What is not
there (slots of no row, keys past the length) is zeros in shared memory and a bit in the tile's mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from warpspec.cache.formats import BF16_BYTES
from warpspec.common import tma
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WARPGROUP_THREADS
from warpspec.common.words import permute, shuffle_address
from warpspec.fmha.features import BLOCK
from warpspec.fmha.gathered.convert import some_large, to_bf16
from warpspec.fmha.gathered.task import WORD_BYTES, Gathered, place_of, task_at

VECTOR_WORDS = VECTOR_BYTES // WORD_BYTES
MEMBERS = 4  # lanes that load a key together: 64 values of a byte are 16 bytes for each
GROUP_KEYS = WARP_THREADS // MEMBERS  # keys that a warp loads at a time
NO_SLOT = -1
BYTE_ALONE = 0x4440  # prmt: one byte below three of zeros
ALL_SCALES = 0xFFFFFFFF  # bytes of a part's word that are scales: four in the first part, three in the second
LINE_BYTES = 128  # that a prefetch brings
RAW_PAIR = 2 * WARP_THREADS * VECTOR_BYTES  # bytes of two vectors of a warp's lanes


@dataclass(frozen=True)
class Loader:
    """What a producer warp is. part: of the columns; half: of a tile's keys. lane: of the warp.

    All warps run the same instructions, of which there is one copy: the instruction cache holds little. So the parts
    differ in numbers alone, but for the last block of FP8 rows' parts: e4m3 in the first, bf16 in the second.
    """

    config: object
    operands: Gathered
    part: Int32
    half: Int32
    lane: Int32

    def ring_use(self, number):
        """Of the ring of tiles' parts, by the part of the number-th tile."""
        if self.config.barrier_parts > 1:
            return number * self.config.barrier_parts + self.part
        return number

    @property
    def member(self) -> Int32:
        return self.lane % MEMBERS

    def plain_chunk(self, i: int):
        """Which 16 bytes of a block in bf16 this lane loads i-th: a key's four lanes 64 bytes together, the second half
        first for every other key, so that two keys' stores meet no bank twice."""
        second = self.lane // MEMBERS % 2 if i == 0 else 1 - self.lane // MEMBERS % 2
        return self.member + MEMBERS * second

    @property
    def groups(self) -> int:
        """Groups of keys of a tile."""
        return self.config.keys_of_warp // GROUP_KEYS

    @property
    def blocks(self) -> int:
        """Blocks of 64 columns of a part."""
        return self.config.blocks // self.config.parts

    @property
    def converted(self) -> int:
        """Blocks of FP8 rows, the first, that are e4m3 in every part."""
        return self.blocks - 1

    @property
    def vectors(self) -> int:
        """16-byte loads of an FP8 key by a lane."""
        return self.converted + 2


@cute.jit
def gather(
    config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, operands, units, atom, coordinates
):
    """One producer warp: Q, by the first; its keys of every KV tile.

    Produces: q_full (TMA), k_full, one arrival a warp. Consumes: q_empty, k_empty, each before what it guards is filled
    again; leaves only when all has been released.
    """
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    warp = cute.arch.make_warp_uniform(thread // WARP_THREADS)
    part = warp // config.warps_of_part
    loader = Loader(config, operands, part, warp % config.warps_of_part, thread % WARP_THREADS)
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    use, task_use = Int32(0), Int32(0)
    fill = copy_tiles if cutlass.const_expr(config.copies) else convert_tiles
    for index in cutlass.range(cta, units.total, ctas, unroll=1):
        task = task_at(config, operands, units, index)
        if task.span.count > 0:
            q_load = (atom, coordinates), task_use
            if cutlass.const_expr(config.staged):
                stage_tiles(loader, channels, shared, task, use, q_load)
            elif cutlass.const_expr(config.addresses_first):
                copy_tiles_at_once(loader, channels, shared, task, use, q_load)
            else:
                if warp == 0:
                    load_q(config, channels, shared, task, *q_load)
                fill(loader, channels, shared, task, use)
            use += task.span.count
            task_use += 1
    for last in cutlass.range(cutlass.max(use - config.kv_stages, 0), use, unroll=1):
        channels["k_empty"].wait(loader.ring_use(last))


@cute.jit
def convert_tiles(loader, channels: cutlass.Constexpr, shared, task, use):
    """A task's tiles of FP8 rows, by registers: ``depth`` groups of keys are under way while one is converted. use: KV
    tiles that came before."""
    groups, depth = loader.groups, loader.config.depth
    words = cute.make_rmem_tensor((VECTOR_WORDS, loader.vectors, depth), Uint32)
    scales = cute.make_rmem_tensor(depth, Uint32)
    row, scale_at = locate(loader, task, look_up(loader, task, Int32(0)))
    for own in cutlass.range_constexpr(depth):
        load_group(loader, row, scale_at, own, own, words[None, None, own], scales)
    slot = look_up(loader, task, Int32(1))
    for step in cutlass.range(task.span.count, unroll=1):
        next_row, next_scale_at = locate(loader, task, slot)
        prefetch(loader, next_row)
        slot = look_up(loader, task, step + 2)
        base = begin_tile(loader, channels, shared, use + step, row)
        for first in cutlass.range(0, groups, depth, unroll=1):
            last = Boolean(first == groups - depth)  # from here on, loads are the next tile's
            row = Int64(cutlass.select_(last, next_row, row))
            scale_at = Int32(cutlass.select_(last, next_scale_at, scale_at))
            for own in cutlass.range_constexpr(depth):
                store_group(loader, base, first + own, words[None, None, own], scales[own])
                ahead = (first + own + depth) % groups
                load_group(loader, row, scale_at, own, ahead, words[None, None, own], scales)
        cute.arch.fence_view_async_shared()
        channels["k_full"].arrive_warp(loader.ring_use(use + step))


@cute.jit
def stage_tiles(loader, channels: cutlass.Constexpr, shared, task, use, q_load):
    """A task's tiles of FP8 rows, by copies to shared memory, of which each lane reads its own, and registers. use: KV
    tiles that came before.

    A tile's first group of keys is on its way a tile ahead, to the warp's own place. The others come to where they
    will stand converted, as soon as the tile may be filled, under the conversion of the first. So no load of a loop's
    next turn is ever waited for: ptxas gives all of these one scoreboard, and a wait for one is a wait for all.
    """
    config, groups = loader.config, loader.groups
    behind = groups - 1  # copies of groups that may be under way when the next is converted
    words = cute.make_rmem_tensor((VECTOR_WORDS, loader.vectors), Uint32)
    warp = loader.part * config.warps_of_part + loader.half
    first = shared.raw.toint() + warp * config.raw_bytes + loader.lane * VECTOR_BYTES
    slots = Slots.of(loader, task)
    row, scale_at = locate(loader, task, look_up_at(loader, task, slots, Int32(0)))
    copy_raw(loader, first, RAW_PAIR, *source_of(loader, row, scale_at, 0))
    cute.arch.cp_async_commit_group()
    slot = look_up_at(loader, task, slots, Int32(1))
    for step in cutlass.range(task.span.count, unroll=1):
        next_row, next_scale_at = locate(loader, task, slot)
        prefetch(loader, next_row)
        slot = look_up_at(loader, task, slots, step + 2)
        sources = [source_of(loader, row, scale_at, group) for group in range(1, groups)]
        base = begin_tile(loader, channels, shared, use + step, row)
        block_bytes = config.tile_n * tma.ROW_BYTES
        group_bytes = GROUP_KEYS * tma.ROW_BYTES
        inside = base + loader.half * (groups * group_bytes) + loader.lane * VECTOR_BYTES
        for group in cutlass.range_constexpr(1, groups):
            copy_raw(loader, inside + group * group_bytes, block_bytes, *sources[group - 1])
            cute.arch.cp_async_commit_group()
        load_q_first(loader, channels, shared, task, step, q_load)
        cute.arch.cp_async_wait_group(behind)
        scale = load_raw(loader, first, RAW_PAIR, words)
        store_group(loader, base, 0, words, scale)
        copy_raw(loader, first, RAW_PAIR, *source_of(loader, next_row, next_scale_at, 0))
        cute.arch.cp_async_commit_group()
        for group in cutlass.range(1, groups, unroll=1):
            cute.arch.cp_async_wait_group(behind)
            scale = load_raw(loader, inside + group * group_bytes, block_bytes, words)
            cute.arch.sync_warp()  # before lanes write where others have read
            store_group(loader, base, group, words, scale)
            cute.arch.cp_async_commit_group()  # of nothing: as many come behind every group
        cute.arch.fence_view_async_shared()
        channels["k_full"].arrive_warp(loader.ring_use(use + step))
        row, scale_at = next_row, next_scale_at
    cute.arch.cp_async_wait_group(0)  # zeros of a tile behind the last


def source_of(loader, row, scale_at, group) -> tuple:
    """(address of the row, bytes from there to its scales) of the lane's key of a group."""
    source = group * GROUP_KEYS + loader.lane // MEMBERS  # the lane that looked the key up
    return shuffle_address(row, source), Int32(cute.arch.shuffle_sync(scale_at, source))


def copy_raw(loader, target, pair_bytes: int, address, scale_at) -> None:
    """Issue the copies of what the lane converts of its FP8 key, as it is; zeros of a key that is not there. target: of
    the lane's first vector, in shared memory; two vectors of every lane stand together, pair_bytes from the next."""
    fmt = loader.config.fmt
    wanted = Int32(cutlass.select_(Boolean(address != 0), Int32(VECTOR_BYTES), Int32(0)))
    begin = address + Int64(loader.part * (loader.blocks * BLOCK) + loader.member * VECTOR_BYTES)
    for block in range(loader.converted):
        copy_vector(target, raw_place(block, pair_bytes), begin, block * BLOCK, wanted)
    # The last block: e4m3 of the first part, the tail of the second.
    chunk = fmt.tail_offset + loader.plain_chunk(0) * VECTOR_BYTES
    value = loader.converted * BLOCK + loader.member * VECTOR_BYTES
    offset = Int32(cutlass.select_(Boolean(loader.part == 1), chunk, value))
    at = raw_place(loader.converted, pair_bytes)
    copy_vector(target, at, address + Int64(offset), 0, wanted)
    chunk = address + Int64(loader.plain_chunk(1) * VECTOR_BYTES)
    at = raw_place(loader.converted + 1, pair_bytes)
    copy_vector(target, at, chunk, fmt.tail_offset, wanted * loader.part)
    at = raw_place(loader.vectors, pair_bytes)
    cute.arch.inline_ptx(
        f"cp.async.ca.shared.global [{{$r0}}+{at}], [{{$r1}}], {WORD_BYTES}, {{$r2}};",
        read_only_args=[
            target - loader.lane * (VECTOR_BYTES - WORD_BYTES),
            address + Int64(scale_at + loader.part * loader.blocks),
            wanted // VECTOR_WORDS,
        ],
    )


def raw_place(vector: int, pair_bytes: int) -> int:
    """Bytes from a lane's first vector to another."""
    return vector // 2 * pair_bytes + vector % 2 * (WARP_THREADS * VECTOR_BYTES)


def copy_vector(target, at: int, source, offset: int, wanted) -> None:
    """16 bytes of source + offset to target + at in shared memory, those beyond the first ``wanted`` zeros."""
    cute.arch.inline_ptx(
        f"cp.async.cg.shared.global [{{$r0}}+{at}], [{{$r1}}+{offset}], {VECTOR_BYTES}, {{$r2}};",
        read_only_args=[target, source, wanted],
    )


def load_raw(loader, target, pair_bytes: int, words: cute.Tensor) -> Uint32:
    """words (WORD, VECTOR) become what ``copy_raw`` brought; returns the scales."""
    outputs = ", ".join(f"{{$w{i}}}" for i in range(VECTOR_WORDS))
    for vector in range(loader.vectors):
        loaded = cute.arch.inline_ptx(
            f"ld.shared.v4.b32 {{{outputs}}}, [{{$r0}}+{raw_place(vector, pair_bytes)}];",
            write_only_types=[Uint32] * VECTOR_WORDS,
            read_only_args=[target],
        )
        for i in range(VECTOR_WORDS):
            words[i, vector] = loaded[i]
    return cute.arch.inline_ptx(
        f"ld.shared.b32 {{$w0}}, [{{$r0}}+{raw_place(loader.vectors, pair_bytes)}];",
        write_only_types=[Uint32],
        read_only_args=[target - loader.lane * (VECTOR_BYTES - WORD_BYTES)],
    )


@cute.jit
def copy_tiles(loader, channels: cutlass.Constexpr, shared, task, use):
    """A task's tiles of bf16 rows, which go to shared memory without registers: as many bytes are under way as a tile
    has, and none of the next one, whose rows are on their way to L2 meanwhile."""
    row, _ = locate(loader, task, look_up(loader, task, Int32(0)))
    next_row, _ = locate(loader, task, look_up(loader, task, Int32(1)))
    prefetch(loader, next_row)
    slot = look_up(loader, task, Int32(2))
    for step in cutlass.range(task.span.count, unroll=1):
        base = begin_tile(loader, channels, shared, use + step, row)
        for group in cutlass.range(loader.groups, unroll=1):
            copy_group(loader, base, row, group)
        row = next_row
        next_row, _ = locate(loader, task, slot)
        prefetch(loader, next_row)
        slot = look_up(loader, task, step + 3)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        channels["k_full"].arrive_warp(loader.ring_use(use + step))


@cute.jit
def copy_tiles_at_once(loader, channels: cutlass.Constexpr, shared, task, use, q_load):
    """As ``copy_tiles``: what is known before a tile may be filled is worked out before, so that it is filled in as few
    instructions as there are copies."""
    slots = Slots.of(loader, task)
    row, _ = locate(loader, task, look_up_at(loader, task, slots, Int32(0)))
    slot = look_up_at(loader, task, slots, Int32(1))
    for step in cutlass.range(task.span.count, unroll=1):
        next_row, _ = locate(loader, task, slot)
        prefetch(loader, next_row)
        slot = look_up_at(loader, task, slots, step + 2)
        copy_tile(loader, channels, shared, use + step, row)
        row = next_row
        cute.arch.cp_async_commit_group()
        load_q_first(loader, channels, shared, task, step, q_load)
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        channels["k_full"].arrive_warp(loader.ring_use(use + step))


@cute.jit
def begin_tile(loader, channels: cutlass.Constexpr, shared, number, row) -> Int32:
    """Where the warp's part of the number-th tile goes, once it may; its mask is written. row: address of the lane's
    row of it."""
    config = loader.config
    stage = number % config.kv_stages
    mask = cute.arch.vote_ballot_sync(Boolean(row != 0))
    channels["k_empty"].wait_previous(loader.ring_use(number))
    if (loader.part == 0) & (loader.lane == 0):
        shared.masks[stage * config.warps_of_part + loader.half] = Uint32(mask)
    base = shared.k.toint() + stage * config.kv_tile_bytes
    return base + loader.part * (config.kv_tile_bytes // config.parts)


@cute.jit
def load_q_first(loader, channels: cutlass.Constexpr, shared, task, step, q_load):
    """``load_q`` by the first producer warp, once its keys of the first tile are under way: it waits for the task
    before."""
    if (loader.part == 0) & (loader.half == 0) & (step == 0):
        load_q(loader.config, channels, shared, task, *q_load)


@cute.jit
def load_q(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, task, q_load, task_use):
    """Q of the task's heads; heads that q does not have arrive as zeros."""
    atom, coordinates = q_load
    q = coordinates[None, None, None, None, 0]  # (D, HEAD, QUERY, BLOCK)
    q = cute.domain_offset((0, task.head_group * config.pack, task.token, 0), q)
    tiles = cute.local_tile(q, config.q_box, (0, 0, 0, None))
    box_bytes = config.q_bytes // config.blocks
    stages = tma.shared_tiles(shared.q, config_dtype(config), config.q_box, config.blocks, box_bytes)
    ring = tma.TileRing.make(atom, tiles, stages)
    if cutlass.const_expr(config.persistent):
        channels["q_empty"].wait_previous(task_use)
    channels["q_full"].expect_bytes(task_use, config.q_bytes)
    for block in cutlass.range_constexpr(config.blocks):
        ring.load(block, block, channels["q_full"].barrier(task_use))


def config_dtype(config):
    return {"bfloat16": cutlass.BFloat16}[config.dtype]


@cute.jit
def look_up(loader, task, step) -> tuple:
    """(slot, which key set) of this lane's key of the task's step-th tile; slot -1 past the last."""
    config, sets = loader.config, loader.operands.sets
    tile = task.span.first + step
    which, slot = Int32(0), Int32(NO_SLOT)
    if step < task.span.count:
        begin = Int32(0)
        for number in cutlass.range_constexpr(config.sets):
            if (tile >= begin) & (tile < task.ends[number]):
                which = Int32(number)
                at = (tile - begin) * config.tile_n + loader.half * config.keys_of_warp + loader.lane
                if at < sets[number].length(task.token):
                    slot = Int32(sets[number].slots[task.token, at])
            begin = task.ends[number]
    return slot, which


@dataclass(frozen=True)
class Slots:
    """Of a task, for each key set: the address of the lane's slot of the set's first tile, and how many slots count
    from there on."""

    addresses: tuple
    limits: tuple

    @classmethod
    def of(cls, loader, task):
        own = loader.half * loader.config.keys_of_warp + loader.lane
        addresses, limits = [], []
        for each in loader.operands.sets:
            row = Int64(task.token) * Int64(each.slots.stride[0]) + Int64(own)
            addresses.append(each.slots.iterator.toint() + row * Int64(WORD_BYTES))
            limits.append(each.length(task.token) - own)
        return cls(tuple(addresses), tuple(limits))


def look_up_at(loader, task, slots: Slots, step) -> tuple:
    """``look_up`` without branches, by what is known of the task."""
    tile, begin, which = task.span.first + step, Int32(0), Int32(0)
    address, here = slots.addresses[0], Boolean(False)
    for number in range(loader.config.sets):
        inside = Boolean(tile >= begin) & Boolean(tile < task.ends[number])
        at = (tile - begin) * loader.config.tile_n
        here = here | (inside & Boolean(at < slots.limits[number]))
        if number == 0:
            address = address + Int64(at * WORD_BYTES)
        else:
            there = slots.addresses[number] + Int64(at * WORD_BYTES)
            address = Int64(cutlass.select_(inside, there, address))
            which = Int32(cutlass.select_(inside, Int32(number), which))
        begin = task.ends[number]
    here = here & Boolean(step < task.span.count)
    slot = cute.arch.inline_ptx(
        "{ .reg .pred here; .reg .b64 at; mov.b64 at, {$r0}; setp.ne.b32 here, {$r1}, 0; "
        f"mov.b32 {{$w0}}, {NO_SLOT}; @here ld.global.b32 {{$w0}}, [at]; }}",
        write_only_types=[Int32],
        read_only_args=[address, Int32(here)],
    )
    return slot, which


@cute.jit
def locate(loader, task, found) -> tuple:
    """(address of the row, bytes from there to its scales) of this lane's slot; address 0: there is no such row."""
    config, (slot, which) = loader.config, found
    row, scale_at = Int64(0), Int32(0)
    for number in cutlass.range_constexpr(config.sets):
        if which == number:
            row, scale_at = place_of(config.fmt, loader.operands.sets[number], slot)
    return row, scale_at


@cute.jit
def prefetch(loader, row):
    """Have the part of the lane's row in L2: its loads begin half a tile later, or a tile."""
    fmt = loader.config.fmt
    part_bytes = fmt.data_bytes // loader.config.parts
    if row != 0:
        at = row + Int64(loader.part * part_bytes)
        for offset in cutlass.range_constexpr(0, part_bytes, LINE_BYTES):
            cute.arch.inline_ptx(f"prefetch.global.L2 [{{$r0}}+{offset}];", read_only_args=[at])


def load_group(loader, row, scale_at, own: int, group, words: cute.Tensor, scales: cute.Tensor) -> None:
    """Issue the loads of one group of FP8 keys: words (WORD, VECTOR) of the lane's key, and its scales, the own-th."""
    source = group * GROUP_KEYS + loader.lane // MEMBERS  # the lane that looked the key up
    address = shuffle_address(row, source)
    present = Int32(address != 0)
    fmt = loader.config.fmt
    part_bytes = loader.blocks * BLOCK
    begin = address + Int64(loader.part * part_bytes + loader.member * VECTOR_BYTES)
    for block in range(loader.converted):
        load_vector(words, block, begin, block * BLOCK, present)
    # The last block: e4m3 of the first part, the tail of the second.
    chunk = fmt.tail_offset + loader.plain_chunk(0) * VECTOR_BYTES
    value = loader.converted * BLOCK + loader.member * VECTOR_BYTES
    second = Boolean(loader.part == 1)
    offset = Int32(cutlass.select_(second, chunk, value))
    load_vector(words, loader.converted, address + Int64(offset), 0, present)
    chunk = address + Int64(loader.plain_chunk(1) * VECTOR_BYTES)
    load_vector(words, loader.converted + 1, chunk, fmt.tail_offset, present * loader.part)
    at = Int32(cute.arch.shuffle_sync(scale_at, source)) + loader.part * loader.blocks
    scales[own] = load_word(address + Int64(at), present)


def copy_group(loader, base, row, group) -> None:
    """Issue the copies of one group of keys, whose rows are bf16, into the tile's part at ``base``; zeros of keys that
    are not there."""
    swizzle = loader.lane // MEMBERS
    address = shuffle_address(row, group * GROUP_KEYS + swizzle)
    wanted = Int32(cutlass.select_(Boolean(address != 0), Int32(VECTOR_BYTES), Int32(0)))
    key = loader.half * loader.config.keys_of_warp + group * GROUP_KEYS + swizzle
    target, row_bytes = base + key * tma.ROW_BYTES, BLOCK * BF16_BYTES  # of a block
    for i in range(2):
        chunk = loader.plain_chunk(i)
        source = address + Int64(loader.part * (loader.blocks * row_bytes) + chunk * VECTOR_BYTES)
        at = target + (swizzle ^ chunk) * VECTOR_BYTES
        for block in range(loader.blocks):
            cute.arch.inline_ptx(
                f"cp.async.cg.shared.global [{{$r0}}], [{{$r1}}+{block * row_bytes}], {VECTOR_BYTES}, {{$r2}};",
                read_only_args=[at + block * loader.config.tile_n * tma.ROW_BYTES, source, wanted],
            )


def copy_tile(loader, channels, shared, number, row) -> None:
    """Issue the copies of a warp's part of the number-th tile, of bf16 rows, once it may be filled; all that they need
    is worked out before."""
    config, swizzle = loader.config, loader.lane // MEMBERS
    row_bytes, group_bytes = BLOCK * BF16_BYTES, GROUP_KEYS * tma.ROW_BYTES
    begin = loader.part * (loader.blocks * row_bytes)
    keys = []
    for group in range(loader.groups):
        address = shuffle_address(row, group * GROUP_KEYS + swizzle)
        wanted = Int32(cutlass.select_(Boolean(address != 0), Int32(VECTOR_BYTES), Int32(0)))
        keys.append((address + Int64(begin), wanted))
    base = begin_tile(loader, channels, shared, number, row)
    target = base + loader.half * (loader.groups * group_bytes) + swizzle * tma.ROW_BYTES
    places = [target + (swizzle ^ loader.plain_chunk(i)) * VECTOR_BYTES for i in range(2)]
    for group, (address, wanted) in enumerate(keys):
        for i in range(2):
            source = address + Int64(loader.plain_chunk(i) * VECTOR_BYTES)
            for block in range(loader.blocks):
                at = block * (config.tile_n * tma.ROW_BYTES) + group * group_bytes
                copy_vector(places[i], at, source, block * row_bytes, wanted)


def load_vector(words: cute.Tensor, vector: int, address: Int64, offset: int, present) -> None:
    """words (WORD, VECTOR): one vector becomes the 16 bytes at address + offset, zeros where not present.

    The zeros come first: after the load they would be selected, which waits for it.
    """
    outputs = ", ".join(f"{{$w{i}}}" for i in range(VECTOR_WORDS))
    zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(VECTOR_WORDS))
    loaded = cute.arch.inline_ptx(
        "{ .reg .pred here; .reg .b64 at; mov.b64 at, {$r0}; setp.ne.b32 here, {$r1}, 0; "
        f"{zeros} @here ld.global.nc.L1::no_allocate.v4.b32 {{{outputs}}}, [at+{offset}]; }}",
        write_only_types=[Uint32] * VECTOR_WORDS,
        read_only_args=[address, present],
    )
    for i in range(VECTOR_WORDS):
        words[i, vector] = loaded[i]


def load_word(address: Int64, present) -> Uint32:
    """The word at address, 0 where not present."""
    return cute.arch.inline_ptx(
        "{ .reg .pred here; .reg .b64 at; mov.b64 at, {$r0}; setp.ne.b32 here, {$r1}, 0; "
        "mov.b32 {$w0}, 0; @here ld.global.nc.b32 {$w0}, [at]; }",
        write_only_types=[Uint32],
        read_only_args=[address, present],
    )


@cute.jit
def store_group(loader, base, group, words: cute.Tensor, scales):
    """The lane's part of one key, in bf16, into the tile's part at ``base``: where the 128-byte swizzle puts it."""
    if cutlass.const_expr(loader.config.one_factor):
        used = Uint32(cutlass.select_(Boolean(loader.part == 0), Uint32(ALL_SCALES), Uint32(ALL_SCALES >> 8)))
        if cute.arch.vote_any_sync(some_large(scales & used)):
            store_values(loader, base, group, words, scales, False)
        else:
            store_values(loader, base, group, words, scales, True)
    else:
        store_values(loader, base, group, words, scales, False)


@cute.jit
def store_values(loader, base, group, words: cute.Tensor, scales, small: cutlass.Constexpr):
    """As ``store_group``. small: so are all scales of the warp's keys (``to_bf16``)."""
    swizzle = loader.lane // MEMBERS  # of the key's row: its number in the group
    key = loader.half * loader.config.keys_of_warp + group * GROUP_KEYS + swizzle
    row = base + key * tma.ROW_BYTES
    block_bytes = loader.config.tile_n * tma.ROW_BYTES
    # Of the lane's first of two 16-byte chunks; the second of converted ones differs in bit 0, of plain ones in bit 2.
    converted = row + (swizzle ^ (2 * loader.member)) * VECTOR_BYTES
    plain = row + (swizzle ^ loader.plain_chunk(0)) * VECTOR_BYTES
    for block in cutlass.range_constexpr(loader.converted):
        store_converted(converted + block * block_bytes, words, block, scales, small)
    at = loader.converted * block_bytes
    if loader.part == 0:
        store_converted(converted + at, words, loader.converted, scales, small)
    else:
        store_plain(plain + at, words, loader.converted)


def store_converted(address, words: cute.Tensor, block: int, scales, small: bool) -> None:
    """16 numbers of the part's block, converted. address: of the first chunk."""
    scale = permute(scales, BYTE_ALONE | block)
    out = to_bf16([words[i, block] for i in range(VECTOR_WORDS)], scale, small)
    store_vector(address, out[:VECTOR_WORDS])
    store_vector(address ^ VECTOR_BYTES, out[VECTOR_WORDS:])


def store_plain(address, words: cute.Tensor, vector: int) -> None:
    """Two vectors as they are. address: of the first chunk."""
    for half in range(2):
        at = address ^ (half * MEMBERS * VECTOR_BYTES)
        store_vector(at, [words[i, vector + half] for i in range(VECTOR_WORDS)])


def store_vector(address, words: list) -> None:
    """16 bytes to shared memory."""
    pointer = cute.make_ptr(Uint32, Int32(address), cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
    vector = cute.make_rmem_tensor(VECTOR_WORDS, Uint32)
    for i in range(VECTOR_WORDS):
        vector[i] = words[i]
    cute.autovec_copy(vector, cute.make_tensor(pointer, cute.make_layout(VECTOR_WORDS)))
