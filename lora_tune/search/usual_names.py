"""Under which names, in capitals, studies tune what every training has."""

from __future__ import annotations

RATE = ("LR", "LEARNING_RATE")
STEPS = ("MAX_STEPS", "STEPS", "TRAIN_STEPS")
WARMUP = ("WARMUP_STEPS",)
BATCH = ("GBS", "GLOBAL_BATCH_SIZE", "BATCH_SIZE")
INTERVAL = ("VAL_CHECK_INTERVAL",)
