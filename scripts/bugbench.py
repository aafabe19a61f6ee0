"""BugBench: public defects of GPU kernels, each before and after its fix, in the simulator.

    python scripts/bugbench.py DIR                    run all, and print the table of docs/public_defects.md
    python scripts/bugbench.py DIR quack flash        those whose name begins with one of these
    python scripts/bugbench.py DIR --prepare          only make the folders of both versions, for a machine with no git
    python scripts/bugbench.py DIR --seeds 4 --jobs 8    the first four schedules of each version, eight at once

DIR keeps the two versions of every case and, in DIR/clones, the repositories, which are cloned if they are missing.
Each case runs under `python -m warpspec.sim run --check order`, with the fix and with it taken back
(scripts/shared/bugbench_cases.py). A row says what found the defect, at which lines (without what the fixed version
says, too), and what the fixed version says. Nothing of these repositories is part of this one. They need packages of
their own (einops, ...), and CUDA C++ kernels need nvcc.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "shared"))
from bugbench_cases import CASES, Case, Edit  # noqa: E402

FIXED, DEFECTIVE = "fixed", "defective"
NOTHING, WRONG_RESULT = "nothing", "wrong result"
WARNING = re.compile(
    r"warning: (.+?) at PTX line \d+, which hardware tolerates\n(.*?)(?=\nwarning: |\nmemory order|\Z)",
    re.DOTALL,
)
CRASH = re.compile(r"^\.?Fatal Python error: (.+)", re.MULTILINE)
FAULTS = (
    "TmemFault",
    "Deadlock",
    "BarrierFault",
    "MemoryFault",
    "RegisterHazard",
    "BadDescriptor",
    "SimError",
)
LINE = re.compile(r"([\w.]+\.(?:py|cuh?|cpp|hpp|h)):(\d+)|(PTX line \d+)")
WRONG = re.compile(r"AssertionError|^E +assert", re.MULTILINE)


def git(repository: Path, *arguments: str) -> str:
    """The output of a git command in a clone."""
    return subprocess.run(
        ["git", "-C", repository, *arguments], check=True, capture_output=True, text=True, errors="replace"
    ).stdout


def clone_of(name: str, folder: Path) -> Path:
    """The clone of a repository (owner/name), made if it is missing."""
    path = (folder / "clones" / name.split("/")[1]).resolve()
    if not path.exists():
        url = f"https://github.com/{name}"
        subprocess.run(["git", "clone", "-q", "--no-checkout", "--filter=blob:none", url, path], check=True)
    return path


def check_out(case: Case, clone: Path, folder: Path, defective: bool) -> None:
    """Make the files of one version of a case."""
    copy = folder.with_suffix(".part")
    shutil.rmtree(copy, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", "-n", "--shared", clone, copy], check=True, capture_output=True)
    git(copy, "sparse-checkout", "set", "--no-cone", *(f"/{name}" for name in case.files))
    git(copy, "checkout", "-q", "--detach", case.base)
    edits = case.edits if defective else case.mends
    for edit in edits:
        replace(copy, edit, case.name)
    if defective and not case.edits and not case.mends:
        change = git(copy, "diff", f"{case.fix}~", case.fix, "--", *case.files)
        command = ["git", "-C", copy, "apply", "-R", "--3way", "-"]
        subprocess.run(command, input=change, text=True, check=True)
    for edit in case.also:
        replace(copy, edit, case.name)
    shutil.rmtree(copy / ".git")
    if case.package:
        # The package alone, without the __init__ of the one it lies in, which wants a compiled extension.
        inner = copy / "packages" / Path(case.package).parent
        inner.mkdir(parents=True)
        (inner / Path(case.package).name).symlink_to(os.path.relpath(copy / case.package, inner))
    copy.rename(folder)


def replace(folder: Path, edit: Edit, name: str) -> None:
    """Apply an edit."""
    file, old, new = edit
    text = (folder / file).read_text()
    if old not in text:
        raise RuntimeError(f"{name}: {file} has no {old!r}")
    (folder / file).write_text(text.replace(old, new))


def prepare(case: Case, folder: Path) -> dict[str, Path]:
    """Both versions of a case, made if they are missing, and what else it imports."""
    found = {}
    for version in (FIXED, DEFECTIVE):
        path = found[version] = folder / case.name / version
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            check_out(case, clone_of(case.repository, folder), path, version == DEFECTIVE)
    for need in NEEDED:
        path = folder / "packages" / need.name
        if need.name in case.needs and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            check_out(need, clone_of(need.repository, folder), path, False)
    return found


NEEDED = (
    Case("quack", "Dao-AILab/quack", "", "", "", base="c8ec317", files=("quack",)),
    Case("cutlass", "NVIDIA/cutlass", "", "", "", base="7107b05", files=("include",)),
)  # fmt: skip


def run(case: Case, version: Path, folder: Path, seed: int, limit: float) -> list[str]:
    """What one run says, a line each finding."""
    name, _, test = case.script.partition("::")
    script = HERE / "bugbench" / name
    script = script if script.exists() else version / name
    arguments = case.arguments.split()
    if test:
        script, arguments = HERE / "bugbench" / "run_test.py", [f"{script}::{test}"]
    if case.kernel:
        compile_kernel(case, version, folder)
        arguments = [str(version / "kernel.ptx"), *arguments]
    code = version / "packages" if case.package else version
    paths = [HERE.parent / "src", code, *(folder / "packages" / name for name in case.needs)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
    }
    command = [
        sys.executable, "-m", "warpspec.sim", "run", "--arch", case.arch, "--seed", str(seed), "--check", "order",
        script, *arguments,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            env=environment,
            timeout=limit,
            cwd=version,
        )
    except subprocess.TimeoutExpired:
        return [f"over {limit:.0f} s"]
    output = done.stderr + done.stdout  # what was found stands at the end
    (folder / case.name / f"{version.name}-{seed}.log").write_text(output)
    return verdict(output, done.returncode)


def compile_kernel(case: Case, version: Path, folder: Path) -> None:
    """Compile a case's CUDA C++ file to kernel.ptx."""
    ptx, source = version / "kernel.ptx", HERE / "bugbench" / case.kernel
    if ptx.exists():
        return
    part = version / f"kernel.{threading.get_ident()}.ptx"
    include = [HERE / "bugbench/include", *(version / path for path in case.include)]
    include += [folder / "packages" / need / "include" for need in case.needs]
    options = ["-std=c++20", f"-arch={case.arch}", "-lineinfo", "-ptx", "--expt-relaxed-constexpr", "-w"]
    command = ["nvcc", *options, *(f"-I{path}" for path in include), "-o", part]
    subprocess.run([*command, source if source.exists() else version / case.kernel], check=True)
    part.rename(ptx)


