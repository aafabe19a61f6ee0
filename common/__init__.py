"""Code that all kernels share: hardware numbers, compilation and launch, choice of a backend, NVFP4, TMA, mbarriers,
tensor memory."""
