"""The results of Python handlers: a wait for the lanes, returned to the machine, or asynchronous work, deferred."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(slots=True)
class Wait:
    """A handler's answer when its lanes must wait.

    The lanes wait until `machine.notify(on)`. Then the handler is called again, or, with `resume_after`, execution
    continues after the instruction. `poll` marks a wait that the hardware bounds in time (mbarrier.try_wait): when
    nothing else can run, such lanes are released once with their group's `timed_out` set to this wait.
    """

    on: Hashable
    text: str | Callable[[], str] = ""
    resume_after: bool = False
    poll: bool = False

    def describe(self) -> str:
        return self.text() if callable(self.text) else self.text


class Op:
    """Asynchronous work. Operations with the same `queue` run in the order deferred, others in any order.

    uses_shared: whether it still reads or writes shared memory, or signals an mbarrier there.
    """

    __slots__ = ("origin", "queue", "step", "text", "uses_shared")

    def __init__(self, text: str = "", queue: Hashable | None = None):
        self.queue = queue
        self.text = text
        self.uses_shared = True
        self.origin = None  # (warp, instruction): who issued it; set by Machine.defer
        self.step = None  # its step in the recorded trace

    def execute(self, m) -> None:
        raise NotImplementedError


class CallOp(Op):
    """An operation that calls a function."""

    __slots__ = ("function",)

    def __init__(
        self,
        function: Callable[[], None],
        text: str = "",
        queue: Hashable | None = None,
        uses_shared: bool = True,
    ):
        super().__init__(text, queue)
        self.function = function
        self.uses_shared = uses_shared

    def execute(self, m) -> None:
        self.function()
