#!/bin/bash
# run.sh ARCH CHECK(or -) script args
A=$1; C=$2; shift 2; [ $C = - ] && C=
cd /tmp/public/probe; PUB_ARCH=$A PUB_CHECK=$C WARPSPEC_SIM_PROCESSES=1 PYTHONPATH=/work/wt/public/src timeout ${T:-300} nice -n 3 /work/main/.venv/bin/python "$@" 2>&1 | grep -v Warning; echo "rc ${PIPESTATUS[0]}"
