#!/usr/bin/env bash
# Exported by lora_tune 0.1.0 on 2026-11-23 15:32 UTC
# study bridge_h200x1, hash 47b9556bf21d, trial 22, measured on 2026-11-23
# recommended: 1.3 s expected (90% interval 1.1 s to 1.6 s, from 1 run of it and the other trials)
# best single run: 1.3 s, trial 22: one of that configuration
# time to eval loss 1: 1.260 s, 90% interval 1.1 to 1.7 s; 640 samples; 1 run, seed 1023
# Run: source config_H200_1x1x8xtp1pp1cp1.sh && python -m lora_tune.recipes.bridge_lora
export LR=0.00206
export MAX_STEPS=150
export WARMUP_STEPS=0
export TP=1
export PP=1
export CP=1
export MINIBS=8
export MBS=8
export SEQ=512
export VAL_CHECK_INTERVAL=128
export WARMUP_TRAIN_STEPS=3
export WARMUP_VALIDATION_STEPS=2
export NUM_WORKERS=0
export VAL_MBS=16
export MCORE_CUDA_GRAPH=1
export FP8=0
export USE_TE_OPS=0
export FUSED_SINGLE_QKV_ROPE=0
export SEED=1023
export TARGET=1.0
export THREADS=1
export CONFIG_FILENAME=config_H200_1x1x8xtp1pp1cp1.sh
export DGXSYSTEM=H200
export DGXNNODES=1
export DGXNGPU=1
export DATADIR=lora_tune/recipes/tiny
export MODEL=/tmp/lora_tune/base
