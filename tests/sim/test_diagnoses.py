"""Each defect is provoked by a small kernel that has it; the error must name the place and the reason."""

import numpy as np
import pytest
from helpers.ptx_launch import launch

from warpspec.sim import (
    BarrierFault,
    Deadlock,
    HostError,
    MemoryFault,
    SimError,
    TmemFault,
    UnsupportedInstruction,
    ptx,
)
from warpspec.sim.families.register_budget import is_compiled

OUT = "ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;\n"
INIT = """
  mov.b32 %r10, sm; mov.u32 %r1, %tid.x;
  setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
  mbarrier.init.shared::cta.b64 [%r10], {count};
READY: bar.sync 0;
"""
WAIT = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r10], {parity}; @!%p2 bra WAIT;\n"


def run(body: str, **options) -> np.ndarray:
    out = np.zeros(64, np.uint32)
    launch(body, {"out": out}, **options)
    return out


def line_of(body: str, text: str) -> int:
    """PTX line of the first line of the kernel that contains `text`."""
    from helpers.ptx_launch import HEADER

    whole = HEADER.format(
        variables=".shared .align 128 .b8 sm[4096];", parameters=".param .u64 out", body=body
    )
    return next(i for i, line in enumerate(whole.splitlines(), 1) if text in line)


def test_arrive_count_short_by_one_is_a_deadlock():
    body = INIT.format(count=33) + "mbarrier.arrive.shared::cta.b64 _, [%r10];\n" + WAIT.format(parity=0)
    with pytest.raises(Deadlock) as error:
        run(body)
    text = str(error.value)
    assert "nothing can make progress" in text and "warp 0 lanes 0-31" in text
    assert "1 of 33 arrivals pending" in text and "phase 0" in text and "parity 0" in text
    assert f"PTX line {line_of(body, 'try_wait')}" in text


def test_wrong_phase_is_a_deadlock():
    body = INIT.format(count=32) + "mbarrier.arrive.shared::cta.b64 _, [%r10];\n" + WAIT.format(parity=1)
    with pytest.raises(
        Deadlock, match=r"waits for parity 1 of the mbarrier at shared offset 0x400 .*phase 1"
    ):
        run(body + WAIT.format(parity=1).replace("WAIT", "AGAIN").replace(", 1;", ", 1;"))


def test_bytes_never_sent_are_a_deadlock():
    body = (
        INIT.format(count=32)
        + "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 4;\n"
        + WAIT.format(parity=0)
    )
    with pytest.raises(Deadlock, match="128 bytes expected, 0 came"):
        run(body)


def test_ctas_that_wait_alike_share_a_line():
    body = INIT.format(count=33) + "mbarrier.arrive.shared::cta.b64 _, [%r10];\n" + WAIT.format(parity=0)
    with pytest.raises(Deadlock) as error:
        run(body + "membar.gl;\n", grid=(3, 1, 1))
    text = str(error.value)
    assert text.count("waits for parity 0") == 1
    assert "CTA (0, 0, 0) warp 0" in text and "; alike in CTAs (1, 0, 0), (2, 0, 0)" in text, text


def test_more_bytes_than_expected_are_named():
    body = (
        INIT.format(count=32)
        + "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r10], 8;\n"
        + "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 4;\n"
    )
    report = launch(body, {"out": np.zeros(64, np.uint32)})
    assert report.warnings == [
        "expect_tx is too small: mbarrier at shared offset 0x400 of CTA (0, 0, 0): 128 bytes expected, 256 came "
        "(in all phases)"
    ]
    with pytest.raises(Deadlock, match="0 of 32 arrivals pending, 128 bytes expected, 256 came"):
        run(body + WAIT.format(parity=0))


