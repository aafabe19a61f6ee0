"""The timing model on kernels of a few lines, whose time follows from the table of constants."""

import numpy as np
import pytest
from helpers.ptx_launch import launch

from warpspec import sim
from warpspec.sim.clocks import record, waves
from warpspec.sim.clocks.chips import CHIPS, chip
from warpspec.sim.clocks.constants import HIGH
from warpspec.sim.clocks.pool import Pool
from warpspec.sim.clocks.record import chosen_clusters
from warpspec.sim.clocks.replay import Replay
from warpspec.sim.clocks.servers import Sm
from warpspec.sim.clocks.waves import Grid, residency
from warpspec.sim.report import SimReport

H200 = chip("h200")
STORE = "st.global.b32 [%rd1], %f0;"
BEGIN = "ld.param.u64 %rd1, [out]; mov.b32 %f0, 0f3F800000; mov.b32 %f1, 0f3F000000;"


def trace_of(body: str, *, out: int = 4096, **options):
    """The trace of a kernel that has one array, `out`."""
    options = {"target": "sm_90a", **options}
    with sim.recording(options.pop("sample", None)):
        return launch(BEGIN + body, {"out": np.zeros(out, np.float32)}, **options).trace


def replayed(body: str, **options) -> float:
    """Clocks of the kernel's first CTA alone on an SM."""
    trace = trace_of(body, **options)
    return Replay(trace, [[(trace.ctas[0], 0)]], H200).run().clocks


def per_instruction(line: str, **options) -> float:
    """Clocks by which each of further instructions lengthens a kernel."""
    few, many = 64, 192
    return (replayed(line * many + STORE, **options) - replayed(line * few + STORE, **options)) / (many - few)


@pytest.mark.parametrize(
    ("line", "clocks"),
    [
        ("fma.rn.f32 %f0, %f0, %f1, %f1;", 4),  # a chain: the latency
        ("ex2.approx.ftz.f32 %f0, %f0;", 17),
        ("fma.rn.f32 %f2, %f0, %f1, %f1; fma.rn.f32 %f3, %f0, %f1, %f1;", 2),  # independent: the issue slot
        ("max.f32 %f2, %f0, %f1; max.f32 %f3, %f0, %f1;", 4),  # the ALU takes two clocks each
        ("ex2.approx.ftz.f32 %f2, %f0; fma.rn.f32 %f3, %f0, %f1, %f1;", 8),  # MUFU hides the FMA
        ("mov.b32 %f2, %f3;", 0),
    ],
)
def test_one_warp(line, clocks):
    assert per_instruction(line) == pytest.approx(clocks, abs=0.1)


def test_warps_of_a_scheduler_share_its_pipes():
    line = "ex2.approx.ftz.f32 %f2, %f0;"
    assert per_instruction(line, block=(128, 1, 1)) == pytest.approx(8, abs=0.1)  # four schedulers
    assert per_instruction(line, block=(256, 1, 1)) == pytest.approx(16, abs=0.2)  # two warps on each


def test_shared_memory_is_one_for_all_schedulers():
    line = "st.shared.v4.b32 [sm], {%f0, %f1, %f0, %f1};"
    assert per_instruction(line) == pytest.approx(10, abs=0.2)  # one warp does not reach the SM's rate
    # 512 bytes of 128 a clock, each.
    assert per_instruction(line, block=(256, 1, 1)) == pytest.approx(8 * 4, abs=0.5)


def test_a_wait_lasts_until_the_slowest_arrival():
    """Warp 0 waits at a barrier for warp 1, which computes for long; the critical path says so."""
    body = (
        """
      mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra MEET;
      """
        + "fma.rn.f32 %f0, %f0, %f1, %f1;" * 500
        + "MEET: bar.sync 0, 64;"
        + STORE
    )
    trace = trace_of(body, block=(64, 1, 1))
    result = Replay(trace, [[(trace.ctas[0], 0)]], H200).run()
    waited = sum(span.end - span.start for span in result.spans[0] if span.unit == "barrier")
    assert 2000 < waited < result.clocks < 2150
    assert not any(span.unit == "barrier" and span.end - span.start > 30 for span in result.spans[1])


LOAD = """
  mov.b32 %r1, sm; mov.u32 %r2, %tid.x; setp.ne.u32 %p1, %r2, 0; @%p1 bra OUT;
  mbarrier.init.shared::cta.b64 [%r1], 1; fence.mbarrier_init.release.cluster; mov.b32 %r3, 0; add.s32 %r4, %r1, 128;
"""
COPY = """
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {n};
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd1], {n}, [%r1];
W{i}: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], {parity}; @!%p2 bra W{i};
"""


def copies(count: int, nbytes: int) -> str:
    return LOAD + "".join(COPY.format(n=nbytes, i=i, parity=i % 2) for i in range(count)) + "OUT:"


def test_a_copy_takes_its_latency():
    first, second = (replayed(copies(count, 2048)) for count in (1, 2))
    near = H200.clocks("tma_l2_latency")  # the second one's data is in L2
    assert first > H200.clocks("tma_hbm_latency")
    assert near < second - first < near + 250


