"""A further architecture is a record and its kernels: look-ups find those that there are and refuse the rest."""

import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from warpspec.common.architecture import ARCHITECTURES, Architecture, Family, architecture
from warpspec.common.backend import resolve_backend
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import GPUS, gpu_model
from warpspec.common.launch import SIMULATED, Kernel, Target, simulated, simulating, target_of
from warpspec.fmha import attention, launch
from warpspec.fmha.backward import launch as backward_launch
from warpspec.fmha.sm90 import CHOICES, AttentionConfig
from warpspec.latent.gathered import launch as gathered_launch
from warpspec.latent.indexer.kernels import INDEX
from warpspec.latent.projection import ops as projection_ops
from warpspec.swap import launch as swap_launch

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FAMILIES = (
    launch.ATTENTION,
    backward_launch.GRADIENTS,
    gathered_launch.GATHERED,
    INDEX,
    projection_ops.PROJECTION,
    swap_launch.SWAP_FFN,
)


@pytest.fixture
def sm_120a(monkeypatch):
    """An architecture that there are no kernels for yet, of less shared memory, with a simulated GPU."""
    made_up = Architecture("sm_120a", (12, 0), "sm120", smem_per_cta=99 << 10)
    monkeypatch.setitem(ARCHITECTURES, "sm_120a", made_up)
    monkeypatch.setitem(SIMULATED, "sm_120a", Target(made_up, None, 188, 96 << 20))
    return made_up


def test_a_record_is_all_that_backends_need(sm_120a, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    assert resolve_backend("auto", CUDA) == "sm120" == resolve_backend("sm120", CUDA)
    with pytest.raises(UnsupportedProblem, match="cuda:0 runs 'sm120' kernels"):
        resolve_backend("sm100", CUDA)
    with pytest.raises(ValueError, match="auto, sm100, sm90, sm120, sim, reference, got 'sm80'"):
        resolve_backend("sm80", CPU)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.operation)
def test_a_family_without_kernels_refuses(sm_120a, family):
    with pytest.raises(
        UnsupportedProblem, match=f"{family.operation}: no kernel for sm_120a, .* sm90, sm100"
    ):
        family.of(sm_120a)


def test_attention_is_refused_until_it_has_kernels(sm_120a, monkeypatch):
    """The refusal names the architecture; a call is planned by the configuration that is registered."""
    q = torch.randn(1, 3, 2, 64).bfloat16()
    with simulating("sm_120a", sm_count=7):
        assert target_of(CPU).arch == "sm_120a" and target_of(CPU).sm_count == 7
        with pytest.raises(UnsupportedProblem, match="attention: no kernel for sm_120a"):
            attention(q, q, q, backend="sim")
        planned = []

        class Config(AttentionConfig):
            @classmethod
            def of(cls, problem, target, **options):
                planned.append((problem.head_dim, target.sm_count))
                return AttentionConfig.of(problem, target, **options)

        kernel = Kernel("made.up", lambda config: ())
        monkeypatch.setattr(kernel, "launcher", lambda config, target: planned.append)
        choices = replace(CHOICES, config=Config)
        package = SimpleNamespace(AttentionConfig=Config, ATTENTION=kernel, CHOICES=choices)
        monkeypatch.setitem(launch.ATTENTION.kernels, "sm120", package)
        launch.prepare.cache_clear()
        found = launch.prepare(launch.AttentionProblem.of(q, q, q), target_of(CPU))
        assert planned == [(64, 7)] and found.plan.ctas == 7 * found.plan.config.shape.ctas_per_sm
        monkeypatch.setitem(launch.ATTENTION.kernels, "sm_120a", "warpspec.fmha.sm100")
        assert launch.ATTENTION.of(sm_120a).AttentionConfig is not Config
    assert target_of(CPU) is SIMULATED["sm_100a"]


def test_simulated_targets_have_a_number_of_sms():
    with simulating("sm_90a", sm_count=None, seed=3) as target:
        assert (target.sm_count, target.seed) == (132, 3)
        with simulating(target, sm_count=2), simulating(target_of(CPU), sm_count=None) as inner:
            assert inner.sm_count == 2
    for count in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"sm_count: must be a positive int, got {count}"):
            simulated("sm_90a", sm_count=count)


@pytest.mark.parametrize(
    ("name", "model", "room"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", 40 << 20),
        ("NVIDIA H200", "H200", 40 << 20),
        ("NVIDIA B200", "B200", 84 << 20),
        ("NVIDIA GH200 480GB", None, 0),
    ],
)
def test_models_are_found_by_the_name_of_the_device(name, model, room):
    found = gpu_model(name)
    assert (found and found.name) == model
    if found:
        assert Target.of_model(found).l2_room == room and found.arch in GPUS
    assert GPUS["sm_90a"].name == "H100"


def test_sm_103a_runs_the_kernels_of_sm_100a():
    for family in FAMILIES:
        assert family.of(architecture("sm_103a")) is family.of(architecture("sm_100a"))


class Budget(NamedTuple):
    """A configuration."""

    smem_bytes: int


def test_a_kernel_needs_its_shared_memory(sm_120a):
    kernel = Kernel("made.up", lambda config: pytest.fail("built"))
    with pytest.raises(UnsupportedProblem, match=r"made.up: needs 102400 bytes .* sm_120a has 101376"):
        kernel.compiled(Budget(100 << 10), "sm_120a")
    with pytest.raises(UnsupportedProblem, match=r"arch: must be one of .* got 'sm_80'"):
        kernel.compiled(None, "sm_80")


def test_families_load_modules_and_a_made_up_one():
    family = Family("other", sm90="math", sm_103a=3)
    assert family.of(architecture("sm_90a")).pi > 3 and family.of(architecture("sm_103a")) == 3
    with pytest.raises(
        UnsupportedProblem, match="other: no kernel for sm_100a, there are kernels for sm90, sm_103a"
    ):
        family.of(architecture("sm_100a"))


def test_simulating_takes_no_gpu():
    with (
        pytest.raises(UnsupportedProblem, match="must be one of sm_90a, sm_100a, got 'sm_80'"),
        simulating("sm_80"),
    ):
        pass
    with pytest.raises(ValueError, match="target: must be the simulator"), simulating("sm_90a", device=0):
        pass


def test_records_are_themselves_in_another_process():
    target = SIMULATED["sm_90a"]
    again = pickle.loads(pickle.dumps(target))
    assert again == target and again.architecture is target.architecture and hash(again) == hash(target)
