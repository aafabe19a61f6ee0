"""Few combinations of options in which every two options meet, where all are too many kernels to compile."""

import itertools
from collections.abc import Callable


def pairwise(*axes: list, possible: Callable[[tuple], bool] = lambda row: True) -> list[tuple]:
    """Rows of one value an axis in which every two values of two axes meet that do so in any possible row: each the row
    that adds most pairs."""
    bits: dict[tuple, int] = {}

    def pairs(row: tuple) -> int:
        """A bit for each pair of a row."""
        numbered = [(i, axes[i].index(value)) for i, value in enumerate(row)]
        return sum(1 << bits.setdefault(pair, len(bits)) for pair in itertools.combinations(numbered, 2))

    rows = [(row, pairs(row)) for row in itertools.product(*axes) if possible(row)]
    left, found = (1 << len(bits)) - 1, []
    while left:
        row, own = max(rows, key=lambda each: (each[1] & left).bit_count())
        found.append(row)
        left &= ~own
    return found
