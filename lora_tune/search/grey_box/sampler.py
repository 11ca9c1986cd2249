"""Optuna sampler for time = samples / speed + evals, which spends node-hours where they are most informative."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.search_space import IntersectionSearchSpace
from optuna.trial import FrozenTrial, TrialState

from lora_tune.base.text import counted, duration
from lora_tune.config.parameters import Conditions
from lora_tune.search.grey_box.acquisition import (
    Action,
    CandidatePosterior,
    Values,
    candidates,
    predict_all,
    value_actions,
)
from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.grey_box.memory import MemoryPhysics, death_logs
from lora_tune.search.grey_box.model import SearchModel, filled_in, learn, without_pending
from lora_tune.search.grey_box.objective import Goal
from lora_tune.search.observations import Observation
from lora_tune.search.recorded import TrialReader, annotate

# The recommendation: the configuration with the lowest expected score on a layout that has run, and its regret.


DRAWS = 128
"""Posterior draws for the expected regret."""

TRIED = 0.003
"""Advantage in ln(score) for a configuration that ran as a whole over a combined one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The best configuration.

    score: expected seconds. regret: expected excess over the best possible, as a share; infinite until a run has
    reached the target, here or elsewhere. runs: full runs of exactly these hyperparameters, on any layout.
    """

    values: Values
    score: float
    regret: float
    runs: int


def recommend_from(model: SearchModel, rng: np.random.Generator) -> Recommendation:
    """The configuration with the lowest expected score on a layout that has run here (any layout before the first
    has)."""
    beliefs = predict_all(model, candidates(model, rng))
    goal = model.goal
    # The recommendation must be safe: add half the variance of ln(samples), and the risk that a layout with few
    # successes is flaky.
    logs_of = beliefs.configuration_logs(goal, beliefs.mean, beliefs.sd) + 0.5 * beliefs.sd**2
    best = [int(np.argmin(logs_of[rows])) + rows.start for rows in beliefs.rows]
    seconds = beliefs.layout_logs(goal, [float(logs_of[b]) for b in best]) + 0.5 * beliefs.spread**2
    risky_seconds = seconds + death_logs(beliefs.death + beliefs.death_sd)
    seconds = seconds + death_logs(beliefs.death)
    allowed = beliefs.tested if beliefs.tested.any() else np.ones(len(seconds), dtype=bool)
    m = int(np.argmin(np.where(allowed, risky_seconds, np.inf)))
    g = next(k for k, columns in enumerate(beliefs.columns) if columns.start <= m < columns.stop)
    values = _whole(beliefs, best[g], g, m)
    ran = [o.values for o in model.observations if math.isfinite(o.reached) and not (o.source or o.probe)]
    rows = [at for at in range(beliefs.rows[g].start, beliefs.rows[g].stop) if logs_of[at] <= logs_of[best[g]] + TRIED]
    for at in sorted(rows, key=lambda row: float(logs_of[row])):
        if (known := _whole(beliefs, at, g, m)) in ran:
            best[g], values = at, known
            break
    names = model.coordinates.convergence_names
    runs = sum(all(o.values.get(n) == values[n] for n in names) and not o.probe for o in model.observations)
    regret = _expected_regret(model, beliefs, (best[g], g, m), rng) if model.target_known else math.inf
    return Recommendation(values=values, score=float(np.exp(seconds[m])), runs=runs, regret=regret)


def _whole(beliefs: CandidatePosterior, at: int, g: int, m: int) -> Values:
    """The values of configuration ``at`` on layout ``m``, both of group ``g``."""
    group = beliefs.groups[g]
    return {**group.configurations[at - beliefs.rows[g].start], **group.layouts[m - beliefs.columns[g].start]}


def _expected_regret(
    model: SearchModel, beliefs: CandidatePosterior, chosen: tuple[int, int, int], rng: np.random.Generator
) -> float:
    """Mean over posterior draws of score(recommended) / score(best) - 1."""
    at, g, m = chosen
    n = len(beliefs.mean)
    root = np.linalg.cholesky(beliefs.joint.covariance() + 1e-8 * np.eye(n))
    samples = beliefs.mean[:, None] + root @ rng.normal(size=(n, DRAWS))
    logs = beliefs.configuration_logs(model.goal, samples, np.full((n, 1), 1e-6))
    lowest = np.array([logs[rows].min(axis=0) for rows in beliefs.rows])
    base = beliefs.layout_logs(model.goal, [float(v) for v in lowest.mean(axis=1)])
    noise = np.linalg.cholesky(beliefs.covariance + 1e-8 * np.eye(len(base))) @ rng.normal(size=(len(base), DRAWS))
    every = [layout for group in beliefs.groups for layout in group.layouts]
    layouts = base[:, None] + noise + death_logs(model.memory.draws(every, rng, DRAWS))
    by_group = np.array([layouts[c].min(axis=0) for c in beliefs.columns])
    best = (by_group + lowest - lowest.mean(axis=1, keepdims=True)).min(axis=0)
    gap = layouts[m] + logs[at] - lowest[g].mean()
    return float(np.expm1(np.maximum(gap - best, 0.0)).mean())


# Predictions for configurations: seconds of one run, and differences between two.


CLEAR_SDS = 1.0
"""Standard deviations of a difference required to replace the user's configuration: a probability of 84%."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """A configuration compared with another: ln(the other's seconds over its own), including OOM failures."""

    ln_saved: float
    sd: float

    @property
    def share(self) -> float:
        """Expected saving as a share of the other's seconds."""
        return -math.expm1(-self.ln_saved)

    @property
    def is_clear(self) -> bool:
        """Whether the saving exceeds ``CLEAR_SDS`` standard deviations."""
        return self.ln_saved > 0 and self.ln_saved >= CLEAR_SDS * self.sd


