"""Mutants of our kernels that need not be found, and why: without the instruction a kernel is as right as with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shared.source_places import Pattern, Place


@dataclass(frozen=True)
class Site:
    """Where a mutant stands. change: what becomes of which instruction. at: where the instruction stems from, which may
    be a helper that many roles call; after, before: the nearest lines of a role on both sides; None: no line of ours.
    """

    change: str
    at: Place | None
    after: Place | None
    before: Place | None

    def __str__(self) -> str:
        return f"{self.change} at {self.at}; after {self.after}; before {self.before}"


@dataclass(frozen=True)
class Reason:
    """Why some mutants need not be found.

    change: regular expression found in `Site.change`. at, after, before: places as ``Pattern.parse`` reads them, of
    which one must match the site's; none: any place will do.
    """

    why: str
    change: str
    at: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def __str__(self) -> str:
        places = (("at", self.at), ("after", self.after), ("before", self.before))
        return "; ".join([self.change, *(f"{side} {' or '.join(texts)}" for side, texts in places if texts)])

    def explains(self, site: Site) -> bool:
        """Whether it is said of this mutant."""
        sides = ((self.at, site.at), (self.after, site.after), (self.before, site.before))
        return re.search(self.change, site.change) is not None and all(
            not texts or any(Pattern.parse(text).matches(place) for text in texts) for texts, place in sides
        )

    def patterns(self) -> Iterator[Pattern]:
        """All places that it names."""
        return map(Pattern.parse, (*self.at, *self.after, *self.before))


EXPLAINED = (
    # Attention
    Reason(
        "turns at the tensor core are for speed: they order no memory",
        r"bar\.sync",
        at=("fmha/sm90/consumer.py:wait_turn",),
    ),
    Reason(
        "p_full of the other's next tile, waited for, comes after its PV",
        r"try_wait",
        after=("fmha/sm90/consumer.py:keep_weights, pair.store",),
        before=("fmha/sm90/staging.py:store_words",),
    ),
    Reason(
        "the products join the next group, whose wait covers them",
        r"wgmma\.commit",
        at=("fmha/sm90/pair.py:Pair.issue_qk",),
    ),
    Reason(
        "where P goes through shared memory, its own fence follows",
        r"fence\.proxy",
        at=("fmha/sm90/consumer.py:clear_unseen, cute.arch.fence_view_async_shared 1",),
    ),
    Reason(
        "wgmma alone has read the tile, the whole warp at once; of P, the tile's barrier stands just before",
        r"bar\.warp",
        after=(
            "fmha/sm90/pair.py:attend_paired, warpgroup.wait_group",
            "fmha/sm90/pair.py:turn, warpgroup.wait_group",
            "fmha/sm90/pair.py:turn_apart, warpgroup.wait_group",
            "fmha/sm90/pair.py:finish, warpgroup.wait_group",
            "fmha/sm90/pair.py:release_q",
            "fmha/sm90/pair.py:add",
        ),
    ),
    Reason(
        "a consumer without QK has read nothing of the Q that it hands back",
        r"bar\.warp",
        after=("fmha/sm90/pair.py:attend_paired, if 1",),
    ),
    Reason(
        "a product is complete for its whole warpgroup: who has waited for QK knows that no warp reads the keys",
        r"bar\.sync",
        at=("fmha/sm90/pair.py:publish",),
    ),
    Reason(
        "where P lies among keys, the barrier ahead of its store stands before PV, too",
        r"bar\.sync \d+, 128",
        at=("fmha/sm90/consumer.py:clear_unseen",),
    ),
    Reason(
        "turns order the same here: the consumer that clears has the first turn, ahead of the other's PV",
        r"bar\.sync \d+, 256",
        at=("fmha/sm90/consumer.py:clear_unseen",),
    ),
    Reason(
        "wgmma alone has read the tile, and all lanes have waited for it at once",
        r"bar\.warp",
        after=(
            "fmha/sm90/consumer.py:advance, warpgroup.wait_group",
            "fmha/sm90/consumer.py:attend, warpgroup.wait_group",
        ),
    ),
    Reason(
        "a record's release is waited for ahead of the number from the queue and again ahead of its words",
        r"try_wait",
        at=("common/device/pipeline.py:Channel.wait_previous",),
        after=("fmha/device/queue.py:take",),
    ),
    Reason(
        "where V is K: QK has waited for the same tile",
        r"try_wait",
        after=("fmha/sm100/mma.py:multiply",),
        before=("fmha/sm100/mma.py:mma, tmem.fence_after_wait",),
    ),
    Reason(
        "of a bias in one stage: its own wait, a step before, stands after the QK that has read the tile",
        r"try_wait",
        at=("common/device/pipeline.py:Channel.wait_previous",),
        after=("common/device/tma.py:TileRing.load",),
        before=("fmha/schedule.py:KeySpan.tile",),
    ),
    Reason(
        "where V is K: S, waited for, is behind the MMA warp's wait for the same tile",
        r"try_wait",
        after=("fmha/schedule.py:KeySpan.has_unseen",),
        before=("fmha/sm100/softmax_warps.py:tile_step",),
    ),
    Reason(
        "of 64 rows, whose right edge crosses two KV tiles at most: the first holds keys that nobody sees, and "
        "clearing them has waited for the same phase",
        r"try_wait",
        after=("fmha/sm90/consumer.py:advance, work.v_full.wait",),
        before=("fmha/sm90/consumer.py:ConsumerTile.issue_pv", "common/device/storage.py:allocate"),
    ),
    Reason(
        "of gathered keys: S, waited for before, is behind the MMA warp's wait for the same tile",
        r"try_wait",
        after=("fmha/sm100/softmax_warps.py:tile_step, tmem.fence_before_arrive 1",),
        before=("latent/gathered/sm100.py:GatheredColumns.hide",),
    ),
    # Gradients
    Reason(
        "dK of the step before: the wait for dP covers it, and nothing that dK has is written between",
        r"wgmma\.wait_group",
        at=("fmha/backward/sm90/consumer.py:go_through, warpgroup.wait_group 1",),
    ),
    Reason(
        "dV: exchanged of the step comes after it, too, and whoever fetches over dO has waited for that",
        r"wgmma\.wait_group",
        at=("fmha/backward/sm90/exchange.py:issue_dq, warpgroup.wait_group",),
    ),
    Reason(
        "of the next S: it joins the group of dQ, which is waited for before P is made",
        r"wgmma\.commit",
        before=("fmha/backward/sm90/arithmetic.py:keep",),
    ),
    Reason(
        "consumers are half a step apart for speed: it orders no memory",
        r"bar\.sync",
        at=("fmha/backward/sm90/exchange.py:stand_apart",),
    ),
    Reason(
        "stmatrix gathers the warp itself",
        r"bar\.warp",
        at=("fmha/backward/sm90/results.py:write_rows",),
    ),
    Reason(
        "lane 0 has written the step, and the elected lane, which arrives, is the first: on GPUs, too",
        r"bar\.warp",
        at=("fmha/backward/sm90/visits.py:leave",),
    ),
    Reason(
        "what the launch before wrote, key warps touch only after loads, whose warp has waited for it",
        r"griddepcontrol\.wait",
        at=("fmha/backward/device/load.py:wait_before",),
        before=("fmha/backward/sm100/keys.py:work_on_keys",),
    ),
    Reason(
        "S, waited for next, is behind the MMA warp's wait for the same Q",
        r"try_wait",
        before=("fmha/backward/sm100/keys.py:work_on_keys, tmem.fence_after_wait 1",),
    ),
    Reason(
        "of the last step: where dQ is wanted, the warp has waited for it in the loop",
        r"try_wait",
        before=("fmha/backward/sm100/keys.py:work_on_keys, tmem.fence_after_wait 3",),
    ),
    Reason(
        "dq_empty or clean, waited for just before, comes after the key warps' own wait for the step",
        r"try_wait",
        at=("common/device/pipeline.py:Channel.wait_previous",),
        before=("fmha/backward/sm100/mma.py:mma, tmem.fence_after_wait 1",),
    ),
    Reason(
        "key warps on sm_100a, which clear rows, have waited for the same phase before they look which",
        r"try_wait",
        after=("fmha/backward/device/tile.py:KeyTile.has_unseen_rows",),
        before=("fmha/backward/device/clear.py:clear_queries",),
    ),
    Reason(
        "it keeps the compiler from computing with rows before all loads are under way, and orders no memory",
        r"bar\.warp",
        at=("fmha/backward/device/rows.py:zero_after_loads",),
    ),
    Reason(
        "wgmma alone has read the operand, and all lanes have waited for it at once",
        r"bar\.warp",
        at=("common/device/pipeline.py:Channel.arrive_warp",),
        after=(
            "fmha/backward/sm90/arithmetic.py:keep",
            "fmha/backward/sm90/apart/keys.py:add_pair, warpgroup.wait_group 2",
            "fmha/backward/sm90/apart/keys.py:add_pair, warpgroup.wait_group 3",
            "fmha/backward/sm90/apart/keys.py:add_pair, warpgroup.wait_group 4",
            "fmha/backward/sm90/apart/queries.py:add_pair, warpgroup.wait_group 3",
            "fmha/backward/sm90/apart/queries.py:add_alone, warpgroup.wait_group 2",
            "fmha/backward/sm90/apart/queries.py:go_through, warpgroup.wait_group",
        ),
    ),
    Reason(
        "of S: it joins the group of dK, which is waited for with it",
        r"wgmma\.commit",
        before=(
            "fmha/backward/sm90/apart/consumer.py:OwnRows.stage",
            "fmha/backward/sm90/apart/consumer.py:OwnRows.wait",
        ),
    ),
    Reason(
        "stmatrix gathers the warp itself",
        r"bar\.warp",
        at=("fmha/backward/sm90/apart/consumer.py:store_tiles, cute.arch.sync_warp 2",),
    ),
    Reason(
        "where a tile has an even number of stores, its first buffer was not the last one's",
        r"wait_group\.read 0",
        at=("fmha/backward/sm90/apart/consumer.py:store_tiles",),
    ),
    Reason(
        "where a tile has no more stores than buffers, the wait in front of its first store covers them",
        r"bulk\.(commit_group|wait_group\.read 1)",
        at=("fmha/backward/sm90/apart/consumer.py:store_tiles",),
    ),
    Reason(
        "a launch that follows, which no case has, begins behind both kernels by it",
        r"griddepcontrol\.wait",
        at=("fmha/backward/sm90/apart/kernel.py:Queries.kernel, cute.arch.griddepcontrol_wait 2",),
    ),
    Reason(
        "of V or dO that a consumer skips: who reads it hands back the step's K or Q later, which all wait for next",
        r"try_wait",
        after=(
            "fmha/backward/sm90/apart/consumer.py:OwnRows.meet",
            "fmha/backward/sm90/apart/consumer.py:OwnRows.wait",
        ),
        before=(
            "fmha/backward/sm90/apart/tile.py:tile_at",
            "fmha/backward/sm90/apart/queries.py:consume_tile, if 1",
            "fmha/backward/device/tile.py:KeyTile.has_unseen_rows",
        ),
    ),
    Reason(
        "of V or dO where a consumer has no steps: the other hands K or Q back later, which both wait for next",
        r"try_wait",
        after=(
            "fmha/backward/sm90/apart/keys.py:consume_tile, if 1",
            "fmha/backward/sm90/apart/queries.py:consume_tile, if 1",
        ),
    ),
    Reason(
        "a consumer without steps uses nothing of the statistics that it reads",
        r"bar\.warp",
        after=("fmha/backward/sm90/apart/queries.py:consume_tile, if 1",),
    ),
    # Latent kernels
    Reason(
        "the copies after a task's last tile: the three groups committed after them are of nothing",
        r"cp\.async\.wait_group 0",
        at=("latent/gathered/gather.py:convert_tiles, cute.arch.cp_async_wait_group 3",),
    ),
    Reason(
        "lane 0 has written the mask, and the elected lane, which hands the unit over, is the first: on GPUs, too",
        r"bar\.warp",
        at=("latent/gathered/transposed/load.py:load_task",),
    ),
    Reason(
        "they keep A's registers, which in PTX are new ones for each product; the wait for all products does the rest",
        r"wgmma\.(commit_group|wait_group\.sync\.aligned 1;)",
        at=(
            "latent/gathered/transposed/products.py:multiply_queries",
            "latent/gathered/transposed/products.py:add_values",
        ),
    ),
    Reason(
        "they join the next group: in PTX each product has new registers of A; S's first columns are read later",
        r"wgmma\.commit",
        at=(
            "latent/gathered/raw/values.py:add_values",
            "latent/gathered/raw/scores.py:multiply_codes",
        ),
    ),
    Reason(
        "thread 0, the elected one, writes what is read first; rows' places are read behind P's barriers",
        r"bar\.warp",
        after=("latent/gathered/raw/record.py:write_record", "latent/gathered/raw/record.py:write_end"),
    ),
    Reason(
        "each warp hands its P over, and the next step's barrier stands before references move again",
        r"bar\.sync",
        at=("latent/gathered/raw/weights.py:barrier",),
        before=("latent/gathered/raw/scores.py:take_step",),
    ),
    Reason(
        "where no record is written ahead, the barriers of what follows come before the first reader",
        r"bar\.(warp|sync 0)",
        at=(
            "latent/gathered/task.py:start, cute.arch.sync_threads 1",
            "fmha/device/cut_ahead.py:cut_ahead, cute.arch.sync_warp 1",
        ),
    ),
    Reason(
        "the load warp has waited ahead of the CTA's barrier, which all pass before they read",
        r"griddepcontrol\.wait",
        at=("latent/gathered/task.py:start",),
    ),
    Reason(
        "wgmma alone has read the stage, and all lanes have waited for it at once",
        r"bar\.warp",
        after=("latent/projection/sm90.py:add_scaled, warpgroup.wait_group",),
    ),
    Reason(
        "each place that finishes an entry has a buffer of its own",
        r"bar\.sync",
        at=("latent/cache/device/compress.py:finish, cute.arch.sync_threads 1",),
    ),
    Reason(
        "of a stream: it has a barrier just before, and until the next nobody touches what is cleared between",
        r"bar\.sync",
        at=("latent/indexer/device/choose.py:meet",),
        before=("latent/indexer/device/choose.py:search",),
    ),
    Reason(
        "the load warps' fence, after the barrier, stands on every way to a product and its commit",
        r"fence\.proxy",
        at=("latent/indexer/sm100/scores.py:prepare",),
    ),
    Reason(
        "the load warps' fence, after the barrier, stands on every way to a product and its commit",
        r"fence\.mbarrier_init",
        after=("latent/indexer/operands.py:ScoreInputs.of_query",),
    ),
    # Softmax and top-k
    Reason(
        "the next row's barrier stands before the next write",
        r"bar\.sync",
        at=("softmax/reduction.py:GridRounds._synchronize",),
        before=("softmax/resident.py:consume",),
    ),
    Reason(
        "reduction.open has such a fence, before anyone uses them",
        r"fence\.mbarrier_init",
        before=("softmax/reduction.py:ClusterRounds.open",),
    ),
    Reason(
        "reduction.open ends with a barrier of the cluster",
        r"bar\.sync 0",
        at=("softmax/resident.py:Resident.kernel",),
    ),
    Reason(
        "a resident chunk is read twice: the same warp has waited for the same phase before its first read",
        r"try_wait",
        after=("softmax/resident.py:consume, read 4",),
        before=("softmax/resident.py:read",),
    ),
    Reason(
        "samples are atomics, and a threshold may be an old one",
        r"bar\.warp",
        at=("softmax/topk/stream.py:renewed",),
    ),
    Reason(
        "lists stand between barriers; a pass writes below what the next reads",
        r"bar\.warp",
        at=("softmax/topk/select.py:keep_from",),
    ),
    Reason(
        "of rows that several warps hold: a barrier of the CTA follows",
        r"bar\.warp",
        at=("softmax/topk/held.py:hold",),
    ),
    # Experts
    Reason(
        "list_work ends with a barrier, another stands after it: either is enough",
        r"bar\.sync",
        at=("moe/counting.py:list_work", "moe/counting.py:sort, cute.arch.sync_threads 3"),
    ),
    Reason(
        "the products join the next group: of a turn, all are waited for together",
        r"wgmma\.commit",
        at=("common/device/wgmma.py:multiply, warpgroup.commit_group",),
        before=("common/device/wgmma.py:multiply",),
    ),
    Reason(
        "the products join the next group, which is waited for before the stage is handed back",
        r"wgmma\.commit",
        at=("common/device/wgmma.py:multiply, warpgroup.commit_group",),
        before=("moe/sm90/products.py:add_products",),
    ),
    Reason(
        "a consumer without rows has read nothing of the stage, and of tiles before only ahead of their own fence",
        r"fence\.proxy",
        at=("moe/sm90/products.py:await_stage, cute.arch.fence_view_async_shared",),
    ),
    Reason(
        "a consumer without rows has read nothing of the stage",
        r"bar\.warp",
        after=("moe/sm90/products.py:await_stage, cute.arch.fence_view_async_shared",),
    ),
    # Swap-FFN
    Reason(
        "fence.mbarrier_init stands before it",
        r"arrives relaxed",
        at=("swap/sm90/kernel.py:ProductPhase.kernel, cute.arch.cluster_arrive 1",),
    ),
    Reason(
        "load warps have drained their rings: no arrival is on its way to a CTA that ends",
        r"barrier\.cluster",
        at=(
            "swap/sm90/kernel.py:ProductPhase.kernel, cute.arch.cluster_arrive 2",
            "swap/sm90/kernel.py:ProductPhase.kernel, cute.arch.cluster_wait 2",
        ),
    ),
    Reason(
        "at the end the cluster's barrier is behind every consumer's last release: either is enough",
        r"try_wait",
        after=("swap/device/load.py:load_phase, use =",),
        before=("swap/sm90/kernel.py:ProductPhase.kernel",),
    ),
    Reason(
        "of a chain's consumers: the load warp has waited before it fetches what their products and stores are behind",
        r"griddepcontrol\.wait",
        at=("swap/sm90/kernel.py:consume",),
    ),
    Reason(
        "turns at the tensor core are for speed: they order no memory",
        r"bar\.sync",
        at=("swap/sm90/consumer.py:after_the_first",),
    ),
    Reason(
        "wgmma alone has read the stage, all lanes at once; the piece's last release has one, too",
        r"bar\.warp",
        at=("swap/sm90/consumer.py:release",),
    ),
    Reason(
        "wait_for acquires before the loads",
        r"ld\.acquire",
        at=("swap/device/flow.py:reached",),
        before=("swap/device/load.py:load_phase",),
    ),
    Reason(
        "flow.count has one before its release: one on the way is enough",
        r"fence\.proxy\.async\.global",
        at=("swap/device/load.py:load_phase",),
    ),
    Reason(
        "after summed two barriers of the same threads stand together",
        r"bar\.sync",
        at=("swap/device/flow.py:synchronize",),
        before=("swap/device/flow.py:count", "swap/device/flow.py:wait_for"),
    ),
    Reason(
        "ordinary loads alone read what this count says",
        r"fence\.proxy\.async\.global",
        at=("swap/device/flow.py:count",),
        before=("swap/device/flow.py:synchronize",),
    ),
    Reason(
        "a phase's first tile finds its ring drained; no case has a later tile that is loaded ahead of its counts",
        r"try_wait",
        after=("swap/device/load.py:load_phase, empty.wait_previous 1",),
        before=("common/device/tma.py:TileRing.load",),
    ),
)
