"""lora_tune: hyperparameter sweeps and convergence tuning of LoRA trials on Slurm.

A study file says what may vary; Optuna proposes; submitit launches; the trial's ``:::MLLOG``
lines are the objective: the seconds from ``run_start`` to the eval loss that was asked for.
"""

__version__ = "0.1.0"
