"""torch.cuda for a device that is not there: its properties, and streams and events of work that is done at once."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from warpspec.sim.device import (
    REGISTERS_PER_SM,
    SHARED_PER_CTA_DEFAULT,
    WARP_SIZE,
    Device,
)
from warpspec.sim.pretend.capture import Capture
from warpspec.sim.pretend.tensors import CUDA, Propagation

TOTAL_MEMORY = 141 << 30
SHORTEST_MS = 1e-3  # least time between two events, which callers divide by
_handles = itertools.count(0x7100, 16)


class Stream:
    """A stream. Its work is complete as soon as it is launched."""

    def __init__(self, device: object = None, priority: int = 0, stream_ptr: int | None = None, **_: object):
        self.cuda_stream = next(_handles) if stream_ptr is None else stream_ptr
        self.device, self.priority = CUDA, priority
        self.device_index, self.device_type, self.stream_id = 0, 1, self.cuda_stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def __enter__(self) -> Stream:
        self._before = _state.stream
        _state.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _state.stream = self._before

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream

    def synchronize(self) -> None:
        """Wait for the work of this stream, which is done."""

    def query(self) -> bool:
        """Whether the work of this stream is done."""
        return True

    def wait_stream(self, stream: object) -> None:
        """Wait for another stream, whose work is done."""

    def wait_event(self, event: object) -> None:
        """Wait for an event, which has happened."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event in this stream."""
        event = event or Event(enable_timing=True)
        event.record(self)
        return event


class Event:
    """An event. The time between two events is this machine's, not a GPU's."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_):
        self.cuda_event = next(_handles)
        self._at = 0.0

    def record(self, stream: object = None) -> None:
        """Record the current time."""
        self._at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """The milliseconds between this event and another."""
        return max((end._at - self._at) * 1e3, SHORTEST_MS)

    def wait(self, stream: object = None) -> None:
        """Make a stream wait for this event."""

    def synchronize(self) -> None:
        """Wait for this event."""

    def query(self) -> bool:
        """Whether this event has happened."""
        return True


_state = SimpleNamespace(stream=None)
DEFAULT = Stream(stream_ptr=0)
_state.stream = DEFAULT


class Graph:
    """A CUDA graph: it records calls of kernels and torch operators during capture, which leaves memory as it was, and
    executes them on replay."""

    def __init__(self, *_: object, **__: object):
        self._calls: list[Callable[[], None]] = []

    def replay(self) -> None:
        """Repeat the recorded work on the same memory."""
        with torch.no_grad():
            for call in self._calls:
                call()

    def pool(self) -> tuple[int, int]:
        """The memory pool's handle."""
        return (0, 1)

    def reset(self) -> None:
        """Discard the recorded work."""
        self._calls = []


def _graph_context(propagation: Propagation) -> Callable:
    @contextlib.contextmanager
    def graph(cuda_graph: Graph, *_: object, **__: object):
        _begin(propagation)(cuda_graph)
        try:
            yield
        finally:
            _end(propagation)(cuda_graph)

    return graph


def _begin(propagation: Propagation) -> Callable:
    def capture_begin(self: Graph, *_: object, **__: object) -> None:
        propagation.capturing = capture = Capture()
        self._calls = capture.calls

    return capture_begin


def _end(propagation: Propagation) -> Callable:
    def capture_end(self: Graph) -> None:
        capture, propagation.capturing = propagation.capturing, None
        if capture is not None:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                capture.undo()

    return capture_end


def _nothing() -> Callable:
    """A function that has nothing to do, as work is done when it is launched; another one for each name, by which
    torch's compiler tells functions apart."""
    return lambda *_, **__: None


def _context(*_: object, **__: object):
    return contextlib.nullcontext()


class DeviceContext(contextlib.nullcontext):
    """torch.cuda.device. It has no effect, as there is one device."""

    def __init__(self, device: object = 0):
        super().__init__()
        self.idx = 0


def _set_stream(stream: Stream) -> None:
    _state.stream = stream


def properties(device: Device) -> SimpleNamespace:
    """The result of torch.cuda.get_device_properties."""
    return SimpleNamespace(
        name=f"NVIDIA {device.name}",
        major=device.major,
        minor=device.minor,
        multi_processor_count=device.sms,
        total_memory=TOTAL_MEMORY,
        L2_cache_size=device.l2_bytes,
        shared_memory_per_block=SHARED_PER_CTA_DEFAULT,
        shared_memory_per_block_optin=device.shared_per_cta,
        shared_memory_per_multiprocessor=device.shared_per_sm,
        regs_per_multiprocessor=REGISTERS_PER_SM,
        max_threads_per_multi_processor=device.threads_per_sm,
        max_threads_per_block=1024,
        warp_size=WARP_SIZE,
        clock_rate=device.clock_khz,
        is_integrated=0,
        is_multi_gpu_board=0,
        uuid="00000000-0000-0000-0000-000000000000",
    )


def attributes(device: Device, propagation: Propagation) -> dict[str, object]:
    """The attributes that replace those of torch.cuda."""
    graph = type(
        "CUDAGraph", (Graph,), dict(capture_begin=_begin(propagation), capture_end=_end(propagation))
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "init": _nothing(),
        "_lazy_init": _nothing(),
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _nothing(),
        "device": DeviceContext,
        "device_of": _context,
        "get_device_capability": lambda *_: (device.major, device.minor),
        "get_device_name": lambda *_: f"NVIDIA {device.name}",
        "get_device_properties": lambda *_: properties(device),
        "get_arch_list": lambda: [f"sm_{device.major}{device.minor}"],
        "can_device_access_peer": lambda *_: False,
        "mem_get_info": lambda *_: (TOTAL_MEMORY, TOTAL_MEMORY),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": _nothing(),
        "reset_max_memory_allocated": _nothing(),
        "empty_cache": _nothing(),
        "ipc_collect": _nothing(),
        "synchronize": _nothing(),
        "_sleep": _nothing(),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed) and None,
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed) and None,
        "get_rng_state": lambda *_: torch.default_generator.get_state(),
        "set_rng_state": lambda state, *_: torch.default_generator.set_state(state) and None,
        "Stream": Stream,
        "ExternalStream": lambda pointer, device=None: Stream(stream_ptr=pointer),
        "stream": lambda stream: stream if stream is not None else contextlib.nullcontext(),
        "set_stream": _set_stream,
        "current_stream": lambda *_: _state.stream,
        "default_stream": lambda *_: DEFAULT,
        "Event": Event,
        "CUDAGraph": graph,
        "graph": _graph_context(propagation),
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: propagation.capturing is not None,
    }
