"""Compile cache and what a cubin says: no GPU, nothing left behind."""

import contextlib
import os
import tempfile
import threading
from pathlib import Path

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cuda.bindings import driver
from cuda.bindings.driver import CUstream
from cutlass._mlir.dialects import llvm
from cutlass._mlir_helpers import op
from cutlass.base_dsl.dsl import DSLSingletonMeta
from cutlass.cute.runtime import make_fake_compact_tensor

from warpspec import sim
from warpspec.common import locations
from warpspec.common.compile import (
    compile_cached,
    compile_host,
    compile_kernel,
    fake_rows,
    kernels_with_added_waits,
    resources,
)

THREADS = 128
REGISTERS = 65536  # of an SM
MAX_THREADS_THAT_SPILLS = 1024  # 64 registers each
LIVE_VALUES = 200  # more than those hold


@cute.kernel
def double_kernel(source: cute.Tensor, target: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    target[i] = source[i] * 2.0


@cute.jit
def double(source: cute.Tensor, target: cute.Tensor):
    double_kernel(source, target).launch(grid=[cute.size(source) // THREADS, 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def crowded_kernel(source: cute.Tensor, target: cute.Tensor):
    """Holds LIVE_VALUES values at once: all are loaded before any is used, twice, in different orders."""
    thread, _, _ = cute.arch.thread_idx()
    values = cute.make_rmem_tensor(cute.make_layout(LIVE_VALUES), cutlass.Float32)
    for i in cutlass.range(LIVE_VALUES, unroll_full=True):
        values[i] = source[thread + i]
    cute.arch.sync_threads()
    total = cutlass.Float32(0.0)
    for i in cutlass.range(LIVE_VALUES, unroll_full=True):
        total = total * values[i] + values[(i * 7) % LIVE_VALUES]
    target[thread] = total


@cute.jit
def crowded(source: cute.Tensor, target: cute.Tensor, max_threads: cutlass.Constexpr):
    crowded_kernel(source, target).launch(
        grid=[1, 1, 1], block=[THREADS, 1, 1], max_number_threads=[max_threads, 1, 1]
    )


def fake():
    return make_fake_compact_tensor(cutlass.Float32, (1024,))


def only(compiled):
    (kernel,) = resources(compiled).values()
    return kernel


@pytest.fixture(scope="module")
def doubled():
    return compile_host(double, fake(), fake(), arch="sm_100a")


def test_artifacts_are_there_and_carry_source_lines(doubled):
    assert ".target sm_100a" in doubled.artifacts.PTX
    assert doubled.artifacts.CUBIN[:4] == b"\x7fELF"
    assert "\t.loc\t" in doubled.artifacts.PTX and Path(__file__).name in doubled.artifacts.PTX


def test_resources_of_a_small_kernel(doubled):
    kernel = only(doubled)
    assert 4 <= kernel.registers <= 32
    assert kernel.local_bytes == 0 and kernel.static_smem == 0


def test_spills_show():
    """ptxas -v (CUDA 13.0) of the same PTX says: 32 registers, 688 bytes stack frame, 752 bytes spill stores;
    and of the roomy one: 126 registers, no stack frame, no spills."""
    spilling = only(compile_host(crowded, fake(), fake(), MAX_THREADS_THAT_SPILLS, arch="sm_100a"))
    assert spilling.registers <= REGISTERS // MAX_THREADS_THAT_SPILLS
    assert spilling.local_bytes >= 256
    roomy = only(compile_host(crowded, fake(), fake(), THREADS, arch="sm_100a"))
    assert roomy.local_bytes == 0
    assert REGISTERS // MAX_THREADS_THAT_SPILLS < roomy.registers <= REGISTERS // THREADS


@cute.kernel
def group_kernel(target: cute.Tensor, waits: cutlass.Constexpr):
    """A group of three products, whose sums take 192 registers of a thread."""
    sums = [[f"%sum{64 * n + i}" for i in range(64)] for n in range(3)]
    product = "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%s}, %%a, %%b%d, 1, 1, 1, 0, 0; "
    text = (
        "{ .reg .f32 %sum<192>; .reg .b64 %a, %b<3>; mov.b64 %a, 0; "
        + "".join(f"mov.b64 %b{n}, {64 + n}; " for n in range(3))
        + "".join(f"mov.f32 %sum{i}, 0f00000000; " for i in range(192))
        + f"wgmma.fence.sync.aligned; {''.join(product % (', '.join(one), n) for n, one in enumerate(sums))}"
        + "wgmma.commit_group.sync.aligned; "
        + ("wgmma.wait_group.sync.aligned 0; " if waits else "")
        + "".join(f"add.f32 %sum0, %sum0, %sum{i}; " for i in range(1, 192))
        + "mov.b32 $0, %sum0; }"
    )
    thread, _, _ = cute.arch.thread_idx()
    target[thread] = llvm.inline_asm(cutlass.Float32.mlir_type, [], text, "=f", has_side_effects=True)


@cute.jit
def group(target: cute.Tensor, max_threads: cutlass.Constexpr, waits: cutlass.Constexpr):
    group_kernel(target, waits).launch(
        grid=[1, 1, 1], block=[THREADS, 1, 1], max_number_threads=[max_threads, 1, 1]
    )


@pytest.mark.parametrize(
    ("max_threads", "waits", "kernels"), [(THREADS, True, 0), (4 * THREADS, True, 1), (THREADS, False, 1)]
)
def test_waits_that_ptxas_adds(max_threads, waits, kernels):
    """ptxas says nothing of the first kernel; "wgmma.mma_async instructions are serialized due to insufficient register
    resources" (C7511) of the second, which spills nothing; "wgmma.wait_group is injected" (C7517) of the third. No
    kernel of any other test is like these: conftest.py looks."""
    compiled = compile_host(group, fake(), max_threads, waits, arch="sm_90a")
    assert len(kernels_with_added_waits(compiled)) == kernels and only(compiled).local_bytes == 0


def test_locations_are_worked_out_once_a_call_site(monkeypatch):
    """Locations and code are the same as the DSL makes them operation by operation."""
    frames, describe = [], op._fast_frameinfo
    monkeypatch.setattr(op, "_fast_frameinfo", lambda frame: frames.append(frame.f_code) or describe(frame))
    once = compile_host(crowded, fake(), fake(), THREADS, arch="sm_100a")
    call_sites = len(frames)
    monkeypatch.setattr(locations, "remembered", contextlib.nullcontext)
    each = compile_host(crowded, fake(), fake(), THREADS, arch="sm_100a")
    assert each.artifacts.PTX == once.artifacts.PTX
    assert 0 < 3 * call_sites < len(frames) - call_sites


def test_hopper(doubled):
    compiled = compile_host(double, fake(), fake(), arch="sm_90a")
    assert ".target sm_90a" in compiled.artifacts.PTX
    assert only(compiled).local_bytes == 0


def test_the_driver_is_not_asked_where_no_gpu_is_visible(monkeypatch):
    def asked(*_):
        pytest.fail("CuTe DSL 4.8.1 does not return from asking a driver that sees no GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(driver, "cuInit", asked)
    for dsl in DSLSingletonMeta._instances.values():
        monkeypatch.setattr(dsl.envar, "_arch", None)
    assert compile_host(double, fake(), fake(), arch="sm_90a").artifacts.CUBIN


def test_compiles_once_per_key_arch_and_options():
    calls = []

    def build():
        calls.append(1)
        return double, fake(), fake()

    key = ("test", "once")
    first = compile_cached(key, build, arch="sm_100a")
    assert compile_cached(key, build, arch="sm_100a") is first and len(calls) == 1
    assert compile_cached(key, build, arch="sm_90a") is not first and len(calls) == 2
    assert compile_cached(("test", "twice"), build, arch="sm_100a") is not first and len(calls) == 3
    assert (
        compile_cached(key, build, arch="sm_100a", options="--opt-level 2") is not first and len(calls) == 4
    )


@cute.kernel
def negate_kernel(rows: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    rows[block, thread] = -rows[block, thread]


@cute.jit
def negate(rows: cute.Tensor, stream: CUstream):
    negate_kernel(rows).launch(grid=[rows.shape[0], 1, 1], block=[rows.shape[1], 1, 1], stream=stream)


def test_fake_rows_leave_extents_and_strides_open():
    def build():
        return negate, fake_rows(cutlass.Float32, 2, 64, alignment=16)

    simulated = compile_kernel(("test", "rows"), build, arch="sm_90a", native=False)
    assert compile_kernel(("test", "rows"), build, arch="sm_90a", native=False) is simulated
    assert compile_kernel(("test", "rows"), build, arch="sm_90a", native=True) is not simulated
    for rows, stride in ((3, 64), (5, 68)):
        values = torch.randn(rows, stride)
        expected = torch.cat([-values[:, :64], values[:, 64:]], dim=1)
        sim.run(simulated, values[:, :64], None)
        assert values.equal(expected)


def test_threads_share_one_compilation():
    calls, results = [], []

    def build():
        calls.append(1)
        return double, fake(), fake()

    def work():
        results.append(compile_cached(("test", "threads"), build, arch="sm_100a"))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(calls) == 1 and len(results) == 4 and all(result is results[0] for result in results)


def test_failed_compilation_is_not_remembered():
    def broken():
        raise RuntimeError("cannot build")

    with pytest.raises(RuntimeError, match="cannot build"):
        compile_cached(("test", "broken"), broken, arch="sm_100a")
    assert compile_cached(("test", "broken"), lambda: (double, fake(), fake()), arch="sm_100a") is not None


def test_nothing_is_left_in_the_working_or_temporary_directory(tmp_path, monkeypatch):
    work, temporary = tmp_path / "work", tmp_path / "temporary"
    work.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    compile_host(double, fake(), fake(), arch="sm_100a")
    assert os.listdir(work) == [] and os.listdir(temporary) == []
