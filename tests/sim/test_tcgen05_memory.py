"""Allocation of tensor memory: sizes, blocking, permits, leaks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpspec.sim.errors import TmemFault
from warpspec.sim.tcgen05.memory import COLUMNS, POISON, Tmem, address_parts


def test_allocations_are_disjoint_and_released():
    tmem = Tmem()
    assert [tmem.allocate(n) for n in (256, 128, 128)] == [0, 256, 384]
    assert tmem.allocate(32) is None
    tmem.deallocate(256, 128)
    assert tmem.allocate(128) == 256
    assert tmem.peak_columns == 512
    for first, columns in ((0, 256), (256, 128), (384, 128)):
        tmem.deallocate(first, columns)
    assert tmem.allocated_columns == 0 and tmem.peak_columns == 512


@given(st.lists(st.sampled_from([32, 64, 128, 256, 512]), max_size=20), st.randoms())
def test_random_allocation_never_overlaps(sizes, random):
    tmem, live = Tmem(), {}
    for columns in sorted(sizes, reverse=True):
        first = tmem.allocate(columns)
        while first is None:
            victim = random.choice(sorted(live))
            tmem.deallocate(victim, live.pop(victim))
            first = tmem.allocate(columns)
        span = set(range(first, first + columns))
        assert max(span) < COLUMNS
        assert all(span.isdisjoint(range(f, f + n)) for f, n in live.items())
        live[first] = columns
        assert tmem.allocated_columns == sum(live.values())


def test_new_memory_is_poison():
    tmem = Tmem()
    first = tmem.allocate(64)
    assert (tmem.data == POISON).all()
    tmem.data[:, :64] = 7
    tmem.deallocate(first, 64)
    tmem.allocate(32)
    assert (tmem.data[:, :32] == POISON).all()
    assert np.isnan(tmem.data[:, :32].view(np.float32)).all()


@pytest.mark.parametrize("columns", [0, 16, 33, 48, 96, 1024])
def test_sizes_are_powers_of_two_from_32(columns):
    with pytest.raises(TmemFault, match="powers of two"):
        Tmem().allocate(columns)


def test_misuse():
    tmem = Tmem()
    tmem.allocate(64)
    with pytest.raises(TmemFault, match="must not increase"):
        tmem.allocate(128)
    with pytest.raises(TmemFault, match=r"no tcgen05\.alloc returned"):
        tmem.deallocate(32, 32)
    with pytest.raises(TmemFault, match="allocated with 64"):
        tmem.deallocate(0, 32)
    with pytest.raises(TmemFault, match="not all of them allocated; allocated columns: 0-63"):
        tmem.require(60, 8, "test")
    with pytest.raises(TmemFault, match="there are 512"):
        tmem.require(510, 4, "test")
    tmem.relinquish()
    with pytest.raises(TmemFault, match="relinquish"):
        tmem.allocate(32)
    tmem.use_cta_group(1)
    with pytest.raises(TmemFault, match=r"cta_group::2 after \.cta_group::1"):
        tmem.use_cta_group(2)


def test_addresses():
    assert address_parts(0x00400123) == (0x40, 0x123)
    assert address_parts(0xC0000010) == (0, 0x10), "the top bits select a scale factor's byte"
