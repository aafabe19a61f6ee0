"""Device code of all kernels: TMA, mbarriers, tensor memory, wgmma, NVFP4. Importing it loads the DSL."""
