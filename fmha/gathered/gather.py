"""The producer: four warps that bring rows from pools into KV tiles, in bf16, by slot. And Q, by TMA.

Two warps have the first half of the columns, two the second half; each of them 32 keys of a tile. A lane looks up one
key's slot, and with three others loads 16 bytes at a time of every eighth key. Loads of the next tile are issued, eight
keys at a time, as soon as registers of this tile's are free; slots are looked up a tile earlier still. What is not
there (slots of no row, keys past the length) is zeros in shared memory and a bit in the tile's mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from warpspec.common import tma
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WARPGROUP_THREADS
from warpspec.common.words import shuffle_address
from warpspec.fmha.features import BLOCK
from warpspec.fmha.gathered.convert import to_bf16
from warpspec.fmha.gathered.task import WORD_BYTES, Gathered, place_of, task_at

VECTOR_WORDS = VECTOR_BYTES // WORD_BYTES
MEMBERS = 4  # lanes that load a key together: 64 values of a byte are 16 bytes for each
GROUP_KEYS = WARP_THREADS // MEMBERS  # keys that a warp loads at a time
NO_SLOT = -1


@dataclass(frozen=True)
class Loader:
    """What a producer warp is: part: of the columns (a plain int); half: of a tile's keys. lane: of the warp."""

    config: object
    operands: Gathered
    part: int
    half: Int32
    lane: Int32

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
        """Blocks of 64 columns of the part."""
        return self.config.blocks // self.config.parts

    def is_tail(self, block: int) -> bool:
        """Whether a block of the part is bf16 in the pool."""
        return (
            self.part * self.blocks + block
        ) * BLOCK >= self.config.fmt.values or self.config.format == "bf16"

    @property
    def vectors(self) -> int:
        """16-byte loads of a key by a lane."""
        return sum(2 if self.is_tail(block) else 1 for block in range(self.blocks))


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
    for part in cutlass.range_constexpr(config.parts):
        if warp // config.warps_of_part == part:
            loader = Loader(config, operands, part, warp % config.warps_of_part, thread % WARP_THREADS)
            gather_part(loader, channels, shared, units, (atom, coordinates), warp == 0)


