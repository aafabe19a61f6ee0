"""Every case: what runs on an H200 and in the simulator."""

from __future__ import annotations

import numpy as np
import torch
from silicon import (
    cluster_kernels,
    compare,
    control_kernels,
    elementwise,
    inputs,
    instructions,
    matrix_kernels,
    memory_kernels,
    sparse_kernels,
    tensor_kernels,
)
from silicon.assembly import word_function
from silicon.case import Case, unwritten


def _group(name: str, group: tuple[str, ...], words: list[np.ndarray]) -> Case:
    return Case(
        name,
        elementwise.host_of(group),
        lambda: [inputs.tensor(w) for w in words],
        lambda: [unwritten(torch.int32, elementwise.result_words(group), inputs.COUNT)],
        compare.of_group(group, lambda body: word_function(body).results),
    )


CASES = (
    _group("integer", instructions.INTEGER, inputs.integer_operands(1)),
    _group("wide_integer", instructions.WIDE_INTEGER, inputs.integer_operands(2)),
    _group("bits", instructions.BITS, inputs.integer_operands(3)),
    _group("float", instructions.FLOAT, inputs.float_operands(4)),
    _group("approximate", instructions.APPROXIMATE, inputs.float_operands(5)),
    _group("double", instructions.DOUBLE, inputs.double_operands(6)),
    _group("f16", instructions.half("f16x2"), inputs.half_operands(inputs.HALF_EDGES, 7)),
    _group("bf16", instructions.half("bf16x2"), inputs.half_operands(inputs.BFLOAT_EDGES, 8)),
    _group("conversions", instructions.CONVERSIONS, inputs.float_operands(9)),
    _group("to_integer", instructions.TO_INTEGER, inputs.float_operands(10)),
    _group("from_integer", instructions.FROM_INTEGER, inputs.integer_operands(11)),
    _group("warp", instructions.WARP, [w % np.uint32(41) for w in inputs.integer_operands(12)]),
    *memory_kernels.CASES,
    *control_kernels.CASES,
    *matrix_kernels.CASES,
    *sparse_kernels.CASES,
    *cluster_kernels.CASES,
    *tensor_kernels.CASES,
)
