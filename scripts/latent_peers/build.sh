#!/bin/sh
# build.sh FLASH_MLA DEEP_GEMM CUTLASS OUT: peers of scripts/bench_latent.py, from their sources, into OUT. Needs nvcc.
# FlashMLA 9241ae3 and DeepGEMM 54e2261 build with CUTLASS 4.3 headers in four minutes of one core.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
flash_mla=$1 deep_gemm=$2 cutlass=$3 out=$4
common="-O3 -std=c++20 -DNDEBUG --expt-relaxed-constexpr --expt-extended-lambda -w -Xcompiler -fPIC -cudart static"
common="$common -gencode arch=compute_90a,code=sm_90a -I$cutlass/include"
mkdir -p "$out"
csrc=$flash_mla/csrc
# shellcheck disable=SC2086
nvcc $common --use_fast_math -D_USE_MATH_DEFINES -I"$csrc" -I"$csrc/sm90" -I"$csrc/kerutils/include" -shared \
    -o "$out/flash_mla.so" "$here/flash_mla.cu" \
    "$csrc/smxx/decode/get_decoding_sched_meta/get_decoding_sched_meta.cu" "$csrc/smxx/decode/combine/combine.cu" \
    "$csrc/sm90/decode/sparse_fp8/instantiations/model1_persistent_h64.cu" \
    "$csrc/sm90/decode/sparse_fp8/instantiations/model1_persistent_h128.cu" \
    "$csrc/sm90/prefill/sparse/instantiations/phase1_k512.cu"
# shellcheck disable=SC2086
nvcc $common -I"$deep_gemm/deep_gemm/include" -shared -o "$out/deep_gemm.so" "$here/deep_gemm.cu"
