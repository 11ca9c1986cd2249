"""A built sweep whose leaders were run again: the luckiest single run was passed over, the next one chosen."""

from __future__ import annotations

from dataclasses import replace

from lora_tune.config.study import Study
from lora_tune.search.recommendation import leaders
from lora_tune.store.metrics import Confirmed, ConfirmedChoice
from lora_tune.store.records import StudyRecords, Trial


def after_confirm(study: Study, sweep: StudyRecords) -> tuple[StudyRecords, Trial, Trial]:
    """(the sweep, the chosen trial, the one passed over), as ``confirm`` leaves them."""
    lucky, second = leaders(study, sweep)[:2]
    noted = []
    for trial, choice, factor in ((second, ConfirmedChoice.CHOSEN, 1.02), (lucky, ConfirmedChoice.PASSED_OVER, 1.2)):
        mean = factor * second.objective
        race = Confirmed(
            choice=choice, runs=10, missed=0, node_hours=12.5, seconds=mean, low=0.97 * mean, high=1.03 * mean,
            sentence=f"trial {second.number} is faster than trial {lucky.number} with a probability of 99%",
        )  # fmt: skip
        noted.append(replace(trial, metrics=replace(trial.metrics, confirmed=race)))
    chosen, passed = noted
    trials = {**sweep.trials, chosen.number: chosen, passed.number: passed}
    return replace(sweep, trials=trials), chosen, passed
