"""Scripts and test suites for a GPU run unchanged in the simulator: `sim run`, `pytest --warpspec-sim`."""

import importlib.machinery
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cuda.bindings.runtime import cudaError_t
from cutlass.base_dsl.common import DSLCudaRuntimeError
from cutlass.cute.runtime import from_dlpack, make_ptr

import warpspec.sim
from warpspec.sim.pretend import script, triton_testing

SCRIPT = Path(__file__).parent / "data/gpu_script.py"
LINES = SCRIPT.read_text().splitlines()
SUITE = """
import os, pytest, torch, gpu_script

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("rows", [2, 4])
def test_right(rows):
    y = gpu_script.Reverse.apply(torch.ones(rows, 64, device="cuda"))
    assert y.is_cuda and y.eq(1).all()


def test_racy():
    gpu_script.main("racy")


def test_hangs():
    gpu_script.main("33")


def test_ends_its_process():
    os.abort()


def test_needs_another_package():
    raise ImportError("triton is not installed")


@pytest.mark.parametrize("size", [1 << 40])
def test_of_a_gpus_size(size):
    raise AssertionError("predicted to take too long")


@pytest.mark.parametrize("number", range(1000))
def test_many(number):
    assert number >= 0
"""


class Page(HTMLParser):
    """Counts a page's elements, and keeps its text and the elements that are not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.counts, self.text = [], Counter(), ""

    def handle_starttag(self, tag, attrs):
        self.counts[tag] += 1
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(LINES, 1) if text in line)


def test_a_script_runs_unchanged(tmp_path, capfd):
    assert script.main([str(SCRIPT)]) == 0
    text = capfd.readouterr().out
    assert text.startswith("right\n") and "2 launches" in text, text
    assert script.main(["--clocks", "b200", "--sample", "64", str(SCRIPT)]) == 0
    assert capfd.readouterr().out.count("on B200 (predicted, not measured)") == 2
    files = [
        "--sarif",
        str(tmp_path / "s"),
        "--report",
        str(tmp_path / "r.html"),
        "--timeline",
        str(tmp_path / "t"),
    ]
    assert script.main(["--check", "order", *files, str(SCRIPT), "racy"]) == 1
    text = capfd.readouterr().out
    assert "memory order: 2 findings" in text and text.count("accesses that nothing orders") == 1, text
    (result,) = json.loads((tmp_path / "s").read_text())["runs"][0]["results"]
    assert result["ruleId"] == "accesses-that-nothing-orders"
    lines = {
        place["physicalLocation"]["region"]["startLine"]
        for place in (*result["locations"], *result["relatedLocations"])
    }
    assert lines == {line_of("line[thread] ="), line_of("= line[63 - thread]")}
    events = json.loads((tmp_path / "t").read_text())["traceEvents"]
    assert any(event["ph"] == "s" for event in events), "an arrow from an arrival to a wait"
    page = Page()
    page.feed((tmp_path / "r.html").read_text())
    assert page.open == [] and page.counts["svg"] >= 4 and page.counts["rect"] > 20
    assert LINES[line_of("line[thread] =") - 1].strip() in page.text and "Who waited for whom" in page.text
    assert script.main(["--arch", "sm_90a", str(SCRIPT), "33"]) == 1
    said = capfd.readouterr()
    assert "Deadlock: nothing can make progress" in said.err and "stopped by Deadlock" in said.out
    assert "machine.py" not in said.err, "frames of the simulator"
    assert not torch.cuda.is_available() and not torch.ones(1).is_cuda, "nothing is left behind"


@pytest.mark.long
def test_the_page_works_in_a_browser(tmp_path, capfd):
    """The page loads without an error, and its slider widens the drawing of a CTA."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("Chromium is not installed: no browser opens the page here")
    page = tmp_path / "r.html"
    script.main(["--check", "order", "--report", str(page), str(SCRIPT), "racy"])
    text = page.read_text()
    watch = "<script>window.onerror = text => document.title = 'failed: ' + text</script></head>"
    zoom = """<script>
        const drawing = document.querySelector('.scroll svg'), before = drawing.getBoundingClientRect().width;
        const slider = document.querySelector('input[type=range]'); slider.value = slider.max;
        slider.dispatchEvent(new Event('input', {bubbles: true}));
        document.title = 'wider: ' + (drawing.getBoundingClientRect().width > 2 * before);
        </script></body>"""
    page.write_text(text.replace("</head>", watch, 1).replace("</body>", zoom, 1))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert "<title>wider: true</title>" in dom, dom[:2000]
    capfd.readouterr()


def test_calls_follow_each_other_in_one_stream(capfd):
    overlap = str(SCRIPT.with_name("gpu_overlap.py"))
    assert script.main(["--check", "order", overlap]) == 1
    assert "accesses of launches that overlap" in capfd.readouterr().out
    assert script.main(["--check", "order", overlap, "torch"]) == 0
    assert "memory order: nothing found" in capfd.readouterr().out


