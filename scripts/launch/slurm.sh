#!/bin/bash
# sbatch scripts/launch/slurm.sh configs/r2sm_cocoa_cls.py --run /data/runs/cocoa
# One process a node, with all eight GPUs of it. All nodes see the same /data. Five minutes before the time limit the
# run saves a checkpoint and ends; submit again with --resume.
#SBATCH --nodes=8 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=96
#SBATCH --time=24:00:00 --signal=TERM@300
srun python -u -m r2sm_jax.train "$@" --distributed.detect --distributed.local-devices "$SLURM_GPUS_ON_NODE"
