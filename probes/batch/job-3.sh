python scripts/bench_sweep.py --cliffs --seconds 45 --workers 12 --json $JOB_OUT/cliffs.json 2>&1
