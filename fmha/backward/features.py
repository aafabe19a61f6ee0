"""The architecture-independent part of a backward kernel's configuration, and the layout of its workspace.

The query tiles of all batch rows or requests have consecutive numbers (``device.tile.KeyTile.index_of``), and so have
key tiles. The workspace has, for each query head and query tile, statistics of the tile's rows, dQ's sum in fp32,
turns.

Statistics [Hq, tiles, tile_m / 2, 4] fp32: for two neighbouring rows, both lse' in log2 units, then both -delta times
``delta_factor``. A row that sees no key or belongs to no request has lse' = +inf, which makes its P 0, and delta = 0.
Where products subtract the statistics (``subtracts``), [Hq, tiles, 2 tile_m, 4]: for each row -lse' over the factor of
scores, then for each row -delta, in 16 bytes: three bf16 numbers, whose sum it is, and five zeros. Hidden rows have
-2**63 there, times the factor's sign.

dQ's sums [Hq, tiles, tile_m * D] fp32: 64 rows and 64 columns of the tile form a *subtile*, stored in the order of
wgmma's registers: 4 KiB for each of 4 warps, with element 4 i + j of lane l at 128 i + 4 l + j
(``common.device.wgmma``). A subtile is numbered by its row block, or by its column block if the tile has 64 rows.

Where key tiles are cut (``schedule``), dK and dV of each piece have the same layout, [Hkv, key tiles, pieces, tile_n *
D] fp32: blocks of 64 keys and 64 columns, columns first. Where tiles are cut by length, they are [Hkv, places, 1,
tile_n * D], and a tile's pieces have neighbouring places; where packed requests come one after another, all heads share
them, [1, places, 1, tile_n * D]. Where heads are sliced, they are [Hkv, key tiles, 1, tile_n * D], and all pieces of a
tile add to its sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common import memory
from warpspec.common.hardware import FP32_BYTES, WARPGROUP_THREADS
from warpspec.common.operands import FLOAT32
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.backward.runs import MOST_REQUESTS
from warpspec.fmha.features import Format, Mask, RequestLayout
from warpspec.fmha.heads import BLOCK, HeadSizes
from warpspec.fmha.logits import PLAIN, LogitMap
from warpspec.fmha.tiles import ELEMENT_BYTES, KvTile

STATISTICS = 2  # numbers of a row: lse', -delta
COLUMN_BYTES = 16  # of a row's statistic where products subtract it
SUBTILE_ROWS = 64  # rows of a subtile of dQ; it has as many columns
SUBTILE_ELEMENTS = SUBTILE_ROWS * BLOCK
WARP_ELEMENTS = SUBTILE_ELEMENTS // 4  # elements of a warp's share of a subtile
THREAD_ELEMENTS = SUBTILE_ELEMENTS // WARPGROUP_THREADS
WARPS = 4  # warps of a warpgroup, one for each share of a subtile
UNITS = 4  # query tiles whose dQ a warp makes from their sums at a time (``device.finish``)
KEY_ELEMENTS = 512  # elements of a key tile's dK or dV that a warp makes from its sums at a time


@dataclass(frozen=True)
class Wanted:
    """The gradients that are computed.

    bias: "float32" or "bfloat16", the dtype in which dS is stored; "sum": dS is summed in fp32; None: no gradient.
    joins_keys: V is K, whose gradient is the sum of dK and dV.
    """

    q: bool = True
    k: bool = True
    v: bool = True
    bias: str | None = None
    joins_keys: bool = False

    @classmethod
    def of(cls, problem: BackwardProblem) -> Wanted:
        forward, wanted = problem.forward, problem.wanted
        bias = None
        if "bias" in wanted:
            shared = (forward.batch > 1 and not forward.bias.batches) or (
                forward.heads_q > 1 and not forward.bias.heads
            )
            bias = "sum" if shared else forward.bias.dtype
        joins = forward.format.shared_kv and "k" in wanted
        return cls("q" in wanted, "k" in wanted, joins or "v" in wanted, bias, joins)

    @property
    def ds(self) -> bool:
        """dS is computed."""
        return self.q or self.k or self.bias is not None

    @property
    def dv(self) -> bool:
        """Whether dV is a gradient by itself. If V is K, it is added to dK."""
        return self.v and not self.joins_keys

    @property
    def bias_dtype(self) -> str | None:
        """dtype of the bias's gradient."""
        return FLOAT32 if self.bias == "sum" else self.bias


