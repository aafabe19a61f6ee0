timeout 30 python scripts/bench_swap_ffn.py --bytes --batches 1 2>&1 | cut -c1-250
timeout 60 python scripts/bench_swap_ffn.py --batches 1 4 --markdown 2>&1 | cut -c1-250
