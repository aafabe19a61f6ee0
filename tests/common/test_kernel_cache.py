"""Kernels on disk: found again by other processes, and never in the way of a result."""

import errno
import multiprocessing
import os
import threading
import warnings
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cuda.bindings.driver import CUstream

from warpspec import sim
from warpspec.common import compile, disk_cache, kernel_cache
from warpspec.common.compile import fake_rows
from warpspec.common.disk_cache import CACHE_VARIABLE, DiskCache
from warpspec.common.host_function import HostFunction
from warpspec.common.launch import SIMULATED, Kernel
from warpspec.fmha import launch as attention_launch
from warpspec.fmha.combine import CombineConfig
from warpspec.fmha.problem import AttentionProblem
from warpspec.moe.sm100 import GemmConfig
from warpspec.moe.sm100.config import SINGLE
from warpspec.softmax import softmax

THREADS = 32
ARCH = "sm_90a"


@dataclass(frozen=True)
class Config:
    factor: int
    offset: float | None = None


class Scale:
    def __init__(self, config: Config):
        self.config = config

    @cute.jit
    def __call__(self, rows: cute.Tensor, other: cute.Tensor | None, count: cutlass.Int32, stream: CUstream):
        self.kernel(rows, count).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, rows: cute.Tensor, count: cutlass.Int32):
        thread, _, _ = cute.arch.thread_idx()
        if thread < count:
            rows[thread] = rows[thread] * self.config.factor


def build(config):
    return Scale(config), fake_rows(cutlass.Float32, 1), None, 0


scale = Kernel("test.scale", build)
scale.on_disk = True  # as if it were one of warpspec's
CONFIG = Config(3)


@pytest.fixture
def compiled_hosts(monkeypatch):
    """The compilations since the last call of ``other_process``."""
    hosts, compile_host = [], compile.compile_host

    def counting(host, *arguments, **options):
        hosts.append(host)
        return compile_host(host, *arguments, **options)

    monkeypatch.setattr(compile, "compile_host", counting)
    return hosts


