"""Finds the source location of a kernel's operations once a call site instead of once an operation.

The DSL gives every operation the line and column of the call that built it. For each operation it walks the stack and
decodes positions again, although unrolled loops build many operations from the same call. This took two fifths of the
time of tracing.
"""

from __future__ import annotations

import contextlib

import cutlass  # noqa: F401  (as a whole first: tests/test_layers.py)
from cutlass._mlir import ir
from cutlass._mlir_helpers import op

# Functions of the DSL's module: find the user's first frame on the stack, describe a frame, make the MLIR location.
FUNCTIONS = ("_find_user_frame", "_fast_frameinfo", "_get_location_from_frame_info")
USED = (*FUNCTIONS, "_is_framework_stack_frame", "_INCLUDE_LIB_FRAME", "_ENABLE_FRAME_FILTERING")


@contextlib.contextmanager
def remembered():
    """A context in which the location of a call site is computed once; locations are the same as without it. A DSL
    without these functions works as usual."""
    if not all(hasattr(op, name) for name in USED):
        yield
        return
    own = {name: getattr(op, name) for name in FUNCTIONS}
    _, describe, locate = own.values()
    of_framework: dict = {}  # key: code object
    descriptions: dict = {}  # key: code object and instruction offset
    locations: dict = {}  # key: context and id of a description, which `descriptions` keeps alive

    def find_user_frame(start):
        if op._INCLUDE_LIB_FRAME or not op._ENABLE_FRAME_FILTERING:
            return start
        frame = start
        while frame is not None:
            code = frame.f_code
            skipped = of_framework.get(code)
            if skipped is None:
                skipped = of_framework[code] = op._is_framework_stack_frame(frame)
            if not skipped:
                return frame
            frame = frame.f_back
        return start

    def describe_once(frame):
        place = frame.f_code, frame.f_lasti
        found = descriptions.get(place)
        if found is None:
            found = descriptions[place] = describe(frame)
        return found

    def locate_once(description):
        # The context is this thread's; other threads may compile too.
        key = ir.Context.current, id(description)
        found = locations.get(key)
        if found is None:
            found = locations[key] = locate(description)
        return found

    for name, function in zip(FUNCTIONS, (find_user_frame, describe_once, locate_once), strict=True):
        setattr(op, name, function)
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(op, name, function)
