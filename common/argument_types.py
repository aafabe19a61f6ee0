"""Remembers, for every compiled host function, the MLIR types of its arguments.

The DSL drops the module that has them (element types, static sizes, divisibilities, alignments) once it is
lowered; the simulator needs them to check and pack arguments. Importing this module starts the recording: do
so before `cute.compile`.
"""

from __future__ import annotations

import functools

from cutlass.cutlass_dsl import cutlass as cutlass_dsl

RECORD_ATTRIBUTE = "_warpspec_argument_types"  # on the compiled function: tuple of MLIR type texts
HOOK_MARK = "_warpspec_records"


def argument_types(compiled: object) -> tuple[str, ...] | None:
    """MLIR type of each argument slot of `compiled`'s host function; None if it was compiled unrecorded."""
    return getattr(compiled, RECORD_ATTRIBUTE, None)


def _input_types(module, name: str) -> tuple[str, ...] | None:
    """MLIR types of the inputs of function `name` at the top of `module`, before lowering."""
    for op in module.body.operations:
        if op.operation.name == "func.func" and op.attributes["sym_name"].value == name:
            return tuple(str(t) for t in op.attributes["function_type"].value.inputs)
    return None


def record_argument_types() -> None:
    """Start recording. A second call changes nothing."""
    base = cutlass_dsl.CutlassBaseDSL
    compile_and_cache = base.compile_and_cache
    if hasattr(compile_and_cache, HOOK_MARK):
        return

    @functools.wraps(compile_and_cache)
    def recording(self, module, module_hash, function_name, *args, **kwargs):
        types = _input_types(module, function_name)  # now: lowering rewrites the module in place
        compiled = compile_and_cache(self, module, module_hash, function_name, *args, **kwargs)
        if types is not None and hasattr(compiled, "__dict__"):
            setattr(compiled, RECORD_ATTRIBUTE, types)
        return compiled

    setattr(recording, HOOK_MARK, True)
    base.compile_and_cache = recording


record_argument_types()
