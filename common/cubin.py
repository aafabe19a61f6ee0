"""Reads from a cubin what ptxas decided about each kernel: registers, stack, shared memory, parameters.

A cubin is a 64-bit ELF file. Section `.nv.info` holds attributes that name their kernel by symbol index
(register count, stack frame); `.nv.info.<kernel>` holds those of one kernel (parameters, launch bounds);
`.nv.shared.<kernel>` has the size of its static shared memory. No CUDA tool is needed to read them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

ELF_MAGIC = b"\x7fELF"
ELF_CLASS_64 = 2
EM_CUDA = 190
SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")

# Attribute formats: the byte that tells where an attribute's value is.
EIFMT_SIZED = 4

# Attribute codes used here.
EIATTR_MAX_THREADS = 0x05
EIATTR_REQNTID = 0x10
EIATTR_FRAME_SIZE = 0x11
EIATTR_MIN_STACK_SIZE = 0x12
EIATTR_KPARAM_INFO = 0x17
EIATTR_CBANK_PARAM_SIZE = 0x19
EIATTR_REGCOUNT = 0x2F

KPARAM_SIZE_SHIFT = 18  # position of the size in the last word of KPARAM_INFO

# Instructions of sm_90 have 16 bytes. The low 12 bits of the first 8 bytes are the opcode.
INSTRUCTION_WORDS, OPCODE = 2, 0xFFF
# HGMMA, IGMMA, QGMMA; A in shared memory, in registers.
WGMMA = frozenset((0x9F0, 0xDF0, 0x9F1, 0xDF1, 0x9F3, 0xDF3))
WARPGROUP, WARPGROUP_WAITS = 0x9C5, 1 << 47  # WARPGROUP.DEPBAR has this bit, WARPGROUP.ARRIVE does not

SYSTEM_SHARED_BYTES = 1024  # reserved by the system at the start of every CTA's shared memory, from sm_90 on
FIRST_SM_WITH_SYSTEM_SHARED = 90
MAX_THREADS_PER_CTA = 1024

FATBIN_MAGIC = 0xBA55ED50
FATBIN_HEADER = struct.Struct("<IHHQ")
FATBIN_ENTRY = struct.Struct("<HHIQI")
FATBIN_KIND_ELF = 2


class CubinError(ValueError):
    """The bytes are not a cubin that this parser reads."""


@dataclass(frozen=True)
class KernelResources:
    """One kernel as compiled. Sizes in bytes.

    registers: 32-bit registers a thread. static_smem: shared memory declared in the kernel, without the 1024 bytes that
    the system reserves. local_bytes: stack frame of a thread (spills, local arrays). max_threads: the most threads that
    a CTA may have. required_threads: a CTA's exact shape, if the kernel demands one. parameters: (offset, size) of each
    parameter in the parameter block.
    """

    registers: int
    static_smem: int
    local_bytes: int
    params_bytes: int
    max_threads: int
    required_threads: tuple[int, int, int] | None = None
    parameters: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class _Section:
    name: str
    size: int
    data: bytes


class _Elf:
    """Sections and symbol names of a cubin."""

    def __init__(self, image: bytes):
        if image[:4] != ELF_MAGIC or len(image) < 64 or image[4] != ELF_CLASS_64:
            raise CubinError("not a 64-bit ELF file")
        (machine,) = struct.unpack_from("<H", image, 18)
        if machine != EM_CUDA:
            raise CubinError(f"ELF machine {machine}, a cubin has {EM_CUDA}")
        (section_offset,) = struct.unpack_from("<Q", image, 40)
        (self.flags,) = struct.unpack_from("<I", image, 48)
        self.abi_version = image[8]
        _, count, names_index = struct.unpack_from("<HHH", image, 58)
        table = image[section_offset : section_offset + count * SECTION_HEADER.size]
        headers = list(SECTION_HEADER.iter_unpack(table))
        names = headers[names_index]
        self.sections: dict[str, _Section] = {}
        symbols = strings = None
        for name, kind, _, _, offset, size, link, _, _, _ in headers:
            data = b"" if kind == 8 else image[offset : offset + size]  # 8: NOBITS, size without contents
            section = _Section(_string(image, names[4] + name), size, data)
            self.sections[section.name] = section
            if section.name == ".symtab":
                symbols, strings = data, headers[link]
        self.symbols: list[str] = []
        if symbols is not None and strings is not None:
            for i in range(len(symbols) // SYMBOL.size):
                self.symbols.append(
                    _string(image, strings[4] + SYMBOL.unpack_from(symbols, i * SYMBOL.size)[0])
                )

    @property
    def sm(self) -> int:
        """Compute capability as in sm_<n>: bits 8 and up of e_flags since ABI 8, the low byte before."""
        return (self.flags >> 8) & 0xFFFF if self.abi_version >= 8 else self.flags & 0xFF


def _string(image: bytes, offset: int) -> str:
    return image[offset : image.index(b"\0", offset)].decode()


def _attributes(data: bytes):
    """(code, value bytes) of each attribute of an .nv.info section."""
    at = 0
    while at + 4 <= len(data):
        form, code = data[at], data[at + 1]
        if form == EIFMT_SIZED:
            (size,) = struct.unpack_from("<H", data, at + 2)
            yield code, data[at + 4 : at + 4 + size]
            at += 4 + size
        else:
            yield code, data[at + 2 : at + 4]
            at += 4


def parse_cubin(cubin: bytes) -> dict[str, KernelResources]:
    """Resources of every kernel in `cubin`, by kernel name. Raises CubinError for anything but a cubin."""
    elf = _Elf(bytes(cubin))
    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    stacks: dict[str, int] = {}
    by_symbol = {EIATTR_REGCOUNT: registers, EIATTR_FRAME_SIZE: frames, EIATTR_MIN_STACK_SIZE: stacks}
    info = elf.sections.get(".nv.info")
    for code, value in _attributes(info.data if info else b""):
        if code in by_symbol:
            symbol, amount = struct.unpack_from("<II", value)
            by_symbol[code][elf.symbols[symbol]] = amount
    kernels = {}
    for name in elf.sections:
        if not name.startswith(".text."):
            continue
        kernel = name.removeprefix(".text.")
        own = elf.sections.get(f".nv.info.{kernel}")
        if own is None or kernel not in registers:
            continue  # a device function
        max_threads, required, params_bytes = MAX_THREADS_PER_CTA, None, 0
        parameters: dict[int, tuple[int, int]] = {}
        for code, value in _attributes(own.data):
            if code == EIATTR_KPARAM_INFO:
                _, ordinal, offset, packed = struct.unpack("<IHHI", value)
                parameters[ordinal] = (offset, packed >> KPARAM_SIZE_SHIFT)
            elif code == EIATTR_CBANK_PARAM_SIZE:
                (params_bytes,) = struct.unpack("<H", value)
            elif code == EIATTR_REQNTID:
                required = struct.unpack("<III", value)
                max_threads = required[0] * required[1] * required[2]
            elif code == EIATTR_MAX_THREADS:
                x, y, z = struct.unpack("<III", value)
                max_threads = min(max_threads, x * y * z)
        shared = elf.sections.get(f".nv.shared.{kernel}")
        static_smem = shared.size if shared else 0
        if elf.sm >= FIRST_SM_WITH_SYSTEM_SHARED:
            static_smem = max(0, static_smem - SYSTEM_SHARED_BYTES)
        kernels[kernel] = KernelResources(
            registers=registers[kernel],
            static_smem=static_smem,
            local_bytes=max(frames.get(kernel, 0), stacks.get(kernel, 0)),
            params_bytes=params_bytes,
            max_threads=max_threads,
            required_threads=required,
            parameters=tuple(parameters[i] for i in sorted(parameters)),
        )
    return kernels


def count_wgmma(cubin: bytes) -> dict[str, tuple[int, int]]:
    """The numbers of warpgroup products and of waits for them in every kernel's sm_90 code, by kernel name."""
    counts = {}
    for name, section in _Elf(bytes(cubin)).sections.items():
        if name.startswith(".text."):
            words = memoryview(section.data).cast("Q")[::INSTRUCTION_WORDS].tolist()
            products = sum(word & OPCODE in WGMMA for word in words)
            waits = sum(word & OPCODE == WARPGROUP and word & WARPGROUP_WAITS != 0 for word in words)
            counts[name.removeprefix(".text.")] = products, waits
    return counts


def cubin_from_fatbin(fatbin: bytes) -> bytes:
    """The first cubin in a fat binary, the form in which compiled host code carries its kernels.

    Raises CubinError if it holds no cubin, or only a compressed one.
    """
    magic, _, header_size, body_size = FATBIN_HEADER.unpack_from(fatbin)
    if magic != FATBIN_MAGIC:
        raise CubinError("not a fat binary")
    at, end = header_size, header_size + body_size
    while at < end:
        kind, _, entry_header, padded, compressed = FATBIN_ENTRY.unpack_from(fatbin, at)
        if kind == FATBIN_KIND_ELF:
            payload = bytes(fatbin[at + entry_header : at + entry_header + padded])
            if compressed or payload[:4] != ELF_MAGIC:
                raise CubinError("the fat binary holds a compressed cubin")
            return payload
        at += entry_header + padded
    raise CubinError("the fat binary holds no cubin")
