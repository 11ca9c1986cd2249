"""Ask and tell: a loop of somebody else runs the trials; records, identity and verdicts are those of every trial."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optuna
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_tune import Sweep
from lora_tune.__main__ import main
from lora_tune.base.errors import InputError
from lora_tune.cli.ask_tell import result_of
from lora_tune.launchers import outside
from lora_tune.status import main as status
from lora_tune.store.records import Trial, TrialState, Verdict
from tests.conftest import REPOSITORY

STUDY = """
[objective]
score = "best_value"
metric = "loss"
[workload]
kind = "command"
argv = ["python", "train.py", "--lr={LR}", "--seed={SEED}"]
[site]
launcher = "outside"
[space]
LR = { type = "float", low = 0.01, high = 0.05, log = true }
[budget]
trials = 40
parallel = 3
"""


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(STUDY)
    return Sweep("mine.toml", quiet=True)


def test_what_is_asked_is_a_trial_on_record_and_what_is_told_is_its_result(sweep: Sweep) -> None:
    offer = sweep.ask({"LR": 0.03})
    assert offer.parameters["LR"] == 0.03
    assert offer.argv[-2:] == ("--lr=0.03", f"--seed={offer.seed}")
    assert sweep.trials[offer.trial].state is TrialState.RUNNING

    told = sweep.tell(offer.token, [(100, 0.9), (200, 0.7)])

    assert (told.verdict, told.metrics.objective) == (Verdict.REACHED, 0.7)
    assert sweep.trials == [told]
    assert [e.loss for e in sweep.records.last_evals(offer.trial)] == [0.9, 0.7]


def test_status_advises_to_ask_for_the_next_trial_and_not_to_start_a_sweep(sweep: Sweep) -> None:
    sweep.ask({"LR": 0.03})
    shown = " ".join(CliRunner().invoke(status, ["--study", "mine.toml"]).output.split())
    assert "lora_tune.ask --study mine.toml" in shown
    assert "lora_tune.sweep" not in shown


def test_without_values_the_search_proposes_and_each_offer_is_one_askers(sweep: Sweep) -> None:
    offers = [sweep.ask() for _ in range(3)]
    assert len({o.token for o in offers}) == 3
    assert [o.trial for o in offers] == [0, 1, 2]
    with pytest.raises(InputError, match="3 of 3 slots are taken: tell how trial 0 ended first"):
        sweep.ask()


def test_the_same_told_twice_is_one_result_and_another_is_refused(sweep: Sweep) -> None:
    offer = sweep.ask()
    first = sweep.tell(offer.token, [(100, 0.9)])
    assert sweep.tell(offer.token, [(100, 0.9)]) == first
    with pytest.raises(InputError, match="trial 0 was told already, with another result; the first one stays"):
        sweep.tell(offer.token, [(100, 0.1)])
    assert sweep.trials == [first]


def test_a_forged_token_and_that_of_another_sweep_are_refused(sweep: Sweep, tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text(STUDY)
    foreign = Sweep("other.toml", quiet=True).ask()
    for token in ("forged", "", foreign.token):
        with pytest.raises(InputError, match="names no trial of mine; use the one that ask gave"):
            sweep.tell(token, [(100, 0.1)])


def test_seconds_that_have_not_passed_and_samples_that_do_not_grow_are_refused(sweep: Sweep) -> None:
    offer = sweep.ask()
    with pytest.raises(InputError, match=r"an eval 9000.0 s after its run began, .* s ago, cannot be"):
        sweep.tell(offer.token, [(100, 0.1, 9000.0)])
    with pytest.raises(InputError, match="samples must grow: 100 comes after 100"):
        sweep.tell(offer.token, [(100, 0.9), (100, 0.8)])
    assert sweep.tell(offer.token, [(100, 0.9)]).verdict is Verdict.REACHED


def test_a_failure_is_told_and_the_trial_is_offered_again_under_another_token(sweep: Sweep) -> None:
    offer = sweep.ask()
    assert sweep.tell(offer.token, failed="the node vanished").verdict is None
    again = sweep.ask()
    assert (again.trial, again.parameters) == (offer.trial, offer.parameters)
    assert again.token != offer.token
    with pytest.raises(InputError, match="that run of trial 0 was given up, and another one was begun"):
        sweep.tell(offer.token, [(100, 0.1)])


def test_a_run_that_goes_on_is_judged_meanwhile(sweep: Sweep) -> None:
    offer = sweep.ask()
    assert sweep.tell(offer.token, [(100, 0.9)], over=False).state is TrialState.RUNNING
    diverged = [(100 * n, float("nan") if n > 1 else 0.9) for n in range(1, 9)]
    assert sweep.tell(offer.token, diverged, over=False).verdict is Verdict.PRUNED
    with pytest.raises(InputError, match=r"trial 0 was called off \(diverged: "):
        sweep.tell(offer.token, [(100, 0.9), (200, 0.1)])


def test_a_run_that_the_sweep_called_off_is_told_no_more(sweep: Sweep) -> None:
    offer = sweep.ask()
    stopped = CliRunner().invoke(main, ["steer", "--study", "mine.toml", "--stop", str(offer.trial)])
    assert stopped.exit_code == 0, stopped.output
    sweep.ask()
    with pytest.raises(InputError, match="trial 0 was called off"):
        sweep.tell(offer.token, [(100, 0.1)])
    assert sweep.trials[0].verdict is Verdict.CANCELLED


def test_values_that_are_no_point_of_the_space_are_refused_and_nothing_is_on_record(sweep: Sweep) -> None:
    with pytest.raises(InputError, match="LR = 7"):
        sweep.ask({"LR": 7.0})
    with pytest.raises(InputError, match="MOMENTUM is not tuned; tuned are LR"):
        sweep.ask({"MOMENTUM": 0.9})
    with pytest.raises(InputError, match="there is no sweep of mine"):
        _ = sweep.records


def test_a_study_whose_trials_the_sweep_starts_is_refused(sweep: Sweep, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(STUDY.replace('launcher = "outside"', 'launcher = "local"'))
    with pytest.raises(InputError, match=r'site\.launcher = "local": its trials are started by the sweep'):
        Sweep("own.toml").ask()


def test_two_who_ask_at_once_get_two_trials(sweep: Sweep) -> None:
    command = [sys.executable, "-m", "lora_tune.ask", "--study", "mine.toml"]

    def asked(_: int) -> dict[str, object]:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=sweep.folder.parents[1])
        assert done.returncode == 0, done.stderr
        offer: dict[str, object] = json.loads(done.stdout)
        return offer

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(asked, range(2))
    assert {first["trial"], second["trial"]} == {0, 1}


def test_who_was_killed_after_the_end_was_written_down_has_told_it(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of the end is on disk before the database hears of it: the next call, or driver, takes it up."""
    offer = sweep.ask()
    program = (
        "import os, signal\nfrom lora_tune import Sweep\nfrom lora_tune.launchers import outside\n"
        "end = outside.end\n"
        "def killed(*given):\n    end(*given)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "outside.end = killed\n"
        f"Sweep('mine.toml').tell({offer.token!r}, [(100, 0.9), (200, 0.6)])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", program], cwd=sweep.folder.parents[1], env=environment, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert sweep.trials[0].state is TrialState.RUNNING
    told = sweep.tell(offer.token, [(100, 0.9), (200, 0.6)])
    assert (told.verdict, told.metrics.objective) == (Verdict.REACHED, 0.6)


