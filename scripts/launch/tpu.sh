#!/bin/bash
# TPU=NAME ZONE=us-east5-b scripts/launch/tpu.sh configs/r2sm_cocoa_cls.py --run /data/runs/cocoa
# The same command on every host of a TPU pod slice, each with its own chips. The package is installed on all hosts, and
# /data (Filestore, or a bucket mounted with gcsfuse) is the same on all.
set -e
printf -v flags ' %q' "$@"
gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker all \
    --command "python3 -u -m r2sm_jax.train$flags --distributed.detect"
