"""Packed trials: many LoRA trainings side by side over one frozen base, each with its own knobs."""
