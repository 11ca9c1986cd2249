"""Runs that train in FP4 and heal: how that is found out, and that their curves are taken for what they are."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from lora_tune import curves
from lora_tune.config.study import Study
from lora_tune.controller import conclusion, healing, pruning
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import Eval, RunLog
from lora_tune.mlperf import convergence
from lora_tune.mlperf.gate import Precision, precision_of
from lora_tune.search.capping import Incumbent, cap
from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.noise import Noise
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import StudyRecords, Trial, TrialState, Verdict
from tests.builders import study_of

TARGET = 0.925
HEALING = 350 * 8.0

FP4_RUNS = (
    (0.9552, 0.9493, 0.9461, 0.9423, 0.9236),
    (0.9557, 0.9519, 0.9477, 0.9446, 0.9279, 0.9223),
    (0.9597, 0.9488, 0.9468, 0.9421, 0.926, 0.9225),
    (0.9531, 0.9478, 0.9433, 0.9408, 0.9214),
)
"""Eval losses as FP4 submissions of v5.1 have them: every 384 samples from 1,536 on, healed after 2,800."""


FP8_RUNS = (
    (0.939, 0.9358, 0.9338, 0.9285, 0.926, 0.9198),
    (0.94, 0.9368, 0.932, 0.928, 0.9235),
    (0.9408, 0.9343, 0.9316, 0.9265, 0.9309, 0.9234),
    (0.9411, 0.938, 0.9303, 0.9272, 0.9278, 0.9233),
    (0.9432, 0.9371, 0.9301, 0.9286, 0.9259, 0.9209),
)
"""The same of FP8 submissions of v5.0 on eight B200."""


def fp4_run(losses: tuple[float, ...], *, healed_pace: float = 3.6) -> RunLog:
    """7.7 samples/s and 9.4 s an eval in FP4; ``healed_pace`` and 19 s after it, and 20 s for the change."""
    samples = [1536 + 384 * i for i in range(len(losses))]
    now, done, evals, speeds, lengths = 0.0, 0, [], [], []
    for at, loss in zip(samples, losses, strict=True):
        low, high = max(0.0, min(at, HEALING) - done), max(0.0, at - max(done, HEALING))
        seconds = low / 7.7 + high / healed_pace + (20.0 if done < HEALING < at else 0.0)
        length = 19.0 if at > HEALING else 9.4
        now, done = now + seconds + length, at
        evals.append(Eval(float(at), loss, now))
        speeds.append((low + high) / seconds)
        lengths.append(length)
    return RunLog(run_start_ms=0, evals=tuple(evals), throughput=tuple(speeds), eval_seconds=tuple(lengths))


def fp8_run(seed: int) -> RunLog:
    """A run of the public GBS 8 shape at 2.2 samples/s."""
    rng = np.random.default_rng(seed)
    family = convergence.published(8).family
    samples = 1536.0 + 384 * np.arange(8)
    loss = family.loss_at(samples) + rng.normal(0, family.seed) + rng.normal(0, 1, 8) * family.noise_at(samples)
    evals = [Eval(s, v, s / 2.2) for s, v in zip(samples, loss, strict=True)]
    stop = next((i for i, e in enumerate(evals) if e.loss <= TARGET), 7)
    return RunLog(run_start_ms=0, evals=tuple(evals[: stop + 1]))


def study(score: str = "time_to_target") -> Study:
    return study_of(
        f"""
        [workload]
        kind = "command"
        command = ["python", "train.py"]
        [space]
        LR = {{ type = "float", low = 1e-4, high = 1e-3, log = true }}
        GBS = 8
        [objective]
        target = {TARGET}
        curves = "llama2_70b_lora"
        score = "{score}"
        estimator = "curve"
        [budget]
        trials = 3
        """,
        "fp4",
    )


def trial(**parameters: float | str | bool) -> Trial:
    return Trial(number=0, seed=1, tuned={}, parameters={"GBS": 8, "LR": 6e-4, **parameters})


class TestWhatIsStated:
    @pytest.mark.parametrize(
        ("settings", "found"),
        [
            ({"FP4": "True", "HEALING_ITER": "350"}, Precision(lowest="fp4", healing_steps=350)),
            ({"fp4": True, "healing_iter": 350, "fp8": False}, Precision(lowest="fp4", healing_steps=350)),
            ({"HEALING_ITER": 350}, Precision(healing_steps=350)),
            ({"FP8": "True", "HEALING_ITER": "350"}, Precision(lowest="fp8")),
            ({"FP4": "False", "HEALING_ITER": "350"}, Precision()),
            ({"FP4": "True", "HEALING_ITER": "0"}, Precision(lowest="fp4")),
            ({"lowest_numerical_precision_in_linear": "nvfp4"}, Precision(lowest="fp4")),
            ({"lowest_numerical_precision_linear": "mxfp4"}, Precision(lowest="fp4")),  # AMD's, v6.0
            ({"MLPERF_LINEAR_PRECISION": "bf16"}, Precision(lowest="bf16")),
            ({"HEALING_ITER": "soon", "LR": 1e-3}, Precision()),
        ],
    )
    def test_precision_and_healing_step_are_read_from_settings(
        self, settings: dict[str, object], found: Precision
    ) -> None:
        assert precision_of(settings) == found

    @settings(deadline=None)
    @given(st.dictionaries(st.text(), st.one_of(st.text(), st.floats(), st.integers(), st.booleans(), st.none())))
    def test_no_settings_break_it(self, settings: dict[str, object]) -> None:
        precision_of(settings)

    @settings(deadline=None)
    @given(cut=st.integers(1, 60))
    def test_a_printed_config_is_read_however_the_log_is_cut(self, cut: int) -> None:
        text = b" 0:   fp4: true\n 0:   fp4_recipe: nvfp4\n 0:   healing_iter: 350\n no_healing_iter: 7\nfp8=False\n"
        reader = MllogReader()
        for at in range(0, len(text), cut):
            reader.feed(text[at : at + cut])
        assert dict(reader.run().hyperparameters) == {"fp4": True, "healing_iter": 350, "fp8": False}

    def test_the_log_counts_before_what_the_program_was_given(self) -> None:
        given_fp4 = replace(trial(), metrics=healing.remembered({"FP4": "True", "HEALING_ITER": "350"}))
        assert healing.healing_samples(given_fp4, RunLog()) == HEALING
        printed = RunLog(hyperparameters={"fp4": True, "healing_iter": 300, "global_batch_size": 16})
        assert healing.healing_samples(given_fp4, printed) == 4800
        assert healing.healing_samples(given_fp4, RunLog(hyperparameters={"fp8": True})) == 0

    def test_a_step_without_a_batch_size_is_somewhere(self) -> None:
        assert healing.healing_samples(
            replace(trial(HEALING_ITER=350), parameters={"HEALING_ITER": 350}), RunLog()
        ) == (math.inf)


class TestWhatCurvesShow:
    def test_a_fall_with_a_change_of_pace_is_recognised_in_one_run(self) -> None:
        assert curves.recognised([fp4_run(FP4_RUNS[0])]) == 2688

    def test_a_fall_at_one_place_is_recognised_in_three_runs_without_any_pace(self) -> None:
        evals = [[e._replace(seconds=math.nan) for e in fp4_run(losses).evals] for losses in FP4_RUNS]
        assert curves.recognised(evals) == 2688
        assert curves.recognised(evals[:2]) == 0

    def test_ordinary_runs_change_nowhere(self) -> None:
        runs = [fp8_run(seed) for seed in range(40)]
        assert curves.recognised(runs) == 0
        assert not any(curves.recognised([run]) for run in runs)

    def test_trials_alike_tell_of_one_that_runs(self) -> None:
        done = {"state": TrialState.FINISHED, "verdict": Verdict.REACHED}
        trials = {n: replace(trial(), number=n, **done) for n in range(4)}
        records = _sweep(trials, {n: fp4_run(losses) for n, losses in enumerate(FP4_RUNS)})
        young = RunLog(evals=fp4_run(FP4_RUNS[0]).evals[:2])
        assert healing.healing_samples(replace(trial(), number=9), young, records) == 2688
        assert healing.healing_samples(replace(trial(FP8=True), number=9), young, records) == 0


def _sweep(trials: dict[int, Trial], runs: dict[int, RunLog]) -> StudyRecords:
    from lora_tune.store.records import Attempt

    return StudyRecords(
        name="x", digest="d", study_toml="", began_at=0.0, trials=trials,
        attempts={(n, 0): Attempt(trial=n, number=0, job_name=str(n), folder="") for n in runs},
        evals={(n, 0): run.evals for n, run in runs.items()},
    )  # fmt: skip


class TestWhatItCosts:
    @pytest.mark.parametrize("losses", FP4_RUNS)
    @pytest.mark.parametrize("declared", [0.0, HEALING])
    def test_the_estimate_is_the_raw_stop_declared_or_not(self, losses: tuple[float, ...], declared: float) -> None:
        run = fp4_run(losses)
        found = curves.estimate(run, TARGET, family=convergence.published(8).family, healing=declared)
        assert found.by_stop
        assert found.samples == run.evals[-1].samples - 192
        assert found.low < found.samples < found.high

    @pytest.mark.parametrize("losses", FP4_RUNS)
    def test_the_objective_is_the_clock_whatever_is_known(self, losses: tuple[float, ...]) -> None:
        run = fp4_run(losses)
        for known in (trial(), trial(FP4=True), trial(FP4=True, HEALING_ITER=350)):
            assert conclusion.measured(study(), known, (), run, 0.0).objective == run.evals[-1].seconds

    def test_each_phase_has_its_own_pace(self) -> None:
        found = curves.timing(fp4_run(FP4_RUNS[1]), HEALING)
        assert found.samples_per_second == pytest.approx(7.7)
        assert found.seconds_per_eval == pytest.approx(9.4)
        assert found.healed is not None
        assert found.healed.samples_per_second == pytest.approx(3.6)
        assert found.healed.seconds_per_eval == pytest.approx(19.0)
        assert found.healed.switch_seconds == pytest.approx(20.0)

    def test_both_phases_make_the_runs_own_time(self) -> None:
        run = fp4_run(FP4_RUNS[1])
        schedule = curves.Schedule(1536, 384)
        whole = curves.predicted_seconds(run.evals[-1].samples - 192, curves.timing(run, HEALING), schedule)
        assert whole == pytest.approx(run.evals[-1].seconds, rel=0.01)

    def test_the_clock_keeps_what_the_pace_does_not_explain(self) -> None:
        run = fp8_run(3)
        late = replace(run, evals=tuple(e._replace(seconds=e.seconds + 100) for e in run.evals))
        found = [
            curves.clock_seconds(
                curves.estimate(r, TARGET, family=convergence.published(8).family),
                curves.Timing(2.2, 0.0),
                curves.Schedule(1536, 384),
            )
            for r in (run, late)
        ]
        assert found[1] - found[0] == pytest.approx(100)

    def test_no_forecast_caps_a_run_before_it_has_healed(self) -> None:
        evals = fp4_run(FP4_RUNS[0]).evals[:4]
        seconds = (430.0, 431.0, 429.0, 430.0, 432.0)
        rival = Incumbent("trial 1", seconds, Noise(0.067).after([[math.log(s) for s in seconds]]))
        timing = curves.Timing(7.7, 9.4)
        family = convergence.published(8).family
        told = cap(evals, timing, rival, 390.0, 0.1, target=TARGET, family=family, healing=HEALING)
        assert not told.stop
        assert cap(evals, timing, rival, 390.0, 0.1, target=TARGET, family=family).stop
        assert cap(evals, timing, rival, 1e4, 0.1, target=TARGET, healing=HEALING).stop, "the clock counts for all"


@pytest.mark.parametrize("losses", FP4_RUNS)
@pytest.mark.parametrize("stated", [{}, {"HEALING_ITER": 350}, {"FP4": True}, {"FP4": True, "HEALING_ITER": 350}])
@pytest.mark.parametrize("by", ["parameters", "settings", "log"])
def test_no_winner_in_fp4_is_capped_beside_a_leader_in_fp8(
    losses: tuple[float, ...], stated: dict[str, Any], by: str
) -> None:
    """Its curve lies high until it heals, then comes to the target within the leader's time."""
    public = study()
    done = {"state": TrialState.FINISHED, "verdict": Verdict.REACHED, "finished_at": 1.0}
    whole = fp4_run(losses)
    leaders = {}
    for number in range(1, 9):
        seconds = (1.01 + 0.002 * number) * whole.evals[-1].seconds
        timed = {"seconds": seconds, "metrics": TrialMetrics(objective=seconds, precision="fp8")}
        leaders[number] = replace(trial(), number=number, **timed, **done)
    records = _sweep(leaders, dict.fromkeys(leaders, fp8_run(3)))
    known, settings = replace(trial(MAX_STEPS=700), number=9), {}
    if by == "parameters":
        known = replace(known, parameters={**known.parameters, **stated})
    elif by == "settings":
        known = replace(known, metrics=healing.remembered(stated))
    else:
        settings = stated
    for count in range(1, len(losses)):
        evals = whole.evals[:count]
        so_far = replace(
            whole, evals=evals, throughput=whole.throughput[:count], eval_seconds=whole.eval_seconds[:count],
            hyperparameters=settings, run_start_ms=0, last_ms=int(1000 * evals[-1].seconds), run_stop_ms=None,
        )  # fmt: skip
        assert pruning.judge_curve(public, records, known, so_far) is None, count


