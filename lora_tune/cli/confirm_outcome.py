"""The outcome of a ``confirm`` race: table, records, and result files of a submission."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lora_tune.base.errors import SetupError
from lora_tune.base.paths import display_path
from lora_tune.base.text import counted, duration, redact
from lora_tune.config.study import Study
from lora_tune.logs.mllog import MllogReader
from lora_tune.mlperf.benchmark import benchmark_names
from lora_tune.mlperf.submission import passes, read_submission, sentences
from lora_tune.review.stopping import Replicate, missed, name_of, results
from lora_tune.review.summary import objective_text, parameters_text
from lora_tune.search.comparison import CannotSeparate, ComparisonPlan, ComparisonRules, Decided, means
from lora_tune.search.noise import scale_of
from lora_tune.search.objectives import objective_of
from lora_tune.store.metrics import Confirmed, ConfirmedChoice
from lora_tune.store.records import StudyRecords, Trial
from lora_tune.workloads.base import Job

if TYPE_CHECKING:
    from lora_tune.mlperf.benchmark import Benchmark
    from lora_tune.mlperf.score import Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedContender:
    """One contender. mean, low, high: of the objective, with its 90% interval; None if no run has a result.
    missed: runs without one."""

    trial: int
    runs: int
    missed: int
    mean: float | None
    low: float | None
    high: float | None
    node_hours: float
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The chosen configuration under MLPerf's rules, times in minutes; ``sentences`` for display.

    runs: those that count, which are in the result files.
    olympic: mean without the fastest and slowest run; infinite, as ``minutes``, if two runs missed the target.
    factor: RCP normalisation, 1 if no reference applies.
    passes: probability that ten new runs pass the convergence and RCP checks, None if these do not apply.
    """

    runs: int
    olympic: float
    factor: float
    minutes: float
    low: float
    high: float
    passes: float | None
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """A race's verdict. decided: False if the leaders could not be separated. chosen: the trial to take, None if no run
    has a result. node_hours: of all replicates, including failed ones. identical: the value of all runs of the chosen
    configuration if they are equal, so that the seed has no effect. more_runs: that would separate the leaders, 0 if
    they are separated or have equal means; seeds: the resulting runs of each."""

    sentence: str
    decided: bool
    chosen: int | None
    places: tuple[RankedContender, ...]
    scored: Scored | None
    runs: int
    node_hours: float
    identical: float | None = None
    more_runs: int = 0
    seeds: int = 0


def _identical(replicates: Sequence[Replicate]) -> float | None:
    values = {r.objective for r in replicates}
    return (
        replicates[0].objective
        if len(replicates) > 1 and len(values) == 1 and math.isfinite(replicates[0].objective)
        else None
    )


def confirmation(
    study: Study,
    race: StudyRecords,
    field: Sequence[Trial],
    runs: Mapping[int, Sequence[Replicate]],
    plan: ComparisonPlan,
    rules: ComparisonRules | None = None,
) -> Confirmation | None:
    """The outcome of a race; None while it has no verdict. rules: by which ``plan`` was made."""
    if plan.verdict is None:
        return None
    verdict = plan.verdict
    name = verdict.winner if isinstance(verdict, Decided) else verdict.recommended
    trial = next(t for t in field if name_of(t.number) == name)
    replicates = runs.get(trial.number, ())
    reached, timed = any(math.isfinite(r.objective) for r in replicates), objective_of(study).timed
    chosen = trial.number if reached else None
    rules = rules or ComparisonRules(scale=scale_of(study))
    mean = means(results(runs, [t.number for t in field]), rules)
    places = [_place(t.number, runs.get(t.number, ()), mean.get(name_of(t.number)), chosen) for t in field]
    return Confirmation(
        sentence=verdict.sentence,
        decided=not isinstance(verdict, CannotSeparate) and reached,
        chosen=chosen,
        places=tuple(sorted(places, key=lambda p: (not p.chosen, rules.scale.order(p.mean)))),
        scored=scored(study, trial, replicates, plan.required[name], mean[name]) if reached and timed else None,
        identical=_identical(replicates),
        more_runs=verdict.more_runs if isinstance(verdict, CannotSeparate) else 0,
        seeds=verdict.seeds if isinstance(verdict, CannotSeparate) else 0,
        runs=sum(p.runs for p in places),
        node_hours=race.node_hours(max((a.ended_at or 0.0 for a in race.attempts.values()), default=0.0)),
    )


