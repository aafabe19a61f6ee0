"""Arguments declared in records: flat fields, records from them, schemas, what a configuration has."""

from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import pytest

from warpspec.common.operands import (
    CONTIGUOUS,
    FLOAT32,
    INT32,
    OUTPUT,
    WORKSPACE,
    Number,
    Operand,
    Several,
    fakes,
    flat_fields,
    gather,
    inputs_of,
    names_of,
    option_schema,
    tensor_schema,
)


class Part(NamedTuple):
    data: Annotated[Any, Operand(INT32, 2, when="there")]
    size: Annotated[Any, Number(INT32)]


class Inner(NamedTuple):
    low: Annotated[Any, Number(FLOAT32)]
    high: Annotated[Any, Number(FLOAT32, when="bounded")] = None


class Record(NamedTuple):
    x: Annotated[Any, Operand(lambda c: FLOAT32 if c.wide else INT32, lambda c: c.rank, lambda c: c.last, 16)]
    inner: Inner
    parts: Annotated[tuple, Several(Part, 2, lambda c, number: SimpleNamespace(there=number < c.parts))]
    out: Annotated[Any, Operand(FLOAT32, 1), OUTPUT] = None
    index: Annotated[Any, Operand(INT32, 1, when=lambda c: c.parts > 1), CONTIGUOUS] = None
    room: Annotated[Any, Operand(INT32, 1), WORKSPACE] = None


class Options(NamedTuple):
    scale: float | None = None
    sides: tuple | None = None
    causal: bool = False
    stride: int = 1


FIELDS = ("x", "low", "high", "data0", "size0", "data1", "size1", "out", "index", "room")


def test_fields_in_order_and_back():
    assert tuple(flat_fields(Record)) == FIELDS
    values = iter(range(len(FIELDS)))
    assert gather(Record, values) == Record(0, Inner(1, 2), (Part(3, 4), Part(5, 6)), 7, 8, 9)
    assert next(values, None) is None


@pytest.mark.parametrize(("parts", "bounded"), [(1, False), (2, True)])
def test_a_configuration_has_what_its_annotations_say(parts, bounded):
    config = SimpleNamespace(wide=True, rank=3, last=24, parts=parts, bounded=bounded)
    found = dict(zip(FIELDS, fakes(Record, config), strict=True))
    absent = {name for name, fake in found.items() if fake is None}
    assert absent == (set() if parts == 2 else {"high", "data1", "index"})
    assert found["x"].element_type.__name__ == "Float32" and found["x"].shape[-1] == 24
    assert len(found["x"].shape) == 3
    assert [name for name, fake in zip(FIELDS, fakes(Record, config, ("out",)), strict=True) if fake] == [
        "out"
    ]


def test_roles_and_schemas():
    assert inputs_of(Record) == ("x", "inner", "parts", "index")
    assert names_of(Record, OUTPUT) == ("out",) and names_of(Record, CONTIGUOUS) == ("index",)
    assert tensor_schema(Record, ("x", "out", "index")) == "Tensor x, Tensor(a!)? out, Tensor? index"
    schema = option_schema(Options, sides="int? left, int? right")
    assert schema == "float? scale, int? left, int? right, bool causal, SymInt stride"
