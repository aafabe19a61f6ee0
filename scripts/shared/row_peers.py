"""Peers of softmax and of softmax + top-k: functions of a matrix of logits."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

QUACK = "QuACK"
SOFTMAX_LENGTH = 2**20  # of QuACK: at 2**23 its launch is refused, at 2**25 it does not finish compiling
TOPK_LENGTH = 4096  # longest row that QuACK's top-k takes


def quack_softmax(length: int) -> bool:
    """Whether QuACK is installed and has a softmax of such rows. Imports nothing."""
    return find_spec("quack") is not None and length % 8 == 0 and length <= SOFTMAX_LENGTH


def quack_topk(length: int, k: int) -> bool:
    """Whether QuACK is installed and has a top-k of such rows. Imports nothing."""
    powers = all(n & (n - 1) == 0 for n in (length, k))
    return find_spec("quack") is not None and length <= TOPK_LENGTH and powers


def torch_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def softmax_peers(length: int) -> dict[str, Callable]:
    """Name -> function of x, those that are installed and take rows of ``length``."""
    found = {"torch": torch_softmax}
    if quack_softmax(length):
        from quack.softmax import softmax_fwd

        found[QUACK] = softmax_fwd
    return found


def topk_peers(length: int, k: int, renormalize: bool = False) -> dict[str, Callable]:
    """Name -> function of logits to (probabilities, indices), those that are installed and take such rows.

    QuACK's probabilities are among the k, whether ``renormalize`` or not.
    """

    def of_all(x):
        return torch.topk(torch.softmax(x, -1, dtype=torch.float32), k)

    def of_the_k(x):
        values, indices = torch.topk(x, k)
        return torch.softmax(values, -1, dtype=torch.float32), indices

    found = {"torch": of_the_k if renormalize else of_all}
    if quack_topk(length, k):
        from quack.topk import topk

        found[QUACK] = lambda x: topk(x, k, softmax=True)
    return found
