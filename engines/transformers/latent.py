"""transformers' DeepSeek-V4 on our caches: ``DeepseekV4Cache`` holds pools and states, and kernels compute attention.

    attach(model)
    cache = DeepseekV4Cache(model.config, batch=2, max_tokens=4096)
    model.generate(ids, past_key_values=cache)

An attached layer that gets another kind of cache, or none, computes as before. All prompts of a batch must have the
same length: padding is not considered.
"""

from __future__ import annotations

import types

import torch
from transformers.cache_utils import Cache
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from warpspec.latent.cache import (
    CacheConfig,
    IndexPool,
    LatentPool,
    StateCache,
    compress,
    insert_window,
    rope_table,
    store_rows,
    table_slots,
)
from warpspec.latent.gathered import KeySet, gathered_attention
from warpspec.latent.indexer import index_queries, select_entries
from warpspec.latent.projection import Float8Tensor, output_projection

KINDS = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
PROJECTIONS = ("model", "bf16", "fp8")
PAGE_TOKENS = 128  # tokens that a block of the pools covers


class LatentLayer:
    """Pools and state of one layer.

    pool: entries; index_pool: their index keys, if the kind has them. Page b of both belongs to the same tokens. table:
    [N, 64], angles by position.
    """

    is_compileable = False
    is_sliding = False

    def __init__(self, owner: DeepseekV4Cache, kind: str, blocks: int, max_draft: int, table: torch.Tensor):
        config = owner.shapes
        self.kind, self.table, self.stride = kind, table, config.stride(kind)
        self.state = StateCache(config, kind, owner.batch, max_draft, lengths=owner.lengths)
        self.pool = self.index_pool = None
        if self.stride:
            rows = PAGE_TOKENS // self.stride
            pages = blocks * owner.batch
            self.pool = LatentPool.empty(pages, rows, config.latent, device=owner.lengths.device)
            if kind == "csa":
                self.index_pool = IndexPool.empty(pages, rows, config.index, device=owner.lengths.device)

    def get_seq_length(self) -> int:
        raise AssertionError("DeepseekV4Cache has the length")


