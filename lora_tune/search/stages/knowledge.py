"""State of a search in stages, as a pure function of the trials, and its next step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from lora_tune.base.text import counted, listed
from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.grey_box.gaussian import positive_part
from lora_tune.search.grey_box.objective import Goal
from lora_tune.search.grey_box.sampler import GreyBoxSampler, Proposed, compared
from lora_tune.search.observations import Observation, first_number, readings
from lora_tune.search.recorded import PROBE, of_trial
from lora_tune.search.stages.arithmetic import Arithmetic, ArithmeticChoice, WholeRun
from lora_tune.search.stages.screening import EFFECTS, Screening, Setting, Switch, SwitchReading

Values = Mapping[str, Any]

MIN_GAIN = 0.002
"""Default of ``budget.stop_below``: required gain per node-hour, as a share of the score."""
REPEATS = 2
"""Probes of the base's setting, whose differences give the noise of all probes."""
CLEAR_SDS = 1.64
"""Standard deviations by which a setting must be faster than the base to be recommended."""
USUAL_SAMPLES = 3000.0
"""Default samples of a run, used to weight evals against training."""
USUAL_START = 160.0
"""Seconds of start-up (public runs on one node: 50 to 270)."""
PROBE_SHARE = 0.135
"""A probe's share of a whole run's time: 256 of about 3,000 samples, and two evals; all evals are 12% of a run."""
SEPARATED_SDS = 2.49
"""Standard errors between two means for a 5% test with a power of 80% (1.64 + 0.84)."""
EXTRA_PROBES = 8
"""Probes after every level has run, of settings that may be faster: as many as simulated sweeps needed."""
MOST_LAYOUTS = 12
"""Maximum number of undecided layouts in the plan; each probe is informative about several."""
PAIR = 2
"""Whole runs, with and without a precision switch, whose cost its saving must at least cover."""
MOST_NAMED = 4
"""Maximum number of switch and parameter names in a line of the plan."""
MOST_SINGLE = 4
"""Maximum number of precision switches of which all combinations are considered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage. what: description. probes, whole_runs: their numbers. node_hours: expected maximum of all. gain:
    expected gain as a share of the score. skipped: reason for skipping it, "" if it runs."""

    name: str
    what: str
    probes: int = 0
    whole_runs: int = 0
    node_hours: float = 0.0
    gain: float = 0.0
    skipped: str = ""

    @property
    def description(self) -> str:
        """One line for people."""
        if self.skipped:
            return f"{self.name}: skipped: {self.skipped}"
        counts = [counted(self.probes, "probes")] if self.probes else []
        counts += [counted(self.whole_runs, "whole runs")] if self.whole_runs else []
        won = f"; can win about {100 * self.gain:.1f}%" if self.gain else ""
        return f"{self.name}: {self.what}; {' and '.join(counts)}, at most {self.node_hours:.1f} node-hours{won}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCosts:
    """Node-hours of a probe and of a whole run, including start-up, before the sweep has measured them."""

    probe: float
    whole: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperparametersStage:
    """gain: possible gain of learning rate, steps and warm-up, as a share of the score. node_hours: to detect it."""

    gain: float
    node_hours: float

    @property
    def rate(self) -> float:
        """Gain per node-hour; infinite if the gain is unbounded."""
        return math.inf if math.isinf(self.gain) else self.gain / self.node_hours