def forecast(model: SearchModel, values: Values) -> float:
    """Mean of ln(score) of one run of ``values`` that fits into memory and reaches the target."""
    ln_samples = model.ln_samples([values]).mean
    speed, _, evals, _ = model.predict_speed([values])
    batch = model.coordinates.batch(values)
    schedule, goal = model.schedule(batch), model.goal
    seconds = float(goal.log_seconds(ln_samples, np.exp(speed), np.exp(evals), schedule)[0])
    return seconds + max(0.0, goal.ln_reference(batch, schedule) - float(ln_samples[0]))


def compared(model: SearchModel, values: Mapping[str, Any], instead: Mapping[str, Any]) -> Advantage:
    """Compare the seconds to the target of ``values`` with those of ``instead``."""
    pair = [values, instead]
    samples, samples_covariance = model.predict_ln_samples(pair)
    speed, speed_doubt, evals, _ = model.predict_speed(pair)
    first, second = (
        float(model.goal.log_seconds(samples[i], np.exp(speed[i]), np.exp(evals[i]), model.schedule(batch)))
        for i, batch in enumerate(map(model.coordinates.batch, pair))
    )
    spread = sum(float(c[0, 0] + c[1, 1] - 2 * c[0, 1]) for c in (samples_covariance, speed_doubt))
    risk, other_risk = (
        _log_risk(model, v, float(samples[i]), float(samples_covariance[i, i])) for i, v in enumerate(pair)
    )
    saved = second - first + other_risk - risk
    if model.memory.differs(values, instead):
        died, _ = model.memory.chance(pair)
        saved -= float(np.subtract(*death_logs(died)))
    return Advantage(ln_saved=saved, sd=math.sqrt(max(0.0, spread)))


def _log_risk(model: SearchModel, values: Mapping[str, Any], ln_samples: float, variance: float) -> float:
    """ln of the cost factor of runs of ``values`` that end before the target."""
    total = np.array([model.coordinates.total_samples(values)])
    schedule = model.schedule(model.coordinates.batch(values))
    return float(model.goal.log_risk(np.array([ln_samples]), np.array([math.sqrt(variance)]), total, schedule)[0])


# Texts for recommendations and proposals.


def sentence(best: Recommendation) -> str:
    """The recommendation in words."""
    above = f"expected to be {100 * best.regret:.1f}% above the best there is"
    if not math.isfinite(best.regret):
        above = "nothing has reached the target yet, so how good it is remains unknown"
    return (
        f"expected {duration(best.score)} to the target, {counted(best.runs, 'runs')} of these hyperparameters; {above}"
    )


