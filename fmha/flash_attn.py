"""flash-attn's functions with their names and arguments: code written for flash-attn runs after changing the import.

    from warpspec.fmha.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Arguments by position are those of flash-attn 2; by name also those of flash-attn 3 and 4 and of engines: ``page_table``
for ``block_table``; ``learnable_sink``, ``s_aux`` or ``sinks``; ``return_lse`` or ``return_softmax_lse``;
``seqused_k``, ``num_splits``, ``out``; ``k_descale`` and ``v_descale`` [B, Hkv] for FP8 and NVFP4 keys and values
(queries stay in 16 bits), and for NVFP4 also ``attention``'s ``k_block_scales``, ``v_block_scales`` and ``swizzled``.
NO_EFFECT lists arguments that are accepted and ignored. Arguments in UNSUPPORTED, and gradients that ``attention`` does
not have, raise NotImplementedError with the name. Errors raised by ``attention`` use its argument names.

Differences from flash-attn: head sizes are multiples of 8 up to 256, and 512; pages hold a multiple of 16 keys up to
128 or a multiple of 128. A row that sees no key has lse -inf (flash-attn 2 says +inf). Without a request for lse the
result is out alone (flash-attn 4 returns out and None).
"""

from __future__ import annotations

import contextlib
import numbers

import torch

from warpspec.common.checks import (
    ANY,
    check_bool,
    check_int,
    check_number,
    check_strided,
    check_tensor,
    kind_of,
)
from warpspec.common.outputs import check_output, has_memory, is_same
from warpspec.fmha import attention, attention_varlen, check
from warpspec.fmha.checks import DTYPES, SIZE_LIMIT
from warpspec.fmha.operands import Operands, Options
from warpspec.fmha.quantized import BLOCK_SCALES, BYTES, FORMATS
from warpspec.fmha.values import are_checked

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

