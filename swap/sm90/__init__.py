"""The product kernels for sm_90a, and the fused kernel."""