class DeepseekV4Cache(Cache):
    """A transformers ``Cache`` of latent pools.

    config: the model's ``DeepseekV4Config``. batch: sequences. max_tokens: the most tokens of a sequence. latent,
    index: row formats of keys and entries, and of index keys; "bf16" for no quantisation. hadamard: apply the Hadamard
    transform to index keys and queries. max_draft: how many tokens ``crop`` may take back, counted from the most that
    the cache has held. backend: backend of all operations. Raises ValueError for shapes that the pools do not have.
    """

    def __init__(
        self,
        config,
        *,
        batch: int,
        max_tokens: int,
        latent: str = "v4-fp8",
        index: str = "mxfp4",
        hadamard: bool = True,
        max_draft: int = 0,
        backend: str = "auto",
        device="cpu",
    ):
        if config.head_dim != 512 or config.index_head_dim != 128 or config.qk_rope_head_dim != 64:
            raise ValueError(
                "config: head_dim must be 512, index_head_dim 128 and qk_rope_head_dim 64, got "
                f"{config.head_dim}, {config.index_head_dim} and {config.qk_rope_head_dim}"
            )
        self.shapes = CacheConfig(
            tuple(
                (kind, sum(KINDS[t] == kind for t in config.layer_types)) for kind in ("window", "csa", "hca")
            ),
            window=config.sliding_window,
            csa_stride=config.compress_rates["compressed_sparse_attention"],
            hca_stride=config.compress_rates["heavily_compressed_attention"],
            index_heads=config.index_n_heads,
            top_k=config.index_topk,
            latent=latent,
            index=index,
        )
        self.batch, self.max_tokens, self.max_draft = batch, max_tokens, max_draft
        self.hadamard, self.backend = hadamard, backend
        self.length = self.settled = 0  # in tokens; settled ones can no longer be taken back
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        blocks = -(-max_tokens // PAGE_TOKENS)
        self.page_table = torch.arange(batch * blocks, dtype=torch.int32, device=device).view(batch, blocks)
        rotary = modeling.DeepseekV4RotaryEmbedding(config)
        tables = {
            name: rope_table(getattr(rotary, f"{name}_inv_freq").to(device), max_tokens)
            for name in ("main", "compress")
        }
        layers = []
        for layer_type in config.layer_types:
            kind = KINDS[layer_type]
            layers.append(
                LatentLayer(self, kind, blocks, max_draft, tables["main" if kind == "window" else "compress"])
            )
        super().__init__(layers=layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.max_tokens

    def get_mask_sizes(self, query_length, layer_idx: int = 0) -> tuple[int, int]:
        """(keys, first key) for the mask that transformers makes, which our attention does not read."""
        count = query_length if isinstance(query_length, int) else len(query_length)
        return self.length + count, 0

    def update(self, *arguments, **keywords):
        raise TypeError("DeepseekV4Cache: the model's layers are not attached; call attach(model) first")

    def advance(self, count: int) -> None:
        """Record that a call of the model has written ``count`` tokens."""
        self.length += count
        self.settled = max(self.settled, self.length - self.max_draft)
        self.lengths += count

    def crop(self, max_length: int) -> None:
        """Take back the tokens from max_length on; if it is negative, that many tokens.

        Raises ValueError for settled tokens: those that lie max_draft or more before the most tokens that the cache has
        held since it was empty.
        """
        length = max_length if max_length >= 0 else self.length + max_length
        if not self.settled <= length <= self.length:
            raise ValueError(
                f"max_length: of {self.length} tokens the first {self.settled} cannot be taken back (max_draft "
                f"{self.max_draft}), got {max_length}"
            )
        self.length = length
        self.lengths.fill_(length)

    def reset(self) -> None:
        self.length = self.settled = 0
        self.lengths.zero_()


def attach(model, projection: str = "model") -> None:
    """Make every attention layer of a DeepSeek-V4 model compute on a ``DeepseekV4Cache`` when it gets one.

    projection: how attention's output is projected (wo_a). "model": in the weights' type, by ``output_projection`` if
    that is bf16. "bf16", "fp8": by ``output_projection``, with weights made from the present ones, on their device;
    with "fp8" attention writes FP8, too. Raises ValueError naming what does not fit.
    """
    if projection not in PROJECTIONS:
        raise ValueError(f"projection: must be one of {', '.join(PROJECTIONS)}, got {projection!r}")
    found = False
    for module in model.modules():
        if isinstance(module, modeling.DeepseekV4Attention):
            module.forward = types.MethodType(forward, module)
            module.latent_weight = None
            if projection != "model":
                weight = grouped_weight(module).to(torch.bfloat16)
                module.latent_weight = weight if projection == "bf16" else Float8Tensor.quantize(weight, 128)
            found = True
    if not found:
        raise ValueError(f"model: must have DeepseekV4Attention layers, got {type(model).__name__}")


def forward(
    self,
    hidden_states,
    position_embeddings,
    position_ids,
    attention_mask,
    cache=None,
    past_key_values=None,
    **keywords,
):
    """``DeepseekV4Attention.forward``; on a ``DeepseekV4Cache`` returns (result, None). Before transformers 5.24, the
    argument ``cache`` is ``past_key_values``."""
    cache = past_key_values if cache is None else cache
    if not isinstance(cache, DeepseekV4Cache):
        original = modeling.DeepseekV4Attention.forward
        return original(
            self,
            hidden_states,
            position_embeddings,
            position_ids,
            attention_mask,
            cache,
            **keywords,
        )
    batch, count, _ = hidden_states.shape
    if batch != cache.batch:
        raise ValueError(f"past_key_values: made for {cache.batch} sequences, got {batch}")
    if cache.length + count > cache.max_tokens:
        raise ValueError(
            f"past_key_values: has room for {cache.max_tokens} tokens, got {cache.length + count} (max_tokens)"
        )
    o = Step(self, cache, hidden_states).attend()
    grouped = project(self, o, cache.backend).to(hidden_states.dtype).view(batch, count, -1)
    if self.layer_idx == len(cache.layers) - 1:
        cache.advance(count)
    return self.o_b_proj(grouped), None


def grouped_weight(module) -> torch.Tensor:
    """wo_a as [G, N, K]."""
    weight = module.o_a_proj.weight.detach()
    return weight.view(module.config.o_groups, -1, weight.shape[-1])


def project(module, o: torch.Tensor | Float8Tensor, backend: str) -> torch.Tensor:
    """[T, G, N]: wo_a applied to attention's output."""
    weight = module.latent_weight
    if weight is None and module.o_a_proj.weight.dtype == torch.bfloat16:
        weight = grouped_weight(module)
    if weight is None:
        dtype = module.o_a_proj.weight.dtype
        return module.o_a_proj(o.to(dtype).view(len(o), module.config.o_groups, -1))
    return output_projection(o, weight, backend=backend)


class Step:
    """One layer on the new tokens of a call: ``batch`` sequences of ``count`` tokens, one after another."""

    def __init__(self, module, cache: DeepseekV4Cache, hidden_states: torch.Tensor):
        self.module, self.cache, self.layer = module, cache, cache.layers[module.layer_idx]
        batch, self.count, _ = hidden_states.shape
        self.hidden = hidden_states.flatten(0, 1)
        device = self.hidden.device
        within = torch.arange(self.count, dtype=torch.int32, device=device)
        self.positions = (cache.lengths[:, None] + within).flatten()
        self.requests = torch.arange(batch, dtype=torch.int32, device=device)
        self.request_of = self.requests.repeat_interleave(self.count)
        self.cu_seqlens = torch.arange(
            0, (batch + 1) * self.count, self.count, dtype=torch.int32, device=device
        )
        self.options = {"eps": module.config.rms_norm_eps, "backend": cache.backend}

    def attend(self) -> torch.Tensor | Float8Tensor:
        """[T, H, 512]: attention's output, rotated back, as the projection takes it."""
        module, layer, cache = self.module, self.layer, self.cache
        residual = module.q_a_norm(module.q_a_proj(self.hidden))
        q = module.q_b_proj(residual).view(len(self.hidden), -1, 512).bfloat16()
        kv = module.kv_proj(self.hidden).bfloat16()
        q, key_sets, store = self.window(q, kv)
        if layer.pool is not None:
            key_sets += self.entries(residual)
        o = gathered_attention(
            q,
            key_sets,
            sink=module.sinks.detach(),
            rotate_back=(layer.table, self.positions),
            out_format="fp8" if isinstance(module.latent_weight, Float8Tensor) else "bf16",
            backend=cache.backend,
        )
        store()
        return o

    def window(self, q, kv) -> tuple:
        """(rotated queries, key sets, function to call after attention).

        A ring cannot hold all tokens of a long call. They are read from a temporary pool, and are stored in the ring
        when attention has read it.
        """
        layer, state = self.layer, self.layer.state
        ring_slots = state.window_slots(self.request_of, self.positions)
        arguments = dict(weight=self.module.kv_norm.weight.detach(), **self.options)
        if self.count <= 1 + self.cache.max_draft:
            q = insert_window(
                q, kv, layer.table, self.positions, pool=state.window, slots=ring_slots, **arguments
            )
            slots, lengths = state.window_keys(self.request_of, self.positions)
            return q, [KeySet(state.window, slots, lengths)], lambda: None
        rows = LatentPool.empty(-(-len(kv) // PAGE_TOKENS), PAGE_TOKENS, "bf16", device=kv.device)
        everything = torch.arange(len(kv), dtype=torch.int32, device=kv.device)
        q = insert_window(q, kv, layer.table, self.positions, pool=rows, slots=everything, **arguments)
        new = rows.read(everything).bfloat16()
        chunk = rows
        if state.window.format != "bf16":
            chunk = LatentPool.empty(len(rows.data), PAGE_TOKENS, state.window.format, device=kv.device)
            store_rows(new, chunk, everything, backend=self.cache.backend)
        window = state.config.window
        steps = torch.arange(window, device=kv.device)
        seen = self.positions[:, None] - (window - 1) + steps  # positions, oldest first
        starts = self.positions[:, None] - everything[:, None] % self.count
        own = torch.where(seen >= starts, everything[:, None] + seen - self.positions[:, None], -1)
        before = torch.where(seen < starts, state.window_slots(self.request_of[:, None], seen), -1)
        key_sets = [KeySet(state.window, before.to(torch.int32)), KeySet(chunk, own.to(torch.int32))]
        last = everything % self.count >= self.count - state.window.page_size
        store = torch.where(last, ring_slots, -1)
        return q, key_sets, lambda: store_rows(new, state.window, store, backend=self.cache.backend)

    def entries(self, residual) -> list[KeySet]:
        """Make the entries that new tokens complete; returns the key set of the entries that each token sees."""
        layer, cache, compressor = self.layer, self.cache, self.module.compressor
        self.compress(compressor, layer.state.tail, layer.pool, False)
        lengths = ((self.positions + 1) // layer.stride).to(torch.int32)
        if layer.kind == "hca":
            return [KeySet.from_table(layer.pool, cache.page_table, self.request_of, lengths)]
        indexer = compressor.indexer
        self.compress(indexer, layer.state.index_tail, layer.index_pool, cache.hadamard)
        scorer = indexer.scorer
        q = indexer.q_b_proj(residual).view(len(residual), -1, 128).bfloat16()
        weights = scorer.weights_proj(self.hidden).float() * (scorer.softmax_scale * scorer.weights_scaling)
        queries = index_queries(
            q, weights, layer.table, self.positions, format=layer.index_pool.format, hadamard=cache.hadamard,
            backend=cache.backend,
        )  # fmt: skip
        top_k = min(cache.shapes.top_k, cache.page_table.shape[1] * layer.pool.page_size)
        slots, counts = select_entries(
            queries,
            layer.index_pool,
            cache.page_table,
            self.request_of,
            lengths,
            top_k,
            backend=cache.backend,
        )
        return [KeySet(layer.pool, slots, counts)]

    def compress(self, compressor, tail, pool, hadamard: bool) -> None:
        """Apply one compressor's projections to the new tokens and make entries."""
        projections = (compressor.kv_proj(self.hidden), compressor.gate_proj(self.hidden))
        entries = torch.where((self.positions + 1) % tail.stride == 0, self.positions // tail.stride, -1)
        slots = table_slots(
            self.cache.page_table, entries.view(len(self.requests), -1), pool.page_size
        ).flatten()
        compress(
            torch.stack(projections, dim=1).float(),
            compressor.position_bias.detach().float(),
            compressor.kv_norm.weight.detach(),
            self.layer.table,
            tail=tail,
            requests=self.requests,
            starts=self.cache.lengths,
            cu_seqlens=self.cu_seqlens,
            pool=pool,
            slots=slots,
            hadamard=hadamard,
            **self.options,
        )
