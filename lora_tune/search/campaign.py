"""One error budget for all comparisons of a sweep: which configurations are better than the baseline, at any time.

A configuration is an *arm*: all trials with the same tuned values and any seed. The chance that any arm is called
better and is not is at most ``CAMPAIGN_ERROR``, over all arms and all looks together:

* An arm's first run selected it, so it is no evidence; its further runs are.
* The j-th arm to be repeated is called better if its e-value against the baseline (``curves.evalues``) ever exceeds
  1 / a_j. The a_j are fixed in advance and sum to the error budget ("alpha spending", Foster and Stine 2008; with
  e-values Vovk and Wang 2021, section 3, and Ville's inequality).
* Runs count in order of proposal, each once all earlier ones have ended, so that fast runs are not seen first.
* A run of the arm without a result, or cancelled after it had begun, counts as the worst run of either arm;
  after two such runs the arm cannot be called better. Such runs of the baseline are ignored.

Everything is computed from the records: nothing is stored, and the result does not depend on how often it is computed.
"""

from __future__ import annotations

import enum
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from lora_tune.base.text import counted
from lora_tune.config.study import Study
from lora_tune.curves.evalues import TwoSamples, interval, log_evidence, two_samples
from lora_tune.search.comparison import UNSOUND_FROM
from lora_tune.search.noise import ResultScale, scale_of
from lora_tune.search.usual_names import TREE
from lora_tune.store.records import StudyRecords, Trial, TrialState, Value, Verdict

CAMPAIGN_ERROR = 0.05
"""Chance that a campaign calls any arm better that is not."""

EQUALLY_CHEAP = 3
"""Number of arms tested at similar prices: they take half of the budget. An agent that screens by one run each tests
the better one of 20 or 100 arms among its first few."""

INTERVAL_LEVEL = 0.1
"""Error of the interval of one arm, over all looks together."""

MOST_MORE = 100
"""Largest number of further runs, arm and baseline together, that is forecast."""

_SEED = re.compile(r"(^|_)(RNG_?|RANDOM_?)?SEEDS?($|_)", re.IGNORECASE)

ArmKey = frozenset[tuple[str, Value]]


class ArmState(enum.StrEnum):
    """State of an arm."""

    BASELINE = "baseline"
    CHOSEN_BY = "one run"
    """It has only the run that selected it."""
    OPEN = "not distinguishable"
    BETTER = "better"
    UNSOUND = "unsound"
    """At least two of its runs have no result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmVerdict:
    """Verdict on one arm.

    trials: numbers of its trials. runs, baseline_runs: runs that count as evidence. missed: its runs without a result.
    difference, low, high: against the baseline on the study's scale (shares of a time, else in the metric's unit);
    positive is better; low and high are a 90% interval valid at all looks together; None if there are too few runs.
    log_evidence, log_needed: ln of the largest e-value so far, and of the threshold. spent: share of ``CAMPAIGN_ERROR``
    for this arm's test. more_runs, more_baseline_runs, more_node_hours: until a likely decision if the current
    difference is real; None if unknown. sentence: summary for people.
    """

    state: ArmState
    trials: tuple[int, ...]
    sentence: str = ""
    runs: int = 0
    baseline_runs: int = 0
    missed: int = 0
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    log_evidence: float = 0.0
    log_needed: float | None = None
    spent: float = 0.0
    more_runs: int | None = None
    more_baseline_runs: int | None = None
    more_node_hours: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """Verdicts of a sweep, in the order of its arms. spent: share of ``CAMPAIGN_ERROR`` used by the ``tested`` arms."""

    arms: tuple[ArmVerdict, ...]
    tested: int
    spent: float

    @property
    def summary(self) -> str:
        """Error budget and results in a sentence."""
        better = [a for a in self.arms if a.state is ArmState.BETTER]
        total = f"{100 * CAMPAIGN_ERROR:g}%"
        return (
            f"{counted(len(self.arms), 'configurations')}, {self.tested} run again, {len(better)} better than the "
            f"baseline; {100 * self.spent:.2g}% of {total} spent: the chance that any of these is not better"
        )

    def of(self, trial: int) -> ArmVerdict | None:
        """Verdict of the arm to which a trial belongs."""
        return next((arm for arm in self.arms if trial in arm.trials), None)


def is_seed(name: str) -> bool:
    """Whether the name is that of a random seed, which does not define an arm."""
    return _SEED.search(name) is not None


def error_share(position: int) -> float:
    """Share of the campaign's error for the ``position``-th tested arm, counted from 1; the shares sum to 1."""
    return EQUALLY_CHEAP / ((position + EQUALLY_CHEAP - 1) * (position + EQUALLY_CHEAP))


