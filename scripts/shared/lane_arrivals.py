"""Kernels in which every lane of a warp arrives at an mbarrier, for tools that do not follow a warp's one arrival.

A warp hands a buffer over by ``__syncwarp`` and the arrival of one lane. compute-sanitizer's racecheck (CUDA 13.0)
takes that as the order of one lane's accesses alone, and reports those of the other lanes as races, in a textbook
kernel of CUDA C++, too (docs/debug_a_kernel.md). Here each lane arrives for itself, and what arrived once arrives 32
times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import cutlass.cute as cute

from warpspec.common.device import pipeline
from warpspec.common.hardware import WARP_THREADS

ARRIVE = "mbarrier.arrive.release.{scope}.shared::{space}.b64 _, [{address}], {count};"
traced: list[
    str
] = []  # the arrivals' PTX, of kernels compiled in this process: none where a kept kernel was loaded
MAP = "mapa.shared::cluster.u32 remote, {$r0}, {$r1};"


def arrive_times(barrier: cute.Pointer, count: int, rank=None) -> None:
    """``count`` arrivals by each calling thread, on CTA ``rank``'s barrier where given."""
    if rank is None:
        code = ARRIVE.format(scope="cta", space="cta", address="{$r0}", count=count)
        traced.append(code)
        cute.arch.inline_ptx(code, read_only_args=[barrier.toint()])
    else:
        code = ARRIVE.format(scope="cluster", space="cluster", address="remote", count=count)
        cute.arch.inline_ptx(f"{{ .reg .b32 remote; {MAP} {code} }}", read_only_args=[barrier.toint(), rank])


class Channel(pipeline.Channel):
    """The methods that take the place of ``pipeline.Channel``'s."""

    def arrive(self, use):
        arrive_times(self.barrier(use), WARP_THREADS)

    def arrive_in(self, rank, use, *, has_read=False):
        arrive_times(self.barrier(use), WARP_THREADS, rank)

    def arrive_behind_collective(self, use, rank=None):
        arrive_times(self.barrier(use), 1, rank)

    def expect_bytes(self, use, transaction_bytes):
        with cute.arch.elect_one():
            arrive_times(self.barrier(use), WARP_THREADS - 1)
            cute.arch.mbarrier_arrive_and_expect_tx(self.barrier(use), transaction_bytes)


@contextmanager
def every_lane_arrives() -> Iterator[None]:
    """A context in which kernels are compiled so. Kernels whose tcgen05.commit arrives by itself hang."""
    initialise = pipeline._init

    def init(table, channels) -> None:
        initialise(
            tuple(dataclasses.replace(row, arrivals=row.arrivals * WARP_THREADS) for row in table), channels
        )

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(pipeline, "_init", init))
        for name in ("arrive", "arrive_in", "arrive_behind_collective", "expect_bytes"):
            stack.enter_context(mock.patch.object(pipeline.Channel, name, getattr(Channel, name)))
        yield
