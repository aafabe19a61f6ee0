// C functions over FlashMLA's sm_90a sparse kernels, for ctypes (scripts/shared/latent_peers.py).
#include "params.h"
#include "sm90/decode/sparse_fp8/splitkv_mla.h"
#include "smxx/decode/get_decoding_sched_meta/get_decoding_sched_meta.h"
#include "smxx/decode/combine/combine.h"
#include "sm90/prefill/sparse/phase1.h"
using bf16 = cutlass::bfloat16_t;
static constexpr float LOG_2_E = 1.44269504f;
extern "C" int fm_meta_bytes() { return sizeof(DecodingSchedMeta); }
extern "C" void fm_decode(int b, int h_q, float scale, int num_blocks, int page, int topk, void* q, void* kv, void* indices, void* sink,
    void* lse, void* out, int extra_blocks, int extra_page, int extra_topk, void* extra_kv, void* extra_indices, int kv_stride, int extra_stride,
    void* meta, void* num_splits, void* lse_accum, void* o_accum, int parts, int make_meta, void* stream) {
  SparseAttnDecodeParams p = {b, 1, h_q, 1, 512, 512, scale, scale * LOG_2_E, num_blocks, page, topk, ModelType::MODEL1,
    (bf16*)q, (bf16*)kv, (int*)indices, nullptr, (float*)sink, (float*)lse, (bf16*)out,
    extra_blocks, extra_page, extra_topk, (bf16*)extra_kv, (int*)extra_indices, nullptr,
    h_q*512, h_q*512, 512, kv_stride, 584, topk, topk, h_q, h_q, h_q*512, h_q*512, 512, extra_stride, 584, extra_topk, extra_topk, (cudaStream_t)stream};
  if (make_meta) {
    GetDecodeSchedMetaParams m = {b, 1, 64, 5, topk, extra_topk, nullptr, nullptr, nullptr, (DecodingSchedMeta*)meta, (int*)num_splits, parts, (cudaStream_t)stream};
    smxx::decode::run_get_decoding_sched_meta_kernel(m);
  }
  p.tile_scheduler_metadata_ptr = (DecodingSchedMeta*)meta; p.num_splits_ptr = (int*)num_splits; p.num_sm_parts = parts;
  p.lse_accum = (float*)lse_accum; p.o_accum = (float*)o_accum;
  p.stride_lse_accum_split = h_q; p.stride_lse_accum_s_q = h_q; p.stride_o_accum_split = h_q*512; p.stride_o_accum_s_q = h_q*512; p.stride_o_accum_h_q = 512;
  if (h_q == 64) sm90::decode::sparse_fp8::run_flash_splitkv_mla_fp8_sparse_kernel<ModelType::MODEL1, 64>(p);
  else sm90::decode::sparse_fp8::run_flash_splitkv_mla_fp8_sparse_kernel<ModelType::MODEL1, 128>(p);
  CombineParams c = {b, 1, h_q, 512, p.lse, p.out, p.stride_lse_b, p.stride_lse_s_q, p.stride_o_b, p.stride_o_s_q, p.stride_o_h_q,
    p.lse_accum, p.o_accum, p.stride_lse_accum_split, p.stride_lse_accum_s_q, p.stride_o_accum_split, p.stride_o_accum_s_q, p.stride_o_accum_h_q,
    p.tile_scheduler_metadata_ptr, p.num_splits_ptr, p.num_sm_parts, p.attn_sink, p.stream};
  smxx::decode::run_flash_mla_combine_kernel<bf16>(c);
}
extern "C" void fm_prefill(int s_q, int s_kv, int h_q, int topk, float scale, void* q, void* kv, void* indices, void* sink, void* out, void* max_logits, void* lse, int sms, void* stream) {
  SparseAttnFwdParams p = {s_q, s_kv, h_q, 1, 512, 512, topk, scale, scale * LOG_2_E, (bf16*)q, (bf16*)kv, (int*)indices, (float*)sink, nullptr,
    h_q*512, 512, 512, 512, topk, topk, (bf16*)out, (float*)max_logits, (float*)lse, sms, (cudaStream_t)stream};
  sm90::fwd::run_fwd_phase1_kernel<512, false>(p);
}