def arm_of(trial: Trial) -> ArmKey:
    """The arm of a trial: its tuned values without seeds; outside the space, all its parameters. Trials of commits with
    the same files belong to one arm."""
    values = trial.tuned or trial.parameters
    if TREE in trial.parameters:
        values = {**values, TREE: trial.parameters[TREE]}
    return frozenset((name, value) for name, value in values.items() if not is_seed(name))


def arms_of(trials: Iterable[Trial]) -> dict[ArmKey, list[Trial]]:
    """Trials of each arm by number, the baseline's first: the configuration from before the sweep, else the first that
    ran. Probes belong to no arm."""
    known = sorted((t for t in trials if not t.probe and t.replicate_of is None), key=lambda t: t.number)
    arms: dict[ArmKey, list[Trial]] = {}
    for trial in [t for t in known if t.tuned] or known:
        arms.setdefault(arm_of(trial), []).append(trial)
    start = next((arm_of(t) for t in known if t.metrics.base is not None), None)
    if start in arms:
        arms = {start: arms.pop(start)} | arms
    return arms


def campaign(study: Study, sweep: StudyRecords) -> Campaign:
    """Verdicts of a sweep's records. Pure."""
    key = ("campaign", len(sweep.trials))  # a proposal takes its share of the error before it has ended
    started = frozenset(trial for (trial, _), attempt in sweep.attempts.items() if attempt.started_at is not None)
    return sweep.once(key, lambda: verdicts(tuple(sweep.trials.values()), started, scale_of(study)))


def verdicts(trials: Sequence[Trial], started: frozenset[int], scale: ResultScale) -> Campaign:
    """Verdicts of all arms. started: numbers of trials that had begun, so that their progress could be seen. Pure."""
    arms = list(arms_of(trials).values())
    if not arms:
        return Campaign(arms=(), tested=0, spent=0.0)
    baseline = _Arm(arms[0], started, scale)
    tested = sorted((arm for arm in arms[1:] if len(arm) > 1), key=lambda arm: arm[1].number)
    order = {arm[0].number: position for position, arm in enumerate(tested, 1)}
    judged = [_judge(_Arm(arm, started, scale), baseline, order.get(arm[0].number), scale) for arm in arms[1:]]
    first = ArmVerdict(
        state=ArmState.BASELINE, trials=baseline.numbers, runs=len(baseline.places), baseline_runs=len(baseline.places),
        missed=baseline.missed, sentence=f"the baseline, {counted(len(baseline.places), 'runs')} with a result",
    )  # fmt: skip
    spent = CAMPAIGN_ERROR * sum(map(error_share, order.values()))
    return Campaign(arms=(first, *judged), tested=len(order), spent=spent)


@dataclass(frozen=True, slots=True)
class _Run:
    """place: result on the scale, None without a result."""

    number: int
    place: float | None
    node_hours: float


