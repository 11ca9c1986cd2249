"""Runs of other programs become the start of a search: shown first, taken with --yes, each once."""

from __future__ import annotations

import json
import math
import re
import tarfile
from pathlib import Path

import optuna
import pytest
from click.testing import CliRunner

from lora_tune.config.study import load_study
from lora_tune.ingest import main as ingest
from lora_tune.logs.trackers import tracked_runs
from lora_tune.search import priors
from lora_tune.search.samplers import make_sampler
from lora_tune.sweep import main as sweep

EXPORTS = Path(__file__).parents[1] / "logs" / "exports" / "trackers.tar.gz"
STUDY = """
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
trials = 8
trial_minutes = 5

[site]
launcher = "local"
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    file = tmp_path / "own.toml"
    file.write_text(STUDY)
    (tmp_path / "train.py").write_text("")
    return file


def run(study: Path, *arguments: object):
    words = ["--study", str(study), "--output", str(study.parent / "sweep"), *map(str, arguments)]
    return CliRunner().invoke(ingest, words)


def taken(study: Path) -> tuple:
    return priors.read(study.parent / "sweep" / "priors.jsonl")


@pytest.mark.parametrize("store", ["mlruns", "mlflow.db", "wandb"])
def test_columns_are_shown_before_they_are_believed(study: Path, tmp_path: Path, store: str) -> None:
    with tarfile.open(EXPORTS) as archive:
        archive.extractall(tmp_path, filter="data")
    shown = run(study, tmp_path / store)
    assert shown.exit_code == 0, shown.output
    assert "LR is learning_rate: " in shown.output
    assert re.search(r"RANK is lora[_/]r: 4, 16\n", shown.output)
    assert "val_loss is eval/loss: " in shown.output
    assert taken(study) == ()
    done = run(study, tmp_path / store, "--yes")
    assert done.exit_code == 0, done.output
    runs = taken(study)
    assert {run.values["RANK"] for run in runs} == {4, 16}
    assert all(len(run.evals) == 2 for run in runs)
    again = run(study, tmp_path / store, "--yes")
    assert f"{len(runs):4} known already" in again.output
    assert taken(study) == runs


def test_a_column_that_is_called_otherwise_is_mapped_and_one_that_lacks_is_stated(study: Path, tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text("eta,score\n1e-3,1.5\n3e-3,1.25\n")
    refused = run(study, table)
    assert refused.exit_code == 2
    assert "no column for LR, RANK, eval: see --map and --set" in refused.output
    wrong = run(study, table, "--map", "LR=etta")
    assert wrong.exit_code == 2
    assert "there is no such column; there are eta, score" in wrong.output
    right = run(study, table, "--map", "LR=eta", "--map", "eval=score", "--set", "RANK=8", "--yes")
    assert right.exit_code == 0, right.output
    found = [(r.values["LR"], r.values["RANK"], r.evals[0].loss) for r in taken(study)]
    assert found == [(1e-3, 8, 1.5), (3e-3, 8, 1.25)]


def test_a_training_loss_is_never_guessed_to_be_the_eval(study: Path, tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text("lr,rank,loss\n1e-3,8,0.1\n")
    assert "eval" in run(study, table, "--yes").output
    assert taken(study) == ()


def test_what_another_study_maximised_teaches_one_that_minimises_nothing(study: Path, tmp_path: Path) -> None:
    other = optuna.create_study(study_name="a", storage=f"sqlite:///{tmp_path}/o.db", direction="maximize")
    trial = other.ask()
    trial.suggest_float("lr", 1e-4, 1e-2)
    trial.suggest_categorical("rank", [4, 8])
    other.tell(trial, 0.9)
    result = run(study, tmp_path / "o.db", "--yes")
    assert result.exit_code == 4
    assert "its value was maximised, and this study minimises val_loss" in result.output


def test_the_log_of_our_own_trial_is_read_by_the_study_s_own_reader(study: Path, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("step 10 val_loss 1.5\nstep 20 val_loss 1.25\n")
    result = run(study, tmp_path / "a.log", "--set", "LR=1e-3", "--set", "RANK=8")
    assert result.exit_code == 0, result.output
    (found,) = taken(study)
    assert [e.loss for e in found.evals] == [1.5, 1.25]


def test_the_command_beside_a_trial_s_log_states_its_values_zero_and_below_zero_too(
    study: Path, tmp_path: Path
) -> None:
    study.write_text(STUDY.replace("choices = [4, 8, 16]", "choices = [-8, 0, 8]"))
    for number, rank in enumerate((0, -8)):
        attempt = tmp_path / f"attempt-{number}"
        attempt.mkdir()
        (attempt / "job.log").write_text(f"step 10 val_loss 1.{number}\n")
        argv = ["python", "train.py", "--lr=1e-3", "--rank", str(rank)]
        record = {"token": "a", "sweep": "b", "argv": argv, "environment": {}, "cwd": None, "log": "job.log"}
        (attempt / "command.json").write_text(json.dumps(record))
    result = run(study, tmp_path / "attempt-0" / "job.log", tmp_path / "attempt-1" / "job.log")
    assert result.exit_code == 0, result.output
    assert [(r.values["LR"], r.values["RANK"]) for r in taken(study)] == [(1e-3, 0), (1e-3, -8)]


def test_a_search_that_starts_from_old_runs_proposes_near_their_best(study: Path, tmp_path: Path) -> None:
    """Forty old runs whose best rate is 1e-3: the first proposals lie nearer to it than those of a cold search."""
    table = tmp_path / "runs.csv"
    rows = [(10 ** (-5 + n / 10), 4 * 2 ** (n % 3)) for n in range(40)]
    lines = [f"{lr},{rank},{1 + abs(n - 20) / 10}" for n, (lr, rank) in enumerate(rows)]
    table.write_text("\n".join(["lr,rank,val_loss", *lines]))
    assert run(study, table, "--yes").exit_code == 0
    loaded = load_study(study)
    known = priors.observations(taken(study), loaded.target)

    def distance(old_runs) -> float:
        space = loaded.search_space.distributions()
        own = optuna.create_study(sampler=make_sampler(loaded, old_runs))
        trials = [own.ask(space) for _ in range(8)]
        return sum(abs(math.log(trial.params["LR"] / 1e-3)) for trial in trials)

    assert distance(lambda: known) < distance(tuple) / 3
    first = optuna.create_study(sampler=make_sampler(loaded, lambda: known)).ask(loaded.search_space.distributions())
    assert first.params["LR"] == pytest.approx(1e-3)


def test_a_sweep_s_own_database_comes_back_with_its_parameters_and_values(tmp_path: Path) -> None:
    """What this program writes for Optuna is what it reads from Optuna."""
    shipped = Path(__file__).parents[2] / "studies" / "simulated_h100.toml"
    words = ["--study", str(shipped), "--output", str(tmp_path / "sweep"), "--trials", "6", "--quiet"]
    assert CliRunner().invoke(sweep, words).exit_code in (0, 4)
    database = tmp_path / "sweep" / "sweep.db"
    (written,) = optuna.get_all_study_summaries(f"sqlite:///{database}")
    trials = optuna.load_study(study_name=written.study_name, storage=f"sqlite:///{database}").trials
    back = tracked_runs(str(database))
    assert back is not None
    assert [run.name for run in back] == [f"trial {t.number}" for t in trials if t.state.is_finished()]
    for run in back:
        trial = trials[int(run.name.split()[1])]
        assert {name: run.values[name] for name in trial.params} == trial.params
        assert [v for _, v in run.series.get("value", ())] == [v for v in trial.values or () if math.isfinite(v)]
