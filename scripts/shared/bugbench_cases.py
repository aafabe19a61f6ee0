"""Public defects of GPU kernels that `scripts/bugbench.py` runs, each before and after its fix."""

from __future__ import annotations

from dataclasses import dataclass, field

Edit = tuple[str, str, str]  # a file, text in it, the text that replaces it wherever it stands


@dataclass(frozen=True)
class Case:
    """A defect.

    repository: owner/name. fix: the commit or pull request that mends it; "ours" where there is none yet. base: the
    version that runs. The defective version is `base` with the fix taken back: by reversing the commit, or by `edits`
    where that does not apply any more. Where `base` has the defect, `mends` are the edits of the fixed version. also:
    edits of both versions, which mend what else `base` is known to have: a case of its own, or harmless. files:
    what is checked out. script: a file of scripts/bugbench, or of the repository, that runs the kernel, or a test of
    the repository (path::test). package: the one that is imported, if the folder it lies in is no package that can be.
    needs: other clones that are imported. kernel, include: a CUDA C++ file that nvcc compiles to kernel.ptx for the
    script, and folders of its headers.
    """

    name: str
    repository: str
    fix: str
    kind: str
    script: str
    arguments: str = ""
    arch: str = "sm_100a"
    files: tuple[str, ...] = (".",)
    package: str = ""
    base: str = "HEAD"
    needs: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = field(default=())
    mends: tuple[Edit, ...] = field(default=())
    also: tuple[Edit, ...] = field(default=())
    kernel: str = ""
    include: tuple[str, ...] = ()


FLASH_FILES = "flash_attn/cute"
COPY_UTILS = "from quack import copy_utils"
RELAY = tuple(  # cp.async of K and V: the warp that tells the pair's MMA warp of them
    edit
    for name, imports in (("fwd", COPY_UTILS), ("bwd", f"{COPY_UTILS}, layout_utils"))
    for edit in (
        (f"{FLASH_FILES}/flash_{name}_mla_sm100.py", f"{imports}\n",
         f"{imports}\nfrom quack.pipeline import mbarrier_arrive_release_cluster\n"),
        (f"{FLASH_FILES}/flash_{name}_mla_sm100.py", """\
        pipeline_cpasync.consumer_wait(consumer_state)
        with cute.arch.elect_one():
            pipeline_mma.producer_commit(producer_state)
""", """\
        pipeline_cpasync.consumer_wait(consumer_state)
        cute.arch.fence_view_async_shared()
        with cute.arch.elect_one():
            mbarrier_arrive_release_cluster(
                pipeline_mma.sync_object_full.get_barrier(producer_state.index), pipeline_mma.producer_mask
            )
"""),
    )
)  # fmt: skip
REFILLED = (
    f"{FLASH_FILES}/compute_block_sparsity.py",
    "                if lane_id == 0:\n                    reduction_buffer[warp_idx, 0] =",
    "                cute.arch.sync_threads()\n"
    "                if lane_id == 0:\n                    reduction_buffer[warp_idx, 0] =",
)
ROWS_BEHIND_A_TILE = (  # two CTAs write log-sum-exps of the same rows, the same values
    f"{FLASH_FILES}/flash_bwd_preprocess.py",
    "                if tidx < seqlen_q_rounded - m_block * self.tile_m:\n                    gLSElog2",
    "                if tidx < self.tile_m and tidx < seqlen_q_rounded - m_block * self.tile_m:\n"
    "                    gLSElog2",
)
FLASH = dict(
    repository="Dao-AILab/flash-attention",
    base="0251105a",
    files=("flash_attn/cute/*.py", "tests/cute/*.py"),
    package=FLASH_FILES,
    needs=("quack",),
)
LISTS = FLASH | dict(also=(REFILLED,))
GRADIENTS = FLASH | dict(also=(ROWS_BEHIND_A_TILE,))
CUTLASS = dict(repository="NVIDIA/cutlass", base="7107b05")
FORWARD, BACKWARD = "flash_attn/cute/flash_fwd_sm100.py", "flash_attn/cute/flash_bwd_sm100.py"
HOPPER_BACKWARD = "flash_attn/cute/flash_bwd_sm90.py"
GEMM = "quack/gemm_sm100.py"
AB_WAIT = "ab_pipeline.consumer_wait(ab_consumer_state, peek_ab_full_status)\n"
GATHERED = tuple(  # cp.async of A, which the MMA reads through the async proxy
    (GEMM, f"{before}{AB_WAIT}", f"{before}{AB_WAIT}{' ' * indent}cute.arch.fence_view_async_shared()\n")
    for before, indent in (
        ("                if not is_leader_cta:\n                    ", 20),
        ("                # Conditionally wait for AB buffer full\n                ", 16),
    )
)
QUACK = dict(repository="Dao-AILab/quack", base="c8ec317", files=("quack", "pyproject.toml"))
GATHER = QUACK | dict(also=GATHERED)
EXAMPLES = "examples/python/CuTeDSL"
ATTENTION = f"{EXAMPLES}/cute/blackwell/kernel/attention"
MASKED = f"{EXAMPLES}/cute/blackwell/kernel/blockwise_gemm"
MIXED = f"{ATTENTION}/mixed_input_fmha"
COPY_O = "            cute.copy(thr_store_o, tSrO, tStO)\n"
PRIMITIVES = f"{EXAMPLES}/experimental/primitives/tcgen05"
INDENT = " " * 20
PEER_ARRIVAL = """            if prims.elect_sync():
                leader_ab_full = prims.mapa("""
