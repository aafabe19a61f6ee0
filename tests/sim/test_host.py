"""The compiled host function on this CPU: launches, errors, structured arguments, what is refused."""

import ctypes
import dataclasses
import typing
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import numpy as np
import pytest
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack, make_fake_stream
from helpers.host_calls import (
    ARCH,
    THREADS,
    build,
    dynamic,
    fake,
    launches_of,
    nothing,
    parameter,
    rows_host,
    scale_host,
    scale_kernel,
    scale_module,
    touch,
)

from warpspec.common.argument_types import RECORD_ATTRIBUTE
from warpspec.common.compile import compile_host
from warpspec.sim import cuda_runtime
from warpspec.sim.errors import HostError, MemoryFault
from warpspec.sim.host import HostModule, undefined_symbols
from warpspec.sim.signature import TensorType, parse_argument_type


@pytest.fixture(scope="module")
def scale():
    return scale_module()


class TestLaunch:
    def test_shape_parameters_and_stream(self, scale):
        a = torch.zeros(70, 8)
        (launch,) = launches_of(scale, a, 2.5, cuda_driver.CUstream(0))
        assert launch.grid == (3, 2, 3)
        assert launch.block == (THREADS, 1, 1)
        assert launch.cluster == (1, 1, 1)
        assert launch.smem_bytes == 2048
        assert launch.stream == 0
        assert launch.kernel_name in scale.ptx
        address, rows, columns, stride = parameter(launch, 0, "<QiiQ")
        assert (rows, columns, stride) == (70, 8, 8)
        assert launch.memory.find(address).name == "argument `a`"
        assert parameter(launch, 1, "<f") == (2.5,)
        assert launch.resources.max_threads == THREADS

    def test_grid_is_computed_from_the_arguments(self, scale):
        for rows in (1, 32, 33, 1000):
            (launch,) = launches_of(scale, torch.zeros(rows, 8), 1.0, None)
            assert launch.grid[0] == -(-rows // THREADS)

    def test_writes_come_back(self, scale):
        a = torch.arange(32.0).reshape(4, 8)

        def double(launch):
            (address,) = parameter(launch, 0, "<Q")
            launch.memory.view(address, 128, write=True).view(np.float32)[:] *= 2

        scale.call((a, 1.0, None), double)
        assert a.flatten().tolist() == [2 * i for i in range(32)]

    def test_runs_again_with_other_arguments(self, scale):
        for rows in (5, 500):
            (launch,) = launches_of(scale, torch.zeros(rows, 16), rows, 7)
            assert parameter(launch, 0, "<QiiQ")[1:] == (rows, 16, 16)
            assert parameter(launch, 1, "<f") == (rows,)
            assert launch.stream == 7

    def test_a_stream_may_be_left_out(self, scale):
        (launch,) = launches_of(scale, torch.zeros(300, 4), 1.0)
        assert launch.stream == 0

    def test_a_default_that_does_not_pickle(self):
        @cute.jit
        def host(a: cute.Tensor, stream: cuda_driver.CUstream = cuda_driver.CUstream(3)):  # noqa: B008
            rows_host(a)

        module = build(host, dynamic(cutlass.Float32, 2))
        assert len(launches_of(module, torch.zeros(4, 8))) == 1

    @pytest.mark.parametrize("handle", [None, 0, 1234, cuda_driver.CUstream(1234)])
    def test_stream_placeholders(self, scale, handle):
        (launch,) = launches_of(scale, torch.zeros(4, 8), 1.0, handle)
        assert launch.stream == (0 if handle is None else int(handle))

    def test_two_launches_see_each_others_writes(self):
        @cute.jit
        def host(a: cute.Tensor, n: cutlass.Int32):
            touch(a).launch(grid=[n, 1, 1], block=[THREADS, 1, 1])
            nothing().launch(grid=[n + 1, n, 1], block=[64, 2, 1])

        module = build(host, dynamic(cutlass.Float32, 1), 1)
        a = torch.zeros(64)
        seen = []

        def run(launch):
            first = launch.memory.allocations[0].array.view(np.float32)
            seen.append((launch.grid, launch.block, float(first[0])))
            first[0] += 1

        module.call((a, 5), run)
        assert seen == [((5, 1, 1), (32, 1, 1), 0.0), ((6, 5, 1), (64, 2, 1), 1.0)]
        assert a[0] == 2

    def test_cluster_cooperative_and_dependent_launch(self):
        @cute.jit
        def host(n: cutlass.Int32):
            nothing().launch(grid=[2 * n, 2, 1], block=[128, 1, 1], cluster=[2, 1, 1], use_pdl=True)
            nothing().launch(grid=[n, 1, 1], block=[128, 1, 1], cooperative=True)

        module = build(host, 1)
        with pytest.raises(
            HostError, match=r"cooperative launch of .*: 5000 CTAs, and B200 holds 2368 at once"
        ):
            launches_of(module, 5000)
        first, second = launches_of(module, 4)
        assert (first.grid, first.cluster) == ((8, 2, 1), (2, 1, 1))
        assert first.attributes["programmatic_stream_serialization"] == 1
        assert first.attributes["cooperative"] == 0
        assert second.attributes["cooperative"] == 1

    def test_an_event_of_a_launch(self):
        @cute.jit
        def host(n: cutlass.Int32, event: cuda_driver.CUevent):
            nothing().launch(
                grid=[n, 1, 1],
                block=[128, 1, 1],
                launch_completion_event=event,
                launch_completion_event_flags=0,
            )

        (launch,) = launches_of(build(host, 1, cuda_driver.CUevent(0)), 4, cuda_driver.CUevent(5))
        assert launch.attributes["launch_completion_event"] == 5

    def test_most_dynamic_shared_memory(self):
        @cute.jit
        def host(n: cutlass.Int32):
            nothing().launch(grid=[n, 1, 1], block=[128, 1, 1], smem=227 * 1024)

        (launch,) = launches_of(build(host, 1), 4)
        assert launch.smem_bytes == 227 * 1024

    @pytest.mark.parametrize("n", [0, -1])
    def test_empty_grid_is_refused(self, scale, n):
        @cute.jit
        def host(n: cutlass.Int32):
            nothing().launch(grid=[n, 1, 1], block=[128, 1, 1])

        with pytest.raises(HostError, match="grid"):
            launches_of(build(host, 1), n)

    def test_grid_that_does_not_fit_the_cluster_is_refused(self):
        @cute.jit
        def host(n: cutlass.Int32):
            nothing().launch(grid=[n, 1, 1], block=[128, 1, 1], cluster=[2, 1, 1])

        with pytest.raises(HostError, match=r"grid \(3, 1, 1\) is not a multiple of cluster \(2, 1, 1\)"):
            launches_of(build(host, 1), 3)

    def test_hopper(self):
        module = scale_module("sm_90a")
        assert module.target == "sm_90a"
        assert module.session.device.sms == 132
        (launch,) = launches_of(module, torch.zeros(70, 8), 2.5, None)
        assert launch.grid == (3, 2, 3)

    def test_module_is_loaded_once(self, monkeypatch):
        compiled = compile_host(
            scale_host, dynamic(cutlass.Float32, 2, 4), 1.0, make_fake_stream(), arch=ARCH
        )
        assert HostModule.of(compiled) is HostModule.of(compiled)

    def test_host_side_printf(self, capfd):
        @cute.jit
        def host(n: cutlass.Int32):
            cute.printf("host says %d", n)
            nothing().launch(grid=[n, 1, 1], block=[THREADS, 1, 1])

        assert len(launches_of(build(host, 1), 41)) == 1
        ctypes.CDLL(None).fflush(None)
        assert "host says 41" in capfd.readouterr().out


class TestErrorsDuringTheRun:
    def test_exception_comes_through_and_memory_comes_back(self, scale):
        a = torch.zeros(8, 8)

        class Odd(Exception):
            pass

        def fail(launch):
            launch.memory.allocations[0].array.view(np.float32)[0] = 3
            raise Odd("here")

        with pytest.raises(Odd, match="here"):
            scale.call((a, 1.0, None), fail)
        assert a[0, 0] == 3
        assert len(launches_of(scale, a, 1.0, None)) == 1, "the module runs again"

    def test_interrupt_comes_through(self, scale):
        def interrupt(launch):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            scale.call((torch.zeros(8, 8), 1.0, None), interrupt)

    def test_nothing_is_launched_after_an_error(self):
        @cute.jit
        def host(n: cutlass.Int32):
            nothing().launch(grid=[n, 1, 1], block=[THREADS, 1, 1])
            nothing().launch(grid=[n, 1, 1], block=[THREADS, 1, 1])

        seen = []

        def fail(launch):
            seen.append(launch)
            raise ValueError("first")

        with pytest.raises(ValueError, match="first"):
            build(host, 1).call((1,), fail)
        assert len(seen) == 1

    def test_a_function_may_run_another_while_it_launches(self, scale):
        other = scale_module()
        inner = []

        def nest(launch):
            inner.extend(launches_of(other, torch.zeros(33, 8), 1.0, 5))

        scale.call((torch.zeros(8, 8), 1.0, None), nest)
        assert [launch.grid for launch in inner] == [(2, 2, 3)]

    def test_a_function_may_not_run_itself(self, scale):
        def nest(launch):
            scale.call((torch.zeros(8, 8), 1.0, None), nest)

        with pytest.raises(HostError, match="running already"):
            scale.call((torch.zeros(8, 8), 1.0, None), nest)

    def test_guard_zones_are_checked(self, scale):
        def overrun(launch):
            launch.memory.allocations[0]._guards[1][0] = 0

        with pytest.raises(MemoryFault, match="guard zone after argument `a`"):
            scale.call((torch.zeros(8, 8), 1.0, None), overrun)


class Pair(NamedTuple):
    first: cute.Tensor
    count: cutlass.Int32
    second: cute.Tensor


@dataclasses.dataclass
class Parameters:
    data: cute.Tensor
    factor: cutlass.Float32
    rows: cutlass.Constexpr[int]


class TestStructure:
    def test_none_where_it_was_none(self):
        @cute.jit
        def host(a: cute.Tensor, b: typing.Optional[cute.Tensor], n: cutlass.Int32):  # noqa: UP045
            nothing().launch(grid=[n, 1, 1], block=[THREADS, 1, 1])

        without = build(host, dynamic(cutlass.Float32, 1), None, 1)
        assert launches_of(without, torch.zeros(4), None, 3)[0].grid == (3, 1, 1)
        with pytest.raises(HostError, match=r"argument `b`: .*was None when compiled"):
            launches_of(without, torch.zeros(4), torch.zeros(4), 3)
        given = build(host, dynamic(cutlass.Float32, 1), dynamic(cutlass.Float32, 1), 1)
        assert len(launches_of(given, torch.zeros(4), torch.zeros(4), 3)) == 1
        with pytest.raises(HostError, match="argument `b`: None; it was not None when compiled"):
            launches_of(given, torch.zeros(4), None, 3)

    def test_constexpr_arguments_are_left_out(self):
        @cute.jit
        def host(n: cutlass.Int32, tile: cutlass.Constexpr[int], m: cutlass.Int32):
            nothing().launch(grid=[n, m, tile], block=[THREADS, 1, 1])

        module = build(host, 1, 7, 1)
        assert launches_of(module, 2, 3)[0].grid == (2, 3, 7)
        with pytest.raises(HostError, match=r"takes 2 arguments \(n, m\), got 3; tile were fixed"):
            launches_of(module, 2, 7, 3)

    def test_defaults_and_keywords(self):
        @cute.jit
        def host(n: cutlass.Int32, m: cutlass.Int32 = 4):
            nothing().launch(grid=[n, m, 1], block=[THREADS, 1, 1])

        module = build(host, 1, 1)
        assert launches_of(module, 2)[0].grid == (2, 4, 1)
        assert launches_of(module, 2, kwargs={"m": 6})[0].grid == (2, 6, 1)
        with pytest.raises(HostError, match="argument `n` is missing"):
            launches_of(module, kwargs={"m": 6})
        with pytest.raises(HostError, match="argument `p`: not an argument"):
            launches_of(module, 2, kwargs={"p": 6})
        with pytest.raises(HostError, match="argument `n`: given twice"):
            launches_of(module, 2, kwargs={"n": 6})

    def test_method_of_an_object(self):
        class Op:
            def __init__(self, tile):
                self.tile = tile

            @cute.jit
            def __call__(self, a: cute.Tensor, n: cutlass.Int32):
                nothing().launch(grid=[n, cute.size(a), self.tile], block=[THREADS, 1, 1])

        module = build(Op(5), dynamic(cutlass.Float32, 1), 1)
        assert launches_of(module, torch.zeros(9), 2)[0].grid == (2, 9, 5)

    def test_tuples_and_lists(self):
        @cute.jit
        def host(tensors: list, pair: tuple):
            count, (other, _) = pair
            nothing().launch(grid=[cute.size(tensors[1]), count, other], block=[THREADS, 1, 1])

        module = build(host, [dynamic(cutlass.Float32, 1), dynamic(cutlass.Float16, 1)], (1, (2, 1.0)))
        tensors = [torch.zeros(3), torch.zeros(7, dtype=torch.float16)]
        assert launches_of(module, tensors, (4, (5, 1.0)))[0].grid == (7, 4, 5)
        with pytest.raises(HostError, match=r"argument `tensors\[1\]`: .*element type"):
            launches_of(module, [tensors[0], tensors[0]], (4, (5, 1.0)))
        with pytest.raises(HostError, match="the arguments fill 4 slots"):
            launches_of(module, tensors[:1], (4, (5, 1.0)))

    def test_named_tuple(self):
        @cute.jit
        def host(p: Pair):
            nothing().launch(grid=[cute.size(p.first), cute.size(p.second), p.count], block=[THREADS, 1, 1])

        tensor = dynamic(cutlass.Float32, 1)
        module = build(host, Pair(tensor, cutlass.Int32(1), dynamic(cutlass.Float32, 1)))
        a, b = torch.zeros(3), torch.zeros(4)
        for count in (cutlass.Int32(6), 6):  # as callers of functions compiled through TVM-FFI pass it
            assert launches_of(module, Pair(a, count, b))[0].grid == (3, 4, 6)
        with pytest.raises(HostError, match=r"argument `p\.second`"):
            launches_of(module, Pair(a, cutlass.Int32(6), b.half()))

    def test_dataclass(self):
        @cute.jit
        def host(p: Parameters):
            scale_kernel(p.data, p.factor).launch(grid=[p.rows, 1, 1], block=[THREADS, 1, 1])

        module = build(host, Parameters(dynamic(cutlass.Float32, 2), 1.0, 3))
        (launch,) = launches_of(module, Parameters(torch.zeros(4, 4), 2.5, 3))
        assert launch.grid == (3, 1, 1)
        assert parameter(launch, 1, "<f") == (2.5,)
        with pytest.raises(HostError, match=r"argument `p\.factor`: str 'x'"):
            launches_of(module, Parameters(torch.zeros(4, 4), "x", 3))

    def test_shape_arguments(self):
        @cute.jit
        def host(shape: cute.Shape, n: cutlass.Int32):
            nothing().launch(grid=[shape[0], shape[1], n], block=[THREADS, 1, 1])

        module = build(host, (3, cutlass.Int32(4)), 1)
        assert launches_of(module, (3, cutlass.Int32(9)), 2)[0].grid == (3, 9, 2)

    def test_too_few_arguments(self, scale):
        with pytest.raises(HostError, match="argument `factor` is missing"):
            launches_of(scale, torch.zeros(4, 8))

    def test_unknown_type(self, scale):
        with pytest.raises(HostError, match="argument `a`: dict is not a type"):
            launches_of(scale, {}, 1.0, None)

    def test_fake_tensor(self, scale):
        with pytest.raises(HostError, match="argument `a`: a fake tensor has no data"):
            launches_of(scale, dynamic(cutlass.Float32, 2, 4), 1.0, None)


class TestWithoutRecord:
    """A function compiled before the recorder was installed: only the layout of its slots is known."""

    @staticmethod
    def forget(host, *args):
        compiled = compile_host(host, *args, arch=ARCH)
        delattr(compiled, RECORD_ATTRIBUTE)
        return HostModule(compiled)

    def test_everything_dynamic(self):
        module = self.forget(scale_host, dynamic(cutlass.Float32, 2, 4), 1.0, make_fake_stream())
        assert module.slots[0].type is None
        (launch,) = launches_of(module, torch.zeros(40, 8)[:, :4], 2.0, 5)
        assert parameter(launch, 0, "<QiiQ")[1:] == (40, 4, 8)
        assert launch.stream == 5

    def test_everything_static(self):
        module = self.forget(rows_host, fake(cutlass.Float32, (4, 8), (8, 1)))
        assert launches_of(module, torch.zeros(4, 8))[0].grid == (4, 8, 1)

    def test_partly_static_needs_a_marked_tensor(self):
        tensor = from_dlpack(torch.zeros(4, 8)).mark_compact_shape_dynamic(0, (0, 1))
        module = self.forget(rows_host, tensor)
        with pytest.raises(HostError, match=r"import warpspec\.sim before"):
            launches_of(module, torch.zeros(6, 8))
        marked = from_dlpack(torch.zeros(6, 8)).mark_compact_shape_dynamic(0, (0, 1))
        assert launches_of(module, marked)[0].grid == (6, 8, 1)

    def test_a_number_for_a_tensor(self):
        module = self.forget(rows_host, dynamic(cutlass.Float32, 2))
        with pytest.raises(HostError, match="argument `a`: int 3; the compiled signature wants LLVM"):
            launches_of(module, 3)


class TestWhatIsRefused:
    def test_without_ptx(self):
        compiled = cute.compile(rows_host, dynamic(cutlass.Float32, 2), options=f"--gpu-arch {ARCH}")
        with pytest.raises(HostError, match="--keep-ptx"):
            HostModule(compiled)

    def test_without_cubin_it_is_taken_from_the_object(self, tmp_path):
        options = f"--gpu-arch {ARCH} --keep-ptx --dump-dir {tmp_path}"
        module = HostModule(cute.compile(rows_host, dynamic(cutlass.Float32, 2), options=options))
        (launch,) = launches_of(module, torch.zeros(4, 8))
        assert launch.resources.registers > 0

    def test_ptx_file_that_was_not_written(self, tmp_path):
        options = f"--gpu-arch {ARCH} --keep-ptx --keep-cubin --dump-dir {tmp_path}"
        compiled = cute.compile(rows_host, dynamic(cutlass.Float32, 2), options=options)
        compiled.artifacts.PTX = "/nowhere/rows.ptx"
        with pytest.raises(HostError, match=r"has not written the PTX of .* to /nowhere/rows\.ptx"):
            HostModule(compiled)

    def test_not_compiled(self):
        with pytest.raises(HostError, match=r"not what cute\.compile returns"):
            HostModule(rows_host)

    def test_other_architecture(self, tmp_path):
        options = f"--gpu-arch sm_80 --keep-ptx --dump-dir {tmp_path}"
        compiled = cute.compile(rows_host, dynamic(cutlass.Float32, 2), options=options)
        with pytest.raises(HostError, match="sm_80"):
            HostModule(compiled)

    def test_unknown_runtime_symbol(self, monkeypatch):
        monkeypatch.delitem(cuda_runtime._callbacks, "_cudaLaunchKernelEx")
        with pytest.raises(
            HostError, match="calls _cudaLaunchKernelEx, which the simulator does not provide"
        ):
            build(rows_host, dynamic(cutlass.Float32, 2))

    def test_undefined_symbols_of_an_object(self):
        compiled = compile_host(rows_host, dynamic(cutlass.Float32, 2), arch=ARCH)
        symbols = undefined_symbols(compiled.dump_to_object("p"))
        assert "_cudaLaunchKernelEx" in symbols
        assert not [s for s in symbols if s.startswith("_mlir")]


def test_argument_types():
    parsed = parse_argument_type(
        '!cute.memref<f16, gmem, align<32>, "(?{div=1},?{i64 div=64},3):(?{i64 div=8},?,1)">'
    )
    assert isinstance(parsed, TensorType)
    assert (parsed.element, parsed.align) == ("f16", 32)
    assert [(e.value, e.width, e.divisibility) for e in parsed.shape] == [
        (None, 32, 1),
        (None, 64, 64),
        (3, 32, 1),
    ]
    assert [(e.value, e.width, e.divisibility) for e in parsed.stride] == [
        (None, 64, 8),
        (None, 32, 1),
        (1, 32, 1),
    ]
    assert str(parse_argument_type("!cute.ptr<f16, gmem, align<16>>")) == "pointer to f16, 16-byte aligned"
    assert str(parse_argument_type("!cuda.stream")) == "CUDA stream"
    assert str(parse_argument_type("i32")) == "i32"