def test_a_suite_runs_unchanged(tmp_path):
    (tmp_path / "test_kernels.py").write_text(SUITE)
    options = [
        "--warpspec-sim",
        "--warpspec-arch",
        "sm_90a",
        "--warpspec-check",
        "order",
        "--warpspec-sample",
        "10",
        "--warpspec-jobs",
        "2",
    ]
    plugin = ["-p", "no:warpspec", "-p", "warpspec.common.pytest_plugin", "-p", "no:cacheprovider"]
    done = run(
        "-m",
        "pytest",
        *plugin,
        *options,
        "--warpspec-sarif",
        "s.sarif",
        "--junitxml",
        "j.xml",
        "-q",
        cwd=tmp_path,
    )
    text = done.stdout + done.stderr
    assert "3 failed, 6 passed, 1 skipped" in text, text
    assert "1 left out, predicted to take over 120 s" in text
    assert "10 of 17 tests chosen" in text  # of test_many, ten are left before they become tests
    assert "the test's process ended with signal 6" in text
    assert "1 skipped: ImportError: triton is not installed" in text
    assert f"gpu_script.py:{line_of('line[thread] =')}" in (tmp_path / "j.xml").read_text()
    rules = [r["ruleId"] for r in json.loads((tmp_path / "s.sarif").read_text())["runs"][0]["results"]]
    assert sorted(rules) == ["accesses-that-nothing-orders", "deadlock"]


@pytest.mark.parametrize("installed", [False, True])
def test_benchmarks_of_triton_run_once(installed, tmp_path, monkeypatch, capsys):
    """`triton.testing`, where triton is not installed and where it is but finds no device."""
    if installed:
        (tmp_path / "triton").mkdir()
        (tmp_path / "triton/__init__.py").touch()
        fails = "def {}(fn, **_): raise RuntimeError('0 active drivers')\n"
        text = "".join(map(fails.format, ("do_bench", "do_bench_cudagraph")))
        (tmp_path / "triton/testing.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
    else:  # where it is installed it is hidden
        found = importlib.machinery.PathFinder.find_spec
        others = lambda name, *rest: None if name == "triton" else found(name, *rest)  # noqa: E731
        monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", others)
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
            monkeypatch.delitem(sys.modules, name)
    calls = []
    # torch remembers for good whether it has found a triton: only the part under test for the false one.
    with triton_testing.replaced() if installed else warpspec.sim.intercept("sm_90a"):
        from triton import testing

        assert testing.do_bench(lambda: calls.append(1), warmup=10, rep=50) >= 0
        assert len(testing.do_bench_cudagraph(lambda: calls.append(1), quantiles=[0.2, 0.8])) == 2
        if not installed:
            axes = dict(
                x_names=["M", "N"], x_vals=[(2, 3), 4], line_arg="by", line_vals=["a"], line_names=["A"]
            )
            bench = testing.Benchmark(**axes, plot_name="plot", args={"scale": 10}, ylabel="ms")
            testing.perf_report(bench)(lambda M, N, by, scale: M * N * scale).run(print_data=True)
    if installed:
        with pytest.raises(RuntimeError, match="active drivers"):
            testing.do_bench(lambda: calls.append(1))
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
            del sys.modules[name]
    else:
        shown = capsys.readouterr().out.splitlines()
        assert [line.rpartition(" ")[2] for line in shown] == ["60", "160"]
    assert len(calls) == 2


@pytest.mark.filterwarnings("ignore")  # of flex_attention, that it is not compiled
def test_functions_that_an_operator_calls_name_the_device():
    from torch.nn.attention.flex_attention import flex_attention

    with warpspec.sim.intercept("sm_90a"):
        inputs = [torch.randn(1, 1, 16, 16, device="cuda", requires_grad=True) for _ in "qkv"]
        bias = torch.arange(16.0, device="cuda")

        def score_mod(score, batch, head, i, j):
            return score + torch.where(bias[j] > torch.tensor(4, device="cuda"), bias[2], 0.0)

        out = flex_attention(*inputs, score_mod=score_mod)
        grads = torch.autograd.grad(out, inputs, bias.expand_as(out))
        q, k, v = inputs
        wanted = ((q @ k.transpose(-1, -2)) / 4 + torch.where(bias > 4, 2.0, 0.0)).softmax(-1) @ v
        assert out.is_cuda and all(grad.is_cuda for grad in grads)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(grads, torch.autograd.grad(wanted, inputs, bias.expand_as(out)))


@cute.kernel
def idle():
    pass


@cute.jit
def idle_everywhere():
    idle().launch(grid=(10000, 1, 1), block=(1024, 1, 1), cooperative=True)


def test_a_cooperative_launch_that_does_not_fit():
    """The launch raises what the DSL raises on a GPU, and a script that catches it has not failed."""
    with (
        warpspec.sim.intercept("sm_90a") as session,
        pytest.raises(DSLCudaRuntimeError, match="10000 CTAs") as caught,
    ):
        idle_everywhere()
    assert caught.value.error_code == cudaError_t.cudaErrorCooperativeLaunchTooLarge
    assert isinstance(caught.value, warpspec.sim.SimError) and session.failed is None


@cute.kernel
def _count(x: cute.Tensor, y: cute.Pointer):
    thread, _, _ = cute.arch.thread_idx()
    more = cute.make_tensor(y, cute.make_layout(32))
    x[thread] += 1
    more[thread] += 2


@cute.jit
def _count_once(x: cute.Tensor, y: cute.Pointer):
    _count(x, y).launch(grid=(1, 1, 1), block=(32, 1, 1))


def test_each_seed_starts_from_the_same_memory():
    """What a call reaches by CuTe tensors and by pointers, which are no torch tensors, is put back before each run."""
    with warpspec.sim.intercept("sm_100a", seeds=3):
        x, y = (torch.zeros(32, dtype=torch.int32, device="cuda") for _ in "xy")
        pointer = make_ptr(cutlass.Int32, y.data_ptr(), cute.AddressSpace.gmem, assumed_align=16)
        _count_once(from_dlpack(x), pointer)
        assert x.eq(1).all() and y.eq(2).all()
