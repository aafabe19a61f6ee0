"""Dependent launches under check="order": what a grid touches before griddepcontrol.wait, beside an earlier one."""

import struct

import numpy as np
import pytest
from helpers.ptx_launch import HEADER

from warpspec import sim
from warpspec.sim.memory import GlobalMemory, HostRegion
from warpspec.sim.order.launches import OVERLAP, Stream
from warpspec.sim.runtime import execute

START = """
  mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; shl.b32 %r3, %r1, 2; cvt.u64.u32 %rd3, %r3; shr.u32 %r4, %r1, 5;
  ld.param.u64 %rd1, [a]; add.u64 %rd1, %rd1, %rd3; ld.param.u64 %rd2, [b]; add.u64 %rd2, %rd2, %rd3;
"""
BEGIN, WAIT = "griddepcontrol.launch_dependents;\n", "griddepcontrol.wait;\n"
READ_A, WRITE_A = "ld.global.u32 %r5, [%rd1];\n", "st.global.u32 [%rd1], %r1;\n"
WRITE_B = "st.global.u32 [%rd2], %r1;\n"
FENCE = "fence.acq_rel.gpu;\n"
WARP_0_WAITS = "setp.eq.u32 %p1, %r4, 0;\n@%p1 griddepcontrol.wait;\nbar.sync 0;\n"


def chain(*bodies: str, apart: bool = False, dependent_first: bool = False) -> list[str]:
    """Run kernels in one stream, all but the first dependent; the kinds of findings. apart: each has memory of its own
    that stands for the same tensors, as runs of their own have."""
    stream, tensors = Stream(), [np.zeros(64, np.uint32) for _ in range(2)]

    def staged() -> GlobalMemory:
        memory = GlobalMemory()
        lows = [t.ctypes.data for t in tensors]
        memory.stage(HostRegion(low, low + 256, name, low) for low, name in zip(lows, "ab", strict=True))
        return memory

    memory, found = staged(), []
    for i, body in enumerate(bodies):
        memory = staged() if apart else memory
        addresses = struct.pack("<2Q", *(memory.device_address(t.ctypes.data) for t in tensors))
        text = HEADER.format(variables="", parameters=".param .u64 a, .param .u64 b", body=START + body)
        overlap = stream.next(dependent=i > 0 or dependent_first)
        try:
            options = dict(grid=(1, 1, 1), block=(64, 1, 1), params=addresses, gmem=memory)
            execute(text, "kernel", **options, check="order", overlap=overlap)
        except sim.OrderError as error:
            found += [finding.kind for finding in error.findings]
    return found


@pytest.mark.parametrize("apart", [False, True])
def test_what_a_launch_touches_before_it_waits(apart):
    writer = BEGIN + WRITE_A
    assert chain(writer, READ_A + WAIT, apart=apart) == [OVERLAP]
    assert chain(writer, WAIT + READ_A, apart=apart) == []
    assert chain(BEGIN + READ_A, WRITE_A + WAIT, apart=apart) == [OVERLAP]
    assert chain(BEGIN + READ_A, READ_A, apart=apart) == []


def test_a_look_ahead_of_the_wait_is_taken_again_behind_it():
    """What a strong read finds too early does not count, if its CTA reads the place again behind the wait."""
    look, writer = "ld.relaxed.gpu.global.u32 %r5, [%rd1];\n", BEGIN + WRITE_A
    for again in (look, READ_A):
        assert chain(writer, look + WAIT + again) == []
        assert set(chain(writer, look + again)) == {OVERLAP}
    assert chain(writer, look + WAIT) == [OVERLAP]
    assert chain(writer, look + WAIT + "setp.gt.u32 %p1, %r1, 9;\n@%p1 " + look) == [OVERLAP]
    assert chain(writer, READ_A + WAIT + READ_A) == [OVERLAP]
    assert chain(BEGIN + look + WAIT + WRITE_A, dependent_first=True) == [OVERLAP]
    assert chain(BEGIN + look + WAIT + look + WRITE_A, dependent_first=True) == []
    assert chain(BEGIN + WRITE_A.replace("st.", "st.relaxed.gpu."), look + WAIT) == []


def test_without_launch_dependents_nothing_overlaps():
    assert chain(WRITE_A, READ_A) == []


def test_a_barrier_hands_the_wait_on():
    assert chain(BEGIN + WRITE_A, WARP_0_WAITS + READ_A) == []
    assert chain(BEGIN + WRITE_A, WARP_0_WAITS.replace("bar.sync 0;", "") + READ_A) == [OVERLAP]


def test_a_release_fence_before_launch_dependents():
    assert chain(WRITE_A + FENCE + BEGIN, READ_A) == []
    assert chain(WRITE_A + BEGIN + FENCE, READ_A) == [OVERLAP]


def test_a_wait_covers_the_launch_before_and_those_that_it_waited_for():
    writer, last = BEGIN + WRITE_A, WAIT + READ_A
    assert chain(writer, BEGIN + WRITE_B, last) == [OVERLAP]
    assert chain(writer, BEGIN + WAIT + WRITE_B, last) == []
    # The third begins once all of the second have passed launch_dependents: after the wait, or ahead of it.
    assert chain(writer, WAIT + BEGIN + WRITE_B, READ_A) == []
    assert chain(writer, BEGIN + WAIT + WRITE_B, READ_A) == [OVERLAP]


def test_a_launch_alone_is_held_against_itself():
    assert chain(BEGIN + WRITE_A, dependent_first=True) == [OVERLAP]
    assert chain(WAIT + BEGIN + WRITE_A, dependent_first=True) == []
    assert chain(BEGIN + READ_A + WAIT + WRITE_B, dependent_first=True) == []
