"""An attention function and mask functions for transformers' models, with dynamic and static KV caches.

Supported: causal and causal sliding-window layers, attention sinks, soft caps, grouped and shared KV heads, dynamic and
static KV caches, padding on either side, images whose tokens see each other (Gemma 3, Gemma 4), additive masks
[B or 1, Hq or 1, Sq, Sk], DeepSeek-V4's compressed keys, keys that an indexer selects (DeepSeek V3.2, GLM-5) or blocks
of keys (MiniMax M3). Every other mask function (packed sequences, chunked and bidirectional attention, padding between
tokens, models' own) becomes FlexAttention's BlockMask (`listed_blocks`), which may also be given as the mask. Refused
with `UnsupportedProblem`, never computed differently: dropout, boolean mask tensors, position biases, sinks of single
rows (Inkling 2), `output_attentions`.
There are gradients wherever `attention` has them. As with transformers' flash attention, results of padding rows are
undefined.

Layers of DeepSeek-V4 append compressed keys, one for 4 or 128 positions, to the keys of the sliding window. They do so
after the model has made its mask. `mask_maker(compressed)` chooses between two ways to handle this. (All layers of that
model get the same mask.)

"bias": the mask is an additive tensor, which the layer extends by columns for its compressed keys. All keys form one
set, and the mask is its bias. This supports all that the model does: padding, and selection by the indexer.

"key_sets": window keys and compressed keys are two sets, the first with `window`, the second with `key_stride`, which
`merge` combines. No mask is kept in memory, and tiles of keys that no query sees are not visited. Refused: padding, and
more compressed keys than the indexer selects (up to that number it selects every key in the past). Queries have the
positions that the cache gives, the model's default position_ids.

Layers with an indexer (one of `SELECTS` in the configuration) score keys under the model's mask, so that it must be an
additive tensor; they hand over the selected keys of each query, and all others are hidden in a copy of that mask.
"""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import masking_utils

from warpspec.common.errors import UnsupportedProblem
from warpspec.engines.transformers.quantized_cache import scales_of
from warpspec.fmha import attention, merge

# Arguments of transformers' attention functions that change the result and have no equivalent in `attention`.
UNSUPPORTED_ARGUMENTS = ("head_mask", "position_bias", "sinks", "cache", "output_attentions")
# Fields in the configuration of a model that selects keys, or blocks of keys.
SELECTS = ("index_topk", "index_topk_blocks")
LOGIT_OPTIONS = {"scale": "scaling", "softcap": "softcap"}  # our names to transformers' names
RANGES_DTYPE = torch.int32  # marks a mask of `key_ranges`
OWN_COLUMNS = 3  # columns of such a mask: q_end, kv_length, first; the columns of a range follow
SIZES_DTYPE = torch.int8  # marks one of `key_set_sizes`; additive masks are floating
BIAS_DTYPES = (torch.bfloat16, torch.float32)


