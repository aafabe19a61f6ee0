"""The backend: what describes a batch, and the attention of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from warpspec.cache import insert
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.kv_formats import EIGHT_BITS
from warpspec.engines import keys, queries
from warpspec.engines.sglang import mla, speculative
from warpspec.engines.sglang.images import Images
from warpspec.engines.sglang.speculative import Branches
from warpspec.fmha import attention_varlen


@dataclass
class Batch:
    """The requests of one step. Lengths stay on the device."""

    cu_seqlens_q: torch.Tensor  # [B + 1] int32
    most_queries: int
    kv_lengths: torch.Tensor  # [B] int32, new tokens included
    most_keys: int  # an upper bound
    page_table: torch.Tensor  # [B, pages] int32
    window_page_table: torch.Tensor | None  # like page_table, for the pool of layers with windows
    window_slots: torch.Tensor | None  # where those layers write new keys; None: found by each layer
    tree: torch.Tensor | None = None  # [B drafts] int64, where drafts of a tree are verified
    q_start: torch.Tensor | None = None  # [B] int32, with a tree: where the drafts' keys begin
    each: int | None = None  # queries of every request, if all have as many
    ranges: torch.Tensor | None = None  # [tokens, 2] int32, where tokens of an image see each other
    images: Images | None = None  # in which layers they do
    schedule: tuple | None = None  # of latent attention's decode (``engines.step``)

    def ranges_of(self, layer) -> torch.Tensor | None:
        """The ranges of images that a layer sees."""
        return None if self.images is Images.WINDOWS and _window_of(layer) is None else self.ranges


@dataclass
class Cache:
    """One layer's keys and values [slots, Hkv, row], and what ``insert`` and attention take with them."""

    k: torch.Tensor
    v: torch.Tensor
    scales: dict[str, torch.Tensor | None]

    def in_pages(self, page_size: int) -> Cache:
        """Return the cache with its codes and block scales as pages [pages, page_size, Hkv, row]."""

        def paged(tensor):
            by_slot = tensor is not None and tensor.dim() == 3
            return keys.pages_of(tensor, page_size) if by_slot else tensor

        scales = {name: paged(scale) for name, scale in self.scales.items()}
        return Cache(paged(self.k), paged(self.v), scales)


