"""The asynchronous units of an SM: tensor cores, TMA, its share of L2 and HBM, tensor memory."""

from __future__ import annotations

from warpspec.sim.clocks.constants import Chip

SCHEDULERS = 4
KB = 1024
LINE = 128  # bytes
MMA_COLUMNS = (64, 128, 256)  # values of N for which the table has the time of a tcgen05.mma


class Sm:
    """The servers of one SM. Every method takes the time of issue and returns when the work is done.

    fresh_share: share of the bytes read that comes from HBM. cold: whether data new to the trace has HBM's latency.
    active_share: share of all SMs that run and share L2 and HBM. written_share: share of the bytes stored that reaches
    HBM before the kernel ends; L2 keeps the rest. sharers: SMs that load the same bytes at the same time, which L2 then
    reads once. tensors: (fresh_share, sharers) of the loads of a tensor, by (address, bytes); of others it is those.
    code_bytes: of the kernel's code.
    """

    def __init__(
        self,
        chip: Chip,
        fresh_share: float,
        cold: bool,
        active_share: float,
        written_share: float,
        sharers: float = 1.0,
        tensors: dict[tuple[int, int], tuple[float, float]] | None = None,
        code_bytes: int = 0,
    ):
        self.chip = chip
        sharing = max(1.0, chip.sms * active_share)
        self.hbm_rate = chip.clocks("hbm_gb") / chip.ghz / sharing
        self.slow_left = chip.clocks("hbm_start_mb") * 1e6 / sharing  # bytes to come at half the rate

        def l2_rate(sharers: float) -> float:
            l2 = min(chip.clocks("l2_bytes") * sharers, chip.clocks("l2_shared_bytes"))
            return min(l2 / sharing, chip.clocks("tma_bytes"))

        self.others = fresh_share, l2_rate(sharers)  # part from HBM and rate from L2 of loads of no tensor
        self.tensors = {name: (fresh, l2_rate(several)) for name, (fresh, several) in (tensors or {}).items()}
        self.store_rate = min(chip.clocks("l2_store_bytes") / sharing, chip.clocks("store_bytes"))
        self.add_rate = min(chip.clocks("l2_add_bytes") / sharing, chip.clocks("add_bytes"))
        self.cold, self.written_share = cold, written_share
        self.tensor_free = [0.0] * SCHEDULERS
        self.tensor_used = [0.0] * SCHEDULERS
        self.store_buffer, self.add_buffer = chip.clocks("store_buffer"), chip.clocks("add_buffer")
        self.lanes_free = self.lanes_ahead = 0.0
        self.tma_free = self.memory_free = self.store_free = self.port_free = 0.0
        self.alone_since: float | None = None  # since when other SMs are at other places of the kernel
        self.tma_used = self.l2_used = self.hbm_used = 0.0
        self.transfer_free = [0.0] * SCHEDULERS
        self.transfer_used = 0.0
        self.queue_free = 0.0  # when the queue of tcgen05 is free
        self.queue_used = 0.0
        self.queue_tail = 0.0
        self.bytes_moved = 0.0
        self.code: dict[int, float] = {}  # lines of code that the SM has fetched, and when they arrived
        # Without a flush a cache beside the SMs has the code of a small kernel.
        self.fetches = cold or code_bytes > chip.clocks("code_cache_kb") * KB
        self.streamed = int(chip.clocks("code_streamed_kb")) * KB // LINE if cold else 0  # lines
        self.code_latency = chip.clocks("code_hbm_latency" if cold else "code_latency")

    def busy(self) -> dict[str, float]:
        """Clocks that each unit has worked."""
        return {
            "tensor": max(max(self.tensor_used), self.queue_used),
            "tma": self.tma_used,
            "l2": self.l2_used,
            "hbm": self.hbm_used,
            "tensor memory": self.transfer_used,
        }

    def fetch(self, at: float, first: int, last: int) -> float:
        """The time at which the SM has lines of code.

        The first lines of a kernel come in a stream that begins with it. Whoever needs others, or does not want to wait
        for these, asks for a block of them, which waits behind a part of the SM's own loads.
        """
        code, ready = self.code, at
        for line in range(first, last + 1):
            there = code.get(line)
            if there is None:
                loads = self.chip.clocks("code_behind_loads") * max(0.0, self.memory_free - at)
                there = asked = at + self.code_latency + loads
                if line < self.streamed:
                    there = min(asked, line * self.chip.clocks("code_line"))
                if there == asked:
                    for fetched in range(line, line + int(self.chip.clocks("code_block"))):
                        code.setdefault(fetched, asked)
                code[line] = there
            ready = max(ready, there)
        return ready

    # ---- memory ------------------------------------------------------------------------------------------------

    def _move(self, start: float, nbytes: float, share: float, l2_rate: float) -> float:
        """The time at which bytes have passed L2 and HBM, without latency. share: the part of them that comes from
        HBM."""
        read = share * nbytes
        slow = min(self.slow_left, read)
        self.slow_left -= slow
        return self._pass(start, nbytes, nbytes / l2_rate, (read + slow) / self.hbm_rate)

    def _pass(self, start: float, nbytes: float, l2: float, hbm: float) -> float:
        """Loads and stores pass one after the other: what is copied takes the sum of both.

        SMs that do the same at the same time have no more than their share of L2 and HBM. One that does something else
        than most others gets what these leave: the share that it has not used so far, as fast as a single SM can.
        """
        since = start - self.chip.clocks("burst")
        if self.alone_since is not None:
            since = min(since, self.alone_since)
        self.memory_free = max(self.memory_free, since) + max(l2, hbm)
        self.port_free = max(self.port_free, start) + nbytes / self.chip.clocks("tma_bytes")
        self.l2_used += l2
        self.hbm_used += hbm
        self.bytes_moved += nbytes
        return max(self.memory_free, self.port_free)

    def load(self, at: float, nbytes: float, near: bool = False) -> float:
        """Loads of ``nbytes`` by a warp's lanes, or by cp.async, after earlier stores.

        near: of a line that the warp has loaded before.
        """
        share, rate = self.others
        at = max(at, self.lanes_free)
        if near:
            return at + self.chip.clocks("l1_latency")
        latency = self.chip.clocks("hbm_latency" if share > 0 else "l2_latency")
        return max(self._move(at, nbytes, share, rate), at) + latency

    def store(self, at: float, nbytes: float, adds: bool = False) -> float:
        """Stores and reductions: when they have left the SM; nobody waits for them. adds: they are bulk reductions."""
        rate = self.add_rate if adds else self.store_rate
        self.store_free = max(self.store_free, at) + nbytes / rate
        passed = self._pass(at, nbytes, nbytes / rate, self.written_share * nbytes / self.hbm_rate)
        return max(self.store_free, passed)

    def store_by_lanes(self, at: float, stored: float, added: float) -> None:
        """Stores and additions by lanes."""
        if stored:
            self.lanes_free = self.store(at, stored)
            self.lanes_ahead = self.store_buffer / self.store_rate
        if added:
            self.lanes_free = self.store(at, added, adds=True)
            self.lanes_ahead = self.add_buffer / self.add_rate

    def lanes_wait(self, at: float) -> float:
        """The time at which lanes can access memory: they do so in order, and few bytes wait to leave the SM."""
        return max(at, self.lanes_free - self.lanes_ahead)

    def drained(self) -> float:
        """The time at which all that was stored has left the SM."""
        return max(self.store_free, self.lanes_free)

    def tma_load(self, at: float, nbytes: float, fresh: bool, tensor: tuple[int, int] | None = None) -> float:
        """A load by TMA. fresh: of bytes that the trace has not loaded before. tensor: which it is of, if known."""
        chip = self.chip
        share, rate = self.tensors.get(tensor, self.others)
        start = max(at, self.tma_free)
        taken = max(nbytes / chip.clocks("tma_bytes"), chip.clocks("tma_interval"))
        self.tma_free = start + taken
        self.tma_used += taken
        latency = chip.clocks("tma_hbm_latency" if fresh and share > 0 else "tma_l2_latency")
        return (
            max(self._move(start, nbytes, share, rate), start + nbytes / chip.clocks("tma_bytes")) + latency
        )

    def tma_store(self, at: float, nbytes: float, adds: bool) -> tuple[float, float]:
        """(source read, all written). adds: the store is a reduction."""
        chip = self.chip
        start = max(at, self.tma_free)
        self.tma_free = start + chip.clocks("tma_interval")
        self.tma_used += chip.clocks("tma_interval")
        read = self.store(start, nbytes, adds) + chip.clocks("store_read_latency")
        return read, read + chip.clocks("store_latency")

    # ---- tcgen05 -----------------------------------------------------------------------------------------------

    def tensor_mma(self, at: float, about: tuple, lanes: int) -> float:
        m, n, kind, group, from_tensor_memory = about
        busy = lanes * mma_interval(self.chip, m, n, kind, group, from_tensor_memory)
        self.queue_free = max(self.queue_free, at) + busy
        self.queue_used += busy
        self.queue_tail = mma_tail(self.chip, from_tensor_memory)
        return self.queue_free

    def tensor_commit(self, at: float) -> float:
        return max(self.queue_free + self.queue_tail, at + self.chip.clocks("commit_latency"))

    def tensor_copy(self, at: float) -> float:
        self.queue_free = max(self.queue_free, at) + self.chip.clocks("tensor_copy")
        return self.queue_free

    def tensor_transfer(self, scheduler: int, at: float, nbytes: float, load: bool) -> float:
        """tcgen05.ld or .st of a warp through its scheduler's quarter of tensor memory's port."""
        chip = self.chip
        taken = nbytes / (chip.clocks("tmem_load_bytes" if load else "tmem_store_bytes") / SCHEDULERS)
        start = max(at, self.transfer_free[scheduler])
        self.transfer_free[scheduler] = start + taken
        self.transfer_used += taken / SCHEDULERS
        return start + taken + chip.clocks("tmem_latency")


MMA_RATES = {"f16": 1.0, "tf32": 2.0, "f8f6f4": 1.0, "i8": 1.0, "mxf8f6f4": 1.0, "mxf4": 1.0, "mxf4nvf4": 1.0}


def mma_interval(chip: Chip, m: int, n: int, kind: str, group: int, from_tensor_memory: bool) -> float:
    """Clocks between consecutive tcgen05.mma. Every kind reads 32 bytes of K per row, so N decides."""
    rows = m // group
    clocks = n * chip.clocks("mma_column") * MMA_RATES.get(kind, 1.0)
    least = chip.clocks("mma_least")
    if not from_tensor_memory:  # operands from shared memory: A of the CTA, its half of B
        reading = (rows + n / group) * 32 / chip.clocks("shared_bytes")
        clocks = max(clocks, reading)
    return max(clocks, least)


def mma_tail(chip: Chip, from_tensor_memory: bool) -> float:
    """Clocks from the end of an MMA's interval to its commit's arrival."""
    return chip.clocks("mma_tail_tensor" if from_tensor_memory else "mma_tail")