def logit_options(kwargs: dict) -> dict:
    """Pick the options of logits from the arguments of transformers' attention functions, under our names."""
    return {name: kwargs.get(theirs) for name, theirs in LOGIT_OPTIONS.items()}


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None,
    *,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    backend: str = "auto",
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function.

    query [B, Hq, Sq, D]; key and value [B, Hkv, Sk, D], bf16 or fp16, one tensor if a layer shares them; or
    codes that a ``QuantizedCache`` has handed out.
    attention_mask: what a `mask_maker` function returned, a BlockMask, or additive [B or 1, Hq or 1, Sq, Sk]; the
    latter two alone determine which keys a query sees, as in eager attention. s_aux [Hq]: sink logits. kwargs: see
    ``logit_options``. indices [B, Sq, n]: the keys that each query may see at most, in layers with an indexer.
    block_indices [B, groups, Sq, n]: the blocks of keys that each query of a group of heads may see at most; -1: none.
    sliding_window counts the row's own position. Returns ([B, Sq, Hq, D], None). Raises UnsupportedProblem as the
    module says.
    """
    if dropout:
        raise UnsupportedProblem(f"dropout: must be 0, got {dropout}")
    for name in UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise UnsupportedProblem(f"{name}: not supported, got {type(kwargs[name]).__name__}")
    q, k = query.transpose(1, 2), key.transpose(1, 2)  # [B, S, H, D]
    v = None if value is key else value.transpose(1, 2)
    scales, blocks = _code_scales(key, value)
    options = dict(backend=backend, **logit_options(kwargs), **scales)

    selects = indices is not None or block_indices is not None
    if isinstance(attention_mask, BlockMask):
        if selects or getattr(module, "compressor", None) is not None:
            raise UnsupportedProblem(
                "attention_mask: a layer with an indexer or with compressed keys takes no BlockMask"
            )
        return attention(q, k, v, sink=s_aux, block_mask=attention_mask, **options, **blocks), None
    if attention_mask is not None and attention_mask.is_floating_point():
        bias = _bias(attention_mask, q, k)
        if indices is not None:
            bias = _of_selected(bias, indices)
        if block_indices is not None:
            bias = _of_blocks(bias, block_indices, q.shape[2], module.indexer.block_size)
        return attention(q, k, v, sink=s_aux, bias=bias, **options, **blocks), None
    if selects:
        raise UnsupportedProblem(
            "attention_mask: a layer with an indexer needs an additive one, which register() makes for its model, got "
            f"{'None' if attention_mask is None else attention_mask.dtype}"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None and not causal:
        raise UnsupportedProblem("attention_mask: needs a causal layer, got is_causal=False")
    compressor = getattr(module, "compressor", None)
    if attention_mask is not None and attention_mask.dtype == SIZES_DTYPE:
        return _key_sets(compressor, q, k, v, attention_mask, sliding_window, s_aux, options), None
    if compressor is not None:
        raise UnsupportedProblem(
            "attention_mask: a layer with compressed keys needs the mask that register() makes for its "
            f"model, got {'None' if attention_mask is None else attention_mask.dtype}"
        )
    ranges = {}
    if attention_mask is not None:
        first, ranges = _options_of(attention_mask, *q.shape[:2])
        if first is not None:
            k, v = _shift(k, first), None if v is None else _shift(v, first)
            blocks = {name: _shift(tensor, first) for name, tensor in blocks.items()}
    window = None if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1)
    options |= blocks | ranges
    return attention(q, k, v, causal=bool(causal), window=window, sink=s_aux, **options), None


def _code_scales(key: torch.Tensor, value: torch.Tensor) -> tuple[dict, dict]:
    """The options that codes of a ``QuantizedCache`` need: (their scales, their scales of blocks)."""
    of_keys, of_values = scales_of(key), scales_of(value)
    if of_keys is None:
        return {}, {}
    blocks = {}
    if of_keys.blocks is not None:
        blocks["k_block_scales"] = of_keys.blocks.transpose(1, 2)
        blocks["v_block_scales"] = of_values.blocks.transpose(1, 2)
    return {"k_scale": of_keys.scale, "v_scale": of_values.scale}, blocks


def mask_maker(compressed: str = "bias"):
    """Make the mask function that transformers calls.

    It is `key_ranges`; for models with compressed keys, the function that `compressed` ("bias" or "key_sets") names;
    and for models with an indexer over all keys or blocks, `additive_mask`. Raises ValueError for other `compressed`.
    """
    ways = {"bias": additive_mask, "key_sets": key_set_sizes}
    if compressed not in ways:
        raise ValueError(f"compressed: must be one of {', '.join(ways)}, got {compressed!r}")

    def make(*args, config=None, **kwargs):
        if getattr(config, "compress_rates", None):  # before index_topk, which these models have, too
            return ways[compressed](*args, **kwargs)
        selects_keys = any(getattr(config, name, None) is not None for name in SELECTS)
        return additive_mask(*args, **kwargs) if selects_keys else key_ranges(*args, config=config, **kwargs)

    return make


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
) -> torch.Tensor | BlockMask | None:
    """transformers' mask function: which keys exist, and which positions the queries have among them. For masks that
    are no interval of keys a query: ``listed_blocks``.

    Query i has position q_offset + i, key j has position kv_offset + j. attention_mask, [B, positions], bool or None,
    is False at padding. Returns None if the queries are the last of the keys and there is no padding. Otherwise it
    returns int32 [B, 1, 1, 2 or 3] with (q_end, kv_length[, first]): q_end is the position after the last query, and
    it and kv_length, as `attention` takes it, are counted from the row's first key that is not padding; first is
    present only if some row has one. Where tokens of an image see each other, it returns [B, 1, Sq, 5]: all three for
    every query, then its range as `attention` takes it. The mask has four dimensions because transformers passes masks
    of that rank on unchanged. It remains right if all but the last queries are dropped from it and from the layer, as
    Gemma 4's layers that read other layers' keys do in a prompt. Masks that are no interval of keys are listed as
    blocks (`listed_blocks`, whose errors pass through).
    """
    given = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device)
    if not torch.compiler.is_dynamo_compiling():
        mask_function = _without_packing(mask_function)
        images, causal = _images_of(mask_function), _is_causal_mask(mask_function)
    elif _is_causal_by_arguments(mask_function, kwargs):
        images, causal = None, True
    else:
        return _untraced_key_ranges(*given)
    if images is None and not causal:
        return listed_blocks(*given)
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length].bool()
    last = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if images is None and last and (padding is None or bool(padding.all())):
        return None

    q_end = torch.as_tensor(q_offset + q_length - kv_offset, device=device).expand(batch_size)
    if padding is None:
        columns = [q_end, torch.full_like(q_end, kv_length)]
    else:
        lengths = padding.sum(dim=1)
        first = padding.int().argmax(dim=1)
        index = torch.arange(kv_length, device=padding.device)
        if not torch.equal(padding, (index >= first[:, None]) & (index < (first + lengths)[:, None])):
            return listed_blocks(*given)  # padding between tokens
        columns = [q_end - first, lengths, first] if bool(first.any()) else [q_end, lengths]
    if images is None:
        return torch.stack(columns, dim=1).to(RANGES_DTYPE)[:, None, None, :]
    columns = torch.stack([*columns, torch.zeros_like(q_end)][:OWN_COLUMNS], dim=1)[:, None]  # [B, 1, 3]
    query = torch.as_tensor(q_offset, device=images.device) + torch.arange(q_length, device=images.device)
    ranges = _ranges_of(images[:, : kv_offset + kv_length], query, kv_offset + columns[..., 2:])
    columns = torch.cat([columns.expand(-1, q_length, -1), ranges.expand(batch_size, -1, -1)], dim=2)
    return columns.to(RANGES_DTYPE)[:, None]


@torch.compiler.disable
def _untraced_key_ranges(*given) -> torch.Tensor | BlockMask | None:
    """``key_ranges`` outside a graph that torch.compile makes: the graph ends before it, and another begins after."""
    return key_ranges(*given)


def listed_blocks(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor,
    kv_offset: int,
    mask_function,
    attention_mask: torch.Tensor | None,
    device: torch.device | str,
) -> BlockMask:
    """transformers' mask function for any mask: FlexAttention's BlockMask, by its function that is not compiled, which
    for a moment takes a byte for each query and key. Arguments as for ``key_ranges``."""
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        mask_function = masking_utils.and_masks(
            mask_function, masking_utils.padding_mask_function(padding.bool())
        )
    mask_function = masking_utils.add_offsets_to_mask_function(mask_function, q_offset, kv_offset)
    return create_block_mask(mask_function, batch_size, None, q_length, kv_length, device=device)


def additive_mask(*args, dtype: torch.dtype = torch.float32, **kwargs) -> torch.Tensor:
    """transformers' mask function for "bias" and for indexers: a mask to add, 0 or -inf (no large negative number).

    args, kwargs: those of transformers' `sdpa_mask`, whose errors pass through. Returns a tensor [B, 1, Sq, Sk] of
    ``dtype``, or of fp32 if attention's bias cannot have that dtype.
    """
    kwargs |= dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    seen = masking_utils.sdpa_mask(*args, **kwargs)
    mask = torch.zeros(seen.shape, dtype=dtype if dtype in BIAS_DTYPES else torch.float32, device=seen.device)
    return mask.masked_fill_(~seen, -torch.inf)


def key_set_sizes(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    device: torch.device | str = "cpu",
    **kwargs,
) -> torch.Tensor:
    """transformers' mask function for "key_sets": a tensor of one byte that carries sizes in its shape.

    The shape is [B, 1, W, W + P] with W keys of the window and P positions so far. The last dimension is at least as
    long as window and compressed keys together, so that the layer passes the mask on instead of extending it. Sizes are
    used rather than values, because reading a value would make the host wait for the device. It is int8, and the
    arguments are those of `key_ranges`. Raises UnsupportedProblem for masks that sizes cannot tell, such as padding.
    """
    if key_ranges(batch_size, q_length, kv_length, q_offset, kv_offset, device=device, **kwargs) is not None:
        raise UnsupportedProblem(
            "attention_mask: padding and static caches need compressed='bias' in a model with compressed keys"
        )
    size = torch.zeros((), dtype=SIZES_DTYPE, device=device)
    return size.expand(batch_size, 1, kv_length, kv_length + q_offset + q_length)


def _is_causal_mask(mask_function) -> bool:
    """Whether a mask function is transformers' causal one, or the causal one with a sliding window.

    transformers composes masks of closures; closures made by the same function share its code object.
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