# Other arguments: hints about speed, or about gradients, which do not exist with a cache.
NO_EFFECT = ("deterministic", "pack_gqa", "sm_margin", "scheduler_metadata", "min_seqlen_k", "fa_version")
# Other arguments, and the values that ask for nothing.
UNSUPPORTED = {
    "dropout_p": (None, 0.0),
    "attention_chunk": (None, 0),
    **dict.fromkeys(
        (
            "alibi_slopes", "qv", "q_v", "q_descale", "score_mod", "score_mod_bwd",
            "mask_mod", "aux_tensors", "aux_scalars", "block_sparse_tensors", "block_sparse_tensors_bwd",
            "gather_kv_indices", "seqused_q", "cu_seqlens_k_new", "rotary_cos", "rotary_sin", "rotary_seqlens",
            "cache_batch_idx", "cache_leftpad",
        ),
        (None,),
    ),
}  # fmt: skip
SINKS = ("learnable_sink", "s_aux", "sinks")  # names of one argument


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    num_splits: int = 0,
    out: torch.Tensor | None = None,
    **others,
):
    """``warpspec.fmha.attention`` with flash-attn's arguments, for requests of equal length.

    Args:
        q, k, v: [B, Sq, Hq, D], [B, Sk, Hkv, D], bf16 or fp16.
        softmax_scale: default D**-0.5.
        softcap: the logits' soft cap; 0 or None for none.
        causal: the last query sees the last key.
        window_size: (left, right), -1 or None for unbounded.
        return_attn_probs, return_lse: what is returned besides out.
        deterministic: gradients are the same bits every time.
        num_splits: number of splits of the keys, at most 1024; 0 lets the plan choose.
        out: [B, Sq, Hq, D], written and returned.
        others: see the module; learnable_sink, s_aux or sinks: [Hq], one more logit per row. block_sparse_tensors:
            flash-attn-4's lists of blocks, as ``attention``'s block_mask takes them; block_sparse_tensors_bwd is
            accepted beside it, and ignored.

    Returns:
        out [B, Sq, Hq, D]; with return_lse (out, lse), lse [B, Hq, Sq] fp32, which includes a sink; with
        return_attn_probs (out, lse, None), as flash-attn 2 does where nothing is dropped.

    Raises:
        NotImplementedError: naming an argument that requests an unsupported feature. TypeError, ValueError,
        UnsupportedProblem: as ``attention`` does.
    """
    scales, swizzled = _descales(others), others.pop("swizzled", False)
    lists = others.pop("block_sparse_tensors", None)
    if lists is not None:  # those of gradients follow from them
        others.pop("block_sparse_tensors_bwd", None)
    sink = _sink_of(dropout_p=dropout_p, alibi_slopes=alibi_slopes, **others)
    options = _options(softmax_scale, causal, window_size, num_splits, softcap, swizzled) | scales
    wants = _wants(return_attn_probs=return_attn_probs, return_lse=return_lse)
    check_strided("v", v)  # attention() would take K for V
    result = attention(
        *_plain(q, k, v),
        sink=sink,
        out=out,
        return_lse=wants,
        deterministic=deterministic,
        block_mask=lists,
        **options,
    )
    return _returned(result, wants, return_attn_probs, sink)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    page_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    num_splits: int = 0,
    out: torch.Tensor | None = None,
    **others,
):
    """``warpspec.fmha.attention_varlen`` with flash-attn's arguments, for packed requests of any length.

    Args:
        q: [T, Hq, D]; without cu_seqlens_q [B, Sq, Hq, D].
        k, v: [Tk, Hkv, D] with cu_seqlens_k; [pages, page_size, Hkv, D] with a page table; without cu_seqlens_q
            also [B, Sk, Hkv, D].
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32. With a page table and no seqused_k, the differences of
            cu_seqlens_k are the numbers of keys.
        max_seqlen_q, max_seqlen_k: hints; default T, and the most keys possible. Reading one that is a tensor waits for
            its device.
        block_table or page_table: [B, max_pages] int32.
        seqused_k: [B] int32, keys of each request; not with packed keys.
        The rest: as in ``flash_attn_func``; return_softmax_lse is another name of return_lse.

    Returns:
        out, (out, lse) or (out, lse, None) like ``flash_attn_func``; for packed queries out [T, Hq, D] and lse [Hq, T].

    Raises:
        As ``flash_attn_func`` does.
    """
    scales, swizzled = _descales(others), others.pop("swizzled", False)
    sink = _sink_of(dropout_p=dropout_p, alibi_slopes=alibi_slopes, **others)
    options = _options(softmax_scale, causal, window_size, num_splits, softcap, swizzled) | scales
    table = _one_of(block_table=block_table, page_table=page_table)
    wants = _wants(
        return_attn_probs=return_attn_probs, return_lse=return_lse, return_softmax_lse=return_softmax_lse
    )
    check_strided("v", v)
    q, k, v = _plain(q, k, v)
    if seqused_k is not None and table is None and cu_seqlens_k is not None:
        raise NotImplementedError(
            "seqused_k: must be None with packed keys (cu_seqlens_k without a page table)"
        )
    if table is not None and seqused_k is None and cu_seqlens_k is not None:
        seqused_k = cu_seqlens_k.diff()
    options |= {"sink": sink, "out": out, "return_lse": wants, "page_table": table, "kv_lengths": seqused_k}
    options["deterministic"] = deterministic
    if cu_seqlens_q is None:
        if cu_seqlens_k is not None and table is None:
            raise NotImplementedError("cu_seqlens_q: must be given with packed keys (cu_seqlens_k), got None")
        result = attention(q, k, v, **options)
    else:
        result = attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k=None if table is not None else cu_seqlens_k,
            max_seqlen_q=len(q) if max_seqlen_q is None else _hint("max_seqlen_q", max_seqlen_q),
            max_seqlen_k=None if max_seqlen_k is None else _hint("max_seqlen_k", max_seqlen_k),
            **options,
        )
    return _returned(result, wants, return_attn_probs, sink)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float | None = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    **others,
):
    """Attention to a KV cache, to which new keys may be added first.

    Args:
        q: [B, Sq, Hq, D]; with cu_seqlens_q, which needs a page table, [T, Hq, D].
        k_cache, v_cache: [B, Sk, Hkv, D], or [pages, page_size, Hkv, D] with a page table. Written where k and v
            are given.
        k, v: [B, n, Hkv, D], both or neither: written into the cache after cache_seqlens keys, and seen by the queries.
            They must fit the cache: checked like kv_lengths of ``attention``; unchecked, a device error. Autograd does
            not record such a call: the result has no gradients, as with flash-attn, and the cache stays plain memory.
        cache_seqlens or seqused_k: keys in the cache (before k and v): int, or [B] int32; None: the cache is full.
        block_table or page_table: [B, max_pages] int32.
        The rest: as in ``flash_attn_varlen_func``; rotary_interleaved belongs to rotary_cos and is not read.

    Returns:
        out, or with return_softmax_lse (or return_lse) (out, lse): as ``flash_attn_varlen_func``.

    Raises:
        As ``flash_attn_func`` does.
    """
    scales, swizzled = _descales(others), others.pop("swizzled", False)
    sink = _sink_of(
        alibi_slopes=alibi_slopes,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        **others,
    )
    options = _options(softmax_scale, causal, window_size, num_splits, softcap, swizzled)
    table = _one_of(block_table=block_table, page_table=page_table)
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_strided(name, tensor)
    lengths = _lengths(_one_of(cache_seqlens=cache_seqlens, seqused_k=seqused_k), q, cu_seqlens_q)
    wants = _wants(return_softmax_lse=return_softmax_lse, return_lse=return_lse)
    if (k is None) != (v is None):
        raise ValueError("k: must be given with v, and v with k")
    with torch.no_grad() if k is not None else contextlib.nullcontext():
        if k is not None:
            if cu_seqlens_q is not None:
                raise NotImplementedError("k: must be None with cu_seqlens_q")
            arguments = {"o": out, "sink": sink, "page_table": table, **scales}
            checked = Options.of(**options, return_lse=wants)
            lengths = _add_keys(q, k, v, k_cache, v_cache, lengths, arguments, checked)
        options |= {
            "sink": sink,
            "out": out,
            "return_lse": wants,
            "page_table": table,
            "kv_lengths": lengths,
        } | scales
        q, k_cache, v_cache = _plain(q, k_cache, v_cache)
        if cu_seqlens_q is None:
            result = attention(q, k_cache, v_cache, **options)
        else:
            if table is None:
                raise NotImplementedError("cu_seqlens_q: needs a page table, got block_table=None")
            most = len(q) if max_seqlen_q is None else _hint("max_seqlen_q", max_seqlen_q)
            result = attention_varlen(q, k_cache, v_cache, cu_seqlens_q, max_seqlen_q=most, **options)
        return _returned(result, wants, False, sink)


