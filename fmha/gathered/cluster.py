"""Two CTAs of a cluster that do the two blocks of 64 heads of the same query, and share the work on its keys.

Each gathers and converts half of a tile's keys and writes their rows into its own shared memory and, by ``st.async``,
to the same place in its peer's. So both CTAs have the same tiles in the same stages. A stage's k_full completes when
the CTA's own warps have arrived and the peer's bytes are there; its k_empty when the consumers of both CTAs have read
it, in both CTAs alike. Device side, sm_90a.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.common.pipeline import Channel
from warpspec.fmha.gathered.config import CLUSTER, MASK_BYTES


@dataclass(frozen=True)
class Peer:
    """The other CTA. rank: this CTA's in the cluster. distance: from an address in this CTA's shared memory to the same
    place in the peer's."""

    rank: Int32
    distance: Int32

    @classmethod
    def of(cls, anywhere: cute.Pointer) -> Peer:
        """anywhere: in shared memory."""
        rank = cute.arch.block_idx_in_cluster()
        there = cute.arch.map_dsmem_ptr(anywhere, CLUSTER - 1 - rank)
        return cls(rank, Int32(there.toint()) - Int32(anywhere.toint()))

    def send(self, address, words: list, full) -> None:
        """Words to the same place in the peer; its mbarrier ``full``, an address in this CTA, counts their bytes."""
        values = ", ".join(f"{{$r{1 + i}}}" for i in range(len(words)))
        vector, values = (f".v{len(words)}", f"{{ {values} }}") if len(words) > 1 else ("", values)
        cute.arch.inline_ptx(
            f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32 [{{$r0}}], {values}, "
            f"[{{$r{1 + len(words)}}}];",
            read_only_args=[address + self.distance, *words, full + self.distance],
        )


@dataclass(frozen=True)
class SharedFull(Channel):
    """k_full of tiles of which the peer writes half. bytes_of_warp: of the peer's rows, for each arrival of a warp."""

    bytes_of_warp: int = 0

    def wait(self, use):
        """As ``Channel.wait``. The peer's stores are of the generic proxy, and no thread of this CTA could fence them
        before they were here: products, which are of the other, come behind the fence that acquires (it is free)."""
        super().wait(use)
        cute.arch.inline_ptx(
            "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;", read_only_args=[]
        )

    def arrive_warp(self, use, rank=None):
        """As ``Channel.arrive_warp``: the warp's rows are in this CTA; as many bytes come from the peer."""
        cute.arch.sync_warp()
        self.expect_bytes(use, self.bytes_of_warp)

    def expect_mask(self, use):
        """A word of the tile's mask comes from the peer, too."""
        cute.arch.mbarrier_expect_tx(self.barrier(use), MASK_BYTES)


@dataclass(frozen=True)
class SharedEmpty(Channel):
    """k_empty of tiles that both CTAs write."""

    def arrive_warp(self, use, rank=None):
        """The warp arrives once in either CTA, for what it has read."""
        cute.arch.sync_warp()
        arrive_in_both(self, use)


@cute.jit
def arrive_in_both(channel: cutlass.Constexpr, use):
    lane = cute.arch.lane_idx()
    if lane < CLUSTER:
        channel.arrive_in(lane, use, has_read=True)


def share_keys(config, channels: dict) -> dict:
    """The channels of a CTA whose peer has the same keys."""
    full, empty = channels["k_full"], channels["k_empty"]
    bytes_of_warp = config.kv_tile_bytes // config.cluster // config.parts // config.warps_of_part
    return channels | {
        "k_full": SharedFull(full.base, full.stages, bytes_of_warp),
        "k_empty": SharedEmpty(empty.base, empty.stages),
    }


def cluster_barrier() -> None:
    """All threads of both CTAs are here. It orders no memory: mbarriers that were set up have a fence of their own."""
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()
