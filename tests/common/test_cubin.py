"""Resources read from cubins: exact on files built here field by field, consistent on compiled ones."""

import re
import struct

import cutlass
import pytest
from cutlass import cute
from cutlass.cute.runtime import make_fake_tensor

from warpspec.common.compile import compile_host
from warpspec.common.cubin import CubinError, cubin_from_fatbin, parse_cubin

STATIC_FLOATS = 300
KEPT_FLOATS = 128  # more than fit the registers of the kernel that spills


def elf(sections, symbols=(), sm=100, machine=190):
    """A cubin with the given {name: (type, data or size)}; symbols become .symtab."""
    strings = b"\0" + b"".join(s.encode() + b"\0" for s in symbols)
    table = b"".join(
        struct.pack("<IBBHQQ", strings.index(b"\0" + s.encode() + b"\0") + 1, 0, 0, 1, 0, 0) for s in symbols
    )
    everything = {"": (0, b""), **sections, ".strtab": (3, strings), ".symtab": (2, table)}
    names = b"".join(n.encode() + b"\0" for n in [*everything, ".shstrtab"])
    everything[".shstrtab"] = (3, names)
    body, headers = b"", b""
    order = list(everything)
    for name, (kind, data) in everything.items():
        size = data if isinstance(data, int) else len(data)
        link = order.index(".strtab") if name == ".symtab" else 0
        at = names.index(name.encode() + b"\0") if name else len(names) - 1
        if name == ".strtab":
            at = names.index(b"\0.strtab\0") + 1
        headers += struct.pack("<IIQQQQIIQQ", at, kind, 0, 0, 64 + len(body), size, link, 0, 1, 0)
        body += b"" if isinstance(data, int) else data
    ident = b"\x7fELF" + bytes([2, 1, 1, 51, 8]) + bytes(7)
    header = struct.pack(
        "<HHIQQQIHHHHHH",
        2,
        machine,
        1,
        0,
        0,
        64 + len(body),
        sm << 8,
        64,
        0,
        0,
        64,
        len(order),
        len(order) - 1,
    )
    return ident + header + body + headers


def sized(code, *words, form="I"):
    data = struct.pack(f"<{len(words)}{form}", *words)
    return struct.pack("<BBH", 4, code, len(data)) + data


def parameter(ordinal, offset, size):
    return struct.pack("<BBHIHHI", 4, 0x17, 12, 0, ordinal, offset, size << 18 | 0x1F000)


def two_kernels(sm):
    everywhere = (
        sized(0x2F, 1, 72) + sized(0x11, 1, 0) + sized(0x2F, 2, 255) + sized(0x11, 2, 48) + sized(0x12, 2, 64)
    )
    one = (
        struct.pack("<BBH", 3, 0x1B, 255)
        + parameter(1, 64, 128)
        + parameter(0, 0, 24)
        + struct.pack("<BBH", 3, 0x19, 192)
    )
    two = sized(0x10, 128, 2, 1) + struct.pack("<BBH", 3, 0x19, 0)
    return elf(
        {
            ".nv.info": (0x70000000, everywhere),
            ".nv.info.one": (0x70000000, one),
            ".nv.info.two": (0x70000000, two),
            ".text.one": (1, bytes(16)),
            ".text.two": (1, bytes(16)),
            ".text.helper": (1, bytes(16)),
            ".nv.shared.one": (8, 1024 + 512),
        },
        symbols=("null", "one", "two"),
        sm=sm,
    )


def test_every_field():
    kernels = parse_cubin(two_kernels(100))
    assert sorted(kernels) == ["one", "two"], "a device function is no kernel"
    one, two = kernels["one"], kernels["two"]
    assert (one.registers, one.static_smem, one.local_bytes) == (72, 512, 0)
    assert (one.params_bytes, one.parameters) == (192, ((0, 24), (64, 128)))
    assert (one.max_threads, one.required_threads) == (1024, None)
    assert (two.registers, two.static_smem, two.local_bytes) == (255, 0, 64)
    assert (two.params_bytes, two.parameters) == (0, ())
    assert (two.max_threads, two.required_threads) == (256, (128, 2, 1))


def test_system_shared_memory_exists_from_sm_90_on():
    assert parse_cubin(two_kernels(90))["one"].static_smem == 512
    assert parse_cubin(two_kernels(80))["one"].static_smem == 1536


