"""A sweep's summary in numbers and text, shared by status, report, dashboard and explain."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

from lora_tune.base.text import duration, trials_text, visible
from lora_tune.config.study import Study
from lora_tune.controller.conclusion import estimate_text
from lora_tune.controller.evidence import max_samples
from lora_tune.review import stopping as raced
from lora_tune.review.stopping import StoppingAccount, runs_text, stopping_account
from lora_tune.search import comparison
from lora_tune.search.no_effect import no_effect
from lora_tune.search.noise import scale_of
from lora_tune.search.objectives import objective_of, objectives_of
from lora_tune.search.pace import clock_text
from lora_tune.search.recommendation import UNRUN, Nearest, Recommended, best_run, nearest, recommend
from lora_tune.search.samplers import takes_old_runs
from lora_tune.search.usual_names import BATCH
from lora_tune.store.metrics import ConfirmedChoice
from lora_tune.store.records import Attempt, StudyRecords, Trial, TrialState, Verdict

# Short texts for trials, layouts, races and money.


def parameters_text(trial: Trial) -> str:
    """The tuned values, short: ``LR=0.0031 MAX_STEPS=200 tp4 minibs4``; degrees of 1 are omitted from layouts.

    A trial that measures a base config as it is starts with its name.
    """
    parts = [str(trial.metrics.base)] if trial.metrics.base is not None else []
    for name, value in trial.tuned.items():
        if isinstance(value, str) and value.startswith("tp"):
            parts.append(short_layout(value))
        else:
            parts.append(f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}")
    return visible(" ".join(parts))


def short_layout(text: str) -> str:
    """A layout without degrees of 1: ``tp4 pp1 cp1 minibs4 mbs1 sp1`` -> ``tp4 minibs4 sp1``; SP is a switch."""
    return " ".join(re.findall(r"sp1|[a-z]+(?!1\b)\d+", text)) or text


def race_text(
    study: Study, runs: Mapping[int, Sequence[raced.Replicate]], rules: comparison.ComparisonRules | None = None
) -> list[str]:
    """Standings of a race, best first: mean, 90% interval, runs, and runs without result.

    runs: by the trial that they replicate. rules: of the race, with the noise that is known before it.
    """
    scale, text = scale_of(study), objective_of(study).text
    means = comparison.means(raced.results(runs, runs), rules or comparison.ComparisonRules(scale=scale))
    standings = []
    for number, own in runs.items():
        name, count = raced.name_of(number), raced.runs_text(len(own), raced.missed(own), scale)
        mean, low, high = means.get(name, (math.inf, math.inf, math.inf))
        value = f"({count})" if name not in means else f"{text(mean)} ({text(low)} to {text(high)}, {count})"
        standings.append((scale.order(mean), f"{name} {value}"))
    return [line for _, line in sorted(standings)]


def batch_text(parameters: Mapping[str, object]) -> str:
    """The batch size under its name in the study, such as ``GBS 16``; "" if none of the usual names exists."""
    return next((f"{name} {parameters[name]}" for name in BATCH if name in parameters), "")


def interval_text(low: float, high: float, text: Callable[[float], str]) -> str:
    """``low to high`` formatted by ``text``; with more digits if both would look the same."""
    if low != high and text(low) == text(high):
        unit = " s" if text(low).endswith((" s", " min", " h")) else ""
        for digits in range(3, 17):
            if f"{low:.{digits}g}" != f"{high:.{digits}g}":
                return f"{low:.{digits}g}{unit} to {high:.{digits}g}{unit}"
    return f"{text(low)} to {text(high)}"


def money(study: Study, node_hours: float) -> float | None:
    """The cost of the node-hours, None if the study states no price."""
    rate = study.budget.price_per_node_hour
    return None if rate is None else rate * node_hours


def price(study: Study, node_hours: float) -> str:
    """The cost as text to append to node-hours; "" without a price."""
    cost = money(study, node_hours)
    return f" = {cost:,.2f} in money" if cost is not None else ""


STOPPED_EARLY = (Verdict.PRUNED, Verdict.CAPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureClass:
    """Failed attempts of one class. ``line`` and ``remedy`` are those of its most frequent failure."""

    kind: str
    attempts: int
    trials: tuple[int, ...]
    line: str
    remedy: str
    node_hours: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A sweep at one moment.

    verdicts: counts by verdict that occurs. planned: trial budget; None if unlimited, or already exceeded by
    ``sweep --trials``.
    recommended: the configuration with the best estimate, which is exported. best: the best single run; it has no
    interval, because it was selected for its result.
    node_hours: spent, start-up included. overhead_hours: part of them in which shared jobs trained nothing. saved:
    estimated node-hours that stopped trials would have cost.
    stopping: guarantee and cost of the stopping rule; None if no curves are compared.
    nearest: the trial nearest to the target while none has reached it. machine: see :func:`machine_text`. warning: why
    the results mislead; "" if they do not.
    """

    trials: int
    open: int
    planned: int | None
    verdicts: Mapping[Verdict, int]
    recommended: Recommended | None
    best: Trial | None
    node_hours: float
    overhead_hours: float
    saved: float
    seconds: float
    failures: tuple[FailureClass, ...]
    stopping: StoppingAccount | None = None
    nearest: Nearest | None = None
    machine: str = ""
    warning: str = ""


