"""``python -m lora_tune.confirm``: more seeds of the leaders as real jobs, a verdict, a score, a result folder."""

from __future__ import annotations

import datetime
import io
import json
import math
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from lora_tune.base.errors import InputError, SetupError
from lora_tune.base.paths import SweepPaths
from lora_tune.base.text import duration
from lora_tune.cli import export, status
from lora_tune.cli.confirm import Race, contenders, introduction, race_settings, replicate_study, with_seeds
from lora_tune.cli.confirm_outcome import as_json, confirmation, confirmed, split_runs, summary
from lora_tune.cli.report import report_html
from lora_tune.config.study import Study
from lora_tune.confirm import main
from lora_tune.controller import conclusion as outcome
from lora_tune.controller import policy
from lora_tune.launchers.base import JobState, JobStatus
from lora_tune.logs.mllog import MllogReader
from lora_tune.review import screen
from lora_tune.review.stopping import replicates
from lora_tune.search.comparison import ComparisonRules
from lora_tune.search.noise import Noise, usual_noise
from lora_tune.store import Store, sqlite_url
from lora_tune.store.metrics import ConfirmedChoice, RunMetrics, TrialMetrics
from lora_tune.store.records import Attempt, StudyRecords, Trial, TrialState, Verdict
from lora_tune.sweep import main as sweep_main
from lora_tune.workloads.command import CommandWorkload
from tests.builders import study_of, sweep_of, with_trial
from tests.fakes import record
from tests.recorded import recorded
from tests.tiny import STUDY as TINY_STUDY
from tests.waiting import wait_for

REPOSITORY = Path(__file__).resolve().parents[2]
STUDY = """
description = "two speeds of one training"
[workload]
kind = "command"
argv = [{python}, {trial}]
[workload.prepare]
argv = ["bash", "-c", "echo once >> $PREPARED"]
[site]
system = "TEST"
kill_seconds = 3
environment = {{ PREPARED = {prepared} }}
[space]
SPEED = {{ type = "categorical", choices = [2.0, 2.5] }}
PACE = {pace}
GBS = 8
[objective]
target = 0.925
curves = "llama2_70b_lora"
[search]
enqueue = [{{ SPEED = 2.0 }}, {{ SPEED = 2.5 }}]
[pruning]
rule = "none"
cap = false
[budget]
trials = 2
parallel = 2
"""


class House:
    """A sweep of two configurations, 25% apart in speed, and the command on it."""

    def __init__(self, folder: Path, pace: float = 0.0) -> None:
        self.study = folder / "leaders.toml"
        trial = str(REPOSITORY / "tests" / "compliant_trial.py")
        self.prepared = folder / "prepared"
        words = {"python": sys.executable, "trial": trial, "prepared": str(self.prepared)}
        self.study.write_text(STUDY.format(pace=pace, **{name: json.dumps(word) for name, word in words.items()}))
        self.paths = SweepPaths(folder / "sweep")
        self.options = ["--study", str(self.study), "--output", str(self.paths.root)]
        swept = CliRunner().invoke(sweep_main, [*self.options, "--quiet"])
        assert swept.exit_code == 0, swept.output

    def confirm(self, *options: str) -> Result:
        return CliRunner().invoke(main, [*self.options, *options])

    def start(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "lora_tune.confirm", *self.options, *options]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def load(self, name: str) -> StudyRecords:
        return recorded(self.paths.database, name)

    @property
    def race(self) -> StudyRecords:
        return self.load("leaders.confirm")

    @property
    def logs(self) -> list[Path]:
        return sorted((self.paths.root / "confirm" / "trials").glob("*/attempt-*/job.log"))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    """A confirmed sweep; its command was interrupted by Ctrl-C, then killed, and given again each time."""
    there = House(tmp_path_factory.mktemp("confirm"), pace=0.3)
    first = there.start("--seeds", "10")
    wait_for(lambda: len(there.logs) >= 2, 60, "the first replicates")
    first.send_signal(signal.SIGINT)
    said, _ = first.communicate(timeout=30)
    assert first.returncode == 130, said
    assert "the jobs keep running; resume with: " in said
    second = there.start("--seeds", "10")
    begun = len(there.logs)
    wait_for(lambda: len(there.logs) >= begun + 2 or second.poll() is not None, 60, "further replicates")
    ended = second.poll()
    second.kill()
    assert ended is None, second.communicate()[0]
    second.communicate()
    there.said = there.confirm("--seeds", "10")
    return there