@pytest.mark.parametrize("declared", [{"HEALING_ITER": 350}, {}])
def test_a_run_that_does_not_heal_is_stopped_soon_after_the_others_of_its_sweep_did(declared: dict[str, float]) -> None:
    """At its first eval after the change, at 55% of 700 steps."""
    own = study().with_options({"objective": {"curves": "own"}, "pruning": {"cap": False, "audit": 0.0}})
    known = trial(MAX_STEPS=700, **declared)
    done = {"state": TrialState.FINISHED, "verdict": Verdict.REACHED, "finished_at": 1.0}
    runs = {n: fp4_run(FP4_RUNS[n % len(FP4_RUNS)]) for n in range(8)}
    change = {n: TrialMetrics(healing_samples=healing.healing_samples(known, run)) for n, run in runs.items()}
    sweep = _sweep({n: replace(known, number=n, metrics=change[n], **done) for n in runs}, runs)

    def stopped(losses: tuple[float, ...]) -> bool:
        return pruning.judge_curve(own, sweep, replace(known, number=9), fp4_run(losses)) is not None

    before, healed = FP4_RUNS[1][:4], FP4_RUNS[1][4]
    assert not any(stopped(before[:n]) for n in range(1, 5))
    assert stopped((*before, before[-1]))
    assert not stopped((*before, healed))


