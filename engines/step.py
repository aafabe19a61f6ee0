"""The schedule of a decoding step of latent attention: its first layer makes it, and all layers use it.

In a CUDA graph of a step, the launch that computes the schedule is a part of the graph, so each replay computes it for
the lengths that it finds.
"""

from __future__ import annotations

import torch

from warpspec.engines import queries
from warpspec.fmha import DecodeSchedule
from warpspec.latent import mla_schedule


def schedule_of(
    batch, q: torch.Tensor, pages: torch.Tensor, page_table: torch.Tensor, kv_lengths: torch.Tensor
) -> DecodeSchedule:
    """The schedule of a call of ``mla_decode``, which ``batch``, the engine's object for the step, keeps in its
    attribute ``schedule``. A new one is made for a batch with other lengths, for layers of other sizes, and for a graph
    if the kept one was made before the capture: replays would not compute it."""
    captures = kv_lengths.is_cuda and torch.cuda.is_current_stream_capturing()
    lengths, captured, found = getattr(batch, "schedule", None) or (None, None, None)
    if lengths is not kv_lengths or captured != captures or not found.fits(q, pages, page_table):
        _, each, heads, _ = q.shape
        found = mla_schedule(
            kv_lengths, heads=heads, queries=each, max_pages=page_table.shape[1], page_size=pages.shape[1],
            dtype=pages.dtype, q_dtype=q.dtype if q.dtype == queries.CODES else None,
        )  # fmt: skip
        batch.schedule = kv_lengths, captures, found
    return found