def _place(
    trial: int, runs: Sequence[Replicate], mean: tuple[float, float, float] | None, chosen: int | None
) -> RankedContender:
    middle, low, high = mean or (None, None, None)
    return RankedContender(
        trial=trial,
        runs=len(runs),
        missed=missed(runs),
        mean=middle,
        low=low,
        high=high,
        node_hours=sum(r.node_hours for r in runs),
        chosen=trial == chosen,
    )


NO_REFERENCE = "not normalised by reference convergence points: the study names no objective.benchmark"
EPOCHS = "the reference convergence points count epochs: the checkers' word on the result files counts"


def scored(
    study: Study, trial: Trial, replicates: Sequence[Replicate], counted: int, mean: tuple[float, float, float]
) -> Scored | None:
    """The olympic mean of a configuration's runs, normalised if a reference applies; None for fewer than three.

    counted: runs of a submission. The first of ``replicates`` count, because runs may not be selected.
    """
    from lora_tune.mlperf.score import olympic_mean, score

    runs = replicates[:counted]
    if len(runs) < 3:
        return None
    which = f"olympic mean of {f'the first {counted} of ' if counted < len(replicates) else ''}{len(replicates)} runs"
    minutes = [r.seconds / 60 if r.seconds is not None else math.inf for r in runs]
    batch = trial.parameters.get("GBS")
    olympic = olympic_mean(minutes)
    benchmark = study.benchmark
    none = f"no olympic mean: {sum(map(math.isinf, minutes))} of {len(runs)} runs did not reach the target"
    if benchmark is None or benchmark.progress == "epoch_num" or not isinstance(batch, int):
        low, high = (bound / 60 for bound in mean[1:])
        sentence = f"{which} {duration(60 * olympic)}" if math.isfinite(olympic) else none
        sentence += f"; {NO_REFERENCE if benchmark is None else EPOCHS}"
        return Scored(
            runs=len(runs), olympic=olympic, factor=1.0, minutes=olympic, low=low, high=high, passes=None,
            sentences=(sentence,),
        )  # fmt: skip
    samples = [r.samples if r.samples is not None else math.inf for r in runs]
    mlperf = score(benchmark, minutes, samples, batch)
    ahead = _ahead(benchmark, replicates, batch)
    sentence = f"{which} {mlperf.olympic_minutes:.2f} min x {mlperf.factor:.4f} = {mlperf.minutes:.2f} min"
    return Scored(
        runs=len(runs), olympic=mlperf.olympic_minutes, factor=mlperf.factor, minutes=mlperf.minutes, low=ahead.low,
        high=ahead.high, passes=ahead.passes,
        sentences=(sentence, mlperf.sentence, ahead.sentence) if math.isfinite(olympic) else (none, ahead.sentence),
    )  # fmt: skip


def _ahead(benchmark: Benchmark, replicates: Sequence[Replicate], batch: int) -> Prediction:
    """The predicted score of a new submission, from all runs."""
    from lora_tune.mlperf.score import predict

    reached = [(r.seconds / 60, r.samples) for r in replicates if r.seconds is not None and r.samples is not None]
    minutes, samples = [m for m, _ in reached], [s for _, s in reached]
    return predict(benchmark, minutes, samples, batch, unconverged=len(replicates) - len(reached))


def as_json(outcome: Confirmation) -> dict[str, Any]:
    """The outcome as plain data, infinities as None, because JSON has none."""
    score = asdict(outcome.scored) if outcome.scored else {}
    finite = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in score.items()}
    return {**asdict(outcome), "scored": finite or None}


def confirmed(sweep: StudyRecords, outcome: Confirmation, runs: Mapping[int, Sequence[Replicate]]) -> list[Trial]:
    """The sweep's trials that raced, with the outcome in their metrics."""
    changed = []
    for place in outcome.places:
        trial = sweep.trials[place.trial]
        race = Confirmed(
            choice=ConfirmedChoice.CHOSEN if place.chosen else ConfirmedChoice.PASSED_OVER,
            runs=place.runs,
            missed=place.missed,
            seconds=place.mean,
            low=place.low,
            high=place.high,
            seeds=tuple(r.seed for r in runs.get(place.trial, ())),
            each=_each(runs.get(place.trial, ())),
            node_hours=place.node_hours,
            sentence=outcome.sentence,
            score=". ".join(outcome.scored.sentences) if place.chosen and outcome.scored else None,
        )
        changed.append(replace(trial, metrics=replace(trial.metrics, confirmed=race)))
    return changed


