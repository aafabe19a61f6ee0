"""Attention for transformers' continuous batching (`model.generate_batch`), 5.17 and later.

The engine packs the queries of all requests of a step into one row and keeps keys in a paged cache. It provides slots:
where new keys go, and where a request's keys are read. Layers without a window read pages in place, whereas
transformers' own functions gather all keys first. Layers with a window keep a ring of slots, which is short and is
gathered. Steps that only decode come with a page table, which the engine fills only for implementations that it
recognises as flash attention; `prepare_continuous_batching` makes ours one of them.

Page tables and indices are made before the first layer of a kind and reused by the kind's other layers. All of this
happens on the device, so that a step can be a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface, modeling_flash_attention_utils
from transformers.generation.continuous_batching import PagedAttentionCache

from warpspec.common.errors import UnsupportedProblem
from warpspec.engines import keys
from warpspec.engines.transformers.attention import logit_options
from warpspec.fmha import attention, attention_varlen, flash_attn

# transformers does without masks if a name contains "flash", and fills page tables if a 2 or 3 follows.
NAME = "warpspec_flash2"
PAGE_SETTING = "page_size (of ContinuousBatchingConfig; block_size before transformers 5.18)"
UNSUPPORTED_ARGUMENTS = ("head_mask", "position_bias", "output_attentions")


def prepare_continuous_batching(model: torch.nn.Module, backend: str = "auto", name: str = NAME) -> None:
    """Make `model.generate_batch` and the model's continuous-batching managers compute attention with `warpspec.fmha`.

    The model's attention implementation becomes `name`. It must contain "flash", followed by a 2 or 3 if steps that
    only decode are to have page tables. `model.set_attn_implementation` sets another one.

    Raises:
        UnsupportedProblem: the model's head size or dtype, or that it has several head sizes. ValueError: name.
    """
    if "flash" not in name:
        raise ValueError(f'name: must have "flash" in it, or the engine refuses it, got {name!r}')
    sizes = _head_sizes(model.config.get_text_config())
    if len(sizes) > 1:
        raise UnsupportedProblem(
            f"model: transformers' paged caches have one head size, this model's are {sorted(sizes)}; use generate"
        )
    keys.check_head_size(*sizes, "choose another attn_implementation for this model")
    keys.check_dtype(model.dtype, "dtype (of from_pretrained)")
    forward = partial(paged_attention_forward, backend=backend)
    for full_name in (name, f"paged|{name}"):
        AttentionInterface.register(full_name, forward)
        OUR_NAMES.add(full_name)
    _offer_flash_functions()
    _hand_over_new_keys()
    for part in model.modules():
        allowed = getattr(part, "_compatible_flash_implementations", None)
        if allowed is not None and name not in allowed:
            # An attribute of this model, not of its class.
            part._compatible_flash_implementations = [*allowed, name]
    model.set_attn_implementation(name)


def _head_sizes(config) -> set[int]:
    """The head sizes of all layers' keys and values."""
    sizes = set()
    for layer in getattr(config, "per_layer_config", None) or [config]:
        size = getattr(layer, "qk_head_dim", None) or getattr(layer, "head_dim", None)
        size = size or layer.hidden_size // layer.num_attention_heads
        sizes |= {size, getattr(layer, "v_head_dim", None) or size}
    return sizes


OUR_NAMES: set[str] = set()


def _offer_flash_functions() -> None:
    """Offer our functions where transformers looks for those of an implementation with "flash" in its name.

    It only asks whether there is a function for page tables; `paged_attention_forward` is what runs.
    """
    theirs = modeling_flash_attention_utils._lazy_imports
    if getattr(theirs, "of_warpspec", False):
        return

    def lazy_imports(implementation, *args, **kwargs):
        if implementation not in OUR_NAMES:
            return theirs(implementation, *args, **kwargs)
        functions = (
            flash_attn.flash_attn_func,
            flash_attn.flash_attn_varlen_func,
            flash_attn.flash_attn_with_kvcache,
        )
        padding = modeling_flash_attention_utils._pad_input, modeling_flash_attention_utils._unpad_input
        return (*functions, *padding)

    lazy_imports.of_warpspec = True
    modeling_flash_attention_utils._lazy_imports = lazy_imports


def _hand_over_new_keys() -> None:
    """Let models of transformers 5.24 and later hand the new keys and the cache to our attention.

    Their layers update the cache before they call attention, which gathers all keys of a step. Earlier versions leave
    the cache to the attention function.
    """
    theirs = PagedAttentionCache.update
    if getattr(theirs, "of_warpspec", False):
        return

    def update(self, key_states, value_states, *rest, **named):
        passed_on = named.get("kwargs")  # what the layer passes to its attention function
        if passed_on is None or self.config._attn_implementation not in OUR_NAMES:
            return theirs(self, key_states, value_states, *rest, **named)
        passed_on["cache"] = self
        return key_states, value_states

    update.of_warpspec = True
    PagedAttentionCache.update = update


