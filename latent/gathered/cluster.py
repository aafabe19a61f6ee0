"""Two CTAs of a cluster, which do two blocks of 64 heads of the same query, share the work on its keys.

Each converts half of a tile's keys, and copies the rows in bulk to the same place in its peer's shared memory. So both
CTAs have the same tiles in the same stages. A column group of a tile is there (k_full) once the CTA's own warps have
arrived and the peer's bytes have. A stage may be filled when this CTA's consumers have read it (k_empty) and the peer's
have (peer_empty). The latter also says that the peer has received what was copied from the stage before. So a producer
warp that has waited for all of it (``pipeline.drain``) may exit. Device side, sm_90a.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint16, Uint32

from warpspec.common.device import tma
from warpspec.common.device.pipeline import Channel
from warpspec.common.device.words import load_present
from warpspec.common.hardware import VECTOR_BYTES, WORD_BYTES
from warpspec.fmha.heads import BLOCK
from warpspec.latent.gathered.config import CLUSTER
from warpspec.latent.gathered.rows import Peer, row_of

HALF_WORD = 16  # bits of a mask that a producer warp's own keys have, and those of the peer's warp


def peer_of(anywhere: cute.Pointer) -> Peer:
    """The other CTA of the cluster. anywhere: a place in shared memory."""
    rank = Int32(cute.arch.block_idx_in_cluster())
    there = cute.arch.map_dsmem_ptr(anywhere, CLUSTER - 1 - rank)
    return Peer(rank, Int32(there.toint()) - Int32(anywhere.toint()))


@dataclass(frozen=True)
class SharedEmpty(Channel):
    """k_empty of tiles that both CTAs fill. peer: the channel of peer_empty."""

    peer: Channel = None

    def arrive_warp(self, use, rank=None):
        """The warp arrives once in either CTA, for what it has read."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.arrive(use)
            other = CLUSTER - 1 - Int32(cute.arch.block_idx_in_cluster())
            self.peer.arrive_in(other, use, has_read=True)


def share_keys(channels: dict) -> dict:
    """The channels of a CTA whose peer has the same keys."""
    empty = channels["k_empty"]
    return channels | {"k_empty": SharedEmpty(empty.base, empty.stages, channels["peer_empty"])}


@cute.jit
def send_rows(loader, base, full: cute.Pointer):
    """Copy the warp's rows of a tile's column group to the peer, once all lanes have stored theirs.

    base: address of the column group. full: the column group's mbarrier of k_full, whose counterpart counts the bytes.
    """
    size = loader.config.gathers.keys_of_warp * tma.ROW_BYTES
    first = Int32(base + loader.share * size)
    distance, counted = loader.peer.distance, Int32(full.toint()) + loader.peer.distance
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        for block in cutlass.range_constexpr(loader.blocks):
            source = first + block * (loader.config.tile_n * tma.ROW_BYTES)
            cute.arch.inline_ptx(
                "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], "
                f"{size}, [{{$r2}}];",
                read_only_args=[source + distance, source, counted],
            )


@cute.jit
def write_masks(loader, shared, stage, mask):
    """Write a tile's mask of the warp's keys and of those of the peer's warp. mask: a bit for each lane's key
    (``Loader.lane_key``)."""
    masks = shared.masks.iterator.toint() + stage * (loader.config.tile_n // 8)
    if (loader.column_group == 0) & (loader.lane == 0):
        for number in cutlass.range_constexpr(CLUSTER):
            share = loader.share if number == 0 else loader.peers_share
            place = Int32(masks + share * (HALF_WORD // 8))
            half = cute.make_tensor(cute.make_ptr(Uint16, place, cute.AddressSpace.smem), cute.make_layout(1))
            half[0] = Uint16((Uint32(mask) >> (HALF_WORD * number)) & Uint32((1 << HALF_WORD) - 1))


# FP8 rows in registers, before the tile may be filled that they go to.


@cute.jit
def fetch_tile(loader, row, scale_at, words, scales):
    """Load the vectors and scales of the warp's keys of a tile from global memory; zeros for keys that are not there.

    row, scale_at: those of the key that the lane looked up. words: (WORD, VECTOR, GROUP). scales: (WORD, GROUP).
    """
    for group in cutlass.range_constexpr(loader.groups):
        address, at = row_of(loader, row, scale_at, group)
        if cutlass.const_expr(loader.config.gathers.tail_apart):
            fetch_codes(loader, address, words[None, None, group])
        else:
            fetch_raw(loader, address, words[None, None, group])
        count = loader.config.gathers.scale_words
        begin = address + Int64(at + loader.column_group * (loader.config.gathers.scales_of_group))
        fetch_words(begin, 0, Boolean(address != 0), scales[None, group], count)


def fetch_codes(loader, address, words) -> None:
    """Load a key's codes, which fill all blocks of a column group. words: (WORD, VECTOR)."""
    begin = address + Int64(loader.column_group * (loader.blocks * BLOCK) + loader.member * VECTOR_BYTES)
    for block in range(loader.blocks):
        fetch_words(begin, block * BLOCK, Boolean(address != 0), words[None, block])


def fetch_raw(loader, address, words) -> None:
    """Load the vectors of a key that ``rows.copy_raw`` copies: the last block is bf16 in the second column group.
    words: (WORD, VECTOR)."""
    fmt, last, here = loader.config.gathers.fmt, loader.converted, Boolean(address != 0)
    begin = address + Int64(loader.column_group * (loader.blocks * BLOCK) + loader.member * VECTOR_BYTES)
    for block in range(last):
        fetch_words(begin, block * BLOCK, here, words[None, block])
    chunk = fmt.tail_offset + loader.plain_chunk(0) * VECTOR_BYTES
    value = last * BLOCK + loader.member * VECTOR_BYTES
    offset = Int32(cutlass.select_(Boolean(loader.column_group == 1), chunk, value))
    fetch_words(address + Int64(offset), 0, here, words[None, last])
    chunk = address + Int64(loader.plain_chunk(1) * VECTOR_BYTES)
    fetch_words(chunk, fmt.tail_offset, here & Boolean(loader.column_group == 1), words[None, last + 1])


def fetch_words(
    address, offset: int, here, words: cute.Tensor, count: int = VECTOR_BYTES // WORD_BYTES
) -> None:
    """Load words (WORD) from global memory, zeros if they are not ``here``."""
    for i, word in enumerate(load_present(address, here, count, offset=offset)):
        words[i] = word
