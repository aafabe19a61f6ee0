"""The compiled host function on this CPU: argument checks, packing, staging, launches, errors."""

import ctypes
import dataclasses
import functools
import struct
import typing
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import numpy as np
import pytest
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack, make_fake_stream, make_fake_tensor, make_ptr

from warpspec.common.compile import compile_host
from warpspec.sim import cuda_runtime
from warpspec.sim.arguments import PackedArguments, Value, pack_scalar
from warpspec.sim.errors import HostError, MemoryFault
from warpspec.sim.host import HostModule, undefined_symbols
from warpspec.sim.memory import GlobalMemory
from warpspec.sim.signature import RECORD_ATTRIBUTE, TensorType, parse_argument_type

ARCH = "sm_100a"
THREADS = 32


@cute.kernel
def touch(a: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    a[thread] = a[thread]


@cute.kernel
def nothing():
    pass


@cute.kernel
def keep_tensor(a: cute.Tensor):
    """Keeps its whole argument: a static layout would otherwise leave only the pointer."""
    thread, _, _ = cute.arch.thread_idx()
    if thread < cute.size(a):
        a[(thread,) * cute.rank(a)] = a[(0,) * cute.rank(a)]


def build(host, *args, arch=ARCH, options=""):
    return HostModule(compile_host(host, *args, arch=arch, options=options))


def launches_of(module, *args, **kwargs):
    """The launches a call makes; what the kernels would do is left out."""
    launches = []
    module.call(args, launches.append, **kwargs)
    return launches


def parameter(launch, index, form):
    offset, size = launch.param_layout[index]
    assert struct.calcsize(form) <= size
    return struct.unpack_from(form, launch.params, offset)


def fake(dtype, shape, stride, align=16):
    return make_fake_tensor(dtype, shape, stride, assumed_align=align)


def dynamic(dtype, rank, divisibility=1, align=16):
    """Dynamic sizes, dynamic strides but the last, which is 1."""
    shape = tuple(cute.sym_int() for _ in range(rank))
    stride = (*(cute.sym_int64(divisibility=divisibility) for _ in range(rank - 1)), 1)
    return fake(dtype, shape, stride, align)


@cute.kernel
def scale_kernel(a: cute.Tensor, factor: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    a[thread, 0] = a[thread, 0] * factor


@cute.jit
def scale_host(a: cute.Tensor, factor: cutlass.Float32, stream: cuda_driver.CUstream):
    rows = cute.size(a, mode=[0])
    scale_kernel(a, factor).launch(
        grid=[cute.ceil_div(rows, THREADS), 2, 3], block=[THREADS, 1, 1], smem=2048, stream=stream
    )


@pytest.fixture(scope="module")
def scale():
    return build(scale_host, dynamic(cutlass.Float32, 2, 4), 1.0, make_fake_stream())


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

        first, second = launches_of(build(host, 1), 4)
        assert (first.grid, first.cluster) == ((8, 2, 1), (2, 1, 1))
        assert first.attributes["programmatic_stream_serialization"] == 1
        assert first.attributes["cooperative"] == 0
        assert second.attributes["cooperative"] == 1

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
        module = build(scale_host, dynamic(cutlass.Float32, 2, 4), 1.0, make_fake_stream(), arch="sm_90a")
        assert module.target == "sm_90a"
        assert module.session.device.sms == 132
        (launch,) = launches_of(module, torch.zeros(70, 8), 2.5, None)
        assert launch.grid == (3, 2, 3)

    def test_module_is_loaded_once(self, monkeypatch):
        compiled = compile_host(
            scale_host, dynamic(cutlass.Float32, 2, 4), 1.0, make_fake_stream(), arch=ARCH
        )
        assert HostModule.of(compiled) is HostModule.of(compiled)


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
        other = build(scale_host, dynamic(cutlass.Float32, 2, 4), 1.0, make_fake_stream())
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


class TestTensorChecks:
    @pytest.mark.parametrize(
        ("tensor", "text"),
        [
            (torch.zeros(4, 8, dtype=torch.float16), "element type"),
            (torch.zeros(4, 8, dtype=torch.int32), "element type"),
            (torch.zeros(4), "1 dimensions, not 2"),
            (torch.zeros(2, 4, 8), "3 dimensions, not 2"),
            (torch.zeros(4, 4, 8)[:, :, 0], "stride 8 of dimension 1 is compiled in as 1"),
            (torch.zeros(8, 4).t(), "stride 1 of dimension 0 is not divisible by 4"),
            (torch.zeros(4, 6), "stride 6 of dimension 0 is not divisible by 4"),
            (torch.zeros(4, 9)[:, 1:], "stride 9 of dimension 0 is not divisible by 4"),
            (torch.zeros(4, 12)[:, 1:9], "begins 4 bytes off"),
            (torch.zeros(4, 8, device="meta"), "a meta tensor"),
            (torch.zeros(4, 8).to_sparse(), "strided CPU tensors"),
            (torch.zeros(4, 8, dtype=torch.complex64), "complex64 are not supported"),
            (None, "it was not None when compiled"),
            (3, "int 3"),
            (2.5, "float 2.5"),
        ],
    )
    def test_misfit_names_argument_and_reason(self, scale, tensor, text):
        with pytest.raises(HostError) as caught:
            launches_of(scale, tensor, 1.0, None)
        assert "argument `a`" in str(caught.value)
        assert text in str(caught.value)

    def test_message_shows_both_sides(self, scale):
        with pytest.raises(HostError) as caught:
            launches_of(scale, torch.zeros(3, 5, dtype=torch.bfloat16), 1.0, None)
        assert "tensor of bf16, shape (3, 5), stride (5, 1)" in str(caught.value)
        assert "tensor of f32, shape (?, ?), stride (?{divisible by 4}, 1), 16-byte aligned" in str(
            caught.value
        )

    def test_nothing_is_launched_on_a_misfit(self, scale):
        seen = []
        with pytest.raises(HostError):
            scale.call((torch.zeros(3), 1.0, None), seen.append)
        assert seen == []

    def test_static_sizes_and_strides(self):
        @cute.jit
        def host(a: cute.Tensor):
            keep_tensor(a).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])

        module = build(host, fake(cutlass.Float16, (cute.sym_int(divisibility=2), 8), (8, 1)))
        half = functools.partial(torch.zeros, dtype=torch.float16)
        (launch,) = launches_of(module, half(6, 8))
        assert parameter(launch, 0, "<Qi")[1] == 6
        for bad, text in [
            (half(6, 16), "size 16 of dimension 1 is compiled in as 8"),
            (half(5, 8), "size 5 of dimension 0 is not divisible by 2"),
            (half(6, 16)[:, :8], "stride 16 of dimension 0 is compiled in as 8"),
        ]:
            with pytest.raises(HostError, match=text):
                launches_of(module, bad)

    def test_stride_of_a_dimension_of_one_is_not_used(self):
        @cute.jit
        def host(a: cute.Tensor):
            keep_tensor(a).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])

        module = build(host, fake(cutlass.Float16, (cute.sym_int(), 8), (8, 1)))
        assert (
            len(launches_of(module, torch.zeros(1, 8, dtype=torch.float16).as_strided((1, 8), (77, 1)))) == 1
        )

    def test_size_beyond_the_compiled_width(self):
        @cute.jit
        def host(a: cute.Tensor):
            keep_tensor(a).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])

        module = build(host, fake(cutlass.Int8, (cute.sym_int(),), (cute.sym_int(),)))
        with pytest.raises(HostError, match="does not fit 32 bits"):
            launches_of(module, torch.zeros(1, dtype=torch.int8).expand(1 << 31))

    def test_mixed_widths_lie_as_llvm_lays_them(self):
        """64- and 32-bit sizes, then 32- and 64-bit strides: nested structs pad where flat ones do not."""

        @cute.jit
        def host(a: cute.Tensor):
            keep_tensor(a).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])

        shape = (cute.sym_int64(), cute.sym_int32())
        module = build(host, fake(cutlass.Float32, shape, (cute.sym_int32(), cute.sym_int64())))
        a = torch.zeros(20, 30)[:5, ::3]
        (launch,) = launches_of(module, a)
        _, rows, columns, row_stride, column_stride = parameter(launch, 0, "<Qqi4xi4xq")
        assert (rows, columns, row_stride, column_stride) == (5, 10, 30, 3)

    def test_five_tensors_of_five_ranks(self):
        @cute.jit
        def host(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, d: cute.Tensor, e: cute.Tensor):
            keep_tensor(e).launch(grid=[cute.size(a), cute.size(b, mode=[1]), 1], block=[THREADS, 1, 1])

        module = build(host, *(dynamic(cutlass.Float32, rank) for rank in range(1, 6)))
        (launch,) = launches_of(module, *(torch.zeros(*range(2, 2 + rank)) for rank in range(1, 6)))
        assert launch.grid == (2, 3, 1)
        assert parameter(launch, 0, "<Q5i4x4q")[1:] == (2, 3, 4, 5, 6, 360, 120, 30, 6)

    def test_views_of_one_tensor(self):
        @cute.jit
        def host(q: cute.Tensor, k: cute.Tensor):
            keep_tensor(q).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])
            keep_tensor(k).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])

        module = build(host, dynamic(cutlass.BFloat16, 3, 8), dynamic(cutlass.BFloat16, 3, 8))
        qkv = torch.zeros(4, 3, 16, dtype=torch.bfloat16)
        first, second = launches_of(module, qkv[:, :2], qkv[:, 2:])
        assert parameter(second, 0, "<Q")[0] - parameter(first, 0, "<Q")[0] == 2 * 16 * 2
        assert [a.name for a in first.memory.allocations] == ["arguments `q`, `k`"]


