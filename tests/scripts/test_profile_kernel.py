"""profile_kernel: what it makes of ncu's answers, recorded on an H200 (ncu 2025.3.1), and the command it prints."""

import shlex
import sys
from pathlib import Path

import profile_kernel
import pytest

RECORDED = Path(__file__).parent / "ncu"  # what `profile_kernel.py OP SIZE... --keep FILE` wrote


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.csv").read_text()


def rows(text: str) -> dict[str, str]:
    """What stands after each label of a table, the first where several have it."""
    found = {}
    for line in text.splitlines():
        label, _, much = line.strip().partition("  ")
        found.setdefault(label, much.strip())
    return found


def test_a_prefill_is_bound_by_the_tensor_cores(capsys):
    assert (
        profile_kernel.main(["prefill", "2", "32", "8192", "128", "--csv", str(RECORDED / "prefill.csv")])
        == 0
    )
    table = rows(capsys.readouterr().out)
    assert table["time"] == "1641 us" and table["SM clock"] == "1.582 GHz"
    assert table["tensor pipe"] == "79.53 %" and table["device memory"] == "27.97 %"
    assert table["occupancy, possible"] == "18.75 %" and table["occupancy, achieved"] == "14.06 %"
    assert table["registers a thread"] == "168" and table["CTAs"] == "132" and table["spills"] == "none"
    assert table["warps wait for"].startswith("wait 34%, long_scoreboard 13%")
    # 4 B H S S D / 2 FLOPs in 1641 us; 4096 FLOPs a clock of 132 SMs at 1.582 GHz
    assert table["work"] == "670 of 855.5 TFLOP/s"
    assert table["roofline"] == "1285 us (tensor cores): 78.3% reached"


def test_decoding_is_bound_by_memory(capsys):
    arguments = ["decode", "32", "64", "8", "8192", "128", "--csv", str(RECORDED / "decode.csv")]
    assert profile_kernel.main(arguments) == 0
    table = rows(capsys.readouterr().out)
    assert table["tensor pipe"] == "30.38 %" and table["device memory"] == "92.21 %"
    assert table["must cross memory"] == "4.428 of 4.811 TB/s"
    assert table["roofline"].endswith("(device memory): 92% reached")


def test_several_kernels_are_added_up():
    text = recorded("decode")
    last = text.rstrip().splitlines()[-1]
    one, two = (profile_kernel.kernels(t) for t in (text, f"{text.rstrip()}\n{last}\n"))
    assert len(one) == 1 and len(two) == 2
    (_, once), (_, twice) = (profile_kernel.roofline_rows(found, 0.0, 1e9)[0] for found in (one, two))
    assert (once, twice) == ("242.8 us", "485.5 us")


def test_what_ncu_did_not_measure_is_left_open():
    kernel = {"Kernel Name": "k", "Grid Size": "", "Block Size": "", profile_kernel.TIME: "2,000", "x": "n/a"}
    table = dict(profile_kernel.kernel_rows(kernel))
    assert table["time"] == "2 us" and table["tensor pipe"] == "-"
    assert table["spills"] == "-" and table["warps wait for"] == "-"
    assert profile_kernel.value(kernel, "x") is None
    assert profile_kernel.roofline_rows([kernel], 1e9, 1e9) == [("all kernels", "2 us")]


def test_spills_are_shown():
    (kernel,) = profile_kernel.kernels(recorded("prefill"))
    kernel |= {profile_kernel.LOCAL[0]: "1,024", profile_kernel.LOCAL[1]: "6"}
    assert dict(profile_kernel.kernel_rows(kernel))["spills"] == "1030 local loads and stores"


def test_stall_reasons_are_parts_of_a_whole():
    (kernel,) = profile_kernel.kernels(recorded("decode"))
    parts = profile_kernel.stalls(kernel)
    assert parts[0][0] == "long_scoreboard" and parts == sorted(parts, key=lambda part: -part[1])
    issuing = profile_kernel.value(kernel, profile_kernel.STALLED.format(profile_kernel.SELECTED))
    total = sum(
        profile_kernel.value(kernel, profile_kernel.STALLED.format(name)) for name in profile_kernel.STALLS
    )
    assert sum(part for _, part in parts) + 100 * issuing / total == pytest.approx(100)


