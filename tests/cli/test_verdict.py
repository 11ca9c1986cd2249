"""``lora-tune verdict`` and the report's section speak of the same ledger, which follows from the records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_tune.cli.report import report_html
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import StudyRecords, Trial, TrialState, Verdict
from lora_tune.verdict import main
from tests.builders import BEGAN, STUDY, stored, study_of

VALUES = {"LR": 5e-4, "MAX_STEPS": 800, "layout": "tp1 pp1 cp1 minibs1 mbs1 sp0"}


def recorded() -> StudyRecords:
    """A baseline and an arm a tenth faster, eight runs each; and one of an arm that nobody ran again."""
    trials = {}
    for number in range(17):
        arm = 2 if number == 16 else number % 2
        seconds = (600.0, 540.0, 500.0)[arm] * (1 + 0.01 * (number * 7 % 5 - 2))
        tuned = VALUES | {"LR": 5e-4 + 1e-4 * arm}
        trials[number] = Trial(
            number=number, seed=number, tuned=tuned, parameters=tuned, state=TrialState.FINISHED, proposed_at=BEGAN,
            verdict=Verdict.REACHED, seconds=seconds, samples=3072.0, finished_at=BEGAN + 60.0 * number,
            metrics=TrialMetrics(objective=seconds, node_hours=0.2, eval_samples=384.0, samples_per_second=5.0),
        )  # fmt: skip
    study = study_of()
    return StudyRecords(name=study.name, digest=study.digest, study_toml=STUDY, began_at=BEGAN, trials=trials)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "built.toml").write_text(STUDY)
    stored(tmp_path / "sweeps" / "built", recorded(), study_of())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(*options: str) -> str:
    done = CliRunner().invoke(main, ["--study", "built.toml", *options])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_better_one_comes_first_and_the_ledger_last(place: Path) -> None:
    lines = asked().splitlines()
    assert lines[0].startswith("trial 1's configuration is better than the baseline by 1")
    assert lines[1] == "the baseline, 8 runs with a result"
    assert "trial 16's configuration has one run, the one it was chosen by" in lines[2]
    assert lines[-1].startswith("3 configurations, 1 run again, 1 better than the baseline; 1.2% of 5% spent")


def test_as_json_it_is_the_whole_ledger_and_asking_twice_changes_nothing(place: Path) -> None:
    ledger = json.loads(asked("--json"))
    assert [arm["state"] for arm in ledger["arms"]] == ["baseline", "better", "one run"]
    assert ledger == json.loads(asked("--json"))


def test_of_one_trial_it_is_that_of_its_configuration(place: Path) -> None:
    assert json.loads(asked("--trial", "3", "--json"))["trials"] == [1, 3, 5, 7, 9, 11, 13, 15]
    refused = CliRunner().invoke(main, ["--study", "built.toml", "--trial", "99"])
    assert (refused.exit_code, "there are 0 to 16" in refused.stderr) == (2, True)


def test_the_report_shows_the_same_sentences(place: Path) -> None:
    page = report_html(study_of(), recorded(), BEGAN + 9999)
    assert "Better than the baseline, or not" in page
    assert "1.2% of 5% spent" in page


def test_a_report_of_a_sweep_in_which_nothing_was_run_again_has_no_such_section() -> None:
    sweep = recorded()
    alone = replace(sweep, trials={n: sweep.trials[n] for n in (0, 1)})
    assert "Better than the baseline, or not" not in report_html(study_of(), alone, BEGAN + 9999)


def test_of_hundreds_of_verdicts_the_page_shows_the_first(place: Path) -> None:
    sweep = recorded()
    arm = sweep.trials[1]
    many = {
        100 + 2 * n + twice: replace(
            arm, number=100 + 2 * n + twice, tuned=VALUES | {"MAX_STEPS": 400 + n}, parameters=VALUES
        )
        for n in range(200)
        for twice in (0, 1)
    }
    page = report_html(study_of(), replace(sweep, trials={**sweep.trials, **many}), BEGAN + 99999)
    assert "172 more: lora-tune verdict lists them" in page
