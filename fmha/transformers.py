"""`warpspec.fmha.attention` as an attention implementation of Hugging Face transformers.

    import warpspec.fmha.transformers
    warpspec.fmha.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="warpspec")

Handled: causal and causal sliding-window layers, attention sinks, grouped KV heads, dynamic and static KV
caches, padding on either side. Refused with `UnsupportedProblem`, never computed differently: dropout, masks
given as tensors, packed sequences, bidirectional, chunked and block-wise masks, soft caps, position biases,
`output_attentions`. There is no backward pass. As with transformers' flash attention, results of padding rows
are undefined.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from warpspec.common.errors import UnsupportedProblem
from warpspec.fmha import attention

# Arguments of transformers' attention functions that change the result and have no equivalent in `attention`.
UNSUPPORTED_ARGUMENTS = ("softcap", "head_mask", "position_bias", "cache", "output_attentions")


def register(name: str = "warpspec", backend: str = "auto") -> None:
    """Make `attn_implementation=name` compute attention with `warpspec.fmha.attention(backend=backend)`."""

    def forward(module, query, key, value, attention_mask, **kwargs):
        return attention_forward(module, query, key, value, attention_mask, backend=backend, **kwargs)

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, key_ranges)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    backend: str = "auto",
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function.

    query [B, Hq, Sq, D], key and value [B, Hkv, Sk, D], bf16 or fp16; attention_mask: what `key_ranges`
    returned; s_aux [Hq]: sink logits; sliding_window counts the row's own position.
    Returns ([B, Sq, Hq, D], None).
    """
    if dropout:
        raise UnsupportedProblem(f"dropout: must be 0, got {dropout}")
    for name in UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise UnsupportedProblem(f"{name}: not supported, got {type(kwargs[name]).__name__}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None and not causal:
        raise UnsupportedProblem("attention_mask: needs a causal layer, got is_causal=False")

    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))  # [B, S, H, D]
    ranges = {}
    if attention_mask is not None:
        first, q_start, kv_lengths = _columns(attention_mask, k.shape[0])
        if first is not None:
            k, v = _shift(k, first), _shift(v, first)
        ranges = {"q_start": q_start, "kv_lengths": kv_lengths}
    window = None if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1)
    o = attention(
        q, k, v, scale=scaling, causal=bool(causal), window=window, sink=s_aux, backend=backend, **ranges
    )
    return o, None


def key_ranges(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function=masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs,
) -> torch.Tensor | None:
    """transformers' mask function: which keys exist, and where the queries stand among them.

    Query i has position q_offset + i, key j position kv_offset + j; attention_mask [B, positions], bool or
    None, is False at padding. Returns None where the queries are the last of the keys and nothing is padding;
    otherwise int32 [B, 1, 1, 2 or 3] with (q_start, kv_length[, first]) as `attention` takes them, counted
    from the row's first key that is no padding; first is there only if some row has one. Four dimensions
    because transformers hands on masks of that rank as they are.
    """
    if not _is_causal_mask(mask_function):
        raise UnsupportedProblem(
            "mask: only causal and causal sliding-window masks are supported, not packed sequences, chunked, "
            "block-wise, bidirectional or custom masks"
        )
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length].bool()
    last = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if last and (padding is None or bool(padding.all())):
        return None

    q_start = torch.as_tensor(q_offset - kv_offset, device=device).expand(batch_size)
    if padding is None:
        columns = [q_start, torch.full_like(q_start, kv_length)]
    else:
        lengths = padding.sum(dim=1)
        first = padding.int().argmax(dim=1)
        index = torch.arange(kv_length, device=padding.device)
        if not torch.equal(padding, (index >= first[:, None]) & (index < (first + lengths)[:, None])):
            raise UnsupportedProblem(
                "attention_mask: must be padding before or after a row's tokens, not between"
            )
        columns = [q_start - first, lengths, first] if bool(first.any()) else [q_start, lengths]
    return torch.stack(columns, dim=1).to(torch.int32)[:, None, None, :]


def _is_causal_mask(mask_function) -> bool:
    """Whether it is transformers' causal mask, or that with a sliding window.

    transformers composes masks of closures; those made by one function share its code object.
    """
    causal = masking_utils.causal_mask_function
    if mask_function is causal:
        return True
    sliding = masking_utils.sliding_window_causal_mask_function(1)
    if getattr(mask_function, "__code__", None) is not sliding.__code__:
        return False
    (parts,) = (cell.cell_contents for cell in mask_function.__closure__)
    overlay = masking_utils.sliding_window_overlay(1).__code__
    return all(part is causal or getattr(part, "__code__", None) is overlay for part in parts)


def _columns(mask: torch.Tensor, batch: int):
    """(first or None, q_start, kv_lengths), each int32 [B], of a mask made by `key_ranges`."""
    if mask.dtype != torch.int32 or mask.dim() != 4 or mask.shape[1:3] != (1, 1) or mask.shape[0] != batch:
        raise UnsupportedProblem(
            "attention_mask: mask tensors are not supported, give the [batch, positions] padding mask; "
            f"got {mask.dtype} of shape {tuple(mask.shape)}"
        )
    columns = [column.contiguous() for column in mask[:, 0, 0].unbind(dim=1)]
    return (columns[2] if len(columns) == 3 else None), columns[0], columns[1]


def _shift(tensor: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Copy of [B, S, H, D] whose row b begins at its key first[b]; its last key fills the end."""
    index = torch.arange(tensor.shape[1], device=tensor.device) + first[:, None]
    index = index.clamp(max=tensor.shape[1] - 1).long()
    return tensor[torch.arange(tensor.shape[0], device=tensor.device)[:, None], index]
