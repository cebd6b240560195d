#!/bin/bash
# scripts/launch/mpirun.sh HOST1,HOST2 configs/r2sm_cocoa_cls.py --run /data/runs/cocoa
# One process a host, by Open MPI 4 or 5; JAX detects only 4, so that the numbers are passed here.
set -e
hosts=$1
shift
export JAX_COORDINATOR_ADDRESS="${hosts%%,*}:8476"
mpirun --host "$hosts" --map-by ppr:1:node -x PATH -x JAX_COORDINATOR_ADDRESS bash -c 'python -u -m r2sm_jax.train "$@" \
    --distributed.processes "$OMPI_COMM_WORLD_SIZE" --distributed.process "$OMPI_COMM_WORLD_RANK"' train "$@"