def test_the_better_configuration_wins_and_is_scored_by_ten_runs(house: House) -> None:
    said = house.said
    assert said.exit_code == 0, said.output
    assert "trial 1 is better than trial 0 by" in said.output
    assert "with 95% confidence" in said.output
    assert "olympic mean of 10 runs" in said.output
    assert "pass the checks of convergence with probability" in said.output


def test_ctrl_c_and_a_kill_lose_no_run_and_double_none(house: House) -> None:
    race = house.race
    assert all(t.verdict is Verdict.REACHED for t in race.trials.values())
    assert [log.read_text().count('"run_start"') for log in house.logs] == [1] * len(race.trials)
    seeds = [run.seed for runs in replicates(race).values() for run in runs]
    assert len(set(seeds)) == len(seeds)
    assert not {t.seed for t in house.load("leaders").trials.values()} & set(seeds)
    assert len(replicates(race)[1]) == 10
    assert 3 <= len(replicates(race)[0]) < 10
    spent = json.loads((house.paths.root / "confirm" / "confirmation.json").read_text())["node_hours"]
    assert spent == pytest.approx(sum(a.node_hours(0) for a in race.attempts.values()))


def test_the_result_folder_passes_mlperfs_own_checkers(house: House) -> None:
    folder = house.paths.confirm(1)
    assert sorted(p.name for p in folder.iterdir()) == [f"result_{i}.txt" for i in range(10)]
    assert "10 result files, all comply with 6.1.0" in house.said.output
    record = json.loads((house.paths.root / "confirm" / "confirmation.json").read_text())
    assert record["checks"]["passes"]


def test_the_sweep_keeps_its_trials_and_takes_the_chosen_one_as_its_best(house: House) -> None:
    sweep = house.load("leaders")
    assert len(sweep.trials) == 2
    assert [_choice(t) for t in sweep.trials.values()] == [ConfirmedChoice.PASSED_OVER, ConfirmedChoice.CHOSEN]
    best = sweep.best()
    assert best is not None
    race = best.metrics.confirmed
    assert race is not None
    assert (best.number, race.runs) == (1, 10)
    assert race.low < race.seconds < race.high
    (config,) = house.paths.best.glob("config_*.sh")
    assert "SPEED=2.5" in config.read_text()
    assert best.metrics.confirmed is not None
    seeds = best.metrics.confirmed.seeds
    assert len(set(seeds)) == 10
    (told,) = re.findall(r"# chosen with further seeds ([\d, to]+): 10 runs; mean ", config.read_text())
    ends = [int(seed) for seed in re.findall(r"\d+", told)]
    assert (min(ends), max(ends)) == (min(seeds), max(seeds))
    assert "# olympic mean of 10 runs " in config.read_text()
    report = house.paths.report.read_text()
    assert "Trial 1 is better than trial 0" in report
    assert "Olympic mean of 10 runs" in report
    with sqlite3.connect(house.paths.database) as database:
        assert database.execute("select count(*) from trials").fetchone() == (2,)  # Optuna's own


def test_the_same_command_again_runs_nothing_and_says_the_same(house: House) -> None:
    before = len(house.race.trials)
    again = house.confirm("--seeds", "10")
    assert again.exit_code == 0
    assert again.output.splitlines()[-6:] == house.said.output.splitlines()[-6:]
    assert len(house.race.trials) == before