class WarpspecBackend(AttentionBackend):
    """Attention of all layers. It makes page tables on the device from SGLang's table of slots, once a step; in a CUDA
    graph, inside the graph."""

    def __init__(self, runner, branches: Branches | None = None) -> None:
        """branches: the step of drafting that this backend computes, if it is one of ``speculative.Drafting``."""
        super().__init__()
        self.branches = branches
        self.page_size = runner.server_args.page_size or 1  # None where nobody named one
        keys.check_page_size(self.page_size, "--page-size (page_size)")
        self.latent = getattr(runner, "use_mla_backend", False)
        head_dim = runner.model_config.head_dim
        if self.latent:
            mla.check_model(runner.model_config, runner.kv_cache_dtype, self.page_size)
            head_dim = keys.QUANTIZED_HEAD_DIMS[0]  # (its own sizes are checked)
        keys.check_head_size(head_dim, "choose another --attention-backend for this model")
        self.nvfp4 = getattr(runner, "kv_cache_dtype_str", None) == "nvfp4"
        if self.nvfp4:
            keys.check_quantized_head(head_dim, "--kv-cache-dtype")
        else:
            keys.check_cache_dtype(runner.kv_cache_dtype, head_dim, "--kv-cache-dtype")
        if self.latent and runner.kv_cache_dtype == queries.CODES:
            self.unit = torch.ones(1, dtype=torch.float32, device=runner.device)  # a scale of codes
            self.rows_rounded = queries.least_rows(self.unit.device)
        self.quantised = self.nvfp4 or runner.kv_cache_dtype in EIGHT_BITS.values()
        self.most_keys = runner.model_config.context_len
        self.req_to_token_pool = runner.req_to_token_pool  # SGLang expects both under these names
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.has_window_pool = (
            isinstance(self.token_to_kv_pool, SWAKVPool) and self.token_to_kv_pool.swa_layer_nums > 0
        )
        self.mask = None if branches is not None else speculative.new_mask(runner)
        self.forward_metadata: Batch | None = None

    @property
    def verify_mask(self):
        """The memory to which SGLang writes the mask of the trees that are verified."""
        return self.mask

    def init_forward_metadata(self, forward_batch) -> None:
        """Called before a step that runs without a CUDA graph."""
        most_keys = self.most_keys
        if forward_batch.seq_lens_cpu is not None and len(forward_batch.seq_lens_cpu):
            most_keys = int(forward_batch.seq_lens_cpu.max())
        self._take_mask(forward_batch)
        self.forward_metadata = self._batch(forward_batch, most_keys)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        """Called before a CUDA graph is captured, and before each replay."""
        if not in_capture:
            self._take_mask(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Does nothing: a graph computes what it needs from the batch's own tensors."""

    def init_forward_metadata_in_graph(self, forward_batch) -> None:
        """Called inside the graph; the table is as wide as the longest context."""
        self.forward_metadata = self._batch(forward_batch, self.most_keys)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _take_mask(self, step) -> None:
        if step.forward_mode.is_target_verify() and not speculative.is_chain(step.spec_info):
            speculative.take_mask(step.spec_info, step.seq_lens, self.mask)

    def _batch(self, step, most_keys: int) -> Batch:
        lengths = step.seq_lens.int()
        requests, device = len(lengths), lengths.device
        mode, tree = step.forward_mode, None
        each = None  # queries of every request, if all have as many
        if mode.is_target_verify():  # lengths are those of the prefixes
            each = step.spec_info.draft_token_num
            most_keys += each
            if not speculative.is_chain(step.spec_info):
                tree = speculative.tree_of(self.mask, requests, each)
            kv_lengths = lengths + each
        elif self.branches is not None:
            each, new = 1, self.branches.step + 1
            most_keys += new
            kv_lengths = (lengths + new).repeat_interleave(self.branches.topk)
        else:
            each = 1 if mode.is_decode_or_idle() else None
            kv_lengths = lengths
        if each is not None:
            most_queries = each
            cu_seqlens_q = torch.arange(0, each * len(kv_lengths) + 1, each, dtype=torch.int32, device=device)
        else:
            on_host = step.extend_seq_lens_cpu
            most_queries = max(on_host, default=0) if on_host is not None else int(step.input_ids.shape[0])
            cu_seqlens_q = torch.zeros(requests + 1, dtype=torch.int32, device=device)
            torch.cumsum(step.extend_seq_lens, 0, out=cu_seqlens_q[1:])
        first_slots = self._first_slots(step, most_keys)
        window_table = window_slots = None
        if self.has_window_pool:
            window_table = self._table(self.token_to_kv_pool.translate_loc_from_full_to_swa(first_slots))
            if step.out_cache_loc is not None and self.branches is None:
                window_slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(step.out_cache_loc)
        return Batch(
            cu_seqlens_q,
            most_queries,
            kv_lengths,
            most_keys,
            self._table(first_slots),
            window_table,
            window_slots,
            tree,
            None if tree is None else lengths,
            each,
        )

    def _first_slots(self, step, most_keys: int) -> torch.Tensor:
        """The slot of the first key of each page: [B, pages], or [B topk, pages] for a backend that drafts branches."""
        width = max(1, -(-most_keys // self.page_size)) * self.page_size
        slots = self.req_to_token_pool.req_to_token
        if self.branches is None or self.branches.topk == 1:
            return slots[step.req_pool_indices, : width : self.page_size]
        positions = self.branches.positions(step.seq_lens, width, self.page_size)
        request = step.req_pool_indices.repeat_interleave(self.branches.topk)
        return slots[request[:, None], positions.clamp_(max=slots.shape[1] - 1)]

    def _table(self, first_slots: torch.Tensor) -> torch.Tensor:
        """[B, pages] int32, from the first slot of each page. Freed pages have no slot and are not read."""
        return (first_slots.clamp(min=0) // self.page_size).int()

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **named):
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **named)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **named):
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **named)

    def _attend(self, q, k, v, layer, step, save_kv_cache, sinks=None, **others) -> torch.Tensor:
        """Attention of the new tokens to all keys of their request: q [rows, Hq * D], k and v -> [rows, Hq * Dv]."""
        _check_layer(layer, others)
        if self.latent:
            return mla.attend(self, q, k, v, layer, step, save_kv_cache)
        if self.quantised and layer.qk_head_dim != layer.v_head_dim:
            raise UnsupportedProblem(
                "--kv-cache-dtype: FP8 and NVFP4 need one head size of keys and values, got "
                f"{layer.qk_head_dim} and {layer.v_head_dim}; set it to auto"
            )
        batch, heads, head_dim = self.forward_metadata, layer.tp_q_head_num, layer.qk_head_dim
        pool = self.token_to_kv_pool
        in_window_pool = self.has_window_pool and pool.layers_mapping[layer.layer_id][1]
        cache = self._cache_of(layer)
        if save_kv_cache and k is not None:
            window_slots = batch.window_slots
            if in_window_pool and window_slots is None:
                window_slots = pool.translate_loc_from_full_to_swa(step.out_cache_loc)
            if not self.quantised:
                pool.set_kv_buffer(layer, KVWriteLoc(step.out_cache_loc, window_slots), k, v)
            else:  # not by SGLang's function, which would divide k and v in 16 bits and in place, and round them twice
                slots = window_slots if in_window_pool else step.out_cache_loc
                new = (t.view(-1, layer.tp_k_head_num, head_dim) for t in (k, v))
                insert(*new, cache.k, cache.v, slots, format="nvfp4" if self.nvfp4 else None, **cache.scales)
        pages = cache.in_pages(self.page_size)
        out = q.new_empty(q.shape[0], heads * layer.v_head_dim)
        attention_varlen(
            q.reshape(-1, heads, head_dim),
            pages.k,
            pages.v,
            batch.cu_seqlens_q,
            max_seqlen_q=batch.most_queries,
            max_seqlen_k=batch.most_keys,
            page_table=batch.window_page_table if in_window_pool else batch.page_table,
            kv_lengths=batch.kv_lengths,
            q_start=batch.q_start,
            tree=batch.tree,
            ranges=batch.ranges_of(layer),
            causal=True,
            window=_window_of(layer),
            sink=sinks,
            scale=layer.scaling,
            softcap=layer.logit_cap or None,
            **pages.scales,
            out=out.view(-1, heads, layer.v_head_dim),
        )
        return out

    def _cache_of(self, layer) -> Cache:
        """A layer's keys and values by slot, with the scales of a quantised cache."""
        pool = self.token_to_kv_pool
        if self.nvfp4:
            return self._nvfp4_cache(layer.layer_id)
        k, v = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        return Cache(k, v, {"k_scale": layer.k_scale, "v_scale": layer.v_scale} if self.quantised else {})

    def _nvfp4_cache(self, layer_id: int) -> Cache:
        """``_cache_of`` for an NVFP4 cache, whose pool is asked for linear block scales."""
        pool = self.token_to_kv_pool
        if self.has_window_pool:
            number, windowed = pool.layers_mapping[layer_id]
            pool = pool.swa_kv_pool if windowed else pool.full_kv_pool
        else:
            number = layer_id - pool.start_layer
        if pool.k_scale_buffer is None:
            raise UnsupportedProblem(
                "--kv-cache-dtype: nvfp4 keeps block scales as TensorRT-LLM's kernels want them on this GPU; set it to "
                "fp8_e4m3"
            )
        names = ("k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer")
        k, v, k_blocks, v_blocks = (getattr(pool, name)[number].view(torch.uint8) for name in names)
        scales = pool.quant_method
        return Cache(
            k,
            v,
            {
                "k_scale": scales.k_scales_gpu[layer_id],
                "v_scale": scales.v_scales_gpu[layer_id],
                "k_block_scales": k_blocks,
                "v_block_scales": v_blocks,
            },
        )


def _window_of(layer) -> tuple[int, int] | None:
    """A layer's window. SGLang's number does not count the query's own position and is -1 for no window."""
    size = layer.sliding_window_size
    return None if size is None or size < 0 else (size, 0)


def _check_layer(layer, others: dict) -> None:
    """Raise UnsupportedProblem for a layer with unsupported options."""
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        raise UnsupportedProblem(f"attn_type: must be that of a decoder, got {layer.attn_type}")
    for name, value in others.items():
        if value is not None:
            raise UnsupportedProblem(f"{name}: not supported, choose another --attention-backend")
