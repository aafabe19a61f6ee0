"""Backend choice: explicit, by device, by environment; nothing falls back."""

import pytest
import torch

from warpspec.common.backend import resolve_backend
from warpspec.common.errors import UnsupportedProblem

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_override(monkeypatch):
    monkeypatch.delenv("WARPSPEC_BACKEND", raising=False)


@pytest.fixture
def capability(monkeypatch):
    """Sets the compute capability that every CUDA device reports."""

    def pretend(*version):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: version)

    return pretend


@pytest.mark.parametrize(("version", "backend"), [((9, 0), "sm90"), ((10, 0), "sm100"), ((10, 3), "sm100")])
def test_auto_takes_the_devices_kernel(capability, version, backend):
    capability(*version)
    assert resolve_backend("auto", CUDA) == backend
    assert resolve_backend(backend, CUDA) == backend


@pytest.mark.parametrize("version", [(8, 0), (12, 0)])
def test_auto_on_another_device_raises(capability, version):
    capability(*version)
    with pytest.raises(UnsupportedProblem, match=rf"{version[0]}\.{version[1]}"):
        resolve_backend("auto", CUDA)
    assert resolve_backend("reference", CUDA) == "reference"


def test_auto_on_cpu_is_the_simulator():
    assert resolve_backend("auto", CPU) == "sim"


def test_auto_on_a_device_without_kernels_raises():
    with pytest.raises(UnsupportedProblem, match="meta"):
        resolve_backend("auto", torch.device("meta"))


def test_reference_runs_anywhere():
    for device in (CPU, CUDA, torch.device("meta")):
        assert resolve_backend("reference", device) == "reference"


@pytest.mark.parametrize("backend", ["sm90", "sm100"])
def test_native_kernels_take_cuda_tensors(backend):
    with pytest.raises(UnsupportedProblem, match=f"'{backend}'.*cpu"):
        resolve_backend(backend, CPU)


@pytest.mark.parametrize(("version", "backend"), [((9, 0), "sm100"), ((10, 0), "sm90")])
def test_kernel_of_another_architecture_raises(capability, version, backend):
    capability(*version)
    with pytest.raises(UnsupportedProblem, match=backend):
        resolve_backend(backend, CUDA)


def test_simulator_takes_cpu_tensors():
    with pytest.raises(UnsupportedProblem, match=r"'sim'.*cuda:0"):
        resolve_backend("sim", CUDA)


def test_environment_overrides_auto_only(monkeypatch):
    monkeypatch.setenv("WARPSPEC_BACKEND", "reference")
    assert resolve_backend("auto", CPU) == "reference"
    assert resolve_backend("sim", CPU) == "sim"


@pytest.mark.parametrize("value", ["", "auto"])
def test_environment_without_a_choice(monkeypatch, value):
    monkeypatch.setenv("WARPSPEC_BACKEND", value)
    assert resolve_backend("auto", CPU) == "sim"


def test_environment_is_checked_and_named(monkeypatch):
    monkeypatch.setenv("WARPSPEC_BACKEND", "fast")
    with pytest.raises(ValueError, match=r"^WARPSPEC_BACKEND: .*'fast'"):
        resolve_backend("auto", CPU)
    monkeypatch.setenv("WARPSPEC_BACKEND", "sm100")
    with pytest.raises(UnsupportedProblem, match=r"^WARPSPEC_BACKEND 'sm100'"):
        resolve_backend("auto", CPU)


def test_unknown_name_lists_what_is_allowed():
    with pytest.raises(ValueError, match="auto, sm100, sm90, sim, reference, got 'cuda'"):
        resolve_backend("cuda", CPU)
