"""Attention: softmax(scale * Q K^T + bias) V with masks, sinks, grouped heads, paged and split KV."""

from __future__ import annotations

import torch

from warpspec.common.backend import refuse_tangents
from warpspec.common.checks import check_kind, check_strided, refuse_gradients
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.operands import record
from warpspec.fmha import ops
from warpspec.fmha.backward import function
from warpspec.fmha.block_mask import BlockMask, block_mask_of, packed_mask_of
from warpspec.fmha.checks import check_kinds, check_window
from warpspec.fmha.cuts import DecodeSchedule
from warpspec.fmha.logits import LogitOptions
from warpspec.fmha.operands import Operands, Options
from warpspec.fmha.quantized import FORMATS
from warpspec.fmha.state import AttentionState, check_states, combine, normalized_output
from warpspec.fmha.tree import tree_words

__all__ = [
    "AttentionState",
    "BlockMask",
    "DecodeSchedule",
    "UnsupportedProblem",
    "attention",
    "attention_varlen",
    "merge",
    "tree_words",
]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    sink: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    q_start: torch.Tensor | None = None,
    key_stride: int = 1,
    normalize: bool = True,
    return_lse: bool = False,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    deterministic: bool = False,
    softcap: float | None = None,
    v_dim: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_block_scales: torch.Tensor | None = None,
    v_block_scales: torch.Tensor | None = None,
    swizzled: bool = False,
    tree: torch.Tensor | None = None,
    ranges: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    schedule: DecodeSchedule | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | AttentionState:
    """Scaled dot-product attention, differentiable in q, k, v, sink and bias.

    Per query row, over the keys j it sees: logit[j] = scale * q.k[j] + bias[j] (see softcap), and
    o = sum of exp(logit[j]) v[j] / (sum of exp(logit[j]) + exp(sink)). No argument but ``out`` is ever
    modified.

    Gradients flow back from o and from lse to those tensors that require them; rows and keys that nobody sees get
    zeros. NaN or Inf stored at a key that some row sees may reach the gradients of rows that do not. Forward-mode and
    second derivatives are not supported, nor are gradients with page_table, tree, normalize=False, out, FP8 or NVFP4
    keys, v_dim without v, or block_mask together with kv_lengths.

    Args:
        q: [B, Sq, Hq, D], bf16 or fp16. Any strides with the last dimension contiguous and rows aligned to 16
            bytes (the address, and the stride of every dimension of more than one element).
        k, v: [B, Sk, Hkv, D], like q, in FP8 (see k_scale) or in NVFP4 (see k_block_scales); Hq a multiple of Hkv,
            query head h reads KV head h // (Hq / Hkv). With page_table: [pages, page_size, Hkv, D]. v=None: V is K
            (shared-KV attention), loaded once. D is a multiple of 8 up to 256, or 512. V may have another head size up
            to 256, which is then also o's. 576 with v=None and v_dim=512 is MLA's absorbed form.
        scale: float of at most 2**100 in magnitude that multiplies q.k; default D**-0.5. Up to 16, logits of kernels
            must stay below 2**29 in magnitude, 2**26 with fp16 or quantised keys; beyond, results may be NaN.
        causal: key j is visible when (j + 1) * key_stride - 1 <= p, with p the row's position (see q_start).
            With the defaults: the last query sees the last key.
        window: (left, right), each None (unbounded) or an int >= 0: p - left <= j <= p + right. key_stride 1
            only.
        sink: [Hq] floating: one more logit per row, in natural units (not multiplied by scale), without a
            value.
        bias: [B or 1, Hq or 1, Sq, Sk], bf16 or fp32, natural units, not multiplied by scale; -inf hides a
            key. Kernels take any strides with the last dimension contiguous.
        kv_lengths: [B] int32 in 0..Sk: keys at or past it do not exist. Values of a CPU tensor are checked; a
            CUDA tensor's are looked at only if the environment variable WARPSPEC_DEBUG is 1, because the host
            then waits for the device at every call. Without it kernels clamp them.
        page_table: [B, max_pages] int32, page numbers in k and v; Sk is max_pages * page_size. Needs
            kv_lengths; entries of pages that lie wholly past it may hold anything. Checked like kv_lengths;
            unchecked, a page number out of range counts as a page of zeros.
        q_start: [B] int32: query i stands at position p = q_start[b] + i; may be negative. Default L - Sq,
            with L the batch row's KV length (kv_lengths, or Sk). Checked like kv_lengths.
        key_stride: int >= 1: key j stands for positions j * key_stride to (j + 1) * key_stride - 1
            (compressed keys).
        normalize: False returns an AttentionState instead, for ``merge``; it takes no sink (merge applies
            it).
        return_lse: also return lse. (A state carries it as ``.lse`` in any case.)
        num_splits: number of splits, ranges of keys that kernels compute side by side and then combine, 1 to 1024, each
            with fp32 results of its own in memory, 16 GiB in all at most; None lets the plan choose. The result is the
            same up to rounding.
        out: o is written here and returned: [B, Sq, Hq, D] in q's dtype (fp32 with normalize=False), rows
            aligned like q's, without an address twice or one of an input's.
        deterministic: gradients are the same bits every time, which costs time; torch.use_deterministic_algorithms
            asks for it, too. (Results always are.)
        softcap: the logits' soft cap, a float of 1e-3 to 1e4: softcap * tanh(scale * q.k / softcap) takes the place of
            scale * q.k, before bias, masks and sink. None or 0: there is none. Kernels' capped logits are right to
            softcap * 2e-6. Gradients on sm90 at head sizes above 128 take caps of 1 and more.
        v_dim: head size of V and o where v=None: V is the first v_dim elements of each of K's rows. 512 with a D of
            576; None or D: all of them.
        k_scale, v_scale: scales of k and v in FP8 (torch.float8_e4m3fn or torch.float8_e5m2, the same for both) or
            NVFP4: fp32 [], [1], [Hkv] or [B, Hkv], at least 0 (checked like kv_lengths), on q's device, where the
            kernel reads them. An element's value is its code times its scale; None: 1. q and the arithmetic stay in 16
            bits; codes are converted exactly. Kernels have D 64, 128 and 256, "reference" any D. No gradients. On
            sm_90a, a call with many query rows per KV head (NVFP4: 576 that see all keys, FP8: 2048) allocates K and V
            in 16 bits, at most 1 GiB.
        k_block_scales, v_block_scales: k and v are NVFP4: torch.uint8 with D/2 bytes a row, two e2m1 codes in each, the
            first in the low nibble. The block scales, torch.uint8 or torch.float8_e4m3fn, have the shape of k and v but
            D/16 in the last dimension, with any strides whose rows are aligned to D/16 bytes. Each is an e4m3 factor of
            16 codes, applied besides k_scale and v_scale. ``warpspec.cache.insert`` writes this format. With v=None, V
            uses K's block scales.
        swizzled: the block scales of values are laid out for sm_100, page by page or, without pages, over each batch
            row's keys (``warpspec.common.kv_formats.swizzled_place``). The bytes do not show which layout they have,
            and reading one as the other gives results that are off by more than half: find out who wrote the cache.
            vLLM and SGLang swizzle on sm_100 and not on sm_90; K's are never swizzled.
        tree: int64 [B, Sq], made from a mask by ``tree_words``: the queries are at most 64 drafts of a tree
            (speculative decoding), and the key of draft j is key q_start[b] + j. Draft i sees every key before
            q_start[b], and the drafts' keys whose bits are set in tree[b, i]: its ancestors' and its own. With n bits
            set, the draft stands at position p = q_start[b] + n - 1, and these n keys stand at q_start[b] to p in
            order: windows count from these positions. Needs causal=True and key_stride 1. No gradients.
        ranges: int32 [B, Sq, 2]: query i sees the keys ranges[b, i, 0] to ranges[b, i, 1] besides those that causal and
            window allow, as the queries of an image see the whole image; (-1, -1): no range. A range must contain the
            query's own position p (to let the window cut it, begin it at p); keys past L do not exist. Checked like
            kv_lengths; unchecked, the row also sees the keys between a range and its other keys. Needs causal=True
            and key_stride 1. For gradients, a query's keys must neither begin nor end earlier than those of the
            query before it (checked in backward() like kv_lengths); ranges of images, which do not overlap, satisfy
            this.
        block_mask: lists of the blocks of keys that the queries of each block see (block sparsity): a ``BlockMask``,
            best made once by ``BlockMask.of``; FlexAttention's BlockMask, which is converted at its first call and must
            not change afterwards; or flash-attn-4's BlockSparseTensorsTorch, converted at each call. A query sees
            all keys of a full block, whatever causal and window say. In a partial block it sees the keys that
            causal, window and ranges allow and, with FlexAttention's mask, mask_mod does; mask_mod is
            evaluated once, under torch.vmap, for the batch rows and heads that the lists have. Blocks on no list are
            hidden, and keys past L do not exist. With page_table the lists may be for any number of keys, and keys in
            blocks past theirs are hidden; a batch row may have more keys than they say only if they end with a whole
            block: which keys beyond them are seen in their last block is undefined. Not with tree. Kernels take blocks
            of multiples of 128 queries and keys, and at some head sizes smaller ones. No gradients with kv_lengths. In
            gradients, NaN or Inf stored in a visited block, at a key or a query that sees nothing there, may reach
            others of that block.
        schedule: made by ``warpspec.latent.mla_schedule`` for calls of these sizes; others raise ValueError.
        backend: "auto", "sm100", "sm90" (native kernels, CUDA tensors), "sim" (the sm100 kernel executed on
            the CPU, CPU tensors) or "reference" (FP32 torch, any device). "auto": the device's kernel for
            CUDA tensors, "sim" for CPU tensors; the environment variable WARPSPEC_BACKEND overrides it.

    Returns:
        o [B, Sq, Hq, D] in q's dtype; with return_lse (o, lse), lse [B, Hq, Sq] fp32 = ln(sum over visible
        keys of exp(logit)), natural logarithm, sink not counted; with normalize=False an AttentionState, all
        fp32. A row with no visible key gives o = 0 and lse = -inf, with or without a sink. NaN or Inf stored
        at a key a row does not see does not reach that row. B, Sq and Sk may be 0.

    Raises:
        TypeError: an argument of the wrong kind or dtype. ValueError: wrong shape, device, strides or value.
        UnsupportedProblem: the backend cannot run this problem (nothing falls back to another).
        NotImplementedError: a gradient that does not exist is requested; raised by backward(), or at once with out or
            in forward mode. backward() also raises UnsupportedProblem for what the backend's gradients do not do.
        All name the argument; the first three are raised before anything is launched or written.
    """
    blocks = block_mask_of(block_mask, q, k, page_table)
    operands = Operands.__new__(  # in half the time of Operands(...)
        Operands,
        q,
        k,
        v,
        o=out,
        sink=sink,
        kv_lengths=kv_lengths,
        q_start=q_start,
        page_table=page_table,
        bias=bias,
        k_scale=k_scale,
        v_scale=v_scale,
        k_block_scales=k_block_scales,
        v_block_scales=v_block_scales,
        tree=tree,
        ranges=ranges,
    )
    options = Options.__new__(
        Options,
        record(LogitOptions, (scale, softcap)),
        causal=causal,
        window=window,
        key_stride=key_stride,
        normalize=normalize,
        return_lse=return_lse,
        num_splits=num_splits,
        deterministic=deterministic,
        v_dim=v_dim,
        swizzled=swizzled,
    )
    if schedule is not None:
        check_kind("schedule", schedule, DecodeSchedule)
        cuts, cut_for = schedule.operand
        operands, options = operands._replace(cuts=cuts), options._replace(cut_for=cut_for)
    return _call(operands, options, blocks, backend)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    max_seqlen_q: int,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    sink: torch.Tensor | None = None,
    q_start: torch.Tensor | None = None,
    key_stride: int = 1,
    normalize: bool = True,
    return_lse: bool = False,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    deterministic: bool = False,
    softcap: float | None = None,
    v_dim: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_block_scales: torch.Tensor | None = None,
    v_block_scales: torch.Tensor | None = None,
    swizzled: bool = False,
    tree: torch.Tensor | None = None,
    ranges: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | AttentionState:
    """``attention`` for B requests with different numbers of queries, packed one after another in q.

    One call serves prefill, chunked prefill and decode together: request b is the n queries from
    cu_seqlens_q[b] to cu_seqlens_q[b + 1] and its own L keys, packed likewise or in pages. The host reads no
    lengths, so a CUDA graph of a call serves any lengths that its tensors come to hold, within their shapes.

    Args:
        q: [T, Hq, D], bf16 or fp16. Strides and alignment as for ``attention``.
        k, v: [Tk, Hkv, D] with cu_seqlens_k, [pages, page_size, Hkv, D] with page_table; heads, D and v=None as for
            ``attention``.
        cu_seqlens_q: needed. [B + 1] int32, ascending, from 0 to at most T: where each request's queries begin, then
            where the last request's end. Requests without queries are legal. Rows of q past the end belong to no
            request. Values are checked like those of kv_lengths in ``attention``; unchecked, kernels neither read nor
            write outside the tensors.
        max_seqlen_q: int >= 0, the most queries of a request. It steers how work is split and in what order sums are
            taken; a wrong value costs time and changes the result by no more than rounding.
        cu_seqlens_k: [B + 1] int32, ascending, from 0 to at most Tk: where each request's keys begin and end.
            Either this or page_table.
        max_seqlen_k: int >= 0, the most keys of a request, likewise a hint; None: Tk, or all the keys that
            page_table has room for (which may be many more than there are: give it).
        page_table, kv_lengths: [B, max_pages] and [B] int32, both or neither, as for ``attention``.
        q_start: [B] int32: query i of request b stands at position p = q_start[b] + i; default L - n.
        scale, causal, window, sink, key_stride, normalize, num_splits, deterministic, softcap, v_dim, k_scale,
            v_scale, k_block_scales, v_block_scales, swizzled, backend: as for ``attention``.
        tree: int64 [T], ranges: int32 [T, 2], as for ``attention``; with a tree, max_seqlen_q is at most 64.
        block_mask: lists of each request's own blocks, as for ``attention``: batch row b of the lists, or the only one,
            is request b's, and its blocks of queries and of keys count from the request's first query and first key.
            The lists are for any numbers of queries and keys; queries in blocks past theirs see nothing, and keys there
            are hidden. A request may be longer than they say only if they end with whole blocks: what rows beyond them
            see inside of their last block, and which rows see keys beyond them there, is undefined. flash-attn-4's
            lists are for max_seqlen_q and max_seqlen_k, which must be given. (Lists over all documents of a packed row
            are a call of ``attention`` with one batch row.) No gradients.
        return_lse: also return lse.
        out: o is written here and returned: [T, Hq, D], else as for ``attention``. Rows that belong to no request
            are left as they are.

    Returns:
        o [T, Hq, D] in q's dtype; with return_lse (o, lse), lse [Hq, T] fp32; with normalize=False an
        AttentionState of o [T, Hq, D], row_max and row_sum [Hq, T], all fp32, which ``merge`` takes. Their meaning is
        that of ``attention``; rows that belong to no request are undefined. A request without keys gives o = 0 and lse
        = -inf. NaN or Inf past a request's end reaches no row of it.

    Raises:
        As ``attention`` does.
    """
    check_strided("cu_seqlens_q", cu_seqlens_q)  # arguments that only packed queries have
    blocks = packed_mask_of(block_mask, max_seqlen_q, max_seqlen_k)
    operands = Operands.__new__(  # in half the time of Operands(...)
        Operands,
        q,
        k,
        v,
        o=out,
        sink=sink,
        kv_lengths=kv_lengths,
        q_start=q_start,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        k_scale=k_scale,
        v_scale=v_scale,
        k_block_scales=k_block_scales,
        v_block_scales=v_block_scales,
        tree=tree,
        ranges=ranges,
    )
    options = Options.__new__(
        Options,
        record(LogitOptions, (scale, softcap)),
        causal=causal,
        window=window,
        key_stride=key_stride,
        normalize=normalize,
        return_lse=return_lse,
        num_splits=num_splits,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        deterministic=deterministic,
        v_dim=v_dim,
        swizzled=swizzled,
    )
    return _call(operands, options, blocks, backend)


