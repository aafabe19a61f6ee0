"""The chips: H100, H200, B200, B300. A row is a constant's name, value, what it is, source and confidence.

Times are SM clocks, rates bytes or FLOP per clock and SM, unless noted. Hopper's were measured by
`scripts/microbench/run.py` on an H100 80GB HBM3 and an H200 (2026-11-24, driver 580.159.04), with results in
`scripts/microbench/recorded`; no Blackwell GPU was available, so its constants are published ones or Hopper's.
"""

from __future__ import annotations

import hashlib

from warpspec.sim.clocks.constants import HIGH, LOW, MEDIUM, Chip, Constant

OURS = "scripts/microbench/run.py"
COPY = "a copy of 2 GB, scripts/shared/gpu_bench.py"
DRAM = "DRAM bytes of softmax kernels by ncu, scripts/measure_clocks.py"
NCU = "scripts/microbench/run.py --only brief_1x global_load_8x4_dram_1r global_load_32x4_dram_1r, under ncu"
STORES = "scripts/microbench/run.py --only global_store_8x1_l2 global_red4_8x1_l2, on an H200"
FIRST = "scripts/microbench/run.py --only global_load_32x4_dram, under ncu, on an H200"
HBM_START = "MB that come from HBM at half its rate when a kernel begins"
BRIEF = "scripts/microbench/run.py --only brief, under ncu"
ISSUE = f"{OURS}, wgmma_issue_*"
SEMI = "SemiAnalysisAI/microbench-blackwell at 9a068d8"
MULTICAST = f"{SEMI}, tma2dmcast_throughput"
GB300 = "Antoniomv7/gb300-microbench at 1c36b44"
ASSUMED = "assumed: not measured"
HOPPER = "as on Hopper: not published"

