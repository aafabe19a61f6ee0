"""Hardware numbers that kernels are planned for, each in one place. Plain Python.

The limits of an SM are those of compute capabilities 9.0 and 10.x, which agree in all of them (CUDA programming guide,
"Compute Capabilities"). Differences between architectures are in ``common.architecture``, differences between GPUs in
``GPUS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

KIB, MIB = 1 << 10, 1 << 20  # bytes

# Threads.
WARP_THREADS = 32
WARPGROUP_THREADS = 128
MAX_THREADS_PER_CTA = 1024
MAX_THREADS_PER_SM = 2048
MAX_CTAS_PER_SM = 32
MAX_CLUSTER_CTAS = 16  # more than 8 are not portable: the kernel has to opt in

# Shared memory, in bytes.
SMEM_PER_SM = 228 * KIB
SMEM_RESERVED_PER_CTA = 1 * KIB  # reserved by the system for every resident CTA
MAX_SMEM_PER_CTA = 227 * KIB  # the most that one CTA can ask for

# Registers, of 32 bits.
REGISTERS_PER_SM = 65536
MAX_REGISTERS_PER_THREAD = 255
REGISTER_STEP = 8  # a thread's registers are allocated in multiples of this
SM_PARTITIONS = 4  # warp schedulers of an SM, each with a quarter of its registers

# wgmma's fragments (``common/device/wgmma.py`` says which thread has what).
WARPGROUP_ROWS = 64  # M of one wgmma
WARP_ROWS = 16  # rows of a warp
THREAD_ROWS = 2  # rows of a thread
ROW_DISTANCE = 8  # rows from a thread's first to its second
QUAD = 4  # threads that share a row

# Sizes of numbers, in bytes.
WORD_BYTES = 4  # a register
FP32_BYTES = 4
BF16_BYTES = 2  # fp16 too

# Accesses to memory.
VECTOR_BYTES = 16  # the widest load or store of one thread that all kernels may use
LINE_BYTES = 128  # a line of L2
TMA_ALIGNMENT = 16  # alignment in bytes of a tensor's address and strides

# Tensor memory (sm_100a), in columns of 128 lanes of 32 bits.
TMEM_COLUMNS = 512


L2_SHARE = 2 / 3  # ``Gpu.l2_share`` of a GPU that is not listed: an H200's


class Speeds(NamedTuple):
    """The highest rates that one GPU reaches.

    copy: TB/s of a large copy, counting bytes read and bytes written. matmul: TFLOP/s of a large bf16 matrix product.
    """

    copy: float
    matmul: float

    def __str__(self) -> str:
        return f"copy {self.copy:.2f} TB/s, bf16 matrix product {self.matmul:.0f} TFLOP/s"


# Parts of data sheets' figures that a large copy and a large matrix product reach, as on an H200 and an H100.
COPY_REACHED, MATMUL_REACHED = 0.89, 0.72
H200_SPEEDS, H100_SPEEDS = Speeds(4.25, 710.0), Speeds(3.03, 690.0)  # measured


@dataclass(frozen=True)
class Gpu:
    """The hardware numbers of one GPU model.

    arch: compilation target. name: the model, a word of the name that CUDA reports. sm_count: number of SMs. l2_bytes:
    size of L2, as CUDA reports it. l2_share: the fraction of L2 in which plans expect K and V to stay while other data
    passes through. speeds: measured, or parts of the data sheet's.
    """

    arch: str
    name: str
    sm_count: int
    l2_bytes: int
    l2_share: float = L2_SHARE
    speeds: Speeds = H200_SPEEDS


# Attention's sections were tuned on an H200 with 40 MiB of K and V; an H100 gets the same from its smaller L2.
MODELS = (
    Gpu("sm_90a", "H200", sm_count=132, l2_bytes=60 * MIB),
    Gpu("sm_90a", "H100", sm_count=132, l2_bytes=50 * MIB, l2_share=0.8, speeds=H100_SPEEDS),
    Gpu(
        "sm_100a",
        "B200",
        sm_count=148,
        l2_bytes=126 * MIB,
        speeds=Speeds(8.0 * COPY_REACHED, 2250.0 * MATMUL_REACHED),
    ),
)
GPUS = {gpu.arch: gpu for gpu in MODELS}  # an architecture's last model stands for it without a device


def gpu_model(name: str) -> Gpu | None:
    """The model of a device, by the name that CUDA reports ("NVIDIA H100 80GB HBM3"); None if it is not listed."""
    words = name.split()
    return next((gpu for gpu in MODELS if gpu.name in words), None)


def ctas_by_registers(threads: int, registers: int) -> int:
    """CTAs of so many threads, each with so many registers, that an SM has room for. Each partition has equally many
    warps."""
    warps = REGISTERS_PER_SM // (registers * WARP_THREADS) // SM_PARTITIONS * SM_PARTITIONS
    return warps // max(1, threads // WARP_THREADS)


def registers_at_launch(threads: int, ctas_per_sm: int) -> int:
    """Registers a thread of a CTA gets, if this many CTAs share an SM."""
    most = min(REGISTERS_PER_SM // (ctas_per_sm * threads), MAX_REGISTERS_PER_THREAD)
    return most // REGISTER_STEP * REGISTER_STEP
