"""What of a call decides, beside its tiles, fields of its kernel and the ways to hand out its work."""

from __future__ import annotations

from warpspec.common.operands import BFLOAT16
from warpspec.fmha.config import EXACT_QUERIES
from warpspec.fmha.line import AHEAD_REQUESTS, FEW_MEAN_ROWS
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.sm90.shapes import WARPGROUP_ROWS


def lengths_decide(problem: AttentionProblem) -> bool:
    """Whether a line of this problem's requests follows from their lengths alone, and these are few enough to be
    kept."""
    requests = problem.requests
    return requests.has_kv_lengths and not requests.has_q_start and problem.batch <= AHEAD_REQUESTS


def splits_as_means(problem: AttentionProblem, pack: int) -> bool:
    """Whether splits over rows of which V is a part leave means of values in fp16, as pieces do
    (``AttentionConfig.leaves_means``): with so few rows they take longer. pack: heads that share a tile."""
    rows = pack * min(problem.seq_q, WARPGROUP_ROWS // pack)
    bf16 = problem.normalize and problem.format.dtype == BFLOAT16
    return bf16 and problem.format.shared_kv and problem.heads.qk > problem.heads.v and rows > FEW_MEAN_ROWS


def has_two_tensors(problem: AttentionProblem) -> bool:
    """Whether K and V are two tensors, without a bias or lists of blocks: paired consumers then may have a scheduler
    warp."""
    return not (problem.format.shared_kv or problem.mask.has_blocks or problem.bias is not None)


def reads_ranges(problem: AttentionProblem) -> bool:
    """Whether paired consumers have a scheduler warp for the sake of ranges: roles that find their own tiles have no
    registers to read these, and visit all keys."""
    return problem.mask.has_ranges and has_two_tensors(problem)


def has_unknown_lengths(problem: AttentionProblem) -> bool:
    """Whether only the device knows the lengths of paired consumers' work: a CTA may then have one tile, or take tiles
    or partitions of the keys from a queue. Other calls, and requests alike of many queries, were not timed so."""
    requests = problem.requests
    few = requests.has_kv_lengths and problem.seq_q <= EXACT_QUERIES
    return (requests.packed_q or few) and has_two_tensors(problem)
