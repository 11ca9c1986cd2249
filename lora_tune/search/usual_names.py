"""Usual names, in capitals, of parameters that every training has."""

from __future__ import annotations

RATE = ("LR", "LEARNING_RATE")
STEPS = ("MAX_STEPS", "STEPS", "TRAIN_STEPS")
WARMUP = ("WARMUP_STEPS",)
WARMUP_SHARE = ("WARMUP_RATIO", "WARMUP_FACTOR")
BATCH = ("GBS", "GLOBAL_BATCH_SIZE", "BATCH_SIZE")
INTERVAL = ("VAL_CHECK_INTERVAL",)
DECAY = ("WEIGHT_DECAY",)
CLIP = ("GRADIENT_CLIP_VAL", "GRADIENT_CLIP_NORM", "MAX_GRAD_NORM", "CLIP")
RANK = ("LORA_RANK", "LORA_DIM", "LORA_R", "ADAPTER_DIM", "RANK", "R")
ALPHA = ("LORA_ALPHA", "ALPHA")
DROPOUT = ("LORA_DROPOUT", "DROPOUT")

ALIKE = (RATE, STEPS, WARMUP, WARMUP_SHARE, BATCH, INTERVAL, DECAY, CLIP, RANK, ALPHA, DROPOUT)
"""Each group is one quantity."""

COMMIT, TREE = "COMMIT", "TREE"
"""Parameters of a trial that runs a commit of its script: the commit, and the hash of its files."""
