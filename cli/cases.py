"""Operators at the command line's shapes, on random inputs: ours on any backend, torch's, and how they compare."""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from warpspec.cli.case import (
    ATTENTION_TOLERANCE,
    EXPERTS_TOLERANCE,
    GRADIENT_TOLERANCE,
    SOFTMAX_TOLERANCE,
    TOPK_TOLERANCE,
    Case,
    random_numbers,
)
from warpspec.cli.latent_cases import gathered_case, mla_case
from warpspec.cli.options import KV_DTYPES


def attention_case(
    options: argparse.Namespace,
    device: str,
    *,
    sink: bool = False,
    shared: bool = False,
    gradients: bool = False,
) -> Case:
    """One call of ``attention``, with its gradients where asked for. sink: a sink for each head. shared: V is K."""
    from warpspec.fmha import attention, merge

    randn = random_numbers(options, device)
    heads, groups, d = options.heads, options.kv_heads, options.head_dim
    q = randn(options.batch, options.queries, heads, d)
    k, v = (randn(options.batch, options.keys, groups, d) for _ in "kv")
    codes = KV_DTYPES[options.kv_dtype]
    k, v = (tensor if codes is None else tensor.to(codes) for tensor in (k, v))
    v = k if shared else v
    sinks = randn(heads, dtype=torch.float32) if sink else None
    do = randn(*q.shape) if gradients else None

    kwargs = {"causal": options.causal, "window": options.window and (options.window - 1, 0)}

    def results(compute, dtype=q.dtype):
        if codes is not None:
            return [compute(q, k, v)]
        leaves = [tensor.detach().to(dtype).requires_grad_(gradients) for tensor in (q, k, v)]
        o = compute(*leaves)
        return [o.detach(), *torch.autograd.grad(o, leaves, do.to(dtype))] if gradients else [o]

    def ours(backend):
        return results(
            lambda q, k, v: attention(q, k, None if shared else v, **kwargs, sink=sinks, backend=backend)
        )

    def expected():
        if gradients:
            return torchs(torch.float32)
        state = attention(q, k, v, **kwargs, normalize=False, backend="reference")
        return [merge([state], sink=sinks)[0]]

    mask = mask_for_torch(options, device)
    is_causal = options.causal and mask is None and options.queries > 1

    def torchs(dtype=q.dtype):
        def compute(q, k, v):
            heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
            kinds = {"attn_mask": mask, "is_causal": is_causal, "enable_gqa": groups != heads}
            return scaled_dot_product_attention(*heads_first, **kinds).transpose(1, 2)

        return results(compute, dtype)

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torchs()

    masked = " (a mask in memory)" if options.window else ""
    alone = sink or codes is not None  # torch has nothing like it
    return Case(
        title_of(options, sink, gradients),
        ours,
        expected,
        None if alone else torchs,
        (GRADIENT_TOLERANCE if gradients else ATTENTION_TOLERANCE)[options.dtype],
        by_head=True,
        peers={} if alone else {f"SDPA, as torch chooses{masked}": torchs, f"SDPA on cuDNN{masked}": cudnn},
        flops=(14 if gradients else 4) * options.batch * heads * seen_pairs(options) * d,
        bytes=0 if gradients else sum(tensor.nbytes for tensor in ((q, q, k) if shared else (q, q, k, v))),
    )


def title_of(options: argparse.Namespace, sink: bool, gradients: bool) -> str:
    """What a case of attention prints as its name."""
    kind = f"{' causal' if options.causal else ''}{f' window {options.window}' if options.window else ''}"
    title = f"attention{' + gradients' if gradients else ''} B{options.batch} Sq{options.queries} Sk{options.keys} "
    title += f"{options.heads}/{options.kv_heads} heads D{options.head_dim}{kind}{' sink' if sink else ''} "
    codes = KV_DTYPES[options.kv_dtype]
    return title + options.dtype + ("" if codes is None else f" over {options.kv_dtype} keys")


def mask_for_torch(options: argparse.Namespace, device: str) -> torch.Tensor | None:
    """SDPA's mask where is_causal does not say it: that aligns the first positions."""
    if options.window:
        return seen_keys(options, device)
    if options.causal and options.queries not in (1, options.keys):
        from torch.nn.attention.bias import causal_lower_right  # takes a second: imports torch._dynamo

        return causal_lower_right(options.queries, options.keys)
    return None


def seen_keys(options: argparse.Namespace, device: str) -> torch.Tensor:
    """[queries, keys] of bool: whether a query sees a key. The last query's own key is the last one."""
    own = torch.arange(options.queries, device=device)[:, None] + options.keys - options.queries
    keys = torch.arange(options.keys, device=device)[None]
    seen = keys <= own if options.causal else torch.ones_like(keys <= own)
    return seen & (keys > own - options.window) & (keys <= own) if options.window else seen


def seen_pairs(options: argparse.Namespace) -> int:
    """Pairs of a query and a key that it sees, of one head of one sequence."""
    if not options.causal and not options.window:
        return options.queries * options.keys
    own = torch.arange(options.queries) + options.keys - options.queries + 1
    return int(own.clamp(min=0, max=options.window or options.keys).sum())