@dataclass(slots=True)
class _Arm:
    """An arm with its runs that count, up to the first that has not ended."""

    trials: Sequence[Trial]
    started: frozenset[int]
    scale: ResultScale
    runs: list[_Run] = field(init=False)
    blocked: float = field(init=False, default=math.inf)
    """Number of the first trial that has not ended."""

    def __post_init__(self) -> None:
        self.runs = []
        for trial in self.trials:
            if trial.state is not TrialState.FINISHED:
                self.blocked = trial.number
                return
            if _counts(trial, self.started):
                value = trial.metrics.objective
                place = None if value is None else self.scale.inward(value)
                self.runs.append(_Run(trial.number, place, trial.metrics.node_hours or 0.0))

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(t.number for t in self.trials)

    @property
    def places(self) -> list[float]:
        return [run.place for run in self.runs if run.place is not None]

    @property
    def missed(self) -> int:
        return len(self.runs) - len(self.places)

    @property
    def node_hours(self) -> float:
        """Mean node-hours of a run."""
        return sum(run.node_hours for run in self.runs) / max(1, len(self.runs))


def _counts(trial: Trial, started: frozenset[int]) -> bool:
    """Whether an ended trial is evidence: not if the machine made it fail, nor if it was cancelled before it began."""
    return trial.verdict is not Verdict.FAILED and (trial.verdict is not Verdict.CANCELLED or trial.number in started)


def _judge(arm: _Arm, baseline: _Arm, position: int | None, scale: ResultScale) -> ArmVerdict:
    """position: rank of the arm among the tested ones, None if it ran once."""
    name = f"trial {arm.numbers[0]}'s configuration"
    if position is None:
        sentence = f"{name} has one run, the one it was chosen by: no evidence; run it again"
        return ArmVerdict(state=ArmState.CHOSEN_BY, trials=arm.numbers, sentence=sentence)
    spent = CAMPAIGN_ERROR * error_share(position)
    fresh = [run for run in arm.runs if run.number != arm.numbers[0]]
    largest, now, counts = _followed(fresh, arm, baseline, scale)
    verdict = ArmVerdict(
        state=ArmState.OPEN, trials=arm.numbers, runs=counts[0], baseline_runs=counts[1],
        missed=sum(run.place is None for run in fresh), log_evidence=largest, log_needed=-math.log(spent), spent=spent,
    )  # fmt: skip
    return _worded(name, verdict, now, (arm.node_hours, baseline.node_hours), scale)


def _followed(
    fresh: Sequence[_Run], arm: _Arm, baseline: _Arm, scale: ResultScale
) -> tuple[float, TwoSamples | None, tuple[int, int]]:
    """Process the runs in order of proposal: largest log evidence, final comparison, and numbers of runs of arm and
    baseline."""
    until = min(arm.blocked, baseline.blocked)
    merged = [(run.number, run, of_arm) for runs, of_arm in ((fresh, True), (baseline.runs, False)) for run in runs]
    arm_places: list[float | None] = []
    baseline_places: list[float] = []
    largest, now = 0.0, None
    for number, run, of_arm in sorted(merged, key=lambda entry: entry[0]):
        if number > until:
            break
        if of_arm:
            arm_places.append(run.place)
        elif run.place is not None:
            baseline_places.append(run.place)
        now = _compared(arm_places, baseline_places, scale)
        if now is not None:
            largest = max(largest, log_evidence(now.statistic, now.pairs, now.freedom))
    return largest, now, (len(arm_places), len(baseline_places))


def _compared(
    arm_places: Sequence[float | None], baseline_places: Sequence[float], scale: ResultScale
) -> TwoSamples | None:
    """Compare two samples; None if that is impossible, for example if the runs are all equal."""
    known = [*(place for place in arm_places if place is not None), *baseline_places]
    if not known:
        return None
    compared = two_samples([max(known) if place is None else place for place in arm_places], baseline_places)
    return None if compared is None or compared.spread < scale.least_sd(known) else compared


