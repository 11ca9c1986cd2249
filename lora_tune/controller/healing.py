"""A trial's numerical precision, and where it changes, from all sources.

In order of precedence: the trial's log, the settings of its program (parameters, the implementation's configs, the
environment; recorded at launch), its parameters, and the curves of similar trials.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from lora_tune import curves
from lora_tune.logs.run import RunLog
from lora_tune.mlperf.gate import FP4, Precision, precision_of
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import StudyRecords, Trial

ALIKE = re.compile(r"FP4|FP8|BF16|HEALING|PRECISION|QUANT|RECIPE|^GBS$", re.IGNORECASE)
"""Parameters that trials must share for their curves to change precision at the same place."""


def remembered(settings: Mapping[str, object]) -> TrialMetrics:
    """The precision in a program's settings, as metrics of the trial; empty if they do not state it."""
    stated = precision_of(settings)
    steps = float(stated.healing_steps) if stated.healing_steps else None
    return TrialMetrics(precision=stated.lowest or None, healing_steps=steps)


def precision(trial: Trial, run: RunLog | None = None) -> Precision:
    """The trial's stated precision. run: its log so far."""
    lowest, steps = trial.metrics.precision or "", int(trial.metrics.healing_steps or 0)
    kept = Precision(lowest=lowest, healing_steps=steps if lowest in ("", FP4) else 0)
    return (precision_of(run.hyperparameters) if run else Precision()) | kept | precision_of(trial.parameters)


def healing_samples(trial: Trial, run: RunLog, sweep: StudyRecords | None = None) -> float:
    """Samples after which the trial changes precision; 0: never, as far as is known.

    From the stated step; infinite while its batch size is unknown. If nothing is stated, from the curves of the
    ``sweep``'s similar trials that reached the target, and from the run's own.
    """
    steps = precision(trial, run).healing_steps
    if steps:
        batch = run.hyperparameters.get("global_batch_size", trial.parameters.get("GBS"))
        return steps * float(batch) if isinstance(batch, int | float) else math.inf
    if trial.metrics.healing_samples is not None:
        return trial.metrics.healing_samples
    alike = sweep.once(("healing", _kind(trial)), lambda: _of_trials_alike(sweep, trial)) if sweep else 0.0
    return alike or curves.recognised([run])


def has_special_curve(trial: Trial, run: RunLog | None = None) -> bool:
    """Whether curves of runs in other precisions are no evidence on this trial. run: its log so far."""
    stated = precision(trial, run)
    return stated.lowest == FP4 or stated.healing_steps > 0 or (trial.metrics.healing_samples or 0.0) > 0


def _kind(trial: Trial) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, str(value)) for name, value in trial.parameters.items() if ALIKE.search(name)))


def _of_trials_alike(sweep: StudyRecords, trial: Trial) -> float:
    kind = _kind(trial)
    return curves.recognised([sweep.last_evals(other.number) for other in sweep.reached() if _kind(other) == kind])