# Clocks of a scheduler's pipes for a warp's instruction, and latencies.
_PIPES = (
    ("fma", 1, "FP32 multiply and add", OURS, HIGH),
    ("fma_latency", 4, "", OURS, HIGH),
    ("imad", 2, "integer multiply and add", OURS, HIGH),
    ("packed_fma", 2, "FMAs that one f32x2 counts for", SEMI, MEDIUM),
    ("alu", 2, "integer, logic, comparison, maximum", OURS, HIGH),
    ("alu_latency", 4, "", OURS, HIGH),
    ("pack", 2, "conversion of two floats into a packed pair", OURS, HIGH),
    ("mufu", 8, "ex2 and its kin, conversions between integer and float", OURS, HIGH),
    ("mufu_latency", 17, "", OURS, HIGH),
    ("branch", 8, "from a taken branch to the next instruction", OURS, MEDIUM),
    ("mma_sync", 16, "issue of mma.sync", ASSUMED, LOW),
)
_SHARED = (
    ("shared_bytes", 128, "of shared memory, also for shuffles", OURS, HIGH),
    ("shared_latency", 29, "of a load", OURS, HIGH),
    ("shuffle_latency", 24, "", OURS, HIGH),
)
_SYNCHRONISATION = (
    ("wait_issue", 4, "try_wait's issue", OURS, MEDIUM),
    ("wait_passed", 40, "try_wait on a phase that is complete, until the next instruction", OURS, HIGH),
    ("wait_woken", 20, "from the phase's end to the waiting warp's next instruction", OURS, MEDIUM),
    ("arrive_issue", 8, "an arrival, for the warp", OURS, MEDIUM),
    ("arrive_hold", 22, "for the warp, beside, where not all of its lanes arrive", OURS, HIGH),
    ("arrive_latency", 25, "until its phase ends", OURS, MEDIUM),
    ("warp_sync", 1, "bar.warp.sync", OURS, HIGH),
    ("barrier_latency", 4, "named barrier, beside its arrivals", OURS, HIGH),
    ("barrier_arrival", 2, "each warp that arrives at a named barrier", OURS, HIGH),
    ("cluster_barrier", 200, "barrier.cluster", ASSUMED, LOW),
    ("remote_latency", 200, "of a store or arrival to another CTA of the cluster", ASSUMED, LOW),
    ("fence", 23, "fence.proxy.async", OURS, HIGH),
    ("setmaxnreg", 4, "", OURS, MEDIUM),
)
_TMA = (
    ("tma_issue", 30, "of the warp", OURS, MEDIUM),
    ("tma_interval", 32, "between copies in the engine, at least", ASSUMED, LOW),
    ("tma_bytes", 104, "a single SM loads by TMA", OURS, HIGH),
    ("tma_l2_latency", 255, "of a load from L2, beside its bytes", OURS, HIGH),
    ("tma_hbm_latency", 950, "of a load from HBM: 780 (512 bytes) to 1100 (from 8 KB on)", OURS, MEDIUM),
    ("store_bytes", 31.5, "a single SM stores by TMA", OURS, HIGH),
    ("add_bytes", 25.3, "a single SM adds, by TMA or by lanes", OURS, HIGH),
    ("store_buffer", 20480, "bytes that lanes store before they wait for those before", STORES, MEDIUM),
    ("add_buffer", 6144, "bytes that lanes add before they wait for those before", STORES, MEDIUM),
    ("store_read_latency", 10, "until a store has read shared memory, beside its bytes", OURS, MEDIUM),
    ("store_latency", 40, "from there until wait_group lets pass", OURS, MEDIUM),
)
# Code that an SM has not run before, where ncu's flush has left it in HBM. Blocks that are asked for: 450 clocks after
# jumps, 647 in straight code, 515 to 730 by the PC samples of an experts' GEMM, which have six lines a block.
CODE = f"{OURS}, code_*, under ncu"
_CODE = (
    ("code_cache_kb", 128, "KB of code that a cache keeps from call to call", f"{OURS}, code_*_again", HIGH),
    ("code_near_latency", 66, "until code in that cache runs, from a jump on", f"{OURS}, jump_128_*", MEDIUM),
    ("code_streamed_kb", 64, "KB of code that come in a stream from the kernel's start on", CODE, HIGH),
    ("code_line", 17.6, "a line of 128 bytes of the stream", CODE, HIGH),
    ("code_block", 6, "lines that come from L2 or HBM where a warp asks for one", "PC samples by ncu", HIGH),
    ("code_latency", 270, "until a block that is in L2 runs", f"{OURS}, code_*_again", HIGH),
    ("code_hbm_latency", 600, "until a block that is in HBM runs", CODE, MEDIUM),
    (
        "code_behind_loads",
        0.45,
        "of the time of the SM's own loads before, which a block waits for",
        f"{OURS}, parts_16_*_crowded_*",
        LOW,
    ),
)
_MEMORY = (
    ("l1_latency", 37, "of ld.global that hits L1", OURS, HIGH),
    ("l2_latency", 281, "of ld.global that hits L2", OURS, HIGH),
    ("hbm_latency", 695, "of ld.global that does not", OURS, HIGH),
    ("hbm_start_mb", 1.35, HBM_START, FIRST, MEDIUM),
    (
        "burst",
        250,
        "for which an SM may take more than its share of L2 and HBM, after it took less",
        OURS,
        MEDIUM,
    ),
)
LAUNCH = "of a kernel that are no CTA's, as ncu counts clocks, caches flushed"
_LAUNCH = (
    ("launch", 3900, LAUNCH, NCU, MEDIUM),
    ("cta_start", 124, "from a CTA's start to that of the next on its SM, beside its warps", BRIEF, HIGH),
    ("warp_start", 12, "the same, a warp", BRIEF, HIGH),
    ("cta_turnover", 440, "from a CTA's end to the start of the next in its place", OURS, HIGH),
)
_WGMMA = (
    ("mma_flops", 4096, "bf16, of the tensor cores", OURS, HIGH),
    ("wgmma_issue_columns", 8, "of N for which the warp issues nothing else for a clock", ISSUE, HIGH),
    ("wgmma_issue_less", 4, "clocks less than N over these", ISSUE, HIGH),
    (
        "wgmma_depth",
        7,
        "of a warp in flight: the next is issued when the first of them is through",
        ISSUE,
        HIGH,
    ),
    ("wgmma_through", 39, "from a wgmma's last multiplication until then", ISSUE, HIGH),
    ("wgmma_fence", 2, "", OURS, MEDIUM),
    ("wgmma_tail", 47, "from the last multiplication to the end of wait_group", OURS, HIGH),
    ("wgmma_registers", 28, "before the first multiplication, where A comes from registers", OURS, HIGH),
    (
        "code_beside_wgmma",
        1.0,
        "more that an instruction takes while its tensor core multiplies, in a softmax's mix",
        OURS,
        HIGH,
    ),
    (
        "crowd_beside_wgmma",
        1.28,
        "times that, where several warps of a scheduler run code",
        f"{OURS}, overlap_*_attention_g3",
        HIGH,
    ),
    ("shuffle_beside_wgmma", 9, "the same of a shuffle", f"{OURS}, overlap_*_shfl", HIGH),
    (
        "operands_first",
        0.9,
        "of the share of shared memory that wgmma's operands take, which other accesses do without",
        f"{OURS}, overlap_*_sts128",
        HIGH,
    ),
    ("wgmma_least_registers", 13, "between wgmmas with A from registers, at least", OURS, HIGH),
)
_TCGEN05 = (
    ("mma_flops", 8192, "bf16, of the tensor core at M 128", SEMI, HIGH),
    ("mma_issue", 4, "of the warp", ASSUMED, LOW),
    ("mma_column", 0.5, "of a tcgen05.mma, a column of N", SEMI, HIGH),
    ("mma_least", 32, "between tcgen05.mma, at least", SEMI, HIGH),
    ("mma_tail", 136, "from the end of an MMA's interval to its commit, A in shared memory", SEMI, HIGH),
    ("mma_tail_tensor", 104, "the same, A in tensor memory", SEMI, HIGH),
    ("commit_latency", 100, "of a commit with nothing to wait for", ASSUMED, LOW),
    ("tensor_copy", 32, "a tcgen05.cp of 128 rows", ASSUMED, LOW),
    ("tmem_load_bytes", 512, "of tcgen05.ld (the published figures disagree)", SEMI, LOW),
    ("tmem_store_bytes", 512, "of tcgen05.st", SEMI, MEDIUM),
    ("tmem_latency", 40, "of either", ASSUMED, LOW),
)
_COMMON = (*_PIPES, *_SHARED, *_SYNCHRONISATION, *_TMA, *_CODE, *_MEMORY, *_LAUNCH)


