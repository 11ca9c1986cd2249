#!/bin/bash
# On every node: torchrun, with the rendezvous on the head node.
set -eu
exec ./torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD:$PORT" train.py "$@"
