"""``python -m lora_tune.interchange --study NAME``: all trials as CSV, Parquet, or runs of MLflow, W&B, TensorBoard."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from lora_tune.analysis.intervals import time_interval
from lora_tune.base.errors import InputError, SetupError
from lora_tune.base.format import counted, visible
from lora_tune.commands.options import guarded, load_review, output_option, storage_option, study_option
from lora_tune.commands.trackers import to_mlflow, to_tensorboard, to_wandb
from lora_tune.config.study import Study
from lora_tune.objectives import objective_of
from lora_tune.store.metrics import as_mapping
from lora_tune.store.records import StudyRecords, Trial, Verdict

Row = dict[str, Any]


def trial_rows(study: Study, sweep: StudyRecords, now: float) -> list[Row]:
    """One row a trial; seconds and node-hours; samples are counted in ``progress_unit``; None where unknown.

    Parameters stand under ``param.NAME``, further metrics under their own names (see ``store.metrics``).
    """
    measured = {t.number: as_mapping(t.metrics) for t in sweep.trials.values()}
    others = sorted({name for known in measured.values() for name in known} - {"objective", "node_hours"})
    names = dict.fromkeys(name for t in sweep.trials.values() for name in t.parameters)
    rows = []
    for trial in sweep.trials.values():
        attempts = sweep.attempts_of(trial.number)
        low, high = _interval(study, trial)
        rows.append(
            {
                "study": study.name,
                "study_hash": sweep.digest,
                "trial": trial.number,
                "state": str(trial.state),
                "verdict": str(trial.verdict) if trial.verdict else None,
                "objective": trial.metrics.objective,
                "seconds": trial.seconds,
                "seconds_low": low,
                "seconds_high": high,
                "samples": trial.samples,
                "progress_unit": study.progress_unit,
                "seed": trial.seed,
                "proposed_at": trial.proposed_at,
                "finished_at": trial.finished_at,
                "attempts": len(attempts),
                "node_hours": sum(a.node_hours(now) for a in attempts),
                "nodes": " ".join(sorted({n for a in attempts for n in a.nodes})),
                "failure": attempts[-1].failure if attempts else "",
                "sentence": trial.sentence,
                "why": trial.why,
                **{name: measured[trial.number].get(name) for name in others},
                **{f"param.{name}": trial.parameters.get(name) for name in names},
            }
        )
    return rows


def _interval(study: Study, trial: Trial) -> tuple[float | None, float | None]:
    known = trial.verdict is Verdict.REACHED and trial.seconds is not None and trial.samples is not None
    return time_interval(trial) if known and objective_of(study).timed else (None, None)


def eval_rows(sweep: StudyRecords) -> Iterator[Row]:
    """One row an eval, of every attempt."""
    for (trial, attempt), evals in sorted(sweep.evals.items()):
        for point in evals:
            row = {"trial": trial, "attempt": attempt, "samples": point.samples, "loss": point.loss}
            yield row | {"seconds": point.seconds}


def write_csv(path: Path, rows: list[Row]) -> None:
    """Rows as CSV that a spreadsheet opens without acting on it.

    Control characters in texts become spaces, and a text that a spreadsheet would take for a formula gets a leading
    apostrophe. Parquet keeps texts exactly.
    """
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = visible(value)
    return f"'{text}" if text.lstrip()[:1] in ("=", "+", "-", "@") else text


def write_parquet(path: Path, rows: list[Row], evals: Mapping[int, list[Row]]) -> None:
    """Rows as Parquet, each with its evals as ``eval_curve``. Numbers beside texts become texts. Needs pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise SetupError("Parquet needs pyarrow: pip install 'lora-tune[parquet]'") from error
    columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}
    for name, values in columns.items():
        if len({"number" if type(v) in (int, float) else type(v) for v in values if v is not None}) > 1:
            columns[name] = [None if v is None else str(v) for v in values]
    columns["eval_curve"] = [
        [{"samples": e["samples"], "loss": e["loss"], "seconds": e["seconds"]} for e in evals.get(row["trial"], [])]
        for row in rows
    ]
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


@click.command()
@study_option
@storage_option
@output_option
@click.option("--csv", "csv_file", type=click.Path(path_type=Path), help="trials to this file, evals to *-evals.csv")
@click.option("--parquet", type=click.Path(path_type=Path), help="trials with their evals to this file")
@click.option("--mlflow", help="finished trials to the MLflow server at this address, or sqlite:///FILE")
@click.option("--tensorboard", type=click.Path(path_type=Path), help="finished trials below this folder")
@click.option(
    "--wandb", type=click.Path(path_type=Path), help="finished trials as offline runs of W&B below this folder"
)
@guarded
def main(
    study_name: str,
    storage: str | None,
    output: Path | None,
    csv_file: Path | None,
    parquet: Path | None,
    mlflow: str | None,
    tensorboard: Path | None,
    wandb: Path | None,
) -> None:
    """Hand all trials to other tools. Several forms may be asked for at once; the sweep is only read.

    Exit codes: 0 written; 2 your input; 3 the machine.
    """
    if not (csv_file or parquet or mlflow or tensorboard or wandb):
        raise InputError(
            "nothing to write; "
            "give --csv FILE, --parquet FILE, --mlflow ADDRESS, --tensorboard FOLDER or --wandb FOLDER"
        )
    review = load_review(study_name, output, storage)
    study, sweep = review.study, review.sweep
    rows, points = trial_rows(study, sweep, time.time()), list(eval_rows(sweep))
    trials = counted(len(rows), "trials")
    if csv_file:
        write_csv(csv_file, rows)
        beside = csv_file.with_name(f"{csv_file.stem}-evals.csv")
        write_csv(beside, points)
        click.echo(f"{csv_file}: {trials}\n{beside}: {counted(len(points), 'evals')}")
    if parquet:
        last = {t: sweep.last_evals(t) for t in sweep.trials}
        write_parquet(parquet, rows, {t: [e._asdict() for e in evals] for t, evals in last.items()})
        click.echo(f"{parquet}: {trials}")
    if mlflow:
        written, there = to_mlflow(study, sweep, mlflow)
        click.echo(f"MLflow experiment {study.name}: {counted(written, 'runs')} written, {there} already existed")
    if tensorboard:
        click.echo(f"{tensorboard}: {counted(to_tensorboard(study, sweep, tensorboard), 'runs')} written")
    if wandb:
        runs = counted(to_wandb(study, sweep, wandb), "runs")
        click.echo(f"{wandb}: {runs} written; send them: wandb sync {wandb}/wandb/offline-*")
