"""``python -m benchmarks.warm_start [--seeds N]``: benefit for a search of old runs of other programs.

The exports are those of the tests (``tests/logs/exports``: MLflow's folder and SQLite file, W&B's run files, written by
those programs), of runs with known evals, and an Optuna storage made here from twelve random trials. ``ingest`` reads
each; then the study's sampler proposes, with and without them, from the same seeds. Prints the excess of the best trial
over the optimum, by trials run, and in how many seeds the warm search is better.
"""

from __future__ import annotations

import math
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import optuna
from click.testing import CliRunner

from lora_tune.config.study import Study, load_study
from lora_tune.ingest import main as ingest
from lora_tune.search import priors
from lora_tune.search.observations import Observation
from lora_tune.search.samplers import make_sampler
from tests.logs.exports.make import evals

EXPORTS = Path(__file__).resolve().parents[1] / "tests" / "logs" / "exports" / "trackers.tar.gz"
TEXT = """
name = "own"
[workload]
kind = "command"
argv = ["python", "train.py", "--lr", "{LR}", "--rank", "{RANK}"]
log.kind = "regex"
log.eval = 'step (?P<step>\\d+) val_loss (?P<loss>\\S+)'
[objective]
score = "best_value"
metric = "val_loss"
[space]
LR = { type = "float", low = 1e-5, high = 1e-1, log = true }
RANK = { type = "categorical", choices = [4, 8, 16] }
[budget]
trials = 12
[site]
launcher = "local"
[search]
seed = SEED
"""
TRIALS, SHOWN = 12, (1, 3, 6, 12)
NOISE = 0.01
BEST = evals(1e-3, 16)[-1][1]


def optuna_storage(file: Path) -> None:
    """Store random trials with Optuna."""
    rng = np.random.default_rng(7)

    def loss(trial: optuna.Trial) -> float:
        lr, rank = trial.suggest_float("lr", 1e-5, 1e-1, log=True), trial.suggest_categorical("rank", [4, 8, 16])
        return evals(lr, rank)[-1][1] + NOISE * float(rng.standard_normal())

    sampler = optuna.samplers.RandomSampler(seed=7)
    optuna.create_study(storage=f"sqlite:///{file}", study_name="before", sampler=sampler).optimize(loss, TRIALS)


def study_of(place: Path, seed: int) -> Study:
    """The study with this search seed."""
    file = place / "own.toml"
    file.write_text(TEXT.replace("SEED", str(seed)))
    return load_study(file)


def read(place: Path, source: Path) -> tuple[Observation, ...]:
    """A source's runs as a search starts from them."""
    study, folder = study_of(place, 0), place / f"sweep_{source.name}"
    words = ["--study", str(place / "own.toml"), "--output", str(folder), "--yes", str(source)]
    done = CliRunner().invoke(ingest, words, catch_exceptions=False)
    if done.exit_code:
        raise click.ClickException(done.output)
    return priors.observations(priors.read(folder / "priors.jsonl"), study.target)


def regrets(study: Study, known: Sequence[Observation], seed: int) -> list[float]:
    """Excess of the true value of the apparently best trial over the optimum, after each trial."""
    own = optuna.create_study(sampler=make_sampler(study, lambda: tuple(known)))
    rng, space, truths, seen = np.random.default_rng(seed), study.search_space.distributions(), [], []
    for _ in range(TRIALS):
        trial = own.ask(space)
        truth = evals(trial.params["LR"], trial.params["RANK"])[-1][1]
        truths.append(truth)
        seen.append(truth + NOISE * float(rng.standard_normal()))
        own.tell(trial, seen[-1])
    return [truths[int(np.argmin(seen[: n + 1]))] - BEST for n in range(TRIALS)]


@click.command()
@click.option("--seeds", default=20, show_default=True)
def main(seeds: int) -> None:
    """Print the regrets of a cold search and of one that starts from each source."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        with tarfile.open(EXPORTS) as packed:
            packed.extractall(place, filter="data")
        optuna_storage(place / "optuna.db")
        (place / "train.py").write_text("")
        sources = [None, *(place / name for name in ("optuna.db", "mlflow.db", "mlruns", "wandb"))]
        cold: np.ndarray | None = None
        for source in sources:
            known = read(place, source) if source else ()
            rows = np.array([regrets(study_of(place, seed), known, seed) for seed in range(seeds)])
            cold = rows if cold is None else cold
            shown = ", ".join(f"{n}: {rows[:, n - 1].mean():.3f}" for n in SHOWN)
            better = float(np.mean(rows.mean(axis=1) < cold.mean(axis=1)))
            name = source.name if source else "cold"
            beats = f"; better than cold in {better:.0%} of {seeds} seeds" if source else ""
            click.echo(f"{name:10} {len(known):3} old runs; loss above the best there is after {shown} trials{beats}")
            assert math.isfinite(rows.sum())


if __name__ == "__main__":
    main()
