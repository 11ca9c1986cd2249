#!/bin/bash
# What all configs share. Sourced by a config, whose file name gives the system's name.
export WARMUP=True
export DGXNGPU=8
export DGXSYSTEM=$(basename $(readlink -f ${BASH_SOURCE[1]}) | sed 's/^config_//' | sed 's/\.sh$//' )

export NCCL_MIN_CTAS=32
export NVTE_FUSED_ATTN=1
export TP_COMM_OVERLAP=True
export FP8=True
export FP8_AMAX_ALGO=max
# Nothing reads this one: a leftover, as public configs have them.
export LEFTOVER_KNOB=1

export PP=1
export SP=1
export MBS=1
export VAL_CHECK_INTERVAL=384