TORCH_PAIRS = [
    (cutlass.Float64, torch.float64),
    (cutlass.Float32, torch.float32),
    (cutlass.TFloat32, torch.float32),
    (cutlass.Float16, torch.float16),
    (cutlass.BFloat16, torch.bfloat16),
    (cutlass.Float8E4M3FN, torch.float8_e4m3fn),
    (cutlass.Float8E5M2, torch.float8_e5m2),
    (cutlass.Float8E8M0FNU, torch.float8_e8m0fnu),
    (cutlass.Float8E4M3FN, torch.uint8),
    (cutlass.Int8, torch.int8),
    (cutlass.Uint8, torch.uint8),
    (cutlass.Int16, torch.int16),
    (cutlass.Int32, torch.int32),
    (cutlass.Uint32, torch.uint32),
    (cutlass.Int64, torch.int64),
    (cutlass.Boolean, torch.bool),
]


@cute.jit
def rows_host(a: cute.Tensor):
    nothing().launch(grid=[cute.size(a, mode=[0]), cute.size(a, mode=[1]), 1], block=[THREADS, 1, 1])


class TestElementTypes:
    @pytest.mark.parametrize(("compiled", "given"), TORCH_PAIRS, ids=lambda t: str(t).split(".")[-1])
    def test_accepted(self, compiled, given):
        module = build(rows_host, dynamic(compiled, 2))
        a = torch.zeros(4, 16, dtype=torch.uint8).view(given)
        (launch,) = launches_of(module, a)
        assert launch.grid == (4, 16 // a.element_size(), 1)
        assert launch.memory.allocations[0].nbytes == 64

    @pytest.mark.parametrize(
        ("compiled", "given"),
        [
            (cutlass.Float8E4M3FN, torch.float8_e5m2),
            (cutlass.Float16, torch.bfloat16),
            (cutlass.Float32, torch.float64),
            (cutlass.Int32, torch.float32),
            (cutlass.Float16, torch.int16),
            (cutlass.Float16, torch.uint8),
        ],
    )
    def test_refused(self, compiled, given):
        module = build(rows_host, dynamic(compiled, 2))
        with pytest.raises(HostError, match=r"argument `a`: .*element type"):
            launches_of(module, torch.zeros(4, 16).to(given))

    @pytest.mark.parametrize("given", [torch.uint8, torch.int8, torch.float4_e2m1fn_x2])
    def test_fp4_has_two_elements_a_byte(self, given):
        module = build(
            rows_host,
            fake(
                cutlass.Float4E2M1FN,
                (cute.sym_int(), cute.sym_int(divisibility=32)),
                (cute.sym_int64(divisibility=32), 1),
            ),
        )
        (launch,) = launches_of(module, torch.zeros(4, 64, dtype=torch.uint8).view(given)[:3, :32])
        assert launch.grid == (3, 64, 1)
        assert launch.memory.allocations[0].nbytes == 2 * 64 + 32

    def test_fp4_parameters_and_column_major(self):
        @cute.jit
        def host(a: cute.Tensor):
            keep_layout(a.layout.shape, a.layout.stride).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])

        @cute.kernel
        def keep_layout(shape: cute.Shape, stride: cute.Stride):
            cute.printf("%d %d", shape[0], stride[1])

        module = build(
            host, fake(cutlass.Float4E2M1FN, (cute.sym_int(), cute.sym_int()), (1, cute.sym_int64()))
        )
        (launch,) = launches_of(module, torch.zeros(5, 16, dtype=torch.uint8).t())
        words = struct.unpack(f"<{len(launch.params) // 4}i", launch.params)
        assert 32 in words, "16 bytes are 32 rows"


