"""Compiled kernels kept on disk, so that a process does not compile what another one has.

``find_or_make`` finds a kernel in the sub-folder ``kernels`` of the cache folder, or compiles and keeps it. The
environment variable WARPSPEC_CACHE_DIR names the cache folder, and turns caching off where it is empty
(``disk_cache``). Processes that want the same kernel at the same time wait for the one that compiles it.

``name_of`` is a hash of what decides a kernel's code: its family and configuration, the target and the compiler's
options, the sources of all packages that define kernels, and the versions of the compiler. The host code is made for
the CPU of the machine that compiles; a CPU that lacks some of its instructions compiles again.
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
FORMAT = 2  # of the files
FUNCTION = "warpspec_kernel"  # what a native object exports, in TVM FFI's words
SUFFIX = ".kernel"

CACHE = DiskCache("kernels", LIMIT)

NO_KERNELS = ("sim", "aot")  # packages of warpspec whose sources decide nothing
COMPILERS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "apache-tvm-ffi",
)
TOOLKITS = {major: f"nvidia-cutlass-dsl-libs-cu{major}" for major in (12, 13)}  # by CUDA's major version
COMPILER_VARIABLES = "CUTE_DSL_"  # what the names of the compiler's environment variables begin with
IGNORED_VARIABLES = ("CUTE_DSL_ARCH",)  # every compilation names its target

# Instructions that host code is compiled with where the CPU has them, as /proc/cpuinfo names them on x86-64.
X86_FEATURES = frozenset(
    ("avx", "avx2", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "bmi1", "bmi2", "f16c", "fma")
)


# What decides a kernel's code.


def name_of(key: Hashable, *, arch: str, options: str, native: bool) -> str:
    """The file name of a kernel.

    key: of strings, numbers, None, enumerations, tuples and dataclasses; says with arch and options, of
    ``cute.compile``, all that decides the code but the sources. Raises TypeError for a key of other things.
    """
    # Line information has the sources' paths, which the simulator's diagnoses print.
    place = "" if native else str(_package_folder())
    parts = (FORMAT, describe(key), arch, options, native, place, SOURCES, *_compiler())
    return hashlib.sha256(repr(parts).encode()).hexdigest() + SUFFIX


def describe(key: Hashable) -> str:
    """All of a key in words, the same in every process. Raises TypeError where it has no such words."""
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
    """The folder that warpspec's packages stand in."""
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


SOURCES = hash_sources()  # of the modules that this process imports, if nobody edits them meanwhile


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
    """CUDA's major version that the compiler is used of where several are installed: the newest that the driver (None:
    there is none) knows. Kernels of a machine that has others too are then found on one that has not."""
    return max((major for major in installed if driver is None or major <= driver), default=None)


def _driver_major() -> int | None:
    try:
        library, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
        failed = library.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value // 1000


def _compiler() -> tuple[str, ...]:
    """The compiler: versions, machine that host code runs on, environment variables."""
    variables = (
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(COMPILER_VARIABLES) and name not in IGNORED_VARIABLES
    )
    return (*_versions(), platform.machine(), *variables)


# Finding and keeping.


def find_or_make(name: str, make: Callable[[], object], *, native: bool):
    """The kernel of a name (``name_of``): a kept one, or what ``make`` compiles, which is then kept.

    native: compiled with TVM FFI. Returns what is called like, and has the ``artifacts`` of, what ``cute.compile``
    returns; for the simulator a ``HostFunction``. Raises what ``make`` raises and nothing else.
    """
    if CACHE.folder is None:
        return make()
    was_there = name in CACHE  # damaged, or for another CPU, where it is not found
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
    except Exception as error:  # the DSL has many; whatever it is, compiling helps
        _warn(f"{CACHE.folder / name} does not load and is compiled again: {type(error).__name__}: {error}")
        return None


def _keep(name: str, compiled, native: bool):
    """Keep what was compiled; returns what a later process finds, or ``compiled`` itself."""
    try:
        if native:
            content, kept = _pack(None, _export_native(compiled), compiled.artifacts), compiled
        else:
            from warpspec.common.host_function import HostFunction

            kept = HostFunction.of(compiled)
            content = _pack(kept.to_json(), kept.code, kept.artifacts)
        if hash_sources() != SOURCES:
            return kept  # edited since they were imported: the name says what is not so
    except Exception as error:  # keeping must not cost a kernel that is there
        _warn(f"a kernel cannot be kept: {type(error).__name__}: {error}")
        return compiled
    CACHE.write(name, content)
    return kept


# The content of a file: a line of JSON, PTX compressed, the object.


def _pack(host: dict | None, code: bytes, artifacts) -> bytes:
    ptx = zlib.compress(artifacts.PTX.encode())
    at = code.find(artifacts.CUBIN)  # the object has it
    trailer = b"" if at >= 0 else artifacts.CUBIN
    about = {
        "cpu": sorted(cpu_features()),
        "host": host,
        "ptx": len(ptx),
        "code": len(code),
        "cubin": [at if at >= 0 else len(code), len(artifacts.CUBIN)],  # place behind the PTX, bytes
    }
    return b"".join((json.dumps(about).encode(), b"\n", ptx, code, trailer))


def _unpack(content: bytes, native: bool):
    """The kernel; None where its host code is made for another CPU."""
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
    """What this CPU can do that host code may have been compiled to need."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        kind, _, names = line.partition(":")
        if kind.strip() == "flags":
            return X86_FEATURES.intersection(names.split())
        if kind.strip() == "Features":  # Arm's
            return frozenset(names.split())
    return frozenset()


# Native functions.


class NativeFunction:
    """A host function compiled with TVM FFI and loaded from an object: called with CUDA tensors and numbers, by
    position. artifacts: its kernels."""

    def __init__(self, code: bytes, artifacts):
        from cutlass.cute.runtime import load_module

        self.artifacts = artifacts
        descriptor = os.memfd_create(FUNCTION)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(code)
            module = load_module(f"/proc/self/fd/{descriptor}", enable_tvm_ffi=True)
        finally:
            os.close(descriptor)
        self._function = getattr(module, FUNCTION)

    def __call__(self, *arguments) -> None:
        self._function(*arguments)

    def __tvm_ffi_object__(self):
        return self._function


def _export_native(compiled) -> bytes:
    """The object of a host function compiled with TVM FFI."""
    descriptor = os.memfd_create(FUNCTION)
    try:
        compiled.export_to_c(f"/proc/self/fd/{descriptor}", FUNCTION)
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)


def _warn(text: str) -> None:
    warnings.warn(f"warpspec cache: {text}", RuntimeWarning, stacklevel=4)