def test_recorded_instructions_are_those_that_ran():
    """Blocks and steps of all traces together are the report's instructions."""
    body = "mov.u32 %r1, %ctaid.x; mov.b32 %r2, 0;\nAGAIN: bar.sync 0;" + "add.f32 %f0, %f0, %f1;" * 5
    body += "add.s32 %r2, %r2, 1; setp.le.s32 %p1, %r2, %r1; @%p1 bra AGAIN;" + STORE
    with sim.recording(None):
        report = launch(
            body := BEGIN + body, {"out": np.zeros(64, np.float32)}, grid=(3, 1, 1), block=(64, 1, 1)
        )
    blocks = report.trace.program.blocks
    count = 0
    for cta in report.trace.ctas:
        for entries in cta.warps:
            for entry in entries:
                index = entry if type(entry) is int else entry[0] if type(entry) is tuple else None
                count += (
                    1
                    if index is None
                    else 0
                    if index == len(blocks)
                    else blocks[index].end - blocks[index].start
                )
    assert count == report.warp_instructions
    assert [cta.number for cta in report.trace.ctas] == [0, 1, 2]
    plain = launch(body, {"out": np.zeros(64, np.float32)}, grid=(3, 1, 1), block=(64, 1, 1))
    assert plain.trace is None
    assert plain.opcodes == report.opcodes


def test_a_sample_runs_no_other_clusters():
    out = np.zeros(8, np.float32)
    with sim.recording(2):
        body = BEGIN + "mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;" + STORE
        report = launch(body, {"out": out}, grid=(8, 1, 1))
    assert out.tolist() == [1, 0, 0, 0, 0, 0, 0, 1]
    assert [cta.number for cta in report.trace.ctas] == [0, 7]
    assert report.trace.sampled


def test_chosen_clusters():
    assert chosen_clusters(3, None) == chosen_clusters(3, 9) == [0, 1, 2]
    assert chosen_clusters(100, 3) in ([0, 99, 50], [0, 99, 49])
    assert chosen_clusters(100, 1) == [0]
    order = chosen_clusters(1000, 17)
    assert len(set(order)) == 17 and order[:2] == [0, 999]
    assert max(np.diff(sorted(order[:9]))) < 300  # half of them are spread over the grid, too


def test_waves():
    """A grid that the GPU holds at once, and one CTA more, which takes another round."""
    body = "fma.rn.f32 %f0, %f0, %f1, %f1;" * 1000 + STORE
    shared = ".shared .align 128 .b8 sm[49152];"
    held = 132 * 4
    one, two = (
        Grid(trace_of(body, grid=(n, 1, 1), variables=shared, sample=2), H200, cold=False).predict(H200)
        for n in (held, held + 1)
    )
    assert one.ctas_an_sm == 4
    rounds = (two.clocks - two.overhead) / (one.clocks - one.overhead)
    assert 1.9 < rounds < 2.3  # CTAs that share an SM begin one after the other


def test_uneven_ctas_of_a_large_grid():
    """CTAs that run the longer the later they come take as long as their sum, not as those that were recorded."""
    body = "mov.u32 %r1, %ctaid.x;\nLOOP:\n" + "fma.rn.f32 %f0, %f0, %f1, %f1;\n" * 8
    body += "sub.s32 %r1, %r1, 1;\nsetp.ge.s32 %p1, %r1, 0;\n@%p1 bra LOOP;\n" + STORE
    shared = ".shared .align 128 .b8 sm[204800];"
    grid = 132 * 2
    few, many = (
        Grid(trace_of(body, grid=(grid, 1, 1), variables=shared, sample=n), H200, cold=False).predict(H200)
        for n in (3, 9)
    )
    assert few.clocks == pytest.approx(many.clocks, rel=0.05)


def test_a_long_trace_is_cut_and_the_rest_counted(monkeypatch):
    """A loop's clocks follow from a part of its trace and the number of its steps."""
    body = "mov.b32 %r1, 0;\nLOOP:\n" + "fma.rn.f32 %f0, %f0, %f1, %f1;\n" * 40
    body += "bar.sync 0;\nadd.s32 %r1, %r1, 1;\nsetp.lt.s32 %p1, %r1, 300;\n@%p1 bra LOOP;\n" + STORE
    options = {"grid": (8, 1, 1), "block": (64, 1, 1), "sample": 3}
    whole = trace_of(body, **options)
    monkeypatch.setattr(record, "ENOUGH", 200)
    cut = trace_of(body, **options)
    assert [(cta.number, cta.steps, cta.more_steps) for cta in whole.ctas] == [(n, 600, 0) for n in (0, 7, 4)]
    assert [(cta.number, cta.steps, cta.more_steps) for cta in cut.ctas] == [(0, 200, 400)]
    clocks = [Grid(trace, H200, False, False).predict(H200).clocks for trace in (whole, cut)]
    assert clocks[1] == pytest.approx(clocks[0], rel=0.02)
    monkeypatch.setattr(waves, "MOST_STEPS", 100)
    assert Grid(whole, H200, False, False).predict(H200).clocks == pytest.approx(clocks[0], rel=0.02)