def overview(study: Study, sweep: StudyRecords, now: float) -> Overview:
    """The sweep's overview at ``now`` (epoch seconds), which counts running jobs."""
    verdicts = Counter(t.verdict for t in sweep.trials.values() if t.verdict is not None)
    return Overview(
        trials=len(sweep.trials),
        open=sum(t.state is not TrialState.FINISHED for t in sweep.trials.values()),
        planned=study.budget.trials if len(sweep.trials) <= (study.budget.trials or 0) else None,
        verdicts={v: verdicts[v] for v in Verdict if verdicts[v]},
        recommended=recommend(study, sweep),
        best=best_run(study, sweep),
        node_hours=sweep.node_hours(now),
        overhead_hours=sweep.overhead_hours,
        saved=saved_node_hours(study, sweep),
        seconds=elapsed(sweep, now),
        failures=failure_classes(sweep, now),
        stopping=stopping_account(study, sweep, now),
        nearest=nearest(study, sweep),
        machine=machine_text(study, sweep),
        warning=idle.sentence if (idle := no_effect(study, sweep)) else "",
    )


def elapsed(sweep: StudyRecords, now: float) -> float:
    """Seconds from the first attempt's intention to the last end, or to ``now`` while a trial is open."""
    if not sweep.attempts:
        return 0.0
    begin = min(a.intended_at for a in sweep.attempts.values())
    if any(t.state is not TrialState.FINISHED for t in sweep.trials.values()):
        return max(0.0, now - begin)
    return max(0.0, max(t.finished_at or begin for t in sweep.trials.values()) - begin)


def saved_node_hours(study: Study, sweep: StudyRecords) -> float:
    """Estimated node-hours that the trials stopped early would still have used.

    Each would have continued at its own pace to the end of its training (MAX_STEPS x GBS; if unknown, the median end of
    the trials that were not stopped), but at most to the trial's time limit.
    """
    ends = [e[-1].samples for t in sweep.trials.values() if t.verdict not in STOPPED_EARLY and t.verdict is not None
            and (e := sweep.last_evals(t.number))]  # fmt: skip
    usual = median(ends) if ends else None
    return sum(_saved(study, sweep, trial, usual) for trial in sweep.trials.values() if trial.verdict in STOPPED_EARLY)


def _saved(study: Study, sweep: StudyRecords, trial: Trial, usual: float | None) -> float:
    evals, attempts = sweep.last_evals(trial.number), sweep.attempts_of(trial.number)
    end = max_samples(trial) or usual
    if not evals or not attempts or end is None or not evals[-1].samples > 0 or not evals[-1].seconds > 0:
        return 0.0
    last, attempt = evals[-1], attempts[-1]
    left = (end - last.samples) * last.seconds / last.samples
    used = (attempt.ended_at or 0.0) - (attempt.started_at or 0.0)
    return max(0.0, min(left, study.budget.trial_minutes * 60 - used)) * attempt.node_count / 3600


def failure_classes(sweep: StudyRecords, now: float) -> tuple[FailureClass, ...]:
    """Failed attempts by class, the most expensive first."""
    by_kind: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in sweep.attempts.values():
        if attempt.failure:
            by_kind[attempt.failure].append(attempt)
    classes = [_failure_class(kind, attempts, now) for kind, attempts in by_kind.items()]
    return tuple(sorted(classes, key=lambda f: (-f.node_hours, f.kind)))


def _failure_class(kind: str, attempts: Sequence[Attempt], now: float) -> FailureClass:
    line, remedy = Counter((a.line, a.remedy) for a in attempts).most_common(1)[0][0]
    return FailureClass(
        kind=kind,
        attempts=len(attempts),
        trials=tuple(sorted({a.trial for a in attempts})),
        line=line,
        remedy=remedy,
        node_hours=sum(a.node_hours(now) for a in attempts),
    )


def ending_label(study: Study, trial: Trial) -> str:
    """A trial's end in a word: the outcome of its confirmation, else its verdict; "" if open."""
    if trial.metrics.confirmed is not None:
        return "passed over" if trial.passed_over else "confirmed"
    return objective_of(study).verdict_name(trial.verdict) if trial.verdict is not None else ""


def objective_text(study: Study) -> str:
    """The objectives by which trials are compared."""
    return " against ".join(o.name for o in objectives_of(study))


def recommended_text(study: Study, config: Recommended) -> str:
    """The expected objective of the recommendation, its interval and its evidence."""
    between = interval_text(config.low, config.high, objective_of(study).text)
    if config.confirmed:
        base = f"mean of {runs_text(config.runs, 0)} with further seeds"
    elif config.ran:
        base = f"from {runs_text(config.runs, 0)} of it and the other trials"
    else:
        base = "put together from other trials, not run as a whole"
    base += f"; {config.why}" if config.why else ""
    return f"{objective_of(study).text(config.objective)} expected (90% interval {between}, {base})"


