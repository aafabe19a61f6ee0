"""Lengths of a call's requests, as far as the host knows them; ``cost`` judges plans by them.

The host knows the longest request and, if queries are packed, the number of requests to within an eighth. The lengths
are on the device. A scenario is a list of ``Requests`` that such a call may consist of. A plan should do well in all of
them.
"""

from __future__ import annotations

from typing import NamedTuple

from warpspec.fmha.problem import AttentionProblem


class Requests(NamedTuple):
    """``count`` requests that have ``queries`` queries and ``keys`` keys each."""

    count: float
    queries: float
    keys: float


FRACTIONS = (0.13, 0.38, 0.62, 0.87)  # fractions of the longest length that represent evenly drawn lengths
# Queries of the mean request as a fraction of the longest one's: requests are alike from EVEN on, few are long up to
# FEW.
EVEN, FEW = 0.8, 0.3
CHUNK = 0.6  # queries of a request in its prefill, as a fraction of the longest one's
FIRST, LAST = 0.25, 0.85  # keys early and late in prefill, as fractions of the longest request's
SHORT = 0.3  # keys of requests that decode, as a fraction of the longest one's, if few of them have many
UNKNOWN_TOTAL = 1.06  # queries, as a multiple of their lower bound


def scenarios(problem: AttentionProblem) -> list[list[Requests]]:
    """The scenarios of a call; at least one."""
    batch, queries, keys = problem.batch, problem.seq_q, problem.seq_k
    if not problem.requests.packed_q:
        return key_scenarios(problem, queries)
    total = min(max(problem.least_q * UNKNOWN_TOTAL, queries + batch - 1), batch * queries)
    mean = total / batch
    if queries == 1 or batch == 1:
        return key_scenarios(problem, mean)
    if mean >= EVEN * queries:
        return [[Requests(batch, mean, keys)], spread(batch, mean, keys, queries)]
    if mean > FEW * queries:
        return [spread(batch, mean, keys, queries)]
    found = [mixed(batch, total, queries, keys)]
    if queries >= EVEN * keys:  # the longest request may have nothing but its queries, and others few keys
        found.append(mixed(batch, total, queries, keys, SHORT * keys))
    return found


def key_scenarios(problem: AttentionProblem, queries: float) -> list[list[Requests]]:
    """Scenarios of requests with ``queries`` queries each; of their keys, only the maximum may be known."""
    batch, keys = problem.batch, problem.seq_k
    equal = [Requests(batch, queries, keys)]
    if batch == 1 or not (problem.requests.has_kv_lengths or problem.requests.packed_k):
        return [equal]
    return [equal, [Requests(1, queries, keys), *even(batch - 1, queries, keys)]]


def even(count: float, queries: float, keys: float) -> list[Requests]:
    """Requests whose keys are spread evenly."""
    return [
        Requests(count / len(FRACTIONS), queries, max(keys * fraction, queries)) for fraction in FRACTIONS
    ]


def spread(batch: int, mean: float, keys: int, longest: int) -> list[Requests]:
    """Requests whose queries and keys are spread evenly; the longest is among them."""
    before, count = keys - longest, batch - 1
    rest = max(mean * batch - longest, count) / count  # queries of the others' mean request
    found = [
        Requests(count / len(FRACTIONS), fraction * 2 * rest, fraction * (2 * rest + before))
        for fraction in FRACTIONS
    ]
    return [Requests(1, longest, keys), *found]


def mixed(
    batch: int, total: float, longest: int, keys: int, decoding_keys: float | None = None
) -> list[Requests]:
    """Requests that decode, of which one has the most keys, and some in prefill, the longest among them.

    decoding_keys: keys of the longest request that decodes; None: as many as any has.
    """
    chunks = min(max(round((total - batch) / (CHUNK * longest)), 1), batch)
    decoding = batch - chunks
    found = [Requests(1, longest, max(CHUNK * keys, longest))]
    if chunks > 1:
        each = max((total - decoding - longest) / (chunks - 1), 1)
        found += [Requests((chunks - 1) / 2, each, max(fraction * keys, each)) for fraction in (FIRST, LAST)]
    if decoding:
        most = decoding_keys or keys
        found.append(Requests(1, 1, most))
        found += even(decoding - 1, 1, most) if decoding > 1 else []
    return found
