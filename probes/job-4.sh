# For the lead's last batch, if there is room: gradients of main as landed, a bias first; then the bench's table.
PY=$(command -v python || command -v python3)
timeout 80 $PY -m pytest -q -m gpu tests/gpu/test_backward_gpu.py -k "bias or 128 or deterministic" -x 2>&1 | tail -15
timeout 60 $PY scripts/bench_attention.py --only backward --markdown
