"""Builds and runs a sweep's driver under its lease: the work of ``sweep`` for one study."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from lora_tune import store as stores
from lora_tune.base import errors
from lora_tune.base.errors import LauncherError, LoraTuneError, RefusedError, SetupError
from lora_tune.base.files import read_json, text_of, whole_of, write_json, write_text
from lora_tune.base.host import commit_of
from lora_tune.base.paths import SweepPaths
from lora_tune.base.sbatch_options import sbatch_options
from lora_tune.config.study import Study
from lora_tune.controller import node_faults
from lora_tune.controller.changed_study import changes_since, refuse_departed, remedy, unacceptable, with_base
from lora_tune.controller.conclusion import RETRIED
from lora_tune.controller.dependencies import Projects
from lora_tune.controller.driver import Clock, Dependencies, Driver, Proposer, RealClock, View
from lora_tune.controller.last_run import LastRun, Proposes
from lora_tune.controller.submissions import UNKNOWN_SECONDS
from lora_tune.controller.sweep_folder import FencedStore, FolderLock, owned, refuse_foreign
from lora_tune.controller.sweep_records import EventFile
from lora_tune.launchers.base import JobState, JobStatus, Launcher, LauncherKind, Ticket, launcher_kind
from lora_tune.launchers.slurm.client import functions_of, handed_on, withheld_secrets
from lora_tune.logs.failures import Diagnosis, diagnose
from lora_tune.search.objectives import objectives_of
from lora_tune.store import Changes, Lease, Registered, open_store
from lora_tune.store.leases import keeping
from lora_tune.store.records import TrialState
from lora_tune.workloads.base import (
    Job,
    Workload,
    some_proposal,
)
from lora_tune.workloads.script_needs import (
    environment_options,
    environment_warnings,
    function_warnings,
    job_header,
    path_warnings,
    refusals,
)

# A sweep's preparation, which precedes its first trial: run once, recorded, and resumed after an interruption.
#
# The record (``prepare/preparation.json``) is written before the job is submitted, as a trial's is. A preparation that
# succeeded is not repeated while its command is the same.


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """How to create and monitor a preparation.

    make: the job to run in a folder. tick: called between two polls; waits, and renews the sweep's lease.
    """

    make: Callable[[Path], Job | None]
    launcher: Launcher
    now: Callable[[], float]
    tick: Callable[[], None]
    echo: Callable[[str], None]
    attempts: int = 3


def prepare(paths: SweepPaths, preparation: Preparation) -> None:
    """Run the sweep's preparation unless it is done. Raises SetupError with a remedy if it fails."""
    first = preparation.make(paths.preparation(0).folder)
    if first is None:
        return
    record = _record(paths, first)
    if record["state"] == "done":
        return
    journal = EventFile(paths.driver_log)
    last = record["attempt"] + preparation.attempts
    while record["state"] != "done":
        if record["state"] == "failed":
            record = {**record, "attempt": record["attempt"] + 1, "state": "running"}
        _write(paths, record)
        job = preparation.make(paths.preparation(record["attempt"]).folder)
        assert job is not None
        status = _run(job, preparation)
        diagnosis = _diagnosis(job, status)
        seconds = (status.ended_at or 0.0) - (status.started_at or status.ended_at or 0.0)
        record |= {
            "state": "failed" if diagnosis.kind else "done",
            "job_id": status.job_id,
            "started_at": status.started_at,
            "ended_at": status.ended_at,
            "node_hours": max(0.0, seconds) * job.resources.nodes / 3600,
        }
        _write(paths, record)
        journal.write(
            preparation.now(), "prepared" if not diagnosis.kind else "preparation failed", **record, line=diagnosis.line
        )
        if diagnosis.kind and (diagnosis.kind not in RETRIED or record["attempt"] + 1 >= last):
            raise SetupError(
                f"the preparation failed, so no trial was started: {diagnosis.line}; {diagnosis.remedy}; "
                f"its log is {job.log}; fix it and rerun the same command"
            )
        what = f"again: {diagnosis.line}" if diagnosis.kind else f"done in {seconds:.0f} s, job {status.job_id}"
        preparation.echo(f"preparation: {what}")


