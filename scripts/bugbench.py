"""BugBench: public defects of GPU kernels, each before and after its fix, in the simulator.

    python scripts/bugbench.py                                    the list, with what can be run here
    python scripts/bugbench.py --checkouts DIR                    run the cases whose repository is in DIR
    python scripts/bugbench.py --checkouts DIR quack flash        those whose name begins with one of these
    python scripts/bugbench.py --checkouts DIR --seeds 4          the first four schedules of each

DIR holds clones, named as the last part of the repository's name (flash-attention, quack, cutlass, ...). A case
runs twice under `python -m warpspec.sim run --check order`: as the repository is, and with the fix taken back (its own
change reversed, where what came later lets it). Prints a row of docs/public_defects.md for each: what found the defect,
at which lines (what the fixed version does not say), and what the fixed version says. Nothing of these repositories is
part of this one. They need their own packages (einops, ...) on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT = 900  # seconds of one run
WARNING = re.compile(
    r"warning: (.+?) at PTX line \d+, which hardware tolerates\n(.*?)(?=\nwarning: |\nmemory order|\Z)",
    re.DOTALL,
)
LINE = re.compile(r"([\w.]+\.(?:py|cuh?|cpp)):(\d+)")


@dataclass(frozen=True)
class Case:
    """A defect.

    repository: owner/name. fix: the commit that mends it. base: the version that runs, and that the fix is taken back
    from: by reversing the fix, or by `edits` (file, text, text before the fix) where that does not apply. files: what
    is checked out. script: a file of scripts/bugbench, or of the repository, that runs the kernel; "" where none does,
    and `why` says why. package: the one that is imported, if the folder it lies in is no package that can be. needs:
    other clones that are imported.
    """

    name: str
    repository: str
    fix: str
    kind: str
    script: str = ""
    files: tuple[str, ...] = (".",)
    package: str = ""
    base: str = "HEAD"
    needs: tuple[str, ...] = ()
    edits: tuple[tuple[str, str, str], ...] = field(default=())
    why: str = ""


FLASH = dict(
    repository="Dao-AILab/flash-attention",
    files=("flash_attn/cute",),
    package="flash_attn/cute",
    needs=("quack",),
)
QUACK = dict(repository="Dao-AILab/quack", files=("quack",))
CPP = "CUDA C++: compile its kernel to PTX with nvcc, then sim.launch (docs/run_ptx.md)"
CASES = (
    Case("flash-tmem-freed", fix="dd8a2729", kind="tensor memory freed under its readers",
         script="flash_attention_forward.py", **FLASH),
    Case("flash-bwd-fence", fix="d91ea94f", kind="shared memory handed back to TMA without a proxy fence",
         script="flash_attention_backward.py",
         edits=(("flash_attn/cute/flash_bwd_sm100.py",
                 "_tmem_store()\n                cute.arch.fence_view_async_shared()", "_tmem_store()"),), **FLASH),
    Case("flash-empty-tiles", fix="fec3a6a1", kind="hang: empty tiles of a persistent kernel", **FLASH,
         why="the fix does not come off today's version; 8451d4ed and older do not compile with DSL 4.8.1"),
    Case("flash-shared-race", fix="188643b8", kind="shared memory overlaps", **FLASH,
         why="needs a block-sparse call; none written yet"),
    Case("flash-split-deadlock", fix="3fa81057", kind="hang: varlen, block-sparse and split", **FLASH,
         why="needs a block-sparse call; none written yet"),
    Case("flash-mla-sentinel", fix="c68c592f", kind="writes at index -1", **FLASH, why="no call written yet"),
    Case("flash-empty-keys", fix="03cd0651", kind="crash: no keys", **FLASH,
         why="the fix does not come off today's version"),
    Case("quack-tmem-freed", fix="14e9a0b", kind="tensor memory freed under its readers", script="quack_gemm.py",
         edits=(("quack/gemm_sm100.py", "            tmem_alloc_barrier.arrive()\n", ""),
                ("quack/gemm_sm100.py", "            tmem_alloc_barrier.arrive_and_wait()\n            tmem.free",
                 "            tmem.free")), **QUACK),
    Case("quack-gather-scope", fix="3d58cbf", kind="an arrival's scope: cp.async, then the other CTA's MMA",
         script="quack_gather_gemm.py",
         edits=(("quack/gemm_sm100.py", """mbarrier_arrive_release_cluster(
                            ab_pipeline.sync_object_full.get_barrier(ab_consumer_state.index),
                            cta_rank_in_cluster & 0xFE,
""", """ab_pipeline.sync_object_full.arrive_mbarrier(
                            ab_consumer_state.index, dst_rank=cta_rank_in_cluster & 0xFE,
"""),), **QUACK),
    Case("quack-setmaxnreg", fix="97c98dc", kind="hang: registers never given back", **QUACK,
         why="needs a gathered GEMM (gather_A); no call written yet"),
    Case("quack-scheduler", fix="fa8c914", kind="hang: the scheduler's warp", **QUACK,
         why="of 2025: does not compile with DSL 4.8.1"),
    Case("cutlass-3643", "NVIDIA/cutlass", "PR #3647", "missing wait; scope of an arrival; proxy fence",
         script="examples/python/CuTeDSL/experimental/primitives/tcgen05/2cta_mma_blockscale_m128.py",
         files=("examples/python/CuTeDSL/experimental/primitives/tcgen05",), base="7107b05"),
    Case("cutlass-3435", "NVIDIA/cutlass", "none", "a pair's dealloc before the peer's alloc",
         why="a reproducer of nine lines in the issue; the same in tests/sim/test_order.py, `the peer's allocation`"),
    Case("cutlass-2945", "NVIDIA/cutlass", "0edaa6e47", "TMA out of bounds", why=CPP),
    Case("cutlass-3324", "NVIDIA/cutlass", "none", "scope of an arrival behind cp.async", why=CPP),
    Case("flashinfer-3630", "flashinfer-ai/flashinfer", "0b727e676", "retries a wait on another stage's mbarrier",
         why=CPP),
    Case("flashinfer-5334", "flashinfer-ai/flashinfer", "PR #5335", "tensor memory released under its loads",
         why="the fix is in no version that is here"),
    Case("flashinfer-4525", "flashinfer-ai/flashinfer", "065795ea4", "attention sinks read out of bounds", why=CPP),
    Case("flashinfer-4531", "flashinfer-ai/flashinfer", "42bb63f19", "hang: no tokens", why="needs several GPUs"),
    Case("deepgemm-292", "deepseek-ai/DeepGEMM", "d30fc36", "tensor memory's alloc and dealloc in pairs", why=CPP),
    Case("deepgemm-343", "deepseek-ai/DeepGEMM", "a6a9339", "a tensor map rewritten in flight", why=CPP),
    Case("deepgemm-449", "deepseek-ai/DeepGEMM", "PR #448", "wgmma's A registers overwritten",
         why="ptxas moves the write; the PTX has none"),
    Case("sglang-32907", "sgl-project/sglang", "166c6f71", "exit without a cluster barrier",
         why="too large to be fetched here; the same in tests/sim/test_order.py, `the peer's exit`"),
    Case("tilelang-1980", "tile-ai/tilelang", "0f7c2147", "missing fences", why="its compiler is not installed"),
)  # fmt: skip


def git(repository: Path, *arguments: str) -> str:
    """The output of a git command in a clone."""
    return subprocess.run(
        ["git", "-C", repository, *arguments], check=True, capture_output=True, text=True, errors="replace"
    ).stdout


def check_out(case: Case, clone: Path, folder: Path, defective: bool) -> Path:
    """A copy of the case's files, fixed or with the fix taken back; returns what belongs on PYTHONPATH."""
    subprocess.run(["git", "clone", "-q", "-n", "--shared", clone, folder], check=True, capture_output=True)
    git(folder, "sparse-checkout", "set", "--no-cone", *(f"/{name}" for name in case.files))
    git(folder, "checkout", "-q", "--detach", case.base)
    if defective and case.edits:
        for name, old, new in case.edits:
            text = (folder / name).read_text()
            if text.count(old) != 1:
                raise RuntimeError(f"{case.name}: {name} has the text to take back {text.count(old)} times")
            (folder / name).write_text(text.replace(old, new))
    elif defective and re.fullmatch(r"[0-9a-f]+", case.fix):
        change = git(folder, "diff", f"{case.fix}~", case.fix, "--", *case.files)
        subprocess.run(
            ["git", "-C", folder, "apply", "-R", "--3way", "-"], input=change, text=True, check=True
        )
    if not case.package:
        return folder
    # The package alone, without the __init__ of the one it lies in, which wants a compiled extension.
    inner = folder / "packages" / Path(case.package).parent
    inner.mkdir(parents=True)
    (inner / Path(case.package).name).symlink_to(folder / case.package)
    return folder / "packages"


def found_in(case: Case, clone: Path, options: argparse.Namespace, defective: bool) -> list[list[str]]:
    """What runs of one version say, by seed."""
    with tempfile.TemporaryDirectory() as folder:
        path = check_out(case, clone, Path(folder) / "copy", defective)
        return [run(case, path, options.checkouts, seed) for seed in range(options.seeds)]


def without_lines(text: str) -> str:
    """A finding without the numbers of its lines, which the fix moves."""
    return re.sub(r":\d+", "", text)


def shown(found: list[list[str]] | None) -> str:
    """What runs of one version say, the first of each seed."""
    if found is None:
        return "-"
    firsts = [f"seed {seed}: {texts[0]}" for seed, texts in enumerate(found) if texts]
    return "; ".join(firsts) or f"nothing, {len(found)} seeds"


def run(case: Case, path: Path, checkouts: Path, seed: int) -> list[str]:
    """What one run says, a line each finding."""
    script = HERE / "bugbench" / case.script
    script = script if script.exists() else path / case.script
    paths = [str(HERE.parent / "src"), str(path), *(str(checkouts / name) for name in case.needs)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]), "QUACK_ARCH": "sm_100a"
    }  # fmt: skip
    command = [sys.executable, "-m", "warpspec.sim", "run", "--seed", str(seed), "--check", "order", script]
    try:
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            env=environment,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return [f"over {LIMIT} s"]
    return verdict(done.stdout + done.stderr, done.returncode)


