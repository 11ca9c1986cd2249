"""The runs of ``trackers.tar.gz``, written by MLflow 3.17 and W&B 0.31 themselves: ``python make.py FOLDER``.

Run where both are installed, then: ``tar -czf trackers.tar.gz mlflow.db mlruns wandb`` in FOLDER.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

RUNS = [(lr, rank) for lr in (1e-4, 3e-4, 1e-3, 3e-3) for rank in (4, 16)]


def evals(lr: float, rank: int) -> list[tuple[int, float]]:
    """Steps and eval losses of a run: the best learning rate is 1e-3, and a higher rank is better."""
    return [(s, round(0.8 + (math.log10(lr) + 3) ** 2 * 0.2 + 1 / rank + 2 / s, 5)) for s in (100, 200)]


def mlflow_runs(uri: str) -> None:
    import mlflow

    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("lora")
    for lr, rank in RUNS:
        with mlflow.start_run(run_name=f"lr{lr}-r{rank}"):
            mlflow.log_params({"learning_rate": lr, "lora_r": rank, "optimizer": "adamw"})
            for step, loss in evals(lr, rank):
                mlflow.log_metric("eval/loss", loss, step=step)


def wandb_runs(folder: Path) -> None:
    import wandb

    for lr, rank in RUNS[:3]:
        config = {"learning_rate": lr, "lora": {"r": rank}, "lora_r": rank}
        run = wandb.init(project="lora", dir=str(folder), config=config, name=f"lr{lr}-r{rank}")
        for step, loss in evals(lr, rank):
            run.log({"eval/loss": loss, "train/loss": loss * 0.9}, step=step)
        run.finish()


if __name__ == "__main__":
    out = Path(sys.argv[1]).resolve()
    os.chdir(out)
    os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    mlflow_runs(f"file:{out}/mlruns")
    mlflow_runs(f"sqlite:///{out}/mlflow.db")
    wandb_runs(out)
