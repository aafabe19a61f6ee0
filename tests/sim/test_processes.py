"""Launches whose clusters run on two processes: errors, interruption, threads, output."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.ptx_launch import HEADER, launch

import warpspec.sim as sim
from warpspec.sim import processes
from warpspec.sim.errors import MemoryFault
from warpspec.sim.order.findings import OrderError
from warpspec.sim.turns import turn

NUMBER = (
    "ld.param.u64 %rd1, [out]; mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd2, %rd1, %rd2;"
)
COUNT_FOR_LONG = """
  mov.b32 %r2, 0;
LOOP: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 2000000000; @%p2 bra LOOP;
"""
SOON = 20.0  # seconds; COUNT_FOR_LONG takes minutes


def children() -> set[str]:
    """Processes that this one has started and not waited for."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended since
            state_and_parent = (process / "stat").read_text().rpartition(")")[2].split()
            if state_and_parent[1] == str(os.getpid()):
                found.add(process.name)
    return found


@pytest.fixture
def no_new_children():
    """The test leaves no process behind; another test's (a pool's tracker) may stand."""
    before = children()
    yield
    assert children() <= before


def test_an_error_does_not_wait_for_the_other_process(no_new_children):
    start = time.monotonic()
    with pytest.raises(MemoryFault, match="past the end of out"):
        launch(
            NUMBER
            + "and.b32 %r3, %r1, 1; setp.eq.u32 %p1, %r3, 1; @%p1 bra LONG;"
            + "st.global.b32 [%rd1+64], %r1; exit; LONG:"
            + COUNT_FOR_LONG,
            {"out": np.zeros(4, np.uint32)},
            grid=(8, 1, 1),
        )
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize(("ctas", "shares"), [(3, 1), (15, 2), (30, 4), (100, 8)])
def test_a_run_does_not_depend_on_the_number_of_cores(monkeypatch, no_new_children, ctas, shares):
    """All cores are used, and results, interleaving and findings are those of one."""
    assert processes.shares_of(ctas) == shares
    racing = "setp.gt.u32 %p2, %r1, 0; @%p2 st.global.b32 [%rd1], %r1;"  # all CTAs but one
    started, said = [], []
    child = processes._Child
    monkeypatch.setattr(processes, "_Child", lambda *arguments: started.append(1) or child(*arguments))
    for cores in (1, 2, 3, 8):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        started.clear()
        with pytest.raises(OrderError) as caught:
            launch(
                NUMBER + racing, {"out": np.zeros(128, np.uint32)}, grid=(ctas, 1, 1), seed=3, check="order"
            )
        report = caught.value.launch
        said.append((str(caught.value), report.instructions, [str(event) for event in report.events]))
        assert len(started) == min(cores, shares) - 1
    assert said == said[:1] * 4


def test_the_first_share_that_fails_is_told(monkeypatch):
    """CTAs 5 and 18 fault, which are of shares 1 and 2 of 4."""
    fault = "".join(f"setp.eq.u32 %p1, %r1, {cta}; @%p1 st.global.b32 [%rd1+1024], %r1;" for cta in (5, 18))
    for cores in (1, 2, 4):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        with pytest.raises(MemoryFault, match=r"CTA \(5, 0, 0\)"):
            launch(NUMBER + fault, {"out": np.zeros(64, np.uint32)}, grid=(30, 1, 1))


REDUCE = """
  ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [sums]; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x;
  and.b32 %r3, %r2, 7; mul.wide.u32 %rd3, %r3, 4; add.s64 %rd4, %rd1, %rd3;
  mov.b64 %rd3, 0x14F0000000000000; red.global.add.L2::cache_hint.u32 [%rd4], %r1, %rd3;
  mad.lo.u32 %r4, %r1, 77, %r2; cvt.rn.f32.u32 %f1, %r4; div.rn.f32 %f1, %f1, 0f40400000; mul.wide.u32 %rd3, %r2, 4;
  add.s64 %rd5, %rd2, %rd3; atom.global.add.f32 %f2, [%rd5], %f1;
  mov.b32 %r5, sm; mad.lo.u32 %r6, %r2, 4, %r5; st.shared.b32 [%r6], %f1; fence.proxy.async; bar.sync 0;
  setp.ne.u32 %p1, %r2, 0; @%p1 bra DONE;
  cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd2+128], [%r5], 128;
  cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
DONE:
"""


@pytest.mark.parametrize("check", [None, "order"])
def test_reductions_on_several_cores(monkeypatch, no_new_children, check):
    """The bits of sums do not depend on the number of cores, and atomics on one place are no race."""
    results, started = [], []
    child = processes._Child
    monkeypatch.setattr(processes, "_Child", lambda *arguments: started.append(1) or child(*arguments))
    for cores in (1, 2, 3):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        arrays = {"out": np.zeros(8, np.uint32), "sums": np.zeros(64, np.float32)}
        launch(REDUCE, arrays, grid=(30, 1, 1), check=check)
        results.append([array.tobytes() for array in arrays.values()])
        assert (arrays["out"] == 4 * np.arange(30).sum()).all()
        terms = (77 * np.arange(30)[:, None] + np.arange(32)) / 3
        np.testing.assert_allclose(arrays["sums"], np.tile(terms.sum(0), 2), rtol=1e-5)
    assert results == results[:1] * 3 and len(started) == 1 + 2