@pytest.mark.parametrize("stated", [{"FP4": True}, {"FP4": True, "HEALING_ITER": 350}])
@pytest.mark.parametrize("by", ["parameters", "settings", "log"])
def test_no_run_of_another_precision_stops_one_in_fp4(stated: dict[str, Any], by: str) -> None:
    """With a healing step or without one, whoever states it, and the one in FP4 may be the first of its kind."""
    own = study().with_options({"objective": {"curves": "own"}, "pruning": {"cap": False, "audit": 0.0}})
    known = trial(MAX_STEPS=700)
    done = {"state": TrialState.FINISHED, "verdict": Verdict.REACHED, "finished_at": 1.0}
    runs = {n: fp8_run(n) for n in range(40)}
    runs = {n: run for n, run in runs.items() if run.evals[-1].loss <= TARGET}
    sweep = _sweep({n: replace(known, number=n, **done) for n in runs}, runs)
    flat = RunLog(evals=fp4_run((0.97,) * 6).evals)
    fp8 = replace(known, number=99, parameters={**known.parameters, "FP8": True})
    assert pruning.judge_curve(own, sweep, fp8, at_pace(flat, 2.2)) is not None
    fp4 = {
        "parameters": lambda: (replace(known, number=99, parameters={**known.parameters, **stated}), flat),
        "settings": lambda: (replace(known, number=99, metrics=healing.remembered(stated)), flat),
        "log": lambda: (replace(known, number=99), replace(flat, hyperparameters=stated)),
    }
    assert pruning.judge_curve(own, sweep, *fp4[by]()) is None


