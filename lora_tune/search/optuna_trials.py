"""What Optuna's trials teach, as observations that the search model takes in, of any study that records them.

User attributes read (all optional; what is not there is not learned):

==================== ======================================================================================
samples_per_second   warm training throughput, samples/s
seconds_per_eval     length of one eval, s
crossing_samples     samples at which the curve crosses the target; without intermediate values also
                     ``stop_samples`` (samples of the first eval at the target) or ``samples_to_target``
last_samples         samples after which a run ended without reaching the target (a lower bound); also
                     ``censored_at_samples``
refused              True where the trial's own program does not take its values, which is "infeasible" too
verdict              "infeasible" (out of memory), "pruned", "censored", "capped", "reached", "failed", ...
diverged             True when the loss blew up
node_hours           what the trial cost; ``init_seconds``: start-up before the clock runs
peak_gib             the most memory that a GPU held, GiB
kind                 "probe" for a run that only measured speed
epoch_in_steps       steps that make one epoch, where intermediate values stand at parts of it (1000)
source               where an observation comes from, when not from this study; its level is then not trusted
==================== ======================================================================================

Intermediate values, reported at the step of the samples consumed, are the eval curve. Steps are whole numbers: a
trial that counts epochs reports at parts of them, and says at how many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from optuna import Study
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from lora_tune.logs.run import Eval
from lora_tune.search.observations import Observation, first_number

STEP_SCALE = "epoch_in_steps"
"""User attribute of a trial whose intermediate values stand at parts of an epoch: how many make one."""

ASSUMED_SD = 0.1
"""ln(samples) by which a parameter that a source does not name may have moved its result."""


DESCRIBED = (
    "LR", "LEARNING_RATE", "MAX_STEPS", "STEPS", "TRAIN_STEPS", "WARMUP_STEPS",
    "GBS", "GLOBAL_BATCH_SIZE", "BATCH_SIZE",
)  # fmt: skip
"""Parameters without which a source says nothing: their part is too large to be assumed."""


def of_trial(trial: FrozenTrial, space: frozenset[str], target: float) -> Observation | None:
    """The observation in an Optuna trial; None when it has none of the space's parameters, or says nothing."""
    if not space <= trial.params.keys() or trial.state is TrialState.WAITING:
        return None
    facts = trial.user_attrs
    verdict = str(facts.get("verdict", ""))
    if trial.state is TrialState.FAIL and verdict != "infeasible":
        return None
    evals = tuple(Eval(s, float(x), math.nan) for s, x in sorted(curve_of(trial).items()))
    constraints = (*trial.constraints.values(),) if hasattr(trial, "constraints") else ()
    reached = first_number(facts, "stop_samples", "samples_to_target")
    if math.isnan(reached):
        reached = next((e.samples for e in evals if e.loss <= target), math.nan)
    return Observation(
        number=trial.number,
        values=trial.params,
        open=trial.state is TrialState.RUNNING,
        source=str(facts.get("source", "")),
        evals=evals,
        reached=reached,
        bound=first_number(facts, "last_samples", "censored_at_samples"),
        samples_per_second=first_number(facts, "samples_per_second"),
        seconds_per_eval=first_number(facts, "seconds_per_eval"),
        node_hours=first_number(facts, "node_hours"),
        init_seconds=first_number(facts, "init_seconds"),
        peak_gib=first_number(facts, "peak_gib"),
        refused=bool(facts.get("refused")),
        infeasible=verdict == "infeasible" or any(c > 0 for c in constraints),
        diverged=bool(facts.get("diverged")) or any(math.isnan(e.loss) for e in evals[-2:]),
        probe=facts.get("kind") == "probe",
        attributes=facts,
    )


class TrialReader:
    """Observations of one study's trials, each trial read again only when it has more to say."""

    def __init__(self, space: frozenset[str], target: float) -> None:
        """space, target: as of :func:`of_trial`."""
        self._space, self._target = space, target
        self._known: dict[int, tuple[FrozenTrial, object, Observation | None]] = {}

    def read(self, trial: FrozenTrial) -> Observation | None:
        """What :func:`of_trial` says of it.

        A storage in memory makes a new object of a trial that changes, but of what is reported to one that runs, and of
        a time that is at another reference pace; others keep the objects of those that have ended.
        """
        stage = (trial.state, len(trial.intermediate_values), len(trial.user_attrs), trial.user_attrs.get("slower"))
        known = self._known.get(trial.number)
        if known is None or known[0] is not trial or known[1] != stage:
            known = self._known[trial.number] = (trial, stage, of_trial(trial, self._space, self._target))
        return known[2]


def curve_of(trial: FrozenTrial) -> dict[float, float]:
    """The intermediate values by what the trial's log counts: samples, steps or epochs, parts of them included."""
    scale = first_number(trial.user_attrs, STEP_SCALE)
    scale = scale if scale > 0 else 1.0
    return {step / scale: value for step, value in trial.intermediate_values.items()}


def filled_in(o: Observation, deciding: Mapping[str, BaseDistribution], defaults: Mapping[str, Any]) -> Observation:
    """A source's observation with the parameters that it does not name: at ``defaults``, else in the middle of a range.

    deciding: the parameters that decide convergence. A value that is only assumed is doubted: its reading keeps an
    error of its own (attribute ``assumed_sd``). A category that this study does not offer counts as not named.
    """
    o = replace(o, values={n: v for n, v in o.values.items() if n not in deciding or _has_feature(deciding[n], v)})
    missing = {n: d for n, d in deciding.items() if n not in o.values and n.upper() not in DESCRIBED}
    if not missing:
        return o
    known = {n: defaults[n] for n in missing if n in defaults}
    assumed = {n: middle(d) for n, d in missing.items() if n not in known}
    doubt = {"assumed_sd": ASSUMED_SD * math.sqrt(len(assumed))}
    return replace(o, values={**o.values, **known, **assumed}, attributes={**o.attributes, **doubt})


def _has_feature(distribution: BaseDistribution, value: Any) -> bool:
    """Whether a value can be a feature of the model: a number where numbers are tuned, else one of the categories."""
    if not isinstance(distribution, CategoricalDistribution):
        return _is_number(value)
    numbers = len(distribution.choices) > 1 and all(_is_number(c) for c in distribution.choices)
    return _is_number(value) if numbers else value in distribution.choices


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def middle(distribution: BaseDistribution) -> Any:
    """The middle of a range, on the scale on which it is searched; the first of categories."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[0]
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    value = (
        math.sqrt(distribution.low * distribution.high)
        if distribution.log
        else 0.5 * (distribution.low + distribution.high)
    )
    return round(value) if isinstance(distribution, IntDistribution) else value


def annotate(study: Study, trial: FrozenTrial, **attributes: str) -> None:
    """User attributes of a trial, set by the sampler that samples for it."""
    # Samplers have no public way to annotate the trial that they sample for; Optuna's own use the storage too.
    for name, value in attributes.items():
        study._storage.set_trial_user_attr(trial._trial_id, name, value)
    trial.user_attrs.update(attributes)
