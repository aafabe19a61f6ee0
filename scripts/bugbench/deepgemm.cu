// DeepGEMM's bf16 GEMM for pairs of CTAs, as its just-in-time compiler instantiates it.
#include <deep_gemm/impls/sm100_bf16_gemm.cuh>

using namespace deep_gemm;

static void __instantiate_kernel() {
  auto kernel = reinterpret_cast<void*>(
      &sm100_bf16_gemm_impl<cute::UMMA::Major::K, cute::UMMA::Major::K, 0, 0, 0, 128, 128, 64, 1, 128, 128, 128, 4, 128,
                            128, 2, false, 2, GemmType::Normal, false, cutlass::bfloat16_t, 100>);
  (void)kernel;
}
