"""`python -m warpspec.sim FILE.py:FUNCTION [NAME=VALUE ...]`: compiles a CuTe DSL kernel and runs it, without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from warpspec import sim
from warpspec.common.command_line import natural, positive
from warpspec.sim.clocks import command
from warpspec.sim.host import HostModule
from warpspec.sim.pretend import script
from warpspec.sim.views import html

DESCRIPTION = """Run a CuTe DSL kernel in the simulator.

FUNCTION is a @cute.jit host function, whose arguments follow, or a function without parameters that returns the tuple
(compiled, arguments ...) as warpspec.sim.run takes it.

NAME=VALUE: int, float, True, False or None for parameters that are numbers (compile-time constants among them);
f32[64,32] for a row-major tensor of random normal numbers (integers: from 0 to 9), or of other contents with
f32[64,32]:zeros, :ones, :arange, :nan. A stream is left out.

`python -m warpspec.sim run SCRIPT ARGUMENTS` runs a script that wants a GPU instead: see `run --help`."""
DTYPES = {  # torch dtypes and their names in the DSL
    "f64": (torch.float64, "Float64"), "f32": (torch.float32, "Float32"), "f16": (torch.float16, "Float16"),
    "bf16": (torch.bfloat16, "BFloat16"), "i64": (torch.int64, "Int64"), "i32": (torch.int32, "Int32"),
    "i16": (torch.int16, "Int16"), "i8": (torch.int8, "Int8"), "u8": (torch.uint8, "Uint8"),
}  # fmt: skip
TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d, ]*)\](?::(?P<content>\w+))?")
INTEGERS = 10  # bound of random integers


def tensor(text: str, generator: torch.Generator) -> torch.Tensor | None:
    """Make the CPU tensor that a text like "f32[64,32]:ones" describes; None if the text is no tensor. Raises
    ValueError."""
    match = TENSOR.fullmatch(text)
    if match is None:
        return None
    if match["dtype"] not in DTYPES:
        raise ValueError(f"{text}: {match['dtype']} is not one of {', '.join(DTYPES)}")
    dtype, _ = DTYPES[match["dtype"]]
    shape = tuple(int(size) for size in match["shape"].split(",") if size.strip())
    count = torch.Size(shape).numel()
    contents: dict[str | None, Callable[[], torch.Tensor]] = {
        None: lambda: (
            torch.randn(count, generator=generator)
            if dtype.is_floating_point
            else torch.randint(INTEGERS, (count,), generator=generator)
        ),
        "zeros": lambda: torch.zeros(count),
        "ones": lambda: torch.ones(count),
        "arange": lambda: torch.arange(count),
        "nan": lambda: torch.full((count,), torch.nan),
    }
    if match["content"] not in contents:
        raise ValueError(f"{text}: contents are {', '.join(name for name in contents if name)}")
    return contents[match["content"]]().to(dtype).reshape(shape)


def value(text: str, generator: torch.Generator) -> object:
    """Parse a VALUE of the command line into an argument. Raises ValueError."""
    found = tensor(text, generator)
    if found is not None:
        return found
    words = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    for number in (lambda text: int(text, 0), float):
        with contextlib.suppress(ValueError):
            return number(text)
    raise ValueError(f"must be a number, True, False, None or a tensor such as f32[64,32]:ones, got {text!r}")


def values(pairs: list[str], generator: torch.Generator) -> dict[str, object]:
    """Parse NAME=VALUE pairs into arguments by name. Raises ValueError naming the argument."""
    found: dict[str, object] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"arguments are NAME=VALUE, got {pair!r}")
        if name in found:
            raise ValueError(f"{name}: is given twice")
        try:
            found[name] = value(text, generator)
        except (ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{name}: {error}") from error
    return found


def given_by(function: Callable, target: str) -> tuple:
    """The tuple (compiled, arguments ...) that a function without parameters returns. Raises ValueError."""
    if inspect.isfunction(function) and inspect.signature(function).parameters:
        raise ValueError(f"{target}: must be a @cute.jit function or take no parameters")
    found = function()
    if not isinstance(found, (tuple, list)) or not found or not callable(found[0]):
        raise ValueError(f"{target}: must return (compiled, arguments ...), got {type(found).__name__}")
    return tuple(found)


def compile_host(function: Callable, arguments: dict[str, object], options: str) -> tuple[object, dict]:
    """Compile a @cute.jit function: (compiled function, the arguments that a call of it takes)."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from warpspec.sim.arguments import takes_stream

    elements = {dtype: getattr(cutlass, name) for dtype, name in DTYPES.values()}
    fake, kept = {}, {}
    for name, parameter in inspect.signature(function).parameters.items():
        if takes_stream(parameter.annotation):
            fake[name] = make_fake_stream()
            continue
        if name not in arguments:
            if parameter.default is inspect.Parameter.empty:
                raise ValueError(f"{function.__name__}: parameter {name} has no value; give {name}=...")
            continue
        given = arguments[name]
        fake[name] = given
        if isinstance(given, torch.Tensor):
            fake[name] = make_fake_tensor(
                elements[given.dtype],
                tuple(given.shape),
                stride=given.stride(),
                memspace=cute.AddressSpace.gmem,
                assumed_align=16,
            )
        kept[name] = given
    unknown = arguments.keys() - fake.keys()
    if unknown:
        raise ValueError(f"{function.__name__} has no parameter {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="warpspec-") as folder:
        keep = f"--keep-ptx --keep-cubin --generate-line-info --dump-dir {folder}"
        compiled = cute.compile(function, **fake, options=f"{options} {keep}")
    taken = {parameter.name for parameter in HostModule.of(compiled).host.parameters}
    return compiled, {name: given for name, given in kept.items() if name in taken}


def load(target: str) -> Callable:
    """Load the function that "FILE.py:FUNCTION" names. Raises ValueError."""
    path, _, name = target.rpartition(":")
    if not path or not Path(path).is_file():
        raise ValueError(f"{target!r} is not FILE.py:FUNCTION with a file that exists")
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name_of_module = Path(path).stem
    if name_of_module in sys.modules:  # a kernel in random.py must not take the place of Python's random
        name_of_module = f"{name_of_module} of {path}"
    spec = importlib.util.spec_from_file_location(name_of_module, path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{path} has no function {name}")
    return getattr(module, name)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        "python -m warpspec.sim",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("function", metavar="FILE.py:FUNCTION")
    found.add_argument("arguments", metavar="NAME=VALUE", nargs="*")
    found.add_argument(
        "--arch", default="sm_100a", help="sm_100a (default), sm_103a or sm_90a; for @cute.jit functions"
    )
    found.add_argument("--options", default="", help="further options of cute.compile")
    found.add_argument(
        "--seed", type=natural, default=0, help="draws the schedule, and the tensors' random numbers"
    )
    found.add_argument("--seeds", type=positive, help="run this many schedules and compare the results")
    found.add_argument("--check", choices=["order"], help="order: check memory order")
    found.add_argument("--timeline", help="write a trace for Perfetto to this file")
    found.add_argument("--report", type=Path, help="write one HTML page about the run to this file")
    command.add_options(found)
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns 0: the kernel ran; 1: the simulator found something; 2: the command line is
    wrong."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["run"]:
        return script.main(argv[1:])
    options = parser().parse_args(argv)
    try:
        command.check(options)
        recorded = command.recorded(options)
        generator = torch.Generator().manual_seed(options.seed)
        arguments = values(options.arguments, generator)
        function = load(options.function)
        if getattr(function, "_decorator_kind", None) == "jit":
            compiled, kwargs = compile_host(
                function, arguments, f"--gpu-arch {options.arch} {options.options}"
            )
            args: tuple = ()
        elif arguments:
            raise ValueError(f"{options.function} is no @cute.jit function: it takes no arguments here")
        else:
            (compiled, *args), kwargs = given_by(function, options.function), {}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    timeline = None if options.clocks else options.timeline
    chosen = dict(seed=options.seed, seeds=options.seeds, check=options.check, timeline=timeline)
    try:
        with recorded:
            report = sim.run(compiled, *args, **chosen, **kwargs)
    except sim.SimError as error:
        if options.report:
            done = error.launch if isinstance(error, sim.OrderError) else None
            found = error.findings if isinstance(error, sim.OrderError) else ()
            html.write(
                options.report, done if isinstance(done, sim.SimReport) else sim.SimReport(), found, error
            )
        print(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            print(note)
        return 1
    if options.report:
        html.write(options.report, report)
    if options.clocks:
        command.show(options, report)
        return 0
    print(report)
    for name, given in kwargs.items():
        if isinstance(given, torch.Tensor):
            print(f"{name}: {given.dtype} {tuple(given.shape)}, {_summary(given)}")
    return 0


def _summary(given: torch.Tensor) -> str:
    """A tensor's contents in a few numbers."""
    values = given.double()
    finite = values[values.isfinite()]
    if not finite.numel():
        return f"{given.numel() - finite.numel()} NaN or Inf"
    text = f"mean {finite.mean():.4g}, from {finite.min():.4g} to {finite.max():.4g}"
    return f"{text}, {given.numel() - finite.numel()} NaN or Inf" if finite.numel() < given.numel() else text


if __name__ == "__main__":
    sys.exit(main())