def verdict(output: str, code: int) -> list[str]:
    """What a run's output reports, with the lines of source it names; what is by the text alone last."""
    for kind in FAULTS:
        at = output.find(f"errors.{kind}: ")
        if at >= 0:
            return [f"{kind} at {_lines(output[at:])}"]
    crash = CRASH.search(output)
    if crash:  # of the host's part of the kernel's code
        return [f"the process ends: {crash[1]} at {_lines(output[crash.start() :], not_ours=True)}"]
    found = output[max(output.rfind("memory order"), 0) :].partition("\nwarning: ")[0]
    said = [WRONG_RESULT] if code and WRONG.search(output) else []
    said += [
        f"order: {block.partition(':')[0]} at {_lines(block)}"
        for block in re.split(r"\n  (?=\S)", found)[1:]
        if LINE.search(block) and not block.startswith("by the ISA's text")
    ]
    said += [f"warning: {match[1]} at {_lines(match[2])}" for match in WARNING.finditer(output)]
    if "by the ISA's text" in found:
        said.append("order: fences by the ISA's text alone")
    if said or code == 0:
        return list(dict.fromkeys(said))
    lines = [line for line in output.strip().splitlines() if line.strip()]
    return [f"stops: {lines[-1].strip()[:80] if lines else 'no output'}"]


