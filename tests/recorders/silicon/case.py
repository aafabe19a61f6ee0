"""A case: one kernel, its inputs, what it writes, how results are judged; on a GPU and in the simulator."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from silicon.compare import bitwise

ARCH = "sm_90a"
ALIGNMENT = 16  # bytes, of every tensor: what vectors, bulk copies and tensor maps need
UNWRITTEN = 0xA5  # what outputs hold before the run

Judge = Callable[[list[np.ndarray], list[np.ndarray], list[np.ndarray]], list[str]]


@dataclass(frozen=True)
class Case:
    """One kernel launch.

    host: `cute.jit` function of the inputs, then the outputs. inputs, outputs: make the tensors as they are
    before the run. judge: (simulated, recorded, inputs) as NumPy arrays -> what is wrong, a line each.
    refused: the GPU stops this kernel with an error, and so must the simulator.
    """

    name: str
    host: Callable
    inputs: Callable[[], list[torch.Tensor]]
    outputs: Callable[[], list[torch.Tensor]]
    judge: Judge = field(default=bitwise)
    refused: bool = False

    @cached_property
    def compiled(self):
        """What `cute.compile` makes for sm_90a: without line information, so that PTX says only what runs."""
        import tempfile

        import cutlass.cute as cute

        tensors = self.inputs() + self.outputs()
        with tempfile.TemporaryDirectory(prefix="warpspec-silicon-") as folder:
            options = f"--gpu-arch {ARCH} --keep-ptx --keep-cubin --dump-dir {folder}"
            return cute.compile(self.host, *map(fake, tensors), options=options)


def unwritten(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """An output full of the byte UNWRITTEN."""
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    return torch.full((size,), UNWRITTEN, dtype=torch.uint8).view(dtype).reshape(shape)


def fake(tensor: torch.Tensor):
    """The compile-time stand-in of a contiguous tensor, its shape known."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    element = {
        torch.uint8: cutlass.Uint8,
        torch.int16: cutlass.Int16,
        torch.int32: cutlass.Int32,
        torch.int64: cutlass.Int64,
        torch.float16: cutlass.Float16,
        torch.bfloat16: cutlass.BFloat16,
        torch.float32: cutlass.Float32,
    }[tensor.dtype]
    return make_fake_tensor(
        element,
        tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        assumed_align=ALIGNMENT,
        memspace=cute.AddressSpace.gmem,
    )


def run_native(case: Case) -> list[np.ndarray]:
    """The outputs that the GPU of this machine writes."""
    from cutlass.cute.runtime import from_dlpack

    inputs = [t.cuda() for t in case.inputs()]
    outputs = [t.cuda() for t in case.outputs()]
    case.compiled(*(from_dlpack(t, assumed_align=ALIGNMENT) for t in inputs + outputs))
    torch.cuda.synchronize()
    return arrays(t.cpu() for t in outputs)


def run_simulated(case: Case, seed: int = 0) -> list[np.ndarray]:
    """The outputs that the simulator writes."""
    from warpspec import sim

    outputs = case.outputs()
    sim.run(case.compiled, *case.inputs(), *outputs, seed=seed)
    return arrays(outputs)


def arrays(tensors) -> list[np.ndarray]:
    """Tensors as NumPy arrays; bfloat16 as its bits."""
    return [(t.view(torch.int16) if t.dtype == torch.bfloat16 else t).numpy() for t in tensors]


def digest(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def inputs_digest(case: Case) -> str:
    """Over all input bytes: a change of the generators shows before any comparison."""
    return digest(b"".join(a.tobytes() for a in arrays(case.inputs())))


def dsl_version() -> str:
    return importlib.metadata.version("nvidia-cutlass-dsl")