def _run(job: Job, preparation: Preparation) -> JobStatus:
    """Submit the job, or adopt the one that an earlier command submitted, and wait for its end.

    Raises RefusedError if the scheduler refuses it permanently, or for too long.
    """
    ticket = Ticket(name=job.name, folder=job.folder)
    status = JobStatus(state=JobState.LOST)
    submitted = printed = ""
    refused_at = math.inf
    job.folder.mkdir(parents=True, exist_ok=True)
    while status.state.alive or status.state is JobState.LOST:
        try:
            status = preparation.launcher.poll([ticket])[job.name]
            if status.state is JobState.LOST:
                if submitted:
                    return status  # it was submitted, and vanished
                submitted = preparation.launcher.submit(job)
                ticket = Ticket(name=job.name, folder=job.folder, job_id=submitted, submitted_at=preparation.now())
                preparation.echo(f"preparation: {job.name} is job {submitted}")
        except LauncherError as error:
            if isinstance(error, RefusedError):
                refused_at = min(refused_at, preparation.now())
                if error.permanent or preparation.now() - refused_at >= UNKNOWN_SECONDS:
                    raise
            if str(error) != printed:
                preparation.echo(str(error))
            printed = str(error)
        preparation.tick()
    return status


def _diagnosis(job: Job, status: JobStatus) -> Diagnosis:
    """Success depends on the exit code alone, because a preparation measures nothing."""
    if status.state is JobState.ENDED and not status.exit_code:
        return Diagnosis()
    log = job.log.read_bytes() if job.log.exists() else b""
    return diagnose(log, state=status.state.value, exit_code=status.exit_code, reason=status.reason)


def _record(paths: SweepPaths, job: Job) -> dict[str, Any]:
    """The record of this preparation; a new one if there is none, or the command differs."""
    command = json.dumps([job.argv, sorted(job.environment.items()), str(job.cwd), job.resources.nodes])
    key = hashlib.sha256(command.encode()).hexdigest()[:12]
    record = read_json(paths.prepared).content or {}
    attempt = whole_of(record, "attempt")
    if attempt is None or attempt < 0:
        return {"key": key, "attempt": _last_attempt(paths) + 1, "state": "running"}
    if text_of(record, "key") != key or text_of(record, "state") not in ("running", "done", "failed"):
        return {"key": key, "attempt": attempt + 1, "state": "running"}
    return {**record, "attempt": attempt}


def _last_attempt(paths: SweepPaths) -> int:
    """The number of the last attempt with a folder, -1 without any, if the record is missing or damaged."""
    names = (folder.name.rpartition("-")[2] for folder in paths.prepared.parent.glob("attempt-*"))
    return max((int(number) for number in names if number.isdecimal()), default=-1)


def _write(paths: SweepPaths, record: dict[str, Any]) -> None:
    paths.prepared.parent.mkdir(parents=True, exist_ok=True)
    write_json(paths.prepared, record)


# Checks before any trial of a sweep runs.


def preflight_warnings(workload: Workload, study: Study, paths: SweepPaths) -> Sequence[str]:
    """A sentence for each thing that trials need and may not find.

    Raises SetupError for certain problems, and for options of ``sbatch`` under which a job would not run its trial.
    """
    checked = workload.check()
    try:
        job = workload.job(some_proposal(study), paths.attempt(0, 0).folder)
        before = workload.preparation(paths.preparation(0).folder)
    except LoraTuneError:  # caused by these values; a trial's own problems are reported when it is created
        return checked
    for each in (job, *([before] if before else [])):
        for sentence in option_refusals(each, study):
            raise SetupError(f"study {study.name}: {sentence}")
    return (*checked, *path_warnings(job), *_shell_warnings(job, study, checked))


