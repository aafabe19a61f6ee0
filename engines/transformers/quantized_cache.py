"""A KV cache in FP8 or NVFP4 for transformers' models whose attention is ours.

    engine.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="warpspec")
    model.generate(..., past_key_values=engine.QuantizedCache("e4m3"))

transformers' own quantised caches keep recent keys in 16 bits and dequantise the others for every step. Here a layer
keeps codes alone: ``warpspec.cache.insert`` quantises and stores new tokens in one launch, and attention reads codes,
which the layer hands to it in place of keys and values. The scales of the codes go along as an attribute of those
tensors (``Scales``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from warpspec.cache import insert
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.kv_formats import FORMATS, QUANTIZED

ROOM = 256  # tokens: storage grows by this at least, and to twice its size

Scale = torch.Tensor | float | None


@dataclass(frozen=True)
class Scales:
    """The scales by which codes are multiplied.

    scale: fp32 [] or [Hkv], or None for 1. blocks: NVFP4's block scales, uint8 [B, Hkv, Sk, D/16]; None for FP8.
    """

    scale: torch.Tensor | None
    blocks: torch.Tensor | None


def scales_of(codes: torch.Tensor) -> Scales | None:
    """The scales of keys or values [B, Hkv, Sk, D] that a ``QuantizedCache`` has handed out; None for other tensors."""
    return getattr(codes, "warpspec_scales", None)


class QuantizedLayer(CacheLayerMixin):
    """One layer's keys and values, in codes. Made by ``QuantizedCache``.

    Storage is [B, room, Hkv, row], which ``insert`` takes as pages of ``room`` slots. Layers with a sliding window keep
    all tokens, too.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, format: str, k_scale: Scale = None, v_scale: Scale = None, backend: str = "auto"):
        super().__init__()
        self.format, self.backend = format, backend
        self.given = (k_scale, v_scale)
        self.length = 0
        self.storage: dict[str, torch.Tensor] = {}
        self.scales: tuple = (None, None)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take batch, heads and device from the first tokens."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self.scales = tuple(
            None if scale is None else torch.as_tensor(scale, dtype=torch.float32, device=self.device)
            for scale in self.given
        )
        rows = {"k": key_states, "v": value_states}
        fmt = FORMATS[self.format]
        for name, states in rows.items():
            batch, heads, _, size = states.shape
            if fmt.block and size % fmt.block:
                raise UnsupportedProblem(
                    f"head size: QuantizedCache({self.format!r}) needs a multiple of {fmt.block}, got {size}"
                )
            self.storage[name] = torch.empty(
                batch, 0, heads, fmt.row_bytes(size), dtype=torch.uint8, device=self.device
            )
            if fmt.block:
                self.storage[f"{name}_blocks"] = torch.empty(
                    batch, 0, heads, size // fmt.block, dtype=torch.uint8, device=self.device
                )
        self.is_initialized = True

    @property
    def room(self) -> int:
        """Tokens that there is memory for."""
        return self.storage["k"].shape[1]

    def grow(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens in all."""
        if tokens <= self.room:
            return
        room = max(2 * self.room, -(-tokens // ROOM) * ROOM)
        for name, old in self.storage.items():
            new = old.new_zeros(old.shape[0], room, *old.shape[2:])
            new[:, : self.length] = old[:, : self.length]
            self.storage[name] = new

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store tokens [B, Hkv, S, D], in bf16 or fp16; returns all keys and values: codes with their ``Scales``. A
        batch of another size may only follow ``reset``."""
        batch, _, tokens, _ = key_states.shape
        if not self.is_initialized or (self.length == 0 and batch != len(self.storage["k"])):
            self.lazy_initialization(key_states, value_states)
        if batch != len(self.storage["k"]):
            raise ValueError(
                f"key_states: batch must be that of the stored tokens, {len(self.storage['k'])}, got {batch}"
            )
        self.grow(self.length + tokens)
        first = torch.arange(batch, device=self.device)[:, None] * self.room + self.length
        slots = (first + torch.arange(tokens, device=self.device)).flatten()
        k, v = (states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states))
        store = self.storage
        insert(
            k,
            v,
            store["k"],
            store["v"],
            slots,
            format=self.format,
            k_scale=self.scales[0],
            v_scale=self.scales[1],
            k_block_scales=store.get("k_blocks"),
            v_block_scales=store.get("v_blocks"),
            backend=self.backend,
        )
        self.length += tokens
        return self.handed_out("k", self.scales[0]), self.handed_out("v", self.scales[1])

    def handed_out(self, name: str, scale: torch.Tensor | None) -> torch.Tensor:
        """Keys or values, a view [B, Hkv, length, row]."""
        codes = self.stored(name).view(FORMATS[self.format].dtype)
        codes.warpspec_scales = Scales(
            scale, self.stored(f"{name}_blocks") if f"{name}_blocks" in self.storage else None
        )
        return codes

    def stored(self, name: str) -> torch.Tensor:
        return self.storage[name][:, : self.length].transpose(1, 2)

    def get_seq_length(self, *args) -> int:
        """Tokens stored."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys that queries of the next step see, position of the first of them)."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def reset(self) -> None:
        """Forget all tokens; memory stays, for a batch of the same size."""
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens.

        tokens_to_remove: minus their number, as transformers' layers take it. Raises ValueError for a number above 0,
        which once meant tokens to keep.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: must be 0 or below, got {tokens_to_remove}")
        self.length -= min(-tokens_to_remove, self.length)

    def offload(self) -> None:
        raise UnsupportedProblem("offloading: QuantizedCache stays on its device")

    prefetch = offload

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Take batch rows in another order, as beam search asks for."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these batch rows."""
        self.storage = {
            name: stored[indices.to(stored.device)].contiguous() for name, stored in self.storage.items()
        }

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row ``repeats`` times, side by side."""
        self.storage = {
            name: stored.repeat_interleave(repeats, dim=0) for name, stored in self.storage.items()
        }


class QuantizedCache(Cache):
    """A model's KV cache in FP8 or NVFP4, for ``generate(past_key_values=...)`` and for calls of the model.

    Args:
        format: "e4m3", "e5m2" or "nvfp4". Bytes of a number: 1, 1, 9/16.
        k_scale, v_scale: the scale that codes are multiplied by; keys and values are divided by it before they are
            rounded. Either one value for all layers (None, a number, or fp32 [] or [Hkv]), or a list with such a value
            for each layer, as checkpoints have them. Positive and finite; None means 1. NVFP4 also has block scales of
            up to 448, so with a scale of 1 it holds numbers up to 2688.
        backend: as in ``warpspec.cache.insert``.

    Raises:
        ValueError, TypeError: naming the argument. UnsupportedProblem: at the first token, for head sizes that the
        format does not hold; in attention, for models whose attention is not ours.
    """

    def __init__(
        self,
        format: str = "e4m3",
        *,
        k_scale: Scale | Sequence[Scale] = None,
        v_scale: Scale | Sequence[Scale] = None,
        backend: str = "auto",
    ):
        if format not in QUANTIZED:
            raise ValueError(f"format: must be one of {', '.join(map(repr, QUANTIZED))}, got {format!r}")
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        for name, scale in scales.items():
            for one in scale if isinstance(scale, list | tuple) else (scale,):
                check_scale(name, one)

        def layer() -> QuantizedLayer:
            number = len(self.layers)
            own = {name: of_layer(name, scale, number) for name, scale in scales.items()}
            return QuantizedLayer(format, backend=backend, **own)

        super().__init__(layer_class_to_replicate=layer)


def check_scale(name: str, scale: Scale) -> None:
    """Raise TypeError or ValueError unless a scale is None, a number or fp32 [] or [Hkv], positive and finite."""
    if scale is None:
        return
    if isinstance(scale, torch.Tensor):
        if scale.dtype != torch.float32 or scale.dim() > 1:
            raise TypeError(
                f"{name}: must be fp32 [] or [Hkv], got {scale.dtype} of shape {list(scale.shape)}"
            )
        wrong = not bool((scale.isfinite() & (scale > 0)).all())
    elif isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"{name}: must be None, a number, a tensor, or a list of these, got {scale!r}")
    else:
        wrong = not 0.0 < scale < float("inf")
    if wrong:
        raise ValueError(f"{name}: must be positive and finite, got {scale}")


def of_layer(name: str, scale: Scale | Sequence[Scale], layer: int) -> Scale:
    """The scale of a layer."""
    if not isinstance(scale, list | tuple):
        return scale
    if layer >= len(scale):
        raise ValueError(
            f"{name}: must have one for each layer, got {len(scale)}, and the model has layer {layer}"
        )
    return scale[layer]
