"""Public runs against the study's own machine: a good run among them begins the belief, one outside of them ends it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from lora_tune.config.study import Study
from lora_tune.controller import evidence, policy, pruning
from lora_tune.logs.run import Eval, RunLog
from lora_tune.mlperf import convergence
from lora_tune.review.stopping import account_text, stopping_account
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Attempt, StudyRecords, Trial, TrialState, Verdict
from tests.builders import study_of

BEGAN = 1000.0
LEVEL = (0.96,) * 5
DROP = (*LEVEL, 0.96, 0.96, 0.96, 0.924)
"""A good curve that stays level, where the published ones fall, and then drops."""
USUAL = (0.938, 0.935, 0.931, 0.927, 0.924)


def study(**pruning: Any) -> Study:
    text = """
        [workload]
        kind = "command"
        argv = ["python", "train.py"]
        [site]
        system = "H100"
        [space]
        LR = { type = "float", low = 1e-4, high = 1e-3, log = true }
        [objective]
        target = 0.925
        curves = "llama2_70b_lora"
        [budget]
        trials = 30
        """
    return study_of(text).with_options({"pruning": {"audit": 0.0, **pruning}})


def log(*losses: float) -> RunLog:
    return RunLog(run_start_ms=0, evals=tuple(Eval(1536 + 384.0 * i, v, 100.0 * i) for i, v in enumerate(losses)))


def running(number: int, at: float = BEGAN) -> Trial:
    known = TrialMetrics(precision="FP8")
    values = {"LR": 4e-4, "GBS": 8, "MAX_STEPS": 1024}
    return Trial(number=number, seed=number, tuned={"LR": 4e-4}, parameters=values, metrics=known, proposed_at=at)


def sweep_of(*ended: tuple[Trial, tuple[float, ...]]) -> StudyRecords:
    """Trials one after another, each over 100 s after it was proposed: good ones, where the last eval is."""
    trials = {
        t.number: replace(
            t, state=TrialState.FINISHED, finished_at=t.proposed_at + 100, seconds=100.0,
            verdict=Verdict.REACHED if losses[-1] <= 0.925 else Verdict.CENSORED,
        )
        for t, losses in ended
    }  # fmt: skip
    return StudyRecords(
        name="x", digest="d", study_toml="", began_at=BEGAN, trials=trials,
        attempts={
            (n, 0): Attempt(trial=n, number=0, job_name=f"x-{n}", folder="t", intended_at=BEGAN) for n in trials
        },
        evals={(t.number, 0): log(*losses).evals for t, losses in ended},
    )  # fmt: skip


def with_running(sweep: StudyRecords, *trials: Trial) -> StudyRecords:
    return replace(sweep, trials={**sweep.trials, **{t.number: t for t in trials}})


def judged(sweep: StudyRecords, trial: Trial, *losses: float) -> str:
    """The sentence with which the trial is stopped; "" where it goes on."""
    found = pruning.judge_curve(study(cap=False), with_running(sweep, trial), trial, log(*losses))
    return found.sentence if isinstance(found, policy.Stop) else ""


def test_public_runs_never_stop_the_start_of_a_sweep() -> None:
    assert judged(sweep_of(), running(0), *LEVEL) == ""
    assert judged(sweep_of((running(0), USUAL)), running(1), *LEVEL).startswith("stalled: two evals in a row")


def test_a_start_that_diverges_is_stopped() -> None:
    assert judged(sweep_of(), running(0), 0.94, math.nan, math.nan).startswith("diverged")
    assert judged(sweep_of(), running(0), 0.96, 0.95, 0.94, *[40.0] * 4).startswith("diverged")


def test_the_start_is_the_first_trial_that_trains() -> None:
    dead = replace(running(0), state=TrialState.FINISHED, verdict=Verdict.INFEASIBLE)
    speed = replace(running(1), probe=True)
    usual = sweep_of((running(4), USUAL))
    assert judged(with_running(usual, dead, speed), running(2), *LEVEL) == ""
    assert judged(with_running(usual, dead, speed, running(2)), running(3), *LEVEL) != ""


def test_public_runs_stop_no_trial_before_a_good_one_has_lain_among_them() -> None:
    """Where they are of other curves, a bad start must not leave every good run after it to be stopped."""
    bad = sweep_of((running(0), (0.99,) * 5))
    assert judged(bad, running(1), *LEVEL) == ""
    account = stopping_account(study(), bad, BEGAN + 300)
    assert account is not None
    assert account.kept is None
    assert "published curves stop no run before a good one" in account_text(account)
    later = sweep_of((running(0), (0.99,) * 5), (running(1, BEGAN + 100), USUAL))
    assert judged(later, running(2, BEGAN + 200), *LEVEL).startswith("stalled: two evals in a row")
    known = stopping_account(study(), later, BEGAN + 300)
    assert known is not None
    assert account_text(known).startswith("judged by published runs, at most 1%")


def test_a_good_run_says_nothing_of_the_public_runs_at_another_batch() -> None:
    """A code may need the usual samples at GBS 8 and a third more at another: all its good runs there were stopped."""
    usual = sweep_of((running(0), USUAL))
    other = replace(running(1, BEGAN + 200), parameters={"GBS": 16, "MAX_STEPS": 512})
    bad = [0.99] * 8
    assert judged(usual, other, *bad) == ""
    there = convergence.published(16)
    assert there is not None
    among = [float(there.family.loss_at(np.array(1536 + 384.0 * i))) for i in range(10)]
    confirmed = sweep_of((running(0), USUAL), (other, [loss for loss in among if loss > 0.925] + [0.924]))
    third = replace(other, number=2, proposed_at=BEGAN + 400)
    assert judged(confirmed, third, *bad).startswith("stalled: two evals in a row")


def test_a_good_run_at_the_edge_of_the_public_ones_neither_begins_nor_ends_the_belief_in_them() -> None:
    found = convergence.published(8)
    assert found is not None
    unit = float(np.hypot(found.family.noise_at(np.array(1920.0)), found.family.spread))
    excess = (found.threshold(0.1) + found.threshold(0.01)) / 2
    edge = [float(found.family.loss_at(np.array(1536 + 384.0 * i))) + excess * unit for i in range(3)]
    sweep = sweep_of((running(0), (*edge, 0.924)))
    assert evidence.contradiction(study(), sweep) is None
    assert not evidence.is_confirmed(study(), sweep)


def lying(excess: float, evals: int = 4) -> list[float]:
    """Losses so far above the public runs' median curve, in units of what good runs scatter."""
    found = convergence.published(8)
    assert found is not None
    at = np.array([1536 + 384.0 * i for i in range(evals)])
    unit = np.hypot(found.family.noise_at(at), found.family.spread)
    return [float(v) for v in found.family.loss_at(at) + excess * unit]


