"""Two kernels of which the second may start early (PDL) and does not wait; with "torch", an operator runs between."""

import sys

import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def fill(x: cute.Tensor):
    cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    x[thread] = 1.0


@cute.kernel
def copy(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    y[thread] = x[thread]


@cute.jit
def first(x: cute.Tensor):
    fill(x).launch(grid=(1, 1, 1), block=(32, 1, 1))


@cute.jit
def second(x: cute.Tensor, y: cute.Tensor):
    copy(x, y).launch(grid=(1, 1, 1), block=(32, 1, 1), use_pdl=True)


x, y = torch.zeros(32, device="cuda"), torch.zeros(32, device="cuda")
first(from_dlpack(x))
if "torch" in sys.argv:
    y.zero_()
second(from_dlpack(x), from_dlpack(y))
