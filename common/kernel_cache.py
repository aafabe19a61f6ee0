"""Compiled kernels kept on disk, so that a process need not compile what another one has compiled.

``find_or_make`` finds a kernel in the sub-folder ``kernels`` of the cache folder, or compiles and keeps it. The
environment variable WARPSPEC_CACHE_DIR names the cache folder; if it is empty, caching is off (``disk_cache``). If
several processes want the same kernel at the same time, one compiles and the others wait.

``name_of`` hashes everything that determines a kernel's code: its family and configuration, the target and the
compiler's options, the sources of all packages that define kernels, and the versions of the compiler. Host code is made
for the CPU of the machine that compiles; a CPU that lacks some of its instructions compiles again.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import warnings
import zlib
from collections.abc import Callable, Hashable
from pathlib import Path

from warpspec.common.disk_cache import DiskCache

LIMIT = 2 << 30  # bytes
FORMAT = 2  # version of the file format
FUNCTION = "warpspec_kernel"  # symbol that a native object exports, for TVM FFI
SUFFIX = ".kernel"

CACHE = DiskCache("kernels", LIMIT)

NO_KERNELS = ("sim", "aot")  # packages of warpspec whose sources do not affect kernels
COMPILERS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "apache-tvm-ffi",
)
TOOLKITS = {major: f"nvidia-cutlass-dsl-libs-cu{major}" for major in (12, 13)}  # by CUDA's major version
COMPILER_VARIABLES = "CUTE_DSL_"  # prefix of the compiler's environment variables
IGNORED_VARIABLES = ("CUTE_DSL_ARCH",)  # each compilation names its target explicitly

# Instruction sets that host code uses if the CPU has them, by their names in /proc/cpuinfo on x86-64.
X86_FEATURES = frozenset(
    ("avx", "avx2", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "bmi1", "bmi2", "f16c", "fma")
)


# What determines a kernel's code.


def name_of(key: Hashable, *, arch: str, options: str, native: bool) -> str:
    """The file name of a kernel.

    key: made of strings, numbers, None, enumerations, tuples and dataclasses. Together with arch and options (of
    ``cute.compile``) it must determine the code, given the sources. Raises TypeError for a key of other types.
    """
    # Line information contains the sources' paths, which the simulator's diagnoses print.
    place = "" if native else str(_package_folder())
    parts = (FORMAT, describe(key), arch, options, native, place, SOURCES, *_compiler())
    return hashlib.sha256(repr(parts).encode()).hexdigest() + SUFFIX


def describe(key: Hashable) -> str:
    """A key as text that is the same in every process. Raises TypeError if a part has no such text."""
    if dataclasses.is_dataclass(key) and not isinstance(key, type):
        values = (f"{f.name}={describe(getattr(key, f.name))}" for f in dataclasses.fields(key))
        return f"{type(key).__module__}.{type(key).__qualname__}({', '.join(values)})"
    if isinstance(key, enum.Enum):
        return f"{type(key).__module__}.{key}"
    if isinstance(key, tuple):
        return f"({', '.join(map(describe, key))})"
    if key is None or isinstance(key, (bool, int, float, str)):
        return repr(key)
    raise TypeError(f"a kernel's key cannot have a {type(key).__name__} in it: {key!r}")


def _package_folder() -> Path:
    """The folder that contains warpspec's packages."""
    return Path(__file__).resolve().parent.parent


def hash_sources() -> str:
    """Hash of the sources of all packages that may define kernels, as they are on disk now."""
    digest = hashlib.sha256()
    for marker in sorted(_package_folder().glob("*/py.typed")):
        package = marker.parent
        if package.name in NO_KERNELS:
            continue
        for path in sorted(package.rglob("*.py")):
            source = path.read_bytes()
            digest.update(f"{path.relative_to(package.parent)} {len(source)}\n".encode())
            digest.update(source)
    return digest.hexdigest()


SOURCES = hash_sources()  # those of the modules that this process imports, unless edited meanwhile


@functools.cache
def _versions() -> tuple[str, ...]:
    toolkits = {major: name for major, name in TOOLKITS.items() if _version(name)}
    toolkit = toolkits.get(toolkit_of(tuple(toolkits), _driver_major()))
    names = COMPILERS if toolkit is None else (*COMPILERS, toolkit)
    return tuple(f"{name} {_version(name) or 'absent'}" for name in names)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def toolkit_of(installed: tuple[int, ...], driver: int | None) -> int | None:
    """CUDA's major version whose compiler is used if several are installed: the newest that the driver knows.

    driver: its version, or None without a driver. Kernels compiled on a machine with several versions are then also
    found by a machine that has only one.
    """
    return max((major for major in installed if driver is None or major <= driver), default=None)


def _driver_major() -> int | None:
    try:
        library, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
        failed = library.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value // 1000


