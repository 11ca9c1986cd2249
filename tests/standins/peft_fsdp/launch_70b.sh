#!/bin/bash
#SBATCH --exclusive
#SBATCH --mem=0
# sbatch -A ACCOUNT -p PARTITION -N NODES launch_70b.sh [arguments of the training script]
set -eu
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
echo "nodes $SLURM_NNODES, head $HEAD"
srun --ntasks-per-node=1 bash -c 'echo "$(hostname): ready"'
srun -l --ntasks-per-node=1 --kill-on-bad-exit=1 "$STANDIN_PYTHON" -u train.py \
    --num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * GPUS_PER_NODE))" "$@"