def _is_causal_by_arguments(mask_function, kwargs: dict) -> bool:
    """``_is_causal_mask`` where torch.compile traces, which does not see what closures hold: from transformers' further
    arguments. False if they leave it open."""
    if mask_function is masking_utils.causal_mask_function:
        return True
    sliding = masking_utils.sliding_window_causal_mask_function(1)
    if getattr(mask_function, "__code__", None) is not sliding.__code__:
        return False
    config, size = kwargs.get("config"), kwargs.get("local_size")
    # Masks with further parts do not allow the skip; the size of chunks is a `local_size`, too.
    of_window = size is not None and size == getattr(config, "sliding_window", None)
    chunked = getattr(config, "attention_chunk_size", None) is not None
    return bool(kwargs.get("allow_is_causal_skip", False)) and of_window and not chunked


def _without_packing(mask_function):
    """The mask function without the part by which transformers keeps packed sequences apart, if every row is one
    sequence: where torch.compile traces, transformers does not know, and adds that part to any mask."""
    if getattr(mask_function, "__code__", None) is not masking_utils.and_masks().__code__:
        return mask_function
    packing = masking_utils.packed_sequence_mask_function(torch.zeros(1, 1)).__code__
    parts = _closed_over(mask_function)
    numbers = [_closed_over(part) for part in parts if getattr(part, "__code__", None) is packing]
    others = [part for part in parts if getattr(part, "__code__", None) is not packing]
    if len(numbers) != 1 or len(others) != 1 or not bool((numbers[0] == numbers[0][:, :1]).all()):
        return mask_function
    (other,) = others
    captured = dict(zip(other.__code__.co_freevars, other.__closure__ or (), strict=False))
    if captured.keys() != {"mask_function", "position_ids"}:
        return other
    positions = captured["position_ids"].cell_contents  # from transformers 5.18 on: places within a sequence
    whole = torch.arange(positions.shape[1], device=positions.device)
    return captured["mask_function"].cell_contents if bool((positions == whole).all()) else mask_function


