"""``python -m benchmarks.public_scripts FOLDER --work NEW -- COMMAND...``: a public script, from ``init`` to its row.

FOLDER is a checkout in which COMMAND runs; it is not edited. The command runs once, ``init`` writes a study from its
output, the sweep runs, and the original and the recommended command run alternately with further seeds. Lines marked
EDIT are printed and left unchanged. Prints the row of docs/own-scripts.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev

import click

from lora_tune import Sweep
from lora_tune.config.study import load_study
from lora_tune.workloads import load as load_workload
from lora_tune.workloads.base import Proposal, Value, Workload
from lora_tune.workloads.config_file import value_text

FIRST_SEED = 9001
"""First seed of the comparison; no sweep draws it."""
LONGEST = 900.0
"""Timeout of one run in seconds."""


def first_run(folder: Path, command: tuple[str, ...], log: Path) -> None:
    """Run the original command once, with its output in ``log``."""
    with log.open("wb") as file:
        done = subprocess.run(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, timeout=LONGEST, check=False)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)} ended with {done.returncode}; see {log}")


def study_of(folder: Path, command: tuple[str, ...], log: Path, file: Path) -> list[str]:
    """Run ``init``, and remove the word EDIT; return the lines that had it."""
    init = [sys.executable, "-m", "lora_tune.init", "--log", str(log), "--output", str(file), *command]
    done = subprocess.run(init, cwd=folder, capture_output=True, text=True, timeout=LONGEST, check=False)
    if done.returncode:
        raise click.ClickException(done.stderr)
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("EDIT", "as it stands"), encoding="utf-8")
    return [line for line in text.splitlines() if "EDIT" in line]


def lowest(workload: Workload, parameters: Mapping[str, Value], seed: int, folder: Path, *, rising: bool) -> float:
    """The best eval of one run outside a sweep."""
    job = workload.job(Proposal(number=0, attempt=0, seed=seed, parameters=parameters), folder)
    for name, text in job.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **job.environment}
    done = subprocess.run(job.argv, env=environment, capture_output=True, timeout=LONGEST, check=False, cwd=job.cwd)
    reader = workload.reader()
    reader.feed(done.stdout + done.stderr + b"\n")
    losses = [point.loss for point in reader.run().evals if point.loss == point.loss]
    return (max if rising else min)(losses, default=float("-inf") if rising else float("inf"))


def _figure(values: list[float]) -> str:
    return f"{mean(values):.4g} ± {stdev(values):.2g}" if len(values) > 1 else f"{values[0]:.4g}"


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path))
@click.argument("command", nargs=-1, required=True)
@click.option("--work", type=click.Path(path_type=Path), required=True, help="A new folder for log, study and sweep.")
@click.option("--trials", default=14, show_default=True)
@click.option("--parallel", default=1, show_default=True)
@click.option("--seeds", default=10, show_default=True, help="Of the comparison; one where the script has no option.")
def main(folder: Path, command: tuple[str, ...], work: Path, trials: int, parallel: int, seeds: int) -> None:
    """Print the row of one script."""
    work = work.resolve()
    work.mkdir(parents=True)
    log, file = work / "run.log", work / "mine.toml"
    first_run(folder, command, log)
    for line in study_of(folder, command, log, file):
        click.echo(f"EDIT: {line}")
    os.chdir(folder)
    sweep = Sweep(file, output=work / "sweep", trials=trials, parallel=parallel)
    click.echo(sweep.run())
    study, table = load_study(file), tomllib.loads(file.read_text(encoding="utf-8"))["workload"]
    workload, first, chosen = load_workload(study, file), sweep.trials[0], sweep.recommended
    settings, rising = table["log"], study.objective.direction == "maximize"
    understood = f"{', '.join(study.search_space.corner())}; `{settings.get('loss', study.objective.metric)}`"
    click.echo(f"| `{' '.join(command)}` | {understood} | {len(sweep.trials)} |", nl=False)
    if chosen is None or chosen.trial.parameters == first.parameters:
        click.echo(" today's is as good |")
        return
    seeds = seeds if any("{SEED}" in word for word in table["argv"]) else 1
    pairs = [
        tuple(
            lowest(workload, parameters, FIRST_SEED + n, work / f"again{n}{kind}", rising=rising)
            for kind, parameters in enumerate((first.parameters, chosen.trial.parameters))
        )
        for n in range(seeds)
    ]
    today, recommended = (list(values) for values in zip(*pairs, strict=True))
    better = sum((after > before) if rising else (after < before) for before, after in pairs)
    changed = {name: value for name, value in chosen.trial.parameters.items() if first.parameters[name] != value}
    values = ", ".join(f"{name} {value_text(value)}" for name, value in changed.items())
    click.echo(f" {_figure(today)} | {_figure(recommended)}, better with {better} of {seeds}: {values} |")


if __name__ == "__main__":
    main()
