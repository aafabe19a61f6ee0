"""The mask inside kernels: hides the scores of keys that a row does not see.

By selection, never by addition: what stands at a hidden key may be NaN.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32


def hide(scores: cute.Tensor, first, end) -> None:
    """scores (n) fp32 registers: those outside [first, end), counted from the first score, become -inf.

    first: Int32, or None where rows are not bounded on that side.
    """
    for i in range(cute.size(scores)):
        seen = Boolean(end > i)
        if first is not None:
            seen = seen & Boolean(first <= i)
        scores[i] = Float32(cutlass.select_(seen, scores[i], -Float32.inf))
