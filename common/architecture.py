"""The architectures that kernels are made for, and which kernels of an operation each of them runs. Plain Python.

An ``Architecture`` describes an SM; ``ARCHITECTURES`` has one record for each. A ``Family`` maps an architecture to the
kernels of one operation. To add a GPU, add a record here, and a name in each family: the architecture's own name if it
has kernels of its own there; otherwise its backend's kernels serve it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import MAX_SMEM_PER_CTA, TMEM_COLUMNS


@dataclass(frozen=True, eq=False)
class Architecture:
    """The features of an SM of one compute capability. Each has exactly one record, so compare records by identity.

    name: the compilation target, "sm_90a". capability: the compute capability, (9, 0). backend: the native backend
    whose kernels it runs, "sm90"; GPUs that run each other's kernels share one. wgmma, tcgen05: whether it has these
    instructions. tmem_columns: columns of tensor memory, 0 if it has none. nvfp4_mma: whether its MMA takes NVFP4.
    e2m1: whether it can convert to e2m1. smem_per_cta: bytes of shared memory that one CTA can ask for.
    """

    name: str
    capability: tuple[int, int]
    backend: str
    wgmma: bool = False
    tcgen05: bool = False
    tmem_columns: int = 0
    nvfp4_mma: bool = False
    e2m1: bool = False
    smem_per_cta: int = MAX_SMEM_PER_CTA

    def __reduce__(self):
        return architecture, (self.name,)  # unpickles to the record of the other process


_BLACKWELL = {"tcgen05": True, "tmem_columns": TMEM_COLUMNS, "nvfp4_mma": True, "e2m1": True}

ARCHITECTURES = {
    one.name: one
    for one in (
        Architecture("sm_100a", (10, 0), "sm100", **_BLACKWELL),
        Architecture("sm_103a", (10, 3), "sm100", **_BLACKWELL),
        Architecture("sm_90a", (9, 0), "sm90", wgmma=True),
    )
}


def architecture(name: str) -> Architecture:
    """The record with this name. Raises UnsupportedProblem if there is none."""
    if name not in ARCHITECTURES:
        raise UnsupportedProblem(f"arch: must be one of {', '.join(ARCHITECTURES)}, got {name!r}")
    return ARCHITECTURES[name]


def architecture_of(capability: tuple[int, int]) -> Architecture | None:
    """The record of a compute capability; None if no kernels are made for it."""
    for one in ARCHITECTURES.values():
        if one.capability == capability:
            return one
    return None


def native_backends() -> tuple[str, ...]:
    """The backends of all architectures, each once."""
    return tuple(dict.fromkeys(one.backend for one in ARCHITECTURES.values()))


class Family:
    """The kernels of one operation, by architecture.

    operation: its name in messages. kernels: maps a backend's name (for all its architectures) or one architecture's
    name (which takes precedence) to what the operation dispatches to. The module that uses the family defines what that
    is. If the value is a string, it names a module, which is imported on look-up.
    """

    def __init__(self, operation: str, **kernels):
        self.operation, self.kernels = operation, kernels

    def of(self, architecture: Architecture):
        """The kernels that the operation dispatches to on an architecture; raises UnsupportedProblem without any."""
        found = self.kernels.get(architecture.name) or self.kernels.get(architecture.backend)
        if found is None:
            raise UnsupportedProblem(
                f"{self.operation}: no kernel for {architecture.name}, there are kernels for {', '.join(self.kernels)}"
            )
        return importlib.import_module(found) if isinstance(found, str) else found
