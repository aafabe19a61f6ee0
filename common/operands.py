"""Arguments of a kernel, declared once: a record says in its fields' annotations what the kernel is compiled for.

    class Operands(NamedTuple):
        x: Annotated[Any, Operand(BFLOAT16, 2, lambda config: config.width, VECTOR_BYTES)]
        out: Annotated[Any, Operand(BFLOAT16, 2), OUTPUT]
        scale: Annotated[Any, Operand(FLOAT32, 1, when="has_scale")] = None

    class Numbers(NamedTuple):
        eps: Annotated[Any, Number(FLOAT32)]

On the host such a record holds torch tensors and numbers, in a kernel the DSL's; absent ones are None. The rest follows
from the record: the signature of the compiled function (``common.device.host``), the stand-ins that it is compiled for
(``fakes``), the arguments of a torch operator (``tensor_schema``), which fields are written (``names_of``). A field
annotated with a record stands for that record's fields, with ``Several`` for those of several records. Nothing here
loads the DSL before ``fakes`` is called.
"""

from __future__ import annotations

import functools
import operator
import string
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from warpspec.common.compile import fake_rows

BFLOAT16, FLOAT16, FLOAT32 = "bfloat16", "float16", "float32"
INT32, INT64, UINT8, UINT32 = "int32", "int64", "uint8", "uint32"
DSL_NAMES = {  # dtype -> the DSL's class of it
    "bfloat16": "BFloat16",
    "float16": "Float16",
    "float32": "Float32",
    "int32": "Int32",
    "int64": "Int64",
    "uint8": "Uint8",
    "uint32": "Uint32",
}
# What else a field's annotation may say: a tensor is written; it is memory for the kernels alone; kernels read it
# without gaps between its elements.
OUTPUT, WORKSPACE, CONTIGUOUS = "output", "workspace", "contiguous"

# record(Record, fields): a NamedTuple of all its fields in order, in half the time of its constructor; none is checked.
record = tuple.__new__


@dataclass(frozen=True)
class Operand:
    """A tensor that a kernel takes: dtype, number of dimensions, extent of the last one (None: any), alignment in bytes
    of its address and strides (None: an element's). Each is a value or a function of the configuration.

    when: the name of the configuration's attribute that says whether there is such an operand, with dots through its
    parts, or a function of the configuration; None: there always is.
    """

    dtype: str | Callable[[Any], str]
    rank: int | Callable[[Any], int]
    last: int | Callable[[Any], int] | None = None
    alignment: int | Callable[[Any], int | None] | None = None
    when: str | Callable[[Any], object] | None = None

    def fake(self, config):
        """A tensor without memory that a kernel of ``config`` is compiled for, or None."""
        if not is_there(self.when, config):
            return None
        dtype, rank, last, alignment = (
            value(config) if callable(value) else value
            for value in (self.dtype, self.rank, self.last, self.alignment)
        )
        return fake_rows(dsl_type(dtype), rank, last, alignment=alignment)


@dataclass(frozen=True)
class Number:
    """A number that a kernel takes. when: as in ``Operand``."""

    dtype: str
    when: str | Callable[[Any], object] | None = None

    def fake(self, config):
        """A number that a kernel of ``config`` is compiled for, or None."""
        return dsl_type(self.dtype)(1) if is_there(self.when, config) else None


@dataclass(frozen=True)
class Several:
    """A field that holds a tuple of ``count`` records of one kind.

    of: a function of the configuration and a record's number that returns what the record is compiled for. The names of
    a record's flat fields end in its number.
    """

    record: type
    count: int
    of: Callable[[Any, int], Any]


@dataclass(frozen=True)
class OneOf:
    """An argument of the number-th of ``several`` records."""

    kind: Operand | Number
    several: Several
    number: int

    def fake(self, config):
        """The stand-in of the argument, for this record's configuration."""
        return self.kind.fake(self.several.of(config, self.number))


def is_there(when: str | Callable | None, config) -> bool:
    """Whether a configuration has an operand (``Operand.when``)."""
    if when is None:
        return True
    return bool(when(config) if callable(when) else operator.attrgetter(when)(config))


def dsl_type(dtype: str) -> type:
    """The DSL's class of a dtype."""
    import cutlass

    return getattr(cutlass, DSL_NAMES[dtype])


@functools.cache
def declared(record: type) -> dict[str, tuple]:
    """The annotation of each field of a record: an Operand or a Number, followed by its roles; or another record."""
    # With the module's names as globals, functions in annotations find them when they are called.
    hints = typing.get_type_hints(record, vars(sys.modules[record.__module__]), include_extras=True)
    return {
        name: (hints[name],) if hasattr(hints[name], "_fields") else typing.get_args(hints[name])[1:]
        for name in record._fields
    }


def flat_fields(record: type) -> dict[str, Operand | Number | OneOf]:
    """The fields of a record and of the records in it, by name, in order."""
    found = {}
    for name, (kind, *_) in declared(record).items():
        if isinstance(kind, Several):
            for number in range(kind.count):
                fields = flat_fields(kind.record).items()
                found |= {f"{field}{number}": OneOf(each, kind, number) for field, each in fields}
        else:
            found |= flat_fields(kind) if hasattr(kind, "_fields") else {name: kind}
    return found


def fakes(record: type, config, names: typing.Container[str] | None = None) -> list:
    """Stand-ins of a record's flat fields, for which a kernel of ``config`` is compiled.

    A field that the configuration lacks is None, and so is every field that is not in ``names``, if these are given.
    """
    return [
        kind.fake(config) if names is None or name in names else None
        for name, kind in flat_fields(record).items()
    ]


def gather(record: type, values: typing.Iterator):
    """Make a record of the values of its flat fields, which come from an iterator."""

    def field(kind):
        if isinstance(kind, Several):
            return tuple(gather(kind.record, values) for _ in range(kind.count))
        return gather(kind, values) if hasattr(kind, "_fields") else next(values)

    return record(*(field(kind) for kind, *_ in declared(record).values()))


def names_of(record: type, role: str) -> tuple[str, ...]:
    """Names of a record's fields whose annotations have a role: OUTPUT, WORKSPACE or CONTIGUOUS."""
    return tuple(name for name, (_, *roles) in declared(record).items() if role in roles)


def inputs_of(record: type) -> tuple[str, ...]:
    """Names of a record's fields that kernels only read."""
    return tuple(name for name in record._fields if not {OUTPUT, WORKSPACE} & set(declared(record)[name][1:]))


SCHEMA_TYPES = {
    bool: "bool",
    int: "SymInt",
    int | None: "SymInt?",
    float: "float",
    float | None: "float?",
    str | None: "str?",
}


def tensor_schema(record: type, names: tuple[str, ...]) -> str:
    """The schema of a torch operator's arguments that hold a record's tensors.

    Fields with a default may be None. The operator writes the fields that are OUTPUT.
    """
    aliases, found = iter(string.ascii_lowercase), []
    for name in names:
        written = f"({next(aliases)}!)" if OUTPUT in declared(record)[name] else ""
        found.append(f"Tensor{written}{'?' if name in record._field_defaults else ''} {name}")
    return ", ".join(found)


def option_schema(record: type, **others: str) -> str:
    """The fields of a record of options as arguments of a torch operator, by their annotations; others: those of
    fields of other types. A field that is such a record stands for its fields."""
    hints = typing.get_type_hints(record)

    def argument(name: str) -> str:
        if hasattr(hints[name], "_fields"):
            return option_schema(hints[name])
        return others.get(name) or f"{SCHEMA_TYPES[hints[name]]} {name}"

    return ", ".join(map(argument, record._fields))
