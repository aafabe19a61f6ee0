"""Accesses to tensor memory, and to tensor maps."""

from __future__ import annotations

from warpspec.sim.instruction import Instr
from warpspec.sim.lanes import FULL_MASK
from warpspec.sim.order import findings
from warpspec.sim.order.clocks import BASE, MAP_RELEASED, TENSOR_OWN, Clock
from warpspec.sim.order.findings import Access
from warpspec.sim.order.places import TENSOR_MAPS, TENSOR_MEMORY, global_place, tensor_place
from warpspec.sim.order.shadow import distinct
from warpspec.sim.order.state import Operation
from warpspec.sim.order.synchronisation import Synchronisation
from warpspec.sim.tma.descriptor import DESCRIPTOR_BYTES


class TensorAccesses(Synchronisation):
    """Tensor memory and tensor maps."""

    # ---- tensor memory ----------------------------------------------------------------------------------------

    def tensor_access(self, cta, where, access: Access, clock) -> None:
        """An access to lanes and columns of tensor memory; where: an index of [128, 512]."""
        shadow = cta.order.tensor
        place = lambda: tensor_place(cta, where)  # noqa: E731
        self.touch(shadow, shadow.index(where), access, (clock,), TENSOR_MEMORY, place)
        suspects = cta.order.suspects
        if suspects is not None:
            if access.write:
                suspects[where] = 0
            else:
                for number in distinct(suspects[where]):
                    if number:
                        self.found = self.suspected[number - 1] | self.found

    def tensor_transfer(self, w, ins: Instr, where, write: bool) -> int:
        """tcgen05.ld or tcgen05.st; returns its number among the warp's."""
        queue = self.queue(w, "st" if write else "ld")
        queue.count += 1
        access = Access(
            w.order.domain, queue.component, queue.count, ins=ins, agent=f"warp {w.index}", cta=w.cta.coords,
            write=write, generic=False, queued=True,
        )  # fmt: skip
        self.tensor_access(w.cta, where, access, w.order)
        return queue.count

    def load_used(self, w) -> None:
        """A register of a tcgen05.ld is used: the load is complete, as if waited for (a warning says that it was not),
        once those before it are."""
        done = min(w.state["tcgen05.ld"], default=self.queue(w, "ld").count + 1) - 1
        self.passed(w, "ld", done)
        self.passed(w, "ld", done, row=TENSOR_OWN)

    def tensor_waited(self, w, write: bool) -> None:
        """tcgen05.wait::ld or ::st."""
        name = "st" if write else "ld"
        self.passed(w, name)
        self.passed(w, name, row=TENSOR_OWN)

    def commit(self, w, ins: Instr, mask: int) -> Operation:
        """tcgen05.commit: publishes the operations before it and, as a fence::before_thread_sync does, orders them."""
        op = self.after(w, ins, "tcgen05", mask)
        op.tensor = True
        return op

    def pair_allocated(self, w, ins: Instr) -> None:
        """tcgen05.alloc.cta_group::2 is over."""
        w.cta.order.pair.allocated = self.generic(w, ins, True, together=True)

    def pair_freed(self, w, ins: Instr, peer) -> None:
        """tcgen05.dealloc.cta_group::2 needs the pair's other CTA: its allocation over, and it must not have exited
        (seen on a B300: github.com/NVIDIA/cutlass/issues/3435, github.com/sgl-project/sglang/issues/32907)."""
        other, access = peer.order.pair, self.generic(w, ins, True, together=True)
        if other.allocated is None or not self.known(other.allocated, w.order):
            first = "the peer has yet to allocate" if other.allocated is None else other.allocated.describe()
            self.report(
                "tensor memory of a pair is freed before the other CTA has allocated", f"CTA {peer.coords}", first,
                access.describe().replace(" writes:", " frees it:"),
                "a cluster barrier, or an arrival that the second waits for, after the first", (ins.line,),
            )  # fmt: skip
        other.freed_by_peer = access, w.order.freeze(FULL_MASK)
        if peer.live_warps == 0:
            self.pair_exits(peer, None)

    def pair_exits(self, cta, last: Clock | None) -> None:
        """A CTA of a pair has exited, and its peer has freed tensor memory. last: what the CTA knew. The peer must have
        freed before, as the CTA knows, or be known to free at about the same time, as in NVIDIA's kernels: after all
        that the CTA does with tensor memory."""
        access, clock = cta.order.pair.freed_by_peer
        if last is not None and self.known(access, last):
            return
        if not all(self.known(use, clock) for use in cta.order.pair.last_uses):
            self.report(
                "tensor memory of a pair is freed though the other CTA may have exited", f"CTA {cta.coords}",
                access.describe().replace(" writes:", " frees it:"), "",
                "a cluster barrier after it, or one before it and after both CTAs' last use", (access.ins.line,),
            )  # fmt: skip

    def tensor_freed(self, w, ins: Instr, column: int, columns: int, peer=None) -> None:
        """tcgen05.dealloc: all accesses to the columns are over. peer: the other CTA of a pair."""
        shadow = w.cta.order.tensor
        where = (slice(None), slice(column, column + columns))
        access = self.generic(w, ins, True, together=True)
        firsts = [self.ledger.accesses[number] for number in distinct(shadow.writes[where]) if number]
        for number in distinct(shadow.reads[where]):
            firsts += self.ledger.sets[number]
        if peer is not None:
            w.cta.order.pair.last_uses = [first for first in firsts if self.known(first, w.order)]
            self.pair_freed(w, ins, peer)
        for first in firsts:
            if not self.known(first, w.order):
                _, remedy = findings.diagnose(first, access, BASE, TENSOR_MEMORY)
                self.report(
                    "tensor memory is freed while it is in use", tensor_place(w.cta, where), first.describe(),
                    access.describe().replace(" writes:", " frees it:"), remedy,
                    (first.ins.line, ins.line), findings.is_tolerated(first, access, BASE, freed=True),
                )  # fmt: skip
        shadow.writes[where] = 0
        shadow.reads[where] = 0

    # ---- tensor maps ------------------------------------------------------------------------------------------

    def map_written(self, w, ins: Instr, where, mask: int) -> None:
        """tensormap.replace. where: the map's address in global memory, or (CTA, offset) in shared memory."""
        access = self.generic(w, ins, True, mask=mask)
        if isinstance(where, tuple):
            self.shared_range(*where, DESCRIPTOR_BYTES, access, w.order)
        else:
            self.global_range(where, DESCRIPTOR_BYTES, access, w.order)

    def map_copied(self, w, ins: Instr, source: tuple, target: int) -> None:
        """tensormap.cp_fenceproxy, from (CTA, offset) to an address: the copy and a release of it."""
        self.shared_range(*source, DESCRIPTOR_BYTES, self.generic(w, ins, False, together=True), w.order)
        self.global_range(target, DESCRIPTOR_BYTES, self.generic(w, ins, True, together=True), w.order)
        w.order.fence(BASE, MAP_RELEASED)

    def map_used(self, w, ins: Instr, address: int, mask: int) -> None:
        """A tensor copy reads its map, by a proxy of its own. A map that nothing here writes is the host's."""
        memory = self._global(address)
        if memory is None or not memory.allocation.writable:
            return
        access = self.generic(w, ins, False, mask=mask)
        where = memory.units(address, address + DESCRIPTOR_BYTES)
        if memory.shadow is None:
            memory.pending.append((where, None, access, None))
        else:
            place = lambda: global_place(memory, address)  # noqa: E731
            self.touch(memory.shadow, where, access, (w.order,), TENSOR_MAPS, place)
