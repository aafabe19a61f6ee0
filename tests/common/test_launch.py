"""Kernels by configuration, and targets; no GPU."""

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cuda.bindings.driver import CUstream

from warpspec.common import launch
from warpspec.common.architecture import ARCHITECTURES
from warpspec.common.compile import fake_rows
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import gpu_model
from warpspec.common.launch import SIMULATED, SIMULATED_ARCH, Kernel, Target, target_of
from warpspec.sim import SimReport

THREADS = 64
WARPS = THREADS // 32


class Order:
    """Every warp takes the next number: the interleaving of warps decides which. Scaled by the configuration."""

    def __init__(self, factor: int):
        self.factor = factor

    @cute.jit
    def __call__(self, counter: cute.Tensor, numbers: cute.Tensor, start: cutlass.Int32, stream: CUstream):
        self.kernel(counter, numbers, start).launch(grid=[4, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, counter: cute.Tensor, numbers: cute.Tensor, start: cutlass.Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if thread % 32 == 0:
            taken = cute.arch.atomic_add(counter.iterator, cutlass.Int32(1))
            numbers[block * WARPS + thread // 32] = (start + taken) * self.factor


built = []


def build(factor):
    built.append(factor)
    return Order(factor), fake_rows(cutlass.Int32, 1), fake_rows(cutlass.Int32, 1), 0


order = Kernel("test.order", build)


def numbers_of(factor, target, **options):
    counter, numbers = torch.zeros(1, dtype=torch.int32), torch.zeros(4 * WARPS, dtype=torch.int32)
    report = order.run(factor, target, counter, numbers, 100, **options)
    assert isinstance(report, SimReport) and counter.item() == len(numbers)
    return numbers.tolist()


@pytest.mark.parametrize("arch", SIMULATED)
def test_runs_in_the_simulator_as_either_architecture(arch):
    assert sorted(numbers_of(3, SIMULATED[arch])) == [3 * n for n in range(100, 108)]
    assert f".target {arch}" in order.compiled(3, arch).artifacts.PTX


def test_the_seed_draws_the_interleaving():
    runs = [numbers_of(3, SIMULATED[SIMULATED_ARCH], seed=seed) for seed in (0, 0, 1, 2, 3)]
    assert runs[0] == runs[1]
    assert any(run != runs[0] for run in runs[2:])


def test_compiles_once_for_each_configuration_architecture_and_way_to_run():
    built.clear()
    compiled = order.compiled(5, "sm_100a")
    assert order.compiled(5, "sm_100a") is compiled and built == [5]
    assert order.compiled(5, "sm_90a") is not compiled and built == [5] * 2
    assert order.compiled(5, "sm_100a", native=True) is not compiled and built == [5] * 3
    assert order.compiled(7, "sm_100a") is not compiled and built == [5] * 3 + [7]
    numbers_of(7, SIMULATED["sm_100a"])
    assert len(built) == 4


def test_targets():
    simulated = target_of(torch.device("cpu"))
    assert simulated is SIMULATED[SIMULATED_ARCH] and not simulated.native
    with pytest.raises(UnsupportedProblem, match="meta"):
        target_of(torch.device("meta"))


class FakeCuda:
    """Stands for torch.cuda on a machine of two GPUs: what is asked, and which device is current."""

    def __init__(self, monkeypatch):
        self.index, self.asked = 0, []
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.index)
        monkeypatch.setattr(torch.cuda, "get_device_properties", self.properties)
        monkeypatch.setattr(torch.cuda, "device", self.switch)

    def properties(self, device):
        self.asked.append(device)

        class Properties:
            name, major, minor, multi_processor_count, L2_cache_size = "NVIDIA B300", 10, 3, 160, 1 << 27

        return Properties

    def switch(self, index):
        cuda = self

        class Switch:
            def __enter__(self):
                self.before, cuda.index = cuda.index, index

            def __exit__(self, *error):
                cuda.index = self.before

        return Switch()


@pytest.fixture
def cuda(monkeypatch):
    launch._device_target.cache_clear()
    yield FakeCuda(monkeypatch)
    launch._device_target.cache_clear()


def test_a_device_is_asked_once_and_compiled_for_by_its_own_name(cuda):
    target = target_of(torch.device("cuda", 1))
    assert target == Target(ARCHITECTURES["sm_103a"], 1, 160, 1 << 27, speeds=target.speeds) and target.native
    assert target.speeds.copy == gpu_model("B200").speeds.copy, "its like"
    assert target_of(torch.device("cuda", 1)) is target and len(cuda.asked) == 1


def test_a_native_launch_happens_on_its_device(cuda, monkeypatch):
    """The compiled function is called with the arguments as they are, without its wrapper for keywords."""
    calls = []

    class Compiled:
        def __tvm_ffi_object__(self):
            return lambda *arguments: calls.append((cuda.index, arguments))

    def compiled(self, config, arch, *, native=False):
        assert native and arch == "sm_103a"
        return Compiled()

    monkeypatch.setattr(Kernel, "compiled", compiled)
    for device in (0, 1):
        assert order.run(3, target_of(torch.device("cuda", device)), "tensor", 1) is None
    assert calls == [(0, ("tensor", 1)), (1, ("tensor", 1))] and cuda.index == 0