def test_what_the_sweep_prepared_serves_its_replicates_and_is_made_where_it_is_gone(house: House) -> None:
    assert house.prepared.read_text().count("once") == 1
    shutil.rmtree(house.paths.prepared.parent)
    again = house.confirm("--seeds", "10")
    assert again.exit_code == 0, again.output
    assert "preparation: done" in again.output
    assert house.prepared.read_text().count("once") == 2
    assert not (house.paths.root / "confirm" / "prepare").exists()


def test_what_trials_need_is_looked_for_first(house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommandWorkload, "check", lambda self: ["/model is not seen from here"], raising=False)
    assert "/model is not seen from here" in house.confirm("--seeds", "10").output

    def missing(self: object) -> None:
        raise SetupError("/model does not exist; set site.model")

    there = House(tmp_path)
    monkeypatch.setattr(CommandWorkload, "check", missing, raising=False)
    refused = there.confirm("--seeds", "3")
    assert refused.exit_code == 3
    assert "/model does not exist; set site.model" in refused.output
    assert not (there.paths.root / "confirm").exists()
    assert Store(sqlite_url(there.paths.database), read_only=True).load("leaders.confirm") is None


def test_two_drivers_never_race_at_one_time(house: House) -> None:
    store = Store(sqlite_url(house.paths.database))
    lease = store.take_lease("leaders.confirm", "another host", 4e9)
    try:
        busy = house.confirm("--seeds", "10")
    finally:
        store.release(lease)
    assert busy.exit_code == 3
    assert "driven by another host" in busy.output


def test_a_sweep_that_is_driven_meanwhile_is_not_written_to(house: House) -> None:
    store = Store(sqlite_url(house.paths.database))
    lease = store.take_lease("leaders", "another host", 4e9)
    try:
        done = house.confirm("--seeds", "10")
    finally:
        store.release(lease)
    assert done.exit_code == 0
    assert "not recorded in it: rerun the same command" in done.output


def test_a_dry_run_shows_who_would_race_and_submits_nothing(tmp_path: Path) -> None:
    there = House(tmp_path)
    shown = there.confirm("--dry-run", "--seeds", "4")
    assert shown.exit_code == 0
    assert "6 to 8 runs" in shown.output
    assert "# trial 0 again, seeds 1000001" in shown.output, (
        "the first enqueued point, while no other is clearly better"
    )
    assert not (there.paths.root / "confirm").exists()
    unfinished = there.confirm("--budget-node-hours", "1e-9")
    assert "no verdict: the budget of 1e-09 node-hours is spent" in unfinished.output


def test_nothing_to_confirm_is_said_in_words(tmp_path: Path) -> None:
    away = CliRunner().invoke(main, ["--study", "nowhere", "--output", str(tmp_path)])
    assert away.exit_code == 2
    study = study_of()
    with pytest.raises(InputError, match="nothing to confirm"):
        contenders(study, sweep_of(study, trials=0), 3)
    with pytest.raises(InputError, match="at most 56 characters"):
        replicate_study(study.model_copy(update={"name": "x" * 57}), None, None, None)


def test_a_race_of_raw_stops_expects_more_noise_than_one_of_fitted_curves() -> None:
    study = study_of()
    fitted = study.with_options({"objective": {"estimator": "curve"}})
    assert usual_noise(study).sd > usual_noise(fitted).sd
    assert study.objective.estimator == "stop"


def test_replicates_are_neither_pruned_nor_capped_and_have_seeds_of_their_own() -> None:
    study = study_of()
    again = replicate_study(study, 5, None, None)
    assert (again.pruning.rule, again.pruning.cap, again.budget.trials) == ("none", False, None)
    assert again.budget.parallel == 5
    assert again.trial_seed(0) == study.trial_seed(0) + 1_000_000


def test_the_real_tiny_study_says_which_checks_do_not_apply(
    tiny_sweep: Path, peft_worker: dict[str, str], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_sweep, tmp_path / "sweep"))
    options = ["--study", str(TINY_STUDY), "--output", str(folder), "--top", "1", "--seeds", "2"]
    command = [sys.executable, "-m", "lora_tune.confirm", *options]
    environment = {**os.environ, **peft_worker}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=REPOSITORY, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checks do not apply: the logs name the benchmark peft_lora" in done.stdout
    (results,) = folder.glob("confirm/0*")
    logs = sorted(results.glob("result_*.txt"))
    assert len(logs) == 2
    for log in logs:
        reader = MllogReader()
        reader.feed(log.read_bytes())
        assert reader.run().reached(1.74)