def explain(model: SearchModel, action: Action) -> str:
    """Why an action was chosen, in one sentence."""
    names = model.coordinates.convergence_names
    known_dead = any(
        not o.source and all(o.values.get(n) == action.values.get(n) for n in names) for o in model.observations
    )
    parts = []
    if action.kind == "probe":
        features = model.coordinates.memory_features
        local = [o for o in model.observations if o.infeasible and not o.source]
        died = features(action.values) in [features(o.values) for o in local]
        parts.append(
            "short run " + ("of a layout that died, in case of bad luck" if died else "to measure an untried layout")
        )
    elif known_dead:
        parts.append("another seed of known hyperparameters" + (" on an untried layout" if action.new_layout else ""))
    else:
        parts.append("new hyperparameters" + (" on an untried layout" if action.new_layout else " on a known layout"))
    if action.risk > 0.02:
        parts.append(f"{100 * action.risk:.0f}% risk of running out of memory")
    parts.append(
        f"expected to improve the recommendation by {100 * action.gain:.2f}% for {action.node_hours:.2f} node-hours"
    )
    return "; ".join(parts)


PATIENCE = 4
"""Finished trials without samples to the target after which Optuna's default sampler takes over."""


@dataclass(frozen=True, slots=True)
class Proposed:
    """A proposal: values, "full" or "probe", expected gain in ln(score) per node-hour, and the reason."""

    values: dict[str, Any]
    kind: str
    rate: float
    why: str


