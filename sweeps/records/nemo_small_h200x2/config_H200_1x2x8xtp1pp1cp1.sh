#!/usr/bin/env bash
# Exported by lora_tune 0.1.0 on 2026-11-21 23:21 UTC
# study nemo_small_h200x2, hash 2ca5a64851c8, trial 5
# time to eval loss 1: 6.724 s, 90% interval 6.1 to 8.2 s; 1024 samples; 1 run, seed 1006
# chosen with further seeds: 3 runs; mean 8.2 s, 90% interval 7.4 to 9.1 s
# Run: source config_H200_1x2x8xtp1pp1cp1.sh && python -m torch.distributed.run --standalone --nproc-per-node=2 -m lora_tune.recipes.nemo_lora
export LR=0.0017372664859389769
export MAX_STEPS=200
export WARMUP_STEPS=40
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
export DIST_TIMEOUT=60
export SEED=1006
export TARGET=1.0
export THREADS=1
export DGXSYSTEM=H200
export DGXNNODES=1
export DGXNGPU=2
export DATADIR=lora_tune/recipes/tiny
export MODEL=/tmp/lora_tune/base
