"""Compiles CuTe DSL host functions, once a configuration, without leaving files in the working directory.

``compile_cached`` returns what ``cute.compile`` returns, or a stand-in (``kernel_cache``), with ``artifacts.PTX`` (str)
and ``artifacts.CUBIN`` (bytes) filled in and line information kept, as the simulator needs them. No GPU is needed.
"""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Callable, Hashable

import torch

from warpspec.common import kernel_cache
from warpspec.common.cubin import KernelResources, count_wgmma, parse_cubin

# Option of ``cute.compile``: the result is called with CUDA torch tensors, on their current stream, in about a
# microsecond. The host function has ``make_fake_stream(use_tvm_ffi_env_stream=True)``, which calls leave out.
TVM_FFI = "--enable-tvm-ffi"

ASSUMED_ARCH = "sm_100a"  # of the GPU of a host without one, as the DSL assumes it

_compiled: dict[tuple[str, str, Hashable], object] = {}
_lock = threading.RLock()  # the DSL traces through global state, so one compilation runs at a time


def compile_cached(
    key: Hashable, build: Callable[[], tuple], *, arch: str, options: str = "", on_disk: bool = False
):
    """The compiled host function for ``key`` and ``arch``, compiled on first use in this process.

    key: hashable; must determine the generated code. build: called on a miss; returns (host function, arguments...),
    where arguments are fake tensors (``cutlass.cute.runtime.make_fake_tensor``) or values of the right kind. arch:
    "sm_100a", "sm_90a". options: further options of ``cute.compile``. on_disk: also look for it on disk and keep it
    there (``kernel_cache``). This is allowed only for keys that ``kernel_cache.name_of`` can describe and for host
    functions of this package, whose sources it knows.

    Raises what the DSL raises; a failed compilation is not remembered.
    """
    cache_key = (arch, options, key)
    if cache_key not in _compiled:
        with _lock:
            if cache_key not in _compiled:

                def make():
                    return compile_host(*build(), arch=arch, options=options)

                if on_disk:
                    native = TVM_FFI in options
                    name = kernel_cache.name_of(key, arch=arch, options=options, native=native)
                    _compiled[cache_key] = kernel_cache.find_or_make(name, make, native=native)
                else:
                    _compiled[cache_key] = make()
    return _compiled[cache_key]


def compile_kernel(
    key: Hashable, build: Callable[[], tuple], *, arch: str, native: bool, on_disk: bool = False
):
    """``compile_cached`` for a host function whose last argument is the stream; ``build`` leaves the stream out.

    native: for calls with CUDA torch tensors, without a stream: they use the current one. Otherwise for the simulator.
    on_disk: as in ``compile_cached``.
    """

    def with_stream():
        from cutlass import cute

        return (*build(), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=native))

    options = TVM_FFI if native else ""
    return compile_cached((key, native), with_stream, arch=arch, options=options, on_disk=on_disk)


def fake_rows(dtype, rank: int, last: int | None = None, *, alignment: int | None = None):
    """A fake tensor in global memory with ``rank`` dimensions, for ``build``.

    The last dimension is contiguous and has the extent ``last``; all other extents and strides are unknown. alignment:
    in bytes, of the first element and of every stride; None: an element's.
    """
    from cutlass import cute

    element_bytes = dtype.width // 8
    alignment = alignment or element_bytes
    step = alignment // element_bytes
    return cute.runtime.make_fake_tensor(
        dtype,
        (*(cute.sym_int() for _ in range(rank - 1)), last or cute.sym_int()),
        stride=(*(cute.sym_int64(divisibility=step) for _ in range(rank - 1)), 1),
        assumed_align=alignment,
        memspace=cute.AddressSpace.gmem,
    )


def compile_host(host, *arguments, arch: str, options: str = ""):
    """``cute.compile`` of a host function for ``arch``, with PTX and cubin in ``artifacts``; not cached."""
    from cutlass import cute  # imported here, so that importing warpspec does not load the DSL

    import warpspec.common.argument_types  # noqa: F401  (remembers argument types, which the simulator needs)
    from warpspec.common import locations

    # The DSL writes the artifacts that it keeps to this folder and has read them back when compile returns.
    with _lock, locations.remembered(), tempfile.TemporaryDirectory(prefix="warpspec-") as folder:
        _assume_a_gpu()
        keep = f"--keep-ptx --keep-cubin --generate-line-info --dump-dir {folder}"
        return cute.compile(host, *arguments, options=f"--gpu-arch {arch} {keep} {options}".rstrip())


def _assume_a_gpu() -> None:
    """Tell the DSL an architecture where torch sees no GPU, so that it does not ask the driver for one.

    Where a driver is installed and no GPU is visible (``CUDA_VISIBLE_DEVICES=``), CuTe DSL 4.8.1 does not return from
    asking: to word the driver's error it asks again.
    """
    from cutlass import base_dsl

    if not torch.cuda.is_available():
        for dsl in base_dsl.dsl.DSLSingletonMeta._instances.values():
            if dsl.envar._arch is None:
                dsl.envar.arch = ASSUMED_ARCH


def resources(compiled) -> dict[str, KernelResources]:
    """Registers, stack (0: no spills) and static shared memory of every compiled kernel, by kernel name.

    compiled: what ``compile_cached`` or ``compile_host`` returned. Dynamic shared memory is an argument of the launch
    and not part of the cubin; the simulator's report has it.
    """
    return parse_cubin(compiled.artifacts.CUBIN)


def kernels_with_added_waits(compiled) -> list[str]:
    """Names of the kernels in which ptxas waits for warpgroup products (wgmma) more often than the program says.

    ptxas adds waits, with results as before, where a thread's registers do not suffice for the products of a group, so
    that they run one after the other, or where something else reads or writes the registers of a product under way. It
    says so (C7510 to C7517), but the DSL drops its messages, which the option ``remarks{ptx}`` of ``cute.compile``
    shows.
    """
    ptx = compiled.artifacts.PTX
    if "wgmma.mma_async" not in ptx:
        return []
    counts, found = count_wgmma(compiled.artifacts.CUBIN), []
    for kernel in re.split(r"\.entry\s+", ptx)[1:]:
        name = kernel[: kernel.index("(")].strip()
        written_products, written_waits = kernel.count("wgmma.mma_async"), kernel.count("wgmma.wait_group")
        products, waits = counts[name]
        # ptxas may copy a piece of the program, and leaves out products whose results nobody reads.
        if waits * written_products > written_waits * max(products, written_products):
            found.append(name)
    return found