# -- the pieces, on records made by hand


def leaders(count: int = 3) -> tuple[Study, StudyRecords, list[Trial]]:
    study = study_of()
    sweep = sweep_of(study)
    return study, sweep, contenders(study, sweep, count)


def _choice(trial: Trial) -> ConfirmedChoice:
    assert trial.metrics.confirmed is not None
    return trial.metrics.confirmed.choice


def raced(sweep: StudyRecords, of: Trial, *seconds: float | None, number: int = 0, hours: float = 0.5) -> StudyRecords:
    """The race's records with further single runs of a trial; None: it did not reach the target."""
    trials = dict(sweep.trials)
    for i, time in enumerate(seconds, start=max(trials, default=-1) + 1):
        metrics = TrialMetrics(node_hours=hours, objective=time)
        verdict = Verdict.CENSORED if time is None else Verdict.REACHED
        trials[i] = Trial(
            number=i, seed=i, tuned=of.tuned, parameters=of.parameters, replicate_of=of.number, metrics=metrics,
            seconds=time, samples=None if time is None else 3000.0, verdict=verdict, state=TrialState.FINISHED,
        )  # fmt: skip
    return replace(sweep, trials=trials)


EMPTY = StudyRecords(name="built.confirm", digest="", study_toml="", began_at=0.0)


def race_of(field: list[Trial], sweep: StudyRecords, *, per_job: int = 1, most: int = 10) -> Race:
    settings = ComparisonRules(most=most, batch=per_job)
    return Race(study_of(), field, settings, lambda: sweep, per_job=per_job, echo=lambda text: None)


@pytest.mark.parametrize(
    ("site", "parallel", "runs"),
    [
        ({}, 30, (3, 1)),
        ({"slots": 16}, 30, (10, 10)),
        ({"slots": 16}, 12, (4, 4)),
        ({"slots": 16}, 90, (10, 10)),
        ({"slots": 16}, 2, (3, 1)),
    ],
)
def test_where_trials_share_a_job_as_many_seeds_run_at_one_time_as_have_room(
    site: dict[str, object], parallel: int, runs: tuple[int, int]
) -> None:
    sweep = {"name": "s", "workload": {"kind": "peft"}, "space": {"LR": 1e-3}, "objective": {"target": 1.7}}
    study = Study.model_validate({**sweep, "site": site, "budget": {"trials": 9, "parallel": parallel}})
    settings = race_settings(study, 3, 10, per_job=1, confidence=0.9)
    assert (settings.fewest, settings.batch, settings.most) == (*runs, 10)


def test_the_leaders_are_the_best_trials_with_different_configurations() -> None:
    _, _, field = leaders()
    times = [t.metrics.objective for t in field]
    assert times == sorted(times)
    assert len({str(t.parameters) for t in field}) == 3


def test_a_job_asks_for_several_seeds_where_the_workload_runs_them_in_one_allocation() -> None:
    _, _, field = leaders(2)
    first = race_of(field, EMPTY, per_job=3).ask()
    assert not isinstance(first, str)
    assert (first.number, first.replicates, first.replicate_of) == (0, 3, field[0].number)
    assert first.parameters == field[0].parameters


def test_runs_in_flight_are_waited_for_and_not_asked_for_again() -> None:
    _, _, field = leaders(1)
    going = Trial(number=0, seed=0, tuned={}, parameters={}, replicate_of=field[0].number, replicates=3)
    race = race_of(field, replace(EMPTY, trials={0: going}), per_job=3)
    assert race.ask() == "1 run goes on"


