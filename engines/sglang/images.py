"""Images whose tokens see each other: Gemma 3 and Gemma 4.

SGLang gives such images to its own backends as masks, or as ranges; ours takes ranges of keys (``attention_varlen``).
"""

from __future__ import annotations

from enum import Enum

import torch
from sglang.srt.model_executor.forward_context import get_attn_backend

from warpspec.common.errors import UnsupportedProblem

CHUNKS = "--chunked-prefill-size (chunked_prefill_size)"


class Images(Enum):
    """In which layers the tokens of an image see each other."""

    EVERY_LAYER = "every layer"
    WINDOWS = "layers with a window, as far back as the window reaches"
    NOWHERE = "no layer"


MODELS = {
    "Gemma3ForConditionalGeneration": Images.EVERY_LAYER,
    "Gemma4ForConditionalGeneration": Images.WINDOWS,
    "Gemma4UnifiedForConditionalGeneration": Images.WINDOWS,
}


def kind_of(model) -> Images | None:
    """How a model's images are seen; None for models that describe none."""
    kind = MODELS.get(type(model).__name__)
    if kind is Images.WINDOWS and model.config.text_config.use_bidirectional_attention != "vision":
        return Images.NOWHERE  # the smaller models of Gemma 4
    return kind


def offer(runner) -> None:
    """Let a runner's model describe its images to our backends."""
    kind = kind_of(runner.model)
    if kind is None or not runner.model_config.is_multimodal:
        return
    size = runner.server_args.chunked_prefill_size
    if kind is not Images.NOWHERE and size is not None and size > 0:
        raise UnsupportedProblem(
            f"{CHUNKS}: must be -1 for models whose images see all of themselves, because a chunk may end inside of an "
            f"image, got {size}; for text alone, set enable_multimodal to False"
        )
    own = runner.model.prepare_attn_masks

    def prepare_attn_masks(forward_batch, input_ids, mask_dtype):
        from warpspec.engines.sglang.attention import WarpspecBackend

        backend = get_attn_backend()
        backend = getattr(backend, "prefill_backend", backend)  # SGLang may use two backends in turn
        if not isinstance(backend, WarpspecBackend):
            own(forward_batch, input_ids, mask_dtype)
        elif kind is not Images.NOWHERE:
            backend.forward_metadata.ranges = ranges_of(forward_batch, kind).to(input_ids.device)
            backend.forward_metadata.images = kind

    runner.model.prepare_attn_masks = prepare_attn_masks


def ranges_of(step, kind: Images) -> torch.Tensor:
    """int32 [T, 2] on the host: the keys of its image that each new token sees, -1 for a token of no image.

    Where a window cuts images, a range begins at the token's own position: the keys before it are the window's.
    """
    queries, prefixes = step.extend_seq_lens_cpu, step.extend_prefix_lens_cpu
    ranges = torch.full((sum(queries), 2), -1, dtype=torch.int32)
    start = 0  # the request's first row
    for new, prefix, inputs in zip(queries, prefixes, step.mm_inputs, strict=True):
        items = [] if inputs is None else inputs.mm_items
        for begin, end in (offset for item in items if item.is_image() for offset in item.offsets):
            first = max(begin, prefix)  # tokens of the image may be in the cache
            if first > end or begin >= prefix + new:
                continue
            if end >= prefix + new:
                raise UnsupportedProblem(
                    f"{CHUNKS}: an image at tokens {begin} to {end} does not end in the chunk of tokens {prefix} to "
                    f"{prefix + new - 1}; set it to -1"
                )
            rows = slice(start + first - prefix, start + end + 1 - prefix)
            ranges[rows, 0] = begin
            ranges[rows, 1] = end
            if kind is Images.WINDOWS:
                ranges[rows, 0] = torch.arange(first, end + 1, dtype=torch.int32)
        start += new
    return ranges