@cute.jit
def gather_part(loader, channels: cutlass.Constexpr, shared, units, q_load, loads_q):
    """As ``gather``, of a warp whose part is known."""
    config, part = loader.config, loader.part
    groups = loader.groups
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    use, task_use = Int32(0), Int32(0)
    depth = config.depth
    words = cute.make_rmem_tensor((VECTOR_WORDS, loader.vectors, depth), Uint32)
    scales = cute.make_rmem_tensor(depth, Uint32)
    for index in cutlass.range(cta, units.total, ctas, unroll=1):
        task = task_at(config, loader.operands, units, index)
        count = task.span.count
        if count > 0:
            row, scale_at, here = locate(loader, task, look_up(loader, task, Int32(0)))
            for group in cutlass.range_constexpr(depth):
                load_group(loader, row, scale_at, here, group, words[None, None, group], scales)
            if loads_q:
                load_q(config, channels, shared, task, q_load, task_use)
            slot = look_up(loader, task, Int32(1))
            for step in cutlass.range(count, unroll=1):
                stage = (use + step) % config.kv_stages
                mask = cute.arch.vote_ballot_sync(here)
                at = use + step
                if cutlass.const_expr(config.barrier_parts > 1):
                    at = at * config.barrier_parts + part
                channels["k_empty"].wait_previous(at)
                if (loader.part == 0) & (loader.lane == 0):
                    shared.masks[stage * config.warps_of_part + loader.half] = Uint32(mask)
                base = shared.k.toint() + stage * config.kv_tile_bytes
                base = base + part * (config.kv_tile_bytes // config.parts)
                for group in cutlass.range_constexpr(groups):
                    own = group % depth
                    if cutlass.const_expr(group == groups - depth):  # from here on, loads are the next tile's
                        row, scale_at, here = locate(loader, task, slot)
                        slot = look_up(loader, task, step + 2)
                    store_group(loader, base, group, words[None, None, own], scales[own])
                    ahead = (group + depth) % groups
                    load_group(loader, row, scale_at, here, ahead, words[None, None, own], scales)
                cute.arch.fence_view_async_shared()
                channels["k_full"].arrive_warp(at)
            use += count
            task_use += 1
    for last in cutlass.range(cutlass.max(use - config.kv_stages, 0), use, unroll=1):
        at = last
        if cutlass.const_expr(config.barrier_parts > 1):
            at = at * config.barrier_parts + part
        channels["k_empty"].wait(at)


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


@cute.jit
def locate(loader, task, found) -> tuple:
    """(address of the row, bytes from there to its scales, whether there is such a row) of this lane's slot."""
    config, (slot, which) = loader.config, found
    row, scale_at, here = Int64(0), Int32(0), Boolean(False)
    for number in cutlass.range_constexpr(config.sets):
        if which == number:
            row, scale_at, here = place_of(config.fmt, loader.operands.sets[number], slot)
    return row, scale_at, here


def load_group(loader, row, scale_at, here, group: int, words: cute.Tensor, scales: cute.Tensor) -> None:
    """Issue the loads of one group of keys: words (WORD, VECTOR) of the lane's key, and its scales."""
    source = group * GROUP_KEYS + loader.lane // MEMBERS  # the lane that looked the key up
    address = shuffle_address(row, source)
    present = Int32(cute.arch.shuffle_sync(Int32(here), source))
    fmt, vector = loader.config.fmt, 0
    for block in range(loader.blocks):
        column = (loader.part * loader.blocks + block) * BLOCK
        if not loader.is_tail(block):
            load_vector(words, vector, address + Int64(loader.member * VECTOR_BYTES), column, present)
            vector += 1
        else:
            start = fmt.tail_offset + (column - fmt.values) * 2 if fmt.tail else column * 2
            for i in range(2):
                own = address + Int64(loader.plain_chunk(i) * VECTOR_BYTES)
                load_vector(words, vector, own, start, present)
                vector += 1
    if fmt.scale_bytes:
        at = Int32(cute.arch.shuffle_sync(scale_at, source)) + loader.part * loader.blocks
        scales[group % loader.config.depth] = load_word(address + Int64(at), present)


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
def store_group(loader, base, group: cutlass.Constexpr, words: cute.Tensor, scales):
    """The lane's part of one key, in bf16, into the tile's part at ``base``: where the 128-byte swizzle puts it."""
    key = loader.half * loader.config.keys_of_warp + group * GROUP_KEYS + loader.lane // MEMBERS
    row = base + key * tma.ROW_BYTES
    # Of the lane's first of two 16-byte chunks; the second of converted ones differs in bit 0, of plain ones in bit 2.
    converted = row + ((key % 8) ^ (2 * loader.member)) * VECTOR_BYTES
    plain = row + ((key % 8) ^ loader.plain_chunk(0)) * VECTOR_BYTES
    vector = 0
    block_bytes = loader.config.tile_n * tma.ROW_BYTES
    for block in cutlass.range_constexpr(loader.blocks):
        if cutlass.const_expr(loader.is_tail(block)):
            halves = [[words[i, vector + half] for i in range(VECTOR_WORDS)] for half in range(2)]
            at, apart = plain, MEMBERS * VECTOR_BYTES
            vector += 2
        else:
            scale = (scales >> (8 * block)) & Uint32(0xFF)
            out = to_bf16([words[i, vector] for i in range(VECTOR_WORDS)], scale)
            halves = [out[:VECTOR_WORDS], out[VECTOR_WORDS:]]
            at, apart = converted, VECTOR_BYTES
            vector += 1
        for half in cutlass.range_constexpr(2):
            store_vector((at ^ (half * apart)) + block * block_bytes, halves[half])


def store_vector(address, words: list) -> None:
    """16 bytes to shared memory."""
    pointer = cute.make_ptr(Uint32, Int32(address), cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
    vector = cute.make_rmem_tensor(VECTOR_WORDS, Uint32)
    for i in range(VECTOR_WORDS):
        vector[i] = words[i]
    cute.autovec_copy(vector, cute.make_tensor(pointer, cute.make_layout(VECTOR_WORDS)))
