"""Numbers on command lines: types of ``argparse`` options, which say what is allowed."""

from __future__ import annotations

import argparse

MOST = 2**31 - 1


def positive(text: str) -> int:
    """The number of an option, at least 1."""
    return _within(text, 1)


def natural(text: str) -> int:
    """The number of an option, at least 0."""
    return _within(text, 0)


def _within(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= MOST:
        raise argparse.ArgumentTypeError(f"must be an integer from {least} to {MOST}, got {text}")
    return value