def _hopper(
    *,
    hbm: float,
    read: float,
    size: float,
    l2: float,
    shared: float,
    stored: float,
    added: float,
    dirty: float,
    launch: float,
    start: float,
) -> tuple:
    own = (
        ("hbm_start_mb", start, HBM_START, FIRST, MEDIUM),
        ("launch", launch, LAUNCH, NCU, MEDIUM),
        ("l2_mb", size, "MB that L2 holds", "CUDA device attribute", HIGH),
        ("l2_dirty_mb", dirty, "MB of stores that L2 keeps at a kernel's end", DRAM, MEDIUM),
        (
            "hbm_gb",
            hbm,
            "GB/s of HBM where as much is written as read",
            f"{OURS}, global_copy_32x4_dram_4r to 16r, of an H200 under ncu",
            HIGH,
        ),
        ("hbm_read_gb", read, "GB/s that all SMs read from HBM", f"{OURS}, global_load_32x4_dram_16r", HIGH),
        ("l2_bytes", l2, "a clock that all SMs load from L2 together", OURS, HIGH),
        ("l2_shared_bytes", shared, "the same, where 16 SMs load the same lines at a time", OURS, HIGH),
        ("l2_store_bytes", stored, "a clock that all SMs store", OURS, HIGH),
        ("l2_add_bytes", added, "a clock that all SMs add, by TMA or by lanes", OURS, HIGH),
    )
    return (*_COMMON, *_WGMMA, *own)


