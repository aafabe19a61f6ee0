mkdir -p /tmp/latent_cold /tmp/latent_pt; tar xJf $HOME_JOB/pt.txz -C /tmp/latent_pt
export WARPSPEC_CACHE_DIR=/tmp/latent_cold PYTHONUNBUFFERED=1 PYTHONPATH=$PYTHONPATH:/tmp/latent_pt/ptsite
time timeout 85 python -m pytest -m gpu -v -s --color=no -p no:cacheprovider -W ignore --durations=5 tests/gpu/test_deepseek_v4_cache_gpu.py
