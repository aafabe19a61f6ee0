"""The simulator's exceptions. Every error says where it is: kernel, CTA, warp, lanes, PTX line, Python source line."""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.sim.names import placed

# What messages that name a cause of waiting say.
EXPECTED, BEGINS, MISSED = "bytes expected", "begins with parity", "the warp may have come too late for"
NO_LINES = "(compiled with --generate-line-info, a kernel has Python lines here)"


@dataclass(frozen=True)
class Where:
    """A place in a simulated run; fields that are not known stay None."""

    kernel: str | None = None
    cta: tuple[int, int, int] | None = None
    warp: int | None = None
    lanes: tuple[int, ...] | None = None
    ptx_line: int | None = None
    ptx_text: str | None = None
    source: str | None = None

    def __str__(self) -> str:
        parts = []
        if self.kernel is not None:
            parts.append(f"kernel {self.kernel}")
        if self.cta is not None:
            parts.append(f"CTA {self.cta}")
        if self.warp is not None:
            parts.append(f"warp {self.warp}")
        if self.lanes:
            parts.append(f"lanes {format_lanes(self.lanes)}")
        if self.ptx_line is not None:
            parts.append(f"PTX line {self.ptx_line}")
        text = ", ".join(parts)
        if self.ptx_text:
            text += f"\n    {self.ptx_text}"
        if self.source:
            text += f"\n    from {placed(self.source)}"
        elif self.ptx_line is not None:
            text += f"\n    {NO_LINES}"
        return text


def format_lanes(lanes: tuple[int, ...]) -> str:
    """Lane numbers as ranges: (0, 1, 2, 7) -> '0-2,7'."""
    runs: list[list[int]] = []
    for lane in lanes:
        if runs and runs[-1][1] == lane - 1:
            runs[-1][1] = lane
        else:
            runs.append([lane, lane])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


class SimError(Exception):
    """Base of the simulator's diagnoses. `where` is filled in as the error passes through the machine."""

    def __init__(self, message: str, where: Where | None = None):
        super().__init__(message)
        self.message = message
        self.where = where

    def __str__(self) -> str:
        return self.message if self.where is None else f"{self.message}\n  at {self.where}"


class PtxSyntaxError(SimError):
    """The PTX text does not parse."""


class UnsupportedInstruction(SimError):
    """An instruction, or a form of one, that the simulator does not execute."""


class MemoryFault(SimError):
    """An access outside every allocation, misaligned, or to a read-only range."""


class TmemFault(SimError):
    """Tensor-memory misuse: not allocated, out of range, leaked, wrong lanes, allocation rules broken."""


class BadDescriptor(SimError):
    """A TMA, shared-memory matrix or instruction descriptor that the hardware would not accept."""


class BarrierFault(SimError):
    """Misuse of an mbarrier or a named barrier: uninitialised, count overflow, mixed thread counts."""


class RegisterHazard(SimError):
    """A register is read while an asynchronous instruction is still to write it."""


class Deadlock(SimError):
    """Nothing can make progress. The message lists each blocked warp and what it waits for."""


class ScheduleDependence(SimError):
    """Runs that differ in nothing but their seeds leave different results."""


class WrongResult(SimError):
    """A tensor is not what was expected. The message names the store that left its first wrong element."""


class HostError(SimError):
    """The host function failed, or an argument does not fit the compiled signature."""


class TooManyCtas(HostError):
    """A cooperative launch of more CTAs than the device holds at once."""
