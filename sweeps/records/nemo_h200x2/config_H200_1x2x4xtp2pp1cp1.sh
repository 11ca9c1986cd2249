#!/usr/bin/env bash
# Exported by lora_tune 0.1.0 on 2026-11-21 23:20 UTC
# study nemo_h200x2, hash a0bd387cc35d, trial 21
# measured 0.617284 samples/s
# Run: source config_H200_1x2x4xtp2pp1cp1.sh && python -m torch.distributed.run --standalone --nproc-per-node=2 -m lora_tune.recipes.nemo_lora
export TP=2
export PP=1
export CP=1
export MINIBS=4
export MBS=1
export SP=1
export FP8=1
export FP8_PARAMS=1
export FP8_ACT=1
export FP8_DPA=1
export OVERLAP=1
export RECOMPUTE_GRANULARITY=''
export RECOMPUTE_METHOD=block
export RECOMPUTE_NUM_LAYERS=8
export LLAMA=70b
export SEQ=8192
export VAL_CHECK_INTERVAL=8
export EVAL_SAMPLES=2
export WARMUP_TRAIN_STEPS=1
export WARMUP_VALIDATION_STEPS=1
export DIST_TIMEOUT=60
export TP_COMM_OVERLAP=1
export MAX_STEPS=4
export SEED=1022
export TARGET=0.925
export THREADS=1
export DGXSYSTEM=H200
export DGXNNODES=1
export DGXNGPU=2
export DATADIR=lora_tune/recipes/tiny
