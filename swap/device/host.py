"""The host side of a kernel: the function that is compiled and called.

It is the same for all phases and architectures.
"""

from __future__ import annotations

import importlib

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Uint8

from warpspec.common.compile import fake_rows
from warpspec.common.hardware import VECTOR_BYTES
from warpspec.swap.config import SLOTS, SwapConfig
from warpspec.swap.operands import TAKEN, Operands

# name -> (dtype, rank); rows are aligned to VECTOR_BYTES, except those in NARROW.
TENSORS = {
    "x": (BFloat16, 2),
    "core_scale": (Float32, 2),
    "core_shift": (Float32, 2),
    "core_alpha": (Float32, 2),
    "router_norm": (BFloat16, 1),
    "router_w": (BFloat16, 2),
    "swap_w": (BFloat16, 1),
    "swap_b": (BFloat16, 1),
    "bank_w": (BFloat16, 2),
    "bank_b": (BFloat16, 1),
    "w13": (BFloat16, 2),
    "w2": (BFloat16, 2),
    "basis": (BFloat16, 3),
    "decoder": (BFloat16, 2),
    "ram": (BFloat16, 3),
    "map": (Uint8, 1),
    "vectors": (BFloat16, 2),
    "inverse": (Float32, 1),
    "hidden": (BFloat16, 2),
    "partial": (Float32, 3),
    "pooled": (Float32, 3),
    "summed": (Float32, 2),
    "delta": (BFloat16, 2),
    "counters": (Int32, 1),
    "forced": (Uint8, 2),
    "recorded": (Uint8, 2),
    "margins": (Float32, 3),
}
NARROW = (
    *("swap_w", "swap_b", "bank_w", "bank_b", "decoder", "map", "inverse", "summed", "counters"),
    *("forced", "recorded", "margins"),
)


class SwapHost:
    """The kernel's host side. Compile with ``cute.compile(host(config), ...)`` and the arguments of ``__call__``.

    A phase's class adds ``launch``, which receives the tensors as one ``Operands``, and the numbers.
    """

    def __init__(self, config: SwapConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor | None,
        core_scale: cute.Tensor | None,
        core_shift: cute.Tensor | None,
        core_alpha: cute.Tensor | None,
        router_norm: cute.Tensor | None,
        router_w: cute.Tensor | None,
        swap_w: cute.Tensor | None,
        swap_b: cute.Tensor | None,
        bank_w: cute.Tensor | None,
        bank_b: cute.Tensor | None,
        w13: cute.Tensor | None,
        w2: cute.Tensor | None,
        basis: cute.Tensor | None,
        decoder: cute.Tensor | None,
        ram: cute.Tensor | None,
        map_: cute.Tensor | None,
        vectors: cute.Tensor | None,
        inverse: cute.Tensor | None,
        hidden: cute.Tensor | None,
        partial: cute.Tensor | None,
        pooled: cute.Tensor | None,
        summed: cute.Tensor | None,
        delta: cute.Tensor | None,
        counters: cute.Tensor | None,
        forced: cute.Tensor | None,
        recorded: cute.Tensor | None,
        margins: cute.Tensor | None,
        ctas: Int32,
        event: Int32,
        steps: Int32,
        k_ffn: Int32,
        stream: CUstream,
    ):
        """Launch the kernel.

        The tensors are those of ``Operands``, passed one by one, because TVM FFI is slow with nested ones. ctas: of the
        grid. event: of a rows phase. steps, k_ffn: of the fused kernel: FFN steps in all and of an event.
        """
        ops = Operands(
            *(x, core_scale, core_shift, core_alpha, router_norm, router_w, swap_w, swap_b, bank_w, bank_b),
            *(w13, w2, basis, decoder, ram, map_, vectors, inverse, hidden, partial, pooled, summed, delta),
            *(counters, forced, recorded, margins),
        )
        self.launch(ops, ctas, event, steps, k_ffn, stream)


def host_and_arguments(config: SwapConfig) -> tuple:
    """The host function of a configuration and its arguments but the stream."""
    if not config.multiplies:
        from warpspec.swap.device.phase import SmallPhase as kind
    else:
        kind = importlib.import_module(f"warpspec.swap.{config.arch}.kernel").ProductPhase
    taken = [*TAKEN[config.phase]]
    if config.routes:
        taken += ["forced"] * config.forced + ["recorded", "margins"] * config.recorded
    fakes = {name: fake(name, config) for name in taken}
    return (kind(config), *Operands(**fakes), 1, 0, 0, 1)


def fake(name: str, config: SwapConfig):
    """A fake tensor for an operand."""
    dtype, rank = TENSORS[name]
    last = None
    if name in ("core_scale", "core_shift", "router_w", "ram", "vectors", "partial", "basis", "pooled"):
        last = config.d_model
    elif name == "core_alpha":
        last = SLOTS
    return fake_rows(dtype, rank, last, alignment=None if name in NARROW else VECTOR_BYTES)