def test_over_json_the_command_line_says_the_same(sweep: Sweep) -> None:
    run = CliRunner().invoke
    asked = run(main, ["ask", "--study", "mine.toml", "--set", "LR=0.02"])
    offer = json.loads(asked.output)
    assert offer["parameters"] == {"LR": 0.02}
    told = run(main, ["tell", "--study", "mine.toml", "--token", offer["token"], "--evals", "[[100, 0.5]]"])
    assert json.loads(told.output) | {"sentence": ""} == {
        "trial": 0, "state": "finished", "verdict": "reached", "sentence": "", "objective": 0.5, "go_on": False,
    }  # fmt: skip
    refused = run(main, ["tell", "--study", "mine.toml", "--token", offer["token"], "--evals", "[100"])
    assert (refused.exit_code, "not JSON" in refused.stderr) == (2, True)


def test_a_log_in_the_studys_own_form_is_told_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    form = "log = { kind = \"regex\", eval = 'step (?P<step>\\d+) loss (?P<loss>\\S+)' }\n[site]"
    (tmp_path / "mine.toml").write_text(STUDY.replace("[site]", form))
    sweep = Sweep("mine.toml", quiet=True)
    offer = sweep.ask()
    with pytest.raises(InputError, match=r'workload\.log\.kind = "regex": give the log itself in that form, not evals'):
        sweep.tell(offer.token, [(100, 0.5)])
    told: Trial = sweep.tell(offer.token, log="step 1 loss 0.9\nstep 2 loss 0.4\n")
    assert told.metrics.objective == 0.4


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(JSON, st.text(max_size=5), st.text(max_size=5))
def test_whatever_is_told_is_a_result_or_refused_with_a_sentence(evals: object, log: str, failed: str) -> None:
    with contextlib.suppress(InputError):
        result = result_of(evals, log=log, failed=failed)
        assert result.evals or result.log or result.failed
        assert result.digest == result_of(evals, log=log, failed=failed).digest


def test_a_point_that_somebody_gave_to_optuna_becomes_a_request(sweep: Sweep) -> None:
    sweep.tell(sweep.ask().token, [(100, 0.5)])
    study = optuna.load_study(study_name="mine", storage=f"sqlite:///{sweep.folder}/sweep.db")
    for values in ({"LR": 0.02}, {"LR": 7.0}):
        study.enqueue_trial(values, skip_if_exists=False)
    asked, other = sweep.ask(), sweep.ask()
    assert (asked.parameters["LR"], asked.why) == (0.02, "asked for by study.enqueue_trial: try LR=0.02")
    assert other.parameters["LR"] != 0.02
    listed = CliRunner().invoke(main, ["steer", "--study", "mine.toml"]).output
    assert "try LR=7.0: refused: LR = 7.0 is not" in listed
    assert len(study.get_trials(states=(optuna.trial.TrialState.WAITING,))) == 0


def test_a_job_is_taken_once(tmp_path: Path) -> None:
    from lora_tune.base.paths import AttemptPaths

    attempt = AttemptPaths(tmp_path)
    assert outside.take(attempt, "token", "sweep")
    assert not outside.take(attempt, "token", "sweep")