@pytest.mark.parametrize("losses", FP4_RUNS)
@pytest.mark.parametrize("said", [{}, {"FP8": True}])
def test_no_winner_in_fp4_is_stopped_by_runs_in_fp8_though_nothing_or_another_precision_is_stated(
    losses: tuple[float, ...], said: dict[str, Any]
) -> None:
    """It may train in FP4 until it heals; where its precision is stated, it is too fast for that to be true."""
    own = study().with_options({"objective": {"curves": "own"}, "pruning": {"cap": False, "audit": 0.0}})
    known = replace(trial(MAX_STEPS=700, **said), tuned={"LR": 6e-4})
    done = {"state": TrialState.FINISHED, "verdict": Verdict.REACHED, "finished_at": 1.0}
    runs = {n: at_pace(fp4_run(losses), 6.15) for n, losses in enumerate(FP8_RUNS)}
    sweep = _sweep({n: replace(known, number=n, **done) for n in runs}, runs)
    whole = fp4_run(losses)
    for count in range(1, len(losses)):
        so_far = replace(whole, evals=whole.evals[:count])
        assert pruning.judge_curve(own, sweep, replace(known, number=99), so_far) is None, count
    never = at_pace(fp4_run((*losses[:4], *[losses[3]] * 4)), 7.7)
    assert pruning.judge_curve(own, sweep, replace(known, number=99), never) is not None, "one that never heals"


