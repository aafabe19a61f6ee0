"""Runs public scripts for GPUs unchanged in the simulator, each in a process of its own, and makes a table of results.

python scripts/run_public_scripts.py CUTLASS [PATTERN ...] [--json FILE] [--seconds N] [--jobs N]

CUTLASS: a checkout of NVIDIA/cutlass; its examples/python/CuTeDSL are run. A script is right if it ends without an
exception: nearly all of them compare with torch. Nothing in them is changed; sizes are given on their command lines.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ONCE = "--warmup_iterations 0 --iterations 1"
SMALL = f"--mnkl 256,256,128,1 {ONCE}"
# Arguments by pattern of the path below CuTeDSL; the last pattern that fits counts. None: not a script.
ARGUMENTS: dict[str, str | None] = {
    "*": "",
    "cute/ampere/kernel/attention/flash_attention_v2.py":
        f"--batch_size 1 --seqlen_q 128 --seqlen_k 128 --num_head 2 {ONCE}",
    "cute/ampere/kernel/attention/hstu_attention.py": "--batch_size 1 --seqlen_q 128 --seqlen_kv 128 --num_head 1",
    "cute/ampere/kernel/dense_gemm/sgemm.py": f"--mnk 256,128,64 {ONCE}",
    "cute/ampere/kernel/dense_gemm/tensorop_gemm.py": f"--mnkl 128,128,64,1 {ONCE}",
    "cute/ampere/kernel/elementwise/*": f"--M 128 --N 256 {ONCE}",
    "cute/ampere/tutorial/elementwise_add_autotune.py": f"--M 128 --N 256 {ONCE}",
    "cute/blackwell/kernel/*gemm*/*": SMALL,
    "cute/blackwell/efc/*dense_gemm*": SMALL,
    "cute/blackwell/kernel/blockscaled*/*": f"--mnkl 256,256,256,1 {ONCE}",
    "cute/blackwell/kernel/*grouped*/*": ONCE,
    "cute/blackwell/kernel/grouped_gemm/*": "--num_groups 2 --problem_sizes_mnkl (128,128,64,1),(128,256,64,1) " + ONCE,
    "cute/blackwell/kernel/blockscaled_grouped_gemm/*":
        "--num_groups 2 --problem_sizes_mnkl (128,128,256,1),(128,256,256,1) " + ONCE,
    "cute/blackwell/kernel/attention/fmha/fmha.py": f"--q_shape 1,256,1,128 --k_shape 1,256,1,128 {ONCE}",
    "cute/blackwell/kernel/attention/fmha/fmha_bwd.py": f"--s_q 256 --s_k 256 --h_q 1 --h_k 1 --b 1 {ONCE}",
    "cute/blackwell/kernel/attention/mla/*": f"--batch_size 1 --seq_len_k 256 --seq_len_q 1 --num_heads 128 {ONCE}",
    "cute/blackwell/kernel/attention/mamba2_ssd/mamba2_ssd.py": f"--gbehcdln 1,2,1,2,8,64,128,128 {ONCE}",
    "cute/blackwell/kernel/attention/mixed_input_fmha/*prefill*": f"--q_shape 1,1,128,256 --k_shape 1,1,256,256 {ONCE}",
    "cute/blackwell/kernel/attention/mixed_input_fmha/*d512*": f"--q_shape 1,1,128,512 --k_shape 1,1,256,512 {ONCE}",
    "cute/blackwell/kernel/attention/mixed_input_fmha/*decode*": f"--batch 1 --seqlen 512 {ONCE}",
    "cute/blackwell/kernel/rmsnorm/rmsnorm.py": f"--M 4 --N 1024 {ONCE}",
    "cute/blackwell/tutorial/tutorial_gemm/fp16_gemm_*": "--mnk 256,256,128",
    "cute/blackwell/tutorial/tutorial_gemm/nvfp4_gemm_*": "--mnkl 256,256,256,1",
    "cute/blackwell/tutorial/tutorial_tma/*": "--M 256 --N 256",
    "cute/blackwell_geforce/*": SMALL,
    "cute/hopper/kernel/dense_gemm/*": SMALL,
    "cute/hopper/kernel/grouped_gemm/*": "--num_groups 2 --problem_sizes_mnkl (128,128,64,1),(128,256,64,1) " + ONCE,
    "cute/hopper/kernel/attention/fmha.py": f"--q_shape 1,128,1,128 --k_shape 1,256,1,128 {ONCE}",
    "cute/hopper/kernel/cta_norm/*": f"--M 4 --N 1024 {ONCE}",
    "cute_ext/blackwell/dense*": "--mnkl 256,256,128,1",
    "cute_ext/blackwell/dense_block_scaled_gemm.py": "--mnkl 256,256,256,1",
    "dsl_tutorials/fp16_gemm_4_iket.py": "--mnk 256,256,128",
    "dsl_tutorials/programmatic_dependent_launch.py": f"--M 64 --N 128 {ONCE}",
    "experimental/task_scheduling/*gemm*": "--mnk 256,256,128",
    "experimental/task_scheduling/*nvfp4*": "--mnkl 256,256,256,1",
    "*/__init__.py": None, "helpers/*": None, "utils/*": None, "*helpers.py": None, "*_utils.py": None,
    "cute/blackwell/tutorial/tutorial_gemm/utils.py": None, "cute/blackwell/efc/common_*": None,
    "cute/blackwell/kernel/moe/moe_*": None, "*/mamba2_ssd_reference.py": None, "*/mamba2_ssd_tile_scheduler.py": None,
    "*/blockscaled_gemm_dispatch.py": None, "cute/blackwell/kernel/reduce/reduce.py": None,
    "*/bench_*": None, "*setup.py": None,
}  # fmt: skip
ARCHITECTURES = {"cute/hopper/*": "sm_90a", "cute/blackwell_geforce/*": "sm_120a", "*sm103_*": "sm_103a"}
RIGHT, WRONG, STOPS = "right", "wrong", "stops"
TAIL = 4000  # characters of a script's output that are kept


@dataclass
class Result:
    """What came of one script. why: the exception, one line."""

    path: str
    arch: str
    verdict: str
    why: str
    seconds: float
    launches: int
    output: str = ""


def fitting(table: dict, path: str) -> object:
    """The value of the last pattern that fits a path."""
    return next((value for pattern, value in reversed(table.items()) if fnmatch.fnmatch(path, pattern)), None)


def child(script: Path, arguments: list[str], arch: str, check: str | None, report: Path) -> None:
    """Run one script, in a forked process, and write what came of it."""
    from warpspec.sim import SimError, intercept
    from warpspec.sim.pretend.script import run_script

    verdict, why, session = RIGHT, "", None
    os.chdir(report.parent)
    try:
        with intercept(arch, check=check) as session:
            run_script(script, arguments)
    except SystemExit as error:
        if error.code not in (0, None):
            verdict, why = STOPS, f"exit {error.code}"
    except AssertionError as error:
        traceback.print_exc()
        verdict, why = WRONG, (str(error).strip().splitlines() or ["AssertionError"])[0]
    except BaseException as error:
        traceback.print_exc()
        found = isinstance(error, SimError)
        line = next((line for line in str(error).splitlines() if line.strip()), "")
        verdict, why = STOPS, f"{type(error).__name__}: {line}"
        if found and error.where is not None and error.where.ptx_text:
            why += f" ({error.where.ptx_text.split()[0]})"
    launches = len(session.report.launches) if session else 0
    findings = len(session.findings) if session else 0
    if findings:
        why += f" {findings} findings"
    report.write_text(json.dumps(dict(verdict=verdict, why=why[:300], launches=launches)))


def run(
    script: Path, name: str, arguments: list[str], arch: str, check: str | None, seconds: float
) -> Result:
    """Fork, run a script, wait for it."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder) / "report.json", Path(folder) / "output"
        pid = os.fork()
        if not pid:
            try:
                os.setsid()
                handle = os.open(output, os.O_CREAT | os.O_WRONLY)
                os.dup2(handle, 1)
                os.dup2(handle, 2)
                child(script, arguments, arch, check, report)
                sys.stdout.flush()
            finally:
                os._exit(0)
        while time.monotonic() - start < seconds and not os.waitpid(pid, os.WNOHANG)[0]:
            time.sleep(0.2)
        else_killed = time.monotonic() - start >= seconds
        if else_killed:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        text = output.read_text(errors="replace")[-TAIL:] if output.exists() else ""
        taken = time.monotonic() - start
        if report.exists():
            said = json.loads(report.read_text())
            if said["why"].startswith("exit "):  # the script itself says why
                said["why"] += f": {(text.strip().splitlines() or [''])[-1]}"
            return Result(name, arch, seconds=round(taken, 1), output=text, **said)
        why = f"over {seconds:.0f} s" if else_killed else "the process died"
        return Result(name, arch, STOPS, why, round(taken, 1), 0, text)


