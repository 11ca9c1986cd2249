"""What docs/statistics.md claims of intervals, stopping and cap: on seeded simulations, and on public data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.statistics import perturbed
from benchmarks.stopping import first, shapes, tables
from lora_tune import curves as curve
from lora_tune.curves.comparison import ComparedRun
from lora_tune.curves.points import usable
from lora_tune.curves.stopping import Evidence, verdict
from lora_tune.logs.run import Eval
from lora_tune.mlperf import convergence
from lora_tune.search.capping import Incumbent, cap
from lora_tune.search.noise import Noise

TARGET = perturbed.TARGET
EARLY = 0.6
PUBLISHED = convergence.published(8)
NOISE = np.random.default_rng(5).normal(0, 1, 4000)


def good(count: int, seed: int) -> list[list[Eval]]:
    return perturbed.simulate(lambda family, rng: family.loss_at(perturbed.SAMPLES), NOISE, count, seed)


def test_nine_of_ten_intervals_hold_the_configurations_mean() -> None:
    runs = [run for run in good(500, 1) if len(run) > 2]
    found = [curve.estimate(run, TARGET, family=PUBLISHED.family) for run in runs]
    truth = PUBLISHED.family.samples_at(TARGET)
    # The constants are fitted to real stops, whose noise is skewed upwards: there 88 to 91% hold.
    assert 0.84 <= np.mean([f.low <= truth <= f.high for f in found]) <= 0.94
    assert abs(np.mean([math.log(f.samples / truth) for f in found])) < 0.015


@pytest.mark.parametrize("name", sorted(perturbed.BAD))
def test_runs_that_never_reach_the_target_are_stopped_before_three_fifths_of_their_end(name: str) -> None:
    runs = perturbed.never_reach(perturbed.simulate(perturbed.BAD[name], NOISE, 60, 7))
    assert len(runs) >= 25
    whole = [ComparedRun(curve=usable(run), length=perturbed.MAX_SAMPLES) for run in good(50, 3)]
    whole.sort(key=lambda run: run.stop(TARGET))
    for evidence, share in ((Evidence(published=PUBLISHED), 0.95), (Evidence(finished=whole), 0.8)):
        stops = [at for run in runs if (at := stopped_at(run, evidence)) is not None]
        assert sum(at < EARLY * perturbed.MAX_SAMPLES for at in stops) >= share * len(runs)


def test_good_runs_and_runs_that_heal_late_go_on() -> None:
    published = Evidence(published=PUBLISHED)
    assert sum(stopped_at(run, published) is not None for run in good(300, 11)) <= 3, "the stated 1%"
    healing = perturbed.simulate(perturbed.healing, NOISE, 30, 99)
    wary = Evidence(published=PUBLISHED, published_from=perturbed.HEALING_SAMPLES + 4 * 384)
    assert not [run for run in healing if stopped_at(run, wary) is not None]
    assert all(stopped_at(run, published) is not None for run in healing), "where nobody says that they will heal"


def test_in_first_sweeps_bad_runs_are_stopped_and_what_becomes_the_best_goes_on() -> None:
    """Recorded trials and shapes that the rule was not built on, in plain Optuna, with no good run at first."""
    pools = [*tables.recorded()[1:4], *shapes.all_shapes()[::4]]
    swept = [first.sweep(pool, seed, "StallPruner") for pool in pools for seed in (1, 2)]
    best = [stopped for one in swept for stopped in one.best]
    assert sum(best) <= 0.25 * len(best), "what three references support"
    assert np.mean([stopped for one in swept for stopped in one.bad]) >= 0.7
    assert np.mean([one.kept for one in swept]) >= 0.8


def stopped_at(run: Sequence[Eval], evidence: Evidence, length: float = perturbed.MAX_SAMPLES) -> float | None:
    """Samples at which the rule stops a run; None when it never does."""
    for i, e in enumerate(run):
        if verdict(run[: i + 1], TARGET, evidence, length=length).stop:
            return e.samples
    return None


@pytest.mark.parametrize("risk", [0.05, 0.2])
def test_a_run_as_good_as_the_incumbent_is_capped_no_more_often_than_the_risk(risk: float) -> None:
    timing, curves = curve.Timing(2.0, 35.0), good(200, 21)

    def seconds(run: Sequence[Eval]) -> float:
        return run[-1].samples / 2 + 35 * len(run)

    times = [seconds(run) for run in curves]
    capped = 0
    for i, run in enumerate(curves):
        before = tuple(times[(i + k) % len(times)] for k in (1, 2, 3))
        incumbent = Incumbent("best", before, Noise(0.067).after([[math.log(s) for s in before]]))
        evals = [Eval(e.samples, e.loss, e.samples / 2 + 35 * (n + 1)) for n, e in enumerate(run)]
        looks = (
            cap(evals[: n + 1], timing, incumbent, evals[n].seconds, risk, target=TARGET, family=PUBLISHED.family)
            for n in range(len(evals) - 1)
        )
        capped += any(look.stop for look in looks)
    chance = 2 * math.sqrt(risk * (1 - risk) * len(curves))
    assert capped <= risk * len(curves) + chance


@pytest.mark.public_data
def test_on_public_runs_that_it_never_saw_the_estimate_is_unbiased_and_its_intervals_hold(public_data: Path) -> None:
    from benchmarks.calibrate_curves import is_good
    from benchmarks.public_runs import by_submission, is_test, load
    from benchmarks.statistics.crossing import covers, expected_stop

    inside: list[bool] = []
    surplus: list[float] = []
    stops: list[float] = []
    for submission, group in by_submission(load(public_data)).items():
        if not is_test(submission) or group[0].gbs != 8 or not is_good(group):
            continue
        found = [curve.estimate(r.run, TARGET, family=PUBLISHED.family) for r in group]
        inside.extend(covers(found, np.array([f.samples for f in found])))
        stops.extend(r.stop for r in group)
        surplus.extend(
            expected_stop(r, f.samples, PUBLISHED.family) - r.stop for r, f in zip(group, found, strict=True)
        )
    assert len(inside) > 400
    assert 0.87 <= np.mean(inside) <= 0.93
    assert abs(np.mean(surplus)) < 0.005 * np.mean(stops)


@pytest.mark.public_data
def test_on_public_runs_that_it_never_saw_the_envelope_keeps_its_rate_and_catches_bad_runs(public_data: Path) -> None:
    from benchmarks.calibrate_curves import is_good
    from benchmarks.public_runs import by_submission, is_test, load

    killed, caught = [], []
    for submission, group in by_submission(load(public_data)).items():
        if is_test(submission):
            published, length = (
                Evidence(published=convergence.published(group[0].gbs)),
                group[0].max_steps * group[0].gbs,
            )
            stops = [stopped_at(r.run.evals, published, length) for r in group]
            # Of v5.1, where FP4 began, a precision that nobody states leaves bad runs alone: docs/statistics.md.
            bad = caught if not submission.startswith("v5.1/") else []
            (killed if is_good(group) else bad).extend(s is not None for s in stops)
    assert np.mean(killed) <= 0.01
    assert np.mean(caught) >= 0.9
