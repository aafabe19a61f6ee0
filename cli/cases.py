"""Operators at the command line's shapes, on random inputs: ours on any backend, torch's, and how they compare."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from warpspec.common.kv_formats import EIGHT_BITS
from warpspec.fmha.checks import HEAD_SIZES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KV_DTYPES = {None: None, **EIGHT_BITS}
ROW_FORMATS = ("v4-fp8", "v3.2-fp8")  # formats of gathered attention's pools
# Relative error, ||got - expected|| / ||expected||, against FP32 on the same inputs.
ATTENTION_TOLERANCE = {"bf16": 4e-3, "fp16": 1e-3}  # bound of the worst head's error
GRADIENT_TOLERANCE = {"bf16": 4.2e-3, "fp16": 1e-3}  # likewise
SOFTMAX_TOLERANCE = {"bf16": 2e-3, "fp16": 1e-3, "fp32": 1e-6}
TOPK_TOLERANCE = 1e-6  # bound of the probabilities' error; the columns are exact
EXPERTS_TOLERANCE = 3e-3
TORCH_FACTOR = 1.25  # never worse than this times torch's own error in the same dtype


@dataclass(frozen=True)
class Case:
    """An operator and its inputs.

    title: operator, shape, dtype. run: takes a backend and returns its results. expected: returns the definition's
    results, in FP32 where it is one. torchs: returns torch's own results on the same inputs, in the same order and
    layout, to compare errors with; None: there are none, or ours need not be as exact. peers: functions whose times are
    compared with ours. tolerance: bound of the error. by_head: results are [..., H, D], and the error is the worst
    head's. flops: floating-point operations of a call. bytes: bytes that a call reads and writes at least. 0: unknown.
    """

    title: str
    run: Callable[[str], Sequence[torch.Tensor]]
    expected: Callable[[], Sequence[torch.Tensor]]
    torchs: Callable[[], Sequence[torch.Tensor]] | None
    tolerance: float
    by_head: bool = False
    peers: dict[str, Callable[[], object]] = field(default_factory=dict)
    flops: int = 0
    bytes: int = 0

    def error(self, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
        """The worst error of the results; infinite where integers differ, NaN where a number is NaN."""
        worst = 0.0
        for mine, right in zip(got, expected, strict=True):
            if not right.is_floating_point():
                if not torch.equal(mine.to(right.dtype), right):
                    return float("inf")
                continue
            axes = [axis for axis in range(right.dim()) if not (self.by_head and axis == right.dim() - 2)]
            norm = partial(torch.linalg.vector_norm, dim=axes)
            difference, size = norm(mine.to(right.dtype) - right), norm(right)
            relative = torch.where(difference == 0, 0, difference / size).max().item()
            if not relative <= worst:
                worst = relative
        return worst

    def allowed(self, torch_error: float | None, dtype: torch.dtype) -> float:
        """The largest error that passes: the tolerance, or less where torch's own error is small."""
        if torch_error is None:
            return self.tolerance
        eps = torch.finfo(dtype).eps
        rounding = (
            eps if dtype == torch.float32 else eps / 4
        )  # what rounding alone may cost: of sums, of a result
        return min(self.tolerance, max(TORCH_FACTOR * torch_error, rounding))


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


# Shapes where nobody says: small ones for the simulator, an engine's for a GPU.
SMALL = {"batch": 1, "queries": 128, "keys": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "rows": 4}
SMALL |= {"columns": 1000, "k": 8, "tokens": 8, "experts": 4, "hidden": 256, "width": 128, "choices": 2}
LARGE = {"batch": 2, "queries": 2048, "keys": 2048, "heads": 32, "kv_heads": 8, "head_dim": 128, "rows": 4096}
LARGE |= {"columns": 32768, "k": 8, "tokens": 256, "experts": 16, "hidden": 1024, "width": 512, "choices": 4}
HELP = {
    "attention, gradients, mla, gathered": {
        "batch": "sequences",
        "queries": "queries a sequence",
        "keys": "keys a sequence; of gathered: rows of a query",
        "heads": "query heads",
        "kv_heads": "KV heads, of attention",
        "head_dim": f"of attention: {HEAD_SIZES}",
    },
    "softmax, topk": {"rows": "", "columns": "of a row", "k": "of topk"},
    "experts": {
        "tokens": "",
        "experts": "",
        "hidden": "width of a token",
        "width": "of an expert",
        "choices": "experts a token",
    },
}


