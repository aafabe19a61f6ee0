# all kernels are compiled already and carried in .probe/swap/cache
P=$PWD/.probe/swap; export WARPSPEC_CACHE_DIR=$P/cache PYTHONUNBUFFERED=1 BASE=$PYTHONPATH
mkdir -p $OUT/swap-6; ls $P/cache/kernels | wc -l
cd $P/b; export PYTHONPATH=$P/b/src:$P/b/tests/helpers:$P/b/scripts:$BASE
timeout 30 python $P/time6.py 2>&1 | tee $OUT/swap-6/times.txt
python -c "import pytest" 2>/dev/null || export PYTHONPATH=$PYTHONPATH:$P/pt
TEST="python -m pytest --noconftest -p no:cacheprovider -c /dev/null --rootdir=. --color=no -q -s --durations=3 -W ignore tests/gpu/test_swap_gpu.py"
( cd $P/t; export PYTHONPATH=$P/t/src:$P/t/scripts:$BASE; timeout 15 python scripts/trace_run.py > $OUT/swap-6/trace.txt 2>&1 )
tail -9 $OUT/swap-6/trace.txt
i=0
for k in "forced_decisions" "odd_sizes or free_running or no_request or closed" "hundred or co_residency" "graph_replays or torch_compile"; do
  i=$((i+1)); timeout 28 $TEST -k "$k" > $OUT/swap-6/tests-$i.txt 2>&1 &
done
cat > /tmp/once6.py <<'PY'
import torch, bench_swap_ffn as b
from shared.swap_inputs import random_weights
from warpspec.swap import launch
from warpspec.swap.config import Tiles
w = random_weights(device="cuda").prepare(); case = b.Case(w, 1)
call, *_ = case.ours(launch.make_plan(case.problem, case.target, Tiles(tricks="TSFPN")))
call(); torch.cuda.synchronize(); torch.cuda.profiler.start(); call(); torch.cuda.synchronize(); torch.cuda.profiler.stop()
PY
M=gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,lts__t_sectors_op_read.sum,lts__t_sectors_op_write.sum,lts__t_sector_hit_rate.pct,l1tex__m_xbar2l1tex_read_bytes.sum,lts__throughput.avg.pct_of_peak_sustained_elapsed,lts__t_sectors.avg.pct_of_peak_sustained_elapsed,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed,sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_elapsed,sm__cycles_elapsed.max
for c in none all; do mkdir -p /tmp/n$c; TMPDIR=/tmp/n$c timeout 28 ncu --profile-from-start off --cache-control $c --clock-control none --metrics $M --print-units base python /tmp/once6.py > $OUT/swap-6/ncu-$c.txt 2>&1 & done
wait
tail -n 4 $OUT/swap-6/tests-*.txt; grep -h "margins" $OUT/swap-6/tests-*.txt; tail -n 14 $OUT/swap-6/ncu-*.txt
