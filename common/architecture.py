"""The architectures that kernels are made for, and which kernels of an operation each of them runs. Plain Python.

An ``Architecture`` says what an SM has; ``ARCHITECTURES`` has one record of each. A ``Family`` is the look-up of one
operation: from an architecture to its kernels. A further GPU is a record here, and in each family that has kernels of
its own for it a name for these: its own name, or that of the backend whose kernels it runs.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import MAX_SMEM_PER_CTA, TMEM_COLUMNS


@dataclass(frozen=True, eq=False)
class Architecture:
    """What an SM of one compute capability has. There is one record of each: records are the same or different.

    name: what is compiled for it, "sm_90a". capability: the compute capability, (9, 0). backend: the native backend
    whose kernels it runs, "sm90"; GPUs that run each other's kernels share one. wgmma, tcgen05: whether it has these
    instructions; tmem_columns: of tensor memory, 0 where it has none. nvfp4_mma: its MMA takes NVFP4. e2m1: it converts
    to e2m1. smem_per_cta: bytes of shared memory that one CTA can ask for.
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
        return architecture, (self.name,)  # another process has its own record


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
    """The record of a name. Raises UnsupportedProblem for one that there is not."""
    if name not in ARCHITECTURES:
        raise UnsupportedProblem(f"arch: must be one of {', '.join(ARCHITECTURES)}, got {name!r}")
    return ARCHITECTURES[name]


def architecture_of(capability: tuple[int, int]) -> Architecture | None:
    """The record of a compute capability; None where no kernels are made for it."""
    for one in ARCHITECTURES.values():
        if one.capability == capability:
            return one
    return None


def native_backends() -> tuple[str, ...]:
    """The backends that architectures have, each once."""
    return tuple(dict.fromkeys(one.backend for one in ARCHITECTURES.values()))


class Family:
    """The kernels of one operation, by architecture.

    operation: its name in messages. kernels: by a backend's name, for all architectures of it, or by one architecture's
    name, which goes before the backend's. A value is what the operation dispatches to (the module that uses the family
    says what that has), or, as a string, the module that is it, which is imported when it is looked up.
    """

    def __init__(self, operation: str, **kernels):
        self.operation, self.kernels = operation, kernels

    def of(self, architecture: Architecture):
        """What the operation dispatches to on an architecture. Raises UnsupportedProblem where it has no kernel."""
        found = self.kernels.get(architecture.name) or self.kernels.get(architecture.backend)
        if found is None:
            raise UnsupportedProblem(
                f"{self.operation}: no kernel for {architecture.name}, there are kernels for {', '.join(self.kernels)}"
            )
        return importlib.import_module(found) if isinstance(found, str) else found
