"""Options of the command line: the shapes of operators, and the kinds of their inputs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from warpspec.common.kv_formats import EIGHT_BITS
from warpspec.fmha.checks import HEAD_SIZES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KV_DTYPES = {None: None, **EIGHT_BITS}
ROW_FORMATS = ("v4-fp8", "v3.2-fp8")  # formats of gathered attention's pools


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