def test_first_parities_are_named():
    """A wait for parity 1 that passes before any copy draws a warning; a deadlock before any arrival names parity 1."""
    body = INIT.format(count=32) + WAIT.format(parity=1)
    copy = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 4;\n"
    copy += "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r10], 4;\n"
    out = {"out": np.zeros(64, np.uint32)}
    (warning,) = launch(body + copy, out).warnings
    assert "a first parity is wrong: mbarrier at shared offset 0x400" in warning
    assert f"warp 0, PTX line {line_of(body, 'try_wait')}" in warning
    assert (
        launch(body + copy.replace("expect_tx.", "").replace(", 4;", ";", 1).splitlines()[0], out).warnings
        == []
    )
    assert launch(INIT.format(count=32) + copy + WAIT.format(parity=0), out).warnings == []
    with pytest.raises(
        Deadlock, match="no arrival yet; who waits for what is free at first begins with parity 1"
    ):
        run(INIT.format(count=32) + WAIT.format(parity=0) + copy)
    with pytest.raises(
        Deadlock, match="which has ended, has parity 0: who waits for bytes begins with parity 0"
    ):
        run(INIT.format(count=32) + copy + WAIT.format(parity=1))


def test_the_cause_of_a_deadlock_stands_first():
    """The warp whose barrier got too few bytes is named first; another warp that waits gets no advice."""
    barriers = (
        INIT.format(count=32) + "add.u32 %r11, %r10, 8; @!%p1 mbarrier.init.shared::cta.b64 [%r11], 32;\n"
    )
    body = (
        barriers
        + """
  bar.sync 0; setp.ge.u32 %p3, %r1, 32; @%p3 bra CONSUMER;
FIRST: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r11], 1; @!%p2 bra FIRST;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 4;
AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r11], 0; @!%p2 bra AGAIN;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 4;
  bra DONE;
CONSUMER: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r10], 0; @!%p2 bra CONSUMER;
  mbarrier.arrive.shared::cta.b64 _, [%r11];
DONE:
"""
    )
    with pytest.raises(Deadlock) as error:
        run(body, block=(64, 1, 1))
    first, second = [line for line in str(error.value).splitlines() if "warp" in line]
    assert "warp 1" in first and "128 bytes expected, 0 came" in first
    assert "warp 0" in second and "begins with parity" not in second


def test_named_barrier_that_a_warp_misses():
    body = OUT + "setp.ge.u32 %p1, %r1, 32; @%p1 bra SKIP; barrier.sync 2, 64;\nSKIP:"
    with pytest.raises(Deadlock, match=r"waits at named barrier 2 of CTA \(0, 0, 0\): 32 of 64 threads"):
        run(body, block=(64, 1, 1))


def test_named_barrier_with_two_counts():
    body = (
        OUT
        + "setp.ge.u32 %p1, %r1, 32; @%p1 bra B; barrier.sync 2, 64; bra.uni E;\nB: barrier.sync 2, 96;\nE:"
    )
    with pytest.raises(
        BarrierFault, match=r"named barrier 2: \d+ threads here, but \d+ where others arrived"
    ):
        run(body, block=(64, 1, 1))


def test_lanes_that_never_reach_a_shuffle():
    body = (
        OUT
        + """
      setp.ge.u32 %p1, %r1, 16; @%p1 bra B; shfl.sync.idx.b32 %r2, %r1, 0, 31, -1; bra.uni E;
    B: bar.warp.sync -1;
    E: st.global.b32 [%rd1], %r2;
    """
    )
    with pytest.raises(Deadlock, match=r"lanes 0-15: waits for lanes 16-31 at `shfl.sync.idx.b32`"):
        run(body)


def test_more_arrivals_than_the_count():
    body = (
        INIT.format(count=16)
        + "mbarrier.arrive.shared::cta.b64 _, [%r10];\nmbarrier.arrive.shared::cta.b64 _, [%r10], 17;"
    )
    with pytest.raises(BarrierFault, match="17 arrivals are more than are pending"):
        run(body)


def test_mbarrier_that_was_never_initialised():
    with pytest.raises(BarrierFault, match="no mbarrier is initialised at shared offset 0x400"):
        run("mov.b32 %r10, sm; mbarrier.arrive.shared::cta.b64 _, [%r10];")


def test_mbarrier_that_was_overwritten():
    body = (
        INIT.format(count=32)
        + "mov.b32 %r2, 5; st.shared.b32 [%r10], %r2; mbarrier.arrive.shared::cta.b64 _, [%r10];"
    )
    with pytest.raises(BarrierFault, match="was overwritten"):
        run(body)


