"""Replay a finished log as a trial of a study: what the sweep would have decided, and when, by the log's time stamps.

All decisions are made by the driver's own functions. Each tick feeds the log's next lines to its reader and failure
scanner; ``judge_curve`` decides while the trial runs, ``diagnose``, ``conclude`` and ``impossible_times`` at its end,
and ``facts`` gives the objective. Time limits, queues and silences depend on the cluster and are not replayed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath

from lora_tune.base.errors import InputError
from lora_tune.config.parameters import FormulaError
from lora_tune.config.study import Study
from lora_tune.controller import conclusion, policy, pruning
from lora_tune.controller.acceptance import impossible_times, why_untrue
from lora_tune.launchers.base import JobState, JobStatus
from lora_tune.logs.failures import FailureScanner, diagnose
from lora_tune.logs.follower import due
from lora_tune.logs.log_files import SCANNED_BYTES, printed_settings, ticks
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import Announced, Eval, LogReader, RunLog
from lora_tune.mlperf.benchmark import find_benchmark
from lora_tune.mlperf.rules import reaching
from lora_tune.review.summary import time_interval
from lora_tune.search.objectives import objective_of
from lora_tune.search.recommendation import best_run
from lora_tune.store.records import Attempt, StopKind, StudyRecords, Trial, TrialState, UnitOfWork, Value, Verdict
from lora_tune.workloads.base import reader_of

ReaderFor = Callable[[Mapping[str, Value]], LogReader]
"""Makes a new reader of the study's log format for a trial with these parameters."""


@dataclass(frozen=True, slots=True)
class ReplayedVerdict:
    """A verdict of the sweep. kind: pruned, capped, infeasible or failed. at_seconds: since ``run_start`` (since the
    log's first time stamp if there is none)."""

    kind: str
    at_seconds: float
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedLog:
    """The outcome of one log.

    ceiling: for rising metrics, whose evals ``run`` stores as ceiling - value; None if they fall. parameters: of the
    run, by the study's names. reached: the log shows the target (or a value, if there is no target); stop: the eval
    that shows it. verdicts: the first of each kind, by time; in a sweep the first of all ends the trial, the others
    show what would have followed. lost: it was stopped early, but would have reached the target (pruned) or beaten the
    best so far (capped). ending: the end without early stops, as text. objective, low, high: seconds (samples/s for a
    throughput study) with 90% interval, None if the target was not reached.
    """

    run: RunLog
    ceiling: float | None
    parameters: Mapping[str, Value]
    reached: bool
    stop: Eval | None
    verdicts: tuple[ReplayedVerdict, ...]
    lost: bool
    ending: str
    objective: float | None = None
    low: float | None = None
    high: float | None = None


