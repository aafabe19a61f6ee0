"""What a grid shares in the timing model: HBM by tensor, SMs in and out of step, work from a queue."""

import numpy as np
import pytest
from helpers.ptx_launch import launch

from warpspec import sim
from warpspec.sim.clocks.chips import chip
from warpspec.sim.clocks.replay import Replay
from warpspec.sim.clocks.servers import Sm
from warpspec.sim.clocks.taking import Taken, last_end, last_share, taken_of
from warpspec.sim.clocks.waves import Grid

H100 = chip("h100")
STEADY = H100.with_constants(hbm_start_mb=0.0)  # HBM has its full rate from the start
QUEUE = (
    """
  ld.param.u64 %rd1, [out]; mov.u32 %r1, %ctaid.x; mov.b32 %f0, 0f3F800000; mov.b32 %f1, 0f3F000000;
  setp.lt.u32 %p3, %r1, {others}; @%p3 bra OUT;
NEXT:
  setp.ge.s32 %p1, %r1, {pieces}; @%p1 bra OUT; mov.b32 %r3, {steps};
WORK:
  bar.sync 0;
"""
    + "fma.rn.f32 %f0, %f0, %f1, %f1;" * 100
    + """
  sub.s32 %r3, %r3, 1; setp.gt.s32 %p2, %r3, 0; @%p2 bra WORK;
  atom.global.add.u32 %r2, [%rd1], 1; mov.u32 %r4, %nctaid.x; add.s32 %r1, %r2, %r4; bra NEXT;
OUT: st.global.b32 [%rd1+64], %f0;
"""
)


def queued(pieces: int, grid: int, sample: int | None, counter=None, steps: int = 32, others: int = 0):
    """The trace of CTAs of one thread that take pieces of ``steps`` barriers each. counter: uint32 [64], its first.
    others: so many CTAs, the first ones, take none."""
    counter = np.zeros(64, np.uint32) if counter is None else counter
    shared = ".shared .align 128 .b8 sm[204800];"
    with sim.recording(sample):
        body = QUEUE.format(pieces=pieces, steps=steps, others=others)
        options = {"target": "sm_90a", "grid": (grid, 1, 1), "block": (1, 1, 1), "variables": shared}
        return launch(body, {"out": counter}, **options).trace


def test_a_sampled_cta_takes_its_share_of_a_queue():
    """The first of 12 CTAs does every twelfth of 62 pieces; on a GPU the last CTA to end does six."""
    sampled, one = queued(62, 12, 2), queued(1, 1, None)
    taken = taken_of(sampled)
    assert sampled.sampled and sampled.stride == 12
    assert taken.cluster == 0 and taken.pieces == pytest.approx(6, abs=1) and set(taken.sizes) == {32}
    piece = Replay(one, [[(one.ctas[0], 0)]], H100).run().clocks
    found = Grid(sampled, H100, cold=False, use_sass=False).predict(H100)
    assert found.clocks - found.overhead == pytest.approx(6 * piece, rel=0.08)
    assert taken_of(queued(12, 12, None)) is None  # the whole grid ran


def test_a_cta_that_takes_pieces_stands_for_none_that_does_not():
    """As the last CTAs of a main kernel of attention's gradients, which make dQ of key tiles that others do."""
    sampled = queued(62, 12, 2, others=11)
    assert sampled.stride == 12 and taken_of(sampled) is None
    assert Grid(sampled, H100, cold=False, use_sass=False).predict(H100).clocks > 0


def test_a_queue_s_counter_is_as_before_the_launch():
    assert queued(62, 12, 2, counter := np.zeros(64, np.uint32)).stride and counter[0] == 0


CHAIN = """
  ld.param.u64 %rd1, [out]; mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
  setp.eq.u32 %p1, %r1, 0; @%p1 bra FIRST;
WAIT:
  ld.acquire.gpu.global.u32 %r2, [%rd3]; setp.eq.u32 %p2, %r2, 7; @%p2 bra WAIT;
  mov.u32 %r2, 7; st.global.u32 [%rd3], %r2;
FIRST:
  add.s32 %r3, %r1, 1; mul.wide.u32 %rd4, %r3, 4; add.s64 %rd5, %rd1, %rd4;
  atom.global.release.gpu.add.u32 %r4, [%rd5], 1;
"""


@pytest.mark.parametrize("sample", [1, 2, 5])
def test_a_sampled_cta_does_not_wait_for_one_that_does_not_run(sample):
    """Each CTA waits until the one before it has announced itself, and resets its counter."""
    counters = np.full(64, 7, np.uint32)
    with sim.recording(sample):
        found = launch(CHAIN, {"out": counters}, target="sm_90a", grid=(12, 1, 1), block=(1, 1, 1)).trace
    assert len(found.ctas) == sample and (counters == 7).all()
    assert Grid(found, H100, cold=False, use_sass=False).predict(H100).clocks > 0


@pytest.mark.long
def test_a_sample_that_waits_for_what_others_store():
    body = CHAIN.replace(
        "atom.global.release.gpu.add.u32 %r4, [%rd5], 1;", "st.release.gpu.global.u32 [%rd5], %r3;"
    )
    with sim.recording(2), pytest.raises(sim.Deadlock, match="recorded sample do not run"):
        launch(body, {"out": np.full(64, 7, np.uint32)}, target="sm_90a", grid=(12, 1, 1), block=(1, 1, 1))


