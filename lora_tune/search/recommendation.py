"""The configuration that a sweep hands over: the one believed best, which the luckiest single run seldom is.

The lowest of many noisy results is low by luck as much as by merit. So the export, the report and the dashboard hand
over what the search believes of configurations, and show the luckiest run beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_tune.config.study import Study
from lora_tune.objectives import objective_of
from lora_tune.search.samplers import sampler_kind
from lora_tune.store.metrics import ConfirmedChoice
from lora_tune.store.records import StudyRecords, Trial, Value

UNRUN = -1
"""Trial number of a configuration that no trial has run as a whole."""

_MADE = "recommended"
"""What :meth:`Sweep.once` keeps the recommendation as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """What a search believes of a configuration.

    tuned: its values. objective: its mean, in seconds or samples/s. low, high: 90% interval of that mean. trial: one
    that ran it as a whole, None where none did.
    """

    tuned: Mapping[str, Value]
    objective: float
    low: float
    high: float
    trial: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommended:
    """The configuration that is believed best.

    trial: a run of it that reached the target; with number ``UNRUN`` and no results where no trial has run it as a
    whole. runs: how many did. objective, low, high: as of :class:`Belief`. luckiest: the best single run.
    confirmed: a race of further seeds has chosen it.
    """

    trial: Trial
    runs: int
    objective: float
    low: float
    high: float
    luckiest: Trial
    confirmed: bool = False

    @property
    def ran(self) -> bool:
        """Whether a trial has run it as a whole."""
        return self.trial.number != UNRUN

    @property
    def is_luckiest(self) -> bool:
        """Whether the luckiest run is one of this configuration."""
        return self.trial.parameters == self.luckiest.parameters


def recommended(study: Study, sweep: StudyRecords) -> Recommended | None:
    """What the sweep hands over by its finished trials; None before one has reached the target.

    What a race of further seeds has chosen stays until another's interval lies wholly on its better side.
    """
    return sweep.once(_MADE, lambda: _recommended(study, sweep))


def is_worked_out(sweep: StudyRecords) -> bool:
    """Whether :func:`recommended` has its answer and returns at once; with 2,000 trials it takes seconds otherwise."""
    return sweep.made(_MADE)


def _recommended(study: Study, sweep: StudyRecords) -> Recommended | None:
    luckiest = objective_of(study).best(sweep)
    if luckiest is None:
        return None
    belief = sampler_kind(study).believes(study, sweep)
    if belief.trial is None and _over(study, sweep):
        from lora_tune.search.shrinkage import believes

        belief = believes(study, sweep)  # what nobody can run any more is not handed over: the best of what has run is
    chosen = _chosen(sweep, luckiest)
    if chosen is not None and (belief.trial == chosen.trial.number or not _beats(study, belief, chosen)):
        return chosen
    trial = _unrun(study, belief, luckiest) if belief.trial is None else sweep.trials[belief.trial]
    runs = sum(t.parameters == trial.parameters for t in sweep.reached())
    return Recommended(
        trial=trial, runs=runs, objective=belief.objective, low=belief.low, high=belief.high, luckiest=luckiest
    )


def _over(study: Study, sweep: StudyRecords) -> bool:
    """Whether every trial that the study may have has ended."""
    trials = sweep.trials.values()
    return bool(study.budget.trials and len(trials) >= study.budget.trials) and all(t.verdict for t in trials)


def _unrun(study: Study, belief: Belief, alike: Trial) -> Trial:
    """A configuration that no trial has run; what the space does not say is as in a trial that did run."""
    space = study.search_space
    absent = space.conditions.absent(belief.tuned)
    parameters = {n: v for n, v in alike.parameters.items() if n not in absent} | space.resolve(belief.tuned)
    return Trial(number=UNRUN, seed=study.trial_seed(0), tuned=belief.tuned, parameters=parameters)


def _beats(study: Study, new: Belief, chosen: Recommended) -> bool:
    """Whether even the worse end of its interval is better than the mean of what a race chose."""
    return new.low > chosen.objective if objective_of(study).maximise else new.high < chosen.objective


def _chosen(sweep: StudyRecords, luckiest: Trial) -> Recommended | None:
    """What a race of further seeds has chosen, with its mean."""
    for trial in sweep.reached():
        race = trial.metrics.confirmed
        if race is None or race.choice is not ConfirmedChoice.CHOSEN or None in (race.seconds, race.low, race.high):
            continue
        mean, low, high = (float(bound or 0.0) for bound in (race.seconds, race.low, race.high))
        runs = race.runs - race.missed
        return Recommended(
            trial=trial, runs=runs, objective=mean, low=low, high=high, luckiest=luckiest, confirmed=True
        )
    return None
