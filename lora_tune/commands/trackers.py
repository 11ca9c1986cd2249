"""Finished trials as runs of experiment trackers: MLflow, TensorBoard and W&B. What is there already is left alone."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lora_tune.base.errors import SetupError
from lora_tune.base.format import visible
from lora_tune.base.whole_steps import whole_step
from lora_tune.config.study import Study
from lora_tune.logs.run import Eval
from lora_tune.store.metrics import as_mapping
from lora_tune.store.records import StudyRecords, Verdict

STUDY_TAG, TRIAL_TAG = "lora_tune.config.study", "lora_tune.trial"
"""Tags by which an MLflow run is found again."""

_NO_RESULT = (Verdict.FAILED, Verdict.INFEASIBLE, Verdict.CANCELLED)
"""Ends of which other tools hear that the run failed."""


@contextlib.contextmanager
def _whole_or_none(discard: Callable[[], object]) -> Iterator[None]:
    """What is written of a trial meanwhile; ``discard`` takes it back where that is interrupted.

    Half of a trial would count as there already.
    """
    try:
        yield
    except BaseException:
        discard()
        raise


def to_mlflow(study: Study, sweep: StudyRecords, address: str) -> tuple[int, int]:
    """Finished trials as runs of an MLflow experiment named after the study; returns (written, there already).

    A run has the trial's parameters, its numbers as metrics, and ``eval_loss`` at steps of samples, or of thousandths
    of an epoch where the log counts epochs. A trial that is
    there already, by its tags, is left alone. Needs mlflow-skinny or mlflow.
    """
    try:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient
    except ModuleNotFoundError as error:
        raise SetupError("MLflow needs its client: pip install 'lora-tune[mlflow]'") from error
    client = MlflowClient(tracking_uri=address)
    existing = client.get_experiment_by_name(study.name)
    experiment = existing.experiment_id if existing else client.create_experiment(study.name)
    known = _runs_there(client, experiment, sweep.digest)
    fresh = [t for t in sweep.trials.values() if t.verdict is not None and str(t.number) not in known]
    for trial in fresh:
        tags = {STUDY_TAG: sweep.digest, TRIAL_TAG: str(trial.number), "verdict": str(trial.verdict)}
        tags["mlflow.runName"] = f"trial {trial.number}"
        begin = round(1000 * trial.proposed_at)
        numbers = [(n, v, 0) for n, v in as_mapping(trial.metrics).items() if isinstance(v, int | float)]
        numbers += [("eval_loss", e.loss, step) for e, step in _with_steps(study, sweep.last_evals(trial.number))]
        metrics = [Metric(n, float(v), begin, step) for n, v, step in numbers if math.isfinite(v)]
        params = [Param(n, visible(v)[:6000]) for n, v in trial.parameters.items()]
        reason = [RunTag("sentence", visible(trial.sentence)[:5000])]
        run = client.create_run(experiment, start_time=begin, tags=tags).info.run_id
        with _whole_or_none(partial(client.delete_run, run)):
            for at in range(0, max(len(metrics), 1), 900):  # the service takes at most 1,000 at a time
                client.log_batch(run, metrics=metrics[at : at + 900], params=params if not at else [], tags=reason)
            failed = trial.verdict in _NO_RESULT
            client.set_terminated(run, "FAILED" if failed else "FINISHED", round(1000 * (trial.finished_at or 0)))
    return len(fresh), len(known)


def _with_steps(study: Study, evals: Sequence[Eval]) -> Iterator[tuple[Eval, int]]:
    return ((e, whole_step(e.samples, study.progress_unit)) for e in evals)


def _runs_there(client: Any, experiment: str, digest: str) -> set[str]:
    trials: set[str] = set()
    token = None
    while True:
        page = client.search_runs([experiment], f"tags.`{STUDY_TAG}` = '{digest}'", page_token=token)
        trials |= {run.data.tags[TRIAL_TAG] for run in page if TRIAL_TAG in run.data.tags}
        token = page.token
        if not token:
            return trials


def to_tensorboard(study: Study, sweep: StudyRecords, folder: Path) -> int:
    """Finished trials as TensorBoard runs below ``folder``: eval loss over samples, hyperparameters, result.

    Needs tensorboard; written through torch's SummaryWriter. Returns the number of runs written.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise SetupError("TensorBoard needs its package: pip install 'lora-tune[tensorboard]'") from error
    written = 0
    for trial in sweep.trials.values():
        place = folder / f"{study.name}-{trial.number:04d}"
        if trial.verdict is None or place.exists():
            continue
        with _whole_or_none(partial(shutil.rmtree, place)), SummaryWriter(str(place)) as writer:
            for e, step in _with_steps(study, sweep.last_evals(trial.number)):
                writer.add_scalar("eval_loss", e.loss, step, walltime=trial.proposed_at + e.seconds)
            numbers = ("objective", "samples_per_second", "crossing_samples", "node_hours")
            known = as_mapping(trial.metrics)
            results = {name: float(known[name]) for name in numbers if name in known}
            parameters = {n: visible(v) if isinstance(v, str) else v for n, v in trial.parameters.items()}
            writer.add_hparams(parameters, results, run_name=".")
            writer.add_text("sentence", visible(trial.sentence))
        written += 1
    return written


def to_wandb(study: Study, sweep: StudyRecords, folder: Path) -> int:
    """Finished trials as offline runs of Weights & Biases below ``folder/wandb``; returns how many were written.

    A run has the trial's parameters as its config, its numbers as its summary, and ``eval_loss`` over ``samples``. A
    trial that is there already is left alone. Nothing is sent: ``wandb sync`` does that. Needs wandb.
    """
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise SetupError("Weights & Biases needs its package: pip install 'lora-tune[wandb]'") from error
    folder.mkdir(parents=True, exist_ok=True)  # wandb would write elsewhere
    quiet = wandb.Settings(
        silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True
    )
    written = 0
    for trial in sweep.trials.values():
        name = f"{sweep.digest[:8]}-{trial.number:04d}"
        if trial.verdict is None or any(folder.glob(f"wandb/offline-run-*-{name}")):
            continue
        config = {n: visible(v) if isinstance(v, str) else v for n, v in trial.parameters.items()}
        run = wandb.init(
            project=study.name, name=f"trial {trial.number}", id=name, dir=str(folder), mode="offline", config=config,
            tags=[str(trial.verdict)], notes=visible(trial.sentence), settings=quiet,
        )  # fmt: skip
        with _whole_or_none(partial(_discard_wandb, run, folder, name)):
            run.define_metric("eval_loss", step_metric="samples")
            for e in sweep.last_evals(trial.number):
                run.log({"eval_loss": e.loss, "samples": e.samples, "seconds": e.seconds})
            run.summary.update(as_mapping(trial.metrics))
            run.finish(exit_code=int(trial.verdict in _NO_RESULT))
        written += 1
    return written


def _discard_wandb(run: Any, folder: Path, name: str) -> None:
    run.finish(exit_code=1)
    for half in folder.glob(f"wandb/offline-run-*-{name}"):
        shutil.rmtree(half)