def test_each_run_of_a_job_of_several_counts_and_an_unfinished_one_does_not() -> None:
    _, _, field = leaders(1)
    of = field[0].number
    first = RunMetrics(seed=7, position=0, seconds=90.0, samples=3072.0, metrics=TrialMetrics(objective=90.0))
    metrics = TrialMetrics(node_hours=1.2, runs=(first, RunMetrics(seed=8, position=1)))
    job = Trial(
        number=0, seed=7, tuned={}, parameters={}, replicate_of=of, replicates=3, metrics=metrics,
        state=TrialState.FINISHED, verdict=Verdict.REACHED,
    )  # fmt: skip
    one, two = replicates(replace(EMPTY, trials={0: job}))[of]
    assert (one.objective, one.seed, one.node_hours) == (90.0, 7, 0.6)
    assert (two.objective, two.seconds) == (float("inf"), None)
    asked = race_of(field, replace(EMPTY, trials={0: job}), per_job=3).ask()
    assert not isinstance(asked, str)
    assert (asked.number, asked.replicates) == (3, 1)


@pytest.mark.parametrize("verdict", [Verdict.FAILED, Verdict.CANCELLED])
def test_a_run_that_the_machine_failed_is_run_again_and_not_for_ever(verdict: Verdict) -> None:
    _, _, field = leaders(1)
    lost = Trial(
        number=0, seed=0, tuned={}, parameters={}, replicate_of=field[0].number, verdict=verdict,
        state=TrialState.FINISHED,
    )  # fmt: skip
    race = race_of(field, replace(EMPTY, trials={0: lost}))
    asked = race.ask()
    assert not isinstance(asked, str)
    assert asked.number == 1
    for _ in range(3):
        race.tell(lost)
    if verdict is Verdict.FAILED:
        with pytest.raises(SetupError, match="fix it and rerun the same command"):
            race.ask()


def test_leaders_that_cannot_be_separated_are_honestly_so_with_the_cost_of_separating_them() -> None:
    study, sweep, field = leaders(2)
    first, second = field
    times = [100, 104, 97, 108, 95, 101, 99, 103, 98, 105]
    records = raced(EMPTY, first, *times)
    records = raced(records, second, *(1.011 * t for t in times))
    stands = race_of(field, records).comparison()
    found = confirmation(study, records, field, replicates(records), stands)
    assert found is not None
    assert not found.decided
    words = summary(study, sweep, found)
    assert f"trial {first.number}" in words
    assert f"trial {second.number}" in words
    assert "cannot be separated: difference " in words, "at the look at which more runs would not decide it"
    assert "more runs = " in words
    assert "node-hours; take trial" in words
    wanted = with_seeds(study, 2, found.seeds)
    assert re.fullmatch(r"\S+ -m lora_tune\.confirm --study built --top 2 --seeds \d+", wanted)
    assert 2 * int(wanted.rpartition(" ")[2]) == found.runs + found.more_runs > 20
    with main.make_context("confirm", ["--study", "built", "--seeds", "10", "--confidence", "0.9"]):
        assert with_seeds(study, 2, 25).endswith("--seeds 25 --confidence 0.9")
    assert sorted(map(_choice, confirmed(sweep, found, replicates(records)))) == [
        ConfirmedChoice.CHOSEN,
        ConfirmedChoice.PASSED_OVER,
    ]


def test_a_score_counts_the_runs_of_its_result_files_however_many_there_are() -> None:
    """MLPerf's rules count a fixed number of runs; after --seeds 6 was interrupted there are more than --seeds 4."""
    study, sweep, field = leaders(3)
    records = EMPTY
    for of, factor in zip(field, (1.0, 1.02, 1.5), strict=True):
        records = raced(records, of, *(factor * t for t in (100.0, 104.0, 97.0, 108.0, 95.0, 101.0)))
    found = confirmation(study, records, field, replicates(records), race_of(field, records, most=4).comparison())
    assert found is not None
    assert found.chosen is not None
    assert found.scored is not None
    own = replicates(records)[found.chosen]
    assert len(own) == 6
    assert found.scored.runs == 4
    middle = sorted(run.seconds or math.inf for run in own[:4])[1:3]
    assert found.scored.olympic == pytest.approx(sum(middle) / 2 / 60)
    words = summary(study, sweep, found)
    assert f"olympic mean of the first 4 of {len(own)} runs {duration(sum(middle) / 2)}" in words
    words = introduction(study, field, ComparisonRules(most=4))
    assert "9 to 12 runs, equally many of each, at most 4; " in words
    assert "2 runs, equally many of each, at most 1; " in introduction(study, field[:2], ComparisonRules(most=1))