def _worded(
    name: str, verdict: ArmVerdict, now: TwoSamples | None, hours: tuple[float, float], scale: ResultScale
) -> ArmVerdict:
    """The verdict with state and sentence. hours: node-hours of a run of the arm, and of the baseline."""
    if verdict.missed >= UNSOUND_FROM:
        sentence = f"{name} {scale.missed} in {verdict.missed} of {verdict.runs} further runs: it is not called better"
        return replace(verdict, state=ArmState.UNSOUND, sentence=sentence)
    if now is None:
        return replace(verdict, sentence=f"{name}: {_too_few(verdict)}")
    bounds = [scale.difference(x) for x in (now.difference, *interval(now, INTERVAL_LEVEL))]
    low, high = (bound if math.isfinite(bound) else None for bound in bounds[1:])
    known = replace(verdict, difference=bounds[0], low=low, high=high)
    range_text = _range(known, scale)
    assert verdict.log_needed is not None
    if verdict.log_evidence >= verdict.log_needed:
        sentence = (
            f"{name} is better than the baseline by {scale.text(bounds[0])} ({range_text}), after "
            f"{verdict.runs} and {counted(verdict.baseline_runs, 'runs')}; {100 * verdict.spent:.2g}% of "
            f"{100 * CAMPAIGN_ERROR:g}% spent on it"
        )
        return replace(known, state=ArmState.BETTER, sentence=sentence)
    arm_more, baseline_more = more_runs(now, (verdict.runs, verdict.baseline_runs), verdict.log_needed)
    node_hours = None if arm_more is None or baseline_more is None else arm_more * hours[0] + baseline_more * hours[1]
    sentence = f"{name} is not distinguishable from the baseline: {scale.text(bounds[0])} ({range_text}); "
    sentence += _more_runs_text(arm_more, baseline_more, node_hours, scale)
    return replace(
        known, more_runs=arm_more, more_baseline_runs=baseline_more, more_node_hours=node_hours, sentence=sentence
    )


def _range(verdict: ArmVerdict, scale: ResultScale) -> str:
    if verdict.low is None or verdict.high is None:
        return "too few runs for an interval"
    return f"90% interval {scale.text(verdict.low)} to {scale.text(verdict.high)}"


def _too_few(verdict: ArmVerdict) -> str:
    if verdict.runs + verdict.baseline_runs >= 4 and verdict.runs and verdict.baseline_runs:
        return "its runs and the baseline's are all alike; does the script use its seed, the variable SEED?"
    return (
        f"{counted(verdict.runs, 'further runs')} of it and {verdict.baseline_runs} of the baseline have ended: too "
        "few to compare; run both again"
    )


def _more_runs_text(
    arm_more: int | None, baseline_more: int | None, node_hours: float | None, scale: ResultScale
) -> str:
    if arm_more is None or baseline_more is None:
        return f"no {MOST_MORE} further runs would be likely to show it better"
    cost = f" = {scale.spent(node_hours)}" if node_hours else ""
    return f"if that is real, {arm_more} more runs of it and {baseline_more} of the baseline would show it{cost}"


def more_runs(now: TwoSamples, counts: tuple[int, int], log_needed: float) -> tuple[int | None, int | None]:
    """Further runs of the arm and of the baseline until a decision if the current difference is real.

    The next run goes to the one with fewer. (None, None) if the arm is not ahead, or ``MOST_MORE`` runs are too few.
    """

    def decides(more: int) -> bool:
        arm_more, baseline_more = _shared(counts, more)
        pairs = 1 / (1 / arm_more + 1 / baseline_more)
        statistic = now.difference * math.sqrt(pairs) / now.spread
        return log_evidence(statistic, pairs, arm_more + baseline_more - 2) >= log_needed

    if now.difference <= 0 or not decides(MOST_MORE):
        return None, None
    arm_more, baseline_more = _shared(counts, bisect_left(range(MOST_MORE), True, key=decides))
    return arm_more - counts[0], baseline_more - counts[1]


def _shared(counts: tuple[int, int], more: int) -> tuple[int, int]:
    """Numbers of runs after ``more`` further ones, each given to the one with fewer."""
    few, many = sorted(counts)
    few, left = few + min(more, many - few), max(0, more - (many - few))
    few, many = few + (left + 1) // 2, many + left // 2
    return (few, many) if counts[0] <= counts[1] else (many, few)
