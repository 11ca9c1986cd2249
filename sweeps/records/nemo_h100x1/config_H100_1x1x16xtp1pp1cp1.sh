#!/usr/bin/env bash
# Exported by lora_tune 0.1.0 on 2026-11-21 20:11 UTC
# study nemo_h100x1, hash 2b5f81df60d1, trial 21
# time to eval loss 1: 5.995 s, 90% interval 5.0 to 6.9 s; 896 samples; 1 run, seed 1022
# chosen with further seeds: 5 runs; mean 5.7 s, 90% interval 5.3 to 6.2 s
# Run: source config_H100_1x1x16xtp1pp1cp1.sh && python -m lora_tune.recipes.nemo_lora
export LR=0.002028355380454028
export MAX_STEPS=100
export WARMUP_STEPS=20
export TP=1
export PP=1
export CP=1
export MINIBS=16
export MBS=16
export SEQ=512
export VAL_CHECK_INTERVAL=128
export WARMUP_TRAIN_STEPS=3
export WARMUP_VALIDATION_STEPS=2
export NUM_WORKERS=0
export SEED=1022
export TARGET=1.0
export THREADS=1
export DGXSYSTEM=H100
export DGXNNODES=1
export DGXNGPU=1
export DATADIR=lora_tune/recipes/tiny
export MODEL=/tmp/lora_tune/base
