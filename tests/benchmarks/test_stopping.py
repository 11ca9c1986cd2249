"""What the benchmark of the stopping rule counts, and what it lets the rule see."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.stopping.__main__ import score
from benchmarks.stopping.metrics import METRICS, outside
from benchmarks.stopping.sweeps import as_of, play
from benchmarks.stopping.tables import Table, whole
from lora_tune.curves.conformal import allowed
from lora_tune.launchers.simulated.tabular import TABLES, read_table
from lora_tune.store.records import TrialState

SAMPLES = np.arange(10.0, 101.0, 10.0)


def test_a_run_that_ends_in_nan_is_caught_at_its_second_such_eval_by_every_rule() -> None:
    good = whole(SAMPLES, np.linspace(1, 0, 10), 100.0)
    bad = whole(SAMPLES, np.where(SAMPLES < 50, 1.0, math.nan), 100.0)
    one_nan = whole(SAMPLES, np.where(SAMPLES == 50, math.nan, 1.0), 100.0)
    for run, caught, used in ((bad, 1.0, 0.6), (one_nan, 0.0, 1.0)):
        found = score(Table("made up", 0.2, [good] * 6, [run] * 12), 3, 1, lambda *_: lambda _: None)
        assert [*found.killed, *found.caught, *found.used] == pytest.approx([0.0, caught, used])


def test_a_replayed_sweep_shows_the_rule_what_was_known_then() -> None:
    study, sweep = play(read_table(TABLES / "lora_tiny.npz"), seed=0, trials=6)
    judged = sweep.trials[3]
    now = judged.proposed_at + 1
    then = as_of(sweep, judged, now)
    assert judged.number in then.trials
    assert all(trial.proposed_at <= now for trial in then.trials.values())
    for number, trial in then.trials.items():
        ended = sweep.trials[number].finished_at
        assert ended is not None
        assert (trial.state is TrialState.FINISHED) == (ended <= now)
        assert (trial.verdict is None) == (ended > now)
    assert study.pruning.references == 8


@pytest.mark.parametrize("metric", METRICS)
def test_however_a_metric_is_logged_good_runs_stop_no_more_of_their_like_than_the_rate_allows(metric: str) -> None:
    """Steps, few examples, subsets by turns, evals at any time: each of eleven good runs beside the ten others."""
    assert outside(METRICS[metric], seed=1, rate=0.2, beside=10) <= allowed(0.2, 10)