@dataclass(frozen=True)
class BackwardKernel:
    """Configuration of a main kernel, shared by all architectures. Each adds its tiles: ``tile_m`` queries, ``tile_n``
    keys, and how many of each fit.

    deterministic: dQ is summed in a fixed order. cut: a CTA works on a piece of a key tile's steps and leaves partial
    sums of dK and dV (``schedule``). heads_inside: the inner loop of a key tile's steps goes over the heads of the
    group (``device.tile``). slices: heads are sliced (``schedule``), and pieces add to dK and dV in any order.
    inner_heads: with heads inside and a fixed order, this many heads (a power of two) are gone through at each query
    tile before the next heads begin; 0: all of the group. rows: the sizes of rows in memory, unless both are one tuned
    size; past a row's end the tile, of ``heads``, has zeros. keeps_requests:
    CTAs take packed requests one after another (``runs``): all queries of a request see all of its keys, so that its
    key tiles have the same steps, and one CTA can sort the requests. finishes: the launch's last CTAs make dQ, and dK
    and dV of cut key tiles, from their sums (``device.finish``), instead of a kernel of their own."""

    mask: Mask = Mask()
    requests: RequestLayout = RequestLayout()
    logits: LogitMap = PLAIN
    heads: HeadSizes = HeadSizes(64, 64)
    format: Format = Format()
    wanted: Wanted = Wanted()
    deterministic: bool = False
    cut: bool = False
    heads_inside: bool = False
    slices: bool = False
    inner_heads: int = 0
    rows: HeadSizes | None = None
    keeps_requests: bool = False
    finishes: bool = False

    subtracts = False  # whether the products that make S and dP also subtract the statistics
    # Key tiles of a head begin at different query tiles, so that they do not add to the same dQ.
    rotates = True

    def __post_init__(self):
        requests = self.requests
        assert self.heads_inside or self.mask.has_blocks or not self.deterministic
        assert not (self.mask.has_blocks and (self.heads_inside or self.cut != self.slices))
        assert self.can_cut or not self.cut
        assert self.cuts_by_length or self.mask.has_blocks or not self.slices
        assert (self.deterministic and self.heads_inside and not self.cut) or not self.inner_heads
        assert not self.keeps_requests or not (self.heads_inside or self.deterministic or self.mask.band)
        assert (self.can_finish and not self.slices) or not self.finishes
        assert requests.packed_q == requests.packed_k and not (requests.packed_k and requests.has_kv_lengths)

    @property
    def packed(self) -> bool:
        """Whether requests are packed."""
        return self.requests.packed_q

    @property
    def kv(self) -> KvTile:
        """A tile of K or V."""
        return KvTile(self.tile_n, self.heads)

    @property
    def sizes(self) -> HeadSizes:
        """Sizes of rows in memory."""
        return self.rows or self.heads

    def spans_of(self, name: str) -> int:
        """Spans of 64 columns of a tile of "q", "k", "v" or "do" in a CTA that loads have to fill."""
        if self.rows is None:
            return self.room_of(name) // BLOCK
        return self.rows.qk_blocks if name in ("q", "k") else self.rows.v_blocks

    @property
    def can_cut(self) -> bool:
        """Whether there is a kernel with ``cut`` set."""
        return False

    @property
    def can_finish(self) -> bool:
        """Whether there is a kernel with ``finishes`` set."""
        return False

    @property
    def delta_factor(self) -> float:
        """The power of two that multiplies delta in the statistics."""
        return 1.0

    @property
    def sink_limit(self) -> float:
        """The most that a sink adds to lse', in log2 units. P times exp(lse' - lse) is the softmax without the sink,
        which dlse multiplies: the one must stay above 0, the other finite. So small a P changes no other result.
        """
        return 64.0

    @property
    def cuts_by_length(self) -> bool:
        """Whether long key tiles are cut into more pieces than short ones; else all into as many."""
        return self.cut and (self.alike or self.requests.packed_k)

    @property
    def cuts_on_device(self) -> bool:
        """Whether the device decides how to cut (``pieces``): only it knows the lengths of packed requests."""
        return self.cut and self.requests.packed_k

    @property
    def cuts_last_rows(self) -> bool:
        """Whether the device may leave the key tiles of the first rows whole (``lengths``)."""
        return self.cuts_on_device and not (self.keeps_requests or self.heads_inside or self.deterministic)

    @property
    def cuts_on_host(self) -> bool:
        """Whether the host cuts by length, all rows or the last ones."""
        return self.cut and self.alike

    @property
    def ends_early(self) -> bool:
        """Whether a key tile may be seen by none of a request's last queries."""
        return self.mask.has_left or self.mask.has_ranges

    @property
    def can_slice(self) -> bool:
        """Whether heads may be sliced: the host or the device cuts by length, or steps are those of lists of blocks,
        which are not cut otherwise, and no order of sums is wanted."""
        cuttable = self.can_cut and (self.alike or self.requests.packed_k or self.mask.has_blocks)
        return cuttable and not (self.deterministic or self.heads_inside)

    @property
    def alike(self) -> bool:
        """Whether the key tiles of all batch rows have the same steps, which the host knows."""
        requests, mask = self.requests, self.mask
        unknown = requests.packed_k or requests.has_kv_lengths or requests.has_q_start
        return not (unknown or mask.has_ranges or mask.has_blocks)

    @property
    def writes_k(self) -> bool:
        """Whether the main kernel writes dK of some tile, one that is not cut."""
        return self.wanted.k and self.leaves_some_whole

    @property
    def writes_v(self) -> bool:
        """Like ``writes_k``, for dV."""
        return self.wanted.dv and self.leaves_some_whole

    @property
    def leaves_some_whole(self) -> bool:
        """Whether some key tile may be in one piece."""
        return not self.cut or self.finishes or (self.cuts_by_length and not self.slices)

    @property
    def leaves_k(self) -> bool:
        """Whether pieces leave sums of dK."""
        return self.wanted.k and self.cut

    @property
    def leaves_v(self) -> bool:
        """Like ``leaves_k``, for dV."""
        return self.wanted.v and self.cut

    @property
    def bias_alignment(self) -> int | None:
        """Alignment of the bias's rows in bytes; None: that of an element."""
        return None

    @property
    def dbias_alignment(self) -> int | None:
        """Like ``bias_alignment``, for the bias's gradient."""
        return None

    @property
    def dq_subtiles(self) -> int:
        """Subtiles of dQ in a query tile."""
        return self.tile_m * self.heads.qk // SUBTILE_ELEMENTS

    @property
    def dq_width(self) -> int:
        """Columns of dQ's sums, from the first on, that something is added to. The others are not cleared, nor read."""
        return self.heads.qk

    @property
    def query_shares(self) -> int:
        """Warps' shares of a query tile's dQ, where the main kernel makes it from its sums."""
        return self.tile_m * self.heads.qk // WARP_ELEMENTS

    @property
    def key_shares(self) -> int:
        """Like ``query_shares``, of a key tile's dK, or dV."""
        return self.tile_n * self.heads.qk // KEY_ELEMENTS

    @property
    def width(self) -> int:
        """Columns of dK, dV and dQ that a CTA makes."""
        return self.heads.qk

    @property
    def column_groups(self) -> int:
        """CTAs that share a key tile, each with some columns."""
        return self.heads.qk // self.width

    @property
    def room(self) -> int:
        """Columns of K and Q in a CTA's shared memory: all, or its ``width``."""
        return self.heads.qk

    def room_of(self, name: str) -> int:
        """Columns of "q", "k", "v" or "do" in a CTA's shared memory."""
        return self.room if name in ("q", "k") else min(self.heads.v, self.room)

    @property
    def clustered(self) -> bool:
        """Whether the CTAs of a key tile form a cluster, because S and dP are sums over columns that each CTA holds in
        part."""
        return self.room < self.heads.qk

    @property
    def turn_counts(self) -> int:
        """Turn counters of a query tile of one head, for a fixed order of dQ."""
        return self.dq_subtiles * WARPS

    @property
    def scatters(self) -> bool:
        """Whether some query sees less of a key tile than another query does, or none of it, and what nobody sees is
        cleared. With lists of blocks, it is not."""
        return (self.mask.band and not self.mask.has_blocks) or self.requests.ends_in_tile

    @property
    def clears_in_two_loops(self) -> bool:
        """Which loops clear rows in shared memory (``device.clear``)."""
        return False

    @property
    def whole(self) -> bool:
        """Whether every query sees every key."""
        masked = self.mask.uneven or self.requests.has_kv_lengths
        return not (masked or self.requests.packed_q or self.requests.packed_k)

    def tile_bytes(self, name: str) -> int:
        """Shared memory of a tile of "q", "k", "v" or "do"."""
        rows = self.tile_n if name in ("k", "v") else self.tile_m
        return rows * self.room_of(name) * ELEMENT_BYTES

    @property
    def ds_bytes(self) -> int:
        """Shared memory of dS of a step."""
        return self.tile_m * self.tile_n * ELEMENT_BYTES

    @property
    def statistics_bytes(self) -> int:
        """Bytes of the statistics of one query tile of one head."""
        return self.tile_m * STATISTICS * (COLUMN_BYTES if self.subtracts else FP32_BYTES)

    @property
    def block_m(self) -> int:
        """Queries of a block; P and dS are made block by block."""
        return BLOCK

    @property
    def query_blocks(self) -> int:
        """Blocks of a query tile."""
        return self.tile_m // self.block_m

    @property
    def operand_regions(self) -> tuple[memory.Region, ...]:
        """The regions that loads fill, in order."""
        q_stages, do_stages = self.q_stages, self.do_stages
        numbers = q_stages * self.statistics_bytes // FP32_BYTES
        rows = f"{q_stages} x lse' and -delta of rows"
        return (
            memory.Region("statistics", numbers, "float32", memory.TILE_ALIGNMENT, "", rows),
            self.operand_region("k", 1, "K"),
            self.operand_region("v", 1, "V"),
            self.operand_region("q", q_stages, "Q"),
            self.operand_region("do", do_stages, "dO"),
        )

    def operand_region(self, name: str, stages: int, title: str) -> memory.Region:
        rows = self.tile_n if name in ("k", "v") else self.tile_m
        contents = f"[{rows}, {self.room_of(name)}]"
        if name in ("q", "do") or stages > 1:
            contents = f"{stages} x {contents}"
        return memory.tile_region(name, stages * self.tile_bytes(name), title, contents)

    @property
    def smem_bytes(self) -> int:
        return memory.smem_bytes(self.smem_regions)


def common_fields(problem: BackwardProblem) -> dict:
    """The fields of ``BackwardKernel`` that follow from the problem. K and V are loaded separately even if they are one
    tensor."""
    forward, wanted = problem.forward, Wanted.of(problem)
    mask, deterministic = forward.mask, problem.deterministic and wanted.q
    masked = mask.band or mask.has_ranges or mask.has_blocks
    few = forward.requests.packed_k and forward.batch <= MOST_REQUESTS
    return {
        "mask": forward.mask,
        "requests": forward.requests,
        "logits": LogitMap.of(forward, signed=True),
        "heads": forward.heads,
        "format": Format(forward.format.dtype),
        "wanted": wanted,
        "deterministic": deterministic,
        "heads_inside": deterministic and mask.block_size is None,
        "keeps_requests": few and not (masked or deterministic),
    }
