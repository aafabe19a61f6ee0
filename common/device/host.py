"""The host side of a kernel: the function that is compiled and called, with the arguments that records declare."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from cuda.bindings.driver import CUstream
from cutlass import cute

from warpspec.common.operands import OneOf, Operand, dsl_type, flat_fields, gather


def host_function(*records: type) -> Callable:
    """Decorator of a method ``(self, *records, stream)`` that launches a kernel: makes it the function that
    ``cute.compile`` compiles.

    Callers of that function pass the fields of the records (``common.operands``) one by one: TVM FFI converts nested
    arguments slowly. The method gets them as records.
    """
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for record in records:
        for name, kind in flat_fields(record).items():
            if isinstance(kind, OneOf):
                kind = kind.kind
            if isinstance(kind, Operand):
                annotation = cute.Tensor | None
            else:
                annotation = dsl_type(kind.dtype)
                annotation = annotation if kind.when is None else annotation | None
            parameters.append(_parameter(name, annotation))
    signature = inspect.Signature([*parameters, _parameter("stream", CUstream)])

    def decorate(method: Callable) -> Callable:
        def __call__(self, *arguments):
            *values, stream = arguments
            values = iter(values)
            return method(self, *[gather(record, values) for record in records], stream)

        __call__.__signature__ = signature  # the DSL looks for it there
        __call__.__doc__, __call__.__qualname__ = method.__doc__, method.__qualname__
        return cute.jit(preprocess=False)(__call__)

    return decorate


def _parameter(name: str, annotation) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)