def test_missing_wait_shows_as_poison_or_stale_data():
    """Without the wait after cp.async the destination is read before it was written, under some seed."""
    body = (
        OUT
        + """
      mov.b32 %r10, sm; shl.b32 %r2, %r1, 2; add.s32 %r3, %r10, %r2;
      cp.async.ca.shared.global [%r3], [%rd1+128], 4;
      {wait}
      ld.shared.b32 %r4, [%r3]; st.global.b32 [%rd1], %r4;
    """
    )
    for wait, always in (("cp.async.wait_all;", True), ("", False)):
        right = []
        for seed in range(8):
            out = np.arange(64, dtype=np.uint32)
            launch(body.format(wait=wait), {"out": out}, seed=seed)
            right.append((out[:32] == np.arange(32, 64)).all())
        assert all(right) if always else not all(right)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("st.global.b32 [%rd1+256], %r1;", r"4-byte write at 0x\w+: 0 bytes past the end of out \(256 bytes\)"),
        ("ld.global.b32 %r2, [%rd1+-132];", "before the start of out"),
        ("add.s64 %rd1, %rd1, 2; ld.global.b32 %r2, [%rd1];", "4-byte access at 0x.* is not aligned to its size"),
        ("mov.b32 %r3, sm; ld.shared.b32 %r2, [%r3+4096];", "4-byte access at shared offset 0x1400"),
        ("mov.b64 %rd5, 0; ld.b32 %r2, [%rd5];", "null pointer"),
        ("mov.b64 %rd5, out; st.b32 [%rd5], %r1;", "kernel parameters is read-only"),
        ("mov.b32 %r3, sm; add.s32 %r3, %r3, 0x1000000; ld.shared.b32 %r2, [%r3];", "of another CTA"),
    ],
)  # fmt: skip
def test_bad_addresses(code, message):
    body = OUT + code + "\n st.global.b32 [%rd1], %r2;"
    with pytest.raises(MemoryFault, match=message) as error:
        run(body)
    where = error.value.where
    assert where.kernel == "kernel" and where.cta == (0, 0, 0) and where.warp == 0 and len(where.lanes) == 1
    assert where.ptx_line == line_of(body, code.split(";")[-2].strip().split(" ")[0])


def test_the_lane_that_faults_is_named():
    with pytest.raises(MemoryFault) as error:
        run(OUT + "mul.wide.u32 %rd3, %r1, 20; add.s64 %rd4, %rd1, %rd3; st.global.b32 [%rd4], %r1;")
    assert error.value.where.lanes == (11,)


def test_unsupported_instruction_names_itself():
    with pytest.raises(UnsupportedInstruction, match=r"does not execute `tex\.2d\.v4\.f32\.f32`") as error:
        run("tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%rd1, {%f5, %f6}];")
    assert error.value.where.ptx_text.startswith("tex.2d")


def test_unsupported_instruction_that_is_not_reached_does_no_harm():
    run("bra.uni END; tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%rd1, {%f5, %f6}];\nEND:")


def test_trap():
    with pytest.raises(SimError, match="trap"):
        run(OUT + "setp.eq.u32 %p1, %r1, 7; @%p1 trap;")


ALLOCATE = (
    "mov.b32 %r10, sm; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10], 64;"
    " ld.shared.b32 %r11, [%r10];\n"
)
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r11, 64;\n"


def test_leaked_tensor_memory():
    with pytest.raises(
        TmemFault, match="64 columns of tensor memory are still allocated at the end of the CTA"
    ):
        run(ALLOCATE)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r20}, [%r12];", "column"),
        ("add.s32 %r12, %r11, 0x400000; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r20}, [%r12];", "lane"),
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10], 48;", "48"),
        ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r11, 32;", "32"),
    ],
)  # fmt: skip
def test_misuse_of_tensor_memory(code, message):
    with pytest.raises(TmemFault, match=message):
        run(ALLOCATE + "add.s32 %r12, %r11, 64;\n" + code + "\n" + FREE)


def test_tensor_memory_that_was_never_written_is_poison():
    out = run(ALLOCATE + OUT + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r20}, [%r11]; tcgen05.wait::ld.sync.aligned;\n"
              "st.global.b32 [%rd1], %r20;\n" + FREE)  # fmt: skip
    assert (out[:32] == 0xFFFFFFFF).all()


