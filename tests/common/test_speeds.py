"""What plans know of a GPU's speed: measured, its model's, its data sheet's, in this order."""

from types import SimpleNamespace

import pytest
import torch

from warpspec.cli import timing, tune
from warpspec.common import speeds
from warpspec.common.disk_cache import CACHE_VARIABLE
from warpspec.common.hardware import Speeds, gpu_model

H100 = gpu_model("H100")
H20 = SimpleNamespace(
    name="NVIDIA H20", multi_processor_count=78, memory_clock_rate=2619000, memory_bus_width=6144
)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))


def test_a_gpu_nobody_measured_has_its_data_sheets_copy():
    found = speeds.speeds_of(H20, None, H100)
    assert found.copy == pytest.approx(4.02 * 0.89, rel=0.01)
    assert found.matmul == pytest.approx(H100.speeds.matmul * 78 / 132)
    silent = SimpleNamespace(name="NVIDIA H20", multi_processor_count=78)
    assert speeds.speeds_of(silent, None, H100).copy == H100.speeds.copy


def test_what_was_measured_comes_first():
    assert speeds.speeds_of(H20, H100, H100) == H100.speeds
    speeds.keep_speeds("NVIDIA H20", 78, Speeds(3.5, 140.0))
    assert speeds.speeds_of(H20, H100, H100) == Speeds(3.5, 140.0)
    other = SimpleNamespace(name="NVIDIA H20", multi_processor_count=66)
    assert speeds.speeds_of(other, H100, H100) == H100.speeds, "a part of the GPU is another one"


@pytest.mark.parametrize("text", ['{"copy": 3.5}', '{"copy": 3.5, "matmul": 140.0, "l2": 6.0}'])
def test_what_another_version_measured_is_not_taken(text):
    speeds.MEASURED.write(speeds.file_name("NVIDIA H20", 78), text.encode())
    assert speeds.speeds_of(H20, H100, H100) == H100.speeds


def test_nothing_is_kept_where_caching_is_off(monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, "")
    speeds.keep_speeds("NVIDIA H20", 78, Speeds(3.5, 140.0))
    assert speeds.kept_speeds("NVIDIA H20", 78) is None


def test_tune_measures_what_later_plans_use(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 2 and "no CUDA GPU" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H20)
    monkeypatch.setattr(timing, "measured_speeds", lambda: Speeds(3.6, 140.0))
    assert tune.main(["--show"]) == 0 and "the data sheet's" in capsys.readouterr().out
    assert speeds.kept_speeds("NVIDIA H20", 78) is None
    assert tune.main([]) == 0 and "measured here" in capsys.readouterr().out
    assert speeds.speeds_of(H20, None, H100) == Speeds(3.6, 140.0)
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert tune.main([]) == 2 and "caching is off" in capsys.readouterr().err
