"""Calls of MLA's decode: drawn at random as serving makes them, or said in a line ("B64 q2 k154..19416 128/1")."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from .mla_peers import PAGE
from .sweep_draws import lengths, size

BF16, E4M3, V32 = "bf16", "e4m3", "v3.2"
ROWS = {BF16: 2 * 576, E4M3: 576, V32: 656}  # bytes of a row, by the rows' format
SELECTED = 2048  # most keys of a query over rows of V3.2
HEADS = (8, 16, 32, 64, 128)
QUERIES = (1, 1, 1, 2, 3, 4)
MOST_BATCH, LEAST_KEYS, MOST_KEYS = 160, 64, 32768
MOST_PAGES = 1 << 16  # of all requests: 4.8 GB in bf16
SHORTEST = (0, 1 / 128, 1 / 8, 1 / 2)  # the shortest request that may be drawn, as a share of the longest
# Calls of docs/measurements.md.
NAMED = {
    BF16: (
        *(f"B128 q1 k4096 {heads}/1" for heads in (128, 64, 16, 8)),
        *("B8 q1 k8192 128/1", "B80 q1 k2352 128/1", "B64 q1 k154..19416 128/1", "B64 q1 k24..4944 64/1"),
        *("B24 q1 k116..7109 64/1", "B28 q1 k312..4968 128/1", "B22 q4 k532..22388 32/1"),
        *("B48 q2 k107..16314 16/1", "B1 q1 k8192 128/1"),
    ),
    E4M3: (
        *(f"B128 q1 k4096 {heads}/1" for heads in HEADS[::-1]),
        *("B48 q2 k107..16314 16/1", "B8 q1 k162..16631 32/1", "B7 q4 k19660 8/1", "B31 q2 k262..2414 16/1"),
        *("B1 q1 k16384 16/1", "B32 q1 k8192 16/1"),
    ),
    V32: (
        *(f"B128 q1 k2048 {heads}/1" for heads in (128, 64)),
        *("B70 q1 k2048 128/1", "B160 q1 k2048 64/1", "B128 q1 k64..2048 64/1", "B8 q1 k2048 128/1"),
    ),
}
LINE = re.compile(r"B(\d+) q(\d+) k(\d+)(?:\.\.(\d+))? (\d+)/1")


@dataclass(frozen=True)
class MlaCall:
    """A call of ``mla_decode``, or of ``gathered_attention`` over rows of V3.2.

    rows: of ROWS. heads: of a query. queries: of each request, its last ones. keys: of each request. q_codes: whether
    our queries over rows of e4m3 are in e4m3, as the peer's always are.
    """

    rows: str
    heads: int
    queries: int
    keys: tuple[int, ...]
    q_codes: bool = False

    def __post_init__(self):
        object.__setattr__(self, "keys", tuple(self.keys))
        assert self.rows in ROWS and self.queries <= min(self.keys)
        assert self.rows == E4M3 or not self.q_codes

    @property
    def batch(self) -> int:
        return len(self.keys)

    @property
    def name(self) -> str:
        least, most = min(self.keys), max(self.keys)
        keys = f"{most}" if least == most else f"{least}..{most}"
        return f"B{self.batch} q{self.queries} k{keys} {self.heads}/1"

    @property
    def lists(self) -> tuple[int, ...]:
        """Selected keys of each query over rows of V3.2: all that it sees, or SELECTED."""
        before = range(self.queries - 1, -1, -1)
        return tuple(min(keys - i, SELECTED) for keys in self.keys for i in before)

    @property
    def read_keys(self) -> int:
        """Rows that the call reads."""
        return sum(self.lists if self.rows == V32 else self.keys)

    @property
    def pages(self) -> int:
        """Pages of all requests."""
        return sum(-(-keys // PAGE) for keys in self.keys)

    @property
    def bytes(self) -> int:
        """Bytes of the rows that the call reads, of Q and of O."""
        queries = self.batch * self.queries * self.heads
        return self.read_keys * ROWS[self.rows] + 2 * queries * (576 + 512)


def to_json(call: MlaCall) -> dict:
    return asdict(call)


def from_json(fields: dict) -> MlaCall:
    return MlaCall(**fields)


def drawn(draw: random.Random, rows: str) -> MlaCall:
    """A random call, of equal or of unequal requests."""
    batch, queries, heads = size(draw, 1, MOST_BATCH), draw.choice(QUERIES), draw.choice(HEADS)
    most, equal = size(draw, LEAST_KEYS, MOST_KEYS), draw.random() < 0.4
    least = max(round(most * draw.choice(SHORTEST)), queries)
    return MlaCall(rows, heads, queries, lengths(draw, batch, most, equal, least))


def draw_calls(number: int, seed: int, rows: str) -> list[MlaCall]:
    """Different random calls; the same for the same numbers. The first ones do not depend on how many there are."""
    draw, found = random.Random(f"MLA {rows} {seed}"), {}
    while len(found) < number:
        call = drawn(draw, rows)
        if call.pages <= MOST_PAGES:
            found[call] = None
    return list(found)


def said(lines: list[str], seed: int, rows: str) -> Iterator[MlaCall]:
    """The calls of lines; lengths between two bounds are drawn, with both of them. "named": those of NAMED.

    Raises ValueError for a line of another form.
    """
    for line in lines:
        if line == "named":
            yield from said(NAMED[rows], seed, rows)
            continue
        found = LINE.fullmatch(line)
        if found is None:
            raise ValueError(f'a call is said as "B64 q2 k154..19416 128/1", or by "named"; got {line!r}')
        batch, queries, least, most, heads = (None if text is None else int(text) for text in found.groups())
        if min(batch, queries, heads) < 1 or heads > HEADS[-1] or not queries <= least <= (most or least):
            raise ValueError(f"{line}: needs requests, 1 to {HEADS[-1]} heads, and keys for all queries")
        keys = [least] * batch
        if most is not None:
            draw = random.Random(f"{line} {seed}")
            keys = [least, most, *(draw.randint(least, most) for _ in range(batch - 2))][:batch]
            draw.shuffle(keys)
        call = MlaCall(rows, heads, queries, tuple(keys))
        if call.pages > MOST_PAGES:
            raise ValueError(f"{line}: has {call.pages} pages, at most {MOST_PAGES} are timed")
        yield call
