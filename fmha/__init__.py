"""Attention: softmax(scale * Q K^T + bias) V with masks, sinks, grouped heads, paged and split KV."""

from __future__ import annotations

import torch

from warpspec.common.backend import refuse_tangents
from warpspec.common.checks import check_kind, check_strided
from warpspec.common.errors import UnsupportedProblem
from warpspec.fmha import ops
from warpspec.fmha.backward import function
from warpspec.fmha.checks import check_kinds, check_window
from warpspec.fmha.operands import Operands, Options
from warpspec.fmha.quantized import FORMATS
from warpspec.fmha.state import AttentionState, check_states, combine, normalized_output
from warpspec.fmha.tree import tree_words

__all__ = ["AttentionState", "UnsupportedProblem", "attention", "attention_varlen", "merge", "tree_words"]


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
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | AttentionState:
    """Scaled dot-product attention, differentiable in q, k, v, sink and bias.

    Per query row, over the keys j it sees: logit[j] = scale * q.k[j] + bias[j] (see softcap), and
    o = sum of exp(logit[j]) v[j] / (sum of exp(logit[j]) + exp(sink)). No argument but ``out`` is ever
    modified.

    Gradients flow back from o and from lse to those tensors that require them; rows and keys that nobody sees get
    zeros. Head sizes that are not 64, 128 or 256, or not equal, are padded with zeros to one of these, in copies. NaN
    or Inf stored at a key that some row sees may reach the gradients of rows that do not. There are none in forward
    mode, none of gradients, nor with page_table, normalize=False or out.

    Args:
        q: [B, Sq, Hq, D], bf16 or fp16. Any strides with the last dimension contiguous and rows aligned to 16
            bytes (the address, and the stride of every dimension of more than one element).
        k, v: [B, Sk, Hkv, D], like q, in FP8 (see k_scale) or in NVFP4 (see k_block_scales); Hq a multiple of Hkv,
            query head h reads KV head h // (Hq / Hkv). With page_table: [pages, page_size, Hkv, D]. v=None: V is K
            (shared-KV attention), loaded once. D is a multiple of 8 up to 256, or 512. V's head size may be another one
            up to 256: o has it, too. 576 with v=None and v_dim=512 is MLA's absorbed form.
        scale: finite float that multiplies q.k; default D**-0.5.
        causal: key j is visible when (j + 1) * key_stride - 1 <= p, with p the row's position (see q_start).
            With the defaults: the last query sees the last key.
        window: (left, right), each None (unbounded) or an int >= 0: p - left <= j <= p + right. key_stride 1
            only.
        sink: [Hq] floating: one more logit per row, in natural units (not multiplied by scale), without a
            value.
        bias: [B or 1, Hq or 1, Sq, Sk], bf16 or fp32, natural units, not multiplied by scale; -inf hides a
            key.
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
        num_splits: parts into which a kernel splits the keys, at least 1; None lets it choose. The result is
            the same up to rounding.
        out: o is written here and returned: [B, Sq, Hq, D] in q's dtype (fp32 with normalize=False), rows
            aligned like q's, without an address twice or one of an input's.
        deterministic: gradients are the same bits every time, which costs time; torch.use_deterministic_algorithms
            asks for it, too. (Results always are.)
        softcap: the logits' soft cap, a float of 1e-3 to 1e4: softcap * tanh(scale * q.k / softcap) takes the place of
            scale * q.k, before bias, masks and sink. None or 0: there is none.
        v_dim: head size of V and o where v=None: V is the first v_dim elements of each of K's rows. 512 with a D of
            576; None or D: all of them.
        k_scale, v_scale: fp32 [], [1], [Hkv] or [B, Hkv], on q's device, where the kernel reads it: of k and v in FP8
            (torch.float8_e4m3fn or torch.float8_e5m2, both alike) or NVFP4. Each number stands for its code times its
            scale, which is at least 0; None: 1. q stays in 16 bits and so does the arithmetic; codes are converted
            exactly. D 64, 128 and 256 on sm_90a, any D with "reference". No gradients. On sm_90a, where 2048 query rows
            or more of a batch row meet a KV head, a call takes memory for K and V in 16 bits, at most 1 GiB.
        k_block_scales, v_block_scales: k and v are NVFP4: torch.uint8 with D/2 bytes a row, two e2m1 codes in each, the
            first in the low nibble. These, torch.uint8 or torch.float8_e4m3fn, have their shape but for D/16 in the
            last dimension, any strides whose rows are aligned to D/16 bytes: an e4m3 scale for each 16 codes, by which
            they are multiplied besides k_scale and v_scale. As ``warpspec.cache.insert`` writes them. With v=None V
            has K's.
        swizzled: the block scales of values are laid out for sm_100, page by page or, without pages, over each batch
            row's keys (``warpspec.common.kv_formats.swizzled_place``). Nothing in the bytes tells the two layouts
            apart, and read as the other one results are off by more than half: ask who wrote the cache. vLLM and
            SGLang swizzle on sm_100 and not on sm_90; K's are never swizzled.
        tree: int64 [B, Sq], what ``tree_words`` makes of a mask: the queries are drafts of a tree (speculative
            decoding), at most 64, and the key of draft j is key q_start[b] + j. Draft i sees every key before
            q_start[b], and of the drafts' keys those whose bits are set in tree[b, i]: its ancestors' and its own. With
            n bits set it stands at position p = q_start[b] + n - 1, and the n keys at q_start[b] to p in turn: windows
            count from these positions. Needs causal=True and key_stride 1. No gradients.
        ranges: int32 [B, Sq, 2]: query i sees the keys ranges[b, i, 0] to ranges[b, i, 1] besides those that causal and
            window let it see, as the queries of an image see all of the image; (-1, -1): none. A range has to hold the
            query's own position p (so where the window shall cut it, it begins at p); keys past L do not exist.
            Checked like kv_lengths; unchecked, what lies between a range and the row's other keys is seen, too. Needs
            causal=True and key_stride 1. For gradients, neither end of a query's range may lie before that of the query
            before it, as it is with images, which do not overlap.
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
        NotImplementedError: a gradient is asked for that there is not: from backward(), or at once where out is given
            or in forward mode. UnsupportedProblem comes from backward(), too: where the backend has none (D 512).
        All name the argument; the first three are raised before anything is launched or written.
    """
    operands = Operands(
        q,
        k,
        v,
        out,
        sink,
        kv_lengths,
        q_start,
        page_table=page_table,
        bias=bias,
        k_scale=k_scale,
        v_scale=v_scale,
        k_block_scales=k_block_scales,
        v_block_scales=v_block_scales,
        tree=tree,
        ranges=ranges,
    )
    options = Options(
        scale,
        causal,
        window,
        key_stride,
        normalize,
        return_lse,
        num_splits,
        deterministic=deterministic,
        softcap=softcap,
        v_dim=v_dim,
        swizzled=swizzled,
    )
    return _call(operands, options, backend)


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
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | AttentionState:
    """``attention`` of B requests with different numbers of queries, which stand one behind another in q.

    One call serves prefill, chunked prefill and decode together: request b is the n queries from
    cu_seqlens_q[b] to cu_seqlens_q[b + 1] and its own L keys, packed likewise or in pages. The host reads no
    lengths, so a CUDA graph of a call serves any lengths that its tensors come to hold, within their shapes.

    Args:
        q: [T, Hq, D], bf16 or fp16. Strides and alignment as of ``attention``.
        k, v: [Tk, Hkv, D] with cu_seqlens_k, [pages, page_size, Hkv, D] with page_table; heads, D and v=None as
            of ``attention``.
        cu_seqlens_q: needed. [B + 1] int32, ascending, from 0 to at most T: where each request's queries begin,
            and where the last one's end. Requests without queries are legal. Rows of q past the end belong to no
            request.
            Values of a CPU tensor are checked, those of a CUDA tensor as kv_lengths' of ``attention``: unchecked,
            kernels neither read nor write outside the tensors.
        max_seqlen_q: int >= 0, the most queries of a request. It steers how the work is cut and in what order sums
            are taken; a wrong value costs time, never more than rounding of the result.
        cu_seqlens_k: [B + 1] int32, ascending, from 0 to at most Tk: where each request's keys begin and end.
            Either this or page_table.
        max_seqlen_k: int >= 0, the most keys of a request, likewise a hint; None: Tk, or all the keys that
            page_table has room for (which may be many more than there are: give it).
        page_table, kv_lengths: [B, max_pages] and [B] int32, both or neither, as of ``attention``.
        q_start: [B] int32: query i of request b stands at position p = q_start[b] + i; default L - n.
        scale, causal, window, sink, key_stride, normalize, num_splits, deterministic, softcap, v_dim, k_scale,
            v_scale, k_block_scales, v_block_scales, swizzled, backend: as of ``attention``.
        tree: int64 [T], ranges: int32 [T, 2], as of ``attention``; with a tree, max_seqlen_q is at most 64.
        return_lse: also return lse.
        out: o is written here and returned: [T, Hq, D], else as of ``attention``. Rows that belong to no request
            are left as they are.

    Returns:
        o [T, Hq, D] in q's dtype; with return_lse (o, lse), lse [Hq, T] fp32; with normalize=False an
        AttentionState of o [T, Hq, D], row_max and row_sum [Hq, T], all fp32, which ``merge`` takes. What they
        hold is said at ``attention``; rows that belong to no request hold anything. A request without keys gives
        o = 0 and lse = -inf. NaN or Inf past a request's end reaches no row of it.

    Raises:
        As ``attention`` does.
    """
    check_strided("cu_seqlens_q", cu_seqlens_q)  # what tells packed queries from a rectangle
    operands = Operands(
        q,
        k,
        v,
        out,
        sink,
        kv_lengths,
        q_start,
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
    options = Options(
        scale,
        causal,
        window,
        key_stride,
        normalize,
        return_lse,
        num_splits,
        max_seqlen_q,
        max_seqlen_k,
        deterministic,
        softcap,
        v_dim,
        swizzled,
    )
    return _call(operands, options, backend)


def _call(operands: Operands, options: Options, backend):
    """What ``attention`` and ``attention_varlen`` return."""
    key = ops.key_of(operands, options, backend)
    call = None if key is None else ops.recall(key, operands)
    if call is None:
        o, stats = _check_and_run(operands, options, backend, key)
    else:
        o, stats = _run(call, operands, options, backend)
    if not options.normalize:
        return AttentionState(o, stats[0], stats[1])
    return (o, stats[0]) if options.return_lse else o


def check(operands: Operands, options: Options, backend: str = "auto") -> None:
    """Raise what ``attention`` raises for a call, without making it. Arguments that something records or traces are
    checked only as far as their kinds."""
    key = ops.key_of(operands, options, backend)
    if key is not None and ops.recall(key, operands) is not None:
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
    """(o, stats) of a call of which nothing is known. key: under which it may be, from now on; None for not at all."""
    options, records = _check_kinds(operands, options, backend)
    if not ops.unobserved(operands):
        return ops.forward_watched(operands, options, backend)
    call = ops.check_call(operands, options, backend, records)
    ops.remember(key, call)
    return _run(call, operands, options, backend)


def _run(call: ops.Call, operands: Operands, options: Options, backend: str):
    """(o, stats) of a checked call, past torch's dispatcher."""
    if call.recorded:
        return function.forward(call, operands, options, backend)
    return ops.forward_known(call, operands)


def merge(
    states: list[AttentionState] | tuple[AttentionState, ...], sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over disjoint key sets into attention over their union.

    Exact up to fp32 rounding, in any order and any split: KV splits, two caches (compressed and sliding
    window) and context parallelism compose through it.

    Args:
        states: at least one AttentionState (``attention(..., normalize=False)``), all of the same shapes and
            device. Rows that saw no key (row_max -inf, row_sum 0) add nothing.
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