@pytest.mark.parametrize("text", ["", "==PROF== Disconnected\n", '"ID","Kernel Name"\n"",""\n'])
def test_an_answer_without_kernels_is_refused(text):
    with pytest.raises(ValueError, match="no kernel was profiled"):
        profile_kernel.kernels(text)


def test_the_printed_command_profiles_one_window(capsys):
    assert (
        profile_kernel.main(["paged", "2", "8", "1", "300", "64", "16", "--print", "--dtype", "float16"]) == 0
    )
    words = shlex.split(capsys.readouterr().out)
    assert words[0] == "ncu"
    for option, argument in (
        ("--profile-from-start", "off"), ("--clock-control", "none"), ("--nvtx-include", "warpspec/"), ("--page", "raw")
    ):  # fmt: skip
        assert words[words.index(option) + 1] == argument
    child = words[words.index(profile_kernel.__file__) + 1 :]
    options = profile_kernel.parse(child)
    assert options.child and (options.op, options.sizes) == ("paged", [2, 8, 1, 300, 64, 16])
    assert options.dtype == "float16"
    assert profile_kernel.main(["softmax", "4", "8", "--tool", "nsys", "--print"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:2] == ["nsys", "profile"] and words[words.index("--capture-range") + 1] == "cudaProfilerApi"


def test_the_folder_of_nsys_report_is_made(monkeypatch, tmp_path):
    """nsys does not make it, and a fresh clone has none."""
    (tmp_path / "nsys").write_text(f"#!{sys.executable}\nimport os, sys\n"
        "sys.exit(not os.path.isdir(os.path.dirname(sys.argv[sys.argv.index('--output') + 1])))")  # fmt: skip
    (tmp_path / "nsys").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(profile_kernel, "NSYS_REPORT", tmp_path / "out" / "profile")
    assert profile_kernel.main(["softmax", "4", "8", "--tool", "nsys"]) == 0


@pytest.mark.parametrize("tool", ["ncu", "nsys"])
def test_a_missing_tool_is_named_with_how_to_get_it(tool, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert profile_kernel.main(["topk", "4", "1000", "8", "--tool", tool]) == 2
    said = capsys.readouterr()
    assert f"{tool} is not on the PATH" in said.err and "apt-get install" in said.err
    assert said.out.startswith(tool)  # the command all the same


@pytest.mark.parametrize("arguments", [["softmax", "4"], ["softmax", "4", "0"], ["gemm", "4", "4"]])
def test_bad_sizes_end_with_what_is_expected(arguments, capsys):
    with pytest.raises(SystemExit):
        profile_kernel.main(arguments)
    assert "ROWS LENGTH" in capsys.readouterr().err or arguments[0] == "gemm"


def test_work_of_each_operation():
    work = {name: operation.work for name, operation in profile_kernel.OPERATIONS.items()}
    assert work["prefill"](1, 2, 4, 64, full=True, element=2) == (4 * 2 * 16 * 64, 4 * 2 * 4 * 64 * 2)
    assert work["prefill"](1, 2, 4, 64, full=False, element=2)[0] == 2 * 2 * 16 * 64
    # two rows of 100 keys, 8 heads over 2: K and V once, Q and O once
    assert work["decode"](2, 8, 2, 100, 64, full=False, element=2) == (
        4 * 2 * 8 * 100 * 64,
        2 * 2 * 64 * 208 * 2,
    )
    assert work["shared"](1, 3, 5, 7, full=False, element=2) == (4 * 3 * 35 * 512, 512 * (7 + 30) * 2)
    assert work["softmax"](3, 5, full=False, element=4) == (0.0, 120)
    assert work["topk"](3, 5, 2, full=False, element=4) == (0.0, 60 + 48)
