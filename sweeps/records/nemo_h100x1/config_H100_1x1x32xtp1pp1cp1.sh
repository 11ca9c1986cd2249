#!/usr/bin/env bash
# Exported by lora_tune 0.1.0 on 2026-11-21 11:10 UTC
# study nemo_h100x1, hash e719e2ccf06a, trial 11
# time to eval loss 0.985: 6.752 s, 90% interval 5.9 to 7.1 s; 1664 samples; 1 run, seed 1012
# Run: source config_H100_1x1x32xtp1pp1cp1.sh && python -m lora_tune.recipes.nemo_lora
export LR=0.0063883091267156085
export MAX_STEPS=150
export WARMUP_STEPS=0
export TP=1
export PP=1
export CP=1
export MINIBS=32
export MBS=16
export SEQ=512
export VAL_CHECK_INTERVAL=128
export WARMUP_TRAIN_STEPS=3
export WARMUP_VALIDATION_STEPS=2
export NUM_WORKERS=0
export SEED=1012
export TARGET=0.985
export THREADS=1
export DGXSYSTEM=H100
export DGXNNODES=1
export DGXNGPU=1
export DATADIR=lora_tune/recipes/tiny
export MODEL=/tmp/lora_tune/base
