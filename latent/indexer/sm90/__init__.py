"""The indexer's scores on sm_90a: FP8 tensor cores, on FP4 or FP8 pages."""
