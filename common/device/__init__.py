"""Code that runs on the GPU, of any kernel: TMA, mbarriers, tensor memory, wgmma, NVFP4. Importing it loads the DSL."""
