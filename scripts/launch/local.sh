#!/bin/bash
# scripts/launch/local.sh COUNT [CONFIG.py] [--flags]: COUNT processes on this machine, on its CPU. One process takes
# all GPUs of a machine, so nobody needs this with GPUs.
set -e
count=$1 port=${PORT:-8476}
shift
export JAX_PLATFORMS=cpu JAX_COORDINATOR_ADDRESS="localhost:$port" JAX_NUM_PROCESSES="$count"
for ((process = 1; process < count; process++)); do
    JAX_PROCESS_ID=$process python -u -m r2sm_jax.train "$@" &
done
JAX_PROCESS_ID=0 python -u -m r2sm_jax.train "$@"
wait
