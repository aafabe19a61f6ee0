"""Operators at the command line's shapes, on random inputs: ours on any backend, torch's, and how they compare."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
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

IMAGE, IMAGE_STEP = 16, 40  # tokens of an image, and from one to the next


@dataclass(frozen=True)
class Layer:
    """What a layer's attention has besides the command line's options.

    sink: a sink for each head. shared: V is K. softcap: of the logits. v_dim: V's head size, 0 for K's. images: tokens
    of an image see each other.
    """

    sink: bool = False
    shared: bool = False
    softcap: float | None = None
    v_dim: int = 0
    images: bool = False


PLAIN = Layer()


@dataclass(frozen=True)
class AttentionCall:
    """A call of ``attention`` on random inputs, and torch's of the same result.

    q, k, v: the inputs; v is k if V is K. sink: [heads] or None. ranges: those of images, or None. do: the gradient of
    o; None: no gradients are asked for. mask: SDPA's (``mask_for_torch``).
    """

    options: argparse.Namespace
    layer: Layer
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sink: torch.Tensor | None
    ranges: torch.Tensor | None
    do: torch.Tensor | None
    mask: torch.Tensor | None

    @classmethod
    def of(cls, options: argparse.Namespace, layer: Layer, device: str, gradients: bool) -> AttentionCall:
        """Draw the inputs."""
        randn, codes = random_numbers(options, device), KV_DTYPES[options.kv_dtype]
        q = randn(options.batch, options.queries, options.heads, options.head_dim)
        sizes = (options.head_dim, layer.v_dim or options.head_dim)
        k, v = (randn(options.batch, options.keys, options.kv_heads, size) for size in sizes)
        k, v = (tensor if codes is None else tensor.to(codes) for tensor in (k, v))
        sinks = randn(options.heads, dtype=torch.float32) if layer.sink else None
        ranges = image_ranges(options, device) if layer.images else None
        do = randn(*q.shape[:-1], sizes[1]) if gradients else None
        mask = mask_for_torch(options, device)
        return cls(options, layer, q, k, k if layer.shared else v, sinks, ranges, do, mask)

    def attend(self, q, k, v, **more):
        """Call ``attention`` with the options' mask."""
        from warpspec.fmha import attention

        window = self.options.window
        kinds = {"causal": self.options.causal, "window": window and (window - 1, 0)}
        kinds |= {"softcap": self.layer.softcap, "ranges": self.ranges}
        return attention(q, k, None if self.v is self.k else v, **kinds, **more)

    def results(self, compute: Callable, dtype: torch.dtype) -> list[torch.Tensor]:
        """o, and the gradients of q, k and v where asked for. compute: a function of q, k and v. dtype: in which these
        are, unless keys are codes."""
        if KV_DTYPES[self.options.kv_dtype] is not None:
            return [compute(self.q, self.k, self.v)]
        gradients = self.do is not None
        leaves = [t.detach().to(dtype).requires_grad_(gradients) for t in (self.q, self.k, self.v)]
        o = compute(*leaves)
        return [o.detach(), *torch.autograd.grad(o, leaves, self.do.to(dtype))] if gradients else [o]

    def ours(self, backend: str) -> list[torch.Tensor]:
        return self.results(partial(self.attend, sink=self.sink, backend=backend), self.q.dtype)

    def expected(self) -> list[torch.Tensor]:
        from warpspec.fmha import merge

        if self.do is not None:
            return self.results(self.attend_by_torch, torch.float32)
        state = self.attend(self.q, self.k, self.v, normalize=False, backend="reference")
        return [merge([state], sink=self.sink)[0]]

    def attend_by_torch(self, *heads_last: torch.Tensor) -> torch.Tensor:
        """Call SDPA."""
        options = self.options
        is_causal = options.causal and self.mask is None and options.queries > 1
        kinds = {"attn_mask": self.mask, "is_causal": is_causal}
        kinds["enable_gqa"] = options.kv_heads != options.heads
        heads_first = (tensor.transpose(1, 2) for tensor in heads_last)
        return scaled_dot_product_attention(*heads_first, **kinds).transpose(1, 2)

    def torchs(self) -> list[torch.Tensor]:
        return self.results(self.attend_by_torch, self.q.dtype)

    def cudnn(self) -> list[torch.Tensor]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return self.torchs()


