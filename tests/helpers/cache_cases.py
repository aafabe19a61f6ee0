"""Requests that grow through ``compress`` in calls of any size: what a test gives, and where entries end up."""

from dataclasses import dataclass

import torch

from warpspec.latent.cache import IndexPool, LatentPool, Tail, compress, ops, rope_table, table_slots

POISON = 0xA5
PAGE_SIZE = 16
PAGES = 2  # of a request
POSITIONS = 4096


@dataclass(frozen=True)
class Compressor:
    """Weights, and the tokens of all requests: content_gate [requests, N, 2, c dim]; the rest as in ``Tail``."""

    kind: str
    stride: int
    dim: int
    content_gate: torch.Tensor
    ape: torch.Tensor
    weight: torch.Tensor
    cos_sin: torch.Tensor

    @classmethod
    def random(
        cls, kind: str, requests: int, tokens: int, *, stride: int | None = None, dim: int = 512, seed=0
    ):
        generator = torch.Generator().manual_seed(seed)
        stride = stride or (4 if kind == "csa" else 128)
        width = dim * (2 if kind == "csa" else 1)
        numbers = torch.randn(requests, tokens, 2, width, generator=generator)
        numbers[:, :, 1] *= 3  # gates that tell tokens apart
        return cls(
            kind,
            stride,
            dim,
            numbers,
            torch.randn(stride, width, generator=generator),
            0.5 + torch.rand(dim, generator=generator),
            rope_table(1e4 ** (-torch.arange(32) / 32), POSITIONS),
        )


@dataclass
class Run:
    """A pool and a tail, and the requests that go through them; request i's state is row ``states[i]``."""

    compressor: Compressor
    pool: LatentPool | IndexPool
    tail: Tail
    states: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def start(cls, compressor: Compressor, format: str, max_draft: int = 0, device="cpu") -> "Run":
        requests = len(compressor.content_gate)
        kind = LatentPool if compressor.dim == 512 else IndexPool
        pool = kind.empty(requests * PAGES, PAGE_SIZE, format, device=device)
        pool.data.fill_(POISON)
        sizes = (compressor.stride, compressor.dim, requests + 1, max_draft)
        tail = Tail.empty(compressor.kind, *sizes, device)
        for tensor in (tail.rows, tail.online):
            if tensor is not None:
                tensor.fill_(torch.nan)  # of requests that were there before
        return cls(
            compressor,
            pool,
            tail,
            torch.arange(requests, 0, -1, dtype=torch.int32, device=device),
            torch.randperm(requests * PAGES, generator=torch.Generator().manual_seed(1))
            .reshape(requests, PAGES)
            .to(device),
            torch.zeros(requests, dtype=torch.int32, device=device),
        )

    def arguments(self, counts: list[int], given: dict[int, torch.Tensor] | None = None) -> dict:
        """``compress``'s arguments for this many tokens of each request. given: other tokens than its own, by
        request."""
        c, device = self.compressor, self.pool.device
        parts, slots = [], []
        for i, count in enumerate(counts):
            start = int(self.lengths[i])
            parts.append((given or {}).get(i, c.content_gate[i, start : start + count]))
            positions = torch.arange(start, start + count, device=device)
            entries = torch.where((positions + 1) % c.stride == 0, positions // c.stride, -1)
            slots.append(table_slots(self.table[i : i + 1], entries[None], PAGE_SIZE)[0])
        ends = torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32)
        return {
            "content_gate": torch.cat(parts).to(device),
            **{name: getattr(c, name).to(device) for name in ("ape", "weight", "cos_sin")},
            "tail": self.tail,
            "requests": self.states,
            "starts": self.lengths.clone(),
            "cu_seqlens": ends,
            "pool": self.pool,
            "slots": torch.cat(slots),
        }

    def call(
        self,
        counts: list[int],
        accepted: list[int] | None = None,
        *,
        backend: str,
        hadamard=False,
        given=None,
        checked=True,
    ):
        """One call; the first ``accepted`` tokens of each request count, by default all. checked: False: as on a GPU,
        where the host does not see the values of starts."""
        arguments = self.arguments(counts, given)
        if checked:
            compress(**arguments, hadamard=hadamard, backend=backend)
        else:
            ops.run_compress(ops.CompressCall(**arguments, eps=1e-6, hadamard=hadamard, backend=backend))
        self.lengths += torch.tensor(accepted or counts, dtype=torch.int32, device=self.pool.device)

    def entry_slots(self, request: int) -> torch.Tensor:
        """int32 [entries]: of the entries that the request's accepted tokens complete."""
        count = int(self.lengths[request]) // self.compressor.stride
        rows = torch.arange(count, device=self.pool.device)
        return table_slots(self.table[request : request + 1], rows[None], PAGE_SIZE)[0]

    def entries(self, request: int) -> torch.Tensor:
        """uint8 [entries, bytes]: the bytes of those entries' rows."""
        page, data, scales = self.pool._bytes_of(self.entry_slots(request).long())
        return torch.cat((self.pool.data[page, data], self.pool.data[page, scales]), dim=1)


def grow(run: Run, tokens: int, way: str, *, backend: str, hadamard: bool = False, seed: int = 0) -> Run:
    """Every request grows to ``tokens`` tokens. way: "prefill" (one call), "chunked" (calls of any
    size), "tokens" (one each), "speculative" (drafts, of which some are wrong and taken back)."""
    generator = torch.Generator().manual_seed(seed)
    requests, drafts = len(run.lengths), run.tail.max_draft

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    if way == "prefill":
        run.call([tokens] * requests, backend=backend, hadamard=hadamard)
    while (left := [tokens - n for n in run.lengths.tolist()]) and max(left):
        if way == "chunked":
            run.call([min(n, draw(0, 1 + tokens // 2)) for n in left], backend=backend, hadamard=hadamard)
        elif way == "tokens":
            run.call([min(n, 1) for n in left], backend=backend, hadamard=hadamard)
        else:
            counts = [min(n, 1 + drafts) for n in left]
            accepted = [draw(min(n, 1), n) for n in counts]
            given = {}
            for i, (count, right) in enumerate(zip(counts, accepted, strict=True)):
                start = int(run.lengths[i])
                own = run.compressor.content_gate[i, start : start + count].clone()
                # Drafts that turn out wrong.
                own[right:] = torch.randn(own[right:].shape, generator=generator)
                given[i] = own
            run.call(counts, accepted, backend=backend, hadamard=hadamard, given=given)
    return run


def expected_entries(compressor: Compressor, request: int, tokens: int) -> torch.Tensor:
    """fp64 [entries, dim] by the definition, from all tokens at once: pooled, not normalised."""
    stride, dim = compressor.stride, compressor.dim
    count = tokens // stride
    numbers = compressor.content_gate[request, : count * stride].double()
    content, gate = numbers.unflatten(0, (count, stride)).unbind(2)  # [entries, stride, c dim]
    gate = gate + compressor.ape.double()
    if compressor.kind == "csa":
        before = torch.full_like(gate[:1, :, :dim], -torch.inf)
        gate = torch.cat((torch.cat((before, gate[:-1, :, :dim])), gate[..., dim:]), dim=1)
        nothing = torch.zeros_like(content[:1, :, :dim])
        content = torch.cat((torch.cat((nothing, content[:-1, :, :dim])), content[..., dim:]), dim=1)
    return (gate.softmax(dim=1) * content).sum(1)
