"""Ask/tell: hand out trials that others run and take their results, for ``ask``, ``tell``, Python and MCP."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from lora_tune import store as stores
from lora_tune.base.errors import InputError, SweepBusyError
from lora_tune.base.paths import AttemptPaths
from lora_tune.cli.options import plan_of
from lora_tune.cli.steer import enqueueing, typed_values
from lora_tune.config.study import Study, find_study, load_study
from lora_tune.controller.dependencies import Proposer
from lora_tune.controller.driver import Driver
from lora_tune.controller.runtime import DrivePlan, Environment, driver, make_clock, open_sweep
from lora_tune.launchers import make_launcher, outside
from lora_tune.launchers.job_records import read_records
from lora_tune.launchers.job_runner import read_command
from lora_tune.logs.run import Eval
from lora_tune.review.screen import Quiet
from lora_tune.search.session import SearchPoint
from lora_tune.store import Lease
from lora_tune.store.leases import take_lease
from lora_tune.store.port import Request
from lora_tune.store.records import Attempt, StudyRecords, Trial, TrialState, Value

OUTSIDE = "outside"

PATIENCE_SECONDS = 20.0
"""How long ask and tell wait for the lease; another ask or tell holds it for about a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A trial for the caller to run.

    token: names this attempt in :func:`tell`. parameters, seed: of the run. argv, environment, cwd: the study's own
    command. folder: of the attempt. why: the reason of the proposal.
    """

    token: str
    trial: int
    parameters: Mapping[str, Value]
    seed: int
    argv: Sequence[str]
    environment: Mapping[str, str]
    cwd: str | None
    folder: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The reported result of a run: its whole log in the study's format, its evals so far, or why it failed.

    over: whether the run has ended.
    """

    evals: Sequence[Eval] = ()
    log: str = ""
    failed: str = ""
    over: bool = True

    @property
    def digest(self) -> str:
        """Hash that identifies equal results."""
        content = [[(e.samples, e.loss, _finite(e.seconds)) for e in self.evals], self.log, self.failed]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def result_of(evals: Any, *, log: str = "", failed: str = "", over: bool = True) -> Result:
    """A result from plain data. evals: rows of (samples, loss) or (samples, loss, seconds).

    Raises InputError for any other form.
    """
    if not isinstance(evals, Sequence) or isinstance(evals, str):
        raise InputError("evals: give a list of [samples, loss] or [samples, loss, seconds]")
    if bool(evals) + bool(log) > 1 or not (evals or log or failed):
        raise InputError("give one of evals and log, or why it failed")
    rows = []
    for row in evals:
        numbers = isinstance(row, Sequence) and not isinstance(row, str) and 2 <= len(row) <= 3
        if not numbers or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in row):
            raise InputError(f"evals: {str(row)[:60]} is neither [samples, loss] nor [samples, loss, seconds]")
        rows.append(Eval(float(row[0]), float(row[1]), float(row[2]) if len(row) == 3 else math.nan))
    if not all(math.isfinite(e.samples) for e in rows):
        raise InputError("evals: samples must be finite numbers")
    return Result(evals=tuple(rows), log=log, failed=failed, over=over)


class ProposalGate:
    """Wraps a search so that it proposes only after :meth:`open`: once, or up to the trial that answers a request."""

    def __init__(self, search: Any) -> None:
        self._search, self._open = search, False
        self._request: int | None = None

    def open(self, request: int | None) -> None:
        """Allow the next proposal; with ``request``, all proposals up to its own."""
        self._open, self._request = True, request

    def ask(self) -> SearchPoint | str:
        """A proposal of the search while open, else why not."""
        if not self._open:
            return "nothing more is asked for"
        proposal: SearchPoint | str = self._search.ask()
        if isinstance(proposal, str) or self._request in (None, proposal.request):
            self._open = False
        return proposal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._search, name)


def refuse_other_launchers(study: Study) -> None:
    """Raise InputError if the sweep itself starts the study's trials."""
    if study.site.launcher != OUTSIDE:
        raise InputError(
            f'site.launcher = "{study.site.launcher}": its trials are started by the sweep, and their logs tell; ask '
            f'and tell serve studies with site.launcher = "{OUTSIDE}"'
        )


@contextlib.contextmanager
def _driving(plan: DrivePlan, storage: str | None) -> Iterator[tuple[Driver, ProposalGate, stores.Store]]:
    """The sweep's driver for one operation. Raises SweepBusyError while another driver runs."""
    refuse_other_launchers(plan.study)
    launcher = make_launcher(plan.study, plan.paths.packs)
    clock = make_clock(plan.study, launcher)
    gates: list[ProposalGate] = []

    def gated(search: Proposer) -> Proposer:
        gates.append(ProposalGate(search))
        return gates[-1]

    environment = Environment(launcher=launcher, clock=clock, view=Quiet(), pause=clock.sleep, search=gated, fixed=True)
    store = open_sweep(plan, storage, clock.now())
    try:
        lease = _lease(store, plan.study.name)
        with driver(plan, store, lease, environment, accept_changes=False) as driving:
            yield driving, gates[-1], store
    finally:
        store.close()


