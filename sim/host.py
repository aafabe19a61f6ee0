"""Run the host part of a compiled CuTe DSL function on this CPU.

`HostModule.of(compiled).call(args, on_launch)` stages the tensors, packs the arguments, runs the compiled
host code and hands every kernel launch it makes to `on_launch`. LLVM (llvmlite) loads the object that the DSL
exports (`warpspec.common.host_function`); the CUDA runtime it calls is `cuda_runtime`.
"""

from __future__ import annotations

import ctypes
import inspect
import re
import struct
import weakref
from collections.abc import Callable, Sequence

import cutlass  # noqa: F401  (as a whole first: tests/test_layers.py)
import llvmlite.binding as llvm
from cuda.bindings.driver import CUstream
from cutlass.base_dsl.common import DSLBaseError, DSLRuntimeError

from warpspec.common.host_function import PREFIX, HostFunction
from warpspec.sim import cuda_tensor_map  # noqa: F401  (registers its entry point)
from warpspec.sim.arguments import PackedArguments, Value, flatten, plain, takes_stream
from warpspec.sim.cuda_runtime import Launch, Session, require_symbols, running
from warpspec.sim.device import device_of
from warpspec.sim.errors import HostError
from warpspec.sim.memory import GlobalMemory
from warpspec.sim.signature import StreamType, slots
from warpspec.sim.turns import turn

__all__ = ["HostModule", "Launch"]

COMPILE_OPTIONS = 'cute.compile(..., options="--gpu-arch sm_100a --keep-ptx --keep-cubin")'
OBJECT_SYMBOL = struct.Struct("<IBBHQQ")
OBJECT_SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL_TABLE = 2  # section type SHT_SYMTAB
LINKER_SYMBOLS = ("", "_GLOBAL_OFFSET_TABLE_")

_modules: weakref.WeakKeyDictionary[object, HostModule] = weakref.WeakKeyDictionary()


def undefined_symbols(image: bytes) -> list[str]:
    """Names that a relocatable 64-bit ELF object imports."""
    (offset,) = struct.unpack_from("<Q", image, 40)
    (count,) = struct.unpack_from("<H", image, 60)
    table = image[offset : offset + count * OBJECT_SECTION.size]
    sections = list(OBJECT_SECTION.iter_unpack(table))
    names = []
    for _, kind, _, _, start, size, strings, *_ in sections:
        if kind == SYMBOL_TABLE:
            base = sections[strings][4]
            for name, _, _, section, _, _ in OBJECT_SYMBOL.iter_unpack(image[start : start + size]):
                if section == 0:
                    text = image[base + name : image.index(b"\0", base + name)].decode()
                    if text not in LINKER_SYMBOLS:
                        names.append(text)
    return names


HOST_ONLY_TARGET = "sm_100a"  # device that a function without kernels sees