def best_run_text(study: Study, config: Recommended) -> str:
    """The best single run, and whether its configuration is the recommended one."""
    which = "one of that configuration" if config.is_best_run else "of another configuration, and luck is part of it"
    return f"{objective_of(study).text(config.best_run.objective)}, trial {config.best_run.number}: {which}"


def trial_name(trial: Trial) -> str:
    """``trial 7``; "no trial yet" for a configuration that has not been run."""
    return f"trial {trial.number}" if trial.number != UNRUN else "no trial yet"


def confirmed_text(study: Study, best: Trial | None) -> str:
    """The confirmation of the best trial's configuration; "" unless a race chose it."""
    if best is None or (race := best.metrics.confirmed) is None or race.choice is not ConfirmedChoice.CHOSEN:
        return ""
    return f"trial {best.number}, {raced_text(study, best)}"


def raced_text(study: Study, trial: Trial) -> str:
    """The confirmation of a trial's configuration; "" if it has none."""
    if (race := trial.metrics.confirmed) is None:
        return ""
    text = objective_of(study).text
    mean, low, high = ("-" if value is None else text(value) for value in (race.seconds, race.low, race.high))
    count = runs_text(race.runs, race.missed, scale_of(study))
    return f"{race.choice}: mean {mean} ({low} to {high}, {count})"


def prior_text(study: Study, sweep: StudyRecords) -> str:
    """Prior data of the search: published results and old runs; "" if the sampler uses none."""
    if not takes_old_runs(study):
        return ""
    from lora_tune.search import priors, published

    sources = [priors.describe(sweep.priors)]
    if study.objective.curves == "llama2_70b_lora":
        sources.insert(0, f"{len(published.llama2_70b_lora())} published MLPerf submissions")
    if study.search.full_fine_tuning_lr is not None:
        sources.insert(0, f"ten times the learning rate of full fine-tuning ({study.search.full_fine_tuning_lr:g})")
    return " and ".join(w for w in sources if w)


def score_text(study: Study, trial: Trial) -> str:
    """What to append to a trial's score: time to target or RCP-normalised score, whichever it is not, the pace of a
    slow machine, and whether the time is an estimate; "" if nothing."""
    machine = "" if trial.metrics.clock_objective is None else clock_text(study, trial)
    return "; ".join(filter(None, (_normalised(study, trial), machine, estimate_text(trial.metrics))))


def not_at_pace(sweep: StudyRecords) -> dict[int, float]:
    """Slowdown factor of each trial that did not run at the reference pace."""
    return {n: t.metrics.slower for n, t in sorted(sweep.trials.items()) if t.metrics.slower is not None}


def machine_text(study: Study, sweep: StudyRecords) -> str:
    """Trials whose machine was off the reference pace, the largest deviation, and their nodes; "" if none."""
    if not (slow := not_at_pace(sweep)):
        return ""
    most = max(slow, key=lambda n: abs(math.log(slow[n])))
    rest = [t.number for t in sweep.trials.values() if t.finished_at is not None and t.number not in slow]
    nodes, others = ({node for n in numbers for node in sweep.nodes_of(n)} for numbers in (slow, rest))
    where = f"; all of them on {', '.join(sorted(nodes))}, where no other ran" if nodes and not nodes & others else ""
    return f"{trials_text(tuple(slow))}; trial {most}: {clock_text(study, sweep.trials[most])}{where}"


def _normalised(study: Study, trial: Trial) -> str:
    if not objective_of(study).timed or trial.metrics.mlperf_score is None:
        return ""
    if study.objective.score == "mlperf_score":
        return f"{duration(trial.seconds)} before RCP normalisation"
    return f"{duration(trial.metrics.mlperf_score)} RCP-normalised"


# Interval of a trial's time to the target.


def time_interval(trial: Trial) -> tuple[float, float]:
    """A 90% interval in seconds of the time to target of this configuration on this kind of machine.

    From the interval of the crossing in samples, extended by one eval interval (a crossing is observed at the next
    eval), at this run's pace, which varies as between the run's blocks. Widened to contain the run. Estimated seconds
    widen it on both sides by their length, because only their total is bounded by the log.
    """
    assert trial.seconds is not None
    assert trial.samples is not None
    metrics, samples = trial.metrics, trial.samples
    low = samples if metrics.crossing_low is None else metrics.crossing_low
    high = (samples if metrics.crossing_high is None else metrics.crossing_high) + (metrics.eval_samples or 0.0)
    pace = NormalDist().inv_cdf(0.95) * (metrics.pace_spread or 0.0)

    def away(bound: float) -> float:
        known = samples > 0 and bound > 0
        return math.exp(math.hypot(math.log(bound / samples) if known else 0.0, pace))

    unseen = metrics.estimated_seconds or 0.0
    shortest, longest = trial.seconds / away(min(low, samples)), trial.seconds * away(max(high, samples))
    return max(0.0, min(shortest, trial.seconds - unseen)), max(longest, trial.seconds + unseen)
