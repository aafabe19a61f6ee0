"""Device code of the caches' kernels; the same for sm_90a and sm_100a."""
