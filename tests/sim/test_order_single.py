"""Memory order: what is found at a single access, not at a pair: counts of a named barrier, padding of the storage."""

import pytest
from helpers.order_kernels import START, run

from warpspec import sim


@pytest.mark.parametrize("seed", range(4))
def test_a_named_barrier_of_too_few_threads(seed):
    """Three warps use a barrier of two: the third waits for ever, or its arrival is left when the CTA ends."""
    body = START + "setp.eq.u32 %p3, %r2, 2; @%p3 bar.arrive 1, COUNT; @!%p3 bar.sync 1, COUNT;"
    assert not run(body.replace("COUNT", "96"), seed, block=(96, 1, 1)).warnings
    try:
        found = run(body.replace("COUNT", "64"), seed, block=(96, 1, 1)).warnings[0]
    except sim.Deadlock as error:
        found = str(error)
    assert "warps 0, 1, 2 use it, 96 threads; it is of 64" in found or "32 of 64 threads" in found


def test_accesses_to_padding_of_the_storage():
    start = -8192  # of `sm`: offsets count from dynamic memory, which is behind it
    scale, tile = ("scale", 128, start), ("tile", 1024, start + 1024)
    good = START + "st.shared.u32 [%r12], %r1; @%p1 st.shared.u32 [%r10+1024], 0; @%p1 "
    stray = "ld.shared.u32 %r4, [%r10+144];"
    fields = (scale, ("", 1024 - 128, start + 128), tile)
    assert not run(
        good + stray, storage=(scale, tile)
    ).warnings  # which may be an allocation that has no name
    assert not run(good + "st.shared.u32 [%r10+1028], 0;", storage=fields).warnings
    for access in (stray, "st.shared.u32 [%r10+144], 0;"):
        with pytest.raises(
            sim.OrderError, match="padding between two fields: shared memory, 16 bytes after `scale`"
        ):
            run(good + access, storage=fields)
