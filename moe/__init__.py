"""Mixture of experts: NVFP4 SwiGLU grouped GEMM, routing, activation quantisation."""
