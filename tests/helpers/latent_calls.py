"""Calls of MLA decode over rows of 576 numbers, in bf16 and in codes, and lengths that kernels read wrongly."""

from __future__ import annotations

import torch
from cutlass import cute

from helpers.attention_cases import Case
from warpspec.fmha.device import cut_ahead

MLA = dict(head_dim=576, v_dim=512, heads_kv=1, shared_kv=True)
# A rank of tensor parallelism has few heads: those of several queries fill a tile. Rows that see one key, or none.
DRAFTS = Case(
    "drafts",
    batch=3,
    seq_q=5,
    seq_k=300,
    heads_q=16,
    causal=True,
    kv_lengths=(300, 130, 3),
    scale=0.07,
    **MLA,
)


def codes_of(pages: torch.Tensor) -> torch.Tensor:
    """e4m3 [pages, 64, 576] in memory with room between pages, NaN where ``pages`` has it."""
    room = torch.full((len(pages), 64 * 576 + 48), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = room[:, : 64 * 576].unflatten(1, (64, 576))
    codes.copy_(pages.to(torch.float8_e4m3fn))
    return codes


def in_codes(call: tuple, options: dict) -> tuple[tuple, dict]:
    """A call with its queries in e4m3, under a scale."""
    q, *rest = call
    codes = (q.float() / q.float().abs().amax() * 448).to(torch.float8_e4m3fn)
    return (codes, *rest), options | {
        "q_scale": torch.tensor([0.125]), "scale": options["scale"] * float(q.float().abs().amax()) / 56
    }  # fmt: skip


def misread_lengths(monkeypatch) -> list:
    """Let kernels that find their cuts ahead read lengths that the launch before goes on to change: all of them, or
    only one. Chunks by the lengths read first would leave keys out, and state pieces that no CTA has. Returns what each
    reading has found once a kernel is compiled."""
    copy, reads = cut_ahead.copy_lengths, []

    def copy_at_first(lengths, chunks):
        """The function, and other lengths in the place of those read first, which the loop's are compared with."""
        changed = copy(lengths, chunks)
        if not reads:
            lane = cute.arch.lane_idx()
            chunks.lengths[lane] = 100 * lane
            cute.arch.sync_warp()
        reads.append(changed)
        return changed

    monkeypatch.setattr(cut_ahead, "copy_lengths", copy_at_first)
    return reads
