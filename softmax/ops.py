"""``softmax``'s torch operators, and shortcuts past them.

``warpspec::softmax`` allocates its result and is differentiable; ``warpspec::softmax_out`` writes to the caller's.
Dispatching an operator written in Python takes longer than everything else that a call does on the host. A call that no
one needs to see (``repeated.watched``) therefore goes straight to ``run``, and one like an earlier call goes straight
to that call's launcher (``run_again``). ``Softmax`` is what autograd records of such calls.
"""

from collections.abc import Callable

import torch

from warpspec.common.backend import resolve_backend
from warpspec.common.launch import target_of
from warpspec.common.outputs import note_written
from warpspec.common.repeated import PLAIN_TENSORS, Remembered, backend_variable, signature
from warpspec.common.transforms import direct_apply, register_derivatives
from warpspec.softmax import reference
from warpspec.softmax.problem import SoftmaxProblem, as_matrix, check_input, check_output


def call(x: torch.Tensor, out: torch.Tensor | None, backend) -> torch.Tensor:
    """``softmax`` of plain tensors; uses remembered calls where possible. Raises what ``softmax`` raises."""
    if x.is_cuda and type(backend) is str:
        result = run_again(x, out, backend)
        if result is not None:
            return result
    return run(x, out, backend)


def run(x: torch.Tensor, out: torch.Tensor | None, backend: str) -> torch.Tensor:
    """Check, choose the backend, compute. Nothing is launched or written before all checks are done."""
    check_input(x)
    if out is not None:
        check_output(out, x)
        note_written(out)
    asked, backend, given = backend, resolve_backend(backend, x.device), out
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if backend == "reference":
        out.copy_(reference.softmax(x))
    elif x.numel() > 0:
        source = as_matrix(x)
        source = as_matrix(x.contiguous()) if source is None else source
        target = as_matrix(out)
        if not x.is_cuda:
            _run_sim(source, target)
        else:
            launcher = _launch_cuda(source, target)
            if x.is_contiguous() and out.is_contiguous():
                _calls.remember(_call_key(x, given, asked), launcher)
    return out


_launchers = Remembered()  # compiled kernels, by what decides the plan
_calls = Remembered()  # launchers, by all that ``run`` would look at: see ``run_again``


def _call_key(x: torch.Tensor, out: torch.Tensor | None, backend: str) -> tuple:
    """The properties that a call's checks, backend and plan depend on, except overlaps of its tensors."""
    return (signature(x), None if out is None else signature(out), backend, backend_variable())


def run_again(x: torch.Tensor, out: torch.Tensor | None, backend: str) -> torch.Tensor | None:
    """The softmax of plain CUDA tensor x, if ``run`` has had a call like it that ran on the GPU; otherwise None.

    A call is like another if tensors are contiguous and agree in shape, dtype, device and alignment. A new result has
    the allocator's alignment.
    """
    if not x.is_contiguous():
        return None
    if out is not None:
        if type(out) not in PLAIN_TENSORS or out.is_neg() or not out.is_contiguous() or out.requires_grad:
            return None
        if 0 < abs(out.data_ptr() - x.data_ptr()) < x.numel() * x.element_size():
            return None  # if they overlap, ``run`` raises
    launcher = _calls.get(_call_key(x, out, backend))
    if launcher is None or x.get_device() != torch.cuda.current_device():
        return None
    if out is None:
        out = torch.empty_like(x)
    else:
        note_written(out)
    if x.dim() == 2 and x.shape[0] > 1:
        launcher(x, out)
    else:  # the stride of a single row does not matter
        length = x.shape[-1]
        size, stride = (x.numel() // length, length), (length, 1)
        launcher(x.as_strided(size, stride), out.as_strided(size, stride))
    return out


def _launch_cuda(x: torch.Tensor, out: torch.Tensor) -> Callable:
    """One launch on the matrices' device and its current stream, without synchronisation. Returns the launcher."""
    problem = SoftmaxProblem.of(x, out)
    index = x.get_device()
    key = problem, target_of(x.device)
    launcher = _launchers.get(key)
    if launcher is None:
        from warpspec.softmax import launch

        launcher = launch.launcher(*key)
        _launchers.remember(key, launcher)
    if index == torch.cuda.current_device():
        launcher(x, out)
    else:
        with torch.cuda.device(index):
            launcher(x, out)
    return launcher


def _run_sim(x: torch.Tensor, out: torch.Tensor) -> None:
    """Run the sm_100a kernel in the simulator."""
    from warpspec.softmax import launch

    launch.run_sim(x, out)


@torch.library.custom_op("warpspec::softmax", mutates_args=(), schema="(Tensor x, str backend) -> Tensor")
def softmax_op(x, backend):
    """Operator of ``softmax`` with a new result."""
    return run(x, None, backend)


@torch.library.custom_op(
    "warpspec::softmax_out", mutates_args=("out",), schema="(Tensor x, Tensor(a!) out, str backend) -> ()"
)
def softmax_out_op(x, out, backend):
    """Operator that writes ``softmax`` to out."""
    run(x, out, backend)


@softmax_op.register_fake
def _(x, backend):
    check_input(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@softmax_out_op.register_fake
def _(x, out, backend):
    check_input(x)
    check_output(out, x)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(output)


def _backward(ctx, gradient):
    """The gradient of y = softmax(x), which is y (g - sum(g y)), by torch's own kernel."""
    (y,) = ctx.saved_tensors
    return torch._softmax_backward_data(gradient, y, -1, y.dtype), None


register_derivatives(softmax_op, _backward, _setup_context)


class Softmax(torch.autograd.Function):
    """``softmax`` with a new result, for autograd."""

    @staticmethod
    def forward(ctx, x, backend):
        y = call(x, None, backend)
        ctx.save_for_backward(y)
        return y

    backward = staticmethod(_backward)


record = direct_apply(Softmax)  # (x, backend)
