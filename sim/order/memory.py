"""Accesses to shared and to global memory, by instructions, native code and asynchronous operations."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np

from warpspec.sim.codegen.layout import Ctx
from warpspec.sim.codegen.memory import access_bytes, space_of
from warpspec.sim.instruction import Instr
from warpspec.sim.lanes import FULL_MASK, lanes
from warpspec.sim.memory import (
    CTA_RANK_SHIFT,
    WINDOW_SHIFT,
)
from warpspec.sim.order import launches
from warpspec.sim.order.accesses import Accesses
from warpspec.sim.order.clocks import (
    Agent,
    Clock,
    Snapshot,
)
from warpspec.sim.order.findings import Access, morally_strong
from warpspec.sim.order.launches import EARLIER
from warpspec.sim.order.looks import Looks
from warpspec.sim.order.places import (
    GLOBAL,
    SHARED,
    global_place,
    lane_numbers,
    lane_shape,
    of_lanes,
    part,
    runs,
    shared_place,
    units_of,
)
from warpspec.sim.order.shadow import Shadow, distinct
from warpspec.sim.order.shares import Touched, touched
from warpspec.sim.order.state import GlobalShadow, Operation
from warpspec.sim.registry import row_of

OFFSET_MASK = (1 << CTA_RANK_SHIFT) - 1
TAG, LANE = 8, 255  # an earlier access of lanes: when (`Agent.tag`) << TAG | lane
MOST_OWN = 1 << 14  # places that are kept by the addresses of lanes
latest = np.maximum.reduce
BOTH, WRITES = ("write", "read"), ("write",)
LOG_COUNT = int(Ctx.LOG_COUNT)
SEVERAL, EACH = 64, 255  # in place of a lane: several lanes have read; every lane has written the same place


class MemoryAccesses(Accesses):
    """Shared and global memory."""

    # ---- shared memory ----------------------------------------------------------------------------------------

    def shared_range(self, cta, offset: int, nbytes: int, access: Access, *clocks) -> None:
        """An access to consecutive bytes of a CTA's shared memory."""
        unit = self.units[False]
        where = slice(offset // unit, -(-(offset + nbytes) // unit))
        self.touch(
            cta.order.shared, where, access, clocks, SHARED, lambda: shared_place(cta, offset, nbytes), cta
        )

    def shared_chunks(self, cta, chunks: np.ndarray, chunk: int, access: Access, *clocks) -> None:
        """An access to chunks of shared memory, by their numbers; chunk: bytes of each."""
        where, low, high = units_of(chunks, chunk // self.units[False])
        self.touch(
            cta.order.shared, where, access, clocks, SHARED,
            lambda: shared_place(cta, low * chunk, (high + 1 - low) * chunk), cta,
        )  # fmt: skip

    def shared_rows(
        self, w, ins: Instr, cta, offsets: np.ndarray, nbytes: int, write: bool, strong=False
    ) -> None:
        """Lanes access `nbytes` each at these offsets by the generic proxy."""
        access = self.generic(w, ins, write, strong, together=True)
        self.shared_lanes(cta, offsets, nbytes, access, w.order)

    def shared_lanes(self, cta, offsets: np.ndarray, nbytes: int, access: Access, clock) -> None:
        """Lanes access `nbytes` each at these offsets."""
        unit = self.units[False]
        shape = lane_shape(offsets.astype(np.int64), nbytes, unit, 0)
        if shape is None:
            where, _ = self.lane_units(offsets, nbytes)
        else:
            where = shape.at(offsets.item(0) // unit)
        self._shared_units(cta, where, access, clock)

    def _shared_units(self, cta, where: slice | np.ndarray, access: Access, clock) -> None:
        def place() -> str:
            low, high = (
                (where.start, where.stop - 1) if isinstance(where, slice) else (where.min(), where.max())
            )
            unit = self.units[False]
            return shared_place(cta, int(low) * unit, int(high + 1 - low) * unit)

        self.touch(cta.order.shared, where, access, (clock,), SHARED, place)

    def lane_units(self, offsets: np.ndarray, nbytes: int) -> tuple[np.ndarray, int]:
        """(units of shared memory that lanes access, units of each lane), lane by lane."""
        unit = self.units[False]
        per = max(nbytes // unit, 1)
        where = offsets.astype(np.intp) // unit
        if per > 1:
            where = (where[:, None] + np.arange(per)).reshape(-1)
        return where, per

    # ---- global memory ----------------------------------------------------------------------------------------

    def _global(self, address: int) -> GlobalShadow | None:
        allocation = self.gmem.find(address)
        if allocation is None:
            return None
        found = self._globals.get(allocation.address)
        if found is None or found.allocation is not allocation:
            found = self._globals[allocation.address] = GlobalShadow(allocation, self.units[True])
            self._load_earlier(found)
        return found

    def _load_earlier(self, memory: GlobalShadow) -> None:
        """Load what launches that may still run have touched of an allocation."""
        host = self.gmem.host_address(memory.allocation) if self.overlap.before else None
        for age, past in enumerate(self.overlap.before, 1):
            for at, theirs in past.of(memory.allocation, host):
                if memory.shadow is None:
                    memory.shadow = Shadow(memory.size)
                launches.load(memory.shadow, memory.unit, self.ledger, theirs, at, age, past.kernel)

    def _note_early(self, memory: GlobalShadow, where, access: Access, views) -> None:
        """Note an access that may overlap the previous launch."""
        if memory.early is None:
            memory.early = Shadow(memory.size)
        early = memory.early if views is None else part(memory.early, views)
        (early.writes if access.write else early.reads)[where] = self.ledger.number(access)

    def _touch_global(
        self, memory: GlobalShadow, where, access: Access, clock, address: int, views=None
    ) -> None:
        """where: an index of the flat shadow; views: makes the part of a flat array that a strided access touches."""
        if self._behind_wait is not None:
            reads = views is None and not access.write
            if EARLIER.number in clock.foreign:
                if reads and memory.looks is not None:
                    memory.looks.again(where, access)
            elif reads and access.strong:
                if memory.looks is None:
                    memory.looks = Looks()
                memory.looks.look(where, access)
            else:
                self._note_early(memory, where, access, views)
        if not access.write and memory.shadow is None:
            if isinstance(clock, Snapshot):
                memory.pending.append((where, views, access, clock))
            elif not isinstance(where, slice) or (where.start, where.stop, access) not in memory.listed:
                memory.pending.append((where, views, access, None))
                if isinstance(where, slice):
                    memory.listed.add((where.start, where.stop, access))
            return
        self._note_pending(memory)
        shadow = memory.shadow if views is None else part(memory.shadow, views)
        self.touch(shadow, where, access, (clock,), GLOBAL, lambda: global_place(memory, address))

    def looked_once(self, cta) -> None:
        """A CTA ends. Its early looks (`looks`) at places that it has not read again count as reads."""
        for memory in self._globals.values():
            for unit, access in (memory.looks.left(cta.coords) if memory.looks else {}).items():
                self._note_early(memory, unit, access, None)
                first = self.ledger.accesses[0 if memory.shadow is None else int(memory.shadow.writes[unit])]
                if first is None or first.domain is not EARLIER or morally_strong(first, access):
                    continue
                self.report(
                    launches.OVERLAP,
                    f"{GLOBAL}, {global_place(memory, memory.base + unit * memory.unit)}",
                    first.describe(),
                    access.describe(),
                    f"a read of the same place again, behind the wait, or {launches.REMEDY}",
                    (first.ins.line, access.ins.line),
                )

    def _note_pending(self, memory: GlobalShadow) -> None:
        """Give an allocation shadow memory and note the reads so far in it."""
        if memory.shadow is None:
            memory.shadow = Shadow(memory.size)
            for old_where, old_views, old, old_clock in memory.pending:
                shadow = memory.shadow if old_views is None else part(memory.shadow, old_views)
                self.ledger.note(shadow, old_where, old, old_clock or Clock(old.domain))
            memory.pending = []

    def global_range(self, address: int, nbytes: int, access: Access, clock) -> None:
        """An access to consecutive bytes of global memory."""
        memory = self._global(address)
        if memory is not None and memory.allocation.writable:
            self._touch_global(memory, memory.units(address, address + nbytes), access, clock, address)

    def global_rows(self, addresses: np.ndarray, nbytes: int, access: Access, clock) -> None:
        """Lanes access `nbytes` each."""
        unit, first = self.units[True], addresses.item(0)
        shape = lane_shape(addresses, nbytes, unit, 0)
        if shape is not None:
            low = first + shape.low * unit
            high = low + shape.span * unit
        else:
            low, high = int(addresses.min()), int(addresses.max()) + nbytes
        memory = self._recent
        if memory is None or not memory.base <= low < memory.end:
            memory = self._recent = self._global(low)
        if memory is None or high > memory.end:
            if len(addresses) > 1:
                for i in range(len(addresses)):
                    self.global_rows(addresses[i : i + 1], nbytes, access, clock)
            return
        if not memory.allocation.writable:
            return
        where: object
        if shape is None:
            where = ((addresses - np.uint64(memory.base)) // np.uint64(unit)).astype(np.intp)
            if nbytes > unit:
                where = (where[:, None] + np.arange(nbytes // unit)).reshape(-1)
        else:
            where = shape.at((first - memory.base) // unit)
        self._touch_global(memory, where, access, clock, low)

    @contextmanager
    def watching(self, access: Access, clock):
        """Context in which copies of boxes between global and shared memory count as this access."""

        def watch(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
            memory = self._global(address)
            if memory is None or not memory.allocation.writable:
                return
            unit = memory.unit
            if (
                any(stride % unit for stride in strides[:-1])
                or shape[-1] % unit
                or (address - memory.base) % unit
            ):
                span_ = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
                self.global_range(address, span_, access, clock)
                return
            first = (address - memory.base) // unit
            view = (first, (*shape[:-1], shape[-1] // unit), (*(s // unit for s in strides[:-1]), 1))
            self._touch_global(memory, ..., access, clock, address, view)

        self.gmem.watch = watch
        try:
            yield
        finally:
            self.gmem.watch = None

    def summary(self) -> dict[int, Touched]:
        """What it saw of global memory by allocation, for a share of the launch that runs apart and for launches that
        overlap."""
        result = {}
        for address, memory in self._globals.items():
            shadow = memory.shadow
            if shadow is None:  # nothing here writes it: one of a unit's readers represents all
                shadow = Shadow(memory.size)
                for where, views, access, _ in memory.pending:
                    shadow_part = shadow if views is None else part(shadow, views)
                    shadow_part.reads[where] = self.ledger.alone(access)
            result[address] = touched(
                memory.allocation.name, memory.unit, shadow, memory.early, self.ledger, self._unreleased
            )
        return result

    def _unreleased(self, access: Access) -> bool:
        """Whether it is an access of this launch that nothing orders before the start of the next one."""
        released = self._released.get(access.domain.number)
        return access.domain is not EARLIER and (released is None or not self.known(access, released))

    # ---- what native code has accessed ------------------------------------------------------------------------

    def native(self, w) -> None:
        """The accesses of native blocks that a warp has just run."""
        n = w.context[LOG_COUNT]
        w.context[LOG_COUNT] = 0
        log, instrs = self.log, self.program.kernel.instrs
        for i, head in enumerate(log[:n, 0].tolist()):
            mask = head >> 32
            if mask:
                self.lane_access(w, instrs[head & 0xFFFFFFFF], of_lanes(log[i, 1:], mask), mask)

    def _form(self, ins: Instr) -> tuple:
        """(space, whether it writes, (first byte, bytes) of each part that it accesses)."""
        parts = [(0, access_bytes(ins))] if ins.used_bytes is None else runs(ins.used_bytes)
        form = self._forms[ins.index] = (space_of(ins), not row_of(ins.opcode).loads, parts)
        return form

    def lane_access(
        self, w, ins: Instr, addresses: np.ndarray, mask: int = FULL_MASK, strong: bool | str = False
    ) -> None:
        """Lanes (those of the mask) execute a load, a store or an atomic at these addresses."""
        space, write, parts = self._forms.get(ins.index) or self._form(ins)
        key = None
        if space != "global":  # rings of buffers repeat the same places
            key = ins.index, mask, w.cta.rank, addresses.tobytes()
            known = self._own.get(key)
            if known is not None:
                self._own_shared(w, self.generic(w, ins, write, strong, mask), *known)
                return
        together = False
        if len(addresses) > 1:
            if addresses.item(0) == addresses.item(-1):
                raw = addresses.tobytes()
                together = raw == raw[: addresses.itemsize] * len(addresses)
            if together:
                addresses = addresses[:1]
        if space == "generic":
            windows = (addresses >> np.uint64(WINDOW_SHIFT)).tolist()
            if windows.count(windows[0]) != len(windows):
                for i, lane in enumerate(lanes(mask)):
                    self.lane_access(w, ins, addresses[i : i + 1], 1 << lane, strong)
                return
            if windows[0] > 1:
                return  # local memory
            space = "cluster" if windows[0] else "global"
        access = self.generic(w, ins, write, strong, mask)
        for first, count in parts:
            places = addresses + np.uint64(first) if first else addresses
            if space == "global":
                self.global_rows(places, count, access, w.order)
            else:
                self._lane_shared(w, places, count, access, mask, together, key if len(parts) == 1 else None)

    def _lane_shared(
        self,
        w,
        addresses: np.ndarray,
        nbytes: int,
        access: Access,
        mask: int,
        together: bool,
        key: tuple | None,
    ) -> None:
        """together: all lanes of the mask access the one address. key: of `_own`, under which the places are kept if
        they are the CTA's own."""
        cta, unit = w.cta, self.units[False]
        first = addresses.item(0)
        shape = lane_shape(addresses, nbytes, unit, mask & -mask if together else mask)
        if shape is not None and first >> CTA_RANK_SHIFT & 0xFF == cta.rank:
            at = (first & OFFSET_MASK) // unit
            if at + shape.low >= 0 and at + shape.low + shape.span <= cta.order.shared.cells.size:
                known = shape.at(at), shape.lanes, together
                if key is not None:
                    if len(self._own) >= MOST_OWN:
                        self._own.clear()
                    self._own[key] = known
                self._own_shared(w, access, *known)
                return
        offsets = addresses & np.uint64(OFFSET_MASK)
        ranks = (addresses >> np.uint64(CTA_RANK_SHIFT)).tolist()
        for rank in dict.fromkeys(ranks):
            cta = w.cta.cluster.ctas[rank & 0xFF]
            if cta is not w.cta:
                self.check_started(access, w.order, cta, f"{SHARED} of CTA {cta.coords}")
            picked = [other == rank for other in ranks]
            chosen = offsets[picked]
            where, per = self.lane_units(chosen, nbytes)
            self._shared_units(cta, where, access, w.order)
            if not access.strong:
                executing = lane_numbers(mask & -mask if together else mask, per)[np.repeat(picked, per)]
                same = len(chosen) > 1 and bool((chosen == chosen[0]).all())
                self._between_lanes(w, access, cta, where, executing, together or same)

    def _own_shared(
        self, w, access: Access, where: slice | np.ndarray, executing: np.ndarray, together: bool
    ) -> None:
        """Lanes access units of their own CTA's shared memory, see `_between_lanes`."""
        self._shared_units(w.cta, where, access, w.order)
        if not access.strong:
            self._between_lanes(w, access, w.cta, where, executing, together)

    def lane_copies(self, w, op: Operation, offsets: np.ndarray, size: int, mask: int) -> None:
        """Lanes issue a cp.async of `size` bytes each to these offsets, of its lanes in turn."""
        op.written = self.of(op, True, generic=True)
        self.ledger.number(op.written)
        where, per = self.lane_units(offsets, size)
        self._between_lanes(w, op.written, w.cta, where, lane_numbers(mask, per), False)

    def lane_copies_waited(
        self, w, op: Operation, offsets: np.ndarray, size: int, copying: int, mask: int
    ) -> None:
        """Lanes have waited for a cp.async that lanes (`copying`) issued: each of them knows of its own copy alone."""
        agent = w.order
        agent.count(agent.part(mask))
        where, per = self.lane_units(offsets, size)
        self._note_lanes(agent, w.cta, where, op.written, lane_numbers(copying, per), False)

    def _between_lanes(
        self, w, access: Access, cta, where: slice | np.ndarray, executing: np.ndarray, together: bool
    ) -> None:
        """Lanes of one warp access one place, one of them writes, and they have not met in between.

        executing: the lane of each unit. together: all lanes access the same bytes.
        """
        agent = w.order
        tag = agent.tag
        if not access.write and agent.lanes["write"] != tag:
            agent.reads.append((cta, where, access, executing, together))  # noted when the warp writes
            return
        for read in agent.reads:
            self._note_lanes(agent, *read)
        agent.reads.clear()
        lanes_of = cta.order.lanes
        now = tag << TAG
        for kind in BOTH if access.write else WRITES:
            if agent.lanes[kind] != tag:  # none since the warp's last barrier
                continue
            earlier, accesses = lanes_of[kind]
            before = earlier[where]
            if latest(before) < now:
                continue
            other = before & LANE
            strange = (before >> TAG == tag) & (other != EACH)
            if not together:  # else one lane's is strange to the others
                strange &= other != executing
            numbers = accesses[where]
            for number in distinct(numbers[strange]):
                first = self.ledger.accesses[number]
                if agent.told.get(first.component, 0) >= first.count:
                    continue  # its lanes have arrived at an mbarrier since, and all lanes have waited for it
                at = int(np.argmax(strange & (numbers == number)))
                unit = self.units[False]
                place = (where.start + at if isinstance(where, slice) else int(where[at])) * unit
                self.report(
                    "lanes of a warp that nothing orders",
                    f"{SHARED}, {shared_place(cta, place, unit)}",
                    f"{first.describe()}, lane {int(other[at]) if other[at] < SEVERAL else 'several'}",
                    f"{access.describe()}, lane {int(executing[at])}",
                    "bar.warp.sync between them", (first.ins.line, access.ins.line),
                )  # fmt: skip
                break
        self._note_lanes(agent, cta, where, access, executing, together)

    @staticmethod
    def _note_lanes(
        agent: Agent, cta, where: slice | np.ndarray, access: Access, executing: np.ndarray, together: bool
    ) -> None:
        """Note the lane that accesses each unit."""
        tag = agent.tag
        now = tag << TAG
        kind = "write" if access.write else "read"
        earlier, accesses = cta.order.lanes[kind]
        if together:
            earlier[where] = now | (EACH if access.write else SEVERAL)
        elif access.write or agent.lanes[kind] != tag or latest(before := earlier[where]) < now:
            earlier[where] = executing | now
        else:
            several = (before >> TAG == tag) & (before & LANE != executing)
            earlier[where] = np.where(several, now | SEVERAL, executing | now)
        accesses[where] = access.key
        agent.lanes[kind] = tag