def paged_case(
    options: argparse.Namespace,
    device: str,
    *,
    sink: bool = False,
    shared: bool = False,
    page_size: int = 64,
) -> Case:
    """Decoding: one query for each sequence, keys in pages of a table in random order, lengths that differ.

    sink, shared: as in ``attention_case``.
    """
    from warpspec.fmha import attention, merge

    randn = random_numbers(options, device)
    pages = -(-options.keys // page_size)
    q = randn(options.batch, 1, options.heads, options.head_dim)
    k, v = (randn(options.batch * pages, page_size, options.kv_heads, options.head_dim) for _ in "kv")
    v = None if shared else v
    order = torch.randperm(options.batch * pages, generator=torch.Generator().manual_seed(options.seed))
    table = order.view(options.batch, pages).to(device, torch.int32)
    lengths = torch.arange(options.keys, options.keys - options.batch, -1, device=device)
    kwargs = {
        "page_table": table,
        "kv_lengths": lengths.clamp(min=1).int(),
        "causal": True,
        "window": options.window and (options.window - 1, 0),
    }
    sinks = randn(options.heads, dtype=torch.float32) if sink else None

    def expected():
        return [merge([attention(q, k, v, **kwargs, normalize=False, backend="reference")], sink=sinks)[0]]

    title = f"attention decode B{options.batch} up to {options.keys} keys in pages of {page_size} "
    title += f"{options.heads}/{options.kv_heads} heads D{options.head_dim}"
    title += (
        f"{f' window {options.window}' if options.window else ''}{' sink' if sink else ''} {options.dtype}"
    )
    return Case(
        title,
        lambda backend: [attention(q, k, v, **kwargs, sink=sinks, backend=backend)],
        expected,
        None,
        ATTENTION_TOLERANCE[options.dtype],
        by_head=True,
    )


def softmax_case(options: argparse.Namespace, device: str) -> Case:
    from warpspec.softmax import softmax

    x = random_numbers(options, device)(options.rows, options.columns)
    return Case(
        f"softmax {options.rows} x {options.columns} {options.dtype}",
        lambda backend: [softmax(x, backend=backend)],
        lambda: [torch.softmax(x.double(), -1)],
        lambda: [torch.softmax(x, -1)],
        SOFTMAX_TOLERANCE[options.dtype],
        peers={"torch.softmax": lambda: torch.softmax(x, -1)},
        bytes=2 * x.nbytes,
    )


def topk_case(options: argparse.Namespace, device: str) -> Case:
    """Softmax and top-k: probabilities and columns. Torch orders equal logits otherwise, so it is timed alone."""
    from warpspec.softmax import softmax_topk

    x = random_numbers(options, device)(options.rows, options.columns)

    return Case(
        f"softmax and top-k {options.rows} x {options.columns} k {options.k} {options.dtype}",
        lambda backend: softmax_topk(x, options.k, backend=backend),
        lambda: softmax_topk(x, options.k, backend="reference"),
        None,
        TOPK_TOLERANCE,
        peers={
            "torch.softmax, torch.topk": lambda: torch.topk(
                torch.softmax(x, -1, dtype=torch.float32), options.k
            )
        },
        bytes=x.nbytes,
    )


def experts_case(options: argparse.Namespace, device: str) -> Case:
    """A mixture of experts in NVFP4, ours against the definition with the same rounding of activations."""
    from warpspec.common.launch import target_of
    from warpspec.moe import NVFP4Experts, intermediate_scale_of, moe_ffn, reference, route
    from warpspec.moe.permute import sort_tokens

    randn = random_numbers(options, device)
    count, hidden, width = options.experts, options.hidden, options.width
    sizes = ((width, hidden), (width, hidden), (hidden, width))
    gate, up, down = (randn(count, *size, dtype=torch.float32) / 16 for size in sizes)
    experts = NVFP4Experts.quantize(gate, up, down, intermediate_scale=intermediate_scale_of("swiglu", 10.0))
    x = randn(options.tokens, hidden)
    ids, weights = route(
        randn(options.tokens, count, dtype=torch.float32), k=options.choices, scoring="sigmoid"
    )
    native = target_of(x.device).architecture.backend
    precision = {"sm100": "w4a4", "sm90": "w4a16"}[native]
    laid_out = experts.for_backend(native)

    def run(backend):
        return [moe_ffn(x, laid_out, ids, weights, limit=10.0, precision=precision, backend=backend)]

    def expected():
        of_experts = (experts.w13, experts.w2, experts.intermediate_scale)
        return [reference.layer(x, sort_tokens(ids, count), weights, *of_experts, "swiglu", 10.0, precision)]

    title = f"experts T{options.tokens} E{count} k{options.choices} H{hidden} I{width} NVFP4 {precision}"
    return Case(title, run, expected, None, EXPERTS_TOLERANCE)


OPERATORS = {
    "attention": attention_case,
    "gradients": partial(attention_case, gradients=True),
    "softmax": softmax_case,
    "topk": topk_case,
    "experts": experts_case,
    "mla": mla_case,
    "gathered": gathered_case,
}
