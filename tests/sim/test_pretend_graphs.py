"""CUDA graphs and threads on the pretended device."""

import threading
from concurrent.futures import ThreadPoolExecutor

import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import from_dlpack

import warpspec.sim
from warpspec.softmax import softmax


@cute.kernel
def double_rows(x: cute.Tensor):
    x[cute.arch.block_idx()[0], cute.arch.thread_idx()[0]] *= 2.0


@cute.jit
def double(x: cute.Tensor):
    double_rows(x).launch(grid=(x.shape[0], 1, 1), block=(32, 1, 1))


def step(x):
    """x becomes 2 x + 1, partly in memory of its own."""
    double(from_dlpack(x))
    sums = torch.ones_like(x)
    sums += x
    x.copy_(sums)


@pytest.fixture(scope="module", autouse=True)
def pretended():
    with warpspec.sim.intercept("sm_90a"):
        yield


def test_a_capture_executes_nothing():
    x, graph = torch.full((2, 32), 3.0, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(x)
    found = [x.unique().item()]
    for _ in range(2):
        graph.replay()
        found.append(x.unique().item())
    assert found == [3, 7, 15]


def test_a_captured_operator_runs_once_a_replay():
    x, graph = torch.arange(64.0, device="cuda").view(2, 32) / 7, torch.cuda.CUDAGraph()
    expected = x.clone()
    with torch.cuda.graph(graph):
        softmax(x, out=x)
    assert torch.equal(x, expected)
    for _ in range(2):
        graph.replay()
        expected = torch.softmax(expected, -1)
        torch.testing.assert_close(x, expected)


def test_a_capture_that_fails_ends():
    x, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    with pytest.raises(KeyError), torch.cuda.graph(graph):
        x += 1
        raise KeyError
    assert not torch.cuda.is_current_stream_capturing()
    x += 5
    assert x.eq(5).all()


def test_a_captured_optimizer_steps():
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    weight.grad, graph = torch.ones_like(weight), torch.cuda.CUDAGraph()
    graph.capture_begin()
    torch.optim.SGD([weight], lr=0.25).step()
    graph.capture_end()
    assert weight.eq(1).all()
    graph.replay()
    graph.replay()
    assert weight.eq(0.5).all()


@pytest.mark.parametrize("option", [dict(seed=-1), dict(seeds=0), dict(check="ordr")])
def test_bad_options(option, monkeypatch):
    monkeypatch.setattr(warpspec.sim.pretend, "_active", None)
    (name,) = option
    with pytest.raises(ValueError, match=f"{name} is "), warpspec.sim.intercept(**option):
        pass


class Thread(threading.Thread):
    def run(self):
        self.found = torch.ones(2, device="cuda")


def test_threads_see_the_device():
    x = torch.ones(2, 32, device="cuda")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(step, x).result()
    assert x.eq(3).all()
    thread = Thread()
    thread.start()
    thread.join()
    assert thread.found.is_cuda
