"""Loads that may be under way when an arrival hands their buffer back to TMA (sim/order/pending_loads.py)."""

import pytest
from helpers.order_kernels import LOAD, START, run, wait

from warpspec import sim
from warpspec.sim.clocks import sass
from warpspec.sim.order import sass_loads

PROXY = "no proxy fence"
HANDED_BACK = f"""
  {START} @%p1 mbarrier.init.shared.b64 [%r11], 1; @%p1 mbarrier.init.shared.b64 [%r11+8], 32;
  @%p1 mbarrier.init.shared.b64 [%r11+16], 32; fence.mbarrier_init.release.cluster; bar.sync 0;
  {LOAD} @%p2 bra refill;
  {wait(0, "A")} ld.shared.u32 %r4, [%r12+-128]; mov.b32 %r5, %r4;
  [[early]] mbarrier.arrive.shared.b64 _, [%r11+8]; [[late]] bra end;
  refill: {wait(0, "C").replace("[%r11]", "[%r11+8]")} {LOAD} {wait(1, "B")}
  end:
"""
USE = "add.u32 %r6, %r5, 1; st.global.u32 [%rd2], %r6;"
OTHER = "mbarrier.arrive.shared.b64 _, [%r11+16];"
PENDING = "while a load of it may be under way"


@pytest.mark.parametrize(
    ("early", "late", "finding", "warning"),
    [
        ("", USE, True, False),
        (OTHER, USE, True, False),
        ("bar.warp.sync -1;", USE, True, False),
        (USE, "", False, True),
        (OTHER + USE, "", False, True),  # under way at an arrival that hands nothing back
        ("fence.proxy.async;", USE, False, False),
    ],
)
def test_a_load_under_way_at_the_arrival_that_hands_its_buffer_back(early, late, finding, warning):
    body = HANDED_BACK.replace("[[early]]", early).replace("[[late]]", late)
    if finding:
        with pytest.raises(sim.OrderError, match=PENDING) as caught:
            run(body, block=(64, 1, 1))
        (found,) = caught.value.findings
        assert "ld.shared" in found.first and "cp.async.bulk" in found.second
        assert "use of what the first loads, or fence.proxy.async" in found.remedy
    else:
        assert [PROXY in text for text in run(body, block=(64, 1, 1)).warnings] == [True] * warning


@pytest.mark.parametrize("early", ["", "cvt.rn.f32.u32 %f1, %r5; mul.f32 %f2, %f1, %f1;"])
def test_a_use_that_ptxas_moves_behind_the_arrival(early, monkeypatch):
    """PTX has the use in front of the arrival; in SASS the load is under way there."""
    for name in ("ptxas", "nvdisasm"):
        try:
            sass.tool(name)
        except sass.NoSass as error:
            pytest.skip(str(error))
    late = "st.global.f32 [%rd2], %f2;" if early else USE
    body = HANDED_BACK.replace("[[early]]", early).replace("[[late]]", late)
    options = dict(block=(64, 1, 1), target="sm_90a")
    if early:
        assert [PROXY in text for text in run(body, **options).warnings] == [True]
    monkeypatch.setenv(sass_loads.SASS_VARIABLE, "1")
    with pytest.raises(sim.OrderError, match=PENDING):
        run(body, **options)
    mended = HANDED_BACK.replace("[[early]]", USE).replace("[[late]]", "")
    assert [PROXY in text for text in run(mended, **options).warnings] == [True]
