"""Threads take turns: one at a time loads host code or runs kernels.

A launch forks processes (`processes.py`). A lock that another thread holds at that moment, LLVM's for example, stays
locked in the new process for ever.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable

_lock = threading.RLock()


def turn() -> threading.RLock:
    """The lock that a thread holds while it loads or runs; a thread may take it again."""
    return _lock


def in_turns(function: Callable) -> Callable:
    """Decorator: calls of the function from several threads run one after another."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with turn():
            return function(*args, **kwargs)

    return call


def _renew() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew)  # the thread that holds it may be one that the child does not have
