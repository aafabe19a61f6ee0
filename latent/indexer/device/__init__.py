"""Device code of the indexer's kernels; the same for sm_90a and sm_100a."""
