"""Calls whose time the simulator predicts and a GPU has measured: the held-out families of docs/clock_errors.md.

`CASES` has a call for each; ``make(device)`` prepares its tensors and returns it. On "cuda" it runs there; on "cpu" the
simulator executes it (``warpspec.common.launch.simulating``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ClockCase:
    """family: rows of the error table. name: of the case, unique. make: device -> the call. ours: no peer's. unseen: of
    the blind test."""

    family: str
    name: str
    make: Callable[[str], Callable[[], object]]
    ours: bool = True
    unseen: bool = False


def _call(function: Callable, *arguments) -> Callable[[str], Callable[[], object]]:
    """Prepare the function's call on a device."""
    return lambda device: function(*arguments, device=device)


def _randn(device: str, *shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def _attention(batch, heads, heads_kv, queries, keys, dim, causal, window=None, device="cuda"):
    from warpspec.fmha import attention

    q = _randn(device, batch, queries, heads, dim)
    k, v = (_randn(device, batch, keys, heads_kv, dim) for _ in "kv")
    options = {"window": (window - 1, 0)} if window else {}
    return lambda: attention(q, k, v, causal=causal, **options)


def _gradients(batch, heads, length, dim, causal, device="cuda"):
    from warpspec.fmha import attention

    q, k, v = (_randn(device, batch, length, heads, dim).requires_grad_() for _ in "qkv")
    o = attention(q, k, v, causal=causal)
    do = _randn(device, *o.shape)
    return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)


def _softmax(rows, columns, dtype=torch.bfloat16, device="cuda"):
    from warpspec.softmax import softmax

    x = _randn(device, rows, columns, dtype=dtype)
    return lambda: softmax(x)


def _topk(rows, columns, k, dtype, device="cuda"):
    from warpspec.softmax import softmax_topk

    x = _randn(device, rows, columns, dtype=dtype)
    return lambda: softmax_topk(x, k)


def _experts(tokens, device="cuda"):
    from warpspec.cli import cases
    from warpspec.cli.options import LARGE

    shapes = {**LARGE, "tokens": tokens, "seed": 0, "dtype": "bf16"}
    case = cases.experts_case(_Options(shapes), device)
    return lambda: case.run("sim" if device == "cpu" else "auto")


def _of_command_line(make: str, changed: dict[str, object], device="cuda"):
    """The call of a case of the command line. make: module and name of its maker; changed: its options."""
    from importlib import import_module

    from warpspec.cli.options import LARGE

    module, name = make.rsplit(".", 1)
    options = {**LARGE, "seed": 0, "dtype": "bf16", "kv_dtype": None, "causal": False, "window": None}
    case = getattr(import_module(module), name)(_Options(options | changed), device)
    return lambda: case.run("sim" if device == "cpu" else "auto")


class _Options:
    """Options as the command line would have them."""

    def __init__(self, values: dict[str, object]):
        self.__dict__.update(values)


def _flash(batch, heads, length, dim, causal, device="cuda"):
    from flash_attn.cute import flash_attn_func

    q, k, v = (_randn(device, batch, length, heads, dim) for _ in "qkv")
    return lambda: flash_attn_func(q, k, v, causal=causal)


def _flash_gradients(batch, heads, length, dim, causal, device="cuda"):
    from flash_attn.cute import flash_attn_func

    q, k, v = (_randn(device, batch, length, heads, dim).requires_grad_() for _ in "qkv")
    o = flash_attn_func(q, k, v, causal=causal)
    o = o[0] if isinstance(o, tuple) else o
    do = _randn(device, *o.shape)
    return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)


def _quack(rows, columns, device="cuda"):
    from quack.softmax import softmax

    x = _randn(device, rows, columns)
    return lambda: softmax(x)


def _quack_norm(rows, columns, device="cuda"):
    from quack.rmsnorm import rmsnorm_fwd

    x, weight = _randn(device, rows, columns), _randn(device, columns, dtype=torch.float32)
    return lambda: rmsnorm_fwd(x, weight)


def _quack_cross_entropy(rows, columns, device="cuda"):
    from quack.cross_entropy import cross_entropy_fwd

    x = _randn(device, rows, columns)
    target = (torch.arange(rows, device=device) * 7919) % columns
    return lambda: cross_entropy_fwd(x, target)


