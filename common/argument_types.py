"""Records, for every compiled host function, the MLIR types of its arguments and its kernels' storage structs.

The DSL discards the module that has this information once it is lowered. The simulator needs the types (element types,
static sizes, divisibilities, alignments) to check and pack arguments, and names barriers after the fields of storage
structs. Importing this module starts the recording, so import it before calling `cute.compile`.
"""

from __future__ import annotations

import functools
import re

import cutlass  # noqa: F401  (as a whole first: tests/test_layers.py)
from cutlass.cutlass_dsl import cutlass as cutlass_dsl

RECORD_ATTRIBUTE = "_warpspec_argument_types"  # attribute of the compiled function: tuple of MLIR type texts
STORAGE_ATTRIBUTE = "_warpspec_storage"  # attribute of the compiled function: `Storage`
SHARED_ALLOCATION = re.compile(r'!cute\.memref<i8, smem, align<(?P<align>\d+)>, "(?P<bytes>\d+):1">')

# Fields of each kernel's dynamic shared memory, by the kernel's name: (name, bytes, offset).
Storage = dict[str, tuple[tuple[str, int, int], ...]]
HOOK_MARK = "_warpspec_records"


def argument_types(compiled: object) -> tuple[str, ...] | None:
    """MLIR type of each argument slot of `compiled`'s host function; None if it was compiled without recording."""
    return getattr(compiled, RECORD_ATTRIBUTE, None)


def _input_types(module, name: str) -> tuple[str, ...] | None:
    """MLIR types of the inputs of the function `name` at the top of `module`, before lowering."""
    for op in module.body.operations:
        if op.operation.name == "func.func" and op.attributes["sym_name"].value == name:
            return tuple(str(t) for t in op.attributes["function_type"].value.inputs)
    return None


def storage_of(compiled: object) -> Storage:
    """Fields of the storage structs of `compiled`'s kernels, as far as they are known."""
    return getattr(compiled, STORAGE_ATTRIBUTE, {})


def _own_operations(operation):
    """The operations in an operation's regions, in order, without those nested deeper."""
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation


def _operations(operation):
    """All operations inside an operation, at any depth, in order."""
    for op in _own_operations(operation):
        yield op
        yield from _operations(op)


def _storage(module) -> Storage:
    """Storage fields of the kernels of a module before lowering, for allocations that follow one another."""
    return {
        op.attributes["sym_name"].value: tuple(_fields(op))
        for gpu_module in _own_operations(module.operation)
        for op in _own_operations(gpu_module)
        if op.name == "cuda.kernel"
    }


def _fields(kernel):
    """Name, bytes and offset of each field of the storage structs that a kernel allocates, and of the padding in them,
    whose name is empty."""
    end = 0
    for op in _operations(kernel):
        if op.name != "cute.memref.alloca" or ", smem," not in (kind := str(op.results[0].type)):
            continue
        allocation = SHARED_ALLOCATION.fullmatch(kind)
        if allocation is None:  # the offset of the next allocation is unknown
            return
        start = -(-end // int(allocation["align"])) * int(allocation["align"])
        end = start + int(allocation["bytes"])
        if "smem.struct_fields" in op.attributes:
            filled = start
            for name, size, offset in sorted(_declared(op), key=lambda field: field[2]):
                if start + offset > filled:
                    yield "", start + offset - filled, filled
                yield name, size, start + offset
                filled = max(filled, start + offset + size)


def _declared(allocation):
    """Name, bytes and offset in the struct of each field of an allocation."""
    for field in allocation.attributes["smem.struct_fields"]:
        name, size, offset = field.value.rsplit(":", 2)
        yield name, int(size), int(offset)


def record_argument_types() -> None:
    """Start recording. A second call changes nothing."""
    base = cutlass_dsl.CutlassBaseDSL
    compile_and_cache = base.compile_and_cache
    if hasattr(compile_and_cache, HOOK_MARK):
        return

    @functools.wraps(compile_and_cache)
    def recording(self, module, module_hash, function_name, *args, **kwargs):
        # Read them now, because lowering rewrites the module in place.
        types = _input_types(module, function_name)
        storage = _storage(module)
        compiled = compile_and_cache(self, module, module_hash, function_name, *args, **kwargs)
        if types is not None and hasattr(compiled, "__dict__"):
            setattr(compiled, RECORD_ATTRIBUTE, types)
            setattr(compiled, STORAGE_ATTRIBUTE, storage)
        return compiled

    setattr(recording, HOOK_MARK, True)
    base.compile_and_cache = recording


record_argument_types()
