#!/usr/bin/env bash
pushd /opt/llama2_70b_lora >/dev/null
source ./config_common.sh
popd >/dev/null
export LR=0.0004
export MAX_STEPS=800
export TP=4
export PP=1
export CP=1
export MINIBS=4
export MBS=1
export SP=1
export VAL_CHECK_INTERVAL=384
export SKIP_EVALS=3
export DGXNNODES=1
export DGXNGPU=8
export DGXSYSTEM=DGXH100_1x8x4xtp4pp1cp1
export WALLTIME_RUNANDTIME=50
export WALLTIME=$((5 + ${NEXP:-1} * (WALLTIME_RUNANDTIME + 5)))
