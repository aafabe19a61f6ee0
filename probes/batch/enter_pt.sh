if ! [ -d /tmp/ptsite ]; then tar xJf $HOME_JOB/pt.txz -C /tmp; fi
export PYTHONPATH=$PYTHONPATH:/tmp/ptsite
