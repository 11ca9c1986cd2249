"""One error budget for a campaign: which arms are better than the baseline, from records alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.search.campaign import (
    CAMPAIGN_ERROR,
    ArmState,
    ArmVerdict,
    arms_of,
    campaign,
    error_share,
    is_seed,
    verdicts,
)
from lora_tune.search.noise import ResultScale
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import StudyRecords, Trial, TrialState, Verdict
from tests.builders import study_of

LOSS = ResultScale(relative=False, timed=False)
TIME = ResultScale()


def run(number: int, arm: int, value: float | None, verdict: Verdict = Verdict.REACHED) -> Trial:
    """A trial that has ended. value: its objective, None where it has none."""
    return Trial(
        number=number, seed=number, tuned={"ARM": arm}, parameters={"ARM": arm}, state=TrialState.FINISHED,
        verdict=verdict, metrics=TrialMetrics(objective=value, node_hours=0.5),
    )  # fmt: skip


def runs(*values: tuple[int, float | None]) -> list[Trial]:
    return [run(number, arm, value) for number, (arm, value) in enumerate(values)]


def interleaved(baseline: list[float], arm: list[float]) -> list[Trial]:
    pairs = [pair for both in zip(baseline, arm, strict=True) for pair in ((0, both[0]), (1, both[1]))]
    return runs(*pairs)


def judged(trials: list[Trial], scale: ResultScale = LOSS, started: frozenset[int] = frozenset()) -> ArmVerdict:
    """The verdict of arm 1."""
    found = next(t.number for t in trials if t.tuned["ARM"] == 1)
    verdict = verdicts(trials, started, scale).of(found)
    assert verdict is not None
    return verdict


CLEAR = interleaved([1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99], [0.9, 0.91, 0.89, 0.9, 0.92, 0.88, 0.9, 0.91])


def test_an_arm_far_ahead_is_better_with_its_interval_and_what_it_cost() -> None:
    verdict = judged(CLEAR)

    assert verdict.state is ArmState.BETTER
    assert verdict.low is not None
    assert verdict.high is not None
    assert 0 < verdict.low < 0.1 < verdict.high
    assert verdict.spent == CAMPAIGN_ERROR * error_share(1)
    assert "is better than the baseline by 0.0986 (90% interval" in verdict.sentence
    assert "1.2% of 5% spent on it" in verdict.sentence


def test_the_run_that_an_arm_was_chosen_by_is_no_evidence() -> None:
    lucky = runs((0, 1.0), (0, 1.01), (0, 0.99), (1, 0.5))
    assert judged(lucky).state is ArmState.CHOSEN_BY
    assert "run it again" in judged(lucky).sentence
    again = judged([*lucky, run(4, 1, 1.0), run(5, 1, 1.01)])
    assert (again.state, again.runs) == (ArmState.OPEN, 2)
    assert again.difference == pytest.approx(-0.005)


def test_an_open_arm_says_how_many_runs_would_show_it_and_what_they_cost() -> None:
    verdict = judged(interleaved([1.0, 1.1, 0.9, 1.05], [0.9, 0.95, 0.85, 0.99]))

    assert verdict.state is ArmState.OPEN
    assert verdict.more_runs is not None
    assert verdict.more_baseline_runs is not None
    assert verdict.more_node_hours == 0.5 * (verdict.more_runs + verdict.more_baseline_runs)
    assert f"{verdict.more_runs} more runs of it" in verdict.sentence


def test_no_number_of_runs_is_promised_to_an_arm_that_is_behind() -> None:
    verdict = judged(interleaved([1.0, 1.1, 0.9, 1.05], [1.2, 1.25, 1.15, 1.29]))
    assert (verdict.state, verdict.more_runs) == (ArmState.OPEN, None)


def test_a_seed_is_no_arm() -> None:
    trials = [replace(run(n, 0, 1.0 - n / 100), tuned={"ARM": 0, "SEED": n}) for n in range(6)]
    assert len(arms_of(trials)) == 1
    assert verdicts(trials, frozenset(), LOSS).tested == 0


@pytest.mark.parametrize("name", ["SEED", "seed", "DATA_SEED", "random_seed", "SEEDS", "seed_offset"])
def test_names_of_seeds(name: str) -> None:
    assert is_seed(name)


@pytest.mark.parametrize("name", ["LR", "SEEDLING", "REPROCESSEED", "layout"])
def test_names_of_no_seeds(name: str) -> None:
    assert not is_seed(name)


def test_a_quick_run_is_not_counted_before_the_slow_ones_that_were_proposed_before_it() -> None:
    waiting = replace(run(7, 1, None), state=TrialState.RUNNING, verdict=None, metrics=TrialMetrics())
    after = [trial if trial.number != 7 else waiting for trial in CLEAR]
    assert judged(after).runs == 2
    assert judged(after).state is ArmState.OPEN


def test_a_run_without_a_result_counts_as_the_worst_and_two_of_them_are_too_many() -> None:
    one = [run(t.number, 1, None, Verdict.CENSORED) if t.number == 5 else t for t in CLEAR]
    both = [run(t.number, 1, None, Verdict.PRUNED) if t.number in (5, 9) else t for t in CLEAR]

    assert judged(one).missed == 1
    assert judged(one).difference < judged(CLEAR).difference  # type: ignore[operator]
    assert judged(both).state is ArmState.UNSOUND
    assert "2 of 7 further runs" in judged(both).sentence


def test_a_run_that_was_cancelled_after_it_began_counts_and_one_that_never_ran_does_not() -> None:
    stopped = [run(t.number, 1, None, Verdict.CANCELLED) if t.number == 5 else t for t in CLEAR]
    assert judged(stopped).missed == 0
    assert judged(stopped).runs == 6
    assert judged(stopped, started=frozenset({5})).missed == 1


def test_what_failed_for_the_machines_reasons_says_nothing_of_an_arm() -> None:
    failed = [run(t.number, 1, None, Verdict.FAILED) if t.number == 5 else t for t in CLEAR]
    assert (judged(failed).missed, judged(failed).runs) == (0, 6)


def test_runs_that_do_not_scatter_are_no_evidence() -> None:
    verdict = judged(interleaved([1.0] * 6, [0.9] * 6))
    assert verdict.state is ArmState.OPEN
    assert "does the script use its seed" in verdict.sentence


def test_a_verdict_stays_however_many_runs_follow() -> None:
    worse = [run(len(CLEAR) + i, 1, 1.2) for i in range(6)]
    assert judged([*CLEAR, *worse]).state is ArmState.BETTER


def test_the_baseline_is_the_configuration_that_was_there_before_the_sweep() -> None:
    trials = runs((1, 1.0), (0, 1.0), (0, 1.1))
    trials[1] = replace(trials[1], metrics=replace(trials[1].metrics, base="config_today.sh"))
    first = verdicts(trials, frozenset(), LOSS).arms[0]
    assert (first.state, first.trials) == (ArmState.BASELINE, (1, 2))


def test_times_are_compared_by_their_logarithms() -> None:
    times = [replace(t, metrics=replace(t.metrics, objective=600 * t.objective)) for t in CLEAR]
    assert "better than the baseline by 10.9%" in judged(times, TIME).sentence


def test_shares_of_the_error_sum_to_at_most_one() -> None:
    shares = [error_share(position) for position in range(1, 100_000)]
    assert sum(shares[:3]) == pytest.approx(0.5)
    assert 0.999 < sum(shares) < 1


def test_the_ledger_says_what_was_spent_by_all_arms() -> None:
    several = [*CLEAR, run(16, 2, 1.0), run(17, 2, 1.0), run(18, 3, 1.0)]
    ledger = verdicts(several, frozenset(), LOSS)
    assert ledger.tested == 2
    assert ledger.spent == pytest.approx(CAMPAIGN_ERROR * (error_share(1) + error_share(2)))
    assert ledger.summary.startswith("4 configurations, 2 run again, 1 better than the baseline; 2% of 5% spent")


def test_a_sweep_without_trials_has_no_verdict() -> None:
    empty = StudyRecords(name="built", digest="", study_toml="", began_at=0.0)
    assert campaign(study_of(), empty).arms == ()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.one_of(st.none(), st.floats(-1e12, 1e12)), st.sampled_from(Verdict)),
        max_size=25,
    )
)
def test_no_records_break_it_and_the_answer_depends_on_them_alone(
    rows: list[tuple[int, float | None, Verdict]],
) -> None:
    trials = [run(number, arm, value, verdict) for number, (arm, value, verdict) in enumerate(rows)]
    shuffled = random.Random(0).sample(trials, len(trials))
    for scale in (LOSS, TIME):
        assert verdicts(trials, frozenset(), scale) == verdicts(shuffled, frozenset(), scale)
