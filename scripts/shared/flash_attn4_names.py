"""flash-attn 4 under the names and arguments that engines call flash-attn 2 and 3 by."""

from flash_attn.cute import flash_attn_varlen_func as _varlen


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    block_table=None,
    s_aux=None,
):
    """Packed requests; with block_table, keys in pages."""
    options = dict(softmax_scale=softmax_scale, causal=causal, learnable_sink=s_aux)
    options["window_size"] = tuple(None if reach == -1 else reach for reach in window_size)
    if block_table is None:
        keys = dict(cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k)
    else:
        keys = dict(page_table=block_table.clamp(min=0), seqused_k=cu_seqlens_k.diff())
    result = _varlen(q, k, v, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, **keys, **options)
    return result[0] if isinstance(result, tuple) else result


def flash_attn_with_kvcache(
    q, k_cache, v_cache, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False
):
    """Queries [B, Sq, Hq, D] over keys in pages."""
    result = _varlen(
        q,
        k_cache,
        v_cache,
        seqused_k=cache_seqlens,
        page_table=block_table.clamp(min=0),
        softmax_scale=softmax_scale,
        causal=causal,
    )
    return result[0] if isinstance(result, tuple) else result
