"""How packed requests whose queries all see all of their keys are dealt to CTAs, and which key tiles are cut.

All key tiles of a request then have the same steps. CTAs go through the requests, the longest first, and within one
through its rows (KV heads, or slices of their heads), and through the key tiles of each row. A *run* is a number of
these tiles, one after another in this order, that are cut into the same number of pieces. The first kernel lays the
runs out (``device.runs``); a CTA of the main kernel finds the run that its number is in.

Pieces are of one length for all requests (``pieces``), or they shrink with the work that is left: with R steps left
when a round of CTAs begins, one for each SM, a piece of that round has at most R / (KEPT SMs) of them, but LEAST starts
of a CTA. So the first key tiles are whole, and pieces that begin late end with the others. That takes

    (all steps + start P) / SMs + LEAST start + cost C

for P pieces, C of them of tiles that are cut, or what the longest piece takes if that is more. In short calls the
device takes the shorter of the two by these formulas. In others it lays out CANDIDATES, each with a KEPT and a LEAST of
its own, deals their pieces to the SMs, and takes the one that is done first: a thread for each counts how many SMs are
free at which of TIMES.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from warpspec.fmha.backward.dealing import Dealing
from warpspec.fmha.backward.pieces import PieceLength, parts_of

MOST_REQUESTS = 512  # that one CTA sorts
KEPT = 0.8  # SMs for which a piece leaves work, as a part of all
LEAST = 6.0  # steps of the shortest piece, in starts of a CTA
# Candidates have LEASTS values of LEAST, each twice the one before, with each KEPT, which doubles in OCTAVE values.
CANDIDATES, LEASTS, OCTAVE, FIRST_KEPT, FIRST_LEAST = 32, 4, 7, 0.65, 4.0
TIMES, HORIZON = 64, 1.35  # times, and what they cover: of the mean load if all tiles are whole
DEALT_STEPS = 120.0  # steps of an SM on average from which candidates are dealt: else it takes too long
SHRINKS = 2.5  # steps of an SM, in shortest pieces, from which pieces may shrink
FURTHER = 3  # pieces beside one of each key tile, for each SM, at most
# Numbers of a run in tile_order, and which is which: its first CTA, its request, its first key tile among those of the
# request's rows, pieces of each tile, the place of the first piece's sums, key tiles of a row.
FIRST_CTA, RUN_REQUEST, FIRST_TILE, RUN_PIECES, FIRST_PLACE, RUN_TILES = range(6)


class Request(NamedTuple):
    """steps: of each key tile. tiles: of each row."""

    steps: int
    tiles: int


class Run(NamedTuple):
    """A row of tile_order; the fields are named as the numbers above."""

    first_cta: int
    request: int
    first_tile: int
    pieces: int
    first_place: int
    tiles: int


class Layout(NamedTuple):
    """runs: in order. ctas: of all. cut: pieces of key tiles that are cut. parts: (CTAs, steps of each) of each part of
    a run that was laid out at a time."""

    runs: list[Run]
    ctas: int
    cut: int
    parts: list[tuple[int, float]]


def most_runs(requests: int, ctas: int, sms: int) -> int:
    """How many runs there may be: each begins with a request or a round."""
    return requests + ctas // sms + 2


def lay_out(
    requests: Sequence[Request], rows: int, sms: int, least: float, kept: float, further: int
) -> Layout:
    """Lay out the runs. least: steps of the shortest piece. kept: SMs for which a piece leaves work; 0: all pieces have
    ``least`` steps at most. further: how many pieces there may be beside one of each key tile."""
    keys = [-(-steps // parts_of(steps, least)) if not kept else steps for steps, _ in requests]
    left = sum(steps * tiles for steps, tiles in requests) * rows
    runs, dealt, cta, place, round_end, limit = [], [], 0, 0, 0, least
    for number in sorted(range(len(requests)), key=lambda number: -keys[number]):
        steps, tiles = requests[number]
        first = 0
        while first < tiles * rows:
            if cta >= round_end:
                round_end = (cta // sms + 1) * sms
                limit = max(least, left / kept) if kept else least
            parts = parts_of(steps, limit)
            parts = parts if parts - 1 <= further else 1
            count = tiles * rows - first
            if parts > 1:
                count = min(count, further // (parts - 1))
            if kept and steps:
                fit = -(-(round_end - cta) // parts)
                if parts == 1:  # and so in further rounds
                    fit += max(math.floor((left - fit * steps - kept * steps) / (steps * sms)) + 1, 0) * sms
                count = min(count, fit)
            if not first or parts != runs[-1].pieces:
                runs.append(Run(cta, number, first, parts, place, tiles))
            dealt.append((count * parts, steps / parts))
            first, cta, left = first + count, cta + count * parts, left - count * steps
            further -= count * (parts - 1)
            place += count * parts if parts > 1 else 0
    return Layout(runs, cta, place, dealt)


def candidate(number, exp2=math.exp2) -> tuple:
    """(KEPT, LEAST) of a candidate. number: an int or Int32."""
    octaves, doublings = number // LEASTS * (1.0 / OCTAVE), number % LEASTS * 1.0
    return FIRST_KEPT * exp2(octaves), FIRST_LEAST * exp2(doublings)


def quantum_of(length: PieceLength, total, tiles):
    """The distance of two times, in steps. total, tiles: steps and key tiles of a KV head. Floats or Float32."""
    return length.share * (total + length.start * tiles) * (HORIZON / TIMES)


def dealt_steps(length: PieceLength, requests: Sequence[Request], rows: int, number: int) -> float:
    """What a candidate takes, by dealing its pieces."""
    sms, (kept, least) = round(rows / length.share), candidate(number)
    layout = lay_out(requests, rows, sms, least * length.start, kept * sms, length.further)
    total, tiles = sum(steps * tiles for steps, tiles in requests), sum(tiles for _, tiles in requests)
    quantum, dealing = quantum_of(length, total, tiles), Dealing(sms, TIMES)
    for count, steps in layout.parts:
        dealing.deal(count, (steps + length.start) / quantum)
    return dealing.last * quantum + length.cost / rows * layout.cut


def expected_steps(length: PieceLength, rows, total, layout, first, least, maximum=max):
    """The formula above, per SM. total: steps of all rows. layout: (pieces, those of cut tiles). first: steps of the
    longest piece. least: of the shortest. Floats or Float32."""
    ctas, cut = layout
    share = length.share / rows
    return (
        maximum(share * (total + length.start * ctas) + least, first + length.start)
        + length.cost / rows * cut
    )


def shrinking_steps(length: PieceLength, requests: Sequence[Request], rows: int) -> float:
    """What pieces take that shrink, by the formula above."""
    sms, least = round(rows / length.share), LEAST * length.start
    total = sum(steps * tiles for steps, tiles in requests) * rows
    if total <= SHRINKS * least * sms:
        return math.inf
    layout = lay_out(requests, rows, sms, least, KEPT * sms, length.further)
    first = max((requests[run.request].steps / run.pieces for run in layout.runs), default=0.0)
    return expected_steps(length, rows, total, (layout.ctas, layout.cut), first, least)