def _images_of(mask_function) -> torch.Tensor | None:
    """[B, positions]: the number of each position's image, -1 where there is none, if the mask is transformers' causal
    one besides which the tokens of an image see each other, whole or cut by a causal sliding window; else None."""
    union = masking_utils.or_masks(masking_utils.causal_mask_function).__code__
    intersection = masking_utils.and_masks(masking_utils.causal_mask_function).__code__
    window = masking_utils.sliding_window_overlay(1).__code__
    blocks = masking_utils.blockwise_overlay(torch.zeros(1, 1)).__code__
    parts = [mask_function]
    if getattr(mask_function, "__code__", None) is intersection:
        parts = [
            part for part in _closed_over(mask_function) if getattr(part, "__code__", None) is not window
        ]
    if len(parts) != 1 or getattr(parts[0], "__code__", None) is not union:
        return None
    causal, *others = _closed_over(parts[0])
    if _without_packing(causal) is not masking_utils.causal_mask_function or len(others) != 1:
        return None
    return _closed_over(others[0]) if getattr(others[0], "__code__", None) is blocks else None


def _closed_over(function):
    """The one object that a closure of transformers' holds."""
    (cell,) = function.__closure__
    return cell.cell_contents


def _ranges_of(images: torch.Tensor, query: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """[B, Sq, 2]: the range of each query, from its own key to the last key of its image; (-1, -1) without an image.

    images [B, positions]: the number of each position's image, for as many positions as there are keys. query [Sq]:
    positions of the queries. first [B, 1, 1]: the position that keys are counted from. The keys before a query's own
    need no range: the query sees them as far as its window reaches.
    """
    positions = images.shape[1]
    index = torch.arange(positions, device=images.device)
    ends = torch.ones_like(images, dtype=torch.bool)
    ends[:, :-1] = images[:, :-1] != images[:, 1:]
    last = torch.where(ends, index, positions).flip(1).cummin(dim=1).values.flip(1)
    own = query.clamp(max=positions - 1).expand(len(images), -1)
    pairs = torch.stack([query.expand(len(images), -1), last.gather(1, own)], dim=2) - first
    return torch.where((images.gather(1, own) >= 0)[..., None], pairs, -1)


def _bias(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Convert an additive mask to the ``bias`` that `attention` takes."""
    (batch, rows, heads, _), keys = q.shape, k.shape[1]
    if (
        mask.dim() != 4
        or mask.shape[0] not in (1, batch)
        or mask.shape[1] not in (1, heads)
        or mask.shape[2:] != (rows, keys)
    ):
        raise UnsupportedProblem(
            f"attention_mask: an additive mask must be [B={batch} or 1, Hq={heads} or 1, Sq={rows}, "
            f"Sk={keys}], got {tuple(mask.shape)}"
        )
    return mask if mask.dtype in BIAS_DTYPES else mask.float()


def _of_selected(bias: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Make an additive mask also hide every key that is not among a query's indices [B, Sq, n]."""
    batch, rows = indices.shape[:2]
    hidden = torch.ones(batch, rows, bias.shape[-1], dtype=torch.bool, device=bias.device)
    return bias.masked_fill(hidden.scatter_(2, indices.long(), False)[:, None], -torch.inf)


def _of_blocks(bias: torch.Tensor, indices: torch.Tensor, heads: int, size: int) -> torch.Tensor:
    """Make an additive mask also hide every key that is in none of a query's blocks of ``size`` keys, indices
    [B, groups, Sq, n], -1 for none; heads / groups neighbouring heads share them."""
    batch, groups, rows, _ = indices.shape
    keys = bias.shape[-1]
    blocks = -(-keys // size)
    hidden = torch.ones(batch, groups, rows, blocks + 1, dtype=torch.bool, device=bias.device)
    hidden.scatter_(3, torch.where(indices < 0, blocks, indices).long(), False)
    hidden = hidden[..., :blocks].repeat_interleave(size, dim=3)[..., :keys]
    return bias.masked_fill(hidden.repeat_interleave(heads // groups, dim=1), -torch.inf)


def _key_sets(compressor, q, k, v, sizes, sliding_window, sink, options) -> torch.Tensor:
    """Attention over the window's keys and the compressed keys after them, as two sets: [B, Sq, Hq, D]."""
    (batch, rows), window_keys = q.shape[:2], sizes.shape[2]
    past = sizes.shape[3] - window_keys - rows  # position of the first query
    of_window = dict(causal=True, window=(sliding_window - 1, 0), **options)
    if k.shape[1] == window_keys:
        return attention(q, k, v, sink=sink, **of_window)

    stride, entries = compressor.compress_rate, k.shape[1] - window_keys
    if entries != (past + rows) // stride:
        raise UnsupportedProblem(
            f"key: {entries} compressed keys cannot be one for {stride} of {past + rows} positions"
        )
    indexer = getattr(compressor, "indexer", None)
    if indexer is not None and entries > indexer.index_topk:
        raise UnsupportedProblem(
            f"key: the indexer selects {indexer.index_topk} of {entries} compressed keys a query, which "
            "needs compressed='bias'"
        )
    of_compressed = dict(
        causal=True,
        key_stride=stride,
        q_start=torch.full((batch,), past, dtype=torch.int32, device=q.device),
        **options,
    )
    sets = ((slice(None, window_keys), of_window), (slice(window_keys, None), of_compressed))
    states = [
        attention(q, k[:, keys], None if v is None else v[:, keys], normalize=False, **arguments)
        for keys, arguments in sets
    ]
    o, _ = merge(states, sink=sink)
    return o.to(q.dtype)


def _options_of(mask: torch.Tensor, batch: int, queries: int) -> tuple[torch.Tensor | None, dict]:
    """(first [B] or None, arguments of `attention`) of a mask from `key_ranges`."""
    shape, with_ranges = tuple(mask.shape), (queries, OWN_COLUMNS + 2)
    known = ((1, OWN_COLUMNS - 1), (1, OWN_COLUMNS), with_ranges)
    if mask.dtype != RANGES_DTYPE or shape[:2] != (batch, 1) or shape[2:] not in known:
        raise UnsupportedProblem(
            "attention_mask: must be the [batch, positions] padding mask or an additive, floating-point one; "
            f"got {mask.dtype} of shape {shape}"
        )
    q_end, *others = mask[:, 0, 0, :OWN_COLUMNS].unbind(dim=1)
    kv_lengths, *first = (column.contiguous() for column in others)
    options = {"q_start": q_end - queries, "kv_lengths": kv_lengths}
    if shape[2:] == with_ranges:
        options["ranges"] = mask[:, 0, :, OWN_COLUMNS:]
    return (first[0] if first else None), options


def _shift(tensor: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Copy of [B, S, H, D] in which row b starts at its key first[b]; its last key fills the end."""
    index = torch.arange(tensor.shape[1], device=tensor.device) + first[:, None]
    index = index.clamp(max=tensor.shape[1] - 1).long()
    rows = torch.arange(tensor.shape[0], device=tensor.device)[:, None]
    if tensor.element_size() == 1:  # FP8 is not indexed everywhere
        return tensor.view(torch.uint8)[rows, index].view(tensor.dtype)
    return tensor[rows, index]
