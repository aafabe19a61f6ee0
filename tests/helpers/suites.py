"""Which parameters of a test belong to the long suite (``make test-long``)."""

from collections.abc import Hashable, Iterable

import pytest


def long(*values):
    """A set of parameters of the long suite."""
    return pytest.param(*values, marks=pytest.mark.long)


def long_but(default: Iterable[Hashable], values: Iterable[Hashable]) -> list:
    """All values as parameters; those that are not in ``default`` belong to the long suite. A tuple is a set."""
    chosen = tuple(default)
    return [
        value if value in chosen else long(*value) if isinstance(value, tuple) else long(value)
        for value in values
    ]
