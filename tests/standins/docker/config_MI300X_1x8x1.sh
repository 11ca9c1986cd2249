#!/bin/bash
export DGXNGPU=8
export DGXSYSTEM=$(basename $(readlink -f ${BASH_SOURCE[0]}) | sed 's/^config_//' | sed 's/\.sh$//')
export DGXNNODES=1
export WALLTIME_MINUTES=50
export WALLTIME=$((${NEXP:-1} * WALLTIME_MINUTES))
export NVTE_USE_HIPBLASLT=1
export MAX_STEPS=1024
export TP=1
export PP=1
export CP=1
export MBS=1
export MINIBS=1
export LR=0.0004
export SKIP_EVALS=3
export VAL_CHECK_INTERVAL=384
export FP8_ACTIVATION=True