@torch.compiler.disable  # it takes views of the cache and keeps state from layer to layer
def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    cache=None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | dict[str, torch.Tensor] | None = None,
    block_table: torch.Tensor | None = None,
    read_index: list[torch.Tensor] | None = None,
    write_index: list[torch.Tensor] | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    backend: str = "auto",
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function with a paged cache.

    query [1, Hq, T, D], key and value [1, Hkv, T, D]: the new tokens of all requests. The other arguments come from
    continuous batching: cu_seq_lens_q and _k delimit the requests' queries and keys; slots to write and read are given
    for each group of layers, or page tables [groups, B, pages] if every request has one query. Returns (o, None), o
    [1, T, Hq, D] of query's dtype (bf16 or fp16); rows that belong to no request are undefined. Raises
    UnsupportedProblem without a cache, with dropout, and for what `attention_varlen` cannot do.
    """
    if cache is None:
        raise UnsupportedProblem(
            "cache: this attention is for continuous batching (generate_batch); for a plain forward or generate(), "
            "register() and set_attn_implementation('warpspec')"
        )
    if dropout:
        raise UnsupportedProblem(f"dropout: must be 0, got {dropout}")
    for argument in UNSUPPORTED_ARGUMENTS:
        if kwargs.get(argument) is not None and kwargs[argument] is not False:
            raise UnsupportedProblem(f"{argument}: not supported, got {type(kwargs[argument]).__name__}")
    layer = _layer_of(cache, module.layer_idx)
    if layer.page_size is not None:
        keys.check_page_size(layer.page_size, PAGE_SETTING)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, H, D]
    step = _Step(
        cu_seqlens_q=cu_seq_lens_q,
        cu_seqlens_k=_of_kind(cu_seq_lens_k, layer.kind),
        max_seqlen_q=kwargs.get("max_length_q", kwargs.get("max_seqlen_q")),
        max_seqlen_k=_of_kind(kwargs.get("max_length_k", kwargs.get("max_seqlen_k")), layer.kind),
        table=None if block_table is None else block_table[layer.group],
        read=None if read_index is None else read_index[layer.group],
        write=None if write_index is None else write_index[layer.group],
    )
    options = dict(sink=s_aux, backend=backend, **logit_options(kwargs))
    window = keys.window_of(sliding_window if layer.window else None, counts_own=True)
    if block_table is not None:
        return _decode(layer, step, q, k, v, options)[None], None
    packed = dict(causal=True, window=window, max_seqlen_q=step.max_seqlen_q, **options)
    if step.read.numel() == 0:  # no request has keys in the cache yet
        layer.write(step.write, k, v)
        keys_are = dict(cu_seqlens_k=step.cu_seqlens_k, max_seqlen_k=step.max_seqlen_k)
    elif layer.window:
        k, v = _with_ring(layer, step, k, v)
        keys_are = dict(cu_seqlens_k=step.cu_seqlens_k, max_seqlen_k=step.max_seqlen_k)
    else:
        layer.write(step.write, k, v)
        table, lengths = layer.once_a_step(lambda: _table(layer, step))
        k, v = layer.pages
        keys_are = dict(page_table=table, kv_lengths=lengths, max_seqlen_k=step.max_seqlen_k)
    return attention_varlen(q, k, v, step.cu_seqlens_q, **keys_are, **packed)[None], None


@dataclass(frozen=True)
class _Step:
    """A step as the engine describes it, for the layers of one kind."""

    cu_seqlens_q: torch.Tensor  # [B + 1]
    cu_seqlens_k: torch.Tensor  # [B + 1]; for layers with a window, keys inside it and new ones
    max_seqlen_q: int
    max_seqlen_k: int
    table: torch.Tensor | None  # [B, pages]
    read: torch.Tensor | None  # [keys]: their slots; in layers with a window, new keys have a mark instead
    write: torch.Tensor | None  # [T]: slots of the new keys


def _decode(layer: _Layer, step: _Step, q, k, v, options) -> torch.Tensor:
    """Attention of one query a request, [B, Hq, D]; first writes each request's new key and value."""

    def places():
        lengths = step.cu_seqlens_k.diff().int()
        return lengths, keys.slots_of_last(step.table, lengths, layer.page_size, layer.trash)

    lengths, slots = layer.once_a_step(places)
    layer.write(slots, k, v)
    key_pages, value_pages = layer.pages
    pages = dict(page_table=step.table, kv_lengths=lengths)
    return attention(q[:, None], key_pages, value_pages, **pages, **options)[:, 0]