@pytest.mark.parametrize("data", [b"", b"\x7fELF", bytes(200), b"text" * 100])
def test_not_an_elf_file(data):
    with pytest.raises(CubinError, match="not a 64-bit ELF"):
        parse_cubin(data)


def test_elf_of_another_machine():
    with pytest.raises(CubinError, match="machine 62"):
        parse_cubin(elf({}, machine=62))


def test_fatbin():
    cubin = two_kernels(100)
    ptx = struct.pack("<HHIQI", 1, 0x101, 64, 16, 0).ljust(64, b"\0") + bytes(16)
    entry = struct.pack("<HHIQI", 2, 0x101, 64, len(cubin), 0).ljust(64, b"\0") + cubin
    fat = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(ptx) + len(entry)) + ptx + entry
    assert cubin_from_fatbin(fat + b"what follows in memory") == cubin
    with pytest.raises(CubinError, match="not a fat binary"):
        cubin_from_fatbin(cubin)
    with pytest.raises(CubinError, match="no cubin"):
        cubin_from_fatbin(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(ptx)) + ptx)
    squeezed = struct.pack("<HHIQI", 2, 0x101, 64, 16, 99).ljust(64, b"\0") + bytes(16)
    with pytest.raises(CubinError, match="compressed"):
        cubin_from_fatbin(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(squeezed)) + squeezed)


@cute.kernel
def small(a: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    a[thread] = a[thread] + a.element_type(1)


@cute.kernel
def spilling(a: cute.Tensor, n: cutlass.Int32, x: cutlass.Float64):
    """Keeps KEPT_FLOATS values live over a barrier, in a launch of 1024 threads with 64 registers each."""
    thread, _, _ = cute.arch.thread_idx()
    shared = cute.make_tensor(
        cute.arch.alloc_smem(cutlass.Float32, STATIC_FLOATS), cute.make_layout(STATIC_FLOATS)
    )
    kept = cute.make_rmem_tensor(cute.make_layout(KEPT_FLOATS), cutlass.Float32)
    for i in cutlass.range_constexpr(KEPT_FLOATS):
        kept[i] = a[thread + i * n]
    shared[thread % STATIC_FLOATS] = kept[0]
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(KEPT_FLOATS):
        product = kept[KEPT_FLOATS - 1 - i] * kept[(i * 7) % KEPT_FLOATS]
        a[thread + i * n + 1] = product + shared[(thread + i) % STATIC_FLOATS] + x.to(cutlass.Float32)


@cute.jit
def both(a: cute.Tensor, n: cutlass.Int32, x: cutlass.Float64):
    small(a).launch(grid=[n, 1, 1], block=[64, 2, 1])
    spilling(a, n, x).launch(grid=[n, 1, 1], block=[1024, 1, 1])


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def compiled(request):
    a = make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,))
    return compile_host(both, a, 1, 1.0, arch=request.param)


def test_compiled_kernels(compiled):
    kernels = parse_cubin(compiled.artifacts.CUBIN)
    quick, slow = (next(r for k, r in kernels.items() if name in k) for name in ("small", "spilling"))
    assert len(kernels) == 2
    assert (quick.static_smem, quick.local_bytes) == (0, 0)
    assert 1 <= quick.registers <= 32
    assert (quick.required_threads, quick.max_threads) == ((64, 2, 1), 128)
    assert slow.static_smem == STATIC_FLOATS * 4
    assert slow.local_bytes > 0, "128 live values do not fit 64 registers"
    assert 32 <= slow.registers <= 64
    assert slow.required_threads == (1024, 1, 1)
    assert slow.params_bytes == slow.parameters[-1][0] + slow.parameters[-1][1]


def test_parameters_lie_as_the_ptx_declares_them(compiled):
    kernels = parse_cubin(compiled.artifacts.CUBIN)
    sizes = {"u32": 4, "f64": 8}
    for name, resources in kernels.items():
        body = compiled.artifacts.PTX.split(f".entry {name}(")[1].split(")")[0]
        at, expected = 0, []
        for line in body.strip().splitlines():
            array = re.search(r"\.align (\d+) \.b8 \w+\[(\d+)\]", line)
            align, size = (
                (int(array[1]), int(array[2]))
                if array
                else (sizes[re.search(r"\.param \.(\w+)", line)[1]],) * 2
            )
            at = -(-at // align) * align
            expected.append((at, size))
            at += size
        assert resources.parameters == tuple(expected)