class HostModule:
    """The loaded host code of a compiled function. Raises HostError for what the simulator cannot run.

    ptx: the text of its kernels; target: as in `.target` (sm_90a, sm_100a); name: the host function's. compiled: what
    `cute.compile` returned, or a `HostFunction`.
    """

    @classmethod
    def of(cls, compiled: object) -> HostModule:
        """The module of `compiled`, loaded once as long as `compiled` lives."""
        if compiled is None or isinstance(compiled, (int, float, str, bytes, tuple, list, dict)):
            raise HostError(f"compiled is a {type(compiled).__name__}; what cute.compile returns is needed")
        with turn():
            module = _modules.get(compiled)
            if module is None:
                module = _modules[compiled] = cls(compiled)
            return module

    def __init__(self, compiled: object):
        if not isinstance(compiled, HostFunction):
            _require_native(compiled)
            compiled = _host_function(compiled)
        self.host = compiled
        self.name: str = compiled.name
        self.ptx: str = _require_ptx(compiled) if compiled.has_kernels else ""
        self.target: str = _target(self.ptx) if self.ptx else HOST_ONLY_TARGET
        self.slots = slots(compiled)
        self.session = Session(device_of(self.target), compiled.artifacts.CUBIN)
        self._engine = _load(self.host.code)
        self._entry = self._function(f"_mlir_{PREFIX}__mlir_ciface_{self.name}")
        if compiled.has_kernels:
            self._load_kernels()

    def _function(self, name: str) -> Callable[[ctypes.Array], None]:
        address = self._engine.get_function_address(name)
        if not address:
            raise HostError(f"the exported object has no function {name}")
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)(address)

    def _load_kernels(self) -> None:
        """Do what the generated header's Kernel_Module_Load does: load the library, look up each kernel."""
        library, result, device = ctypes.c_void_p(), ctypes.c_int32(), ctypes.c_int32(0)
        indirect = ctypes.pointer(ctypes.pointer(library))
        self._call(self._function(f"_mlir_{PREFIX}_cuda_init"), [indirect, ctypes.pointer(result)], result)
        load = self._function(f"_mlir_{PREFIX}_cuda_load_to_device")
        self._call(load, [indirect, ctypes.pointer(device), ctypes.pointer(result)], result)
        self._library = library

    def _call(self, function, pointers: Sequence[object], result: ctypes.c_int32) -> None:
        """Call packed host code; raise what a callback kept, or HostError for an error code."""
        addresses = [p if isinstance(p, int) else ctypes.cast(p, ctypes.c_void_p).value for p in pointers]
        packed = (ctypes.c_void_p * len(addresses))(*addresses)
        session = self.session
        session.error = None
        with running(session):
            function(ctypes.cast(packed, ctypes.c_void_p), len(addresses))
        error, session.error = session.error, None
        if error is not None:
            raise error
        if result.value:
            raise HostError(f"the host function {self.name} returned cudaError {result.value}")

    def call(
        self,
        args: Sequence[object],
        on_launch: Callable[[Launch], None],
        *,
        kwargs: dict[str, object] | None = None,
        memory: Sequence[object] = (),
    ) -> GlobalMemory:
        """Run the host function on `args`, the compiled function's arguments in order.

        on_launch is called with each kernel launch before the host code goes on. memory: further CPU tensors, which
        kernels reach through addresses in int64 tensors or pointer arguments. Tensors are copied to simulated device
        memory before the call and back after it, even if it raises. Returns the simulated memory. Raises HostError for
        arguments that do not fit, and whatever on_launch raises.
        """
        values = self._bind(args, kwargs or {})
        with turn():
            session = self.session
            if session.memory is not None:
                raise HostError(f"{self.name} is running already")
            session.memory, session.on_launch = GlobalMemory(), on_launch
            try:
                packed = PackedArguments(self.slots, values, session.memory, memory)
                result = ctypes.c_int32()
                try:
                    self._call(self._entry, [*packed.pointers, ctypes.pointer(result)], result)
                finally:
                    session.memory.check_guards()
                    session.memory.copy_back()
                return session.memory
            finally:
                session.memory = session.on_launch = None

    def names(self, args: Sequence[object], kwargs: dict[str, object]) -> dict[str, object]:
        """The given arguments by name."""
        found = dict(zip((p.name for p in self.host.parameters), args, strict=False))
        return found | kwargs

    def _bind(self, args: Sequence[object], kwargs: dict[str, object]) -> list[Value]:
        """Flattened arguments in signature order."""
        parameters = {p.name: p for p in self.host.parameters}
        if len(args) > len(parameters):
            constexpr = self.host.fixed
            fixed = f"; {', '.join(constexpr)} were fixed when it was compiled" if constexpr else ""
            names = ", ".join(parameters)
            raise HostError(
                f"{self.name} takes {len(parameters)} arguments ({names}), got {len(args)}{fixed}"
            )
        streams = [name for name, p in parameters.items() if takes_stream(p.annotation) or "stream" in name]
        left_out = [None, *streams] if len(args) + len(kwargs) < len(parameters) else [None]
        first: HostError | None = None
        for stream in left_out:  # tvm-ffi callers omit the stream, wherever it stands
            given = [name for name in parameters if name != stream]
            bound = dict(zip(given, args, strict=False))
            for name, value in kwargs.items():
                if name not in parameters or name in bound:
                    reason = "given twice" if name in bound else "not an argument of the compiled function"
                    raise HostError(f"argument `{name}`: {reason}")
                bound[name] = value
            try:
                return self._values(bound)
            except HostError as error:
                first = first or error
        raise first

    def _values(self, bound: dict[str, object]) -> list[Value]:
        """Flattened arguments, by name, in signature order."""
        values = self._flatten(bound)
        if len(values) != len(self.slots):  # compiled through TVM-FFI, a NamedTuple's numbers may fill slots
            by_field = self._flatten(bound, by_field=True)
            values = by_field if len(by_field) == len(self.slots) else values
        return values

    def _flatten(self, bound: dict[str, object], by_field: bool = False) -> list[Value]:
        values: list[Value] = []
        for parameter in self.host.parameters:
            value = bound.get(parameter.name, parameter.default)
            annotation, at = parameter.annotation, len(values)
            if value is inspect.Parameter.empty:
                if at < len(self.slots) and isinstance(self.slots[at].type, StreamType):
                    annotation = CUstream
                if takes_stream(annotation):
                    value = None  # all streams are the same here; tvm-ffi callers omit theirs
            if value is inspect.Parameter.empty:
                raise HostError(f"argument `{parameter.name}` is missing")
            if parameter.was_none is True and value is not None:
                raise HostError(f"argument `{parameter.name}`: {plain(value)}; it was None when compiled")
            found = list(flatten(parameter.name, value, annotation, by_field=by_field))
            if parameter.was_none is False and value is None and not found:
                raise HostError(f"argument `{parameter.name}`: None; it was not None when compiled")
            values += found
        return values


def _require_native(compiled: object) -> None:
    kind = type(compiled).__name__
    needed = ("ir_module", "execution_args", "artifacts", "dump_to_object", "function_name")
    if not all(hasattr(compiled, n) for n in needed) or compiled.ir_module is None:
        raise HostError(f"{kind} is not what cute.compile returns; compile with {COMPILE_OPTIONS}")
    if getattr(compiled, "total_added_arguments", 0):
        raise HostError(
            f"{compiled.function_name} takes workspace arguments, which the simulator does not supply"
        )


def _require_ptx(host: HostFunction) -> str:
    ptx = host.artifacts.PTX
    if not ptx:
        raise HostError(f"{host.name} was compiled without its PTX; use {COMPILE_OPTIONS}")
    if "\n" not in ptx:  # the DSL keeps the path of a file that it could not read
        raise HostError(f"the DSL has not written the PTX of {host.name} to {ptx}")
    return ptx


def _target(ptx: str) -> str:
    found = re.search(r"^\s*\.target\s+(sm_\d+\w?)", ptx, re.MULTILINE)
    target = found[1] if found else "PTX without .target"
    device_of(target)  # raises HostError if there is none
    return target


def _host_function(compiled) -> HostFunction:
    try:
        return HostFunction.of(compiled)
    except (DSLBaseError, DSLRuntimeError, RuntimeError) as error:
        raise HostError(f"the DSL does not export {compiled.function_name}: {error}") from error


def _load(image: bytes) -> llvm.ExecutionEngine:
    """Link a host object into this process."""
    require_symbols(undefined_symbols(image))
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # The large code model: callbacks may lie further than 2 GiB from where LLVM puts the code.
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True, codemodel="large")
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(image))
    engine.finalize_object()
    return engine
