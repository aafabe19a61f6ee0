"""What the kernels share: targets, compile cache, TMA, pipelines, tensor memory, tile schedulers."""
