"""Speculative decoding in SGLang (EAGLE, stand-alone draft models, n-grams): drafts of a tree, and their verification.

A step of speculative decoding drafts several tokens for each request, which form a tree, and verifies all of them in
one forward pass of the model.

While the draft model runs, each request has ``topk`` branches, each with a chain of drafts (``Branches``). A branch has
pages of its own after the prefix. The first of them repeats the prefix's last, incomplete page, so that a page table
of the prefix's whole pages and the branch's describes the keys of a branch.

While the model verifies, the drafts lie after the prefix, one after another, and a mask says who sees whom
(``tree_of``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from warpspec.common.errors import UnsupportedProblem
from warpspec.fmha import tree_words
from warpspec.fmha.tree import MOST_DRAFTS


@dataclass(frozen=True)
class Branches:
    """The step of drafting that a backend computes.

    step: how many drafts of a branch come before this one. topk: branches of a request. steps: drafts of a branch.
    """

    step: int
    topk: int
    steps: int

    def positions(self, lengths: torch.Tensor, width: int, page_size: int) -> torch.Tensor:
        """[B topk, pages] int64: the place of each page's first key in SGLang's table of slots.

        lengths: [B], lengths of the prefixes. width: keys that all pages of a branch together have room for.
        """
        first = torch.arange(0, width, page_size, device=lengths.device)
        if self.topk == 1:
            return first.expand(len(lengths), -1)
        tail = (lengths % page_size).long()[:, None, None]
        prefix = lengths.long()[:, None, None] - tail
        pages = (tail + self.steps + page_size - 1) // page_size  # a branch's own pages
        branch = torch.arange(self.topk, device=lengths.device)[None, :, None]
        return torch.where(first < prefix, first, first + branch * pages * page_size).flatten(0, 1)


def new_mask(runner) -> VerifyMask | None:
    """Allocate memory for the masks of trees, [requests, drafts, drafts], which SGLang fills when it has drafted.

    Returns None for a runner that verifies nothing. Raises UnsupportedProblem for more drafts than a tree may have.
    """
    drafts = None if runner.is_draft_worker else get_spec().speculative_num_draft_tokens
    if not drafts:
        return None
    if drafts > MOST_DRAFTS:
        raise UnsupportedProblem(
            f"--speculative-num-draft-tokens: must be at most {MOST_DRAFTS} with --attention-backend warpspec, got "
            f"{drafts}"
        )
    requests = runner.req_to_token_pool.size
    mask = torch.ones(requests * drafts * drafts, dtype=torch.bool, device=runner.device)
    return VerifyMask(buffer=mask, mode=TreeMaskMode.QLEN_ONLY, max_bs=requests)


def is_chain(spec) -> bool:
    """Whether what SGLang verifies is one chain of drafts, which are causal."""
    return spec.custom_mask is None or getattr(spec, "topk", None) == 1


def take_mask(spec, lengths: torch.Tensor, memory: VerifyMask) -> None:
    """Copy a mask to ``memory`` unless SGLang has written it there itself.

    spec: SGLang's record of the drafts that it verifies. lengths: [B], lengths of the prefixes. The mask has a row for
    each draft of a request, with a bool for each token of the prefix and each draft.
    """
    mask, drafts = spec.custom_mask, spec.draft_token_num
    if mask.data_ptr() == memory.buffer.data_ptr():
        return
    lengths = lengths.long()[:, None, None]
    row = lengths + drafts
    start = (row * drafts).cumsum(0) - row * drafts  # place of a request's first row in the mask
    draft = torch.arange(drafts, device=mask.device)
    places = start + draft[:, None] * row + lengths + draft
    memory.buffer[: places.numel()] = mask[places.flatten()]


def tree_of(memory: VerifyMask, requests: int, drafts: int) -> torch.Tensor:
    """Make ``attention_varlen``'s argument ``tree``, int64 [requests * drafts], of the mask in ``memory``."""
    seen = memory.buffer[: requests * drafts * drafts].view(requests, drafts, drafts)
    return tree_words(seen).flatten()


class Drafting:
    """The backends of a draft model, one for each drafting step but the last: nothing attends from the last drafts."""

    needs_cpu_seq_lens = False

    def __init__(self, runner, topk: int, steps: int, make) -> None:
        """make: a function that makes a backend, from the runner and ``Branches``."""
        self.attn_backends = [make(runner, Branches(step, topk, steps)) for step in range(steps - 1)]
        self.attn_backend_list = self.attn_backends
        self.forward_metadata = None

    def init_forward_metadata(self, forward_batch) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        """Does nothing: a graph computes what it needs."""

    def init_forward_metadata_in_graph(self, forward_batch) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)
