timeout 60 python scripts/bench_attention.py --only backward --markdown 2>&1 | grep -v Warning
