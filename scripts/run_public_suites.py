"""Runs a seeded sample of public test suites in the simulator, and makes a table of results.

    python scripts/run_public_suites.py DIR                       300 tests, as many processes as there are cores
    python scripts/run_public_suites.py DIR --jobs 14 --seconds 200    stop after that, and go on at the next call
    python scripts/run_public_suites.py DIR --table               the table of what has run

DIR keeps clones of the suites' repositories, made if they are missing, and results. Each suite is tested as it is at
the commit below, with its own package. Tests are drawn in turn from every test function of a suite
(`--warpspec-sample`), from those whose predicted cost is within the limit. What a suite itself skips on the target
counts for nothing; of the others, a test is right if it passes. The rest is listed with its reason.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "shared"))
OURS = "warpspec: "  # begins the plug-in's reasons to skip a test
WHY = 160  # characters of a reason that are printed


@dataclass(frozen=True)
class Repository:
    """A repository at a commit. package: the one that is tested, if the folder it lies in is no package that can be
    imported; files: what is checked out."""

    name: str
    commit: str
    files: tuple[str, ...]
    package: str = ""

    @property
    def folder(self) -> str:
        return self.name.split("/")[1]


@dataclass(frozen=True)
class Suite:
    """Tests of a repository on a target. draw: how many are drawn, some of which the suite itself skips."""

    repository: Repository
    tests: str
    arch: str
    draw: int

    @property
    def name(self) -> str:
        return f"{self.repository.folder}-{self.arch}"


FLASH = Repository(
    "Dao-AILab/flash-attention", "0251105a", ("/flash_attn/cute", "/tests/cute"), "flash_attn/cute"
)
QUACK = Repository("Dao-AILab/quack", "c8ec317", ("/quack", "/tests", "/pyproject.toml"))
SUITES = (
    Suite(FLASH, "tests/cute", "sm_100a", 110),
    Suite(FLASH, "tests/cute", "sm_90a", 50),
    Suite(QUACK, "tests", "sm_100a", 100),
    Suite(QUACK, "tests", "sm_90a", 100),
)


def clone(repository: Repository, folder: Path) -> Path:
    """The repository's files in a folder, cloned if they are missing; returns the path to import from."""
    if not folder.exists():
        url = f"https://github.com/{repository.name}"
        subprocess.run(["git", "clone", "-q", "--no-checkout", "--filter=blob:none", url, folder], check=True)
        git = ["git", "-C", str(folder)]
        subprocess.run([*git, "sparse-checkout", "set", "--no-cone", *repository.files], check=True)
        subprocess.run([*git, "checkout", "-q", "--detach", repository.commit], check=True)
    if not repository.package:
        return folder
    # The package alone, without the __init__ of the one it lies in, which wants a compiled extension.
    inner = folder / "packages" / Path(repository.package).parent
    inner.mkdir(parents=True, exist_ok=True)
    link = inner / Path(repository.package).name
    if not link.is_symlink():
        link.symlink_to(os.path.relpath(folder / repository.package, inner))
    return folder / "packages"


def run(suite: Suite, paths: list[Path], options: argparse.Namespace, seconds: float) -> None:
    """Run a suite's tests that have no result yet, on several processes, for this many seconds."""
    folder = options.folder / suite.repository.folder
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [*map(str, [HERE.parent / "src", *paths, HERE / "shared"]), os.environ.get("PYTHONPATH", "")]),
        "SUITE_RESULTS": str(results_of(suite, options)),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    environment.pop("SUITE_RESULTS_PARENT", None)
    known = any(point.name == "warpspec" for point in metadata.entry_points(group="pytest11"))
    plugin = [] if known else ["-p", "warpspec.common.pytest_plugin"]  # a checkout that is not installed
    command = [
        sys.executable, "-m", "pytest", "-p", "suite_results", "-p", "no:cacheprovider", "-W", "ignore", "-q",
        "--tb=short", "--continue-on-collection-errors",
        "--warpspec-sim", "--warpspec-arch", suite.arch, "--warpspec-seed", str(options.seed),
        "--warpspec-sample", str(suite.draw), "--warpspec-jobs", str(options.jobs),
        "--warpspec-limit", str(options.limit), suite.tests, *plugin,
    ]  # fmt: skip
    log = options.folder / f"{suite.name}.log"
    with (
        log.open("a") as file,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest ends its workers
            process.wait()


def results_of(suite: Suite, options: argparse.Namespace) -> Path:
    """The file of a suite's results."""
    return (options.folder / f"{suite.name}-seed{options.seed}.jsonl").resolve()


def reason(row: dict) -> str:
    """Why a test did not pass, one line."""
    lines = [line.strip() for line in row["why"].splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("E ")]
    return (errors or lines or ["?"])[0].replace("|", "/")[:WHY]


def table(rows: dict[str, list[dict]]) -> str:
    """Counts by suite, and a row for each test that did not pass, as Markdown."""
    lines = [
        "| suite | drawn | skipped by the suite | run | of these launch kernels | pass | fail | cannot run here |"
    ]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    sums: Counter[str] = Counter()
    rest = []
    for suite, results in rows.items():
        kinds = Counter(kind(row) for row in results)
        kinds["drawn"], kinds["run"] = len(results), len(results) - kinds["suite"]
        kinds["launch"] = sum(kind(row) != "suite" and row["launches"] > 0 for row in results)
        sums += kinds
        lines.append(_row(suite, kinds))
        rest += [(suite, row) for row in results if kind(row) in ("fail", "cannot")]
    lines += [_row("all", sums), "", "| suite | test | | why |", "| --- | --- | --- | --- |"]
    lines += [f"| {suite} | `{row['test']}` | {kind(row)} | {reason(row)} |" for suite, row in rest]
    return "\n".join(lines)


def _row(name: str, kinds: Counter[str]) -> str:
    share = f" ({kinds['pass'] / kinds['run']:.1%})" if kinds["run"] else ""
    cells = [
        kinds["drawn"],
        kinds["suite"],
        kinds["run"],
        kinds["launch"],
        f"{kinds['pass']}{share}",
        kinds["fail"],
        kinds["cannot"],
    ]
    return f"| {name} | {' | '.join(map(str, cells))} |"


def kind(row: dict) -> str:
    """pass, fail, suite (skipped by the suite) or cannot (skipped by the plug-in)."""
    if row["outcome"] != "skipped":
        return "pass" if row["outcome"] == "passed" else "fail"
    return "cannot" if OURS in row["why"] else "suite"


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("folder", type=Path)
    options.add_argument("suites", nargs="*", help="beginnings of their names; all without")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--jobs", type=int, default=os.cpu_count())
    options.add_argument("--limit", type=float, default=120, help="CPU seconds that a test may take")
    options.add_argument(
        "--seconds", type=float, default=86400, help="stop after this many, all suites together"
    )
    options.add_argument("--table", action="store_true", help="run nothing")
    chosen = options.parse_args()
    chosen.folder = chosen.folder.resolve()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    picked = [
        suite for suite in SUITES
        if not chosen.suites or any(suite.name.startswith(name) for name in chosen.suites)
    ]  # fmt: skip
    os.environ["SUITE_RESULTS"] = ""
    import suite_results

    if not chosen.table:
        paths = [clone(repository, chosen.folder / repository.folder) for repository in (FLASH, QUACK)]
        for suite in picked:
            run(suite, paths, chosen, chosen.seconds - (time.monotonic() - start))
    rows = {suite.name: list(suite_results.read(results_of(suite, chosen)).values()) for suite in picked}
    print(table({name: results for name, results in rows.items() if results}))


if __name__ == "__main__":
    main()
