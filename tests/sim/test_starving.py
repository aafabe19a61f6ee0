"""Schedules that starve find what uniformly random ones miss."""

import numpy as np
import pytest
import torch
from gemm_cases import GemmCase, inputs_of, poisoned_out
from ptx_launch import launch
from shared import mutants

from warpspec import sim
from warpspec.moe.sm100 import grouped_gemm
from warpspec.moe.sm100.config import SINGLE
from warpspec.sim import runtime
from warpspec.sim.starving import starves

ORDINARY = [seed for seed in range(16) if not starves(seed)]
LATE = """
  mov.b32 %r10, sm; mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [out]; shr.u32 %r2, %r1, 5; setp.eq.u32 %p1, %r2, 0;
  @%p1 bra FIRST;
  mov.b32 %r3, 0;
AGAIN: bar.sync 1, 32; add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 300; @%p2 bra AGAIN;
  ld.shared.u32 %r4, [%r10]; st.global.u32 [%rd1], %r4; bra END;
FIRST: mov.b32 %r4, 7; st.shared.u32 [%r10], %r4;
END:
"""


def late_reader(seed: int) -> int:
    """A warp reads what another one has written long before, unless that one does not get a turn."""
    out = np.zeros(1, np.uint32)
    launch(LATE, {"out": out}, block=(64, 1, 1), seed=seed)
    return int(out[0])


def test_a_reader_that_happens_to_be_late_is_found_among_eight_seeds():
    assert {late_reader(seed) for seed in ORDINARY} == {7}
    assert {late_reader(seed) for seed in range(8)} == {7, 0xFFFFFFFF}


def test_a_warp_that_spins_lets_the_one_go_that_it_waits_for():
    spin = """
  mov.b32 %r10, sm; mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; setp.eq.u32 %p1, %r2, 0; st.shared.u32 [%r10], 0;
  bar.sync 0; @%p1 bra SET;
WAIT: ld.volatile.shared.u32 %r3, [%r10]; setp.ne.u32 %p2, %r3, 1; @%p2 bra WAIT;
  bra END;
SET: mov.b32 %r3, 1; st.volatile.shared.u32 [%r10], %r3;
END:
"""
    for seed in range(1, 40, 2):
        launch(spin, block=(128, 1, 1), seed=seed)


def test_warps_of_one_index_that_spin_let_each_other_go():
    """A barrier of a grid's CTAs, on which one warp of each spins: with one priority for them, too."""
    spin = """
  ld.param.u64 %rd1, [count]; mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra END;
  atom.global.add.u32 %r2, [%rd1], 1;
WAIT: ld.volatile.global.u32 %r3, [%rd1]; setp.ne.u32 %p2, %r3, 6; @%p2 bra WAIT;
END:
"""
    for seed in range(1, 40, 2):
        launch(spin, {"count": np.zeros(1, np.uint32)}, grid=(6, 1, 1), block=(64, 1, 1), seed=seed)


class Recorded(mutants.Launch):
    """A launch whose program does not log: the order checker has no part in what is found."""

    def __init__(self, other: mutants.Launch):
        super().__init__(other.text, other.kernel, dict(other.options))
        self.program = runtime.load_program(self.text, self.kernel, False)


@pytest.mark.long
def test_deleted_waits_of_the_grouped_gemm():
    """Random schedules miss three of its waits, eight seeds of both kinds find two or three of them: the MMA warp's for
    an accumulator that the epilogue has read, the load warp's and the MMA warp's for their next tile's record."""
    case = GemmCase("", counts=(5, 0, 130, 70, 40, 33, 150), k=600, width=200, dropped=1, epilogue="linear")
    inputs, found = inputs_of(case, 0), []
    torch.manual_seed(0)
    with mutants.recorded(found.append):
        options = dict(epilogue="linear", limit=None, out_scale=inputs.out_scale, shape=SINGLE, groups=1)
        grouped_gemm(inputs.a, inputs.w, inputs.offsets, poisoned_out(case), **options)
    decisive, _ = mutants._decisive(found[0], seeds=1)
    run = Recorded(found[0])
    right = run.run(run.program, 0, None)

    def shows(mutant, seed):
        try:
            with mutants._time_limit(mutants.SECONDS):
                result = run.run(mutants.apply(run.program, mutant), seed, None)
        except (sim.SimError, TimeoutError):
            return True
        return any(mutants._wrong(*arrays) for arrays in zip(result, right, run.memory, strict=True))

    waits = [
        m
        for m in mutants.mutants(run.program.kernel.instrs)
        if m.opcode == mutants.TRUE and m.index in decisive
    ]
    missed = [m for m in waits if not any(shows(m, seed) for seed in ORDINARY)]
    assert sum(any(shows(m, seed) for seed in range(8)) for m in missed) >= 2