def add_options(parser: argparse.ArgumentParser, operators: Sequence[str], shapes: dict[str, int]) -> None:
    """Options of the operators' shapes and inputs. shapes: the defaults."""
    dtypes = parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default %(default)s")
    dtypes.help += "; fp32: softmax and topk alone"
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default %(default)s)")
    for title, names in HELP.items():
        if not set(title.split(", ")) & set(operators):
            continue
        group = parser.add_argument_group(title)
        for name, about in names.items():
            about = f"{about}{' ' if about else ''}(default %(default)s)"
            group.add_argument(f"--{name.replace('_', '-')}", type=positive, default=shapes[name], help=about)
        if title.startswith("attention"):
            group.add_argument("--causal", action="store_true", help="the last query sees the last key")
            group.add_argument("--window", type=positive, help="keys that a query sees, its own included")
            names = [name for name in KV_DTYPES if name]
            group.add_argument(
                "--kv-dtype", choices=names, help="of keys and values; of mla, e4m3 (default: --dtype)"
            )
            if "gathered" in operators:
                about = "of gathered's rows (default %(default)s)"
                group.add_argument("--row-format", choices=ROW_FORMATS, default=ROW_FORMATS[0], help=about)


def check_options(
    parser: argparse.ArgumentParser, options: argparse.Namespace, operators: Sequence[str]
) -> None:
    """End the process with a message where options do not go together."""
    if options.seed < 0:
        parser.error(f"--seed: must not be negative, got {options.seed}")
    if options.dtype == "fp32" and not set(operators) <= {"softmax", "topk"}:
        parser.error(f"--dtype fp32: softmax and topk take it, {', '.join(operators)} not")
    if (options.causal or options.window) and options.queries > options.keys:
        parser.error(
            f"--queries: with --causal or --window at most --keys ({options.keys}), got {options.queries}"
        )
    if options.dtype == "fp16" and {"experts", "gathered"} & set(operators):
        parser.error(f"--dtype fp16: {' and '.join(operators)} take bf16")
    takes = {"attention": tuple(EIGHT_BITS), "mla": ("e4m3",)}
    codes = getattr(options, "kv_dtype", None)
    for operator in operators:
        if codes is not None and codes not in takes.get(operator, ()):
            allowed = " or ".join(takes.get(operator, ("none",)))
            parser.error(f"--kv-dtype {codes}: {operator} takes {allowed}")


def random_numbers(options: argparse.Namespace, device: str) -> Callable[..., torch.Tensor]:
    generator = torch.Generator(device).manual_seed(options.seed)

    def randn(*shape, dtype=DTYPES[options.dtype]):
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    return randn


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

    mask = None
    if options.window:
        mask = seen_keys(options, device)
    elif options.causal and options.queries not in (1, options.keys):  # is_causal aligns the first positions
        from torch.nn.attention.bias import causal_lower_right  # takes a second: imports torch._dynamo

        mask = causal_lower_right(options.queries, options.keys)
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
    pairs = seen_pairs(options)
    kind = f"{' causal' if options.causal else ''}{f' window {options.window}' if options.window else ''}"
    title = f"attention{' + gradients' if gradients else ''} B{options.batch} Sq{options.queries} Sk{options.keys} "
    title += f"{heads}/{groups} heads D{d}{kind}{' sink' if sink else ''} {options.dtype}"
    title += "" if codes is None else f" over {options.kv_dtype} keys"
    alone = sink or codes is not None  # torch has nothing like it
    return Case(
        title,
        ours,
        expected,
        None if alone else torchs,
        (GRADIENT_TOLERANCE if gradients else ATTENTION_TOLERANCE)[options.dtype],
        by_head=True,
        peers={} if alone else {f"SDPA, as torch chooses{masked}": torchs, f"SDPA on cuDNN{masked}": cudnn},
        flops=(14 if gradients else 4) * options.batch * heads * pairs * d,
        bytes=0 if gradients else sum(tensor.nbytes for tensor in ((q, q, k) if shared else (q, q, k, v))),
    )


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


def _latent(name: str) -> Callable[[argparse.Namespace, str], Case]:
    """A case of ``latent_cases``, which imports this module."""

    def make(options: argparse.Namespace, device: str) -> Case:
        from warpspec.cli import latent_cases

        return getattr(latent_cases, name)(options, device)

    return make


OPERATORS = {
    "attention": attention_case,
    "gradients": partial(attention_case, gradients=True),
    "softmax": softmax_case,
    "topk": topk_case,
    "experts": experts_case,
    "mla": _latent("mla_case"),
    "gathered": _latent("gathered_case"),
}
