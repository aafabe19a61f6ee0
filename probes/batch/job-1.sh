. $HOME_JOB/enter_pt.sh
cd tests/gpu; F="test_backward_gpu.py test_moe_gpu.py test_gathered_gpu.py test_index_gpu.py test_projection_gpu.py test_softmax_gpu.py test_topk_gpu.py test_swap_gpu.py test_varlen_gpu.py test_attention_gpu.py test_cache_gpu.py test_flash_attn_gpu.py test_deepseek_v4_cache_gpu.py test_documents_gpu.py test_demo_gpu.py test_shared_kv_gpu.py"
cd ../..; L=""; for f in $F; do L="$L tests/gpu/$f"; done
python -m pytest -m gpu $L -n 28 --dist worksteal -v --color=no -p no:cacheprovider --timeout 150 --durations=15 -W ignore > $JOB_OUT/tests.txt 2>&1
echo rc $?; tail -n 40 $JOB_OUT/tests.txt
