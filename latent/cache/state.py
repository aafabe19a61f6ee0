"""What a layer keeps of each request besides its pools: the window and the compressor's unfinished entries.

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

from warpspec.latent.cache.models import CONTENT_AND_GATE, KINDS, ONLINE_NUMBERS, OVERLAP, CacheConfig
from warpspec.latent.cache.pools import LatentPool

WRITTEN, SETTLED = range(2)  # columns of ``Tail.progress``


@dataclass(frozen=True, eq=False)
class Tail:
    """The compressor's unfinished entries of every request, for one compressor of one layer.

    kind: "csa" or "hca". stride: tokens of an entry. dim: channels of an entry. max_draft: tokens within this distance
    of the furthest position written can be taken back. rows: fp32 [requests, ring, 2, c dim], C and Z (with the
    positional bias) of tokens; position p is in row p % ring, and c is 2 for CSA. online: HCA's fold, fp32 [requests,
    3, dim], over the settled tokens of the last window: largest Z, sum of exp(Z - largest), sum of exp(Z - largest) C;
    None for CSA. progress: int32 [requests, 2]: how many tokens are written (where the last call ended), and how many
    are settled and can no longer be taken back. The next call starts between the two, or at 0.
    """

    kind: str
    stride: int
    dim: int
    max_draft: int
    rows: torch.Tensor
    online: torch.Tensor | None
    progress: torch.Tensor

    @classmethod
    def empty(cls, kind: str, stride: int, dim: int, requests: int, max_draft: int, device="cpu") -> Tail:
        numbers = {"dtype": torch.float32, "device": device}
        online = None
        if kind == "csa":
            ring, width = OVERLAP * stride + max_draft, OVERLAP * dim
        else:
            ring, width = max_draft, dim
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
        if not isinstance(config, CacheConfig):
            raise TypeError(f"config: must be a CacheConfig, got {type(config).__name__}")
        if kind not in KINDS:
            raise ValueError(f"kind: must be one of {', '.join(KINDS)}, got {kind!r}")
        for name, value, least in (("requests", requests, 1), ("max_draft", max_draft, 0)):
            if type(value) is not int or value < least:
                raise ValueError(f"{name}: must be an int of at least {least}, got {value!r}")
        if lengths is None:
            lengths = torch.zeros(requests, dtype=torch.int32, device=device)
        elif not isinstance(lengths, torch.Tensor) or lengths.dtype != torch.int32:
            raise TypeError(
                f"lengths: must be an int32 tensor, got {getattr(lengths, 'dtype', type(lengths).__name__)}"
            )
        elif lengths.shape != (requests,):
            raise ValueError(f"lengths: shape must be [{requests}], got {list(lengths.shape)}")
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

        accepted: an int, or int32 on the state's device with one number a request. requests: int [R], the requests to
        update; None: all. ``compress`` says which tokens can be taken back.
        """
        if requests is None:
            self.lengths += accepted
        else:
            new = torch.as_tensor(accepted, dtype=torch.int32, device=self.lengths.device)
            self.lengths.index_add_(0, requests.long(), new.expand(len(requests)))

    def release(self, requests: torch.Tensor | None = None) -> None:
        """Make requests empty, ready for new ones. requests: int [R]; None: all."""
        if requests is None:
            self.lengths.zero_()
        else:
            self.lengths.index_fill_(0, requests.long(), 0)

    def window_slots(self, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int32 slots in ``window`` of tokens, given the request and position of each (any shape); -1 where one is
        negative."""
        size = self.window.page_size
        slots = requests.to(torch.int32) * size + positions.to(torch.int32) % size
        return torch.where(positions >= 0, slots, -1).to(torch.int32)

    def window_keys(
        self, requests: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(slots int32 [T, window], lengths int32 [T]): the keys that tokens at ``positions`` [T] see, oldest first."""
        lengths = (positions + 1).clamp(0, self.config.window).to(torch.int32)
        steps = torch.arange(self.config.window, device=positions.device)
        seen = positions[:, None] + 1 - lengths[:, None] + steps
        slots = self.window_slots(requests[:, None], seen)
        return torch.where(steps < lengths[:, None], slots, -1), lengths
