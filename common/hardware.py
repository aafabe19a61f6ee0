"""Numbers of the hardware that kernels are planned for, each once. Plain Python.

The limits of an SM are those of compute capability 9.0 and 10.x, which agree in all of them (CUDA programming guide,
"Compute Capabilities"). What differs between the architectures is in ``common.architecture``, what differs between GPUs
in ``GPUS``.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20  # bytes

# Threads.
WARP_THREADS = 32
WARPGROUP_THREADS = 128
MAX_THREADS_PER_CTA = 1024
MAX_THREADS_PER_SM = 2048
MAX_CTAS_PER_SM = 32
MAX_CLUSTER_CTAS = 16  # more than 8 are not portable: a kernel has to ask for them

# Shared memory, in bytes.
SMEM_PER_SM = 228 * KIB
SMEM_RESERVED_PER_CTA = 1 * KIB  # what the system keeps of an SM's for every resident CTA
MAX_SMEM_PER_CTA = 227 * KIB  # the most that one CTA can ask for

# Registers, of 32 bits.
REGISTERS_PER_SM = 65536
MAX_REGISTERS_PER_THREAD = 255
REGISTER_STEP = 8  # a thread's registers come in multiples of it
SM_PARTITIONS = 4  # an SM's warp schedulers, each with its quarter of the registers

# wgmma's fragments (``common/device/wgmma.py`` says which thread has what).
WARPGROUP_ROWS = 64  # M of one wgmma
WARP_ROWS = 16  # rows of a warp
THREAD_ROWS = 2  # rows of a thread
ROW_DISTANCE = 8  # rows from a thread's first to its second
QUAD = 4  # threads that share a row

# Accesses to memory.
VECTOR_BYTES = 16  # the widest load or store of one thread that every kernel may use
TMA_ALIGNMENT = 16  # bytes: TMA wants a tensor's address and strides to be multiples of it

# Tensor memory (sm_100a), in columns of 128 lanes of 32 bits.
TMEM_COLUMNS = 512


@dataclass(frozen=True)
class Gpu:
    """One device of an architecture, which stands for it where there is no device to ask.

    arch: what is compiled for it. name: the device's. sm_count: SMs. l2_bytes: size of the L2.
    """

    arch: str
    name: str
    sm_count: int
    l2_bytes: int


GPUS = {
    gpu.arch: gpu
    for gpu in (
        Gpu("sm_90a", "H100", sm_count=132, l2_bytes=50 * MIB),  # an H200's L2 of 60 MiB holds a little more
        Gpu("sm_100a", "B200", sm_count=148, l2_bytes=126 * MIB),
    )
}