def attention_case(
    options: argparse.Namespace, device: str, layer: Layer = PLAIN, *, gradients: bool = False
) -> Case:
    """One call of ``attention``, with its gradients where asked for."""
    call = AttentionCall.of(options, layer, device, gradients)
    q, k, v = call.q, call.k, call.v
    masked = " (a mask in memory)" if options.window else ""
    # What torch has nothing like.
    alone = layer.sink or layer.softcap or layer.images or KV_DTYPES[options.kv_dtype] is not None
    peers = {f"SDPA, as torch chooses{masked}": call.torchs, f"SDPA on cuDNN{masked}": call.cudnn}
    return Case(
        title_of(options, layer, gradients),
        call.ours,
        call.expected,
        None if alone else call.torchs,
        (GRADIENT_TOLERANCE if gradients else ATTENTION_TOLERANCE)[options.dtype],
        by_head=True,
        peers={} if alone else peers,
        flops=(7 if gradients else 2)
        * options.batch
        * seen_pairs(options)
        * options.heads
        * (q.shape[-1] + v.shape[-1]),
        bytes=0
        if gradients
        else sum(tensor.nbytes for tensor in ((q, q, k) if layer.shared else (q, q, k, v))),
    )


def title_of(options: argparse.Namespace, layer: Layer, gradients: bool) -> str:
    """What a case of attention prints as its name."""
    title = f"attention{' + gradients' if gradients else ''} B{options.batch} Sq{options.queries} Sk{options.keys} "
    title += f"{heads_of(options, layer)}{' causal' if options.causal else ''}{features_of(options, layer)} "
    codes = KV_DTYPES[options.kv_dtype]
    return title + options.dtype + ("" if codes is None else f" over {options.kv_dtype} keys")


def heads_of(options: argparse.Namespace, layer: Layer) -> str:
    """Numbers and sizes of heads, for titles."""
    size = f"{options.head_dim}{f'/{layer.v_dim}' if layer.v_dim else ''}"
    return f"{options.heads}/{options.kv_heads} heads D{size}"


def features_of(options: argparse.Namespace, layer: Layer) -> str:
    """What a call has besides, for titles."""
    window = f" window {options.window}" if options.window else ""
    cap = f" cap {layer.softcap:g}" if layer.softcap else ""
    return f"{window}{cap}{' images' if layer.images else ''}{' sink' if layer.sink else ''}"


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


def image_ranges(options: argparse.Namespace, device: str) -> torch.Tensor:
    """``attention``'s ranges [batch, queries, 2]: an image every IMAGE_STEP tokens, which are text otherwise."""
    own = torch.arange(options.queries, device=device) + options.keys - options.queries
    begin = own - own % IMAGE_STEP
    ranges = torch.stack([begin, begin + IMAGE - 1], dim=-1)
    ranges = torch.where((own - begin < IMAGE)[:, None], ranges, -1)
    return ranges.int().expand(options.batch, -1, -1)


def paged_case(
    options: argparse.Namespace, device: str, layer: Layer = PLAIN, *, page_size: int = 64
) -> Case:
    """Decoding: one query for each sequence, keys in pages of a table in random order, lengths that differ. With
    images: new tokens are text."""
    from warpspec.fmha import attention, merge

    randn = random_numbers(options, device)
    pages = -(-options.keys // page_size)
    q = randn(options.batch, 1, options.heads, options.head_dim)
    sizes = (options.head_dim, layer.v_dim or options.head_dim)
    k, v = (randn(options.batch * pages, page_size, options.kv_heads, size) for size in sizes)
    v = None if layer.shared else v
    none = torch.full((options.batch, 1, 2), -1, dtype=torch.int32, device=device)
    order = torch.randperm(options.batch * pages, generator=torch.Generator().manual_seed(options.seed))
    table = order.view(options.batch, pages).to(device, torch.int32)
    lengths = torch.arange(options.keys, options.keys - options.batch, -1, device=device)
    kwargs = {
        "page_table": table,
        "kv_lengths": lengths.clamp(min=1).int(),
        "causal": True,
        "window": options.window and (options.window - 1, 0),
        "softcap": layer.softcap,
        "ranges": none if layer.images else None,
    }
    sinks = randn(options.heads, dtype=torch.float32) if layer.sink else None

    def expected():
        return [merge([attention(q, k, v, **kwargs, normalize=False, backend="reference")], sink=sinks)[0]]

    title = f"attention decode B{options.batch} up to {options.keys} keys in pages of {page_size} "
    title += f"{heads_of(options, layer)}{features_of(options, layer)} {options.dtype}"
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