def table(results: list[Result]) -> str:
    """Counts by folder, and a row for each script that is not right, as Markdown."""
    folders: dict[str, list[Result]] = {}
    for result in results:
        parts = result.path.split("/")
        folders.setdefault("/".join(parts[:2]), []).append(result)
    lines = ["| folder | scripts | right | wrong | stop |", "| --- | --- | --- | --- | --- |"]
    for folder, members in [*sorted(folders.items()), ("all", results)]:
        counts = [sum(r.verdict == kind for r in members) for kind in (RIGHT, WRONG, STOPS)]
        lines.append(f"| {folder} | {len(members)} | {' | '.join(map(str, counts))} |")
    lines += ["", "| script | | why |", "| --- | --- | --- |"]
    for result in results:
        if result.verdict != RIGHT:
            lines.append(f"| {result.path} | {result.verdict} | {result.why.replace('|', '/')} |")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("cutlass", type=Path)
    options.add_argument("patterns", nargs="*", default=["*"], help="of paths below examples/python/CuTeDSL")
    options.add_argument("--json", type=Path, help="keep results here; scripts that it has are not run again")
    options.add_argument("--seconds", type=float, default=300, help="the most a script may take")
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--check", choices=["order"])
    options.add_argument(
        "--again", action="store_true", help="run those again that are not right in the --json file"
    )
    chosen = options.parse_args()
    root = chosen.cutlass / "examples/python/CuTeDSL"
    import torch  # noqa: F401  (before the forks, which share it)

    import warpspec.sim  # noqa: F401

    sys.path.insert(0, str(root))
    done = {}
    if chosen.json and chosen.json.exists():
        done = {row["path"]: Result(**row) for row in json.loads(chosen.json.read_text())}
    if chosen.again:
        done = {path: result for path, result in done.items() if result.verdict == RIGHT}

    def one(path: str) -> None:
        arguments = fitting(ARGUMENTS, path)
        if arguments is None or path in done or not any(fnmatch.fnmatch(path, p) for p in chosen.patterns):
            return
        arch = fitting(ARCHITECTURES, path) or "sm_100a"
        result = run(root / path, path, arguments.split(), arch, chosen.check, chosen.seconds)
        done[path] = result
        print(f"{result.verdict:6} {result.seconds:6.1f} s {path} {result.why}", flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps([asdict(r) for r in done.values()], indent=1))

    paths = sorted(str(path.relative_to(root)) for path in root.rglob("*.py"))
    with ThreadPoolExecutor(chosen.jobs) as pool:
        list(pool.map(one, paths))
    print(table(sorted(done.values(), key=lambda r: r.path)))


if __name__ == "__main__":
    main()