def test_the_lines_of_a_race_have_the_intervals_of_its_verdict() -> None:
    """By the noise that the sweep had, not by what is usual."""
    study, _, field = leaders(1)
    records, lines = raced(EMPTY, field[0], 100, 104, 97), list[str]()
    settings = ComparisonRules(most=3, noise=Noise(0.3, 0.35))
    race = Race(study, field, settings, lambda: records, per_job=1, echo=lines.append)
    race.tell(records.trials[0])
    found = confirmation(study, records, field, replicates(records), race.comparison(), settings)
    assert found is not None
    (place,) = found.places
    assert "{} ({} to {}, ".format(*map(duration, (place.mean, place.low, place.high))) in lines[0]


def test_what_is_shown_of_a_race_is_what_decides_it_and_names_the_runs_that_missed() -> None:
    """On the screen, in the lines while it runs, in the verdict, on the report's page, in the exported config."""
    study, sweep, field = leaders(3)
    first, second, third = field
    records = raced(EMPTY, first, 100, 104, 97)
    records = raced(records, second, 80, 81, None)
    records = raced(records, third, None, None, None)
    said: list[str] = []
    settings = ComparisonRules(most=3, noise=usual_noise(study))
    race = Race(study, field, settings, lambda: records, per_job=1, echo=said.append)
    race.tell(records.trials[0])
    found = confirmation(study, records, field, replicates(records), race.comparison())
    assert found is not None
    (line,) = said
    shown = " ".join(screen_text(study, records).split())
    for place in found.places:
        missed = {0: "", 1: ", 1 did not reach the target", 3: ", none reached the target"}[place.missed]
        times = (duration(t) for t in (place.mean, place.low, place.high))
        words = "{} ({} to {}, ".format(*times) if place.mean is not None else "("
        for text in (shown, line):
            assert f"trial {place.trial} {words}3 runs{missed})" in text
    noted = {t.number: t for t in confirmed(sweep, found, replicates(records))}
    console = Console(width=1000, record=True, file=io.StringIO())
    confirmed_sweep = replace(sweep, trials={**sweep.trials, **noted})
    console.print(status.picture(study, confirmed_sweep, ("", 0.0), 0.0, every=False))
    best = found.places[0]
    mean, low, high = (duration(t) for t in (best.mean, best.low, best.high))
    row = f"chosen: mean {mean} ({low} to {high}, 3 runs, 1 did not reach the target)"
    assert f"confirmed trial {second.number}, {row}" in " ".join(console.export_text().split())
    page = report_html(study, confirmed_sweep, 0.0)
    assert len(re.findall(r">3</td><td[^>]*>1</td>", page)) == 1, "runs, and those that missed"
    now = datetime.datetime.now(datetime.UTC)
    told = {number: " ".join(export.provenance(study, t, now)) for number, t in noted.items()}
    assert "with further seeds 0 to 2: 3 runs; mean 100.3 s" in told[first.number]
    assert "with further seeds 3 to 5: 3 runs, 1 did not reach the target; mean 80.5 s" in told[second.number]
    assert "passed over with further seeds 6 to 8: 3 runs, none reached the target" in told[third.number]


