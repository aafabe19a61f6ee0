"""PTX of Triton and of nvcc, compiled here where they are installed, in the simulator: results and memory order."""

import runpy
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import warpspec.sim as sim

pytestmark = pytest.mark.long
CUDA_SOURCE = r"""
#include <cooperative_groups.h>
#include <cstdio>
namespace cg = cooperative_groups;
struct Sizes { int rows, columns; float scale; };

// Each CTA of a pair sums half of a row; the first adds the other's sum through distributed shared memory.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128)
row_sums(const float* x, float* out, Sizes sizes) {
  __shared__ float partial[128];
  cg::cluster_group cluster = cg::this_cluster();
  int row = blockIdx.x / 2, half = cluster.block_rank();
  float sum = 0;
  for (int at = half * 128 + threadIdx.x; at < sizes.columns; at += 256) sum += x[row * sizes.columns + at];
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int width = 64; width; width /= 2) {
    if (threadIdx.x < width) partial[threadIdx.x] += partial[threadIdx.x + width];
    __syncthreads();
  }
  cluster.sync();
  if (half == 0 && threadIdx.x == 0) out[row] = sizes.scale * (partial[0] + *cluster.map_shared_rank(partial, 1));
  LAST
}
extern "C" __global__ void say(const int* x) { printf("thread %d: %d\n", threadIdx.x, x[threadIdx.x]); }
"""


def cuda(tmp_path, arch: str, last: str = "cluster.sync();") -> str:
    nvcc = shutil.which("nvcc") or pytest.skip("nvcc is not installed: nothing compiles CUDA C++ here")
    source, ptx = tmp_path / "kernel.cu", tmp_path / "kernel.ptx"
    source.write_text(CUDA_SOURCE.replace("LAST", last))
    subprocess.run(
        [nvcc, "-std=c++17", f"-arch={arch}", "-lineinfo", "-ptx", source, "-o", ptx],
        check=True,
        capture_output=True,
    )
    return ptx.read_text()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_cuda_cpp(arch, tmp_path, capsys):
    ptx = cuda(tmp_path, arch)
    x, out = torch.randn(3, 500), torch.full((3,), float("nan"))
    sizes = np.int32(3), np.int32(500), np.float32(2)
    sim.launch(ptx, "row_sums", grid=6, block=128, args=[x, out, sizes], seeds=3, check="order")
    assert torch.allclose(out, 2 * x.sum(1), atol=1e-4)
    sim.launch(ptx, "say", grid=1, block=2, args=[torch.arange(5, 7, dtype=torch.int32)], check="order")
    assert capsys.readouterr().out == "thread 0: 5\nthread 1: 6\n"


def test_cuda_cpp_whose_peer_may_have_left(tmp_path):
    """Without the last cluster barrier the second CTA exits while the first may still read its shared memory."""
    x, out = torch.randn(3, 500), torch.empty(3)
    with pytest.raises(sim.OrderError, match=r"may have exited") as caught:
        args = [x, out, (np.int32(3), np.int32(500), np.float32(2))]
        sim.launch(cuda(tmp_path, "sm_90a", ""), "row_sums", grid=6, block=128, args=args, check="order")
    assert "kernel.cu:22" in str(caught.value)


TEMPLATE = rb"""
template <int WIDTH> __global__ void __launch_bounds__(128) row_sums(const float* x, float* out, int columns) {
  __shared__ float sums[WIDTH];
  float sum = 0;
  for (int at = threadIdx.x; at < columns; at += WIDTH) sum += x[blockIdx.x * columns + at];
  sums[threadIdx.x] = sum;
  for (int half = WIDTH / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = sums[0];
}
"""


def recipe() -> dict:
    """What docs/run_cuda.md's recipe for NVRTC defines."""
    text = (Path(__file__).parents[2] / "docs/run_cuda.md").read_text()
    block = next(block for block in text.split("```") if "import nvrtc" in block)
    names: dict = {}
    exec(block[: block.index("\nptx, entry")], names)
    return names


@pytest.mark.parametrize("arch", [b"compute_90a", b"compute_100a"])
def test_nvrtc(arch):
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    try:
        ptx, entry = recipe()["ptx_of"](
            TEMPLATE, b"row_sums<128>", b"-arch=" + arch, b"-lineinfo", b"-std=c++17"
        )
    except (RuntimeError, ImportError, OSError) as error:
        pytest.skip(f"NVRTC is not installed: nothing compiles CUDA C++ here ({str(error)[:60]})")
    x, out = torch.randn(6, 500), torch.full((6,), float("nan"))
    sim.launch(ptx, entry, grid=6, block=128, args=[x, out, 500], seeds=3, check="order")
    assert torch.allclose(out, x.sum(1), atol=1e-4)


def test_tilelang(tmp_path, monkeypatch):
    """docs/run_tilelang.md's recipe, and the hang that it tells of."""
    pytest.importorskip("tilelang", reason="tilelang is not installed: nothing compiles TileLang here")
    shutil.which("nvcc") or pytest.skip("nvcc is not installed: nothing compiles CUDA C++ here")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/run_tilelang.md").read_text()
    (tmp_path / "recipe.py").write_text(page[page.index("import subprocess") :].split("```")[0])
    found = runpy.run_path("recipe.py")  # from a file: TileLang reads its kernels' source
    with pytest.raises(sim.Deadlock, match=r"warps 1-3 lanes 0-31: waits for parity 0 of the mbarrier"):
        arguments = [*found["maps"], found["c"]]
        sim.launch(found["ptx"], grid=(2, 2), block=256, smem=98_304, args=arguments, check="order", seed=1)


def triton_matmul(capability: int, described: bool):
    triton = pytest.importorskip("triton", reason="triton is not installed: nothing compiles Triton here")
    from helpers import triton_kernels as kernels
    from triton.backends.compiler import GPUTarget

    constants = {"M": 128, "N": 128, "K": 64}
    if described:
        tensors = {n: f"tensordesc<fp16[128,{c}]>" for n, c in (("a", 64), ("b", 64), ("c", 128))}
        function, signature = kernels.matmul_described, {**tensors, "k": "i32"}
    else:
        tensors = dict.fromkeys(("a", "b", "c"), "*fp16")
        function, signature = kernels.matmul, {**tensors, "k": "i32", "n": "i32"}
    signature |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(fn=function, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("capability", [90, 100])
def test_triton(capability, described):
    kernel = triton_matmul(capability, described)
    a, b, c = (
        torch.randn(256, 192).half(),
        torch.randn(128, 192).half(),
        torch.full((256, 128), float("nan")).half(),
    )
    if described:
        from triton.tools.tensor_descriptor import TensorDescriptor

        boxes = ((a, [128, 64]), (b, [128, 64]), (c, [128, 128]))
        args = [*(TensorDescriptor.from_tensor(tensor, box) for tensor, box in boxes), 192]
    else:
        args = [a, b, c, 192, 128]
    sim.triton(kernel, *args, grid=(2, 1), seeds=2)
    wanted = a.float() @ b.float().T
    assert (c.float() - wanted).norm() <= 1e-3 * wanted.norm()
    with pytest.raises(sim.HostError, match=r"the kernel takes a, b, c, k"):
        sim.triton(kernel, *args[:3], grid=(2, 1))