PEER_WAIT = """            while not prims.mbarrier_try_wait_parity(
                sfb_smem_full_mbar_ptr.subview(stage), phase_local, time_limit=10_000_000
            ):
                pass
            prims.fence_proxy(prims.Proxy.ASYNC_SHARED, space=prims.SharedSpace.shared_cta)
"""
O_FROM_TENSOR_MEMORY = """            cute.copy(tiled_tmem_load, tOtO_t2r_i, tOrO_frg)
            for j in cutlass.range(0, cute.size(tOrO_frg), 2, unroll_full=True):
                tOrO_frg[j], tOrO_frg[j + 1] = cute.arch.mul_packed_f32x2(
                    (tOrO_frg[j], tOrO_frg[j + 1]), (scale, scale)
                )
            copy_utils.cvt_copy("""
O_OR_ZEROS = """            if const_expr(scale is None):
                tOrO_frg.fill(0.0)
            else:
                cute.copy(tiled_tmem_load, tOtO_t2r_i, tOrO_frg)
                for j in cutlass.range(0, cute.size(tOrO_frg), 2, unroll_full=True):
                    tOrO_frg[j], tOrO_frg[j + 1] = cute.arch.mul_packed_f32x2(
                        (tOrO_frg[j], tOrO_frg[j + 1]), (scale, scale)
                    )
            copy_utils.cvt_copy("""
ZEROS = (
    (FORWARD, O_FROM_TENSOR_MEMORY, O_OR_ZEROS),
    (f"{FLASH_FILES}/block_sparse_utils.py", "Float32(0.0),  # zero scale", "None,  # zero scale"),
)
ONCE = "--warmup_iterations 0 --iterations 1"

TINYGEMM = dict(
    repository="flashinfer-ai/flashinfer", script="tinygemm.py", arch="sm_90a", files=("csrc/tinygemm2.cu",),
    kernel="csrc/tinygemm2.cu",
)  # fmt: skip
DEEPGEMM = dict(
    repository="deepseek-ai/DeepGEMM", script="deepgemm.py", files=("deep_gemm/include",),
    needs=("cutlass",), kernel="deepgemm.cu", include=("deep_gemm/include",),
)  # fmt: skip

