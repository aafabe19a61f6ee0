"""``softmax``'s torch operators, and the short way past them.

``warpspec::softmax`` allocates its result and is differentiable; ``warpspec::softmax_out`` writes the caller's.
Dispatching an operator written in Python takes longer than all else that a call does on the host, so a plain
eager call on plain tensors goes straight to ``run``: see ``needs_operator``.
"""

import torch

from warpspec.common.dispatch import resolve_backend
from warpspec.softmax import reference
from warpspec.softmax.problem import SoftmaxProblem, as_matrix, check_input, check_output

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def needs_operator(x: torch.Tensor) -> bool:
    """Whether somebody may be watching: tracing, a mode, a functorch transform, a subclass, autograd."""
    return (
        torch.compiler.is_compiling()
        or type(x) not in PLAIN_TENSORS
        or (x.requires_grad and torch.is_grad_enabled())
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def run(x: torch.Tensor, out: torch.Tensor | None, backend: str) -> torch.Tensor:
    """Check, choose the backend, compute. Nothing is launched or written before all checks."""
    check_input(x)
    if out is not None:
        check_output(out, x)
    backend = resolve_backend(backend, x.device)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if backend == "reference":
        out.copy_(reference.softmax(x))
    elif x.numel() > 0:
        source = as_matrix(x)
        source = as_matrix(x.contiguous()) if source is None else source
        target = as_matrix(out)
        launch = _launch_cuda if x.is_cuda else _run_sim
        launch(source, target)
    return out


_launchers: dict[tuple, object] = {}  # by what decides the plan: a compiled kernel, ready to be called
MOST_LAUNCHERS = 4096


def _launch_cuda(source: torch.Tensor, target: torch.Tensor) -> None:
    """One launch on the tensors' device and its current stream; no synchronisation."""
    problem = SoftmaxProblem.of(source, target)
    index = source.device.index
    launcher = _launchers.get((problem, index))
    if launcher is None:
        from warpspec.softmax import launch

        if len(_launchers) >= MOST_LAUNCHERS:
            _launchers.clear()
        launcher = _launchers[problem, index] = launch.launcher(problem, index)
    if index == torch.cuda.current_device():
        launcher(source, target)
    else:
        with torch.cuda.device(index):
            launcher(source, target)


def _run_sim(source: torch.Tensor, target: torch.Tensor) -> None:
    """The sm_100a kernel in the simulator."""
    from warpspec.softmax import launch

    launch.run_sim(source, target)


@torch.library.custom_op("warpspec::softmax", mutates_args=(), schema="(Tensor x, str backend) -> Tensor")
def softmax_op(x, backend):
    """``softmax`` into a new tensor."""
    return run(x, None, backend)


@torch.library.custom_op(
    "warpspec::softmax_out", mutates_args=("out",), schema="(Tensor x, Tensor(a!) out, str backend) -> ()"
)
def softmax_out_op(x, out, backend):
    """``softmax`` into out."""
    run(x, out, backend)


@softmax_op.register_fake
def _(x, backend):
    check_input(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@softmax_out_op.register_fake
def _(x, out, backend):
    check_input(x)
    check_output(out, x, memory=False)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(output)


def _backward(ctx, gradient):
    """Of y = softmax(x): y (g - sum(g y)), by torch's own kernel."""
    (y,) = ctx.saved_tensors
    return torch._softmax_backward_data(gradient, y, -1, y.dtype), None


softmax_op.register_autograd(_backward, setup_context=_setup_context)
