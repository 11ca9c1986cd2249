"""What a sampler with a model of its own hands over: its recommendation, with an interval by the results around it."""

from __future__ import annotations

from dataclasses import replace

from lora_tune.config.study import Study
from lora_tune.search import shrinkage
from lora_tune.search.abilities import Recommends
from lora_tune.search.race_scale import bounded_exp
from lora_tune.search.recommendation import Belief
from lora_tune.search.recorded import fitting, in_memory
from lora_tune.search.samplers import sampler_of
from lora_tune.store.records import StudyRecords


def believes(study: Study, sweep: StudyRecords) -> Belief:
    """What the sampler recommends by the sweep's records; what the results say where it has little to say.

    The machine's own config, where it is no point of the space and is believed better yet, stays.
    """
    sampler = sampler_of(study, sweep)
    if not isinstance(sampler, Recommends):
        return shrinkage.believes(study, sweep)
    try:
        values, score, _ = sampler.recommend(in_memory(study, _of_today(study, sweep), sampler))
    except ValueError:  # its model has learned nothing yet, such as of trials older than the space
        return shrinkage.believes(study, sweep)
    tuned = study.search_space.conditions.present(values)
    full = [t for t in sweep.reached() if not t.probe]
    trial = min((t for t in full if dict(t.tuned) == tuned), key=lambda t: abs(t.objective - score), default=None)
    if any(not t.tuned for t in full):  # no model knows a config that is no point of the space
        by_results = shrinkage.believes(study, sweep)
        if not by_results.tuned and by_results.objective < score:
            return by_results
    half = shrinkage.half_width(study, sweep, tuned)
    return Belief(
        tuned=tuned,
        objective=score,
        low=score * bounded_exp(-half),
        high=score * bounded_exp(half),
        trial=None if trial is None else trial.number,
    )


def _of_today(study: Study, sweep: StudyRecords) -> StudyRecords:
    """The sweep without trials that the space of today does not hold: a study may have changed since they ran."""
    fits = fitting(study)
    return replace(sweep, trials={n: t for n, t in sweep.trials.items() if fits(t)})