def _compiler() -> tuple[str, ...]:
    """Everything that identifies the compiler: versions, the host's machine type, environment variables."""
    variables = (
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(COMPILER_VARIABLES) and name not in IGNORED_VARIABLES
    )
    return (*_versions(), platform.machine(), *variables)


# Finding and keeping.


def find_or_make(name: str, make: Callable[[], object], *, native: bool):
    """The kernel with this name (``name_of``): a kept one, or what ``make`` compiles, which is then kept.

    native: compiled with TVM FFI. The result is called like what ``cute.compile`` returns and has its ``artifacts``;
    for the simulator it is a ``HostFunction``. Raises what ``make`` raises and nothing else.
    """
    if CACHE.folder is None:
        return make()
    was_there = name in CACHE  # if it is not found nevertheless, it is damaged or for another CPU
    found = _find(name, native)
    if found is not None:
        return found
    with CACHE.making(name) as waited:
        if waited or not was_there:  # another process may have kept it meanwhile
            found = _find(name, native)
        return _keep(name, make(), native) if found is None else found


def _find(name: str, native: bool):
    content = CACHE.read(name)
    if content is None:
        return None
    try:
        return _unpack(content, native)
    except Exception as error:  # the DSL raises many kinds; compiling helps against all of them
        _warn(f"{CACHE.folder / name} does not load and is compiled again: {type(error).__name__}: {error}")
        return None


def _keep(name: str, compiled, native: bool):
    """Keep what was compiled. Returns what a later process will find, or ``compiled`` itself if it cannot be kept."""
    try:
        if native:
            content, kept = _pack(None, _export_native(compiled), compiled.artifacts), compiled
        else:
            from warpspec.common.host_function import HostFunction

            kept = HostFunction.of(compiled)
            content = _pack(kept.to_json(), kept.code, kept.artifacts)
        if hash_sources() != SOURCES:
            return kept  # sources were edited after they were imported, so the name would be wrong
    except Exception as error:  # a failure to keep a kernel must not lose the kernel
        _warn(f"a kernel cannot be kept: {type(error).__name__}: {error}")
        return compiled
    CACHE.write(name, content)
    return kept


# The content of a file: a line of JSON, PTX compressed, the object.


def _pack(host: dict | None, code: bytes, artifacts) -> bytes:
    ptx = zlib.compress(artifacts.PTX.encode())
    at = code.find(artifacts.CUBIN)  # the object may contain the cubin
    trailer = b"" if at >= 0 else artifacts.CUBIN
    about = {
        "cpu": sorted(cpu_features()),
        "host": host,
        "ptx": len(ptx),
        "code": len(code),
        "cubin": [at if at >= 0 else len(code), len(artifacts.CUBIN)],  # offset after the PTX, bytes
    }
    return b"".join((json.dumps(about).encode(), b"\n", ptx, code, trailer))


def _unpack(content: bytes, native: bool):
    """Read the kernel from a file's content; None if its host code is for another CPU."""
    line = content.index(b"\n") + 1
    about = json.loads(content[:line])
    if not cpu_features().issuperset(about["cpu"]):
        return None
    behind = content[line + about["ptx"] :]
    at, size = about["cubin"]
    ptx = zlib.decompress(content[line : line + about["ptx"]]).decode()
    code = behind[: about["code"]]

    from warpspec.common.host_function import Artifacts, HostFunction

    artifacts = Artifacts(ptx, behind[at : at + size])
    if native:
        return NativeFunction(code, artifacts)
    return HostFunction.from_json(about["host"], artifacts, code)


@functools.cache
def cpu_features() -> frozenset[str]:
    """Features of this CPU that compiled host code may depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        kind, _, names = line.partition(":")
        if kind.strip() == "flags":
            return X86_FEATURES.intersection(names.split())
        if kind.strip() == "Features":  # on Arm
            return frozenset(names.split())
    return frozenset()


# Native functions.


class NativeFunction:
    """A host function compiled with TVM FFI and loaded from an object; called by position with CUDA tensors and
    numbers.

    artifacts: its kernels.
    """

    def __init__(self, code: bytes, artifacts):
        from cutlass import cute

        self.artifacts = artifacts
        descriptor = os.memfd_create(FUNCTION)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(code)
            module = cute.runtime.load_module(f"/proc/self/fd/{descriptor}", enable_tvm_ffi=True)
        finally:
            os.close(descriptor)
        self._function = getattr(module, FUNCTION)

    def __call__(self, *arguments) -> None:
        self._function(*arguments)

    def __tvm_ffi_object__(self):
        return self._function


def _export_native(compiled) -> bytes:
    """Export a host function compiled with TVM FFI as an object."""
    descriptor = os.memfd_create(FUNCTION)
    try:
        compiled.export_to_c(f"/proc/self/fd/{descriptor}", FUNCTION)
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)


def _warn(text: str) -> None:
    warnings.warn(f"warpspec cache: {text}", RuntimeWarning, stacklevel=4)