class Replay:
    """Replays logs in sequence as trials: earlier ones are references for, and compete with, later ones.

    A sweep trains one benchmark on one machine, so logs are grouped by benchmark, submitter and platform. Many
    published result files have placeholders for the latter two; these are grouped by folder.
    """

    def __init__(self, study: Study, reader_for: ReaderFor) -> None:
        self._study = study.with_options({"pruning": {"audit": 0.0}})  # audits off: apply the rule to every log
        self._reader_for = reader_for
        self._books: dict[tuple[object, ...], UnitOfWork] = {}

    def play(self, log: bytes, name: str = "") -> ReplayedLog:
        """Replay one log; name: its path. Never raises for its content."""
        whole = _read(self._reader_for(self._study.search_space.fixed), log)
        study = self._study_for(whole)
        announced = tuple(map(whole.hyperparameters.get, _ONE_SWEEP))
        unnamed = any("PLACEHOLDER" in str(value) for value in announced) and _RESULT_FILE.search(name)
        place = str(PurePath(name).parent) if unnamed else ""
        work = self._books.setdefault((*announced, place), _empty_book(study))
        number = len(work.sweep.trials)
        parameters = self.parameters(whole, log)
        trial = Trial(number=number, seed=0, tuned={}, parameters=parameters, state=TrialState.RUNNING)
        attempt = Attempt(trial=number, number=0, job_name=f"replay-{number}", folder="", started_at=0.0)
        work.put_trial(trial)
        work.put_attempt(attempt)
        player = _Player(study, work, trial, attempt, self._reader(study, parameters))
        for piece in ticks(log):
            player.tick(piece)
        return player.end()

    @property
    def sweeps(self) -> list[StudyRecords]:
        """The replayed sweeps, one per benchmark and machine."""
        return [work.sweep for work in self._books.values()]

    def parameters(self, run: RunLog, log: bytes) -> dict[str, Value]:
        """The trial's parameters: values fixed by the study, and the others as logged."""
        from lora_tune.search import priors

        space = self._study.search_space
        names = [*space.parameters, "MAX_STEPS", "FP4", "HEALING_ITER"]
        announced = {**Announced(printed_settings(log[:SCANNED_BYTES])), **run.hyperparameters}
        stated = {**priors.values_of(announced, names), **space.fixed}
        try:
            return {**space.resolve(stated), **stated}
        except (FormulaError, KeyError, ValueError):  # the log lacks inputs of formulas
            return stated

    def _study_for(self, run: RunLog) -> Study:
        """The study; for a log of another benchmark, with that benchmark's metric and without published curves.

        The log's target is used if the study names none.
        """
        objective, own = self._study.objective, self._study.benchmark
        announced, target = (run.hyperparameters.get(key) for key in ("submission_benchmark", "target_accuracy"))
        changes: dict[str, object] = {}
        if isinstance(target, int | float) and "target" not in objective.model_fields_set:
            changes = {"target": target}
        if own is not None and isinstance(announced, str) and announced != own.name:
            try:
                metric = find_benchmark(announced).metrics[0]
                changes = {"benchmark": announced, "target": reaching(metric), "direction": metric.direction}
            except InputError:  # not an MLPerf benchmark: only its target is known
                changes = {"target": target} if isinstance(target, int | float) else {}
            changes |= {"curves": "own", "score": "time_to_target", "ruleset": None}
        return self._study.model_copy(update={"objective": objective.model_copy(update=changes)})

    def _reader(self, study: Study, parameters: Mapping[str, Value]) -> LogReader:
        """A reader of the study's format in the direction of the log's metric."""
        reader = self._reader_for(parameters)
        if study.rising == self._study.rising or not isinstance(reader, MllogReader):
            return reader
        return reader_of(study, MllogReader())


_ONE_SWEEP = ("submission_benchmark", "submission_org", "submission_platform")
"""Announced values that all trials of a sweep share."""

_RESULT_FILE = re.compile(r"result_\d+\.txt(?:\.gz)?$")

_ENDED = JobStatus(state=JobState.ENDED)
"""The state of a finished log's job."""


