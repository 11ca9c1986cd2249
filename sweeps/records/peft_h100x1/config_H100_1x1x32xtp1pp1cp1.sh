#!/usr/bin/env bash
# Exported by lora_tune 0.1.0 on 2026-11-21 20:11 UTC
# study peft_h100x1, hash cd03fc6b1cd5, trial 0
# time to eval loss 1: 3.827 s, 90% interval 2.7 to 4.9 s; 1536 samples; 1 run, seed 1001
# Run: source config_H100_1x1x32xtp1pp1cp1.sh && python -m lora_tune.recipes.peft_lora
export LR=0.001335149452001033
export MAX_STEPS=250
export WARMUP_STEPS=0
export TP=1
export PP=1
export CP=1
export MINIBS=32
export MBS=32
export SEQ=512
export VAL_CHECK_INTERVAL=256
export SEED=1001
export TARGET=1.0
export THREADS=1
export DGXSYSTEM=H100
export DGXNNODES=1
export DGXNGPU=1
export MODEL=/tmp/lora_tune/base