def _lease(store: stores.Store, name: str) -> Lease:
    """The sweep's lease. Raises SweepBusyError if it is held longer than ``PATIENCE_SECONDS``."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return take_lease(store, name, time.time())
        except SweepBusyError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def ask(
    plan: DrivePlan, storage: str | None, values: Mapping[str, Value] | None = None, commit: str | None = None,
    clone: Trial | None = None,
) -> Offer:  # fmt: skip
    """The next trial, handed to this caller only. values: parameters to try; the search fills in the others.
    commit: of the script to run. clone: the trial whose other parameters are reused.

    Raises InputError if no trial can start now (budget spent, all slots taken, invalid point), SweepBusyError while
    another driver runs.
    """
    named = values is not None or commit or clone
    proposed = enqueueing(plan.study, values or {}, commit=commit, clone=clone) if named else None
    with _driving(plan, storage) as (driving, gate, store):
        driving.tick()
        if proposed is None and (offer := _taken(plan, driving.sweep, None)):
            driving.tick()
            return offer
        request = None if proposed is None else _requested(store, plan.study, proposed)
        gate.open(request)
        reason = driving.tick()
        offer = _taken(plan, driving.sweep, request)
        if offer is None:
            raise InputError(_nothing(plan, driving, reason, request))
        driving.tick()
        return offer


def _requested(store: stores.Store, study: Study, proposed: Request) -> int:
    """The number of the request; an equal one that still waits is reused."""
    requests = stores.Requests(store, study.name)
    sweep = store.load(study.name)
    answered = {t.request for t in sweep.trials.values()} if sweep is not None else set()
    for known in requests.all():
        waits = known.number not in answered and (known.accepted or known.answered_at is None)
        if known.kind == proposed.kind and waits and known.what == dict(proposed.what):
            return known.number
    return requests.ask(proposed).number


def _nothing(plan: DrivePlan, driving: Driver, reason: str, request: int | None) -> str:
    """Why no trial can start now, and what to do."""
    request_row = next((r for r in driving.requests if r.number == request), None)
    if request_row is not None and request_row.answered_at is not None and not request_row.accepted:
        return request_row.answer
    kept = "" if request_row is None else f"; it waits as request {request}, and the same ask takes it up later"
    open_ = [t.number for t in driving.sweep.trials.values() if t.state is not TrialState.FINISHED]
    if not reason and len(open_) >= plan.study.budget.parallel:
        taken = f"{len(open_)} of {plan.study.budget.parallel} slots are taken"
        reason = f"{taken}: tell how trial {open_[0]} ended first, or raise budget.parallel"
    return f"nothing to run now: {reason or 'the search proposes nothing'}{kept}"


def _taken(plan: DrivePlan, sweep: StudyRecords, request: int | None) -> Offer | None:
    """Claim an offered trial for the caller; with ``request``, only the one that answers it. None if there is none."""
    for trial in sorted(sweep.trials.values(), key=lambda t: t.number):
        attempts = sweep.attempts_of(trial.number)
        if trial.state is not TrialState.RUNNING or not attempts or (request not in (None, trial.request)):
            continue
        paths = AttemptPaths(plan.paths.root / attempts[-1].folder)
        if read_records(paths, attempts[-1].token).ended is None and outside.take(paths, attempts[-1].token, sweep.id):
            return _offer(trial, attempts[-1], paths)
    return None


def _offer(trial: Trial, attempt: Attempt, paths: AttemptPaths) -> Offer:
    command = read_command(paths.job)
    if isinstance(command, str):
        raise InputError(f"trial {trial.number}: {command}; ask again")
    return Offer(
        token=attempt.token, trial=trial.number, parameters=dict(trial.parameters), seed=trial.seed,
        argv=command.argv, environment=dict(command.environment), cwd=command.cwd, folder=str(paths.folder),
        why=trial.why,
    )  # fmt: skip


def tell(plan: DrivePlan, storage: str | None, token: str, result: Result) -> Trial:
    """Record a result; returns the trial with its verdict. Repeating the same result changes nothing.

    Raises InputError for an unknown token, an impossible result, or a different result of a trial that has ended;
    SweepBusyError while another driver runs.
    """
    with _driving(plan, storage) as (driving, _, _store):
        attempt = _attempt(driving.sweep, token)
        trial, paths = driving.sweep.trials[attempt.trial], AttemptPaths(plan.paths.root / attempt.folder)
        if (known := outside.ended_with(paths, token)) is not None:
            driving.tick()  # completes a tell that was killed after it recorded the end
            return _repeated_result(driving.sweep.trials[trial.number], known, result)
        claim = read_records(paths, token).claim
        if claim is None:
            raise InputError(f"trial {trial.number} was offered and nobody has taken it; ask for it first")
        text = result.log or _mllog(plan, result, claim.at, time.time())
        if result.failed:
            text += f"\nlora-tune: told that it failed: {' '.join(result.failed.split())}\n"
        outside.write_log(paths, token, driving.sweep.id, text)
        if result.over:
            outside.end(paths, token, 1 if result.failed else 0, result.digest)
        driving.tick()
        if not result.over and outside.ended_with(paths, token) is not None:
            driving.tick()  # the trial was just stopped
        return driving.sweep.trials[trial.number]


def _attempt(sweep: StudyRecords, token: str) -> Attempt:
    """The attempt of a token. Raises InputError if there is none, or a newer attempt has replaced it."""
    attempt = next((a for a in sweep.attempts.values() if a.token and a.token == token), None)
    if attempt is None:
        raise InputError(f"token {token[:32]!r} names no trial of {sweep.name}; use the one that ask gave")
    if attempt != sweep.attempts_of(attempt.trial)[-1]:
        raise InputError(f"that run of trial {attempt.trial} was given up, and another one was begun; ask again")
    return attempt


def _repeated_result(trial: Trial, known: str, result: Result) -> Trial:
    if known == result.digest:
        return trial
    if not known:
        raise InputError(f"trial {trial.number} was called off ({trial.sentence or 'stopped'}); ask for another one")
    raise InputError(f"trial {trial.number} was told already, with another result; the first one stays")


def _mllog(plan: DrivePlan, result: Result, began: float, now: float) -> str:
    """The evals as MLLOG lines. began: epoch second at which the run was claimed.

    Raises InputError for evals that are impossible for a run of this age, or if the study's logs have another format.
    """
    if plan.study.log_kind != "mllog" and result.evals:
        raise InputError(f'workload.log.kind = "{plan.study.log_kind}": give the log itself in that form, not evals')
    age, last = now - began, -math.inf
    lines = [_line(began, "run_start", None, "INTERVAL_START")]
    for number, e in enumerate(result.evals, 1):
        seconds = e.seconds if math.isfinite(e.seconds) else age * number / len(result.evals)
        if not 0 <= seconds <= age + 0.5:
            raise InputError(f"an eval {seconds:.1f} s after its run began, {age:.1f} s ago, cannot be; tell the truth")
        if e.samples <= last:
            raise InputError(f"samples must grow: {e.samples:g} comes after {last:g}")
        last = e.samples
        lines.append(_line(began + seconds, "eval_accuracy", e.loss, samples_count=e.samples))
    if result.over and not result.failed:
        lines.append(_line(began + age, "run_stop", None, "INTERVAL_END"))
    return "\n".join(lines) + "\n"


def _line(at: float, key: str, value: float | None, kind: str = "POINT_IN_TIME", **metadata: float) -> str:
    event = {"namespace": "", "time_ms": round(1000 * at), "event_type": kind, "key": key, "value": value,
             "metadata": {"file": "", "lineno": 0, **metadata}}  # fmt: skip
    return f":::MLLOG {json.dumps(event)}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def run_ask(
    study_name: str, storage: str | None, output: Path | None, values: tuple[str, ...], commit: str | None
) -> None:
    """Run ``ask``; options: cli/commands.py."""
    file = find_study(study_name)
    plan = plan_of(file, load_study(file), {}, output)
    click.echo(json.dumps(asdict(ask(plan, storage, typed_values(plan.study, values) or None, commit))))


def run_tell(
    study_name: str, storage: str | None, output: Path | None, token: str, evals: str | None, log: Path | None,
    failed: str, running: bool,
) -> None:  # fmt: skip
    """Run ``tell``; options: cli/commands.py."""
    file = find_study(study_name)
    plan = plan_of(file, load_study(file), {}, output)
    text = log.read_text(encoding="utf-8", errors="replace") if log else ""
    result = result_of(_parsed(evals), log=text, failed=failed, over=not running)
    click.echo(json.dumps(as_json(tell(plan, storage, token, result))))


def _parsed(text: str | None) -> Any:
    try:
        return [] if text is None else json.loads(text)
    except ValueError as error:
        raise InputError(f"--evals: not JSON ({error}); write [[samples, loss], ...]") from error


def as_json(trial: Trial) -> dict[str, Any]:
    """The trial's state and verdict as plain data. go_on: whether its run should continue."""
    return {
        "trial": trial.number,
        "state": trial.state.value,
        "verdict": trial.verdict.value if trial.verdict else None,
        "sentence": trial.sentence,
        "objective": trial.metrics.objective,
        "go_on": trial.state is TrialState.RUNNING,
    }
