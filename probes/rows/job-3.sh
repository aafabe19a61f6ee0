export WARPSPEC_CACHE_DIR=$HOME_JOB/cache OMP_NUM_THREADS=1 QUACK_CACHE_DIR=/tmp/quack_cache PYTHONUNBUFFERED=1
T0=$(date +%s); s() { echo "--- $(( $(date +%s) - T0 )) s: $1"; }
(timeout 60 python $HOME_JOB/rows_bench.py peers > /tmp/rows_compile.log 2>&1) &
C=$!
SWAP=$HOME_JOB/trees/swap/src:$HOME_JOB/tree/scripts:$PYTHONPATH
PYTHONPATH=$SWAP timeout 45 python $HOME_JOB/tree/scripts/bench_swap_ffn.py --no-compile --markdown 2>&1
s "peers"
wait $C; cat /tmp/rows_compile.log
s "softmax"
timeout 55 python $HOME_JOB/rows_bench.py
s "swap tests"
PYTHONPATH=$SWAP timeout 35 python -m pytest -q -m gpu -p no:cacheprovider tests/gpu/test_swap_gpu.py > /tmp/rows_tests.log 2>&1; cut -c1-200 /tmp/rows_tests.log | tail -12
s "ncu"
M=dram__bytes_read.sum,dram__bytes_write.sum,lts__t_sectors_op_read.sum,lts__t_sectors_op_write.sum
for way in fused phases; do
PYTHONPATH=$SWAP timeout 25 ncu --csv --metrics $M --cache-control none --clock-control none --print-units base --replay-mode app-range python $HOME_JOB/tree/scripts/bench_swap_ffn.py --once $way --batches 1 2>&1 | grep '^"0' | cut -d, -f 11-20
done
s "end"
