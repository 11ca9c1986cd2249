"""What Prometheus is told of a sweep."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from lora_tune.base.errors import InputError, SetupError
from lora_tune.cli.metrics import Metrics, address, gauges_of
from lora_tune.controller.runtime import Environment
from lora_tune.review.screen import Quiet
from lora_tune.store.records import Attempt, Trial, TrialState
from tests.builders import BEGAN, study_of, sweep_of, with_trial
from tests.fakes import FakeClock


def scraped(where: str) -> dict[str, float]:
    """Sample -> value, as a Prometheus server would read it."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(where, timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(value for key, value in sample.labels.items() if key != "study")
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_trials_waits_ticks_node_hours_and_evals_are_served_on_loopback() -> None:
    said: list[str] = []
    metrics = Metrics().serve("0", said.append)
    where = said[0].split()[1]
    assert where.startswith("http://127.0.0.1:")
    study = study_of()
    clock = FakeClock(BEGAN + 5000)
    around = metrics.measured(Environment(launcher=None, clock=clock, view=Quiet(), pause=clock.sleep))  # type: ignore[arg-type]
    assert scraped(where) == {}, "nothing is driven yet"
    around.clock.sleep(1.0)
    sweep = sweep_of(study, trials=12, running=2)
    waiting = Trial(number=12, seed=1, tuned={}, parameters={}, state=TrialState.RUNNING)
    queued = Attempt(trial=12, number=0, job_name="j", folder="f", state="queued", submitted_at=BEGAN, node_count=1)
    around.view.update(study, with_trial(sweep, waiting, queued), clock.now())
    found = scraped(where)
    seen = gauges_of(study, with_trial(sweep, waiting, queued), clock.now())
    assert {k: v for k, v in found.items() if k.startswith("lora_tune_trials{")} == {
        f"lora_tune_trials{{{state}}}": count for state, count in seen.states.items()
    }
    assert sum(seen.states.values()) == 13
    assert seen.states["queued"] == 1
    assert found["lora_tune_node_hours_total"] == pytest.approx(sweep.node_hours(clock.now()))
    assert found["lora_tune_money_total"] == pytest.approx(25 * found["lora_tune_node_hours_total"])
    assert found["lora_tune_queue_wait_seconds"] > 0
    assert found["lora_tune_last_queue_wait_seconds"] == 3.0
    assert found["lora_tune_tick_seconds"] >= 0
    best = sweep.best()
    assert best is not None
    assert found["lora_tune_best_objective"] == pytest.approx(best.objective)
    assert "lora_tune_seconds_since_last_eval" not in found, "none was seen since the driver began"


def test_the_time_since_the_last_eval_begins_with_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_tune.cli.metrics.LOOK_SECONDS", 0.0)
    said: list[str] = []
    metrics = Metrics().serve("127.0.0.1:0", said.append)
    study, clock = study_of(), FakeClock()
    around = metrics.measured(Environment(launcher=None, clock=clock, view=Quiet(), pause=clock.sleep))  # type: ignore[arg-type]
    around.view.update(study, sweep_of(study, trials=3, running=1), 0.0)
    around.view.update(study, sweep_of(study, trials=4, running=1), 0.0)
    assert 0 <= scraped(said[0].split()[1])["lora_tune_seconds_since_last_eval"] < 60


def test_addresses() -> None:
    assert address("9464") == ("127.0.0.1", 9464)
    assert address("0.0.0.0:9464") == ("0.0.0.0", 9464)
    assert address("[::1]:9464") == ("::1", 9464)
    for wrong in ("", "host:", "host:http", "1:70000"):
        with pytest.raises(InputError, match=r"\[HOST:\]PORT"):
            address(wrong)


def test_beyond_this_machine_there_is_a_warning() -> None:
    said: list[str] = []
    Metrics().serve("127.0.0.1:0", said.append)
    assert len(said) == 1
    Metrics().serve("0.0.0.0:0", said.append)
    assert said[2].startswith("warning: anyone who can reach 0.0.0.0 can read these metrics")


def test_a_taken_port_is_said() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(SetupError, match="choose another"):
            Metrics().serve(str(other.getsockname()[1]))
