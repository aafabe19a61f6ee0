"""A script as people write it for a GPU; test_pretend.py runs it in the simulator.

python gpu_script.py [arrivals]: 32 is right; 33 waits for ever; "racy" leaves a barrier out.
"""

import copy
import sys

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def reverse_rows(x: cute.Tensor, y: cute.Tensor, arrivals: cutlass.Constexpr, ordered: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    memory = cutlass.memory.SmemAllocator()
    barrier = memory.allocate_array(cutlass.Int64, 1)
    line = memory.allocate_array(cutlass.Float32, 64)
    if thread == 0:
        cute.arch.mbarrier_init(barrier, arrivals)
    cute.arch.sync_threads()
    line[thread] = x[row, thread]
    if cutlass.const_expr(ordered):
        cute.arch.sync_threads()
    y[row, thread] = line[63 - thread]
    cute.arch.mbarrier_arrive(barrier)
    cute.arch.mbarrier_wait(barrier, 0)


@cute.jit
def host(x: cute.Tensor, y: cute.Tensor, arrivals: cutlass.Constexpr, ordered: cutlass.Constexpr):
    reverse_rows(x, y, arrivals, ordered).launch(grid=(x.shape[0], 1, 1), block=(64, 1, 1))


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        compiled = cute.compile(host, from_dlpack(x), from_dlpack(y), 64, True, options="--enable-tvm-ffi")
        compiled(x, y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        assert gradient.is_cuda and torch.zeros(1, device=gradient.device).is_cuda
        return gradient.flip(1)


def check_torch():
    """What scripts rely on around their kernels."""
    assert torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10)
    x = torch.arange(8.0, device="cuda")
    assert x.device == torch.device("cuda", 0) and (x + 1).is_cuda and x[2:].is_cuda and not x.cpu().is_cuda
    assert x.data_ptr() % 256 == 0
    kept = x.cpu()
    x += 1
    assert kept[0] == 0, "a copy"
    model = copy.deepcopy(torch.nn.Linear(8, 8).to("cuda"))
    assert model(x).is_cuda and not torch.empty_like(x, device="cpu").is_cuda
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as times:
        x * 2
    assert any(event.key == "aten::mul" for event in times.key_averages())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    x.fill_(5)
    graph.replay()
    assert y.eq(10).all()


def main(what: str):
    check_torch()
    x = torch.randn(4, 64, device="cuda", requires_grad=True)
    y = Reverse.apply(x)
    torch.testing.assert_close(y, x.flip(1))
    (y * y).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x)
    z = torch.empty(4, 64, device="cuda")
    arrivals = 64 if what == "racy" else 2 * int(what)
    host(from_dlpack(x.detach()), from_dlpack(z), arrivals, what != "racy")
    torch.cuda.synchronize()
    print("right" if torch.equal(z, x.flip(1)) else "wrong")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "32")