def test_a_missing_wait_behind_a_tensor_memory_store_shows_under_some_seed():
    body = ALLOCATE + OUT + """
      tcgen05.st.sync.aligned.32x32b.x1.b32 [%r11], {{%r1}};
      {wait}
      tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r20}}, [%r11]; tcgen05.wait::ld.sync.aligned;
      st.global.b32 [%rd1], %r20;
    """ + "tcgen05.wait::st.sync.aligned;\n" + FREE  # fmt: skip
    right = {
        wait: [(run(body.format(wait=wait), seed=seed)[:32] == np.arange(32)).all() for seed in range(8)]
        for wait in ("tcgen05.wait::st.sync.aligned;", "")
    }
    assert all(right["tcgen05.wait::st.sync.aligned;"]) and not all(right[""])


def test_warps_that_spin_without_end():
    with pytest.raises(Deadlock, match="spin"):
        run(OUT + "SPIN: ld.volatile.global.b32 %r2, [%rd1]; setp.eq.u32 %p1, %r2, 0; @%p1 bra SPIN;")


def test_source_lines_are_named_where_they_were_compiled_in():
    body = ".loc 1 77 3\n st.global.b32 [%rd1+4], %r1;\n"
    out = np.zeros(1, np.uint32)
    with pytest.raises(MemoryFault) as error:
        launch(OUT + body, {"out": out}, variables='.file 1 "/somewhere/my_kernel.py"')
    assert "my_kernel.py:77" in str(error.value)


def test_warps_that_wait_alike_share_a_line():
    with pytest.raises(Deadlock) as caught:
        launch("barrier.sync 1, 256;", block=(128, 1, 1))
    text = str(caught.value)
    assert "warps 0-3 lanes 0-31: waits at named barrier 1 of CTA (0, 0, 0): 128 of 256 threads" in text
    assert text.count("waits at") == 1


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"grid": (1, 65536, 1)}, r"grid \(1, 65536, 1\): at most"),
        ({"block": (1, 1, 65)}, r"block \(1, 1, 65\): at most"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "not a multiple of the cluster"),
    ],
)
def test_launches_that_the_hardware_refuses(shape, message):
    with pytest.raises(HostError, match=message):
        launch("mov.u32 %r1, 0;", **shape)


def test_a_special_register_that_is_not_simulated():
    with pytest.raises(HostError, match="%current_graph_exec is not simulated"):
        launch("mov.u64 %rd1, %current_graph_exec;")


def test_an_instruction_that_lacks_operands_is_named():
    with pytest.raises(IndexError) as caught:
        launch("add.u32 %r1, %r2;")
    assert "add.u32 %r1, %r2" in caught.value.__notes__[0]