def _table(layer: _Layer, step: _Step) -> tuple[torch.Tensor, torch.Tensor]:
    """(page table, lengths) of the requests' keys."""
    table = keys.page_table(step.read, step.cu_seqlens_k, layer.page_size, step.max_seqlen_k)
    return table, step.cu_seqlens_k.diff().int()


def _with_ring(layer: _Layer, step: _Step, k, v) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, values), packed [keys, Hkv, D]: each request's keys of the window, followed by its new ones.

    The keys of the window are read before new ones overwrite them.
    """
    places = layer.once_a_step(lambda: _places_of_new(step))
    packed = []
    for slots, new in zip(layer.slots, (k, v), strict=True):
        both = new.new_empty(len(step.read) + 1, *new.shape[1:])  # one row more, for tokens of no request
        torch.index_select(slots, 0, step.read, out=both[:-1])
        packed.append(both.index_copy_(0, places, new)[:-1])
    layer.write(step.write, k, v)
    return packed[0], packed[1]


def _places_of_new(step: _Step) -> torch.Tensor:
    """[T] int64: the place of each new key among a step's keys of the window; the last row for those of no request."""
    cu_q, cu_k = step.cu_seqlens_q, step.cu_seqlens_k
    token = torch.arange(len(step.write), device=cu_q.device, dtype=cu_q.dtype)
    request = torch.searchsorted(cu_q[1:].contiguous(), token, right=True)
    of_batch = request < len(cu_q) - 1
    end = (request + 1).clamp_(max=len(cu_q) - 1)
    place = cu_k[end] - cu_q[end] + token
    return torch.where(of_batch, place, len(step.read)).long()


@dataclass(frozen=True)
class _Layer:
    """One layer's part of the engine's cache."""

    kind: str  # "full_attention" or "sliding_attention"
    group: int  # number of its group; the layers of a group share indices
    is_first: bool  # whether it is its group's first layer
    page_size: int | None  # None: a ring, not read in pages
    slots: tuple[torch.Tensor, torch.Tensor]  # slots of keys and slots of values, each [slots, Hkv, D]
    pages: tuple[torch.Tensor, torch.Tensor] | None  # the same slots as [pages, page_size, Hkv, D]
    trash: int  # a slot that is written and never read
    shared: dict  # what `once_a_step` made, by group

    @property
    def window(self) -> bool:
        return self.kind == "sliding_attention"

    def write(self, places, k, v) -> None:
        for slots, new in zip(self.slots, (k, v), strict=True):
            slots.index_copy_(0, places, new)

    def once_a_step(self, make):
        """The result of `make`, which only the group's first layer calls; the other layers reuse the result."""
        if self.is_first:
            self.shared[self.group] = make()
        return self.shared[self.group]


_shared: WeakKeyDictionary = WeakKeyDictionary()  # cache -> what its layers share


def _layer_of(cache, index: int) -> _Layer:
    shared = _shared.setdefault(cache, {})
    known = shared.setdefault("layers", {})
    if index not in known:
        make = _layer_of_allocator if hasattr(cache, "layer_to_allocator") else _layer_of_groups
        known[index] = make(cache, index, shared)
    return known[index]


def _layer_of_allocator(cache, index: int, shared: dict) -> _Layer:
    """A layer's cache in transformers 5.23 and 5.24: an allocator for each kind of layers, with pages of keys and of
    values in turn."""
    allocator = cache.layer_to_allocator[index]
    is_full = allocator.layer_type == "full_attention"
    slots = allocator._kv_token_views[index]
    return _Layer(
        kind=allocator.layer_type,
        group=allocator.index,
        is_first=index == min(allocator.layer_indices),
        page_size=allocator.tokens_per_page if is_full else None,
        slots=slots,
        pages=allocator.get_cache_for_block_table(index) if is_full else None,
        trash=allocator.write_trash_index,
        shared=shared,
    )


def _layer_of_groups(cache, index: int, shared: dict) -> _Layer:
    """A layer's cache in transformers 5.17, which has groups of equally many layers, with one tensor of slots for each
    layer of a group."""
    group, of_group = cache.layer_index_to_group_indices[index]
    slots = cache.key_cache[of_group], cache.value_cache[of_group]
    is_full = cache.sliding_windows[index] == 1
    return _Layer(
        kind="full_attention" if is_full else "sliding_attention",
        group=group,
        is_first=of_group == 0,
        page_size=cache.block_size if is_full else None,
        slots=slots,
        pages=tuple(keys.pages_of(tensor, cache.block_size) for tensor in slots) if is_full else None,
        trash=cache.write_trash_index,
        shared=shared,
    )


def _of_kind(value, kind: str):
    """Look a value up by kind of layer if it is a dictionary."""
    return value[kind] if isinstance(value, dict) else value
