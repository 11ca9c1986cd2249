#!/bin/bash
source $(dirname ${BASH_SOURCE[0]})/config_common.sh
export TP=8
export PP=1
export CP=1
export GLOBAL_BATCH_SIZE=8
export MAX_STEPS=800
export LR=0.0004
export SKIP_EVALS=3
export DGXNNODES=1
export WALLTIME_RUNANDTIME=50
export WALLTIME=$((5 + ${NEXP:-1} * ($WALLTIME_RUNANDTIME + 5)))
