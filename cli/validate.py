"""``python -m warpspec validate``: operators against their definitions, on this machine's GPU or simulated."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial

import torch

from warpspec.aot.models import MODELS, SELECTED_ROWS, Model
from warpspec.cli import cases
from warpspec.cli.case import Case
from warpspec.cli.options import DTYPES, LARGE, SMALL, add_options, check_options, refuse_given
from warpspec.cli.simulate import ARCHITECTURES
from warpspec.common.backend import resolve_backend
from warpspec.common.launch import simulating

EXAMPLES = """\
Each line has a problem, its error against the FP32 definition on the same inputs (attention: the worst head's), torch's
own error in the same dtype, and what is allowed: the tolerance, and 1.25 times torch's error. Inputs are random.
Exit status 1: an error is above what is allowed, or a kernel failed.

examples:
  python -m warpspec validate                                   all operators
  python -m warpspec validate attention --batch 4 --queries 4096 --keys 4096 --causal
  python -m warpspec validate --model gpt-oss-120b              a model's attention, layer by layer
  python -m warpspec validate softmax --arch sm_90a             simulated, though this machine may have a GPU"""
OF_MODELS = ("heads", "kv_heads", "head_dim", "causal", "window", "kv_dtype")  # options that a model decides
WINDOW = 48  # window of the small problems, in which some rows see a whole window and others do not


def parser(shapes: dict[str, int]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m warpspec validate",
        usage="%(prog)s [OPERATOR] [options]",
        description="Compare operators with their FP32 definitions: native kernels on this machine's GPU,\n"
        "or, where there is none, the sm_100a kernels in the simulator.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(cases.OPERATORS)
    parser.add_argument(
        "operator", nargs="?", choices=cases.OPERATORS, metavar="OPERATOR", help=f"{names} (default: all)"
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, help="simulate this architecture's kernels")
    parser.add_argument(
        "--model",
        choices=sorted(MODELS),
        metavar="NAME",
        help="a model's attention, with its windows, sinks, soft caps and images: "
        + ", ".join(sorted(MODELS)),
    )
    add_options(parser, cases.OPERATORS, shapes)
    return parser


def with_(options: argparse.Namespace, **changes) -> argparse.Namespace:
    changed = copy(options)
    vars(changed).update(changes)
    return changed


def problems(options: argparse.Namespace, device: str) -> Iterator[Callable[[], Case]]:
    """The cases to compare, as functions that make them when they are called: inputs may be large."""
    if options.model is not None:
        yield from problems_of(MODELS[options.model], options, device)
    elif options.operator is not None:
        yield partial(cases.OPERATORS[options.operator], options, device)
    else:
        causal = with_(options, causal=True)
        yield partial(cases.attention_case, causal, device)
        yield partial(cases.attention_case, with_(causal, window=WINDOW), device, cases.Layer(sink=True))
        yield partial(cases.paged_case, causal, device)
        yield partial(cases.attention_case, causal, device, gradients=True)
        decode = with_(options, queries=1)
        yield partial(cases.OPERATORS["mla"], decode, device)
        yield partial(cases.OPERATORS["gathered"], decode, device)
        yield partial(cases.softmax_case, options, device)
        yield partial(cases.topk_case, options, device)
        yield partial(cases.experts_case, options, device)


def problems_of(model: Model, options: argparse.Namespace, device: str) -> Iterator[Callable[[], Case]]:
    """The cases of a model's layers: a prompt, and decoding from pages. Latent rows (MLA) are decoded alone."""
    sizes = {"heads": model.heads_q, "kv_heads": model.heads_kv, "head_dim": model.head_dim}
    if model.selected:
        keys = min(options.keys, model.selected)
        own = with_(options, **sizes, queries=1, keys=keys, row_format=SELECTED_ROWS)
        yield partial(cases.OPERATORS["gathered"], own, device)
    elif model.shared_kv and model.v_dim:
        yield partial(cases.OPERATORS["mla"], with_(options, **sizes, queries=1), device)
    else:
        for kind in model.layers:
            window = kind["window"][0] + 1 if "window" in kind else None
            own = with_(options, **sizes, causal=True, window=window)
            layer = cases.Layer(model.sink, model.shared_kv, kind.get("softcap"), model.v_dim, model.images)
            yield partial(cases.attention_case, own, device, layer)
            yield partial(cases.paged_case, own, device, layer)


def compare(make: Callable[[], Case], backend: str, dtype: torch.dtype) -> bool:
    """Print a case's line and return whether it passed. Raises the error of a case that cannot be run as asked."""
    case = make()
    start = time.perf_counter()
    try:
        results = case.run(backend)
    except (ValueError, ImportError, torch.OutOfMemoryError):
        raise
    except (
        Exception
    ) as error:  # whatever a launch or the simulator says is this case's failure; others follow
        print(f"FAILED  {case.title}: {type(error).__name__}: {error}", flush=True)
        return False
    seconds = time.perf_counter() - start
    expected = case.expected()
    error = case.error(results, expected)
    torch_error = None if case.torchs is None else case.error(case.torchs(), expected)
    allowed = case.allowed(torch_error, dtype)
    passed = error <= allowed
    own = "" if torch_error is None else f"torch {torch_error:.1e}, "
    verdict = "ok" if passed else "FAILED"
    print(f"{verdict:6}  {case.title}: {error:.2e} ({own}allowed {allowed:.1e}), {seconds:.1f} s", flush=True)
    return passed


def main(arguments: Sequence[str]) -> int:
    """Returns 0, or 1 where a result is wrong or a kernel failed; exits with 2 where it cannot be run as asked."""
    simulated = any(argument.split("=")[0] == "--arch" for argument in arguments)
    native = torch.cuda.is_available() and not simulated
    made = parser(LARGE if native else SMALL)
    options = made.parse_args(arguments)
    if options.model and options.operator not in (None, "attention"):
        made.error(f"--model: is of attention, got {options.operator}")
    operators = [options.operator] if options.operator else list(cases.OPERATORS)
    check_options(made, options, ["attention"] if options.model else operators)
    if options.model:
        refuse_given(made, options, OF_MODELS, f"--model {options.model} has its own")
    device, arch = "cuda" if native else "cpu", options.arch or ARCHITECTURES[0]
    try:
        backend = resolve_backend("auto", torch.device("cuda", 0)) if native else "sim"
        where = torch.cuda.get_device_name() if native else f"as {arch}, on this CPU"
        print(f"{backend}: {where}", flush=True)
        with simulating(arch, seed=options.seed):
            dtype = DTYPES[options.dtype]
            passed = [compare(make, backend, dtype) for make in problems(options, device)]
    except ValueError as error:  # UnsupportedProblem is one
        made.error(str(error))
    except ImportError as error:
        made.error(f"the simulator cannot be imported ({error}): pip install 'warpspec[sim]'")
    except torch.OutOfMemoryError as error:
        made.error(f"inputs, results and the FP32 definition do not fit this GPU: {error}")
    print(f"{sum(passed)} of {len(passed)} passed")
    return 0 if all(passed) else 1
