"""The recommendation of a sweep, decided in one place, and everything else called "the best".

The lowest of many noisy results is biased by luck (winner's curse). So the configuration with the best posterior is
recommended. The best single run, the run nearest to an unreached target and the choice of ``confirm`` are also here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lora_tune.base.text import counted, number
from lora_tune.config.study import Study
from lora_tune.logs.run import Eval
from lora_tune.search.no_effect import no_effect
from lora_tune.search.objectives import objective_of
from lora_tune.search.samplers import Recommends, sampler_kind, sampler_of
from lora_tune.store.metrics import ConfirmedChoice
from lora_tune.store.records import StudyRecords, Trial

if TYPE_CHECKING:
    from lora_tune.mlperf.score import Prediction
    from lora_tune.search.shrinkage import PosteriorEstimate

UNRUN = -1
"""Trial number of a configuration that no trial has run as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommended:
    """The recommended configuration.

    trial: a run of it that reached the target; its number is ``UNRUN`` and it has no results if no trial has run it as
    a whole. runs: how many did. objective, low, high: as in :class:`~lora_tune.search.shrinkage.PosteriorEstimate`.
    why: the evidence, in one sentence. best_run: the best single run. confirmed: chosen by ``confirm`` with further
    seeds.
    """

    trial: Trial
    runs: int
    objective: float
    low: float
    high: float
    best_run: Trial
    why: str = ""
    confirmed: bool = False

    @property
    def ran(self) -> bool:
        """Whether a trial has run it as a whole."""
        return self.trial.number != UNRUN

    @property
    def is_best_run(self) -> bool:
        """Whether the best single run is one of this configuration."""
        return self.trial.parameters == self.best_run.parameters

    @property
    def shown(self) -> Trial:
        """The trial to show for it: its own run, else the best single run."""
        return self.trial if self.ran else self.best_run


def recommend(study: Study, sweep: StudyRecords) -> Recommended | None:
    """The recommendation from the finished trials. None before one has reached the target, and if no parameter has an
    effect (:mod:`lora_tune.search.no_effect`).

    The choice of ``confirm`` stays until the whole interval of another is better.
    """
    return sweep.once("recommended", lambda: _recommend(study, sweep))


def best_run(study: Study, sweep: StudyRecords) -> Trial | None:
    """The single run with the best value, except those rejected by ``confirm``; None without any. It is biased by luck:
    :func:`recommend` returns the configuration to use."""
    return sweep.best(maximise=objective_of(study).maximise)


def ranked(study: Study, sweep: StudyRecords) -> Sequence[Trial]:
    """All ended trials, best first (:meth:`StudyRecords.ranked`)."""
    return sweep.ranked(maximise=objective_of(study).maximise)


def leaders(study: Study, sweep: StudyRecords) -> list[Trial]:
    """The trials with a value, best first, with :func:`best_run` in front."""
    best, done = best_run(study, sweep), [t for t in ranked(study, sweep) if t.has_value]
    return done if best is None else [best, *(t for t in done if t.number != best.number)]


def chance_to_pass(study: Study, sweep: StudyRecords, config: Recommended | None) -> Prediction | None:
    """Predicted score and chance to pass of a submission of the recommended configuration under MLPerf's rules.

    Uses all its runs that reached the target, each corrected for the estimated luck of their mean, since a
    configuration selected for speed had runs with fewer samples than further ones will need. None if no trial has run
    it, without an MLPerf benchmark, or for a benchmark that counts epochs. Imports ``mlperf_logging``, which takes
    about a second.
    """
    benchmark = study.benchmark
    if benchmark is None or benchmark.progress == "epoch_num" or config is None or not config.ran:
        return None
    batch = config.trial.parameters.get("GBS")
    runs = [(t.seconds, t.samples) for t in _runs_of(sweep, config.trial) if t.seconds and t.samples]
    if not isinstance(batch, int) or not runs:
        return None
    from lora_tune.mlperf.score import predict

    mean_of_runs = math.fsum(t.objective for t in _runs_of(sweep, config.trial)) / len(runs)
    luck = config.objective / mean_of_runs if mean_of_runs > 0 and objective_of(study).timed else 1.0
    return predict(benchmark, [s * luck / 60 for s, _ in runs], [n * luck for _, n in runs], batch)


def _runs_of(sweep: StudyRecords, trial: Trial) -> list[Trial]:
    """Runs of a trial's configuration that reached the target."""
    return [t for t in sweep.reached() if t.parameters == trial.parameters and t.metrics.objective is not None]


def _recommend(study: Study, sweep: StudyRecords) -> Recommended | None:
    luckiest = best_run(study, sweep)
    idle = no_effect(study, sweep)
    if luckiest is None or (idle is not None and idle.misleads):
        return None
    estimate = _estimate(study, sweep, luckiest)
    chosen = _chosen(sweep, luckiest)
    if chosen is not None and (estimate.trial == chosen.trial.number or not _beats(study, estimate, chosen)):
        return chosen
    trial = _unrun(study, estimate, luckiest) if estimate.trial is None else sweep.trials[estimate.trial]
    runs = sum(t.parameters == trial.parameters for t in sweep.reached())
    return Recommended(
        trial=trial, runs=runs, objective=estimate.objective, low=estimate.low, high=estimate.high, best_run=luckiest,
        why=estimate.why,
    )  # fmt: skip