def test_an_error_of_the_simulator_itself_says_where(monkeypatch):
    monkeypatch.setattr("warpspec.sim.families.barriers._barrier", lambda cta, number: 1 // 0)
    with pytest.raises(ZeroDivisionError) as caught:
        launch("mov.u32 %r1, 0;\nbar.sync 3;")
    assert any("bar.sync 3" in note and "CTA (0, 0, 0), warp 0" in note for note in caught.value.__notes__)


def test_try_wait_that_is_not_repeated_fails_under_some_seed():
    code = """
      ld.param.u64 %rd1, [out]; mov.b32 %r10, sm; mov.u32 %r1, %tid.x;
      setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared::cta.b64 [%r10], 32; bar.sync 0;
      setp.ge.u32 %p2, %r1, 32; @%p2 bra ARRIVE;
      mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r10], 0; selp.u32 %r2, 1, 0, %p3; st.global.u32 [%rd1], %r2;
      bra END;
    ARRIVE: mbarrier.arrive.shared::cta.b64 _, [%r10];
    END:
    """
    seen = set()
    for seed in range(200):
        out = np.zeros(1, np.uint32)
        launch(code, {"out": out}, block=(64, 1, 1), seed=seed)
        seen.add(int(out[0]))
    assert seen == {0, 1}


def budget(consumers: int) -> str:
    """Two warpgroups: the first gives registers up, the second asks for more."""
    return f"""
  mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 128; @%p1 bra GIVE;
  setmaxnreg.inc.sync.aligned.u32 {consumers}; bra END;
GIVE: setmaxnreg.dec.sync.aligned.u32 24;
END:
"""


def test_more_registers_than_the_cta_was_launched_with_are_a_deadlock():
    launch(budget(232), block=(256, 1, 1), registers=128)
    with pytest.raises(
        Deadlock, match=r"setmaxnreg\.inc to 240 registers a thread.*launched with 128 a thread"
    ):
        launch(budget(240), block=(256, 1, 1), registers=128)


@pytest.mark.parametrize(
    "directives, compiled",
    [
        (".reqntid 352, 1, 1", False),
        (".maxntid 512", False),
        (".reqntid 640, 1, 1", True),
        (".reqntid 352, 1, 1 .minnctapersm 1", True),
        (".reqntid 352, 1, 1 .maxnreg 168", True),
    ],
)
def test_setmaxnreg_that_ptxas_ignores(directives, compiled):
    """ptxas 13.0 says of the first two that it ignores setmaxnreg."""
    header = ".version 9.0\n.target sm_100a\n.address_size 64\n"
    module = ptx.parse(f"{header}.visible .entry k()\n{directives}\n{{\n  ret;\n}}\n")
    assert is_compiled(module.kernels["k"]) == compiled


STORE = """
  mov.b32 %r10, sm; ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0;
  @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r10], 128;
  @%p1 cp.async.bulk.commit_group;
"""


def warnings_of(body: str, **options) -> set[str]:
    """What a kernel is warned of under some seed."""
    found = set()
    for seed in range(12):
        found.update(launch(body, {"out": np.zeros(64, np.uint32)}, seed=seed, **options).warnings)
    return found


def test_an_exit_under_a_pending_read_of_shared_memory_is_a_warning():
    (text,) = warnings_of(STORE)
    assert "exits before its `cp.async.bulk.global.shared::cta.bulk_group` is done with shared memory" in text
    assert f"PTX line {line_of(STORE, 'cp.async.bulk.global')}" in text


def test_an_exit_under_a_pending_write_of_global_memory_is_none():
    assert not warnings_of(STORE + "@%p1 cp.async.bulk.wait_group.read 0;")


CLUSTER_ARRIVE, CLUSTER_WAIT = "barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;"


def test_two_arrivals_at_a_cluster_barrier_are_a_warning():
    """Every warp arrives twice and waits: hardware runs it."""
    options = dict(grid=(2, 1, 1), cluster=(2, 1, 1), block=(64, 1, 1))
    texts = warnings_of(f"{CLUSTER_ARRIVE}\n{CLUSTER_ARRIVE}\n{CLUSTER_WAIT}", **options)
    expected = "barrier.cluster.arrive twice without barrier.cluster.wait between"
    quoted = "Each thread must arrive at the barrier only once before the barrier completes."
    assert {text.split(",")[0] for text in texts} == {expected} and all(quoted in text for text in texts)
    # flash-attn-4's MLA.
    assert warnings_of(2 * f"{CLUSTER_ARRIVE}\n" + 2 * f"{CLUSTER_WAIT}\n", **options) == texts
    assert not warnings_of(2 * f"{CLUSTER_ARRIVE}\n{CLUSTER_WAIT}", **options)
    with pytest.raises(SimError, match="wait without barrier"):
        launch(2 * f"{CLUSTER_ARRIVE}\n" + 3 * f"{CLUSTER_WAIT}\n", {}, **options)


def test_a_warning_stays_with_the_error_that_follows_it():
    with pytest.raises(SimError, match="trap") as found:
        run(f"{CLUSTER_ARRIVE}\n{CLUSTER_ARRIVE}\n{CLUSTER_WAIT} trap;", grid=(2, 1, 1), cluster=(2, 1, 1))
    assert "barrier.cluster.arrive twice" in found.value.__notes__[0]


def test_who_allocated_and_who_freed_tensor_memory():
    alloc = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10], 32;"
    free = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32;"
    code = f"mov.b32 %r10, sm; {alloc} ld.shared.u32 %r20, [%r10];\n{free}\n{alloc}\n{free}\n"
    read = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r21}, [%r20];"
    lines = f"PTX line {line_of(code + read, alloc)}", f"PTX line {line_of(code + read, free) + 2}"
    with pytest.raises(TmemFault, match=rf"nothing is allocated; freed: 0-31 \(by warp 0, {lines[1]}\)"):
        run(code + read)
    with pytest.raises(
        TmemFault, match=rf"end of the CTA; allocated columns: 0-31 \(by warp 0, {lines[0]}\)"
    ):
        run(f"mov.b32 %r10, sm; {alloc}")
