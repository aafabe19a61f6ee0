"""Where in the source a kernel's operations come from, worked out once a call site instead of once an operation.

The DSL gives every operation the line and column of the call that built it. It walks the stack and decodes positions
for each one anew, and unrolled loops build many from the same call: two fifths of the time of tracing.
"""

from __future__ import annotations

import contextlib

from cutlass._mlir import ir
from cutlass._mlir_helpers import op

# Of the DSL's module: the first frame of a stack that is the user's; what is known of a frame; the MLIR location.
FUNCTIONS = ("_find_user_frame", "_fast_frameinfo", "_get_location_from_frame_info")
USED = (*FUNCTIONS, "_is_framework_stack_frame", "_INCLUDE_LIB_FRAME", "_ENABLE_FRAME_FILTERING")


@contextlib.contextmanager
def remembered():
    """While this is entered, the locations of a call site are worked out once; they are the same. A DSL without these
    functions works as it does."""
    if not all(hasattr(op, name) for name in USED):
        yield
        return
    own = {name: getattr(op, name) for name in FUNCTIONS}
    _, describe, locate = own.values()
    of_framework: dict = {}  # by code
    descriptions: dict = {}  # by code and offset of the instruction
    locations: dict = {}  # by context and the identity of a description, which stays in `descriptions`

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
        key = ir.Context.current, id(description)  # of this thread: others may compile kernels of their own
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