def test_the_last_piece_of_a_queue():
    assert last_share(Taken(0, 3, ()), 4, 1.0) == 1.0
    assert last_share(Taken(0, 3, (10, 10, 10)), 4, 1.0) == pytest.approx(1.0, abs=0.02)
    # Pieces that become smaller leave little to wait for; the longest last makes all wait.
    assert 1.0 <= last_share(Taken(0, 3, (10, 8, 6)), 4, 1.0) < 1.15
    assert last_share(Taken(0, 3, (1, 1, 30)), 4, 1.0) > 1.2


def test_places_go_to_who_comes_first():
    assert last_end([4, 3, 2, 1], 2) == 5
    assert last_end([1, 2, 3, 4], 2) == 6
    assert last_end([1], 3) == 1


def test_a_tensor_that_one_sm_loads_comes_from_hbm():
    """Q, which each CTA has a part of, comes from HBM whole; of K, that eight share, each waits for an eighth."""
    q, k = (1, 1 << 20), (2, 1 << 20)
    sm = Sm(STEADY, 0.0, True, 1.0, 0.0, tensors={q: (1.0, 1.0), k: (0.125, 8.0)})
    nbytes = 1 << 15
    of_q = sm.tma_load(0.0, nbytes, True, q)
    of_k = sm.tma_load(of_q, nbytes, True, k) - of_q
    rate = H100.clocks("hbm_gb") / H100.ghz / H100.sms
    assert of_q == pytest.approx(nbytes / rate + H100.clocks("tma_hbm_latency"), rel=0.01)
    assert of_k < nbytes / rate / 2 + H100.clocks("tma_hbm_latency")
    assert sm.tma_load(2 * of_q, nbytes, True, None) - 2 * of_q < of_k  # of another: from L2


def test_sms_out_of_step_use_what_others_leave():
    """After a pause, an SM in step with the others gets its share of HBM; one that is not catches up."""
    share = H100.clocks("hbm_gb") / H100.ghz / H100.sms
    took = []
    for alone in (None, 0.0):
        sm = Sm(STEADY, 1.0, True, 1.0, 0.0)
        sm.alone_since = alone
        took.append(sm.load(50_000.0, 1 << 17) - 50_000.0 - H100.clocks("hbm_latency"))
    assert took[0] == pytest.approx((1 << 17) / share - H100.clocks("burst"), rel=0.01)
    assert took[1] == pytest.approx((1 << 17) / H100.clocks("tma_bytes"), rel=0.01)


def test_hbm_starts_slowly():
    """All SMs load 32 KB and again 32 KB: what HBM delivers slowly, it delivers once."""
    share, first = H100.clocks("hbm_gb") / H100.ghz / H100.sms, H100.clocks("hbm_start_mb") * 1e6 / H100.sms
    sm, latency = Sm(H100, 1.0, True, 1.0, 0.0), H100.clocks("hbm_latency")
    ends = [sm.load(0.0, 1 << 15) - latency for _ in range(2)]
    assert first < 1 << 15
    assert ends[0] == pytest.approx(((1 << 15) + first) / share, rel=0.01)
    assert ends[1] - ends[0] == pytest.approx((1 << 15) / share, rel=0.01)


def test_ctas_of_an_sm_begin_one_after_the_other():
    body = "mov.b32 %f0, 0f3F800000; mov.b32 %f1, 0f3F000000;" + "fma.rn.f32 %f0, %f0, %f1, %f1;" * 50
    body += "ld.param.u64 %rd1, [out]; st.global.b32 [%rd1], %f0;"
    with sim.recording(None):
        trace = launch(body, {"out": np.zeros(64, np.float32)}, grid=(4, 1, 1), target="sm_90a").trace
    placed = [[(cta, 0)] for cta in trace.ctas]
    ends = [Replay(trace, placed[:count], H100).run().clocks for count in (1, 4)]
    apart = H100.clocks("cta_start") + H100.clocks("warp_start")
    assert ends[1] - ends[0] == pytest.approx(3 * apart, abs=30)


def test_small_ctas_take_all_schedulers():
    """Two CTAs of two warps, each of which needs a scheduler's whole issue slot, do not slow each other down."""
    body = "".join(f"mov.b32 %f{i}, 0f3F800000;" for i in range(8))
    body += "".join(f"fma.rn.f32 %f{i % 8}, %f{i % 8}, %f{i % 8}, %f{i % 8};" for i in range(800))
    body += "ld.param.u64 %rd1, [out]; st.global.b32 [%rd1], %f0;"
    with sim.recording(None):
        options = {"grid": (2, 1, 1), "block": (64, 1, 1), "target": "sm_90a"}
        trace = launch(body, {"out": np.zeros(64, np.float32)}, **options).trace
    placed = [[(cta, 0)] for cta in trace.ctas]
    ends = [Replay(trace, placed[:count], H100).run().clocks for count in (1, 2)]
    apart = H100.clocks("cta_start") + 2 * H100.clocks("warp_start")
    assert ends[0] > 800 and ends[1] - ends[0] == pytest.approx(apart, abs=30)