def at_pace(run: RunLog, speed: float) -> RunLog:
    """The run at so many samples/s, evals included."""
    return replace(run, evals=tuple(e._replace(seconds=e.samples / speed) for e in run.evals))


def test_a_trial_keeps_the_precision_that_its_log_states() -> None:
    """It is a reference later, when its log is no longer read."""
    run = replace(fp4_run(FP4_RUNS[0]), hyperparameters={"FP4": True})
    assert conclusion.measured(study(), trial(), (), run, 0.0).precision == "fp4"
    given_fp4 = replace(trial(), metrics=healing.remembered({"FP4": "True", "HEALING_ITER": "350"}))
    said_fp8 = conclusion.measured(study(), given_fp4, (), replace(run, hyperparameters={"fp8": True}), 0.0)
    done = replace(given_fp4, metrics=given_fp4.metrics | said_fp8)
    assert healing.precision(done) == Precision(lowest="fp8")


@settings(deadline=None)
@given(
    evals=st.lists(st.builds(Eval, st.floats(), st.floats(), st.floats()), max_size=12),
    at=st.floats(min_value=0),
    speeds=st.lists(st.floats(), max_size=12),
)
def test_no_run_breaks_what_knows_of_phases(evals: list[Eval], at: float, speeds: list[float]) -> None:
    run = RunLog(evals=tuple(evals), throughput=tuple(speeds), eval_seconds=tuple(speeds))
    curves.recognised([run, run, run])
    timing = curves.timing(run, at)
    found = curves.estimate(run, TARGET, healing=at)
    curves.forecast(run, TARGET, healing=at)
    curves.clock_seconds(found, timing, curves.Schedule(1536, 384))


class TestWhatFollows:
    def test_precision_decides_speed_and_convergence_and_the_healing_step_convergence(self) -> None:
        switch = CategoricalDistribution([False, True])
        space = Coordinates(
            {"FP4": switch, "HEALING_ITER": IntDistribution(250, 450), "LR": FloatDistribution(1e-4, 1)}
        )
        assert space.speed_names == ("FP4",)
        assert space.convergence_names == ("FP4", "HEALING_ITER", "LR")

    def test_an_eval_schedule_pays_for_the_second_phase_at_its_own_pace(self) -> None:
        crossing = curves.Crossing(
            samples=3000.0, low=2990.0, high=3010.0, stop_samples=None, stop_seconds=None, censored=False, method=""
        )
        one, two = (
            curves.choose_schedule(
                crossing, curves.Timing(7.7, 9.4, healed=healed), step=8, current=curves.Schedule(1536, 384), whole=True
            )
            for healed in (None, curves.Healed(HEALING, 3.6, 19.0, 20.0))
        )
        assert one.seconds < two.seconds < one.seconds + 150
