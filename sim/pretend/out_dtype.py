"""torch's matrix products with `out_dtype=`, which its CPU build does not have: they compute in that dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def _mm(a, b, out_dtype):
    return a.to(out_dtype) @ b.to(out_dtype)


def _addmm(c, a, b, out_dtype, *, beta=1, alpha=1):
    product = alpha * _mm(a, b, out_dtype)
    return product + beta * c.to(out_dtype) if beta else product


PRODUCTS = {"mm": _mm, "bmm": _mm, "addmm": _addmm, "baddbmm": _addmm}


def _into(product):
    """The variant of a product that writes into `out`."""

    def into(*args, out, **kwargs):
        return out.copy_(product(*args, **kwargs))

    return into


@contextmanager
def products() -> Iterator[None]:
    """Register the products as CPU operators for the duration of the `with` block."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, product in PRODUCTS.items():
            library.impl(f"{name}.dtype", product, "CPU")
            library.impl(f"{name}.dtype_out", _into(product), "CPU")
        yield
    finally:
        library._destroy()