def _each(runs: Sequence[Replicate]) -> tuple[float, ...]:
    """Results of the runs: seconds at the reference pace with a target, else objective values."""
    return tuple(r.objective if r.seconds is None else r.seconds / r.slower for r in runs if math.isfinite(r.objective))


def summary(study: Study, sweep: StudyRecords, outcome: Confirmation) -> str:
    """The verdict, a table of the contenders, and the score, as printed."""
    lines = [outcome.sentence, "", f"{'trial':>5}  {'runs':>4}  {'':1} {objective_text(study)}, mean and 90% interval"]
    for place in outcome.places:
        lines.append(
            f"{place.trial:>5}  {place.runs:>4}  {'*' if place.chosen else ' '} {_place_text(study, place, sweep)}"
        )
    if outcome.scored:
        lines += ["", *(f"score    {s}" for s in outcome.scored.sentences)]
    if outcome.identical is not None:
        value = objective_of(study).text(outcome.identical)
        lines.append(f"note     each run measured {value}: does the script use its seed, the variable SEED?")
    lines.append(f"spent    {scale_of(study).spent(outcome.node_hours)} in {counted(outcome.runs, 'runs')}")
    return "\n".join(lines)


def _place_text(study: Study, place: RankedContender, sweep: StudyRecords) -> str:
    scale, text = scale_of(study), objective_of(study).text
    missed = f", {place.missed} {scale.missed}" if place.missed else ""
    shown = parameters_text(sweep.trials[place.trial])
    if place.mean is None or place.low is None or place.high is None:
        return f"no run {scale.got}   {shown}"
    each = place.node_hours / place.runs
    return f"{text(place.mean)} ({text(place.low)} to {text(place.high)}){missed}, {scale.spent(each)} a run   {shown}"


@dataclass(frozen=True, slots=True)
class CheckerResult:
    """Output of MLPerf's checkers. applies: False if the logs are of no MLPerf benchmark; no checker ran then."""

    applies: bool
    passes: bool
    sentences: tuple[str, ...]


def run_text(job: Job, position: int) -> str:
    """The log of run ``position`` (from 0) of a job, secrets redacted.

    Raises SetupError if the log is missing.
    """
    run_log = job.run_logs[position] if position < len(job.run_logs) else None
    path = run_log if run_log is not None and run_log.is_file() else job.log
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SetupError(
            f"{path}: {error.strerror}: the result files are made of the logs; restore it, or start "
            "the confirmation anew with another --output"
        ) from error
    return redact(text if path is run_log else split_runs(text)[position])


def split_runs(text: str) -> list[str]:
    """A job's log, split at the first ``init_start`` or ``run_start`` after each ``run_stop``."""
    parts: list[list[str]] = [[]]
    over = False
    for line in text.splitlines(keepends=True):
        if over and ('"init_start"' in line or '"run_start"' in line):
            parts.append([])
            over = False
        parts[-1].append(line)
        over = over or '"run_stop"' in line
    return ["".join(part) for part in parts]


def write_results(folder: Path, texts: Sequence[str]) -> list[Path]:
    """Write ``result_0.txt`` and so on into ``folder``, replacing earlier ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("result_*.txt"):
        old.unlink()
    written = [folder / f"result_{i}.txt" for i in range(len(texts))]
    for path, text in zip(written, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    return written


def check(folder: Path, ruleset: str | None = None) -> CheckerResult:
    """Run MLPerf's compliance and RCP checkers on a result folder, if they apply.

    ruleset: of the study; None: the newest that includes the logs' benchmark.
    """
    named = {_benchmark(path) for path in folder.glob("result_*.txt")}
    if len(named) != 1 or not named <= set(benchmark_names()):
        shown = ", ".join(sorted(name or "none" for name in named))
        reason = (
            f"MLPerf's compliance and RCP checks do not apply: the logs name the benchmark {shown}, none of MLPerf's"
        )
        return CheckerResult(False, False, (reason,))
    submission = read_submission(folder, ruleset)
    return CheckerResult(True, passes(submission), tuple(sentences(submission)))


def _benchmark(path: Path) -> str:
    reader = MllogReader()
    reader.feed(path.read_bytes())
    named = (run.hyperparameters.get("submission_benchmark") for run in reader.runs())
    return next((str(name) for name in named if name), "")


def print_checks(checks: CheckerResult | None, folder: Path | None) -> None:
    """Print the checkers' findings on ``folder``; nothing if they did not run."""
    if checks is None or folder is None:
        return
    for sentence in checks.sentences:
        click.echo(f"checks   {sentence}")
    click.echo(f"results  {display_path(folder)}/result_*.txt")
