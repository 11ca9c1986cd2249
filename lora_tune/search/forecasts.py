"""What an ended trial says of the forecasts that were made of it before it began."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence

from optuna.trial import FrozenTrial, TrialState

from lora_tune.search.optuna_trials import TrialReader
from lora_tune.search.trust import ScoreForecast, Told
from lora_tune.search.whole.runs import runs_of

FORECASTS = "forecasts"
"""User attribute of a trial: what each model forecast of it, as JSON."""


def told(trial: FrozenTrial, target: float) -> Told | None:
    """What a trial says of the forecasts made of it; None for one that has none or says nothing of its score."""
    text = trial.user_attrs.get(FORECASTS)
    if not isinstance(text, str) or trial.state is TrialState.RUNNING:
        return None
    return judged(trial, target, {name: ScoreForecast(mean, sd) for name, (mean, sd) in json.loads(text).items()})


def newest_told(trials: Sequence[FrozenTrial], target: float, most: int) -> list[Told]:
    """What the newest trials say of theirs, at most so many, in their order."""
    outcomes = (told(trial, target) for trial in reversed(trials))
    return list(itertools.islice((outcome for outcome in outcomes if outcome is not None), most))[::-1]


def judged(trial: FrozenTrial, target: float, forecasts: Mapping[str, ScoreForecast]) -> Told | None:
    """The same with these forecasts; None for a short run and for one that says nothing of its score."""
    if trial.user_attrs.get("kind") == "probe":
        return None
    runs = runs_of([trial], TrialReader(frozenset(trial.params), target).read)
    if (
        not runs
        or (runs[0].failed and math.isnan(runs[0].above))
        or not (math.isfinite(runs[0].ln_score) or math.isfinite(runs[0].above))
    ):
        return None
    reached = math.isfinite(runs[0].ln_score)
    return Told(
        ln_score=runs[0].ln_score if reached else runs[0].above, reached=reached, forecasts=forecasts
    )  # fmt: skip