def _blackwell(*more: tuple) -> tuple:
    """Hopper's constants, at most of medium confidence, and Blackwell's own."""
    assumed = [
        (name, value, about, source if source in (SEMI, ASSUMED) else HOPPER, MEDIUM if sure is HIGH else LOW)
        for name, value, about, source, sure in _COMMON
    ]
    own = (
        ("fma", 1, "FP32 multiply and add", "CUDA C++ Programming Guide", HIGH),
        ("mufu", 8, "ex2 and its kin", SEMI, HIGH),
        ("mufu_latency", 18, "", SEMI, HIGH),
        ("shared_bytes", 128, "of shared memory, also for shuffles", SEMI, HIGH),
        ("tma_hbm_latency", 1150, "900 (512 bytes) to 1757 (32 KB), less the bytes", SEMI, MEDIUM),
        ("l2_latency", 295, "of ld.global that hits L2", SEMI, MEDIUM),
        ("hbm_latency", 860, "of ld.global that does not", SEMI, MEDIUM),
        (
            "hbm_gb",
            7100,
            "GB/s of HBM where as much is written as read: as if all were read",
            ASSUMED,
            MEDIUM,
        ),
        ("hbm_read_gb", 7100, "GB/s that all SMs read from HBM with 64 KB in flight an SM", SEMI, HIGH),
        ("l2_mb", 126, "MB that L2 holds", "NVIDIA's specification", HIGH),
        (
            "l2_dirty_mb",
            55,
            "MB of stores that L2 keeps at a kernel's end, as a part of L2 as on Hopper",
            ASSUMED,
            LOW,
        ),
        ("l2_store_bytes", 3000, "a clock that all SMs store", ASSUMED, LOW),
        ("l2_add_bytes", 2400, "a clock that all SMs add by TMA", ASSUMED, LOW),
        (
            "l2_bytes",
            7200,
            "a clock that all SMs load from L2 together: sectors read, at least",
            MULTICAST,
            LOW,
        ),
        (
            "l2_shared_bytes",
            11400,
            "the same, where 16 SMs load the same lines: from tiles of 48 to 56 KB, one in flight",
            MULTICAST,
            MEDIUM,
        ),
    )
    return (*assumed, *_TCGEN05, *own, *more)


def _table(rows: tuple) -> dict[str, Constant]:
    return {name: Constant(value, about, source, sure) for name, value, about, source, sure in rows}


_B300 = (("mufu", 4, "ex2 and its kin", GB300, HIGH),)
_H100 = _hopper(
    hbm=3030,
    read=3150,
    size=52,
    l2=3900,
    shared=11100,
    stored=2160,
    added=1730,
    dirty=22,
    launch=4930,
    start=1.35,
)
_H200 = _hopper(
    hbm=4000,
    read=4550,
    size=62,
    l2=4700,
    shared=11500,
    stored=2530,
    added=2030,
    dirty=26,
    launch=3850,
    start=1.6,
)
CHIPS = {
    "h100": Chip("H100", "sm_90a", 132, 1.98, _table(_H100)),
    "h200": Chip("H200", "sm_90a", 132, 1.98, _table(_H200)),
    "b200": Chip("B200", "sm_100a", 148, 1.9, _table(_blackwell())),
    "b300": Chip("B300", "sm_103a", 148, 1.9, _table(_blackwell(*_B300))),
}


def chip(name: str) -> Chip:
    """The chip of a name: h100, h200, b200, b300. ValueError for another."""
    found = CHIPS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"chip is {name!r}; one of {', '.join(CHIPS)} is needed")
    return found


def table_digest(of: Chip) -> str:
    """A short digest of a chip's constants, with which a prediction identifies them."""
    rows = sorted((name, constant.value) for name, constant in of.table.items())
    return hashlib.sha256(repr((rows, of.sms, of.ghz)).encode()).hexdigest()[:12]