def test_operands_of_wgmma_go_first_in_shared_memory():
    """Stores that fill shared memory get what a wgmma's operands leave, and do not slow it down."""
    pool = Pool(1, 0.9, 1.0)
    # A wgmma m64n128 with both operands in shared memory: 48 of 64 clocks.
    product = [0.0, 0.0, 0.0, 0.0, 0.0, 64.0, 12.0, 0.0]
    for scheduler in range(4):
        pool.add(0.0, scheduler, 0, scheduler, 64.0, product)
        pool.add(0.0, 4 + scheduler, 0, scheduler, 100.0, [0.0, 0.0, 0.0, 0.0, 25.0, 0.0, 0.0, 0.0])
    for _ in range(4):
        assert pool.next_end() == pytest.approx(64.0) and pool.take(64.0) < 4
    done = 64.0 * (1 - 0.9 * 0.75)
    assert pool.next_end() == pytest.approx(64.0 + 100.0 - done)


def test_additions_hold_up_accesses_by_lanes():
    sm = Sm(H200, 0.0, False, 1.0, 0.0)
    sm.store_by_lanes(0.0, 0, 1 << 20)
    rate = H200.clocks("l2_add_bytes") / 132
    assert sm.lanes_wait(10.0) == pytest.approx(((1 << 20) - H200.clocks("add_buffer")) / rate)
    assert sm.lanes_wait(1e6) == 1e6


def test_sms_that_load_the_same_bytes_share_l2():
    alone, shared = (Sm(H200, 0.0, False, 1.0, 0.0, sharers).others[1] for sharers in (1, 16))
    assert alone == pytest.approx(H200.clocks("l2_bytes") / 132)
    assert shared == pytest.approx(H200.clocks("l2_shared_bytes") / 132)


def test_code_is_streamed_or_asked_for():
    sm, line, latency = (
        Sm(H200, 0.0, True, 1.0, 0.0),
        H200.clocks("code_line"),
        H200.clocks("code_hbm_latency"),
    )
    assert sm.fetch(0.0, 0, 10) == pytest.approx(10 * line)  # sooner than a block that is asked for
    assert sm.fetch(0.0, 100, 102) == latency
    block = int(H200.clocks("code_block"))
    assert sm.fetch(latency, 103, 99 + block) == latency
    assert sm.fetch(9000.0, 400, 510) == 9000.0  # the stream has passed
    beyond = int(H200.clocks("code_streamed_kb")) * 8
    assert sm.fetch(9000.0, beyond, beyond) == 9000.0 + latency
    sm.load(0.0, 1 << 20)
    behind = H200.clocks("code_behind_loads") * sm.memory_free
    assert sm.fetch(0.0, 2 * beyond, 2 * beyond) == pytest.approx(latency + behind)


def test_a_small_kernels_code_stays_from_call_to_call():
    small, large = (Sm(H200, 0.0, False, 1.0, 0.0, code_bytes=kb << 10) for kb in (100, 200))
    assert not small.fetches and large.fetches
    assert large.fetch(0.0, 0, 0) == H200.clocks("code_latency")


def test_residency_names_its_limit():
    trace = trace_of(STORE, block=(256, 1, 1), registers=128)
    assert (residency(trace).ctas, residency(trace).limit) == (2, "registers")


def test_interval_and_what_if():
    trace = trace_of(copies(4, 2048))
    report = SimReport([launch_report(trace)])
    found = report.clocks("h200").launches[0]
    assert found.low < found.clocks < found.high
    slower = report.clocks(H200.with_constants(tma_l2_latency=5000)).launches[0]
    assert slower.clocks > found.clocks + 3 * 4000
    assert all(
        c.confidence is not HIGH or H200.varied(1.2).table[n].value == c.value for n, c in H200.table.items()
    )


def launch_report(trace):
    """A report of one launch that has nothing but a trace."""
    from types import SimpleNamespace

    return SimpleNamespace(trace=trace)


def test_errors():
    trace = trace_of(STORE)
    with pytest.raises(ValueError, match=r"chip is 'a100'; one of h100, h200, b200, b300"):
        SimReport([launch_report(trace)]).clocks("a100")
    with pytest.raises(TypeError, match="chip is 5; a name or a Chip is needed"):
        SimReport([launch_report(trace)]).clocks(5)
    with pytest.raises(ValueError, match="compiled for sm_90a"):
        SimReport([launch_report(trace)]).clocks("b200")
    with pytest.raises(ValueError, match="not recorded"):
        SimReport([launch_report(None)]).clocks("h200")
    for bad in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="sample"), sim.recording(bad):
            pass


def test_chips_have_the_same_constants():
    hopper, blackwell = (
        {frozenset(CHIPS[n].table) for n in names} for names in (("h100", "h200"), ("b200", "b300"))
    )
    assert len(hopper) == len(blackwell) == 1
    assert all(c.source for one in CHIPS.values() for c in one.table.values())
