"""What the benchmark of the stopping rule counts, and what it lets the rule see."""

from __future__ import annotations

import numpy as np

from benchmarks.stopping.first import at_places, sweep
from benchmarks.stopping.sweeps import as_of, play
from benchmarks.stopping.tables import table, whole
from lora_tune.store.records import TrialState
from lora_tune_simulation.tabular import TABLES, read_table

SAMPLES = np.arange(10.0, 101.0, 10.0)


def test_a_first_sweep_counts_what_was_bad_what_became_the_best_and_what_was_used() -> None:
    good, bad = (whole(SAMPLES, np.linspace(1, end, 10), 100.0) for end in (0.0, 0.95))
    pool = table("made up", 0.2, [good] * 20 + [bad] * 20)
    assert len(at_places(good, 0.2)) < len(at_places(bad, 0.2)) == 24
    found = sweep(pool, 1, "StallPruner")
    assert len(found.bad) == 20
    assert sum(found.bad) >= 14
    assert found.kept
    assert found.used < 1


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
    assert study.pruning.references == 3
