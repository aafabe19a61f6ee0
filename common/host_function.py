"""A compiled host function without the DSL's objects: code, types and names.

A ``HostFunction`` can be kept in a file (``kernel_cache``), and it is all that the simulator needs
(``sim.host.HostModule``).
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import typing
from dataclasses import dataclass, field
from typing import NamedTuple

import cutlass
from cuda.bindings.driver import CUstream
from cutlass.base_dsl.typing import NumericMeta
from cutlass.cute import Tensor
from cutlass.cutlass_dsl import CuTeDSL

from warpspec.common.argument_types import Storage, argument_types, storage_of

PREFIX = "warpspec"  # the symbols of an exported object begin with it


class Artifacts(NamedTuple):
    """The code of a compiled function's kernels, under the DSL's names: PTX is text, CUBIN an ELF file; None if not
    kept."""

    PTX: str | None
    CUBIN: bytes | None


class Parameter(NamedTuple):
    """A parameter of a host function.

    annotation, default: as in ``inspect.Parameter``, with ``inspect.Parameter.empty`` where there is none. was_none:
    whether it was None when the function was compiled; None if the DSL does not tell.
    """

    name: str
    annotation: object
    default: object
    was_none: bool | None


@dataclass(frozen=True, eq=False)
class HostFunction:
    """A compiled host function.

    name: its own. function_type: its LLVM type as MLIR text. argument_types: the MLIR type of each argument slot before
    lowering, or None if the compilation was not recorded. parameters: what a call passes, in order. fixed: names of
    parameters whose values were fixed by compilation. artifacts: its kernels. has_kernels: whether it launches any.
    code: its host code, a relocatable ELF object of this machine whose symbols begin with PREFIX.
    """

    name: str
    function_type: str
    argument_types: tuple[str, ...] | None
    parameters: tuple[Parameter, ...]
    fixed: tuple[str, ...]
    artifacts: Artifacts
    has_kernels: bool
    code: bytes = field(repr=False)
    # Fields of its kernels' shared memory, by kernel name.
    storage: Storage = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, compiled) -> HostFunction:
        """Make it from what ``cute.compile`` returned, with TVM FFI or without.

        Raises RuntimeError, or what the DSL raises, if it cannot be exported.
        """
        execution = compiled.execution_args
        parameters = zip(execution.signature.parameters.values(), execution._compiled_with_none, strict=True)
        artifacts = compiled.artifacts
        return cls(
            name=compiled.function_name,
            function_type=_function_type(compiled),
            argument_types=argument_types(compiled),
            parameters=tuple(Parameter(p.name, p.annotation, p.default, none) for p, none in parameters),
            fixed=tuple(
                a["argument_name"] for a in execution.get_constexpr_args() if a["argument_name"] != "self"
            ),
            artifacts=Artifacts(None, None)
            if artifacts is None
            else Artifacts(artifacts.PTX, artifacts.CUBIN),
            has_kernels=compiled.has_gpu_module,
            code=_export(compiled),
            storage=storage_of(compiled),
        )

    def to_json(self) -> dict:
        """Everything but the code and the artifacts, as JSON. Raises TypeError for parameters whose annotations or
        defaults JSON cannot represent."""
        return {
            "name": self.name,
            "function_type": self.function_type,
            "argument_types": self.argument_types,
            "parameters": [_described(p) for p in self.parameters],
            "fixed": self.fixed,
            "has_kernels": self.has_kernels,
            "storage": self.storage,
        }

    @classmethod
    def from_json(cls, description: dict, artifacts: Artifacts, code: bytes) -> HostFunction:
        """The host function described by ``to_json``'s result."""
        types, empty = description["argument_types"], inspect.Parameter.empty
        return cls(
            name=description["name"],
            function_type=description["function_type"],
            argument_types=None if types is None else tuple(types),
            parameters=tuple(
                Parameter(name, _annotation(annotation), empty, none)
                for name, annotation, none in description["parameters"]
            ),
            fixed=tuple(description["fixed"]),
            artifacts=artifacts,
            has_kernels=description["has_kernels"],
            code=code,
            storage={
                kernel: tuple((name, size, offset) for name, size, offset in fields)
                for kernel, fields in description["storage"].items()
            },
        )


def _function_type(compiled) -> str:
    name = compiled.function_name
    for op in compiled.ir_module.body.operations:
        if op.operation.name == "llvm.func" and op.attributes["sym_name"].value == name:
            return str(op.attributes["function_type"])
    raise RuntimeError(f"the compiled module has no host function {name}")


def _export(compiled) -> bytes:
    """Export the host code as an object file.

    The DSL pickles the Python signature into it, but some default values (CUstream's) and annotations cannot be
    pickled. Nothing here reads that copy, so an empty signature takes its place.
    """
    _load_dsl_runtime()
    execution = compiled.execution_args
    signature, execution.signature = execution.signature, inspect.Signature()
    try:
        return compiled.dump_to_object(PREFIX)
    finally:
        execution.signature = signature


@functools.cache
def _load_dsl_runtime() -> None:
    """Make the DSL's runtime library visible to its object exporter, which resolves symbols in the process.

    The DSL loads the library only when it compiles for the machine it is on, which without a GPU is sm_100a. Exporting
    a function compiled for sm_90a would otherwise fail.
    """
    for path in CuTeDSL._get_dsl().get_shared_libs():
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


STREAM, PLAIN = "stream", ""  # names of annotations; numbers are named by their type


def _described(parameter: Parameter) -> list:
    """Name, annotation and ``was_none``, as JSON."""
    annotation, empty = parameter.annotation, inspect.Parameter.empty
    if parameter.default is not empty:
        raise TypeError(f"parameter {parameter.name} has a default value")
    allowed = typing.get_args(annotation)  # members of a union
    if len(allowed) == 2 and allowed[1] is type(None) and isinstance(allowed[0], NumericMeta):
        annotation = allowed[0]
    if annotation is CUstream:
        kind = STREAM
    elif isinstance(annotation, NumericMeta) and getattr(cutlass, annotation.__name__, None) is annotation:
        kind = annotation.__name__
    elif annotation in (empty, Tensor, Tensor | None):
        kind = PLAIN
    else:
        raise TypeError(f"parameter {parameter.name} is annotated {annotation!r}")
    return [parameter.name, kind, parameter.was_none]


def _annotation(kind: str) -> object:
    if kind == STREAM:
        return CUstream
    return inspect.Parameter.empty if kind == PLAIN else getattr(cutlass, kind)
