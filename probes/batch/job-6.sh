. $HOME_JOB/enter_pt.sh
python -m pytest -m gpu tests/gpu/test_deepseek_v4_cache_gpu.py -n 6 -v --color=no -p no:cacheprovider --timeout 200 --durations=10 -W ignore 2>&1