@pytest.mark.parametrize("curves", ["own", "llama2_70b_lora"])
def test_a_configuration_that_missed_twice_has_no_score_in_words_and_in_json(curves: str) -> None:
    study, sweep, _ = leaders(1)
    study = study.model_copy(update={"objective": study.objective.model_copy(update={"curves": curves})})
    chosen = next(t for t in contenders(study, sweep, 99) if t.parameters["GBS"] == 8)
    records = raced(EMPTY, chosen, 1700.0, 1720.0, 1690.0, None, None)
    found = confirmation(study, records, [chosen], replicates(records), race_of([chosen], records, most=5).comparison())
    assert found is not None
    words = summary(study, sweep, found)
    assert "no olympic mean: 2 of 5 runs did not reach the target" in words
    assert " inf" not in words

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    told = json.loads(json.dumps(as_json(found)), parse_constant=refuse)
    assert (told["scored"]["olympic"], told["scored"]["minutes"]) == (None, None)
    assert told["places"][0]["missed"] == 2


def screen_text(study: Study, race: StudyRecords) -> str:
    console = Console(width=1000, record=True, file=io.StringIO())
    console.print(screen.screen(study, race, 0.0, []))
    return console.export_text()


def test_where_no_run_reaches_the_target_nothing_is_chosen() -> None:
    study, sweep, field = leaders(1)
    records = raced(EMPTY, field[0], None, None, None)
    found = confirmation(study, records, field, replicates(records), race_of(field, records).comparison())
    assert found is not None
    assert found.chosen is None
    assert "no run reached the target" in summary(study, sweep, found)
    (passed_over,) = confirmed(sweep, found, replicates(records))
    page = report_html(study, with_trial(sweep, passed_over), 0.0)
    assert "No run of any configuration reached the target; nothing to choose." in page


def log_of(*runs: str) -> MllogReader:
    """A log of several runs; "reached", "missed" or "cut" says how each ends."""
    lines, at = [], 0.0
    for end in runs:
        lines += [record(at, "init_start", None), record(at + 1, "init_stop", None), record(at + 2, "run_start", None)]
        lines += [record(at + 10, "eval_accuracy", 0.95, samples_count=1536)]
        if end == "reached":
            lines += [record(at + 20, "eval_accuracy", 0.92, samples_count=1920)]
        if end != "cut":
            lines += [record(at + 21, "run_stop", None, status="success")]
        at += 100
    reader = MllogReader()
    reader.feed("".join(line + "\n" for line in lines).encode())
    return reader


def test_of_a_job_of_several_runs_the_finished_ones_are_remembered() -> None:
    study, sweep = study_of(), sweep_of(study_of())
    found = outcome.several(study, replace(sweep.trials[0], seed=7), log_of("reached", "missed", "cut").runs())
    assert [(run.seed, run.seconds, run.samples) for run in found] == [(7, 18.0, 1920.0), (8, None, None)]
    assert found[1].metrics.objective is None


@pytest.mark.parametrize(("begun", "stopped"), [(2, None), (3, "reached")])
def test_a_job_of_several_runs_is_left_alone_until_its_last_one_has_reached_the_target(
    begun: int, stopped: str | None
) -> None:
    study, attempt = study_of(), Attempt(trial=0, number=0, job_name="x-0000-0", folder="", started_at=100.0)
    run = log_of("reached").run()
    look = policy.JobSnapshot(
        attempt=attempt,
        status=JobStatus(state=JobState.RUNNING),
        run=run,
        grew_at=100.0,
        begun=begun,
        trial=Trial(number=0, seed=1, tuned={}, parameters={}, replicates=3),
    )
    action = policy.watch(study, look, 200.0)
    assert (action.kind.value if isinstance(action, policy.Stop) else None) == stopped
    late = policy.watch(study, look, 100.0 + 3 * 3600 + 1)
    assert isinstance(late, policy.Stop)
    assert "180 min" in late.sentence


def test_a_job_of_several_runs_is_cut_between_its_runs() -> None:
    def one(seed: int) -> str:
        return f'preamble {seed}\n:::MLLOG "init_start"\n:::MLLOG "run_start"\nseed {seed}\n:::MLLOG "run_stop"\n'

    text = one(1) + one(2) + one(3)
    parts = split_runs(text)
    assert "".join(parts) == text
    assert [[s for s in (1, 2, 3) if f"seed {s}\n" in part] for part in parts] == [[1], [2], [3]]
