"""TMA tile loads into the layout that tcgen05.mma reads, for tensors whose rows are one span of the swizzle.

A tile is (D, rows...) with D contiguous and D * element bytes = 128. One row fills one span of the 128-byte swizzle, so
rows are 128 bytes apart in shared memory, whatever their meaning; a larger D is cut into blocks, which are another mode
of rows. tcgen05.mma can read such a tile K-major (rows are M or N, D is reduced) and MN-major (D is N, rows are
reduced), because the two canonical layouts coincide. PTX ISA: "Tensors", "Swizzling modes"; "Shared memory layout and
matrix descriptor" of tcgen05.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cutlass import Int16, Int64, cute
from cutlass.cute.nvgpu import cpasync, tcgen05

# Sizes of tiles are in a module that configurations can import without the DSL; kernels find them here, too.
from warpspec.common.memory import ROW_BYTES
from warpspec.common.memory import TILE_ALIGNMENT as TILE_ALIGNMENT
from warpspec.common.memory import tile_bytes as tile_bytes

# Bits, base and shift of the swizzle of rows of this many bytes: as many rows as its bits count fill 1024 bytes.
SWIZZLES = {128: (3, 4, 3), 64: (2, 4, 3), 32: (1, 4, 3)}

# L2 policies of PTX's createpolicy with a fraction of 1.
EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000


def swizzled_layout(
    box: tuple[int, ...],
    stages: int | None = None,
    stage_bytes: int | None = None,
    row_bytes: int = ROW_BYTES,
) -> cute.ComposedLayout:
    """Shared memory layout of a tile (D, rows...), or of a ring of tiles (D, rows..., STAGE).

    stage_bytes: distance between stages if it is not the size of a tile. row_bytes: bytes of D, one of SWIZZLES.
    """
    layout = cute.make_layout(box)
    if stages is not None:
        elements = stage_bytes // (row_bytes // box[0]) if stage_bytes else math.prod(box)
        layout = cute.append(layout, cute.make_layout(stages, stride=elements))
    return cute.make_composed_layout(cute.make_swizzle(*SWIZZLES[row_bytes]), 0, layout)


def shared_tiles(
    base: cute.Pointer, dtype, box: tuple[int, ...], stages: int, stage_bytes=None
) -> cute.Tensor:
    """Ring of tiles at ``base`` in shared memory, (D, rows..., STAGE). base: aligned to TILE_ALIGNMENT."""
    layout = swizzled_layout(box, stages, stage_bytes, box[0] * dtype.width // 8)
    return cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=dtype), layout.outer)


def plain_tiles(base: cute.Pointer, dtype, box: tuple[int, ...], stages: int) -> cute.Tensor:
    """Ring of tiles at ``base`` in shared memory without a swizzle, (D, rows..., STAGE). base: aligned to 128 bytes."""
    tile = cute.make_layout(box)
    layout = cute.append(tile, cute.make_layout(stages, stride=cute.size(tile)))
    return cute.make_tensor(cute.recast_ptr(base, dtype=dtype), layout)


def make_load(
    tensor: cute.Tensor,
    box: tuple[int, ...],
    *,
    swizzled: bool = True,
    pair: bool = False,
    multicast: bool = False,
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """Make a descriptor that loads boxes of ``tensor`` (D, rows..., rest...). Host side.

    box: (D, rows...). Returns the copy atom that carries the descriptor, and the tensor of TMA coordinates. What lies
    outside the extents of ``tensor`` arrives as zeros. swizzled: the box's rows have ROW_BYTES and are swizzled;
    otherwise they are not. pair: bytes complete on the mbarrier of the pair's even CTA (cta_group::2). multicast: loads
    name the CTAs of the cluster that receive the box, at the same place, and on whose mbarriers its bytes complete.
    """
    row_bytes = box[0] * tensor.element_type.width // 8
    if swizzled and row_bytes not in SWIZZLES:
        raise ValueError(f"a row must be one of {tuple(SWIZZLES)} bytes, got {row_bytes}")
    padded = box + (1,) * (cute.rank(tensor) - len(box))
    kind = cpasync.CopyBulkTensorTileG2SMulticastOp if multicast else cpasync.CopyBulkTensorTileG2SOp
    op = kind(tcgen05.CtaGroup.TWO if pair else tcgen05.CtaGroup.ONE)
    layout = swizzled_layout(padded, row_bytes=row_bytes) if swizzled else cute.make_layout(padded)
    return cpasync.make_tiled_tma_atom(op, tensor, layout, padded)


def make_store(tensor: cute.Tensor, box: tuple[int, ...]) -> tuple[cute.CopyAtom, cute.Tensor]:
    """Make a descriptor that stores boxes of ``tensor`` (D, rows..., rest...) from the layout of ``make_load``. Host
    side.

    What lies outside the tensor is not written.
    """
    padded = box + (1,) * (cute.rank(tensor) - len(box))
    op = cpasync.CopyBulkTensorTileS2GOp()
    return cpasync.make_tiled_tma_atom(op, tensor, swizzled_layout(padded), padded)


@dataclass(frozen=True)
class TileRing:
    """A ring of tiles in shared memory and the descriptor that fills it. Device side.

    atom: from ``make_load``. shared: (TMA, STAGE). tiles: TMA coordinates (TMA, TILE).
    """

    atom: cute.CopyAtom
    shared: cute.Tensor
    tiles: cute.Tensor

    @classmethod
    def make(cls, atom, tensor, shared):
        """tensor: coordinates (D, rows..., TILE...), already cut into tiles. shared: (D, rows..., STAGE)."""
        modes = cute.rank(shared) - 1
        shared, tiles = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(shared, 0, modes),
            cute.group_modes(tensor, 0, modes),
        )
        return cls(atom, shared, tiles)

    def load(self, tile, stage, mbarrier: cute.Pointer, ctas=None, *, evicts_first: bool = False) -> None:
        """Issue the load of one tile into one stage; its bytes complete on ``mbarrier``. Executed by a whole warp.

        ctas: for a multicast atom, a bit for each CTA of the cluster that receives the tile, in its own stage and on
        its own mbarrier. evicts_first: whether its lines are the first to leave L2, for data that nobody reads again.
        """
        options = {} if ctas is None else {"mcast_mask": Int16(ctas)}
        if evicts_first:
            options["cache_policy"] = Int64(EVICT_FIRST)
        source, target = self.tiles[None, tile], self.shared[None, stage]
        cute.copy(self.atom, source, target, tma_bar_ptr=mbarrier, **options)

    def store(self, tile, stage) -> None:
        """Issue the store of one stage to one tile, in the bulk group of the issuing thread. Executed by a whole warp.

        The atom must be from ``make_store``.
        """
        cute.copy(self.atom, self.shared[None, stage], self.tiles[None, tile])

    def prefetch(self, tile) -> None:
        """Prefetch one tile into L2, without waiting. Executed by a whole warp.

        All lanes ask for the same tile, which makes one request: the instruction belongs to the uniform datapath (SASS:
        UTMAPF).
        """
        cute.prefetch(self.atom, self.tiles[None, tile])


def bulk_load(target: cute.Pointer, address, size, mbarrier: cute.Pointer, policy: str = "normal") -> None:
    """Copy ``size`` bytes from global ``address`` to shared memory, completing on ``mbarrier``.

    address and size are multiples of 16. policy: L2 eviction priority: "first", "last" or "normal".
    """
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    operands = "[{$r0}], [{$r1}], {$r2}, [{$r3}]"
    code = f"{copy} {operands};"
    if policy != "normal":
        create = f"createpolicy.fractional.L2::evict_{policy}.b64 policy, 1.0;"
        code = f"{{ .reg .b64 policy; {create} {copy}.L2::cache_hint {operands}, policy; }}"
    cute.arch.inline_ptx(code, read_only_args=[target.toint(), address, size, mbarrier.toint()])


def bulk_add(address, source: cute.Pointer, size) -> None:
    """Add ``size`` bytes of fp32 numbers in shared memory to those at a global ``address``, in the bulk group of the
    issuing thread. Both addresses and size are multiples of 16. The sums' lines are the last to leave L2.
    """
    add = "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32"
    policy = f".reg .b64 policy; mov.b64 policy, {EVICT_LAST:#x};"
    code = f"{{ {policy} {add} [{{$r0}}], [{{$r1}}], {{$r2}}, policy; }}"
    cute.arch.inline_ptx(code, read_only_args=[address, source.toint(), size])