def _quack_topk(rows, columns, k, device="cuda"):
    from quack.topk import topk

    x = _randn(device, rows, columns)
    return lambda: topk(x, k)


def _name(what: str, *sizes, causal: bool | None = None) -> str:
    text = f"{what} {'x'.join(map(str, sizes))}"
    return text if causal is None else f"{text} {'causal' if causal else 'full'}"


PREFILLS = (
    *((2, 8, 8, 1024, 1024, 128, causal) for causal in (True, False)),
    *((2, 8, 8, 2048, 2048, 128, causal) for causal in (True, False)),
    *((1, 16, 16, 4096, 4096, 128, causal) for causal in (True, False)),
    (2, 32, 32, 8192, 8192, 128, True),
    (2, 32, 8, 2048, 2048, 128, True),
    *((2, 8, 8, 2048, 2048, 64, causal) for causal in (True, False)),
    (1, 16, 16, 4096, 4096, 64, True),
    *((1, 8, 8, 2048, 2048, 256, causal) for causal in (True, False)),
    (1, 8, 8, 512, 512, 128, True),
    (4, 16, 4, 768, 768, 128, True),
    (1, 32, 8, 4096, 4096, 128, True),
    (1, 16, 16, 3072, 3072, 128, False),
    (8, 8, 8, 512, 512, 64, False),
    (2, 16, 2, 1536, 1536, 64, True),
    (2, 4, 4, 3072, 3072, 256, True),
    (1, 8, 8, 256, 4096, 128, True),
)
WINDOWS = ((2, 16, 16, 4096, 4096, 64, True, 128), (2, 16, 16, 4096, 4096, 128, True, 512))
DECODES = (
    (32, 64, 8, 1, 8192, 128),
    (128, 64, 8, 1, 1024, 128),
    (1, 64, 8, 1, 65536, 128),
    (32, 64, 8, 1, 2048, 64),
    (64, 32, 8, 1, 4096, 128),
    (8, 32, 8, 1, 2048, 128),
    (16, 16, 16, 1, 1024, 64),
)
GRADIENTS = (
    *((2, 8, 2048, 128, causal) for causal in (True, False)),
    *((1, 16, 4096, 64, causal) for causal in (True, False)),
    (1, 8, 2048, 256, True),
    (1, 8, 1024, 128, True),
    (1, 16, 1536, 128, False),
    (4, 8, 1024, 64, True),
)
SOFTMAX = (
    (128, 1024),
    (2048, 1024),
    (2048, 4096),
    (2048, 8192),
    (4, 262144),
    (32768, 4096),
    (8192, 50257),
    (4, 8388608),
    (512, 2048),
    (4096, 16384),
    (16384, 1536),
    (1024, 32768),
)
TOPK = (
    (64, 129280, 8, torch.float32),
    (8192, 384, 6, torch.float32),
    (512, 2048, 8, torch.bfloat16),
    (8192, 256, 8, torch.bfloat16),
    (8192, 50257, 10, torch.float32),
    (1024, 32000, 16, torch.bfloat16),
    (4096, 128, 4, torch.float32),
)  # fmt: skip
EXPERTS = (4, 256, 2048, 32, 1024)
FLASH = (
    (2, 8, 2048, 128, True),
    (2, 8, 2048, 128, False),
    (1, 16, 4096, 128, True),
    (2, 8, 2048, 64, True),
    (4, 16, 1024, 128, False),
    (1, 16, 2560, 128, True),
    (4, 8, 1024, 64, False),
    (1, 8, 512, 128, True),
)
# Calls of kernels that no rule or constant was fitted on, nor looked at, before they were predicted.
MLA = (  # batch, queries, keys, heads, type of the rows
    (32, 1, 4096, 128, None),
    (64, 1, 2048, 16, None),
    (4, 1, 16384, 64, None),
    (128, 2, 1024, 16, None),
    (32, 1, 4096, 128, "e4m3"),
    (64, 1, 8192, 16, "e4m3"),
)
GATHERED = (  # queries, rows of each, heads, format
    (128, 2048, 128, "v3.2-fp8"),
    (1024, 2048, 64, "v3.2-fp8"),
    (16, 512, 128, "v3.2-fp8"),
    (64, 1024, 64, "v4-fp8"),
)
CODES = (  # batch, heads, KV heads, queries, keys, head size, type of K and V
    (32, 64, 8, 1, 8192, 128, "e4m3"),
    (64, 16, 2, 1, 3000, 64, "e4m3"),
    (16, 32, 4, 1, 6000, 256, "e4m3"),
    (2, 16, 4, 1536, 1536, 128, "e4m3"),
)
FLASH_GRADIENTS = ((2, 8, 2048, 128, True), (1, 16, 2048, 64, False))
QUACK = ((2048, 1024), (2048, 8192), (32768, 4096), (4, 262144), (4096, 2048), (8192, 16384))
QUACK_NORM = ((2048, 4096), (16384, 8192), (512, 1024))
QUACK_CROSS_ENTROPY = ((2048, 32000), (512, 4096))
QUACK_TOPK = ((4096, 1024, 8), (512, 256, 16))


