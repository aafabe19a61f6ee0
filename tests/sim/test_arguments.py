"""Tensors and scalars for a compiled host function: checks and bytes."""

import ctypes
import functools
import struct

import cutlass
import numpy as np
import pytest
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack
from helpers.host_calls import (
    ARCH,
    THREADS,
    build,
    dynamic,
    fake,
    keep_tensor,
    launches_of,
    nothing,
    parameter,
    rows_host,
    scale_module,
)
from helpers.suites import long

from warpspec.common.compile import compile_host
from warpspec.sim.arguments import PackedArguments, Value, pack_scalar
from warpspec.sim.errors import HostError
from warpspec.sim.host import HostModule
from warpspec.sim.memory import GlobalMemory


@pytest.fixture(scope="module")
def scale():
    return scale_module()


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
            (torch._neg_view(torch.zeros(4, 8)), "a negated view"),
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
            long(cutlass.Int16, -300, "<h", -300),
            (cutlass.Int32, -(2**31), "<i", -(2**31)),
            (cutlass.Uint32, 2**32 - 1, "<I", 2**32 - 1),
            long(cutlass.Int64, -(2**40), "<q", -(2**40)),
            (cutlass.Uint64, 2**63 + 5, "<Q", 2**63 + 5),
            (cutlass.Int32, cutlass.Int32(9), "<i", 9),
            (cutlass.Int32, np.int64(9), "<i", 9),
            (cutlass.Int32, True, "<i", 1),
            (cutlass.Float32, 1.5, "<f", 1.5),
            long(cutlass.Float32, 3, "<f", 3.0),
            long(cutlass.Float32, np.float64(0.25), "<f", 0.25),
            (cutlass.Float32, float("inf"), "<f", float("inf")),
            (cutlass.Float64, 0.1, "<d", 0.1),
            long(cutlass.Float16, 0.5, "<e", 0.5),
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
