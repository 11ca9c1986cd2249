"""What people compare their trials by: the best or the last value of a metric, a time, a speed, a cost."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from lora_tune import workloads
from lora_tune.base.errors import StudyError
from lora_tune.cli import commands
from lora_tune.config.study import Study, load_study, parse_study
from lora_tune.controller import pruning
from lora_tune.logs.run import Eval, RunLog, TrainPoint
from lora_tune.search.objectives import Finished, Objective, objective_of, objectives_of
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Attempt, StudyRecords, Trial, TrialState, Verdict
from tests.conftest import REPOSITORY

TOY = Path(__file__).with_name("toy.py")
HEAD = f"""
[workload]
kind = "command"
argv = ["python", "{TOY}", "--lr={{LR}}"]
[workload.log]
kind = "jsonl"
step = "step"
[space]
LR = {{ type = "categorical", choices = [0.0001, 0.01, 0.03] }}
[search]
enqueue = [{{ LR = 0.0001 }}, {{ LR = 0.01 }}, {{ LR = 0.03 }}]
[budget]
trials = 3
trial_minutes = 5
"""
TRIAL = Trial(number=0, seed=1, tuned={}, parameters={"LR": 0.01, "GBS": 8})


def study_with(objective: str, head: str = HEAD) -> Study:
    return parse_study(f"{head}[objective]\n{objective}\n", Path("toy.toml"))


def run_of(*losses: float, **more: Any) -> RunLog:
    return RunLog(run_start_ms=0, evals=tuple(Eval(100.0 * i, x, 10.0 * i) for i, x in enumerate(losses, 1)), **more)


def value_of(objective: Objective, run: RunLog) -> float | None:
    return objective.value(Finished(trial=TRIAL, run=run, metrics=TrialMetrics()))


def swept(folder: Path, objective: str, head: str = HEAD) -> tuple[Path, Result]:
    file = folder / "toy.toml"
    file.write_text(f"{head}[objective]\n{objective}\n")
    return file, CliRunner().invoke(commands.sweep, ["--study", str(file), "--output", str(folder / "out")])


def where(file: Path, *more: str) -> list[str]:
    return ["--study", str(file), "--output", str(file.parent / "out"), *more]


def told(command: Any, file: Path, *more: str) -> str:
    done = CliRunner().invoke(command, where(file, *more))
    assert done.exit_code == 0, done.output
    return done.output


LOSS_ALONE = """kind = "regex"
eval = 'epoch\\s+(?P<epoch>\\d+).*?val_loss\\s+(?P<loss>[-+.\\w]+)'"""
ACCURACY = """kind = "regex"
eval = 'epoch (?P<epoch>\\d+) accuracy (?P<loss>\\S+)'"""
JSONL = 'kind = "jsonl"\nloss = "val_loss"'


@pytest.mark.parametrize(
    ("log", "metric", "words"),
    [
        (LOSS_ALONE, "eval_loss", ""),  # the group loss stands for whatever loss the study names
        (ACCURACY, "val_acc", ""),
        (
            LOSS_ALONE,
            "val_acc",
            "eval reads 'val_loss', the metric is 'val_acc': put the group (?P<loss>...) behind val_acc",
        ),
        (LOSS_ALONE, "nonsense", "eval reads 'val_loss'"),
        (JSONL, "val_loss", ""),
        (JSONL, "val_acc", "loss = 'val_loss' is not objective.metric = 'val_acc'; remove loss, or correct it"),
    ],
)
def test_the_metric_that_a_study_names_is_the_one_that_its_log_is_read_for(log: str, metric: str, words: str) -> None:
    text = f'[workload]\nkind = "command"\nargv = ["train"]\n[workload.log]\n{log}\n[space]\nLR = 1e-4\n'
    study = parse_study(f'{text}[objective]\nmetric = "{metric}"\n[budget]\ntrials = 1\n', Path("t.toml"))
    if not words:
        workloads.load(study, "t.toml")
        return
    with pytest.raises(StudyError) as refusal:
        workloads.load(study, "t.toml")
    assert refusal.value.key == "workload.log"
    assert words in str(refusal.value)


def test_the_highest_accuracy_within_a_budget_is_found_told_and_exported(tmp_path: Path) -> None:
    file, done = swept(tmp_path, 'metric = "val_acc"\ndirection = "maximize"\nwithin_steps = 10')
    assert done.exit_code == 0, done.output
    assert "3 measured" in done.output
    assert "best run val_acc 0.7782, trial 1: LR=0.01" in done.output
    seen = json.loads(told(commands.status, file, "--json"))
    assert (seen["target"], seen["best"]["trial"], round(seen["best"]["objective"], 4)) == (None, 1, 0.7782)
    told(commands.export, file)
    config = next((tmp_path / "out" / "best").glob("config_*.sh"))
    assert "highest val_acc within 10 steps: 0.7782" in config.read_text()
    told(commands.report, file)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Best single run: highest val_acc within 10 steps" in page
    assert "Last val_acc" in page


def test_the_lowest_and_the_last_loss_choose_different_trials(tmp_path: Path) -> None:
    """The fastest learner memorises in the end: its lowest loss is the best of all, its last one is not."""
    found = {}
    for score in ("best_value", "final_value"):
        (tmp_path / score).mkdir()
        _, done = swept(tmp_path / score, f'metric = "eval_loss"\nscore = "{score}"')
        found[score] = next(line for line in done.output.splitlines() if line.startswith("best"))
    assert "trial 1: LR=0.01" in found["best_value"]
    assert "trial 2: LR=0.03" in found["final_value"]


def test_a_script_without_a_goal_is_refused_with_the_lines_to_add(tmp_path: Path) -> None:
    file = tmp_path / "toy.toml"
    file.write_text(HEAD)
    with pytest.raises(StudyError, match=r'target = 0\.5 .* or metric = "eval_loss"'):
        load_study(file)
    file.write_text(f'{HEAD}[objective]\nscore = "throughput"\n')
    assert not objective_of(load_study(file)).has_target


@pytest.mark.parametrize(
    ("objective", "key", "words"),
    [
        ('score = "best_value"\ntarget = 0.5', "objective.target", "has no target; remove it"),
        ("target = 0.5\nwithin_steps = 10", "objective.within_*", "goes with best_value"),
        ('score = "best_valeu"', "objective.score", "did you mean 'best_value'"),
        ('target = 0.5\nsecond = "time_to_target"', "objective.second", "name another score"),
        ('metric = "m"\nwithin_steps = 0', "objective.within_steps", "above 0"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_its_key(objective: str, key: str, words: str) -> None:
    with pytest.raises(StudyError) as caught:
        study_with(objective)
    assert caught.value.key == key
    assert words in str(caught.value)


def test_evals_beyond_the_budget_do_not_count_and_the_run_is_over_there() -> None:
    objective = objective_of(study_with('metric = "m"\nwithin_samples = 200'))
    run = run_of(0.9, 0.8, 0.1)
    assert value_of(objective, run) == 0.8
    assert objective.over(TRIAL, run_of(0.9)) == ""
    assert objective.over(TRIAL, run_of(0.9, 0.8)) == "used its budget of 200 samples"
    assert objective.over(TRIAL, replace(run_of(0.9), train=(TrainPoint(200, 1.0, 15),))) == "", "its eval comes yet"
    seconds = objective_of(study_with('metric = "m"\nwithin_seconds = 15'))
    assert value_of(seconds, run) == 0.9
    assert seconds.over(TRIAL, replace(run_of(0.9), last_ms=16_000))


def test_a_run_that_failed_before_its_budget_has_no_value() -> None:
    objective = objective_of(study_with('metric = "m"\nwithin_samples = 500'))
    assert objective.measured(TRIAL, run_of(0.9), ended=False) == ""
    assert objective.measured(TRIAL, run_of(0.9), ended=True) == "lowest m 0.9000 at 100 steps"
    assert objective.measured(TRIAL, run_of(math.nan, math.inf), ended=True) == "", "nothing in it is a number"


@pytest.mark.parametrize(
    ("log", "steps", "limit"),
    [
        ('kind = "jsonl"\nglobal_batch_size = 4', 10, 40),
        ('kind = "jsonl"\nglobal_batch_size = "GBS"', 10, 80),
        ('kind = "jsonl"', 10, 10),
        ('kind = "mllog"', 10, 80),
    ],
)
def test_steps_of_a_budget_are_counted_as_the_log_counts(log: str, steps: int, limit: float) -> None:
    head = HEAD.replace('kind = "jsonl"\nstep = "step"', log).replace("[space]", "[space]\nGBS = 8")
    objective = objective_of(study_with(f'metric = "m"\nwithin_steps = {steps}', head))
    at = RunLog(run_start_ms=0, evals=(Eval(limit, 0.5, 1.0),))
    before = RunLog(run_start_ms=0, evals=(Eval(limit - 1, 0.5, 1.0),))
    assert objective.over(TRIAL, at)
    assert not objective.over(TRIAL, before)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=12), st.booleans())
def test_any_evals_have_a_value_that_one_of_them_printed_or_none(losses: list[float], rising: bool) -> None:
    direction = "maximize" if rising else "minimize"
    study = study_with(f'metric = "m"\ndirection = "{direction}"')
    for score in ("best_value", "final_value"):
        objective = objective_of(study.with_options({"objective": {"score": score}}))
        value = value_of(objective, run_of(*losses))
        assert value is None or any(math.isclose(value, study.shown(x), abs_tol=1e-9) for x in losses)


def test_where_there_is_no_target_runs_are_compared_with_the_best_of_the_first() -> None:
    study = study_with('metric = "m"').with_options({"pruning": {"references": 4, "false_prune_rate": 0.3}})
    ends = [0.2, 0.9, 0.25, 0.8, 0.22, 0.85, 0.21, 0.95]
    trials, attempts, evals = {}, {}, {}
    for n, end in enumerate(ends):
        trials[n] = replace(
            TRIAL,
            number=n,
            state=TrialState.FINISHED,
            verdict=Verdict.REACHED,
            finished_at=float(n),
            metrics=TrialMetrics(objective=end),
        )
        attempts[n, 0] = Attempt(trial=n, number=0, job_name="", folder="")
        evals[n, 0] = tuple(Eval(100.0 * i, 1 + (end - 1) * i / 10 + 0.001 * n, 1.0 * i) for i in range(1, 11))
    known = StudyRecords(name="x", digest="d", study_toml="", began_at=0, trials=trials, attempts=attempts, evals=evals)
    flat = run_of(*[0.999 - 0.001 * i for i in range(8)])
    stopped = pruning.judge_curve(study, known, replace(TRIAL, number=99), flat)
    assert isinstance(stopped, pruning.Stop)
    assert "further above" in stopped.sentence
    good = run_of(*[1 - 0.08 * i for i in range(1, 9)])
    assert pruning.judge_curve(study, known, replace(TRIAL, number=99), good) is None
    few = replace(known, trials={n: t for n, t in trials.items() if n < 4})
    assert pruning.judge_curve(study, few, replace(TRIAL, number=99), flat) is None, "one more must have ended"


def test_objectives_of_two_are_in_their_order() -> None:
    names = [o.name for o in objectives_of(study_with('target = 0.5\nsecond = "node_hours"'))]
    assert names == ["time to eval loss 0.5", "node-hours to eval loss 0.5"]


def test_an_objective_of_a_users_own_file_ranks_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/extending.md."""
    monkeypatch.chdir(tmp_path)
    page = (REPOSITORY / "docs" / "extending.md").read_text()
    example = next(block for block in page.split("```python") if "class Swing" in block).split("```")[0]
    (tmp_path / "their_objective.py").write_text(example)
    _, done = swept(tmp_path, 'metric = "eval_loss"\nscore = "their_objective.py:Swing"')
    assert done.exit_code == 0, done.output
    assert re.search(r"best run +eval_loss 0\.0\d+, trial 0: LR=0.0001", done.output), "the one that learns nothing"


