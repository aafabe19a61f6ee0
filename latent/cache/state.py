"""The state that a layer keeps of each request besides its pools: the window and the compressor's unfinished entries.

Both are rings indexed by position, so that taking back rejected draft tokens costs nothing. Rings have ``max_draft``
rows more than the layer needs, and tokens given again at a position overwrite the earlier ones. Only the number of
accepted tokens changes (``commit``). HCA's windows are long, so they are kept as a fold, an online softmax over their
tokens. Tokens that may still be taken back stand beside the fold as rows and are added to it once they are settled.

A token is settled once it lies ``max_draft`` or more before the furthest position that the request has written. Settled
tokens stay; any pattern of calls may take back the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpspec.common.checks import (
    ANY,
    INTEGER_DTYPES,
    check_choice,
    check_device,
    check_int,
    check_kind,
    check_range,
    check_tensor,
    shape_of,
)
from warpspec.common.outputs import check_elements, has_memory
from warpspec.latent.cache.models import (
    CONTENT_AND_GATE,
    KINDS,
    ONLINE_NUMBERS,
    OVERLAP,
    POSITION_LIMIT,
    CacheConfig,
)
from warpspec.latent.cache.pools import NO_SLOT, LatentPool

WRITTEN, SETTLED = range(2)  # columns of ``Tail.progress``
TAIL_KINDS = ("csa", "hca")
DRAFT_LIMIT = 2**16  # most draft tokens of a call
REQUEST_LIMIT = 2**20
NO_REQUEST = -1


@dataclass(frozen=True, eq=False)
class Tail:
    """The compressor's unfinished entries of every request, for one compressor of one layer.

    kind: "csa" or "hca". stride: tokens of an entry. dim: channels of an entry. max_draft: tokens within this distance
    of the furthest position written can be taken back. rows: fp32 [requests, ring, 2, c dim], C and Z (with the
    positional bias) of tokens; position p is in row p % ring, and c is 2 for CSA. online: HCA's fold, fp32 [requests,
    3, dim], over the settled tokens of the last window: largest Z, sum of exp(Z - largest), sum of exp(Z - largest) C;
    None for CSA. progress: int32 [requests, 2]: how many tokens are written (where the last call ended), and how many
    are settled and can no longer be taken back. The next call starts between the two, or at 0. Raises TypeError or
    ValueError naming the field.
    """

    kind: str
    stride: int
    dim: int
    max_draft: int
    rows: torch.Tensor
    online: torch.Tensor | None
    progress: torch.Tensor

    def __post_init__(self):
        check_sizes(kind=self.kind, stride=self.stride, dim=self.dim, max_draft=self.max_draft)
        check_tensor("progress", self.progress, (torch.int32,), (ANY, 2))
        requests, device = len(self.progress), self.progress.device
        numbers = (requests, self.ring, CONTENT_AND_GATE, self.series * self.dim)
        check_tensor("rows", self.rows, (torch.float32,), numbers, device)
        if self.kind == "csa" and self.online is not None:
            raise ValueError("online: must be None for kind 'csa', got a tensor")
        if self.kind == "hca":
            numbers = (requests, ONLINE_NUMBERS, self.dim)
            check_tensor("online", self.online, (torch.float32,), numbers, device)

    @classmethod
    def empty(cls, kind: str, stride: int, dim: int, requests: int, max_draft: int, device="cpu") -> Tail:
        """The tail of requests without tokens. Raises TypeError or ValueError naming the argument."""
        check_sizes(kind=kind, stride=stride, dim=dim, max_draft=max_draft)
        check_int("requests", requests, 0, REQUEST_LIMIT)
        device = check_device("device", device)
        numbers = {"dtype": torch.float32, "device": device}
        online = None
        ring, width = ring_rows(kind, stride, max_draft), OVERLAP * dim
        if kind == "hca":
            width = dim
            online = torch.zeros(requests, ONLINE_NUMBERS, dim, **numbers)
        rows = torch.zeros(requests, ring, CONTENT_AND_GATE, width, **numbers)
        progress = torch.zeros(requests, 2, dtype=torch.int32, device=device)
        return cls(kind, stride, dim, max_draft, rows, online, progress)

    @property
    def requests(self) -> int:
        return len(self.progress)

    @property
    def series(self) -> int:
        """c: how many times ``dim`` channels C and Z of a token have."""
        return OVERLAP if self.kind == "csa" else 1

    @property
    def ring(self) -> int:
        """Rows of a request's ring."""
        return ring_rows(self.kind, self.stride, self.max_draft)


def ring_rows(kind: str, stride: int, max_draft: int) -> int:
    """Rows of a request's ring: the tokens that may be taken back, and for CSA those of two windows."""
    return max_draft + (OVERLAP * stride if kind == "csa" else 0)


def check_sizes(*, kind, stride, dim, max_draft) -> None:
    """Raise TypeError or ValueError for sizes that no ``Tail`` has."""
    check_choice("kind", kind, TAIL_KINDS)
    check_int("stride", stride, 1, POSITION_LIMIT)
    check_int("dim", dim, 1, POSITION_LIMIT)
    check_int("max_draft", max_draft, 0, DRAFT_LIMIT)