def verdict(output: str, code: int) -> list[str]:
    """What a run's output reports, with the lines of source it names; what is by the text alone last."""
    for kind in ("TmemFault", "Deadlock", "BarrierFault", "MemoryFault", "RegisterHazard", "BadDescriptor"):
        at = output.find(f"errors.{kind}: ")
        if at >= 0:
            return [f"{kind} at {_lines(output[at:])}"]
    found = output[max(output.rfind("memory order"), 0) :]
    said = [
        f"order: {block.partition(':')[0]} at {_lines(block)}"
        for block in re.split(r"\n  (?=\S)", found)[1:]
        if LINE.search(block) and not block.startswith("by the ISA's text")
    ]
    said += [f"warning: {match[1]} at {_lines(match[2])}" for match in WARNING.finditer(output)]
    if "by the ISA's text" in found:
        said.append("order: fences by the ISA's text alone")
    return said if said or code == 0 else [f"stops: {output.strip().splitlines()[-1][:80]}"]


def _lines(text: str) -> str:
    return " and ".join(list(dict.fromkeys(f"{name}:{line}" for name, line in LINE.findall(text)))[:2])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help="beginnings of their names; all without")
    parser.add_argument("--checkouts", type=Path, help="folder of clones")
    parser.add_argument("--seeds", type=int, default=2, help="schedules of each version")
    options = parser.parse_args()
    print(
        "| case | repository | fix | kind | with the defect | fixed |\n| --- | --- | --- | --- | --- | --- |"
    )
    for case in CASES:
        if options.cases and not any(case.name.startswith(name) for name in options.cases):
            continue
        clone = options.checkouts and (options.checkouts / case.repository.split("/")[1]).resolve()
        if not case.script or clone is None or not clone.exists():
            said = [case.why or "not run: no clone", "-"]
        else:
            fixed = found_in(case, clone, options, False) if re.fullmatch(r"[0-9a-f]+", case.fix) else None
            defective = found_in(case, clone, options, True)
            known = {without_lines(text) for texts in fixed or () for text in texts}
            new = [[text for text in texts if without_lines(text) not in known] for texts in defective]
            said = [shown(new), shown(fixed)]
        print(
            f"| {case.name} | {case.repository} | {case.fix} | {case.kind} | {' | '.join(said)} |", flush=True
        )


if __name__ == "__main__":
    main()
