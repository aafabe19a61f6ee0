python scripts/bench_sweep.py --seconds 140 --workers 12 --json $JOB_OUT/sweep.json > $JOB_OUT/sweep.txt 2>&1; tail -n 60 $JOB_OUT/sweep.txt