CASES = (
    Case("flash-tmem-freed", fix="dd8a2729", kind="tensor memory freed under its readers",
         script="flash_attention_forward.py", **FLASH),
    Case("flash-store-fence", fix="e540fc1b", kind="no tcgen05.wait::st before the MMA reads P",
         script="flash_attention_forward.py",
         edits=((FORWARD, "        # Notify mma warp that the 2nd half of P is ready\n"
                          "        cute.arch.fence_view_async_tmem_store()\n", ""),), **FLASH),
    Case("flash-shared-race", fix="188643b8", kind="statistics written past their shared memory",
         script="flash_attention_forward.py", arguments="--queries 128 --batch 4 --one-sm --lse",
         edits=((FORWARD, "self.m_block_size + self.q_stage * self.m_block_size",
                 "self.m_block_size + self.m_block_size * 2"),), **FLASH),
    Case("flash-empty-keys", fix="03cd0651", kind="no keys: the host divides by zero",
         script="tests/cute/test_flash_attn.py::test_flash_attn_seqlen_k_zero",
         edits=(("flash_attn/cute/interface.py", "if seqlen_k == 0 or total_q == 0:", "if total_q == 0:"),), **FLASH),
    Case("flash-sink-room", fix="5844fa69", kind="shared memory too small for a sink's row maxima",
         script="flash_attention_forward.py", arguments="--sink",
         edits=((FORWARD, "self.q_stage * self.m_block_size * 2",
                 "self.q_stage * self.m_block_size * (1 if const_expr(mLSE is None) else 2)"),), **FLASH),
    Case("flash-sink-maxima", fix="2f78d484", kind="row maxima read that nobody wrote",
         script="flash_attention_forward.py", arguments="--sink",
         edits=((FORWARD, "if const_expr(mLSE is not None or learnable_sink is not None):\n"
                          "                        sScale[",
                 "if const_expr(mLSE is not None):\n                        sScale["),), **FLASH),
    Case("flash-empty-tiles", fix="fec3a6a1", kind="hang: empty tiles of a persistent kernel",
         script="flash_attention_empty_tiles.py",
         edits=((FORWARD, "if const_expr(self.use_block_sparsity) or has_work:", "if has_work:"),), also=ZEROS,
         **FLASH),
    Case("flash-empty-values", fix="ours", kind="a tile without keys is 0 times what the tile before it left",
         script="flash_attention_empty_tiles.py", arguments="--infinite",
         mends=ZEROS, **FLASH),
    Case("flash-lists-refilled", fix="ours", kind="a buffer is filled again after one barrier",
         script="tests/cute/test_block_sparsity.py::test_fixed_length_masks[mini_causal-4-2-64-32-256-512]",
         mends=(REFILLED,), **FLASH),
    Case("flash-split-deadlock", fix="3fa81057", kind="hang: packed, block-sparse and split",
         script="tests/cute/test_mask_mod_varlen.py::test_varlen_block_sparse_splitkv_matches_unsplit"
                "[seqlens_q1-seqlens_k1-all_true-False]", **LISTS),
    Case("flash-sentinel", fix="c68c592f", kind="gradients added at row -1",
         script="flash_attention_sparse_mla.py",
         edits=(("flash_attn/cute/flash_bwd_mla_dk_sm100.py", "if seqlen_k_idx_in_batch >= 0:",
                 "if seqlen_k_idx_in_batch >= -1:"),
                ("flash_attn/cute/flash_bwd_mla_sm100.py", "if gmem_n_idx >= 0:", "if gmem_n_idx >= -1:")), also=RELAY,
         **FLASH),
    Case("flash-relay-scope", fix="ours", kind="an arrival's scope: cp.async, then the other CTA's MMA",
         script="flash_attention_sparse_mla.py", mends=RELAY, **FLASH),
    Case("flash-bwd-fence", fix="d91ea94f", kind="shared memory handed back to TMA without a proxy fence",
         script="flash_attention_backward.py",
         edits=((BACKWARD, "_tmem_store()\n                cute.arch.fence_view_async_shared()", "_tmem_store()"),),
         **GRADIENTS),
    Case("flash-bwd-exit", fix="a5856bfa", kind="the CTA exits under its last bulk copies", arch="sm_90a",
         script="flash_attention_backward.py",
         edits=((HOPPER_BACKWARD, "        if const_expr(not self.deterministic):\n"
                                  "            cute.arch.cp_async_bulk_wait_group(0, read=True)\n", ""),), **GRADIENTS),
    Case("flash-bwd-preprocess", fix="4460ebbc", kind="no wait for the kernel before (PDL)", arch="sm_90a",
         script="tests/cute/test_mask_mod.py::test_sm90_block_sparse_explicit_192_block_size",
         edits=(("flash_attn/cute/block_sparse_utils.py", "cute.arch.griddepcontrol_wait()", "pass"),), **GRADIENTS),
    Case("quack-gather-scope", fix="3d58cbf", kind="an arrival's scope: cp.async, then the other CTA's MMA",
         script="quack_gather_gemm.py",
         edits=((GEMM, """mbarrier_arrive_release_cluster(
                            ab_pipeline.sync_object_full.get_barrier(ab_consumer_state.index),
                            cta_rank_in_cluster & 0xFE,
""", """ab_pipeline.sync_object_full.arrive_mbarrier(
                            ab_consumer_state.index, dst_rank=cta_rank_in_cluster & 0xFE,
"""),), **GATHER),
    Case("quack-gather-fence", fix="ours", kind="cp.async, then the MMA, without a proxy fence",
         script="quack_gather_gemm.py", mends=GATHERED, **QUACK),
    Case("quack-load-barrier", fix="34cfe42", kind="a named barrier of too few threads",
         script="quack_gather_gemm.py", arguments="--add",
         edits=((GEMM, "num_threads=(self.num_ab_load_warps + 1) * cute.arch.WARP_SIZE",
                 "num_threads=2 * cute.arch.WARP_SIZE"),), **GATHER),
    Case("quack-setmaxnreg", fix="97c98dc", kind="hang: registers never given back", script="quack_gather_gemm.py",
         edits=((GEMM, """        if warp_idx == self.epi_load_warp_id:
            if const_expr(self.gather_A):
                cute.arch.setmaxregister_decrease(self.num_regs_other)
""", """        if warp_idx == self.epi_load_warp_id:
"""),), **GATHER),
    Case("quack-sm120-fence", fix="0ab127b", kind="shared memory handed back to TMA without a proxy fence",
         arch="sm_120a", script="quack_gemm.py",
         edits=(("quack/gemm_sm120.py", f"{INDENT}cute.arch.fence_view_async_shared()\n"
                                        f"{INDENT}cute.arch.sync_warp()\n{INDENT}ab_pipeline.consumer_release",
                 f"{INDENT}ab_pipeline.consumer_release"),),
         **QUACK),
    Case("quack-layernorm", fix="9310d47", kind="elements outside the row in the variance", arch="sm_90a",
         script="quack_layernorm.py",
         edits=(("quack/rmsnorm.py", "if const_expr(not is_even_N):\n                # OOB lanes are zero-filled",
                 "if const_expr(False):\n                # OOB lanes are zero-filled"),), **QUACK),
    Case("quack-clc-varlen", fix="b6a22fc", kind="tiles of packed rows taken by the wrong grid axis",
         script="quack_gather_gemm.py", arguments="--dynamic",
         edits=(("quack/tile_scheduler.py", """            current_work_idx = Int32(cluster_idx[0])
        else:
            current_work_idx = Int32(cluster_idx[2])
        batch_idx = None""", """            current_work_idx = Int32(cluster_idx[2])
        else:
            current_work_idx = Int32(cluster_idx[2])
        batch_idx = None"""),), **GATHER),
    Case("cutlass-3643", fix="PR #3647", kind="missing wait; scope of an arrival; proxy fence",
         script=f"{PRIMITIVES}/2cta_mma_blockscale_m128.py", files=(PRIMITIVES,),
         mends=((f"{PRIMITIVES}/2cta_mma_blockscale_m128.py", "prims.MemScope.CTA", "prims.MemScope.CLUSTER"),
                (f"{PRIMITIVES}/2cta_mma_blockscale_m128.py", PEER_ARRIVAL, PEER_WAIT + PEER_ARRIVAL)),
         **CUTLASS),
    Case("cutlass-2599", fix="9ca7e877b", kind="a stride of grouped heads",
         script=f"{ATTENTION}/fmha/fmha.py", files=(f"{ATTENTION}/fmha", f"{EXAMPLES}/helpers"),
         arguments=f"--q_shape 1,256,4,128 --k_shape 1,256,2,128 {ONCE}",
         edits=((f"{ATTENTION}/fmha/fmha.py", "((d, d * h_r), stride_b_q)", "((d * h_k, d), stride_b_q)"),),
         **CUTLASS),
    Case("cutlass-masked-gemm", fix="ours", kind="a read past the last group", **CUTLASS,
         script=f"{MASKED}/masked_grouped_gemm.py", files=(MASKED,), arguments=f"--mnkl 256,256,128,1 {ONCE}",
         mends=((f"{MASKED}/masked_grouped_gemm.py", """\
                    cur_boundary = gidx_mapping[cur_tile_coord[2]]
                    is_valid_m = cur_m < cur_boundary
""", """                    if work_tile.is_valid_tile:
                        cur_boundary = gidx_mapping[cur_tile_coord[2]]
                        is_valid_m = cur_m < cur_boundary
"""),)),
    Case("cutlass-decode-store", fix="ours", kind="no wait after the first store to O", **CUTLASS,
         script=f"{MIXED}/mixed_input_fmha_decode.py", files=(MIXED, f"{EXAMPLES}/helpers"),
         arguments=f"--batch 1 --seqlen 512 {ONCE}",
         mends=((f"{MIXED}/mixed_input_fmha_decode.py", f"{COPY_O}\n            # Initialize colsum",
                 f"{COPY_O}            cute.arch.fence_view_async_tmem_store()\n            # Initialize colsum"),)),
    Case("cutlass-prefill-free", fix="ours", kind="tensor memory freed under its readers", **CUTLASS,
         script=f"{MIXED}/mixed_input_fmha_prefill_d256.py", files=(MIXED, f"{EXAMPLES}/helpers"),
         arguments=f"--q_shape 1,1,128,256 --k_shape 1,1,256,256 {ONCE}",
         mends=((f"{MIXED}/mixed_input_fmha_prefill_d256.py", "            tmem.relinquish_alloc_permit()\n",
                 "            cute.arch.fence_view_async_tmem_load()\n"
                 "            cute.arch.barrier(barrier_id=15, number_of_threads=128)\n"
                 "            tmem.relinquish_alloc_permit()\n"),)),
    Case("cutlass-mla-exchange", fix="ours", kind="row maxima overwritten before they are read", **CUTLASS,
         script=f"{ATTENTION}/mla/mla_decode_fp8.py", files=(f"{ATTENTION}/mla", f"{EXAMPLES}/helpers"),
         arguments=f"--batch_size 1 --seq_len_k 256 --split_kv 1 --seq_len_q 1 --num_heads 128 {ONCE}",
         mends=((f"{ATTENTION}/mla/mla_decode_fp8.py", "\n        # find correction factor\n",
                 "            self.softmax_exchange_sync_bar.wait()\n\n        # find correction factor\n"),),
         also=((f"{ATTENTION}/mla/mla_decode_fp8.py", """\
            if cutlass.const_expr(self.warps_in_n == 2):
                if cute.elem_less(cLSE[tidx][0], common_params.H):
                    gLSE[tidx] = lse
""", """\
            if cutlass.const_expr(self.warps_in_n == 2):
                if tidx < 64 and cute.elem_less(cLSE[tidx][0], common_params.H):
                    gLSE[tidx] = lse
"""),)),
    Case("flashinfer-2996", fix="479f67e7", kind="threads that return before a barrier of the CTA",
         base="479f67e7", **TINYGEMM),
    Case("flashinfer-3630", fix="0b727e676", kind="a wait is retried on another stage's mbarrier",
         base="0b727e676", **TINYGEMM),
    Case("deepgemm-292", fix="d30fc36", kind="a pair's tensor memory freed, the peer may have exited",
         base="d30fc36", **DEEPGEMM),
)  # fmt: skip
