"""Compare matrix operands with the tiles that TMA wrote: the descriptor's stride or swizzle must be the tile's.

A tensor copy puts the rows of its box a pitch apart. A descriptor that begins in such a tile finds groups of 8 rows
at its stride byte offset; other strides than the tile's own read rows that are not the operand's. Kernels may choose
rows on purpose, so it is a finding only if products also leave part of the tile unread over the whole run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from warpspec.sim.instruction import Instr
from warpspec.sim.names import placed
from warpspec.sim.order.findings import Finding
from warpspec.sim.order.places import shared_place
from warpspec.sim.tcgen05 import smem_descriptor
from warpspec.sim.tcgen05.operands import SharedOperand
from warpspec.sim.tcgen05.smem_descriptor import CHUNK_BYTES, NO_SWIZZLE, ROWS_PER_ATOM, SWIZZLE_128B_32B
from warpspec.sim.tma.descriptor import TensorMap

KIND = "a matrix descriptor does not have the layout of the tile that TMA wrote"
CORE_ROW_BYTES = 16  # bytes of a row of a core matrix, without a swizzle


@dataclass(eq=False)
class Tile:
    """The data that tensor copies of one box wrote at one offset. read: whether products read each 16-byte chunk.

    wrong: the first operand that does not have its layout, as (instruction, operand, what is wrong, CTA).
    """

    offset: int
    nbytes: int
    tensor_map: TensorMap
    ins: Instr
    read: np.ndarray
    wrong: tuple | None = None
    operands: set[int] = field(default_factory=set)

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class OperandLayouts:
    """The tiles of a launch, by place and form, and who read them how.

    last_writer: the instruction that last wrote a byte of a CTA's shared memory, by (CTA, offset).
    """

    def __init__(self, last_writer: Callable[[object, int], Instr | None]):
        self._last_writer = last_writer
        self._tiles: dict[tuple, Tile] = {}
        self._kept: dict[
            int, np.ndarray
        ] = {}  # chunks that operands were read from, so that their ids stay theirs

    def written(self, cta, offset: int, nbytes: int, tensor_map: TensorMap, ins: Instr) -> None:
        """A tensor copy has written boxes."""
        present = cta.order.tiles
        before = present.get(offset)
        if before is not None and before.nbytes == nbytes and before.tensor_map is tensor_map:
            return
        form = (tensor_map.box, tensor_map.element_strides, tensor_map.swizzle, tensor_map.element)
        tile = self._tiles.get((offset, nbytes, form))
        if tile is None:
            read = np.zeros(nbytes // CHUNK_BYTES, bool)
            tile = self._tiles[offset, nbytes, form] = Tile(offset, nbytes, tensor_map, ins, read)
        for other in [at for at, old in present.items() if at < tile.end and offset < old.end]:
            del present[other]
        present[offset] = tile

    def overwritten(self, cta, offset: int, nbytes: int) -> None:
        """Something else has written there."""
        present = cta.order.tiles
        for other in [at for at, old in present.items() if at < offset + nbytes and offset < old.end]:
            del present[other]

    def read(self, cta, ins: Instr, operand: SharedOperand) -> None:
        """A product reads an operand."""
        tiles = cta.order.tiles
        start = (operand.descriptor & 0x3FFF) << 4
        for tile in tiles.values():
            if tile.offset <= start < tile.end:
                break
        else:
            return
        if id(operand.chunks) in tile.operands:
            return
        tile.operands.add(id(operand.chunks))
        self._kept[id(operand.chunks)] = operand.chunks
        for other in tiles.values():
            inside = operand.chunks.reshape(-1) - other.offset // CHUNK_BYTES
            other.read[inside[(inside >= 0) & (inside < other.read.size)]] = True
        if tile.wrong is None:
            wrong = mismatch(operand, tile.tensor_map)
            writer = self._last_writer(cta, start) if wrong else None
            if writer is not None and writer.opcode.startswith("cp.async.bulk.tensor"):
                tile.wrong = ins, operand, wrong, cta

    def findings(self) -> dict[tuple, Finding]:
        """Tiles that a product read with another layout, and that products have not read in full."""
        found = {}
        for tile in self._tiles.values():
            if tile.wrong is not None and not tile.read.all():
                ins, operand, wrong, cta = tile.wrong
                lines = (tile.ins.line, ins.line)
                found.setdefault((KIND, lines), _finding(tile, ins, operand, wrong, cta))
        return found


def _finding(tile: Tile, ins: Instr, operand: SharedOperand, wrong: tuple[str, str], cta) -> Finding:
    unread = int(tile.read.size - tile.read.sum()) * CHUNK_BYTES
    box = tile.tensor_map
    shape = " x ".join(map(str, reversed(box.box_elements)))
    swizzle = f"swizzle of {box.swizzle.span} bytes" if box.swizzle.span else "no swizzle"
    what, implied = wrong
    return Finding(
        KIND,
        f"shared memory, {shared_place(cta, tile.offset, tile.nbytes)}",
        f"PTX line {tile.ins.line} `{tile.ins.opcode}`, a box of {shape}, rows {box.row_pitch} bytes apart, {swizzle}"
        + _from(tile.ins),
        f"PTX line {ins.line} `{ins.opcode}`, {operand.name} with {what}; products leave {unread} of {tile.nbytes} "
        f"bytes unread" + _from(ins),
        implied,
        (tile.ins.line, ins.line),
    )


def _from(ins: Instr) -> str:
    return f" from {placed(ins.source)}" if ins.source else ""


def mismatch(operand: SharedOperand, tensor_map: TensorMap) -> tuple[str, str] | None:
    """(what of the descriptor is not the tile's, what the tile's layout implies), or None."""
    d = smem_descriptor.decode(operand.descriptor)
    span = tensor_map.swizzle.span
    width = 0 if d.swizzle is NO_SWIZZLE else d.swizzle.width
    if span != width:
        has, wants = (f"a swizzle of {size} bytes" if size else "no swizzle" for size in (width, span))
        return has, f"a descriptor with {wants}"
    if not width:
        return None if operand.mn_major else _without_swizzle(d, operand, tensor_map)
    depth = 4 if d.swizzle is SWIZZLE_128B_32B else ROWS_PER_ATOM
    first = tensor_map.box_elements[1] if len(tensor_map.box_elements) > 1 else 1
    along = operand.chunks.shape[0] if operand.mn_major else operand.rows
    if first < depth or along <= depth or tensor_map.rows <= depth:
        return None
    wanted = [depth * tensor_map.row_pitch]
    # The box is cut into such groups: they may follow each other along any of its dimensions.
    if first == depth:
        for size in tensor_map.box_elements[2:]:
            wanted.append(wanted[-1] * size)
    if d.stride_offset in wanted:
        return None
    return (
        f"a stride byte offset of {d.stride_offset}",
        f"a stride byte offset of {' or '.join(map(str, dict.fromkeys(wanted)))}: {depth} rows of "
        f"{tensor_map.row_pitch} bytes",
    )


def _without_swizzle(d, operand: SharedOperand, tensor_map: TensorMap) -> tuple[str, str] | None:
    """The strides of K-major core matrices, 8 rows of 16 bytes."""
    if tensor_map.row_pitch != CORE_ROW_BYTES or len(tensor_map.box_elements) < 2:
        return None
    rows = tensor_map.box_elements[1]
    group = ROWS_PER_ATOM * CORE_ROW_BYTES
    if rows >= operand.rows > ROWS_PER_ATOM and d.stride_offset != group:
        return (
            f"a stride byte offset of {d.stride_offset}",
            f"a stride byte offset of {group}: 8 rows of 16 bytes",
        )
    column = rows * CORE_ROW_BYTES
    if len(tensor_map.box_elements) == 3 and rows >= operand.rows and d.leading_offset != column:
        return (
            f"a leading byte offset of {d.leading_offset}",
            f"a leading byte offset of {column}: {rows} rows of 16 bytes",
        )
    return None
