"""Shorten tracebacks of simulator errors to the frames that the author of a kernel knows."""

from __future__ import annotations

import os
from types import TracebackType

OURS = tuple(f"{os.sep}{package}{os.sep}" for package in ("warpspec", "nvidia_cutlass_dsl"))


def to_callers(entry: TracebackType | None) -> TracebackType | None:
    """Cut a traceback after its last frame outside this package and the DSL; unchanged if there is no such frame."""
    last, at = None, entry
    while at is not None:
        if not any(part in at.tb_frame.f_code.co_filename for part in OURS):
            last = at
        at = at.tb_next
    if last is not None:
        last.tb_next = None
    return entry
