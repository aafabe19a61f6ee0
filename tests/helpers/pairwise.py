"""Few combinations of options in which every two options meet, where all are too many kernels to compile."""

import itertools


def pairwise(*axes: list) -> list[tuple]:
    """Rows of one value an axis in which every two values of two axes meet: each the row that adds most pairs."""

    def pairs(row: tuple) -> set:
        numbered = [(i, axes[i].index(value)) for i, value in enumerate(row)]
        return set(itertools.combinations(numbered, 2))

    rows = list(itertools.product(*axes))
    left, found = set().union(*map(pairs, rows)), []
    while left:
        found.append(max(rows, key=lambda row: len(pairs(row) & left)))
        left -= pairs(found[-1])
    return found