def _unseen() -> list[ClockCase]:
    """The calls of the blind test."""
    found = []
    for *sizes, kv_dtype in MLA:
        options = dict(zip(("batch", "queries", "keys", "heads"), sizes, strict=True)) | {
            "kv_dtype": kv_dtype
        }
        make = _call(_of_command_line, "warpspec.cli.latent_cases.mla_case", options)
        found.append(ClockCase("MLA", f"{_name('mla', *sizes)} {kv_dtype or 'bf16'}", make, unseen=True))
    for *sizes, row_format in GATHERED:
        options = dict(zip(("batch", "keys", "heads"), sizes, strict=True))
        options |= {"queries": 1, "row_format": row_format}
        make = _call(_of_command_line, "warpspec.cli.latent_cases.gathered_case", options)
        found.append(
            ClockCase("gathered rows", f"{_name('gathered', *sizes)} {row_format}", make, unseen=True)
        )
    for *sizes, kv_dtype in CODES:
        names = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim")
        options = dict(zip(names, sizes, strict=True)) | {"kv_dtype": kv_dtype, "causal": sizes[3] > 1}
        make = _call(_of_command_line, "warpspec.cli.cases.attention_case", options)
        found.append(ClockCase("8-bit keys", f"{_name('codes', *sizes)} {kv_dtype}", make, unseen=True))
    return found


def cases() -> list[ClockCase]:
    """All of them, in order."""
    found = [
        ClockCase("attention", _name("attention", *sizes[:6], causal=sizes[6]), _call(_attention, *sizes))
        for sizes in PREFILLS
    ]
    found += [
        ClockCase("attention, window", _name(f"window {sizes[7]}", *sizes[:6]), _call(_attention, *sizes))
        for sizes in WINDOWS
    ]
    found += [
        ClockCase("attention, decoding", _name("decode", *sizes), _call(_attention, *sizes, False))
        for sizes in DECODES
    ]
    found += [
        ClockCase("gradients", _name("gradients", *sizes[:4], causal=sizes[4]), _call(_gradients, *sizes))
        for sizes in GRADIENTS
    ]
    found += [ClockCase("softmax", _name("softmax", *sizes), _call(_softmax, *sizes)) for sizes in SOFTMAX]
    found += [
        ClockCase("top-k", f"{_name('topk', *sizes[:3])} {str(sizes[3])[6:]}", _call(_topk, *sizes))
        for sizes in TOPK
    ]
    found += [ClockCase("experts", _name("experts", tokens), _call(_experts, tokens)) for tokens in EXPERTS]
    found += _unseen()
    found += [
        ClockCase(
            "flash-attn-4", _name("flash-attn-4", *sizes[:4], causal=sizes[4]), _call(_flash, *sizes), False
        )
        for sizes in FLASH
    ]
    found += [
        ClockCase("QuACK", _name("quack softmax", *sizes), _call(_quack, *sizes), False) for sizes in QUACK
    ]
    found += [
        ClockCase(
            "flash-attn-4 gradients",
            _name("flash-attn-4 gradients", *sizes[:4], causal=sizes[4]),
            _call(_flash_gradients, *sizes),
            False,
        )
        for sizes in FLASH_GRADIENTS
    ]
    for what, function, shapes in (
        ("rmsnorm", _quack_norm, QUACK_NORM),
        ("cross entropy", _quack_cross_entropy, QUACK_CROSS_ENTROPY),
        ("topk", _quack_topk, QUACK_TOPK),
    ):
        found += [
            ClockCase("QuACK", _name(f"quack {what}", *sizes), _call(function, *sizes), False)
            for sizes in shapes
        ]
    return found