def test_a_trial_that_trains_on_beyond_its_target_is_ended_by_a_signal_that_it_may_catch(tmp_path: Path) -> None:
    caught = tmp_path / "caught"
    long = f'"--lr={{LR}}", "--steps=10000", "--pause=0.05", "--caught={caught}"'
    head = HEAD.replace('"--lr={LR}"', long).replace("trials = 3", "trials = 1").replace("LR = 0.0001 }, { LR", "LR")
    head = re.sub(r"enqueue = .*", "enqueue = [{ LR = 0.01 }]", head)
    file, done = swept(tmp_path, 'metric = "val_acc"\ndirection = "maximize"\ntarget = 0.5', head)
    assert done.exit_code == 0, done.output
    assert re.search(r"^trial 0 +reached +val_acc 0.5689 at 5 steps, \d", done.output, re.MULTILINE)
    journal = (file.parent / "out" / "driver.log").read_text()
    assert "stopping it: reached the target and trains on: val_acc 0.5689 at 5 steps" in journal
    assert caught.read_text() == "SIGTERM"
    seen = json.loads(told(commands.status, file, "--json"))
    assert seen["best"]["remark"].startswith("val_acc 0.5689 at 5 steps"), "the eval that reached it"


def test_where_nothing_reached_the_target_the_nearest_trial_is_named_and_exported_on_request(tmp_path: Path) -> None:
    file, done = swept(tmp_path, 'metric = "val_acc"\ndirection = "maximize"\ntarget = 0.95')
    assert done.exit_code == 4, done.output
    words = "val_acc 0.8835 at 20 steps, 0.0665 below the target 0.95; it was still getting better there"
    assert f"nearest  trial 1: {words}: LR=0.01" in done.output
    seen = json.loads(CliRunner().invoke(commands.status, where(file, "--json")).output)
    assert (seen["best"], seen["nearest"]["trial"], seen["nearest"]["missing"]) == (None, 1, words)
    refused = CliRunner().invoke(commands.export, where(file))
    assert refused.exit_code == 4
    assert f"--output {tmp_path / 'out'} --nearest" in refused.output
    told(commands.export, file, "--nearest")
    config = next((tmp_path / "out" / "best").glob("config_*.sh")).read_text()
    assert "val_acc 0.95 was NOT reached" in config
    told(commands.report, file)
    assert words in (tmp_path / "out" / "report.html").read_text()


