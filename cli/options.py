"""Options of the command line: the shapes of operators, and the kinds of their inputs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

import torch

from warpspec.common.command_line import natural, positive
from warpspec.common.kv_formats import EIGHT_BITS
from warpspec.fmha.checks import HEAD_SIZES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KV_DTYPES = {None: None, **EIGHT_BITS}
ROW_FORMATS = ("v4-fp8", "v3.2-fp8")  # formats of gathered attention's pools
ATTENTION = ("batch", "queries", "keys", "heads", "kv_heads", "head_dim", "causal", "window")
TAKES = {  # operator -> its options, besides those that all have
    "attention": (*ATTENTION, "kv_dtype"),
    "gradients": ATTENTION,
    "mla": ("batch", "queries", "keys", "heads", "kv_dtype"),
    "gathered": ("batch", "queries", "keys", "heads", "row_format"),
    "softmax": ("rows", "columns"),
    "topk": ("rows", "columns", "k"),
    "experts": ("tokens", "experts", "hidden", "width", "choices"),
}


# Shapes where nobody says: small ones for the simulator, an engine's for a GPU.
SMALL = {"batch": 1, "queries": 128, "keys": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "rows": 4}
SMALL |= {"columns": 1000, "k": 8, "tokens": 8, "experts": 4, "hidden": 256, "width": 128, "choices": 2}
LARGE = {"batch": 2, "queries": 2048, "keys": 2048, "heads": 32, "kv_heads": 8, "head_dim": 128, "rows": 4096}
LARGE |= {"columns": 32768, "k": 8, "tokens": 256, "experts": 16, "hidden": 1024, "width": 512, "choices": 4}
HELP = {
    "attention, gradients, mla, gathered": {
        "batch": "sequences",
        "queries": "queries a sequence",
        "keys": "keys a sequence",
        "heads": "query heads",
        "kv_heads": "of attention and gradients",
        "head_dim": f"of attention and gradients: {HEAD_SIZES}",
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
    parser.add_argument("--seed", type=natural, default=0, help="of the inputs (default %(default)s)")
    for title, names in HELP.items():
        described = [name for name in title.split(", ") if name in operators]
        if not described:
            continue
        group = parser.add_argument_group(", ".join(described))
        for name, about in names.items():
            if name == "keys" and "gathered" in operators:
                about += "; of gathered: rows of a query"
            about = f"{about}{' ' if about else ''}(default %(default)s)"
            group.add_argument(flag(name), type=positive, default=shapes[name], help=about)
        if title.startswith("attention"):
            group.add_argument(
                "--causal",
                action="store_true",
                help="of attention and gradients: the last query sees the last key",
            )
            group.add_argument(
                "--window",
                type=positive,
                help="of attention and gradients: keys that a query sees, its own included",
            )
            names = [name for name in KV_DTYPES if name]
            kept = "; of mla, e4m3" if "mla" in operators else ""
            group.add_argument(
                "--kv-dtype",
                choices=names,
                help=f"of attention's keys and values{kept} (default: --dtype)",
            )
            if "gathered" in operators:
                about = "of gathered's rows (default %(default)s)"
                group.add_argument("--row-format", choices=ROW_FORMATS, default=ROW_FORMATS[0], help=about)


def check_options(
    parser: argparse.ArgumentParser, options: argparse.Namespace, operators: Sequence[str]
) -> None:
    """End the process with a message where options do not go together, or no operator takes one."""
    if options.dtype == "fp32" and not set(operators) <= {"softmax", "topk"}:
        parser.error(f"--dtype fp32: softmax and topk take it, {', '.join(operators)} not")
    if (options.causal or options.window) and options.queries > options.keys:
        parser.error(
            f"--queries: with --causal or --window at most --keys ({options.keys}), got {options.queries}"
        )
    bf16_alone = [name for name in operators if name in ("experts", "gathered")]
    if options.dtype == "fp16" and bf16_alone:
        parser.error(f"--dtype fp16: {' and '.join(bf16_alone)} take bf16")
    takes = {"attention": tuple(EIGHT_BITS), "mla": ("e4m3",)}
    codes = getattr(options, "kv_dtype", None)
    for operator in operators:
        if codes is not None and codes not in takes.get(operator, ()):
            allowed = " or ".join(takes.get(operator, ("none",)))
            parser.error(f"--kv-dtype {codes}: {operator} takes {allowed}")
    taken = {name for operator in operators for name in TAKES[operator]}
    refuse_given(
        parser,
        options,
        (name for names in TAKES.values() for name in names if name not in taken),
        f"{', '.join(operators)} takes {', '.join(map(flag, sorted(taken)))}",
    )


def flag(name: str) -> str:
    """An option as it is typed."""
    return f"--{name.replace('_', '-')}"


def refuse_given(
    parser: argparse.ArgumentParser, options: argparse.Namespace, names: Iterable[str], why: str
) -> None:
    """End the process with a message where one of the named options is not left at its default."""
    for name in names:
        given = getattr(options, name, parser.get_default(name))
        if given != parser.get_default(name):
            value = "" if given is True else f" {given}"
            parser.error(f"{flag(name)}{value}: has no effect here; {why}")
