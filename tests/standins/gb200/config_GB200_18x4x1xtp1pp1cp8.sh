#!/bin/bash
source $(dirname ${BASH_SOURCE[0]})/config_common.sh
export MAX_STEPS=800
export LR=0.0005
export MINIBS=1
export TP=1
export CP=8
export DGXNNODES=18
export WALLTIME_RUNANDTIME=20
export WALLTIME=$((5 + ${NEXP:-1} * ($WALLTIME_RUNANDTIME + 5)))
