"""The simulator, as the packages of kernels see it: the functions that it offers, and how it is found.

``warpspec.sim`` registers itself by ``offer`` when it is imported; no other package names it. If a call needs the
simulator before it has been imported, PROVIDER is imported, an optional part of the installation.
"""

from __future__ import annotations

import contextlib
import importlib
from functools import reduce
from operator import add
from typing import Protocol

PROVIDER = "warpspec.sim"  # module that offers a simulator when it is imported


class Simulator(Protocol):
    """Interface of a simulator. The reports that it returns can be added.

    pretended: the architecture of the CUDA device that it pretends to be, whose tensors ``run`` takes, too; None: it
    pretends nothing.
    """

    pretended: str | None

    def run(self, compiled: object, *arguments: object, seed: int):
        """Run a compiled host function on CPU tensors. Returns the report."""

    def one_stream(self) -> contextlib.AbstractContextManager:
        """A context whose runs belong to one stream."""

    def times(self) -> bool:
        """Whether runs of now are recorded so that their time can be predicted: plans are then a whole GPU's."""

    def remember(self, report):
        """Make a report the last one, which users can ask for. Returns it."""


_offered: Simulator | None = None


def offer(simulator: Simulator) -> Simulator | None:
    """Make this the simulator of the process. Returns the one before it."""
    global _offered
    before, _offered = _offered, simulator
    return before


def pretended() -> str | None:
    """The architecture of the CUDA device that a simulator pretends to be now, "sm_90a" for example, or None."""
    return None if _offered is None else _offered.pretended


def simulator() -> Simulator:
    """The simulator. If there is none, raises ImportError, which says what to install."""
    if _offered is None:
        try:
            importlib.import_module(PROVIDER)
        except ImportError as error:
            raise ImportError(
                f"the simulator cannot be imported ({error}): pip install 'warpspec[sim]', or use backend='reference'"
            ) from error
    return _offered


def joined(*reports):
    """The report of a call that made several launches: the sum of theirs, which the simulator remembers as its last
    one.

    None if the first is None, because launches on a GPU have no report.
    """
    return None if reports[0] is None else simulator().remember(reduce(add, reports))
