#!/bin/bash
source $(dirname ${BASH_SOURCE[0]})/config_common.sh
source $(dirname ${BASH_SOURCE[0]})/config_common_fp4.sh
export MAX_STEPS=550
export LR=0.0006
export MINIBS=1
export CP=1
export MCORE_CUDA_GRAPH=1
export BUCKET_SIZE=45000000
export NUM_WORKERS=8
export HEALING_ITER=350
export VBOOST_VALUE=0
export DGXNNODES=1
export DGXNGPU=8
export WALLTIME_RUNANDTIME=35
export WALLTIME=$((5 + ${NEXP:-1} * ($WALLTIME_RUNANDTIME + 5)))