def test_a_study_that_needs_more_samples_moves_the_public_runs_limit() -> None:
    """15% more samples lie one and a half units higher, among the public runs: nearly half are above one in twenty."""
    sweep = sweep_of(*((running(n, BEGAN + 100 * n), (*lying(height), 0.924)) for n, height in enumerate((1.2, 1.5))))
    five = study(cap=False, false_prune_rate=0.05)

    def stopped(excess: float) -> bool:
        shown = with_running(sweep, running(2, BEGAN + 300))
        return pruning.judge_curve(five, shown, running(2, BEGAN + 300), log(*lying(excess))) is not None

    assert not stopped(2.5)
    assert stopped(5.0)
    limits = [x for _, _, x in pruning.band(five, with_running(sweep, running(2)), running(2))]
    bare = [x for _, _, x in pruning.band(five, sweep_of((running(0), USUAL)), running(1))]
    assert min(np.subtract(limits, bare)) > 0, "what is drawn is what stops a run"


def test_good_runs_that_lie_as_high_as_those_before_do_not_end_the_belief() -> None:
    before = [(running(n, BEGAN + 100 * n), (*lying(height), 0.924)) for n, height in enumerate((1.2, 2.9))]
    assert evidence.contradiction(study(), sweep_of(*before, (running(2, BEGAN + 300), (*lying(4.0), 0.924)))) is None
    alone = sweep_of((running(0), (*lying(4.0), 0.924)))
    assert evidence.contradiction(study(), alone) is not None


def test_a_good_run_outside_of_the_public_ones_ends_the_belief_in_them_for_the_whole_sweep() -> None:
    sweep = sweep_of((running(0), DROP))
    worse = [0.99] * 5
    assert judged(sweep, running(1, BEGAN + 200), *worse) == ""
    other_batch = replace(running(1, BEGAN + 200), parameters={"GBS": 16, "MAX_STEPS": 512})
    assert judged(sweep, other_batch, *worse) == ""
    account = stopping_account(study(), sweep, BEGAN + 300)
    assert account is not None
    assert "trial 0 reached the target outside of the published curves" in account_text(account)
    assert "judged by published runs" not in account_text(account)


def test_a_good_run_among_the_public_ones_and_one_that_never_got_there_leave_them_believed() -> None:
    bad = [0.99] * 5
    assert judged(sweep_of((running(0), USUAL)), running(1), *bad) != ""
    assert judged(sweep_of((running(0), USUAL), (running(1), LEVEL)), running(2), *bad) != ""