def test_a_script_that_is_compared_by_its_speed_gets_no_borrowed_target(tmp_path: Path) -> None:
    head = HEAD.replace('"--lr={LR}"', '"--lr={LR}", "--pause=0.02"')
    file, done = swept(tmp_path, 'score = "throughput"', head)
    assert done.exit_code == 0, done.output
    assert "3 measured" in done.output
    (config,) = (tmp_path / "out" / "best").glob("config_*.sh")
    assert "TARGET" not in config.read_text()
    assert json.loads(told(commands.status, file, "--json"))["target"] is None
    told(commands.report, file)
    told(commands.explain, file)
    given = study_with('score = "throughput"\ntarget = 0.5')
    assert given.objective.target == 0.5, "a target that the study names is the script's to read"


def test_two_objectives_and_their_front_are_optunas(tmp_path: Path) -> None:
    _, done = swept(tmp_path, 'metric = "val_acc"\ndirection = "maximize"\nsecond = "node_hours"')
    assert done.exit_code == 0, done.output
    known = optuna.load_study(study_name="toy", storage=f"sqlite:///{tmp_path}/out/sweep.db")
    assert [d.name for d in known.directions] == ["MAXIMIZE", "MINIMIZE"]
    front = {t.number for t in known.best_trials}
    values = {t.number: t.values for t in known.trials}
    beaten = {n for n, (a, b) in values.items() for c, d in values.values() if c >= a and d <= b and (c > a or d < b)}
    assert front == set(values) - beaten
