"""What who watches a sweep is told of each trial that is over: one terse line."""

from __future__ import annotations

from lora_tune.controller.monitor import first_clause, verdict_line
from lora_tune.store.records import Trial, Verdict


def trial(number: int, replicate_of: int | None = None) -> Trial:
    return Trial(number=number, seed=0, tuned={}, parameters={}, replicate_of=replicate_of)


def test_the_columns_of_all_verdicts_stand_below_one_another() -> None:
    lines = [verdict_line(trial(n), str(v), "why") for n, v in zip((0, 12, 3, 4, 5, 6, 7), Verdict, strict=False)]
    assert lines[0] == "trial 0  reached     why"
    assert {line.index("why") for line in lines} == {21}


def test_a_run_of_a_race_says_which_trial_is_run_again() -> None:
    assert verdict_line(trial(0, replicate_of=13), "reached", "why") == "run 0    reached     trial 13: why"


def test_statistics_stand_behind_the_first_clause() -> None:
    assert first_clause("stalled: further above 8 good runs; at most 1% of good runs look like this").endswith("runs")
    assert first_clause("eval loss 0.5 at 3 steps, 6.0 s") == "eval loss 0.5 at 3 steps, 6.0 s"
