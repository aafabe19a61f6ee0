"""Schedules that starve find what uniformly random ones miss."""

import numpy as np
import pytest
import torch
from helpers.gemm_cases import GemmCase, inputs_of, poisoned_out
from helpers.ptx_launch import launch
from shared import mutant_launches, mutants
from shared.mutant_matters import decisive

from warpspec import sim
from warpspec.moe.sm100 import grouped_gemm
from warpspec.moe.sm100.config import SINGLE
from warpspec.sim import runtime
from warpspec.sim.starving import starved

ORDINARY = [seed for seed in range(64) if starved(seed) is None]
POISON = 0xFFFFFFFF
BEGIN = """
  mov.b32 %r10, sm; mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [out];
  mov.u32 %r2, %ctaid.x; mul.wide.u32 %rd3, %r2, 16; add.u64 %rd2, %rd2, %rd3;
"""
LATE = """
  shr.u32 %r2, %r1, 5; setp.eq.u32 %p1, %r2, 0; @%p1 bra FIRST;
  mov.b32 %r3, 0;
AGAIN: bar.sync 1, 32; add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 300; @%p2 bra AGAIN;
  ld.shared.u32 %r4, [%r10]; st.global.u32 [%rd2], %r4; bra END;
FIRST: mov.b32 %r4, 7; st.shared.u32 [%r10], %r4;
END:
"""


WHILE = "mov.b32 %r3, 0;\nAGAIN: bar.sync 1, 32; add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 300; @%p2 bra AGAIN;\n"
LOAD = """
  setp.ne.u32 %p1, %r1, 0; @%p1 bra ALL;
  mbarrier.init.shared.b64 [%r10+64], 1; fence.proxy.async.shared::cta;
  mbarrier.arrive.expect_tx.shared.b64 _, [%r10+64], 16;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r10], [%rd1], 16, [%r10+64];
ALL: bar.sync 0;
"""
READ = "ld.shared.u32 %r4, [%r10]; st.global.u32 [%rd2], %r4;\n"
UNTIL = "WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r10+64], 0;"
STORE = """
  setp.ne.u32 %p1, %r1, 0; st.shared.u32 [%r10], 7; fence.proxy.async.shared::cta; bar.sync 0; @%p1 bra ALL;
  cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r10], 16; cp.async.bulk.commit_group;
ALL:
"""
# What a CTA does, its threads, CTAs, what comes of it with luck, what comes of it without.
DEFECTS = {
    "a warp reads what another one has written long before": (LATE, 64, 1, 7, POISON),
    "a load is not waited for, and used long after": (f"{LOAD} {WHILE} {READ}", 32, 1, 7, POISON),
    "a wait is not tried again": (f"{LOAD} {UNTIL} {READ}", 32, 4, 7, POISON),
    "a buffer is written long after its store, which is not waited for": (
        f"{STORE} {WHILE} st.shared.u32 [%r10], 9; cp.async.bulk.wait_group 0;",
        32,
        1,
        7,
        9,
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_what_goes_well_by_luck_is_found_among_eight_seeds(name: str):
    body, threads, ctas, lucky, unlucky = DEFECTS[name]

    def results(seeds) -> set[int]:
        found = set()
        for seed in seeds:
            memory = {"x": np.full(4, 7, np.uint32), "out": np.zeros((ctas, 4), np.uint32)}
            launch(BEGIN + body, memory, grid=(ctas, 1, 1), block=(threads, 1, 1), seed=seed)
            found |= {int(value) for value in memory["out"][:, 0]}
        return found

    assert results(ORDINARY) == {lucky}
    assert results(range(8)) == {lucky, unlucky}


def test_operations_are_not_starved_for_ever_where_many_warps_spin():
    """A warp goes behind the operations once it has spun for a while; these are starved again before all warps have."""
    body = f"{LOAD} {UNTIL} @!%p2 bra WAIT; {READ}"
    for seed in (4, 10):
        memory = {"x": np.full(4, 7, np.uint32), "out": np.zeros((8, 4), np.uint32)}
        launch(BEGIN + body, memory, grid=(8, 1, 1), block=(1024, 1, 1), seed=seed)
        assert (memory["out"][:, 0] == 7).all()


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


class Recorded(mutant_launches.Launch):
    """A launch whose program does not log: the order checker has no part in what is found."""

    def __init__(self, other: mutant_launches.Launch):
        super().__init__(other.text, other.kernel, dict(other.options))
        self.program = runtime.load_program(self.text, self.kernel, False)


@pytest.mark.long
def test_deleted_waits_of_the_grouped_gemm():
    """Random schedules miss four of its waits. The first eight seeds of both kinds find three of them; if bounded waits
    gave up seven times of eight under all seeds, they would find one."""
    case = GemmCase("", counts=(5, 0, 130, 70, 40, 33, 150), k=600, width=200, dropped=1, epilogue="linear")
    inputs, found = inputs_of(case, 0), []
    torch.manual_seed(0)
    with mutant_launches.recorded(found.append):
        options = dict(epilogue="linear", limit=None, out_scale=inputs.out_scale, shape=SINGLE, groups=1)
        grouped_gemm(inputs.a, inputs.w, inputs.offsets, poisoned_out(case), **options)
    executed, _ = decisive(found[0], seeds=1)
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
        if m.opcode == mutants.TRUE and m.index in executed
    ]
    missed = [m for m in waits if not any(shows(m, seed) for seed in ORDINARY)]
    assert sum(any(shows(m, seed) for seed in range(8)) for m in missed) >= 3