class _Player:
    """The trial of one log during its replay."""

    def __init__(self, study: Study, work: UnitOfWork, trial: Trial, attempt: Attempt, reader: LogReader) -> None:
        once = study.budget.model_copy(update={"attempts": 1})  # an existing log cannot be retried
        self._study = study.model_copy(update={"budget": once})
        self._work, self._trial, self._attempt = work, trial, attempt
        self._reader, self._scanner = reader, FailureScanner()
        self._stamped = isinstance(reader, MllogReader)
        self._train_points = 0
        self._ticks = self._looked_at = self._evals = 0
        self._verdicts: dict[str, ReplayedVerdict] = {}
        self._stopped: tuple[policy.Stop, RunLog] | None = None

    def tick(self, piece: bytes) -> None:
        """Process the log's next lines, as the driver does at a tick."""
        self._reader.feed(piece)
        self._scanner.feed(piece)
        self._ticks += 1
        if due(self._evals, self._ticks - self._looked_at):
            self._look()

    def _look(self) -> None:
        run = self._reader.run()
        self._looked_at, self._evals = self._ticks, run.printed_evals
        fresh = self._work.see_evals(self._attempt, run.evals) if self._stopped is None else run.evals
        new_train = len(run.train) != self._train_points
        self._train_points = len(run.train)
        if not (fresh or new_train) or objective_of(self._study).stop(run):
            return
        trusted = impossible_times(run, _ENDED, stamped=self._stamped) is None
        stop = pruning.judge_curve(self._study, self._work.sweep, self._trial, run) if trusted else None
        if isinstance(stop, policy.Stop) and stop.kind.value not in self._verdicts:
            self._verdicts[stop.kind.value] = ReplayedVerdict(stop.kind.value, _seconds(run), stop.sentence)
            if self._stopped is None:
                self._stopped = stop, run

    def end(self) -> ReplayedLog:
        """Conclude the trial, record it as the sweep would have, and return the outcome of the whole log."""
        if self._looked_at < self._ticks:
            self._look()
        run = self._run_that_counts()
        diagnosis = diagnose(self._scanner, state=_ENDED.state.value, run=run, unit=self._study.progress_unit)
        action = conclusion.conclude(self._study, [self._attempt], _ENDED, run, diagnosis, trial=self._trial)
        if isinstance(action, conclusion.Finish) and action.verdict in conclusion.PLAUSIBLE_VERDICTS:
            # Old logs mostly ran with other values than the study's, so they are not checked against any.
            untrue = why_untrue(self._study, self._trial, self._attempt, _ENDED, run, written={}, stamped=self._stamped)
            action = conclusion.refuse(self._study, [self._attempt], untrue) if untrue else action
        kind = _KINDS.get(action.verdict if isinstance(action, conclusion.Finish) else Verdict.FAILED)
        if kind is not None and kind not in self._verdicts:
            self._verdicts[kind] = ReplayedVerdict(kind, _seconds(run), action.sentence)
        concluded = isinstance(action, conclusion.Finish) and action.verdict is Verdict.REACHED
        objective, low, high = self._objective(run) if concluded else (None, None, None)
        stop = objective_of(self._study).stop(run)
        lost = concluded and self._stopped is not None and self._would_win(self._stopped[0], objective)
        self._remember(action, run)
        return ReplayedLog(
            run=run,
            ceiling=self._study.ceiling if self._study.rising else None,
            parameters=self._trial.parameters,
            reached=concluded or stop is not None,
            stop=stop,
            verdicts=tuple(self._verdicts.values()),
            lost=lost,
            ending=action.sentence,
            objective=objective,
            low=low,
            high=high,
        )

    def _would_win(self, stop: policy.Stop, objective: float | None) -> bool:
        """Whether stopping a run that then reached the target costs the sweep a result."""
        best = best_run(self._study, self._work.sweep)
        if stop.kind is StopKind.PRUNED or best is None or objective is None:
            return True
        return objective_of(self._study).better(objective, best.objective)

    def _run_that_counts(self) -> RunLog:
        """Of a job with several runs the first that reached the target, else the last."""
        runs = self._reader.runs() if isinstance(self._reader, MllogReader) else ()
        return next((r for r in runs if r.reached(self._study.target)), self._reader.run())

    def _remember(self, action: conclusion.Finish | conclusion.Retry, run: RunLog) -> None:
        """Finish the trial by the verdict that came first."""
        if self._stopped is not None:
            stop, run = self._stopped
            cut = Verdict.PRUNED if stop.kind is StopKind.PRUNED else Verdict.CAPPED
            action = conclusion.Finish(cut, stop.sentence)
        verdict = action.verdict if isinstance(action, conclusion.Finish) else Verdict.FAILED
        trial = self._finished(run, self._study) if verdict is Verdict.REACHED else self._trial
        self._work.put_trial(trial.finished(verdict, action.sentence, 0.0))

    def _finished(self, run: RunLog, study: Study) -> Trial:
        """The trial with the metrics of a run that reached the target."""
        stop = objective_of(study).stop(run)
        return replace(
            self._trial,
            seconds=stop.seconds if stop else None,
            samples=stop.samples if stop else None,
            metrics=conclusion.measured(study, self._trial, [self._attempt], run, 0.0),
        )

    def _objective(self, run: RunLog) -> tuple[float | None, float | None, float | None]:
        """The objective with its 90% interval; for an MLPerf score the interval of the time, scaled like the score."""
        trial = self._finished(run, self._study)
        objective = trial.metrics.objective
        if not objective_of(self._study).timed or objective is None:
            return objective, None, None
        by_time = self._study.objective.model_copy(update={"score": "time_to_target"})
        plain = self._finished(run, self._study.model_copy(update={"objective": by_time}))
        low, high = time_interval(trial)
        scale = objective / plain.objective
        return objective, min(objective, scale * low), max(objective, scale * high)


_KINDS = {Verdict.PRUNED: "pruned", Verdict.INFEASIBLE: "infeasible", Verdict.FAILED: "failed"}
"""Verdicts, other than reached and censored, with which a log can end that was not stopped."""


def _empty_book(study: Study) -> UnitOfWork:
    return UnitOfWork(StudyRecords(name=study.name, digest=study.digest, study_toml="", began_at=0.0))


def _read(reader: LogReader, log: bytes) -> RunLog:
    reader.feed(log)
    return reader.run()


def _seconds(run: RunLog) -> float:
    begin = run.run_start_ms if run.run_start_ms is not None else run.init_start_ms
    return 0.0 if begin is None or run.last_ms is None else max(0.0, (run.last_ms - begin) / 1000)