@dataclass(frozen=True, kw_only=True)
class StageKnowledge:
    """State of the search by stages, from a study's trials.

    of_all: grey box of all parameters except switches. of_layouts: grey box of the speed parameters only; None without
    any. Others: as in :class:`lora_tune.search.stages.sampler.StagesSampler`.
    """

    trials: Sequence[FrozenTrial]
    switches: tuple[Switch, ...]
    start: Values
    goal: Goal
    of_all: GreyBoxSampler
    of_layouts: GreyBoxSampler | None
    coordinates: Coordinates
    costs: RunCosts
    min_gain: float

    # -- readings

    @cached_property
    def whole_space(self) -> list[FrozenTrial]:
        """The trials that are points of the space."""
        names = self.start.keys()
        return [t for t in self.trials if names <= t.params.keys()]

    @cached_property
    def paced(self) -> list[FrozenTrial]:
        """Trials whose speed differs only by switches: all other speed parameters equal the base's."""
        speed = self.coordinates.speed_names
        return [t for t in self.whole_space if all(t.params[n] == self.start[n] for n in speed)]

    def setting(self, values: Values) -> Setting:
        """The level of each switch in ``values``."""
        return tuple(s.levels.index(values[s.name]) for s in self.switches)

    def values(self, setting: Setting, rest: Values | None = None) -> dict[str, Any]:
        """A setting of the switches on a configuration, by default the base's."""
        chosen = {s.name: s.levels[level] for s, level in zip(self.switches, setting, strict=True)}
        return {**self.start, **(rest or {}), **chosen}

    @cached_property
    def batch(self) -> float:
        """The global batch size of the base."""
        return self.coordinates.batch(self.start)

    @cached_property
    def _work(self) -> tuple[float, float]:
        """Samples and evals of a usual run: the reference's, else the base's."""
        samples = self.goal.reference_samples(self.batch) if math.isfinite(self.batch) else 0.0
        finished = (t for t in self.paced if t.state is TrialState.COMPLETE)
        facts: Values = next((t.user_attrs for t in finished), {})
        if not samples > 0:
            samples = first_number(facts, "stop_samples", "samples_to_target")
        samples = samples if samples > 0 else USUAL_SAMPLES
        if self.goal.schedule is not None and math.isfinite(self.batch):
            schedule = self.goal.schedule(self.batch)
            return samples, 1 + max(0.0, samples - schedule.first_samples) / schedule.interval_samples
        evals = first_number(facts, "evals")
        return samples, evals if evals > 0 else 1.0

    @cached_property
    def _usual_eval(self) -> float:
        known = [first_number(t.user_attrs, "seconds_per_eval") for t in self.whole_space]
        return median(known) if (known := [s for s in known if s > 0]) else 0.0

    def ln_seconds(self, trial: FrozenTrial) -> float:
        """ln(seconds) of a usual run at this trial's speed; NaN without a measured speed."""
        speed = first_number(trial.user_attrs, "samples_per_second")
        evals = first_number(trial.user_attrs, "seconds_per_eval")
        samples, count = self._work
        if not speed > 0:
            return math.nan
        return math.log(samples / speed + count * (evals if evals >= 0 else self._usual_eval))

    @cached_property
    def screening(self) -> Screening:
        """Model of the switches from all trials on the base's layout."""
        read = [self._reading(t) for t in self.paced]
        unfitted = Screening(switches=self.switches, readings=tuple(r for r in read if r is not None))
        return unfitted.fitted()

    def _reading(self, trial: FrozenTrial) -> SwitchReading | None:
        setting, seconds = self.setting(trial.params), self.ln_seconds(trial)
        whole = trial.user_attrs.get("kind") != PROBE
        if math.isfinite(seconds) or trial.state is TrialState.RUNNING:
            return SwitchReading(setting=setting, ln_seconds=seconds, whole=whole)
        verdict = trial.user_attrs.get("verdict")
        return SwitchReading(setting=setting, whole=whole, dead=True) if verdict in ("infeasible", "failed") else None

    def _hours(self, *, probe: bool) -> float:
        kind = [t for t in self.whole_space if (t.user_attrs.get("kind") == PROBE) is probe and not _dead(t)]
        hours = [h for t in kind if t.state.is_finished() and (h := first_number(t.user_attrs, "node_hours")) > 0]
        return median(hours) if hours else self.costs.probe if probe else self.costs.whole

    # -- arithmetic

    @cached_property
    def base_speed(self) -> Setting:
        """The fastest measured setting with the base's arithmetic if it is clearly faster; else the base."""
        return self._clearly(self.screening.leader(precise=True))

    def _clearly(self, setting: Setting) -> Setting:
        mean, sd = self.screening.compared(setting, self.screening.base)
        return setting if mean + CLEAR_SDS * sd < 0 else self.screening.base

    @cached_property
    def options(self) -> dict[frozenset[int], Setting]:
        """Options with changed arithmetic: the setting for each combination of the leader's precision switches."""
        screening, leader = self.screening, self._clearly(self.screening.leader())
        saved = {at: -self._single_gain(leader, at) for at in screening.precision_of(leader)}
        least = PAIR * self._hours(probe=False) * self.min_gain
        changed = sorted((at for at in saved if saved[at] >= least), key=lambda at: -saved[at])[:MOST_SINGLE]
        options = {frozenset[int](): self.base_speed}
        for mask in range(1, 2 ** len(changed)):
            kept = frozenset(at for i, at in enumerate(changed) if mask >> i & 1)
            setting = tuple(
                0 if self.switches[at].precision and at not in kept else level for at, level in enumerate(leader)
            )
            if screening.compared(setting, self.base_speed)[0] < 0 and screening.lives(setting) > 0:
                options[kept] = setting
        return options

    def _single_gain(self, leader: Setting, at: int) -> float:
        """Change of ln(seconds) by one switch of the leader, the others unchanged."""
        without = (*leader[:at], 0, *leader[at + 1 :])
        return self.screening.compared(leader, without)[0]

    @cached_property
    def arithmetic(self) -> Arithmetic:
        """Model of the precision switches from whole runs at the base's hyperparameters."""
        schedule = self.goal.schedule(self.batch) if self.goal.schedule and math.isfinite(self.batch) else None
        reference = self.goal.ln_reference(self.batch, schedule) if schedule is not None else -math.inf
        runs = self._whole_runs()
        finished = [r.ln_samples for r in runs if not r.changes and math.isfinite(r.ln_samples)]
        expected = reference if math.isfinite(reference) else finished[0] if finished else math.log(USUAL_SAMPLES)
        compared = self.screening.compared
        options = tuple(
            ArithmeticChoice(changes=changes, ln_seconds=compared(setting, self.base_speed)[0])
            for changes, setting in self.options.items()
        )
        return Arithmetic(options=options, runs=runs, expected=expected, reference=reference)

    def _whole_runs(self) -> tuple[WholeRun, ...]:
        names = self.coordinates.convergence_names
        kept = [t for t in self.whole_space if all(t.params[n] == self.start[n] for n in names)]
        kept = [t for t in kept if t.user_attrs.get("kind") != PROBE and not _dead(t)]
        parsed = [of_trial(t, frozenset(self.start), self.goal.target) for t in kept]
        known: list[Observation] = [o for o in parsed if o is not None]
        totals = [self.coordinates.total_samples(o.values) for o in known]
        families = [self.goal.family(self.batch) if math.isfinite(self.batch) else None] * len(known)
        read = readings(known, self.goal.target, totals, families)
        runs = []
        for at, o in enumerate(known):
            changes = self.screening.precision_of(self.setting(o.values))
            reading = None if o.open else read.get(at)
            if reading is None:
                runs += [WholeRun(changes=changes)] if o.open else []
                continue
            sd = math.hypot(reading.sd, reading.extended)
            runs.append(
                WholeRun(changes=changes, ln_samples=reading.ln_samples, sd=sd, missed=not math.isfinite(o.reached))
            )
        return tuple(runs)

    @cached_property
    def best(self) -> Setting:
        """The recommended setting on the base's layout."""
        setting = self.options[self.arithmetic.decided().changes]
        return setting if self.screening.lives(setting) > 0 else self.base_speed

    # -- possible gain of learning rate, steps and warm-up

    @cached_property
    def hyperparameters(self) -> HyperparametersStage:
        """Possible gain from samples above the reference, and the node-hours to detect a gain of that size."""
        gain = self.arithmetic.above_reference()
        runs = 2 * (SEPARATED_SDS * self.arithmetic.run_sd / gain) ** 2 if gain > 0 else math.inf
        return HyperparametersStage(gain=gain, node_hours=max(1.0, runs) * self._hours(probe=False))

    @cached_property
    def grey_box(self) -> GreyBoxSampler | None:
        """Grey box for the rest: layouts, and hyperparameters if their gain justifies the cost."""
        return self.of_all if self.hyperparameters.rate >= self.min_gain else self.of_layouts

    @cached_property
    def searched(self) -> Mapping[str, BaseDistribution]:
        """Parameters of :attr:`grey_box`."""
        return self.grey_box.space if self.grey_box is not None else {}

    # -- the grey box at that setting

    @cached_property
    def at_best(self) -> optuna.Study:
        """The trials for the grey box of all other parameters, with their speeds corrected to the setting ``best``."""
        shown = optuna.create_study(sampler=self.grey_box)
        mean, _ = self.screening.predict([self.best])
        for trial in self.whole_space:
            setting = self.setting(trial.params)
            if _dead(trial) and set(_on(setting)) - set(_on(self.best)):
                continue  # a switch may have caused the failure
            predicted, _ = self.screening.predict([setting])
            shown.add_trial(self._shown(trial, float(mean[0] - predicted[0]), setting))
        return shown

    def _shown(self, trial: FrozenTrial, ln_seconds: float, setting: Setting) -> FrozenTrial:
        factor, facts = math.exp(ln_seconds), dict(trial.user_attrs)
        other = self.screening.precision_of(setting) != self.screening.precision_of(self.best)
        for name, power in (("samples_per_second", -1), ("seconds_per_eval", 1), ("stop_seconds", 1)):
            if isinstance(facts.get(name), int | float):
                facts[name] = facts[name] * factor**power
        done = trial.state is TrialState.COMPLETE and not other and trial.values is not None
        state = trial.state if done or trial.state is not TrialState.COMPLETE else TrialState.PRUNED
        if other:  # keep its speed; its curve is for another arithmetic
            facts = {n: v for n, v in facts.items() if n in _OF_PACE} | {"kind": PROBE}
        return optuna.trial.create_trial(
            state=state,
            value=trial.values[0] * factor if done and trial.values is not None else None,
            params={n: trial.params[n] for n in self.searched},
            distributions=dict(self.searched),
            user_attrs=facts,
            intermediate_values={} if other else dict(trial.intermediate_values),
        )

    # -- before any run

    def stages(self) -> list[Stage]:
        """The plan: each stage with its node-hours and possible gain."""
        probe, whole = self._hours(probe=True), self._hours(probe=False)
        searched = [s for s in self.switches if len(s.levels) > 1]
        changing = [s.name for s in searched if s.precision]
        probes = self.screening.probes_needed + REPEATS + EXTRA_PROBES
        runs = 1 + min(len(changing), MOST_SINGLE)
        what = f"{len(searched)} switches, several to a probe: {listed([s.name for s in searched], MOST_NAMED)}"
        if changing:
            what += f"; whole runs beside the base's of {listed(changing, MOST_NAMED)}, which change arithmetic"
        gain = -math.expm1(-gain_of(searched))
        hours = probes * probe + runs * whole
        switches = Stage(name="switches", what=what, probes=probes, whole_runs=runs, node_hours=hours, gain=gain)
        if gain / hours < self.min_gain:
            switches = replace(switches, skipped=self._too_little(gain, hours, "they"))
        last = Stage(name="confirmation", what="what is recommended beside the base", whole_runs=1, node_hours=whole)
        return [switches, self._layout_stage(probe), self._hyperparameter_stage(whole), last]

    def _too_little(self, gain: float, hours: float, who: str) -> str:
        return (
            f"{who} can win {100 * gain:.1f}% as expected for up to {hours:.1f} node-hours, less than "
            f"{100 * self.min_gain:g}% a node-hour"
        )

    def _layout_stage(self, probe: float) -> Stage:
        box = self.of_layouts
        if box is None:
            return Stage(name="layouts", what="", skipped="none are tuned")
        model = box.model(box.space, box.observations(optuna.create_study(), frozenset(box.space)))
        start = {n: self.start[n] for n in box.space}
        points = [dict(zip(box.space, p, strict=True)) for p in product(*(_choices(d) for d in box.space.values()))]
        beside = [compared(model, values, start) for values in points if values != start]
        gains = sorted((float(positive_part(np.array(a.ln_saved), np.array(a.sd))) for a in beside), reverse=True)
        doubtful = [g for g in gains if g / probe >= self.min_gain][:MOST_LAYOUTS]
        if not doubtful:
            least = self._too_little(gains[0] if gains else 0.0, probe, "the most promising one")
            return Stage(name="layouts", what="", skipped=least)
        what = f"those of {len(gains)} others of which nobody knows that they are slower"
        return Stage(
            name="layouts", what=what, probes=len(doubtful), node_hours=len(doubtful) * probe, gain=doubtful[0]
        )  # fmt: skip

    def _hyperparameter_stage(self, whole: float) -> Stage:
        known, speed = self.hyperparameters, self.coordinates.speed_names
        tuned = listed([n for n in self.of_all.space if n not in speed], MOST_NAMED)
        if not tuned:
            return Stage(name="hyperparameters", what="", skipped="none are tuned")
        if math.isinf(known.gain):
            what = f"{tuned}, as long as a node-hour is expected to bring {100 * self.min_gain:g}%"
            return Stage(name="hyperparameters", what=what, whole_runs=2, node_hours=2 * whole)
        runs = round(known.node_hours / whole)
        gain = -math.expm1(-known.gain)
        if known.rate >= self.min_gain:
            return Stage(
                name="hyperparameters", what=tuned, whole_runs=runs, node_hours=known.node_hours, gain=gain
            )  # fmt: skip
        sentence = self._too_little(gain, known.node_hours, tuned)
        sentence += f" ({runs} whole runs tell that from luck; samples below the reference are taken back)"
        return Stage(name="hyperparameters", what=tuned, skipped=f"{sentence}, until whole runs need more samples")

    # -- the next step

    def next_step(self, rng: np.random.Generator) -> Proposed:
        """The step with the highest gain per node-hour, after the switches are screened."""
        if (step := self._screen(rng)) is not None and math.isinf(step.rate):
            return step
        whole, steps = self._hours(probe=False), [] if step is None else [step]
        option, gain = self.arithmetic.next_run()
        if len(self.options) > 1:
            setting = self.options[option.changes]
            why = f"switches that change arithmetic: a whole run with {self._setting_text(setting)}"
            steps.append(Proposed(self.values(setting), "full", gain / whole, why))
        steps.append(self._of_grey_box())
        if (unmeasured := self._moved_unmeasured()) is not None:
            return unmeasured
        if all(s.rate < self.min_gain for s in steps) and (confirmation := self._confirmation()) is not None:
            return confirmation
        return max(steps, key=lambda s: s.rate)

    def _screen(self, rng: np.random.Generator) -> Proposed | None:
        """A probe of the switches, with infinite rate until each level has been in one; None if none is worth its
        cost."""
        s, probe = self.screening, self._hours(probe=True)
        of_base = sum(r.setting == s.base and not r.whole and not r.dead for r in s.readings)
        if any(r.dead and r.setting == s.base for r in s.readings) and not s.measured:
            return None  # the base itself failed: no switch caused it, and there is no reference
        count = f"probe {len([r for r in s.readings if not r.whole]) + 1}"
        if of_base == 0 or (s.screened and of_base < REPEATS):
            why = f"switches, {count}: the base again, for the scatter of probes"
            return Proposed(self.values(s.base), PROBE, math.inf, why)
        if not s.screened:
            setting = s.most_informative(rng)
            why = f"switches, {count} of about {s.probes_needed + REPEATS + 4}: {self._setting_text(setting)}"
            return Proposed(self.values(setting), PROBE, math.inf, why)
        precise = bool(s.precision_of(s.leader()))
        candidates = [s.most_promising(rng)] + ([s.most_promising(rng, precise=True)] if precise else [])
        setting, gain = max(candidates, key=lambda candidate: candidate[1])
        if gain / probe < self.min_gain:
            return None
        why = f"switches, {count}: {self._setting_text(setting)} may be faster yet, by {100 * gain:.2g}% as expected"
        return Proposed(self.values(setting), PROBE, gain / probe, why)

    def _setting_text(self, setting: Setting) -> str:
        changed = [f"{self.switches[at].name}={self.switches[at].levels[setting[at]]}" for at in _on(setting)]
        return ", ".join(changed) or "no switch changed"

    def _of_grey_box(self) -> Proposed:
        proposed = self.grey_box.proposal(self.at_best, self.searched) if self.grey_box is not None else None
        if proposed is None:
            return Proposed(self.values(self.best), "full", 0.0, "nothing else is known to be worth a run")
        return Proposed(self.values(self.best, proposed.values), proposed.kind, proposed.rate, proposed.why)

    def _confirmation(self) -> Proposed | None:
        """A whole run of the recommendation; None if one has begun, or while running trials may change it."""
        if any(t.state is TrialState.RUNNING for t in self.trials):
            return None
        values = self._recommended()
        ran = [t for t in self.whole_space if t.params == values and t.user_attrs.get("kind") != PROBE]
        if any(t.state in (TrialState.RUNNING, TrialState.COMPLETE) for t in ran) or len(ran) >= REPEATS:
            return None
        return Proposed(values, "full", math.inf, "confirmation: what is recommended, as a whole run beside the base's")

    # -- the recommendation

    @cached_property
    def best_point(self) -> dict[str, Any]:
        """The best setting of the switches on the grey box's best configuration, whether or not they ran together."""
        if self.grey_box is None:
            return self.values(self.best)
        try:
            rest, _, _ = self.grey_box.recommend(self.at_best)
        except ValueError:
            return self.values(self.best)
        return self.values(self.best, rest)

    @cached_property
    def _combined(self) -> list[FrozenTrial]:
        """Trials with the best setting on the layout of :attr:`best_point`."""
        speed = self.coordinates.speed_names
        alike = [t for t in self.whole_space if self.setting(t.params) == self.best]
        return [t for t in alike if all(t.params[n] == self.best_point[n] for n in speed)]

    def _recommended(self) -> dict[str, Any]:
        """The best point if its switches have run on its layout; else the best setting on the start."""
        moved = any(self.best_point[n] != self.start[n] for n in self.coordinates.speed_names)
        ran = any(math.isfinite(self.ln_seconds(t)) for t in self._combined)
        return self.values(self.best) if moved and not ran else self.best_point

    def _moved_unmeasured(self) -> Proposed | None:
        """A probe of the best point if its switches have not run on its layout; else None."""
        if self._combined or all(self.best_point[n] == self.start[n] for n in self.coordinates.speed_names):
            return None
        return Proposed(
            self.best_point, PROBE, math.inf, "the switches' best setting on the layout that is believed best"
        )

    def recommendation(self) -> tuple[dict[str, Any], float, str]:
        """Values, expected seconds, a sentence. Raises ValueError before a run has reached the target."""
        if not any(t.state is TrialState.COMPLETE for t in self.whole_space):
            raise ValueError("no run has reached the target yet")
        values = self._recommended()
        saved = self.screening.compared(self.best, self.screening.base)[0]
        description = (
            f"{self._setting_text(self.best)}: expected to save {-100 * math.expm1(saved):.1f}% of the base's time"
        )
        if dead := [f"{self.switches[at].name}={self.switches[at].levels[n]}" for at, n in sorted(self.screening.dead)]:
            description += f"; left out, since it does not run here: {', '.join(dead)}"
        if self.grey_box is not None:
            return (
                values,
                math.exp(self.grey_box.forecast(self.at_best, {n: values[n] for n in self.searched})),
                description,
            )
        best = self.screening.predict([self.best])[0][0]
        return values, math.exp(float(best)), description


_OF_PACE = ("samples_per_second", "seconds_per_eval", "node_hours", "init_seconds", "peak_gib", "verdict")


def _choices(distribution: BaseDistribution) -> Sequence[Any]:
    """Values of a speed parameter: its choices, or the ends of its range."""
    if (choices := getattr(distribution, "choices", None)) is not None:
        return tuple(choices)
    return (getattr(distribution, "low", 0), getattr(distribution, "high", 0))


def _on(setting: Setting) -> list[int]:
    return [at for at, level in enumerate(setting) if level]


def _dead(trial: FrozenTrial) -> bool:
    return trial.user_attrs.get("verdict") in ("infeasible", "failed")


def gain_of(switches: Sequence[Switch], sd: float = EFFECTS[1]) -> float:
    """Expected ln(seconds) saved by the best level of each switch, for effects of levels ~ N(0, sd^2)."""
    from scipy.special import ndtr

    x = np.linspace(0, 6, 1201)
    counts = [len(s.levels) - 1 for s in switches]
    return sd * sum(float(np.trapezoid(1 - ndtr(x) ** n, x)) for n in counts)
