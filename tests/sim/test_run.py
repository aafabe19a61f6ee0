"""sim.run with its options, on kernels of other people's making; what its messages call things; the command line."""

import json
import random
import sys

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import make_fake_tensor

from warpspec import sim
from warpspec.common.host_function import HostFunction
from warpspec.sim.__main__ import main
from warpspec.sim.names import StorageNames, function_at, kernel_name, placed


@cute.struct
class Storage:
    tile: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, 64], 128]
    full: cute.struct.MemRange[cutlass.Int64, 2]


@cute.kernel
def double_rows(x: cute.Tensor, arrivals: cutlass.Constexpr):
    storage = cutlass.memory.SmemAllocator().allocate(Storage)
    barrier = storage.full.data_ptr() + 1
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.mbarrier_init(barrier, arrivals)
    cute.arch.sync_threads()
    x[cute.arch.block_idx()[0], cute.arch.thread_idx()[0]] *= 2.0
    cute.arch.mbarrier_arrive(barrier)
    cute.arch.mbarrier_wait(barrier, 0)


@cute.jit
def host(x: cute.Tensor, arrivals: cutlass.Constexpr = 32):
    double_rows(x, arrivals).launch(grid=(x.shape[0], 1, 1), block=(32, 1, 1))


@cute.kernel
def who_is_first(x: cute.Tensor, winner: cute.Tensor):
    """Every warp writes its number: the last one stays."""
    if cute.arch.thread_idx()[0] % 32 == 0:
        winner[0] = cute.arch.thread_idx()[0] // 32
    x[cute.arch.thread_idx()[0]] += 1.0


@cute.jit
def race(x: cute.Tensor, winner: cute.Tensor):
    who_is_first(x, winner).launch(grid=(1, 1, 1), block=(256, 1, 1))


def fake(dtype, *shape):
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * size)
    return make_fake_tensor(dtype, shape, stride=tuple(stride), memspace=cute.AddressSpace.gmem)


def compile_(function, *arguments, folder, options="--generate-line-info"):
    keep = f"--gpu-arch sm_100a --keep-ptx --keep-cubin --dump-dir {folder} {options}"
    return cute.compile(function, *arguments, options=keep)


def numbers():
    return torch.arange(128.0).reshape(4, 32)


@pytest.fixture(scope="module")
def racing(tmp_path_factory):
    tensors = fake(cutlass.Float32, 256), fake(cutlass.Int32, 1)
    return compile_(race, *tensors, folder=tmp_path_factory.mktemp("race"))


@pytest.mark.parametrize("ffi", ["", "--enable-tvm-ffi"])
def test_arguments_by_name_seeds_and_a_timeline(tmp_path, ffi):
    """Each of the runs begins with the tensors as they were: two of them do not quadruple."""
    compiled = compile_(host, fake(cutlass.Float32, 4, 32), folder=tmp_path, options=ffi)
    x = numbers()
    report = sim.run(compiled, x=x, seeds=2, seed=3, timeline=tmp_path / "trace.json")
    assert torch.equal(x, 2 * numbers()) and report.seed == 4
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    with pytest.raises(sim.HostError, match="argument `y`: not an argument"):
        sim.run(compiled, x, y=1)


def test_results_that_depend_on_the_schedule(racing):
    x, winner = torch.zeros(256), torch.full((1,), -1, dtype=torch.int32)
    with pytest.raises(
        sim.ScheduleDependence, match=r"argument `winner` differs under seeds 0 and \d in 1 of 1"
    ) as found:
        sim.run(racing, x, winner, seeds=8)
    assert "under seed" in str(found.value) and (x == 1).all()
    assert any(note.startswith('check="order" ') for note in found.value.__notes__)
    sim.run(racing, x, winner, seeds=1)
    assert (x == 2).all(), "tensors are the caller's after a run"


@pytest.mark.parametrize("options", [dict(seeds=0), dict(seeds=True), dict(seed=-1), dict(check="races")])
def test_options_out_of_range(racing, options):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        sim.run(racing, torch.zeros(256), torch.zeros(1, dtype=torch.int32), **options)


@pytest.mark.parametrize("compiled", [None, "kernel", (1, 2)])
def test_what_was_not_compiled(compiled):
    with pytest.raises(sim.HostError, match=f"compiled is a {type(compiled).__name__}; what cute.compile"):
        sim.run(compiled)


def test_messages_say_what_people_call_things(tmp_path):
    compiled = compile_(host, fake(cutlass.Float32, 4, 32), 33, folder=tmp_path)
    with pytest.raises(sim.Deadlock) as found:
        sim.run(compiled, numbers(), seeds=2)
    text = str(found.value)
    line = double_rows.__wrapped__.__code__.co_firstlineno
    assert "mbarrier full[1] at shared offset 0x508" in text
    assert f"last arrival by warp 0, {__file__}:{line + 7} in double_rows (PTX line" in text
    assert f"from {__file__}:{line + 8} in double_rows)" in text, (
        "lines of inline assembly are no Python lines"
    )
    assert text.endswith("at kernel double_rows") and "kernel_cutlass" not in text
    assert found.value.__notes__ == ["under seed 0, the number 1 of 2"]