def _estimate(study: Study, sweep: StudyRecords, luckiest: Trial) -> PosteriorEstimate:
    """The configuration with the best posterior: by the sampler's model of seconds if it has one, else by the results.

    An unrun configuration is not recommended once no more trials are allowed. If no result is usable (times and speeds
    must be positive), the best run is returned.
    """
    from lora_tune.search import shrinkage

    modelled = sampler_kind(study).recommends_unrun and objective_of(study).timed and study.objective.second is None
    estimate = _by_model(study, sweep) if modelled else None
    if estimate is None or (estimate.trial is None and _over(study, sweep)):
        estimate = shrinkage.shrunken_recommendation(study, sweep)
    value = luckiest.objective
    return estimate or shrinkage.PosteriorEstimate(
        tuned=luckiest.tuned, objective=value, low=value, high=value, trial=luckiest.number
    )  # fmt: skip


def _by_model(study: Study, sweep: StudyRecords) -> PosteriorEstimate | None:
    """Recommendation of the sampler's model, with an interval from the results around it; None if there is none.

    The machine's own config is kept if it is outside the space and its estimate is better.
    """
    from lora_tune.search import shrinkage
    from lora_tune.search.noise import bounded_exp
    from lora_tune.search.recorded import fitting, in_memory

    sampler, fits = sampler_of(study, sweep), fitting(study)
    if not isinstance(sampler, Recommends):
        return None
    today = replace(sweep, trials={n: t for n, t in sweep.trials.items() if fits(t)})  # the space may have changed
    try:
        values, score, sentence = sampler.recommend(in_memory(study, today, sampler))
    except ValueError:  # no data for the model, such as only trials older than the space
        return None
    tuned = study.search_space.conditions.present(values)
    full = [t for t in sweep.reached() if not t.probe]
    trial = min((t for t in full if dict(t.tuned) == tuned), key=lambda t: abs(t.objective - score), default=None)
    if any(not t.tuned for t in full):  # the model does not cover a config outside the space
        by_results = shrinkage.shrunken_recommendation(study, sweep)
        if by_results is not None and not by_results.tuned and by_results.objective < score:
            return by_results
    half = shrinkage.half_width(study, sweep, tuned)
    return shrinkage.PosteriorEstimate(
        tuned=tuned, objective=score, low=score * bounded_exp(-half), high=score * bounded_exp(half),
        trial=None if trial is None else trial.number, why=f"the search's model of all trials: {sentence}",
    )  # fmt: skip


def _over(study: Study, sweep: StudyRecords) -> bool:
    """Whether all trials allowed by the budget have ended."""
    trials = sweep.trials.values()
    return bool(study.budget.trials and len(trials) >= study.budget.trials) and all(t.verdict for t in trials)


def _unrun(study: Study, estimate: PosteriorEstimate, alike: Trial) -> Trial:
    """A configuration that no trial has run; parameters outside the space are copied from a trial that ran."""
    space = study.search_space
    absent = space.conditions.absent(estimate.tuned)
    parameters = {n: v for n, v in alike.parameters.items() if n not in absent} | space.resolve(estimate.tuned)
    return Trial(number=UNRUN, seed=study.trial_seed(0), tuned=estimate.tuned, parameters=parameters)


def _beats(study: Study, new: PosteriorEstimate, chosen: Recommended) -> bool:
    """Whether its whole interval is better than the mean of the configuration chosen by ``confirm``."""
    return new.low > chosen.objective if objective_of(study).maximise else new.high < chosen.objective


def _chosen(sweep: StudyRecords, luckiest: Trial) -> Recommended | None:
    """The configuration chosen by ``confirm``, with its mean over further seeds."""
    for trial in sweep.reached():
        race = trial.metrics.confirmed
        if race is None or race.choice is not ConfirmedChoice.CHOSEN or None in (race.seconds, race.low, race.high):
            continue
        mean, low, high = (float(bound or 0.0) for bound in (race.seconds, race.low, race.high))
        runs = race.runs - race.missed
        why = f"confirm ran it {counted(race.runs, 'more times')}, with seeds that nobody picked"
        return Recommended(
            trial=trial, runs=runs, objective=mean, low=low, high=high, best_run=luckiest, confirmed=True, why=why
        )
    return None


@dataclass(frozen=True, slots=True)
class Nearest:
    """A trial, its best eval as stored, and its distance to the target in words."""

    trial: Trial
    point: Eval
    missing: str


def nearest(study: Study, sweep: StudyRecords) -> Nearest | None:
    """Without a recommendation: the finished trial with the eval nearest to the target, of equal ones at fewer samples.

    None without a target, if a trial reached it, or without a finite eval. A trial whose result at the target was
    rejected does not count.
    """
    target = study.objective.target
    if target is None or not objective_of(study).has_target or sweep.reached():
        return None
    trial = next((t for t in ranked(study, sweep) if not _met(study, sweep.last_evals(t.number))), None)
    point = None if trial is None else sweep.lowest_eval(trial.number)
    if trial is None or point is None:
        return None
    side = "below" if study.rising else "above"
    gap = number(abs(study.shown(point.loss) - target))
    last = sweep.last_evals(trial.number)[-1]
    trend = "; it was still getting better there" if last.samples == point.samples else f"; {_end(study, last)}"
    return Nearest(trial, point, f"{study.eval_text(point)}, {gap} {side} the target {target:g}{trend}")


def _met(study: Study, evals: Sequence[Eval]) -> bool:
    return any(point.loss <= study.target for point in evals)


def _end(study: Study, last: Eval) -> str:
    """How a run continued after its best eval."""
    return f"its last one is {number(study.shown(last.loss))} at {study.counted(last.samples)}"


def nearest_text(closest: Nearest) -> str:
    """The nearest trial in a line."""
    return f"nearest  trial {closest.trial.number}: {closest.missing}"