class StateCache:
    """The states of ``requests`` requests in one layer.

    config: the model's shapes. kind: "window", "csa" or "hca". max_draft: the most draft tokens of a call; all tokens
    of a call but its first may be taken back. lengths: int32 [requests], which a model's layers share; None: this layer
    gets its own, zeros.

    .window: a ``LatentPool`` whose page r is request r's ring: the token at position p is in row p % page_size.
    .tail, .index_tail: ``Tail`` of the entries and of the index keys; None where the kind has none. .lengths: accepted
    tokens. Setting the length to 0 (``release``) is all that a new request needs.
    Raises TypeError or ValueError naming the argument.
    """

    def __init__(
        self,
        config: CacheConfig,
        kind: str,
        requests: int,
        max_draft: int = 0,
        *,
        lengths: torch.Tensor | None = None,
        device="cpu",
    ):
        check_kind("config", config, CacheConfig)
        check_choice("kind", kind, KINDS)
        check_int("requests", requests, 1, REQUEST_LIMIT)
        check_int("max_draft", max_draft, 0, DRAFT_LIMIT)
        device = check_device("device", device)
        if lengths is None:
            lengths = torch.zeros(requests, dtype=torch.int32, device=device)
        check_tensor("lengths", lengths, (torch.int32,), (requests,))
        check_elements("lengths", lengths)
        self.config, self.kind, self.requests, self.max_draft = config, kind, requests, max_draft
        self.lengths = lengths
        device = lengths.device
        self.window = LatentPool.empty(requests, config.window + max_draft, config.latent, device=device)
        self.tail = self.index_tail = None
        if kind != "window":
            sizes = (kind, config.stride(kind))
            self.tail = Tail.empty(*sizes, config.dim, requests, max_draft, device)
        if kind == "csa":
            self.index_tail = Tail.empty(*sizes, config.index_dim, requests, max_draft, device)

    def commit(self, accepted: torch.Tensor | int, requests: torch.Tensor | None = None) -> None:
        """Accept the first ``accepted`` of the tokens just written and take the others back. No synchronisation.

        accepted: an int of at least 0, or int32 on the state's device: one number, or one for each of the requests.
        requests: int32 or int64 [R], the requests to update, no two alike; None: all. ``compress`` says which tokens
        can be taken back. Raises TypeError or ValueError naming the argument, before anything is written. Values in
        tensors are checked on the CPU only; on a GPU, requests that are out of range are skipped.
        """
        count = self.requests
        if requests is not None:
            self._check_requests(requests)
            count = len(requests)
        if isinstance(accepted, torch.Tensor):
            shape = () if accepted.dim() == 0 else (count,)
            check_tensor("accepted", accepted, (torch.int32,), shape, self.lengths.device)
            check_range("accepted", accepted, 0, POSITION_LIMIT, "tokens")
        else:
            check_int("accepted", accepted, 0, POSITION_LIMIT)
        if requests is None:
            self.lengths += accepted
            return
        known = (requests >= 0) & (requests < self.requests)
        new = torch.where(known, accepted, 0).to(torch.int32)
        self.lengths.index_add_(0, torch.where(known, requests, 0), new)

    def release(self, requests: torch.Tensor | None = None) -> None:
        """Make requests empty, ready for new ones. requests: as in ``commit``, which says what is raised."""
        if requests is None:
            self.lengths.zero_()
            return
        self._check_requests(requests)
        known = (requests >= 0) & (requests < self.requests)
        rows = torch.arange(self.requests, device=requests.device)
        released = (torch.where(known, requests, NO_REQUEST)[:, None] == rows).any(0)
        self.lengths.masked_fill_(released, 0)

    def window_slots(self, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int32 slots in ``window`` of tokens; -1 where the position is negative.

        requests, positions: int32 or int64, the request and position of each token, of shapes that broadcast. For a
        request out of range a GPU gives a slot outside the pool; the CPU raises ValueError. Raises TypeError or
        ValueError naming the argument.
        """
        self._check_tokens(requests, positions)
        try:
            torch.broadcast_shapes(requests.shape, positions.shape)
        except RuntimeError as error:
            raise ValueError(
                f"positions: shape must broadcast with requests' {shape_of(requests)}, got {shape_of(positions)}"
            ) from error
        return self._slots(requests, positions)

    def window_keys(
        self, requests: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(slots int32 [T, window], lengths int32 [T]): the keys that tokens at ``positions`` see, oldest first.

        requests, positions: int32 or int64 [T]. Slots are those of ``window_slots``. Raises what it raises, and
        ValueError for lengths that differ.
        """
        self._check_tokens(requests, positions, (ANY,))
        if len(requests) != len(positions):
            raise ValueError(
                f"positions: shape must be requests' [{len(requests)}], got {shape_of(positions)}"
            )
        lengths = (positions + 1).clamp(0, self.config.window).to(torch.int32)
        steps = torch.arange(self.config.window, device=positions.device)
        seen = positions[:, None] + 1 - lengths[:, None] + steps
        slots = self._slots(requests[:, None], seen)
        return torch.where(steps < lengths[:, None], slots, NO_SLOT), lengths

    def _slots(self, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``window_slots`` of checked arguments."""
        size = self.window.page_size
        # Out of range: a page before or after the pool.
        pages = requests.clamp(-1, self.requests).to(torch.int32)
        return torch.where(positions >= 0, pages * size + positions.to(torch.int32) % size, NO_SLOT)

    def _check_requests(self, requests) -> None:
        """Check a list of requests: each in range, no two alike."""
        check_tensor("requests", requests, INTEGER_DTYPES, (ANY,), self.lengths.device)
        check_range("requests", requests, 0, self.requests - 1, "the cache's requests")
        if requests.device.type == "cpu" and has_memory(requests) and len(requests.unique()) != len(requests):
            raise ValueError(f"requests: each may be given once, got {requests.tolist()}")

    def _check_tokens(self, requests, positions, shape: tuple[int, ...] | None = None) -> None:
        """Check the request and position of tokens."""
        check_tensor("requests", requests, INTEGER_DTYPES, shape, self.lengths.device)
        check_tensor("positions", positions, INTEGER_DTYPES, shape, self.lengths.device)
        check_range("requests", requests, 0, self.requests - 1, "the cache's requests")
