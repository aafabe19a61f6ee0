"""The indexer's kernels for sm_100a only."""
