"""The mask inside kernels: it hides the scores of keys that a row does not see.

By selection, never by addition: what stands at a hidden key may be NaN.
"""

from __future__ import annotations

from collections.abc import Iterable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32


def hide(scores: cute.Tensor, keys: Iterable[tuple[int, int]], first, end) -> None:
    """Scores of a row outside the keys [first, end) become -inf.

    scores: (n) fp32 registers. keys: (element, key) of each of the row's scores, keys counted from where first and end
    count. first: Int32, or None where rows are not bounded on that side.
    """
    for i, key in keys:
        seen = Boolean(end > key)
        if first is not None:
            seen = seen & Boolean(first <= key)
        scores[i] = Float32(cutlass.select_(seen, scores[i], -Float32.inf))