def _lines(text: str, not_ours: bool = False) -> str:
    """The first two lines of source that a text names; lines of PTX where it names no other. not_ours: of a Python
    traceback, without the simulator's."""
    if not_ours:
        text = re.sub(r'File "(?!.*/warpspec/sim/)([^"]+)", line (\d+)', r"\1:\2", text)
    found = LINE.findall(text)
    named = [f"`{name}:{line}`" for name, line, _ in found if name] or [ptx for _, _, ptx in found]
    return " and ".join(list(dict.fromkeys(named))[:2]) or "no line"


def source_of(text: str, version: Path) -> str:
    """A finding with the text of its lines instead of their numbers, which the fix moves."""

    def line(match: re.Match) -> str:
        files = [path for path in version.rglob(match[1]) if path.is_file()]
        lines = files[0].read_text(errors="replace").splitlines() if files else []
        number = int(match[2])
        return f"{match[1]} {lines[number - 1].strip()}" if number <= len(lines) else match[1]

    return re.sub(r"PTX line \d+", "PTX", re.sub(r"([\w.]+\.\w+):(\d+)", line, text))


def shown(texts: list[str]) -> str:
    """The first finding of a run, after a wrong result if there is one."""
    return " and ".join(texts[: 1 + (texts[0] == WRONG_RESULT)])


def row(case: Case, versions: dict[str, Path], said: dict[str, list[list[str]]]) -> str:
    """A case's row of the table. The defective version's findings are those that the fixed one has not."""
    known = {source_of(text, versions[FIXED]) for texts in said[FIXED] for text in texts}
    new = [
        [text for text in texts if source_of(text, versions[DEFECTIVE]) not in known]
        for texts in said[DEFECTIVE]
    ]
    found = "; ".join(f"seed {seed}: {shown(texts)}" for seed, texts in enumerate(new) if texts)
    fixed = dict.fromkeys(text for texts in said[FIXED] for text in texts if not text.startswith("warning"))
    stays = f"{len(fixed)} stay{'s' if len(fixed) == 1 else ''}: {next(iter(fixed))}" if fixed else NOTHING
    cells = [case.name, case.repository, case.fix, case.kind, found or NOTHING, stays]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", help="beginnings of their names; all without")
    parser.add_argument("--seeds", type=int, default=2, help="schedules of each version")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--limit", type=float, default=900, help="seconds of one run")
    parser.add_argument("--prepare", action="store_true", help="make the folders, run nothing")
    parser.add_argument(
        "--json", type=Path, help="keep what the runs say; runs that it has are not run again"
    )
    options = parser.parse_args()
    folder = options.folder.resolve()
    chosen = [
        case
        for case in CASES
        if not options.cases or any(case.name.startswith(name) for name in options.cases)
    ]
    versions = {case.name: prepare(case, folder) for case in chosen}
    if options.prepare:
        return
    kept = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}

    def one(job: tuple[Case, str, int]) -> None:
        case, version, seed = job
        key = f"{case.name} {version} {seed}"
        if key not in kept:
            kept[key] = run(case, versions[case.name][version], folder, seed, options.limit)
            print(f"{key}: {'; '.join(kept[key]) or NOTHING}", file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps(kept, indent=1))

    jobs = [
        (case, version, seed)
        for seed in range(options.seeds)
        for case in chosen
        for version in (DEFECTIVE, FIXED)
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, jobs))
    print(
        "| case | repository | fix | kind | with the defect | fixed |\n| --- | --- | --- | --- | --- | --- |"
    )
    for case in chosen:
        said = {
            version: [kept[f"{case.name} {version} {seed}"] for seed in range(options.seeds)]
            for version in (FIXED, DEFECTIVE)
        }
        print(row(case, versions[case.name], said), flush=True)


if __name__ == "__main__":
    main()
