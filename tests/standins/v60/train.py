"""Stands for v6.0's train.py: what matters is that it names Megatron-Bridge and two variables."""

import os

FRAMEWORK = "megatron.bridge"
PRECISION = os.environ.get("FP4") or os.environ.get("FP8")