class TestScalars:
    @pytest.mark.parametrize(
        ("dtype", "value", "form", "expected"),
        [
            (cutlass.Int8, -3, "<b", -3),
            (cutlass.Int16, -300, "<h", -300),
            (cutlass.Int32, -(2**31), "<i", -(2**31)),
            (cutlass.Uint32, 2**32 - 1, "<I", 2**32 - 1),
            (cutlass.Int64, -(2**40), "<q", -(2**40)),
            (cutlass.Uint64, 2**63 + 5, "<Q", 2**63 + 5),
            (cutlass.Int32, cutlass.Int32(9), "<i", 9),
            (cutlass.Int32, np.int64(9), "<i", 9),
            (cutlass.Int32, True, "<i", 1),
            (cutlass.Float32, 1.5, "<f", 1.5),
            (cutlass.Float32, 3, "<f", 3.0),
            (cutlass.Float32, np.float64(0.25), "<f", 0.25),
            (cutlass.Float32, float("inf"), "<f", float("inf")),
            (cutlass.Float64, 0.1, "<d", 0.1),
            (cutlass.Float16, 0.5, "<e", 0.5),
            (cutlass.BFloat16, 1.0, "<H", 0x3F80),
            (cutlass.Boolean, True, "<?", True),
            (cutlass.Boolean, 0, "<?", False),
        ],
    )
    def test_reaches_the_kernel(self, dtype, value, form, expected):
        @cute.kernel
        def kernel(a: cute.Tensor, n):
            thread, _, _ = cute.arch.thread_idx()
            a[thread] = n.to(a.element_type)

        @cute.jit
        def host(a: cute.Tensor, n: dtype):
            kernel(a, n).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])

        module = build(host, dynamic(dtype, 1, align=8), dtype(1))
        a = torch.zeros(32 * dtype.width // 8 if dtype.width >= 8 else 32, dtype=torch.uint8)
        torch_dtype = next(t for d, t in [*TORCH_PAIRS, (cutlass.Uint64, torch.uint64)] if d is dtype)
        (launch,) = launches_of(module, a.view(torch_dtype), value)
        assert parameter(launch, 1, form) == (expected,)

    @pytest.mark.parametrize("value", [2**32, -(2**31) - 1, 1.0, "1", None, [1]])
    def test_what_an_int32_refuses(self, value):
        @cute.jit
        def host(n: cutlass.Int32):
            nothing().launch(grid=[n, 1, 1], block=[THREADS, 1, 1])

        with pytest.raises(HostError, match="argument `n`"):
            launches_of(build(host, 1), value)

    @pytest.mark.parametrize("value", [2, -1, 0.5])
    def test_what_a_boolean_refuses(self, value):
        assert pack_scalar("i1", value) is None

    def test_floats_round_to_nearest_even(self):
        assert pack_scalar("bf16", 1 + 2**-8) == bytes.fromhex("803f")
        assert pack_scalar("bf16", 1 + 3 * 2**-8) == bytes.fromhex("823f")
        assert pack_scalar("f16", 1e6) == bytes.fromhex("007c")
        assert pack_scalar("f32", 0.1) == struct.pack("<f", 0.1)

    def test_unannotated_number_takes_the_type_it_was_compiled_with(self):
        @cute.jit
        def host(n, f):
            nothing().launch(grid=[n, 1, 1], block=[THREADS, 1, 1])

        module = build(host, 3, 1.0)
        assert launches_of(module, 5, 2.0)[0].grid == (5, 1, 1)
        with pytest.raises(HostError, match=r"argument `n`: float 2.5; the compiled signature wants i32"):
            launches_of(module, 2.5, 2.0)


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
        assert launches_of(module, Pair(a, cutlass.Int32(6), b))[0].grid == (3, 4, 6)
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


class TestOtherTensorTypes:
    def test_cute_tensor(self, scale):
        a = torch.arange(12.0).reshape(3, 4)
        (launch,) = launches_of(scale, from_dlpack(a, assumed_align=16).mark_layout_dynamic(), 1.0, None)
        address, *rest = parameter(launch, 0, "<QiiQ")
        assert rest == [3, 4, 4]
        assert launch.memory.view(address, 48).view(np.float32).tolist() == list(range(12))

    def test_numpy_array(self, scale):
        a = np.zeros((6, 16), np.float32)[::2, :8]

        def write(launch):
            (address,) = parameter(launch, 0, "<Q")
            launch.memory.view(address + 32 * 4, 4, write=True).view(np.float32)[:] = 9

        memory = scale.call((a, 1.0, None), write)
        assert a[1, 0] == 9
        assert memory.allocations[0].nbytes == (2 * 32 + 8) * 4

    def test_parameter_that_requires_grad(self, scale):
        a = torch.nn.Parameter(torch.zeros(4, 8))
        assert len(launches_of(scale, a, 1.0, None)) == 1


class TestPointers:
    @staticmethod
    @cute.kernel
    def kernel(p: cute.Pointer):
        thread, _, _ = cute.arch.thread_idx()
        cute.make_tensor(p, cute.make_layout(THREADS))[thread] = cutlass.Float16(0)

    @pytest.fixture(scope="class")
    def module(self):
        kernel = self.kernel

        @cute.jit
        def host(p: cute.Pointer, t: cute.Tensor):
            kernel(p).launch(grid=[cute.size(t), 1, 1], block=[THREADS, 1, 1])

        return build(
            host,
            make_ptr(cutlass.Float16, 0, cute.AddressSpace.gmem, assumed_align=16),
            dynamic(cutlass.Int64, 1),
        )

    def test_tensor_pointer_and_address(self, module):
        a, t = torch.arange(64.0).half(), torch.zeros(5, dtype=torch.int64)
        pointer = make_ptr(cutlass.Float16, a.data_ptr() + 32, cute.AddressSpace.gmem, assumed_align=16)
        for given, start in ((a, 0), (a.data_ptr() + 32, 16), (pointer, 16)):
            (launch,) = launches_of(module, given, t, memory=(a,))
            assert launch.grid == (5, 1, 1)
            (address,) = parameter(launch, 0, "<Q")
            assert launch.memory.view(address, 8).view(np.float16).tolist() == list(range(start, start + 4))

    def test_null(self, module):
        (launch,) = launches_of(module, 0, torch.zeros(5, dtype=torch.int64))
        assert parameter(launch, 0, "<Q") == (0,)

    def test_address_of_nothing_given(self, module):
        a = torch.zeros(64)
        with pytest.raises(HostError, match=r"argument `p`: address 0x.* is in none of the tensors"):
            launches_of(module, a.data_ptr(), torch.zeros(5, dtype=torch.int64))

    def test_misaligned(self, module):
        a = torch.zeros(64)
        for given in (a[1:], a.data_ptr() + 4):
            with pytest.raises(HostError, match=r"argument `p`: begins 4 bytes off.*16-byte aligned"):
                launches_of(module, given, torch.zeros(5, dtype=torch.int64), memory=(a,))

    def test_addresses_in_a_tensor_are_translated(self, module):
        a, b = torch.arange(4.0), torch.arange(8.0)
        addresses = torch.tensor([a.data_ptr(), b.data_ptr()])
        (launch,) = launches_of(module, 0, addresses, memory=(a, b))
        at = {x.name: x for x in launch.memory.allocations}
        words = at["argument `t`"].array.view(np.uint64).tolist()
        assert words == [at["argument `memory[0]`"].address, at["argument `memory[1]`"].address]
        assert addresses.tolist() == [a.data_ptr(), b.data_ptr()]


class TestDslAgrees:
    """Bytes packed here against those the DSL's own marshalling makes of the same CuTe tensors."""

    @pytest.mark.parametrize(
        "mark",
        [
            lambda t: t,
            lambda t: t.mark_layout_dynamic(),
            lambda t: t.mark_layout_dynamic(2),
            lambda t: t.mark_compact_shape_dynamic(0, (0, 1, 2), 2),
            lambda t: t.mark_compact_shape_dynamic(1, (0, 1, 2), 4),
        ],
    )
    @pytest.mark.parametrize("narrow", [False, True])
    def test_descriptor(self, mark, narrow):
        @cute.jit
        def host(a: cute.Tensor):
            keep_tensor(a).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])

        data = torch.zeros(4, 8, 16)
        tensor = mark(from_dlpack(data, assumed_align=16, use_32bit_stride=narrow))
        compiled = compile_host(host, tensor, arch=ARCH)
        (theirs,), _ = compiled.generate_execution_args(tensor)
        module = HostModule(compiled)
        (slot,) = module.slots
        for given in (data, tensor):
            memory = GlobalMemory()
            packed = PackedArguments(module.slots, [Value("a", given)], memory, ())
            (ours,) = packed.pointers
            # Bytes between leaves are padding and may hold anything.
            for leaf in slot.leaves:
                size = 8 if leaf.kind == "ptr" else int(leaf.kind[1:]) // 8
                expected = ctypes.string_at(theirs + leaf.offset, size)
                if leaf.kind == "ptr":
                    expected = memory.device_address(data.data_ptr()).to_bytes(8, "little")
                assert ctypes.string_at(ours + leaf.offset, size) == expected

    @pytest.mark.parametrize(
        ("host_args", "compiled_args"), [((3, 4.5, True), 3), (((1, 2.0), [3, (True,)]), 4), ((None, 1), 1)]
    )
    def test_slots_of_plain_values(self, host_args, compiled_args):
        @cute.jit
        def host(args: tuple):
            nothing().launch(grid=[1, 1, 1], block=[THREADS, 1, 1])

        compiled = compile_host(host, host_args, arch=ARCH)
        module = HostModule(compiled)
        assert len(module.slots) == compiled_args == len(compiled.generate_execution_args(host_args)[0])
        assert len(launches_of(module, host_args)) == 1


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
        monkeypatch.setattr(cuda_runtime.llvm, "address_of_symbol", lambda name: None)
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