def _call(operands: Operands, options: Options, blocks: BlockMask | None, backend):
    """Return the results of ``attention`` and ``attention_varlen``. blocks: the lists of block_mask, if there are
    any."""
    if blocks is not None:
        operands, options = operands._replace(**blocks.operands), options._replace(**blocks.options)
        if operands.cu_seqlens_q is not None:  # requests' tiles have an order of their own
            operands = operands._replace(kv_order=None)
    key, call = ops.find(operands, options, backend)
    if call is None:
        o, stats = _check_and_run(operands, options, backend, key)
    elif call.recorded:
        o, stats = function.forward(call, operands, options, backend)
    else:
        o, stats = ops.forward_known(call, operands)
    if not options.normalize:
        return AttentionState(o, stats[0], stats[1])
    return (o, stats[0]) if options.return_lse else o


def check(operands: Operands, options: Options, backend: str = "auto") -> None:
    """Raise what ``attention`` would raise for a call, without launching it. While a call is recorded or traced, only
    the kinds of its arguments are checked."""
    key, call = ops.find(operands, options, backend)
    if call is not None:
        return
    options, records = _check_kinds(operands, options, backend)
    if ops.unobserved(operands):
        ops.remember(key, ops.check_call(operands, options, backend, records))


def _check_kinds(operands: Operands, options: Options, backend) -> tuple[Options, bool]:
    """Check what can be checked before torch's dispatcher: (options with both sides of the window, whether autograd
    records the call)."""
    check_kinds(operands, options)
    options = options._replace(window=check_window(options.window))
    check_kind("backend", backend, str)
    refuse_tangents(**operands.inputs)
    records = ops.needs_gradient(operands)
    if records and operands.k.dtype in FORMATS:
        raise NotImplementedError(
            "k: gradients are not implemented with FP8 or NVFP4 keys and values; call under torch.no_grad()"
        )
    refuse_gradients(k_scale=operands.k_scale, v_scale=operands.v_scale)
    if operands.tree is not None and records:
        raise NotImplementedError(
            "tree: gradients are not implemented with a tree; call under torch.no_grad()"
        )
    if operands.o is not None and records:
        raise NotImplementedError(
            "out: gradients are not implemented for a call with out; leave it out, or call under torch.no_grad()"
        )
    return options, records


