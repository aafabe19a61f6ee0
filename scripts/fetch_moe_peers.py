"""The packages of bench_moe.py's peers in one folder, about 6 MB: made where there is a package index, taken along.

    python scripts/fetch_moe_peers.py .gpu/peers
    WARPSPEC_MOE_PEERS=.gpu/peers python scripts/bench_moe.py --peers          # on the machine with the GPU

From wheels: triton_kernels (vLLM's copy), humming, and Marlin's sources (sglang), of which the kernels with e2m1
weights are compiled for sm_90a by nvcc (CUDA 13; PATH or CUDA_HOME), which takes about a minute of a core. What cannot
be had is left out, with the reason. torch._grouped_mm is torch's; QuACK is a package like any (quack-kernels).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VLLM, HUMMING, SGLANG = "vllm==0.24.0", "humming-kernels==0.1.19", "sglang==0.5.23"
PYTHON = "3.12"  # of the machine with the GPU
GLIBC = (17, 24, 27, 28, 31, 34, 35)  # minor versions of the wheels' platforms
JIT = "sglang/kernels/jit"
MARLIN = "gemm/marlin_moe/moe_wna16_marlin.cuh"
# Marlin's kernels for other weights, which take most of the compiler's time.
OTHER_WEIGHTS = re.compile(r"^ +(COMMON|BIGGROUP|ACT)_GET_IF\(.*$", re.MULTILINE)
SOURCE = f"""
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include "{MARLIN}"
#include "gemm/marlin/gptq_marlin_repack.cuh"
namespace sglang {{  // of the gemm: no expert parallelism, no bias, blocks sorted by expert, no zeros, counted blocks
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemm, (moe_wna16_marlin_gemm<bf16_t, false, false, true, false, true>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(repack, (gptq_marlin_repack));
}}
"""


def unpack(requirement: str, folder: Path, prefix: str, to: Path) -> None:
    """What a wheel has below a prefix."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64", "any"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp", "-d", str(folder)]
    command += [part for platform in platforms for part in ("--platform", platform)]
    subprocess.run([*command, requirement], check=True)
    name = requirement.split("==")[0].replace("-", "_")
    wheel = next(folder.glob(f"{name}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.namelist():
            if entry.startswith(prefix) and not entry.endswith("/"):
                place = to / entry.removeprefix(prefix)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(archive.read(entry))
                mode = archive.getinfo(entry).external_attr >> 16  # humming runs a program of its wheel
                place.chmod(mode & 0o777 or 0o644)


def compile_marlin(jit: Path, to: Path) -> None:
    """to: the library. jit: sglang's folder of sources."""
    import tvm_ffi.libinfo as ffi

    nvcc = shutil.which("nvcc") or Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    source = jit / "csrc" / MARLIN
    source.write_text(OTHER_WEIGHTS.sub("", source.read_text()))
    unit = jit / "marlin.cu"
    unit.write_text(SOURCE)
    includes = [jit / "include", jit / "csrc", ffi.find_include_path(), ffi.find_dlpack_include_path()]
    library = Path(ffi.find_libtvm_ffi())
    command = [nvcc, "-std=c++20", "-O3", "-Xcompiler", "-fPIC", "-shared", "-cudart", "static"]
    command += ["-gencode=arch=compute_90a,code=sm_90a", "-DSGL_CUDA_ARCH=900", "--expt-relaxed-constexpr"]
    command += [part for path in includes for part in ("-I", path)]
    command += [unit, "-o", to, f"-L{library.parent}", "-ltvm_ffi"]
    subprocess.run(command, check=True)


def fetch(folder: Path, work: Path) -> dict:
    """Functions that make each peer's part of the folder."""

    def marlin():
        unpack(SGLANG, work, f"{JIT}/", work / "jit")
        (folder / "marlin").mkdir(parents=True, exist_ok=True)
        compile_marlin(work / "jit", folder / "marlin" / "marlin.so")

    return {
        "triton_kernels": lambda: unpack(
            VLLM, work, "vllm/third_party/triton_kernels/", folder / "triton_kernels"
        ),
        "humming": lambda: unpack(HUMMING, work, "humming/", folder / "humming"),
        "marlin": marlin,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.absolute()
    with tempfile.TemporaryDirectory() as work:
        for name, make in fetch(folder, Path(work)).items():
            try:
                make()
            except (OSError, StopIteration, subprocess.CalledProcessError, ImportError) as error:
                print(f"{name}: {type(error).__name__}: {error}")
                continue
            size = sum(path.stat().st_size for path in (folder / name).rglob("*"))
            print(f"{name}: {size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