def test_without_line_information_a_message_says_what_would_give_it(tmp_path):
    compiled = compile_(host, fake(cutlass.Float32, 4, 32), 33, folder=tmp_path, options="")
    with pytest.raises(sim.Deadlock, match=r"--generate-line-info[^\n]*\n  at kernel double_rows$"):
        sim.run(compiled, numbers())


def test_storage_survives_the_file_of_a_kernel(tmp_path):
    made = HostFunction.of(compile_(host, fake(cutlass.Float32, 4, 32), folder=tmp_path))
    (fields,) = made.storage.values()
    assert fields == (("tile", 256, 0), ("full", 16, 256))
    description = json.loads(json.dumps({**made.to_json(), "parameters": []}))
    assert HostFunction.from_json(description, made.artifacts, made.code).storage == made.storage


def test_names_of_places():
    names = StorageNames([("full", 16, 0), ("flag", 4, 16), ("tile", 256, 128)], start=1024)
    assert [names.barrier(at) for at in (1023, 1024, 1032, 1040, 1044)] == [
        None,
        "full[0]",
        "full[1]",
        "flag",
        None,
    ]
    assert [names.place(at) for at in (1152, 1160, 1408)] == ["tile", "tile + 0x8", None]


def test_names_of_functions_and_kernels(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(
        "class A:\n    @deco\n    def f(self):\n        def g():\n            pass\n        pass\nx = 1\n"
    )
    assert [function_at(f"{path}:{line}") for line in (1, 2, 3, 5, 6, 7)] == [
        None,
        "A.f",
        "A.f",
        "A.f.g",
        "A.f",
        None,
    ]
    assert (
        function_at("nowhere.py:3") is None
        and function_at(None) is None
        and placed("nowhere.py:3") == "nowhere.py:3"
    )
    assert kernel_name("kernel_cutlass_f_tensorptrf32gmemo_0", f"{path}:2") == "A.f"
    assert kernel_name("kernel_cutlass_row_sum_tensorptrf32gmemo_0", None) == "row_sum"
    assert len(kernel_name("k" * 250, None)) < 50


KERNEL = """
import cutlass, cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor
import torch

@cute.kernel
def scale(x: cute.Tensor, by: cutlass.Constexpr):
    x[cute.arch.block_idx()[0], cute.arch.thread_idx()[0]] *= float(by)

@cute.jit
def host(x: cute.Tensor, by: cutlass.Constexpr = 2):
    scale(x, by).launch(grid=(x.shape[0], 1, 1), block=(32, 1, 1))

def case():
    fake = make_fake_tensor(cutlass.Float32, (4, 32), stride=(32, 1), memspace=cute.AddressSpace.gmem)
    options = "--gpu-arch sm_90a --keep-ptx --keep-cubin --dump-dir {folder}"
    return cute.compile(host, fake, 5, options=options), torch.ones(4, 16)

def nothing():
    pass

def twice(x):
    return x, x
"""


def test_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "users_kernel.py"
    path.write_text(KERNEL.replace("{folder}", str(tmp_path)))
    assert main([f"{path}:host", "x=f32[4,32]:ones", "by=3", "--seeds", "2", "--check", "order"]) == 0
    printed = capsys.readouterr().out
    assert "kernel scale" in printed and "x: torch.float32 (4, 32), mean 3, from 3 to 3" in printed
    timeline = tmp_path / "t.json"
    assert main([f"{path}:host", "x=f32[4,32]", "by=3", "--clocks", "b200", "--timeline", str(timeline)]) == 0
    assert "kernel scale on B200 (predicted, not measured)" in capsys.readouterr().out and timeline.exists()
    assert main([f"{path}:host", "x=f32[4,32]", "by=3", "--clocks", "h200"]) == 2
    assert "--clocks h200: needs --arch sm_90a, got sm_100a" in capsys.readouterr().err
    assert main([f"{path}:case"]) == 1
    assert "HostError: argument `x`" in capsys.readouterr().out
    for arguments, message in (
        (["x=f33[4]"], "f33 is not one of f64"),
        (["x=f32[4]:twos"], "contents are zeros"),
        ([], "parameter x has no value"),
        (["x=f32[4,32]", "z=1"], "host has no parameter z"),
        (["x"], "arguments are NAME=VALUE"),
        (["x=f32[4,32"], "x: must be a number, True, False, None or a tensor"),
        (["x=f32[4,32]", "by=3", "by=4"], "by: is given twice"),
    ):
        assert main([f"{path}:host", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main([f"{path}:nobody"]) == 2 and main(["nowhere.py:host"]) == 2
    for function in ("nothing", "twice"):
        assert main([f"{path}:{function}"]) == 2
        assert f"{path}:{function}: must" in capsys.readouterr().err


def test_a_kernel_in_a_file_named_like_a_module(tmp_path, capsys, monkeypatch):
    """The file must not take the module's place: torch draws by `random`, for example."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "random.py"
    path.write_text("def kernel():\n    pass\n")
    assert main([f"{path}:kernel"]) == 2
    assert sys.modules["random"] is random
