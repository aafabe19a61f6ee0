export WARPSPEC_CACHE_DIR=$HOME_JOB/cache WARPSPEC_LATENT_PEERS=$HOME_JOB/peers
export PYTHONPATH=scripts:$HOME_JOB:$PYTHONPATH PYTHONUNBUFFERED=1
timeout 60 python $HOME_JOB/bench2.py
for k in gathered scores; do
  echo "== ncu $k"
  timeout 25 ncu --clock-control none --profile-from-start off --section SpeedOfLight --section WarpStateStats --section SchedulerStats --section SourceCounters -f -o $JOB_OUT/$k python $HOME_JOB/ncu1.py $k 2>&1 | grep -v "^==PROF"
  ncu --import $JOB_OUT/$k.ncu-rep --page source --csv > $JOB_OUT/$k.csv 2>&1; gzip -f $JOB_OUT/$k.csv; rm -f $JOB_OUT/$k.ncu-rep
done