class GreyBoxSampler(BaseSampler):
    """Proposes the trial with the highest expected improvement of the recommendation per node-hour.

    Works in any single-objective Optuna study whose trials have the user attributes listed in
    :mod:`lora_tune.search.recorded`. A study without them is sampled by TPE.

    distributions: the search space; without it the first trial is random and the space is that shared by the trials.
    goal: target, eval schedule, rules. gpus: per trial, which determine a layout's batch. fixed: constant values that
    are needed. roles: roles of parameters, if stated. defaults: other sources' values of parameters that they do not
    state. conditions: which parameters exist only under others' values. full_fine_tuning_lr: of the same base, if
    known; centres the prior of LoRA's rate. needs: memory model. prior: observations of other sources, or a function
    that returns the current ones. probes: short speed runs may be proposed (attribute ``kind`` = "probe" on the trial).
    capped: bad runs are stopped early. start: tuned values of the user's configuration, recommended until another is
    clearly better; ignored if None or incomplete. Each trial gets ``why``, a sentence.
    """

    def __init__(
        self,
        distributions: Mapping[str, BaseDistribution] | None = None,
        *,
        goal: Goal | None = None,
        gpus: int = 1,
        fixed: Mapping[str, Any] | None = None,
        roles: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        conditions: Conditions | None = None,
        full_fine_tuning_lr: float | None = None,
        needs: MemoryPhysics | None = None,
        prior: Sequence[Observation] | Callable[[], Sequence[Observation]] = (),
        probes: bool = False,
        capped: bool = True,
        start: Values | None = None,
        seed: int | None = None,
    ) -> None:
        self._distributions = dict(distributions) if distributions else None
        self._goal = goal or Goal()
        self._gpus, self._fixed = gpus, dict(fixed or {})
        self._roles, self._defaults = dict(roles or {}), dict(defaults or {})
        self._conditions, self._needs, self._rate = conditions or Conditions(), needs, full_fine_tuning_lr
        self._prior = prior if callable(prior) else lambda: prior
        self._probes, self._capped = probes, capped
        whole = start is not None and start.keys() >= self.space.keys()
        self._start = {n: start[n] for n in self.space} if whole and start is not None else None
        self._rng = np.random.default_rng(seed)
        self._fallback = TPESampler(seed=seed, multivariate=True, constant_liar=True)
        self._random = RandomSampler(seed=seed)
        self._intersection = IntersectionSearchSpace()
        self._learned: SearchModel | None = None
        self._readers: dict[frozenset[str], TrialReader] = {}
        self._gain: tuple[object, float | None] = (None, None)
        self._filled: tuple[tuple[Observation, ...], frozenset[str], list[Observation]] = ((), frozenset(), [])

    @property
    def space(self) -> Mapping[str, BaseDistribution]:
        """The search space, empty if none was given."""
        return self._distributions or {}

    def reseed_rng(self) -> None:
        """Reseed for a worker process."""
        self._rng = np.random.default_rng()
        self._fallback.reseed_rng()
        self._random.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All parameters, if known."""
        if self._distributions is not None:
            return dict(self._distributions)
        return {n: d for n, d in self._intersection.calculate(study).items() if not d.single()}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Values of the best action; sets the user attributes ``why`` and ``kind`` of the trial."""
        if not search_space:
            return {}
        proposed = self.proposal(study, search_space, skip=trial.number)
        if proposed is None:
            annotate(study, trial, why="no trial recorded samples to target: proposed by Optuna's TPE", kind="full")
            return self._fallback.sample_relative(study, trial, search_space)
        annotate(study, trial, why=proposed.why, kind=proposed.kind)
        return proposed.values

    def proposal(
        self, study: optuna.Study, search_space: Mapping[str, BaseDistribution], skip: int = -1
    ) -> Proposed | None:
        """The best action from all trials except ``skip``; None if trials have no samples to the target."""
        observations = self.observations(study, frozenset(search_space), skip=skip)
        if self._pieces_missing(study, observations):
            return None
        model = self.model(search_space, observations)
        action = value_actions(model, self._rng, probes=self._probes, capped=self._capped)[0]
        return Proposed(dict(action.values), action.kind, action.rate, explain(model, action))

    def expected_gain(self, study: optuna.Study) -> float | None:
        """Expected improvement of the recommendation by the next node-hour, as a share of the score.

        None before a run has reached the target. Cached until a trial is added or ends.
        """
        trials = study.get_trials(deepcopy=False)
        known = len(self._prior())
        key = (len(trials), sum(t.state.is_finished() for t in trials), known)
        if key != self._gain[0]:
            self._gain = (key, self._gain_now(study, trials))
        return self._gain[1]

    def _gain_now(self, study: optuna.Study, trials: Sequence[FrozenTrial]) -> float | None:
        space = self.infer_relative_search_space(study, trials[-1] if trials else _NO_TRIAL)
        observations = self.observations(study, frozenset(space))
        if not space or not any(math.isfinite(o.reached) for o in observations if not o.source):
            return None
        actions = value_actions(self.model(space, observations), self._rng, probes=self._probes, capped=self._capped)
        return -math.expm1(-max(0.0, actions[0].rate))

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """At random; only for parameters outside the known space."""
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def observations(self, study: optuna.Study, names: frozenset[str], skip: int = -1) -> list[Observation]:
        """Observations of the study's trials and of the prior; a trial is read again only if it has changed."""
        if names not in self._readers:
            self._readers = {names: TrialReader(names, self._goal.target)}
        read = self._readers[names].read
        read_trials = (read(trial) for trial in study.get_trials(deepcopy=False) if trial.number != skip)
        return [*self._priors(names), *(o for o in read_trials if o is not None)]

    def _priors(self, names: frozenset[str]) -> list[Observation]:
        """Observations of other sources, with unstated convergence parameters filled in."""
        known = tuple(self._prior())
        before, about, _ = self._filled
        if names != about or len(known) != len(before) or any(a is not b for a, b in zip(known, before, strict=True)):
            spread = {n: d for n, d in self.space.items() if n in names}
            needed_names = self.coordinates(spread).convergence_names
            self._filled = (
                known,
                names,
                [filled_in(o, {n: spread[n] for n in needed_names}, self._defaults) for o in known],
            )
        return list(self._filled[2])

    def coordinates(self, search_space: Mapping[str, BaseDistribution]) -> Coordinates:
        """Feature maps of the space's parameters."""
        return Coordinates(
            distributions=dict(search_space),
            gpus=self._gpus,
            fixed=self._fixed,
            roles=self._roles,
            centre=self._defaults,
            conditions=self._conditions,
            full_fine_tuning_lr=self._rate,
        )

    def model(self, search_space: Mapping[str, BaseDistribution], observations: Sequence[Observation]) -> SearchModel:
        """The model fitted to ``observations``, cached."""
        known = self._learned
        if (
            known is not None
            and known.coordinates.distributions == search_space
            and known.observations == (tuple(observations))
        ):
            return known
        self._learned = learn(self.coordinates(search_space), self._goal, observations, needs=self._needs)
        return self._learned

    def recommend(self, study: optuna.Study) -> tuple[dict[str, Any], float, str]:
        """The best configuration: values, expected score in seconds, a sentence with the regret.

        The user's configuration stays, unless its run has failed here, until another is clearly better. Layout and
        hyperparameters are decided separately, since a faster layout is no evidence for a learning rate.
        """
        best, start = self.recommendation(study), self._start
        usual = dict(best.values), best.score, sentence(best)
        if start is None or not any(_counts(t) and t.params == start for t in study.get_trials(deepcopy=False)):
            return usual
        held: Values = start
        moved = _on_layout_of(self.coordinates(self.space), start, best.values)
        if moved != start and (step := self._over(study, moved, start)) is not None and step.is_clear:
            held = moved
        over = self._over(study, best.values, held) if best.values != held else None
        if over is None or over.is_clear:
            return usual
        return dict(held), math.exp(self.forecast(study, held)), _staying(best.score, over, moved=held != start)

    def _over(self, study: optuna.Study, values: Values, other: Values) -> Advantage | None:
        """The first configuration compared with the second; None if unknown."""
        return next(iter(self.compared(study, values, [other])), None)

    def recommendation(self, study: optuna.Study) -> Recommendation:
        """The recommendation with all its details: a pure function of the study's trials and the prior."""
        space = self.infer_relative_search_space(study, study.trials[0] if study.trials else _NO_TRIAL)
        observations = self.observations(study, frozenset(space))
        model = without_pending(learn(self.coordinates(space), self._goal, observations, needs=self._needs))
        return recommend_from(model, np.random.default_rng(0))

    def forecast(self, study: optuna.Study, values: Values) -> float:
        """Mean of ln(score) of one run of ``values``, from all trials so far."""
        return forecast(
            without_pending(self.model(self.space, self.observations(study, frozenset(self.space)))), values
        )

    def compared(
        self, study: optuna.Study, values: Mapping[str, Any], instead: Sequence[Mapping[str, Any]]
    ) -> list[Advantage]:
        """``values`` compared with each of ``instead``.

        Empty until a run of this study has reached the target.
        """
        observations = self.observations(study, frozenset(self.space))
        if not any(math.isfinite(o.reached) for o in observations if not o.source):
            return []
        model = without_pending(self.model(self.space, observations))
        return [compared(model, values, other) for other in instead]

    def _pieces_missing(self, study: optuna.Study, observations: Sequence[Observation]) -> bool:
        local = [o for o in observations if not o.source and not o.open]
        informative = any(math.isfinite(o.reached) or o.evals or math.isfinite(o.bound) or o.infeasible for o in local)
        if informative:
            return False
        done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        return len(done) >= PATIENCE


# The user's configuration.


def _on_layout_of(coordinates: Coordinates, start: Values, other: Values) -> Values:
    """The start with the speed-only parameters of ``other``: few runs suffice to decide these."""
    speed = set(coordinates.speed_names) - set(coordinates.convergence_names)
    return {name: other[name] if name in speed else value for name, value in start.items()}


def _staying(seconds: float, best: Advantage, *, moved: bool) -> str:
    """Sentence that the user's configuration stays, on its or a faster layout; seconds, best: of the best
    alternative."""
    today = "the configuration of today" + (" on a faster layout" if moved else "")
    return (
        f"{today}: the one believed best is expected to take {duration(seconds)} and to save {100 * best.share:.1f}% "
        f"(give or take {100 * best.sd:.1f}%), which is not yet clear"
    )


def _counts(trial: FrozenTrial) -> bool:
    """Whether the trial has reached the target, or may still do so."""
    if trial.state is TrialState.RUNNING:
        return trial.user_attrs.get("kind") != "probe"
    return trial.state is TrialState.COMPLETE and trial.value is not None and trial.value > 0


_NO_TRIAL = optuna.trial.create_trial(state=TrialState.RUNNING)
