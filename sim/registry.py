"""Which Python handler executes which opcode, and what handlers return and defer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache, lru_cache

from warpspec.sim.errors import UnsupportedInstruction

WARP_SIZE = 32
FULL_MASK = 0xFFFFFFFF


@dataclass(slots=True)
class Wait:
    """A handler's answer when its lanes must wait.

    The lanes wait until `machine.notify(on)`. Then the handler is called again, or, with `resume_after`, execution
    continues behind the instruction. `poll` marks a wait that the hardware bounds in time (mbarrier.try_wait): when
    nothing else can run, such lanes are released once with `warp.timed_out` set.
    """

    on: Hashable
    text: str | Callable[[], str] = ""
    resume_after: bool = False
    poll: bool = False

    def describe(self) -> str:
        return self.text() if callable(self.text) else self.text


class Op:
    """Asynchronous work. Operations with the same `queue` run in the order deferred, others in any order."""

    __slots__ = ("origin", "queue", "text")

    def __init__(self, text: str = "", queue: Hashable | None = None):
        self.queue = queue
        self.text = text
        self.origin = None  # (warp, instruction): who issued it; set by Machine.defer

    def execute(self, m) -> None:
        raise NotImplementedError


class CallOp(Op):
    """An operation that calls a function."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[], None], text: str = "", queue: Hashable | None = None):
        super().__init__(text, queue)
        self.function = function

    def execute(self, m) -> None:
        self.function()


@dataclass(frozen=True, slots=True)
class Handler:
    """A registered handler; `family` is the name of the module that holds it."""

    function: Callable
    collective: bool
    family: str


_HANDLERS: dict[str, Handler] = {}


def instruction(*prefixes: str, collective: bool = False):
    """Register a handler for every opcode that starts with one of the dotted prefixes; the longest match wins.

    `collective`: the instruction is .sync: the machine calls it once all lanes it names have converged.
    """

    def register(function):
        family = function.__module__.rsplit(".", 1)[-1]
        for prefix in prefixes:
            if prefix in _HANDLERS:
                raise ValueError(f"two handlers for {prefix}")
            _HANDLERS[prefix] = Handler(function, collective, family)
        handler_for.cache_clear()
        return function

    return register


@cache
def handler_for(opcode: str) -> Handler | None:
    """The handler of an opcode, or None."""
    prefix = opcode
    while prefix:
        found = _HANDLERS.get(prefix)
        if found is not None:
            return found
        prefix = prefix.rpartition(".")[0]
    return None


def require_handler(opcode: str) -> Handler:
    """The handler of an opcode; raises UnsupportedInstruction."""
    found = handler_for(opcode)
    if found is None:
        raise UnsupportedInstruction(f"the simulator does not execute `{opcode}`")
    return found


@lru_cache(maxsize=4096)
def _lane_tuple(mask: int) -> tuple[int, ...]:
    return tuple(lane for lane in range(WARP_SIZE) if mask >> lane & 1)


def lanes(mask: int) -> list[int]:
    """The lane numbers in a mask, ascending."""
    return list(_lane_tuple(mask))
