#!/usr/bin/env bash
# Exported by lora_tune 0.1.0 on 2026-11-22 03:26 UTC
# study peft_h100x1, hash 5e27b949a7e9, trial 27
# time to eval loss 1: 2.618 s, 90% interval 2.1 to 3.1 s; 1280 samples; 1 run, seed 1028
# Run: source config_H100_1x1x32xtp1pp1cp1.sh && python -m lora_tune.recipes.peft_lora
export LR=0.0022514681760945083
export MAX_STEPS=150
export WARMUP_STEPS=0
export TP=1
export PP=1
export CP=1
export MINIBS=32
export MBS=32
export SEQ=512
export VAL_CHECK_INTERVAL=256
export SEED=1028
export TARGET=1.0
export THREADS=1
export DGXSYSTEM=H100
export DGXNNODES=1
export DGXNGPU=1
export MODEL=/tmp/lora_tune/base