def _shell_warnings(job: Job, study: Study, checked: Sequence[str]) -> list[str]:
    """What a job's scripts find in the shell that starts the sweep, but not in a job. checked: earlier warnings."""
    if not launcher_kind(study.site).slurm:
        return []
    inherited = handed_on(os.environ)
    known = {*inherited, *job.environment, *job.secrets, *study.site.step_variables()}
    needs = [d for d in environment_warnings(job, known, os.environ) if not any(d.split(",")[0] in s for s in checked)]
    held = [name for name in withheld_secrets(os.environ) if name not in job.secrets and name not in job.environment]
    secrets = [
        f"{name} of this shell reaches no trial, since it is a secret; "
        f'if they need it, write {name} = {{ env = "{name}" }} in [site.environment]'
        for name in held
    ]
    return [*function_warnings(job, functions_of(inherited)), *needs, *secrets]


def option_refusals(job: Job, study: Study) -> list[str]:
    """A sentence for each option of its script or site under which a job would not run its trial."""
    if not launcher_kind(study.site).slurm:
        return []
    tokens = (study.workload.model_extra or {}).get("argv", ())
    by_environment = {
        name for name in study.search_space.resolve(study.search_space.corner()) if name in job.environment
    }
    unnamed = {name for name in by_environment if not any(f"{{{name}}}" in token for token in tokens)}
    return refusals(
        job_header(job),
        sbatch_options(study.site.sbatch_args),
        script=Path(job.argv[0]).name if job.script else "",
        needed={*(unnamed if job.script else ()), *job.secrets},
        nodes=job.resources.nodes,
        minutes=job.resources.minutes,
        environment=environment_options({**study.site.step_variables(), **job.environment}),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrivePlan:
    """A study to run. from_file: the study in ``file``, whose content is ``text``.

    study: the same with the command line's ``options``, sections of the study, merged over it.
    """

    file: Path
    text: str
    study: Study
    from_file: Study
    options: Mapping[str, Mapping[str, Any]]
    paths: SweepPaths
    workload: Workload

    def registration(self, text: str) -> Registered:
        """Its row in the database. text: of the study, as stored there."""
        return Registered(
            name=self.study.name,
            study_toml=text,
            cwd=Path.cwd(),
            file=self.file.resolve(),
            folder=self.paths.root,
            options=self.options,
        )

    @property
    def launcher_kind(self) -> LauncherKind:
        """The launcher kind of the study's site, which determines the driver's period."""
        return launcher_kind(self.study.site)

    @property
    def period(self) -> float:
        """Seconds between two ticks."""
        return self.launcher_kind.period


def make_clock(study: Study, launcher: Launcher) -> Clock:
    """This machine's clock, or the launcher's virtual clock for simulated jobs."""
    return cast(Clock, launcher) if launcher_kind(study.site).keeps_time else RealClock()


def open_sweep(plan: DrivePlan, storage: str | None, now: float) -> stores.Store:
    """Create the sweep's folder and its row in the database, after checking that its trials can run.

    Raises ForeignFolderError if the two do not belong together; nothing is written then.
    """
    root, study = plan.paths.root, plan.study
    preflight_warnings(plan.workload, study, plan.paths)
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not os.access(root, os.W_OK):
            raise PermissionError(13, "Permission denied", str(root))
    except OSError as error:
        raise errors.SetupError(
            f"{error.filename}: {error.strerror}: sweeps cannot be written here; use --output FOLDER"
        ) from error
    if not storage and not plan.paths.database.exists():
        with _looking_twice(plan.paths.database.exists):
            refuse_foreign(plan.paths, None, stores.safe_url(stores.sqlite_url(plan.paths.database)))
    store = open_store(plan.paths, storage)
    known = store.load(study.name)
    with _looking_twice(lambda: known is None and (store.load(study.name) is not None)):
        refuse_foreign(plan.paths, known, stores.safe_url(store.url))
    store.begin(study.name, plan.from_file.digest, plan.text, now)
    return store


@contextlib.contextmanager
def _looking_twice(begun_since: Callable[[], bool]) -> Iterator[None]:
    """Ignore ForeignFolderError if the records appear meanwhile: a concurrent start writes the records first, and then
    the folder's mark. The lease and the folder's lock then decide between the two."""
    try:
        yield
    except errors.ForeignFolderError:
        if not begun_since():
            raise


def record_study(
    plan: DrivePlan, store: stores.Store, lease: Lease, *, accept_changes: bool, fixed: bool = False
) -> None:
    """Store the plan as the sweep's; refuses a changed study or base config, unless ``accept_changes``.

    fixed: the user has fixed what made trials fail; while nothing was measured, the fix may be in the base config.
    """
    sweep = store.load(plan.study.name)
    assert sweep is not None, "the sweep's row is made before its lease"
    kept = sweep.study_toml
    if changes := changes_since(sweep, plan.file, plan.from_file):
        if why := unacceptable(changes, sweep):
            raise errors.StudyError(
                plan.file, "", f"changed since this sweep began: {why}; undo that, or use another --output"
            )
        if not accept_changes:
            raise errors.StudyError(
                plan.file,
                "",
                f"changed since this sweep began ({'; '.join(changes)}); {remedy(changes, plan.from_file)}",
            )
        store.accept_study(lease, plan.from_file.digest, plan.text)
        kept = plan.text
    if not accept_changes and not (fixed and node_faults.nothing_measured(plan.study, sweep)):
        refuse_departed(sweep, plan.workload)
    store.place(lease, plan.registration(kept))
    write_text(plan.paths.study, plan.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What differs between callers. pause: waits between polls of the preparation; may raise to give up. search: wraps
    the session that the driver asks. fixed: started by a user who was told what to fix after trials failed."""

    launcher: Launcher
    clock: Clock
    view: View
    pause: Callable[[float], None]
    search: Callable[[Proposer], Proposer] = lambda session: session
    fixed: bool = False


@contextlib.contextmanager
def driver(
    plan: DrivePlan, store: stores.Store, lease: Lease, environment: Environment, *, accept_changes: bool
) -> Iterator[Driver]:
    """The sweep's driver, after restoring unsaved records of an earlier one and running the preparation.

    The lease is renewed meanwhile and released at the end.
    """
    from lora_tune.search.optuna_tables import OptunaTables

    with release_at_exit(store, lease), locked_folder(plan, store, lease) as lock:
        record_study(plan, store, lease, accept_changes=accept_changes, fixed=environment.fixed)
        if (sweep := store.load(plan.study.name)) is not None:
            anew = environment.fixed and node_faults.nothing_measured(plan.study, sweep)
            unread = plan.workload.unread_switches()
            plan = replace(plan, study=with_base(plan.study, sweep, plan.workload.start(), unread, anew=anew))
        requests = stores.Requests(store, plan.study.name, lease)

        def search() -> Proposer:
            return LastRun(_session(plan, store), lambda: driving.study, lambda: driving.sweep, environment.clock.now)

        tables = OptunaTables(plan.study, store, lease, meaning(plan.study, plan.file), requests)
        with at_work(plan, store, lease, environment, search, plan.paths, lock, requests, tables) as driving:
            yield driving


def meaning(study: Study, file: Path) -> dict[str, Any]:
    """Metadata of the sweep for users of Optuna's tables alone. commit: of the study file's folder."""
    objectives = objectives_of(study)
    return {
        "lora_tune:metric_names": [objective.name for objective in objectives],
        "lora_tune:unit": [objective.unit or ("s" if objective.timed else "") for objective in objectives],
        "lora_tune:target": study.objective.target if objectives[0].has_target else None,
        "lora_tune:study_file": str(file),
        "lora_tune:study_hash": study.digest,
        "lora_tune:commit": commit_of(file.resolve().parent),
    }


@contextlib.contextmanager
def locked_folder(plan: DrivePlan, store: stores.Store, lease: Lease) -> Iterator[FolderLock]:
    """Lock the plan's folder for this driver; renews the lease while waiting for an earlier owner.

    Raises SweepBusyError, ForeignFolderError.
    """

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        store.save(lease, Changes(), time.time())

    sweep = store.load(plan.study.name)
    assert sweep is not None, "the sweep's row is made before its lease"
    with owned(plan.paths, sweep, stores.safe_url(store.url), sleep) as lock:
        yield lock


@contextlib.contextmanager
def release_at_exit(store: stores.Store, lease: Lease) -> Iterator[None]:
    """Release the lease at the end of the block."""
    try:
        yield
    finally:
        with contextlib.suppress(errors.StoreError):  # an unreleased lease expires
            store.release(lease)


@contextlib.contextmanager
def noting(count: stores.SaveCount) -> Iterator[None]:
    """Write the count of saves to the folder at the end of the block, even after an exception."""
    try:
        yield
    finally:
        count.note()


@contextlib.contextmanager
def at_work(
    plan: DrivePlan,
    store: stores.Store,
    lease: Lease,
    environment: Environment,
    search: Callable[[], Proposer],
    prepared: SweepPaths,
    lock: FolderLock,
    requests: stores.Requests | None = None,
    projection: Projects | None = None,
) -> Iterator[Driver]:
    """A driver for the proposals of ``search``, under a lease that it renews, in the folder of ``lock``.

    prepared: the folder of the preparation, which runs if necessary. requests: users' requests to the sweep.
    projection: publishes the records to other programs.
    """
    clock = environment.clock
    count = stores.SaveCount(store, plan.study.name, plan.paths.saved)
    count.refuse_older()
    buffered = stores.BufferedStore(store, plan.paths.unsaved)
    if done := buffered.recover(lease, clock.now()):
        environment.view.line(done)
    records = FencedStore(buffered, lock)
    if environment.fixed:
        retry_after_fix(plan, records, lease, clock.now(), environment.view.line)
    with noting(count), keeping(buffered, lease, clock.now, count.note, lock.touch):
        dependencies = Dependencies(
            workload=plan.workload,
            launcher=environment.launcher,
            store=records,
            session=environment.search(search()),
            clock=clock,
            view=environment.view,
            requests=requests,
            projection=projection,
        )
        for warning in preflight_warnings(plan.workload, plan.study, plan.paths):
            environment.view.line(warning)
        _prepare_once(plan, dependencies, lease, environment.pause, prepared)
        grace = plan.launcher_kind.submit_grace_seconds
        fixed_at = clock.now() if environment.fixed else -math.inf
        with plan.workload.beside(plan.paths.root):
            yield Driver(plan.study, plan.paths, dependencies, lease, period=plan.period, submit_grace_seconds=grace,
                         fixed_at=fixed_at)  # fmt: skip


def retry_after_fix(
    plan: DrivePlan, records: stores.Store | FencedStore, lease: Lease, now: float, echo: Callable[[str], None]
) -> None:
    """Reset trials that failed in the set-up to waiting; a search created after this does not see their failures."""
    sweep = records.load(plan.study.name)
    assert sweep is not None, "the sweep's row is made before its driver"
    retries = node_faults.retry_after_fix(plan.study, sweep, plan.workload.start(), now)
    if not retries:
        return
    records.save(lease, retries, now)
    if numbers := [str(trial.number) for trial in retries.trials if trial.state is TrialState.WAITING]:
        which = f"trial {numbers[0]}" if len(numbers) == 1 else f"trials {', '.join(numbers)}"
        echo(f"run again under the same number, after a fault of the set-up or with more budget: {which}")


def _session(plan: DrivePlan, store: stores.Store) -> Proposes:
    """The sweep's search, restored from its records."""
    from lora_tune.search import priors
    from lora_tune.search.samplers import make_sampler, start_of
    from lora_tune.search.session import Session

    study, known = plan.study, priors.live(plan.paths.priors, plan.study.target)
    records = store.load(study.name)
    begun, baseline = len(records.trials) if records else 0, plan.workload.start()
    first = None if baseline is None else baseline.tuned
    point = start_of(records) if records is not None and begun else first
    sampler = make_sampler(study, known, begun=begun, start=point)
    return Session(study, records, sampler, baseline)


def _prepare_once(
    plan: DrivePlan, dependencies: Dependencies, lease: Lease, pause: Callable[[float], None], prepared: SweepPaths
) -> None:
    """Run the workload's preparation before the first trial."""

    def tick() -> None:
        pause(plan.period)
        with contextlib.suppress(errors.StoreError):  # the preparation continues during a database outage
            dependencies.store.save(lease, Changes(), dependencies.clock.now())

    how = Preparation(
        make=dependencies.workload.preparation,
        launcher=dependencies.launcher,
        now=dependencies.clock.now,
        tick=tick,
        echo=dependencies.view.line,
        attempts=plan.study.budget.attempts,
    )
    prepare(prepared, how)
