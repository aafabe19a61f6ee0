"""Mutants of our kernels that need not be found, and why: without the instruction a kernel is as right as with it."""

from __future__ import annotations

# (pattern of a verdict's text, the reason)
EXPLAINED = (
    (
        r"`bar\.sync %r.*fmha/sm90/consumer\.py",
        "turns at the tensor core are for speed: they order no memory",
    ),
    (
        r"`bar\.sync 5, 256.*fmha/sm90/consumer\.py:349",
        "turns order the same here: the consumer that clears has the first turn, ahead of the other's PV",
    ),
    (r"`bar\.warp.*from \S*topk/stream\.py", "samples are atomics, and a threshold may be an old one"),
    (
        r"`bar\.warp.*from \S*topk/select\.py",
        "lists stand between barriers; a pass writes below what the next reads",
    ),
    (
        r"`bar\.sync.*reduction\.py.*before softmax/resident\.py",
        "the next row's barrier stands before the next write",
    ),
    (
        r"`fence\.mbarrier_init.*before softmax/reduction\.py",
        "reduction.open has such a fence, before anyone uses them",
    ),
    (r"`bar\.sync 0.*softmax/resident\.py", "reduction.open ends with a barrier of the cluster"),
    (
        r"try_wait.*before sm90/staging\.py",
        "p_full of the other's next tile, waited for, comes after its PV",
    ),
    (r"`wgmma\.commit.*sm90/pair\.py", "the products join the next group, whose wait covers them"),
    (r"`fence\.proxy.*fmha/sm90/consumer\.py", "where P goes through shared memory, its own fence follows"),
    (
        r"`bar\.warp.*after sm90/pair\.py:(192|245|259|264|266|267|279|282|284|303|352|355)",  # its waits for products
        "wgmma alone has read the tile, the whole warp at once; of P, the tile's barrier stands just before",
    ),
    (
        r"`bar\.sync 1, .*after device/flow\.py:57, before device/flow\.py:(74|92)",
        "after summed two barriers of the same threads stand together",
    ),
    (
        r"`ld\.acquire.*after device/flow\.py:\d+, before device/load\.py:137",
        "wait_for acquires before the loads",
    ),
    (
        r"arrives relaxed.*swap/sm90/kernel\.py.*before sm90/kernel\.py:66",
        "fence.mbarrier_init stands before it",
    ),
    (
        r"`fence\.proxy\.async\.global.*swap/device/load\.py",
        "flow.count has one before its release: one on the way is enough",
    ),
    (
        r"`wgmma\.wait_group.*moe/sm90/products\.py.*before device/words",
        "the registers that it hands back are written again only after a later one, which covers them",
    ),
    (
        r"`wgmma\.commit.*before (sm90/kernel\.py:41|device/wgmma\.py:49)",
        "the products join the next group: of a turn, all are waited for together",
    ),
    (
        r"try_wait.*after device/tma\.py:111, before fmha/schedule\.py:90",
        "of a bias in one stage: its own wait, a step before, stands after the QK that has read the tile",
    ),
    (
        r"`fence\.proxy.*after sm90/products\.py:99, before sm90/consumer\.py:75",
        "a consumer without rows has read nothing of the stage, and of tiles before only ahead of their own fence",
    ),
    (
        r"`wgmma\.commit.*before sm90/products\.py",
        "the products join the next group, which is waited for before the stage is handed back",
    ),
    (
        r"`wgmma\.wait_group.*backward/sm90/consumer\.py:206",
        "dK of the step before: the wait for dP covers it, and nothing that dK has is written between",
    ),
    (
        r"`bar\.sync 3, 256.*backward/sm90/exchange\.py",
        "consumers are half a step apart for speed: it orders no memory",
    ),
    (
        r"`wgmma\.(commit|wait)_group.*sm90/exchange\.py:57",
        "dV: exchanged of the step comes after it, too, and whoever fetches over dO has waited for that",
    ),
    (
        r"`wgmma\.commit.*before sm90/arithmetic\.py:5[23]",
        "of the next S: it joins the group of dQ, which is waited for before P is made",
    ),
    (
        r"`griddepcontrol\.wait.*backward/device/load\.py.*before sm100/keys\.py",
        "what the launch before wrote, key warps touch only after loads, whose warp has waited for it",
    ),
    (r"`bar\.warp.*backward/sm90/results\.py", "stmatrix gathers the warp itself"),
    (
        r"`bar\.sync.*moe/counting\.py.*before moe/counting\.py",
        "list_work ends with a barrier, another stands after it: either is enough",
    ),
    (
        r"`bar\.sync.*cache/device/compress\.py:320",
        "each place that finishes an entry has a buffer of its own",
    ),
    (
        r"`bar\.sync.*indexer/device/choose\.py:78.*before device/choose\.py:184",
        "of a stream: it has a barrier just before, and until the next nobody touches what is cleared between",
    ),
    (
        r"`fence\.(mbarrier_init|proxy).*before sm100/scores\.py:1",
        "the load warps' fence, after the barrier, stands on every way to a product and its commit",
    ),
    (
        r"`bar\.warp.*topk/held\.py:130",
        "of rows that several warps hold: a barrier of the CTA follows",
    ),
    (
        r"`bar\.sync 1, .*after device/flow\.py:57, before device/flow\.py:57",
        "of rows that wait for a count: that wait's barrier stands before the scratch is written again",
    ),
    (
        r"`bar\.sync 1, .*after device/flow\.py:57, before nothing",
        "of rows with a router: its barriers stand before the squares of the next rows are written",
    ),
    (
        r"`bar\.sync 2, .*swap/sm90/consumer\.py",
        "turns at the tensor core are for speed: they order no memory",
    ),
    (
        r"`fence\.proxy\.async\.global.*swap/device/flow\.py.*before device/flow\.py:57",
        "ordinary loads alone read what this count says",
    ),
    (
        r"`barrier\.cluster.*swap/sm90/kernel\.py:8[78]",
        "load warps have drained their rings: no arrival is on its way to a CTA that ends",
    ),
    (
        r"`bar\.warp.*swap/sm90/consumer\.py",
        "wgmma alone has read the stage, all lanes at once; the piece's last release has one, too",
    ),
    (
        r"`bar\.warp.*after device/record\.py:\d+",
        "lane 0 has written the record, and the elected lane, which hands it over, is the first: on GPUs, too",
    ),
    (
        r"`bar\.warp.*after sm90/consumer\.py:\d+",
        "wgmma alone has read the tile, and all lanes have waited for it at once",
    ),
    (
        r"try_wait.*after device/load\.py:160, before sm90/kernel\.py:83",
        "at the end the cluster's barrier is behind every consumer's last release: either is enough",
    ),
    (
        r"`griddepcontrol\.wait.*from \S*swap/sm90/kernel\.py:140",
        "of a chain's consumers: the load warp has waited before it fetches what their products and stores are behind",
    ),
    (
        r"try_wait.*after device/tile\.py:\d+, before sm100/keys\.py:11[46]",
        "S, waited for next, is behind the MMA warp's wait for the same Q",
    ),
    (
        r"`bar\.warp.*after gathered/host\.py:24, before gathered/host\.py:24",
        "of pair.attend_paired: a consumer without QK has read nothing of the Q that it hands back",
    ),
    (
        r"`cp\.async\.wait_group 0.*gathered/gather\.py:138",
        "the copies after a task's last tile: the three groups committed after them are of nothing",
    ),
    (
        r"`bar\.warp.*after sm90/products\.py:99, before sm90/consumer\.py:75",
        "a consumer without rows has read nothing of the stage",
    ),
    (
        r"`bar\.warp.*after projection/sm90\.py:177",
        "wgmma alone has read the stage, and all lanes have waited for it at once",
    ),
    (
        r"`griddepcontrol\.wait.*from \S*fmha/device/ahead\.py.*before device/(tile|request|grid|record)\.py",
        "a role finds its tiles in operands, or in records made of them, which the same call, the launch that is "
        "beside it here, does not write",
    ),
    (
        r"`griddepcontrol\.wait.*from \S*fmha/device/ahead\.py.*before device/storage\.py",
        "what a consumer stores is behind what it was sent, which the load warp loads after its own wait",
    ),
    (
        r"try_wait.*after sm90/pair\.py:109, before sm90/(pair\.py:108|consumer\.py:103)",
        "QK over the second half of D: where V is no part of K's rows, the first half has waited for that barrier",
    ),
    (
        r"try_wait.*after sm100/mma\.py:161, before sm100/mma\.py:128",
        "where V is K: QK has waited for the same tile",
    ),
    (
        r"try_wait.*after fmha/schedule\.py:\d+, before sm100/softmax_warps\.py:158",
        "where V is K: S, waited for, is behind the MMA warp's wait for the same tile",
    ),
    (
        r"try_wait.*after sm100/mma\.py:161, before sm100/mma\.py:148",
        "dq_empty, waited for just before, comes after the key warps' own wait for the step",
    ),
    (
        r"try_wait.*after device/blocks\.py:50, before sm100/keys\.py:136",
        "of the last step: where dQ is wanted, the warp has waited for it in the loop",
    ),
    (
        r"`bar\.warp.*from \S*transposed/load\.py",
        "lane 0 has written the mask, and the elected lane, which hands the unit over, is the first: on GPUs, too",
    ),
    (
        r"`wgmma\.(commit_group|wait_group\.sync\.aligned 1;).*from \S*transposed/products\.py",
        "they keep A's registers, which in PTX are new ones for each product; the wait for all products does the rest",
    ),
    (
        r"`bar\.warp.*after sm90/pair\.py:187",
        "a consumer without QK has read nothing of the Q that it hands back",
    ),
    (
        r"`bar\.sync \d+, 128.*from \S*fmha/sm90/pair\.py:320",
        "a product is complete for its whole warpgroup: who has waited for QK knows that no warp reads the keys",
    ),
    (
        r"`bar\.sync \d+, 128.*from \S*fmha/sm90/consumer\.py:464",
        "where P lies among keys, the barrier ahead of its store stands before PV, too",
    ),
)