def _lengths(lengths, q: torch.Tensor, cu_seqlens_q: torch.Tensor | None) -> torch.Tensor | None:
    """The lengths of requests as a tensor, also where one int stands for all."""
    if q.dim() == 0:
        raise ValueError("q: must have dimensions, got shape []")
    lengths = _plain_int(lengths)
    if not isinstance(lengths, int):
        return lengths
    check_int("cache_seqlens", lengths, 0, SIZE_LIMIT)
    batch = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    return torch.full((batch,), lengths, dtype=torch.int32, device=q.device)


def _add_keys(q, k, v, k_cache, v_cache, lengths, arguments: dict, options: Options) -> torch.Tensor:
    """Write new keys and values into the cache, once the whole call has been checked; returns the lengths with them.

    arguments, options: the other tensors of the call of ``attention`` that follows, and its options.
    """
    table = arguments["page_table"]
    if k_cache.dtype == BYTES:
        raise NotImplementedError("k: must be None with a cache in NVFP4, which warpspec.cache.insert writes")
    if lengths is None:
        raise ValueError("cache_seqlens: must be given with k and v: where they are to be written")
    check_tensor("cache_seqlens", lengths, (torch.int32,), (len(q),), q.device)
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        check_tensor(f"{name}_cache", cache, (*DTYPES, *FORMATS), (ANY,) * 4, q.device)
        _check_new(name, new, cache, lengths, table)
    read = {"q": q, "k": k, "v": v, "cache_seqlens": lengths, "block_table": table}
    check_output("k_cache", k_cache, read)
    if torch.compiler.is_compiling() or not (is_same(k, v) and is_same(k_cache, v_cache)):
        check_output("v_cache", v_cache, {**read, "k_cache": k_cache})
    after = lengths + k.shape[1]
    check(Operands(*_plain(q, k_cache, v_cache), kv_lengths=after, **arguments), options)
    for new, cache in ((k, k_cache), (v, v_cache)):
        _append(cache, new, lengths, table)
    return after


def _check_new(name, new, cache, lengths, table) -> None:
    """Raise TypeError or ValueError, naming the argument, unless new keys or values can be written into a cache."""
    check_tensor(name, new, (cache.dtype,), None, cache.device)
    if table is not None:
        check_tensor("block_table", table, (torch.int32,), (len(lengths), ANY), cache.device)
    batch = len(lengths)
    if new.dim() != 4 or len(new) != batch or new.shape[2:] != cache.shape[2:]:
        raise ValueError(
            f"{name}: shape must be [B={batch}, n, Hkv={cache.shape[2]}, D={cache.shape[3]}], got {list(new.shape)}"
        )
    if are_checked(cache.device) and has_memory(lengths) and batch:
        room = cache.shape[1] * (1 if table is None else table.shape[1]) - new.shape[1]
        shortest, longest = map(int, lengths.aminmax())
        if shortest < 0 or longest > room:
            raise ValueError(
                f"cache_seqlens: values must be 0..{room}, so that the cache has room for {new.shape[1]} new keys, "
                f"got {shortest} to {longest}"
            )