def test_a_cta_that_reads_what_it_reduced_runs_in_one_piece(monkeypatch, no_new_children):
    """Each CTA adds to a word of its own, then reads it; memory is as it was before the first attempt."""
    body = NUMBER + (
        "atom.global.add.u32 %r3, [%rd2], 5; red.global.add.u32 [%rd2], 2; bar.sync 0; ld.global.b32 %r4, [%rd2];"
        "mul.lo.u32 %r4, %r4, 10; bar.sync 0; st.global.b32 [%rd2], %r4;"
    )
    for _ in range(2):
        out = np.arange(16, dtype=np.uint32)
        launch(body, {"out": out}, grid=(16, 1, 1), block=(1, 1, 1))
        assert (out == (np.arange(16) + 7) * 10).all()


def test_a_reduction_and_a_store_of_other_ctas_race():
    body = NUMBER + (
        "setp.eq.u32 %p1, %r1, 7; @%p1 st.global.b32 [%rd1+64], %r1; @!%p1 red.global.add.u32 [%rd1+64], %r1;"
    )
    with pytest.raises(OrderError, match="accesses that nothing orders"):
        launch(body, {"out": np.zeros(32, np.uint32)}, grid=(8, 1, 1), check="order")


CANCEL = """
  ld.param.u64 %rd1, [out]; mov.b32 %r5, sm; mbarrier.init.shared.b64 [%r5], 1; mov.u32 %r1, %ctaid.x;
  fence.mbarrier_init.release.cluster; mov.b32 %r6, 0;
NEXT: mul.wide.u32 %rd2, %r1, 4; add.s64 %rd2, %rd1, %rd2; ld.global.b32 %r7, [%rd2]; add.u32 %r7, %r7, 1;
  st.global.b32 [%rd2], %r7; fence.proxy.async.shared::cta;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r5], 16;
  clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r5+16], [%r5];
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r5], %r6; @!%p1 bra WAIT;
  xor.b32 %r6, %r6, 1; ld.shared.b128 %q1, [%r5+16];
  clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q1; @!%p2 bra DONE;
  clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r1, %q1; bra NEXT;
DONE:
"""


def test_cancelled_clusters_run_once_on_several_cores(monkeypatch):
    started = []
    child = processes._Child
    monkeypatch.setattr(processes, "_Child", lambda *arguments: started.append(1) or child(*arguments))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)))
    for seed in range(3):
        out = np.zeros(40, np.uint32)
        launch(".reg .b128 %q<2>;" + CANCEL, {"out": out}, grid=(40, 1, 1), block=(1, 1, 1), seed=seed)
        assert (out == 1).all()
    assert len(started) == 3 * 2


def interrupted_launch() -> str:
    """What becomes of a long launch that is interrupted, in a process without other threads."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        launch(NUMBER + COUNT_FOR_LONG, {"out": np.zeros(4, np.uint32)}, grid=(8, 1, 1))
    except KeyboardInterrupt:
        if time.monotonic() - start >= SOON:
            return "late"
        return "a child is left" if children() else "interrupted"
    return "ran to its end"


def test_an_interrupt_ends_both_processes():
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    process = context.Process(target=lambda: told.put(interrupted_launch()))
    process.start()
    try:
        assert told.get(timeout=SOON + 40) == "interrupted"
    finally:
        process.kill()
        process.join()


def test_launches_from_several_threads():
    outs = [np.zeros(16, np.uint32) for _ in range(3)]
    body = NUMBER + "st.global.b32 [%rd2], %r1;"
    threads = [
        threading.Thread(target=launch, args=(body, {"out": out}), kwargs={"grid": (16, 1, 1)})
        for out in outs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(out.tolist() == list(range(16)) for out in outs)


def test_every_cta_prints_to_our_standard_output(capsys):
    launch(
        """
      .local .align 8 .b8 arguments[8];
      mov.u32 %r1, %ctaid.x; mov.u64 %rd1, arguments;
      cvta.local.u64 %rd2, %rd1; st.local.u32 [arguments], %r1;
      mov.u64 %rd3, format; cvta.global.u64 %rd4, %rd3;
      { .param .b64 p0; st.param.b64 [p0], %rd4; .param .b64 p1; st.param.b64 [p1], %rd2; .param .b32 r0;
        call.uni (r0), vprintf, (p0, p1); ld.param.b32 %r2, [r0]; }
    """,
        variables=".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n"
        ".global .align 1 .b8 format[8] = {67, 84, 65, 32, 37, 100, 10, 0};",
        grid=(8, 1, 1),
        block=(1, 1, 1),
    )
    assert sorted(capsys.readouterr().out.split("\n")) == ["", *(f"CTA {i}" for i in range(8))]


def test_a_process_begins_while_no_other_thread_holds_a_lock(monkeypatch):
    """Threads take turns; a forked process does not wait for a thread that it does not have."""
    fork, held = os.fork, []
    monkeypatch.setattr(processes.os, "fork", lambda: (held.append(turn()._is_owned()), fork())[1])
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda _: range(2))
    out = torch.zeros(8, dtype=torch.int32)
    text = HEADER.format(variables="", parameters=".param .u64 out", body=NUMBER + "st.global.b32 [%rd2], 7;")

    def run():
        sim.launch(text, grid=8, block=1, args=[out])

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held == [True, True] and out.eq(7).all()
    with ThreadPoolExecutor(1) as other:
        other.submit(turn().acquire).result()
        if (child := fork()) == 0:
            os._exit(turn().acquire(blocking=False))
        other.submit(turn().release).result()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.parametrize("value", ["abc", "0", "-1"])
def test_the_limit_of_processes_is_a_number(monkeypatch, value):
    monkeypatch.setenv(processes.PROCESSES_VARIABLE, value)
    with pytest.raises(ValueError, match=f"WARPSPEC_SIM_PROCESSES is '{value}'; a positive int"):
        launch(NUMBER, {"out": np.zeros(8, np.uint32)}, grid=(8, 1, 1))
