// Names of FlashInfer's host code that its .cu files mention, so that nvcc compiles their kernels to PTX alone.
#pragma once
#include <cstdint>
#include <iostream>

struct TensorView {
  int device() const { return 0; }
  const int64_t* shape() const { return nullptr; }
  void* data_ptr() const { return nullptr; }
};
inline cudaStream_t get_stream(int) { return nullptr; }
inline int get_max_dynamic_smem() { return 0; }
#define TVM_FFI_ICHECK(condition) \
  if (!(condition)) std::cerr
#define TVM_FFI_DLL_EXPORT_TYPED_FUNC(name, function)