def _append(
    cache: torch.Tensor, new: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor | None
) -> None:
    """Write new [B, n, Hkv, D] into a cache after each batch row's keys."""
    position = lengths[:, None].long() + torch.arange(new.shape[1], device=new.device)  # [B, n]
    if table is None:
        cache[torch.arange(len(new), device=new.device)[:, None], position] = new
    else:
        page_size = cache.shape[1]
        cache[table.long().gather(1, position // page_size), position % page_size] = new


def _sink_of(**others) -> torch.Tensor | None:
    """The sink among the other arguments of a call. Raises TypeError or NotImplementedError naming one that is unknown
    or unsupported."""
    sinks = {name: others.pop(name) for name in SINKS if name in others}
    sink = _one_of(**sinks) if sinks else None
    for name, value in others.items():
        if name in NO_EFFECT:
            continue
        if name not in UNSUPPORTED:
            raise TypeError(f"{name}: is not an argument of this function")
        nothing = UNSUPPORTED[name]
        if value is not None and (isinstance(value, torch.Tensor) or value not in nothing):
            shown = list(value.shape) if isinstance(value, torch.Tensor) else value
            raise NotImplementedError(f"{name}: is not supported, must be {nothing[-1]}, got {shown}")
    return sink


def _one_of(**given):
    """The value of one argument that has several names."""
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) > 1:
        raise TypeError(
            f"{next(iter(found))}: is the same argument as {', '.join(list(found)[1:])}; give one"
        )
    return next(iter(found.values()), None)


def _descales(others: dict) -> dict:
    """The scales of FP8 and NVFP4 keys and values, taken from the other arguments, as ``attention`` names them."""
    if not others:  # as in nearly every call
        return {}
    scales = {f"{side}_scale": others.pop(f"{side}_descale", None) for side in ("k", "v")}
    blocks = {name: others.pop(name, None) for name in BLOCK_SCALES}
    return scales | blocks


def _options(softmax_scale, causal, window_size, num_splits, softcap, swizzled) -> dict:
    """Arguments of ``attention``."""
    window = None
    if window_size is not None:
        if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
            raise TypeError(
                f"window_size: must be (left, right), each None or an int, got {kind_of(window_size)}"
            )
        window_size = tuple(map(_plain_int, window_size))
        for reach in window_size:
            if reach is not None:
                check_int("window_size", reach, -1)
        window = tuple(None if reach == -1 else reach for reach in window_size)
        window = None if window == (None, None) else window
    num_splits = _plain_int(num_splits)
    if num_splits is not None:
        check_int("num_splits", num_splits, 0)
    if softmax_scale is not None:
        check_number("softmax_scale", softmax_scale, signed=True)
    return {
        "swizzled": swizzled,
        "scale": softmax_scale,
        "causal": causal,
        "window": window,
        "num_splits": num_splits or None,  # 0 lets the kernel choose
        "softcap": softcap,
    }


def _wants(**flags: bool) -> bool:
    """Whether one of the arguments asks for lse. Raises TypeError naming one that is not a bool."""
    for name, flag in flags.items():
        check_bool(name, flag)
    return any(flags.values())


def _plain(*tensors: torch.Tensor) -> list:
    """The tensors with contiguous last dimensions."""
    return [t.contiguous() if _is_spread(t) else t for t in tensors]


def _is_spread(tensor) -> bool:
    """Whether a tensor's last dimension is not contiguous."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        return False
    return tensor.dim() > 0 and tensor.stride(-1) != 1


def _hint(name: str, value) -> int:
    """The most queries or keys of a request, as an int; a tensor is read, which waits for its device."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point():
        return int(value)
    value = _plain_int(value)
    check_int(name, value, 0)
    return value


def _plain_int(value):
    """An int for a NumPy integer, such as the largest of an array of lengths; any other value as it is."""
    if isinstance(value, (int, torch.SymInt)) or not isinstance(value, numbers.Integral):
        return value
    return int(value)


def _returned(result, wants_lse: bool, probabilities: bool, sink: torch.Tensor | None):
    """Convert a result to what flash-attn returns. Its lse counts the sink; ``attention``'s does not."""
    if not wants_lse:
        return result
    out, lse = result
    if sink is not None:
        lse = torch.logaddexp(lse, sink.float()[:, None])
    return (out, lse, None) if probabilities else (out, lse)