@pytest.fixture
def other_process(monkeypatch, tmp_path, compiled_hosts):
    """Forgets what this process has compiled."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))

    def forget():
        compiled_hosts.clear()
        monkeypatch.setattr(compile, "_compiled", {})

    forget()
    return forget


def scaled(config=CONFIG):
    rows = torch.arange(THREADS, dtype=torch.float32)
    scale.run(config, SIMULATED[ARCH], rows, None, 5)
    assert rows[:5].tolist() == [n * config.factor for n in range(5)] and rows[5] == 5
    return rows


def kept(tmp_path):
    return sorted((tmp_path / "kernels").glob(f"*{kernel_cache.SUFFIX}"))


def test_found_again_in_the_simulator(other_process, compiled_hosts, tmp_path):
    first = scale.compiled(CONFIG, ARCH)
    scaled()
    assert len(compiled_hosts) == 1 and len(kept(tmp_path)) == 1
    other_process()
    again = scale.compiled(CONFIG, ARCH)
    scaled()
    assert not compiled_hosts and isinstance(again, HostFunction)
    assert again.artifacts == first.artifacts and again.code == first.code
    with pytest.raises(sim.HostError, match="it was None when compiled"):
        sim.run(again, torch.zeros(THREADS), torch.zeros(1), 5, None)
    with pytest.raises(sim.HostError, match="argument `count` is missing"):
        sim.run(again, torch.zeros(THREADS), None)


def test_a_native_kernel_is_found_and_loaded_without_a_gpu(other_process, compiled_hosts):
    first = scale.compiled(CONFIG, ARCH, native=True)
    other_process()
    again = scale.compiled(CONFIG, ARCH, native=True)
    assert not compiled_hosts and isinstance(again, kernel_cache.NativeFunction)
    assert again.artifacts.PTX == first.artifacts.PTX and again.artifacts.CUBIN == first.artifacts.CUBIN
    for function in (again, again.__tvm_ffi_object__()):
        with pytest.raises(TypeError, match="Expects 3 parameters"):
            function(1)


def scale_in_a_fork(start, told) -> None:
    """In a child of this process, which has compiled nothing: run ``scaled`` and tell how many hosts it compiled."""
    compile_host, hosts = compile.compile_host, []
    compile.compile_host = lambda *arguments, **options: (
        hosts.append(1) or compile_host(*arguments, **options)
    )
    start.wait()
    found = scaled().tolist()
    told.put((len(hosts), found))


def test_processes_share_one_compilation(other_process):
    """Two at once: one compiles, the other waits for it, and both have the same bits."""
    context = multiprocessing.get_context("fork")
    start, told = context.Barrier(2), context.Queue()
    processes = [context.Process(target=scale_in_a_fork, args=(start, told)) for _ in range(2)]
    for process in processes:
        process.start()
    try:
        (fewer, one), (more, other) = sorted(told.get(timeout=300) for _ in processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert (fewer, more) == (0, 1) and one == other


def test_the_name_says_all_that_decides_the_code(monkeypatch, tmp_path):
    def name(key=("family", CONFIG), arch=ARCH, options="", native=False):
        return kernel_cache.name_of(key, arch=arch, options=options, native=native)

    names = [
        name(),
        name(("other", CONFIG)),
        name(("family", replace(CONFIG, factor=4))),
        name(("family", replace(CONFIG, offset=0.0))),
        name(("family", replace(CONFIG, offset=-0.0))),
        name(arch="sm_100a"),
        name(options="--opt-level 2"),
        name(native=True),
    ]
    with monkeypatch.context() as patch:
        patch.setenv("CUTE_DSL_NO_SOURCE_LOCATION", "1")
        names.append(name())
    with monkeypatch.context() as patch:
        patch.setattr(kernel_cache.importlib.metadata, "version", lambda name: "4.9.0")
        kernel_cache._versions.cache_clear()
        names.append(name())
    kernel_cache._versions.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(kernel_cache, "SOURCES", "other")
        names.append(name())
    assert len(set(names)) == len(names) and name() == names[0]


def test_sources_of_every_package_but_the_simulator_count(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_cache, "_package_folder", lambda: tmp_path)
    for package in ("common", "new", "sim"):
        (tmp_path / package / "deep").mkdir(parents=True)
        (tmp_path / package / "py.typed").touch()
        (tmp_path / package / "deep/module.py").write_text("one")
    hashes = [kernel_cache.hash_sources()]
    (tmp_path / "sim/deep/module.py").write_text("two")
    assert kernel_cache.hash_sources() == hashes[0]
    (tmp_path / "new/deep/module.py").write_text("two")
    hashes.append(kernel_cache.hash_sources())
    (tmp_path / "new/deep/module.py").rename(tmp_path / "new/deep/other.py")
    hashes.append(kernel_cache.hash_sources())
    assert len(set(hashes)) == 3


def test_edited_while_it_runs(other_process, monkeypatch, tmp_path):
    """What was imported is no longer what the name says."""
    monkeypatch.setattr(kernel_cache, "SOURCES", "before the edit")
    scaled()
    assert not kept(tmp_path)


def test_every_configuration_has_words():
    q, k = torch.empty(1, 4, 8, 64, dtype=torch.bfloat16), torch.empty(1, 4, 2, 64, dtype=torch.bfloat16)
    problem = AttentionProblem.of(q, k, k, causal=True, memory=False)
    configs = [attention_launch.plan(problem, target).config for target in SIMULATED.values()]
    words = {
        kernel_cache.describe(config) for config in (*configs, CombineConfig.of(64, 3), GemmConfig(SINGLE))
    }
    assert len(words) == len(SIMULATED) + 2
    assert all(" at 0x" not in text for text in words)
    with pytest.raises(TypeError, match="a kernel's key cannot have a dict in it"):
        kernel_cache.describe(("family", {}))


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "one bit", "foreign", "another kernel's", "newer format"]
)
def test_a_damaged_file_is_made_again(damage, other_process, compiled_hosts, tmp_path):
    scaled()
    (path,) = kept(tmp_path)
    good = path.read_bytes()
    if damage == "another kernel's":
        scaled(Config(7))
        (other,) = set(kept(tmp_path)) - {path}
        other.replace(path)
    elif damage == "newer format":  # well kept, not understood
        DiskCache("kernels", 1 << 30).write(path.name, b"{}\n")
    else:
        middle = len(good) // 2
        changed = bytes([good[middle] ^ 4])
        path.write_bytes(
            {
                "truncated": good[:middle],
                "empty": b"",
                "one bit": good[:middle] + changed + good[middle + 1 :],
                "foreign": b"\x7fELF" + bytes(5000),
            }[damage]
        )
    other_process()
    with pytest.warns(RuntimeWarning, match="damaged or not ours|does not load"):
        scaled()
    assert len(compiled_hosts) == 1 and path.read_bytes()[:8] == disk_cache.MAGIC
    other_process()
    with warnings.catch_warnings(action="error"):
        scaled()
    assert not compiled_hosts


def test_a_cpu_with_fewer_instructions_compiles_again(other_process, compiled_hosts, monkeypatch):
    scaled()
    other_process()
    monkeypatch.setattr(kernel_cache, "cpu_features", frozenset)
    scaled()
    assert len(compiled_hosts) == 1


def test_a_folder_that_cannot_be_written(other_process, compiled_hosts, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "below"))
    with pytest.warns(RuntimeWarning, match="nothing is kept in"):
        scaled()
    assert len(compiled_hosts) == 1


def test_a_full_disk(other_process, compiled_hosts, monkeypatch, tmp_path):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(disk_cache.os, "replace", full)
        with pytest.warns(RuntimeWarning, match="No space left"):
            scaled()
    assert not kept(tmp_path) and not list((tmp_path / "kernels").glob("*.part"))


@pytest.mark.parametrize("whose", ["writable by all", "somebody else's"])
def test_code_that_others_may_have_written_is_not_run(
    whose, other_process, compiled_hosts, monkeypatch, tmp_path
):
    scaled()
    if whose == "writable by all":
        (tmp_path / "kernels").chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(tmp_path / "kernels", 12345, -1)
    else:
        monkeypatch.setattr(disk_cache.os, "geteuid", lambda: 12345)
    other_process()
    with pytest.warns(RuntimeWarning, match="code in it is not run"):
        scaled()
    assert len(compiled_hosts) == 1


def test_switched_off(other_process, compiled_hosts, monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        scaled()
        assert len(compiled_hosts) == 1
        other_process()
        monkeypatch.setenv(CACHE_VARIABLE, "")
    assert os.listdir(tmp_path) == []


def test_only_families_of_this_package_are_kept(other_process, tmp_path):
    Kernel("test.outside", build).compiled(CONFIG, ARCH)
    assert not kept(tmp_path)
    softmax(torch.zeros(2, 64), backend="sim")
    assert len(kept(tmp_path)) == 1


def test_a_failed_compilation_raises_and_leaves_nothing(other_process, tmp_path):
    def broken(config):
        raise RuntimeError("cannot build")

    kernel = Kernel("test.broken", broken)
    kernel.on_disk = True
    with pytest.raises(RuntimeError, match="cannot build"):
        kernel.compiled(CONFIG, ARCH)
    assert not kept(tmp_path)


def test_what_cannot_be_kept_still_runs(other_process, monkeypatch, tmp_path):
    def fails(self):
        raise TypeError("parameter x is annotated strangely")

    monkeypatch.setattr(HostFunction, "to_json", fails)
    with pytest.warns(RuntimeWarning, match="cannot be kept: TypeError: parameter x"):
        scaled()
    assert not kept(tmp_path)


def test_the_least_recently_used_go_first(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    cache = DiskCache("small", limit=3000)
    for age, name in enumerate("abc"):
        cache.write(name, bytes(800))
        os.utime(tmp_path / "small" / name, (1000 + age, 1000 + age))
    assert cache.read("a") == bytes(800)  # used just now
    abandoned = tmp_path / "small/x.part"
    abandoned.touch()
    os.utime(abandoned, (1000, 1000))
    cache.write("d", bytes(800))
    assert [cache.read(name) is None for name in "abcd"] == [False, True, False, False]
    assert not abandoned.exists()


def test_who_waits_is_told_and_does_not_wait_for_ever(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    cache, entered, order = DiskCache("locks", limit=1000), threading.Event(), []

    def first():
        with cache.making("a") as waited:
            entered.set()
            threading.Event().wait(0.3)
            order.append(waited)

    maker = threading.Thread(target=first)
    maker.start()
    entered.wait()
    with cache.making("a", seconds=0.05) as waited:
        assert waited and order == []
    with cache.making("a") as waited:
        assert waited and order == [False]
    maker.join()
    with cache.making("a") as waited:
        assert not waited


def test_the_compiler_is_of_one_toolkit_in_use():
    """A machine with both toolkits and one with the newer alone find each other's kernels."""
    assert kernel_cache.toolkit_of((12, 13), 13) == kernel_cache.toolkit_of((13,), 13) == 13
    assert kernel_cache.toolkit_of((12, 13), None) == 13
    assert kernel_cache.toolkit_of((12, 13), 12) == 12
    assert kernel_cache.toolkit_of((13,), 12) is kernel_cache.toolkit_of((), None) is None
    used = [name for name in kernel_cache._versions() if "-libs-cu" in name]
    assert len(used) == 1 and "absent" not in used[0]