def _check_and_run(operands: Operands, options: Options, backend, key):
    """Check and run a call that is not remembered: (o, stats). key: remember it under this key; None: do not remember
    it."""
    options, records = _check_kinds(operands, options, backend)
    if not ops.unobserved(operands):
        return ops.forward_watched(operands, options, backend)
    call = ops.check_call(operands, options, backend, records)
    ops.remember(key, call)
    return _run(call, operands, options, backend)


def _run(call: ops.Call, operands: Operands, options: Options, backend: str):
    """Run a checked call without torch's dispatcher: (o, stats)."""
    if call.recorded:
        return function.forward(call, operands, options, backend)
    return ops.forward_known(call, operands)


def merge(
    states: list[AttentionState] | tuple[AttentionState, ...], sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over disjoint key sets into attention over their union.

    Exact up to fp32 rounding, in any order and any split: KV splits, two caches (compressed and sliding
    window) and context parallelism compose through it. Differentiable in the states and the sink; since
    normalize=False has no gradients, a state to train with is AttentionState(o.float(), lse, torch.ones_like(lse)) of
    (o, lse).

    Args:
        states: at least one AttentionState (``attention(..., normalize=False)``), all of the same shapes and
            device. Rows that saw no key (row_max -inf) add nothing.
        sink: [Hq] floating or None: one more logit per row, counted once, natural units.

    Returns:
        o [B, Sq, Hq, D] fp32, normalised; lse [B, Hq, Sq] fp32, sink not counted; of packed states o [T, Hq, D]
        and lse [Hq, T]. A row that saw no key in any state gives o = 0 and lse = -inf, with or without a sink.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    check_states(states, sink)
    union = combine(states)
    return normalized_output(union, sink), union.lse
