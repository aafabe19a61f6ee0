// C functions over DeepGEMM's sm90 paged MQA logits, for ctypes. 64 heads, head dim 128, pages of 64.
#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdint>
#include <deep_gemm/impls/sm90_fp8_paged_mqa_logits.cuh>
using namespace deep_gemm;
constexpr int H = 64, D = 128, PAGE = 64, QS = 3, KS = 3, SPLIT = 256, SMS = 132;
static int align(int a, int b) { return (a + b - 1) / b * b; }
typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static CUtensorMap make(CUtensorMapDataType t, int bytes, void* p, int rank, const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box, bool sw) {
  static Encode f = nullptr;
  if (!f) { void* e; cudaDriverEntryPointQueryResult r; cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &e, 12000, cudaEnableDefault, &r); f = (Encode)e; }
  CUtensorMap m; cuuint32_t es[5] = {1,1,1,1,1};
  CUresult r = f(&m, t, rank, p, dims, strides, box, es, CU_TENSOR_MAP_INTERLEAVE_NONE, sw ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r) printf("encode failed %d\n", r);
  return m;
}
// kv: pages of PAGE * 132 bytes. logits fp32 [batch, stride], stride a multiple of 256. meta: int32 [SMS + 1, 2]
extern "C" int dg_logits(int batch, void* q, void* kv, int pages, long page_bytes, void* weights, int* lens, float* logits, int stride, int* table, int table_stride, int* meta, int make_meta, cudaStream_t stream) {
  if (make_meta) {
    auto k = &sched::sm90_paged_mqa_logits_metadata<256, SPLIT, SMS, false>;
    k<<<1, 32, 256 * 4, stream>>>(batch, 1, false, (uint32_t*)lens, nullptr, (uint32_t*)meta);
  }
  cuuint64_t d1[2] = {D, (cuuint64_t)batch * H}, s1[1] = {D}; cuuint32_t b1[2] = {D, H};
  auto tq = make(CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, q, 2, d1, s1, b1, true);
  cuuint64_t d2[3] = {D, PAGE, (cuuint64_t)pages}, s2[2] = {D, (cuuint64_t)page_bytes}; cuuint32_t b2[3] = {D, PAGE, 1};
  auto tk = make(CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, kv, 3, d2, s2, b2, true);
  cuuint64_t d3[2] = {PAGE, (cuuint64_t)pages}, s3[1] = {(cuuint64_t)page_bytes}; cuuint32_t b3[2] = {PAGE, 1};
  auto ts = make(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, (char*)kv + PAGE * D, 2, d3, s3, b3, false);
  cuuint64_t d4[2] = {H, (cuuint64_t)batch}, s4[1] = {H * 4}; cuuint32_t b4[2] = {H, 1};
  auto tw = make(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, weights, 2, d4, s4, b4, false);
  int sa = D * 8, groups = SPLIT / 64;
  int smem = QS * (H * D + align(H * 4, sa)) + align(QS * 16, sa) + groups * (KS * (PAGE * D + align(PAGE * 4, sa)) + align(KS * 16, sa)) + groups * 16 + 4;
  auto kernel = &sm90_fp8_paged_mqa_logits<1, H, D, PAGE, false, false, QS, KS, SPLIT, 128, 512, float>;
  static bool set = false;
  if (!set) { cudaFuncSetAttribute((void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem); set = true; }
  kernel<<<SMS, 640, smem, stream>>>(batch, stride, table_stride, (uint32_t*)lens, logits, (uint32_t*)table, nullptr, (uint32_t*)meta, tq, tk, ts, tw);
  return (int)cudaGetLastError();
}
