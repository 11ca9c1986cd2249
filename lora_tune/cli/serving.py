"""The server: all active studies of a database, a thread each, for weeks."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_tune import store as stores
from lora_tune.base import errors
from lora_tune.base.paths import SweepPaths
from lora_tune.base.registry import fault
from lora_tune.cli import export
from lora_tune.cli.metrics import Metrics
from lora_tune.cli.options import people_if_known
from lora_tune.config.study import Study, parse_study, with_secrets_of
from lora_tune.controller.base_watch import with_base
from lora_tune.controller.dependencies import Discards, RealClock
from lora_tune.controller.driver import Driver, Proposer
from lora_tune.controller.quota import NodeQuota, demand
from lora_tune.controller.runtime import DrivePlan, Environment, driver, make_clock
from lora_tune.controller.signatures import SigningKey
from lora_tune.controller.steering import Enqueues
from lora_tune.launchers import make_launcher
from lora_tune.logs.run import Eval
from lora_tune.store import Changes, Lease, Registered
from lora_tune.store.leases import Patience, try_lease
from lora_tune.store.records import StudyRecords, Trial, Value
from lora_tune.workloads import load as load_workload

RETRY_SECONDS = 60.0
"""After an error a study is left alone for this long."""

Say = Callable[[str], None]


class _Stopped(errors.LoraTuneError):
    """The server ends while a study is being prepared."""


class _Clock(RealClock):
    """This machine's clock; a sleep ends when the server does."""

    def __init__(self, stop: threading.Event) -> None:
        super().__init__()
        self._stop = stop

    def sleep(self, seconds: float) -> None:
        self._stop.wait(seconds)


class _Gated:
    """A search that proposes only while the cap leaves room for the study. denied: the last answer was no."""

    def __init__(self, inner: Proposer, gate: NodeQuota, name: str) -> None:
        self._inner, self._gate, self._name = inner, gate, name
        self.denied = False

    def ask(self) -> Any:
        self.denied = not self._gate.admit(self._name)
        if self.denied:
            return f"waits for nodes: {self._gate.cap} are shared by all studies"
        return self._inner.ask()

    def report(self, number: int, evals: Sequence[Eval]) -> None:
        self._inner.report(number, evals)

    def enqueue(self, values: Mapping[str, Value], why: str, request: int) -> None:
        """What a person asks for waits for nodes as any other proposal does."""
        if not isinstance(self._inner, Enqueues):
            raise errors.InputError("this search takes no proposals")
        self._inner.enqueue(values, why, request)

    def discard(self, number: int) -> None:
        if isinstance(self._inner, Discards):
            self._inner.discard(number)

    def tell(self, record: Trial) -> None:
        self._inner.tell(record)


class _View:
    """Tells the gate what the study uses, and prints its lines under its name."""

    def __init__(self, name: str, gate: NodeQuota, say: Say) -> None:
        self._name, self._gate, self._say = name, gate, say

    def update(self, study: Study, sweep: StudyRecords, now: float) -> None:
        self._gate.note(demand(study, sweep, now))

    def line(self, text: str) -> None:
        self._say(f"{self._name}: {text}")


class Server:
    """Drives the active studies of one database, a thread each. :meth:`stop` may be called from a signal handler."""

    def __init__(
        self, store: stores.Store, gate: NodeQuota, metrics: Metrics, say: Say, *, before: str = "",
        key: SigningKey | None = None,
    ) -> None:  # fmt: skip
        """before: the owner that had the server's lease last, and is gone: so are its studies' drivers.

        key: only studies that are signed with it are driven.
        """
        self._before, self._key = before, key
        self._store, self._gate, self._metrics, self._say = store, gate, metrics, say
        self._stop = threading.Event()
        self._threads: dict[str, threading.Thread] = {}
        self._drivers: dict[str, Driver] = {}
        self._not_before: dict[str, float] = {}
        self._patience = Patience()
        self._said: dict[str, str] = {}

    def stop(self) -> None:
        """End after the ticks in progress; jobs go on."""
        self._stop.set()
        for driving in list(self._drivers.values()):
            driving.interrupt = True

    def run(self, lease: Lease, *, until_done: bool) -> None:
        """Drive until :meth:`stop`, or with ``until_done`` until no study is active.

        Raises SweepBusyError when another server has taken over.
        """
        try:
            while not self._stop.is_set():
                try:
                    self._store.save(lease, Changes(), time.time())
                    active = [row for row in self._store.registered() if not row.ended]
                    self._said.pop("", None)
                except errors.StoreError as error:
                    self._patience = Patience()
                    self._say_once("", f"{error}; the studies' jobs are still watched")
                    self._stop.wait(1.0)
                    continue
                for row in active:
                    self._take_up(row)
                self._threads = {name: thread for name, thread in self._threads.items() if thread.is_alive()}
                if until_done and not active and not self._threads:
                    return
                self._stop.wait(1.0)
        finally:
            self.stop()
            for thread in list(self._threads.values()):
                thread.join()

    def _take_up(self, row: Registered) -> None:
        """Start a thread for the study, unless it has one, failed a moment ago, or is driven elsewhere."""
        if row.name in self._threads or time.monotonic() < self._not_before.get(row.name, 0.0):
            return
        self._not_before.pop(row.name, None)
        try:
            plan = plan_of(row, self._gate.cap, self._key)
            lease = try_lease(self._store, row.name, self._patience, time.time(), self._before)
            if lease is None:
                self._say_once(row.name, f"{row.name}: standby, another driver is at work")
                return
            known = self._store.load(row.name)
            assert known is not None
            store = stores.Store(self._store.url)
        except Exception as error:  # noqa: BLE001 - a mistake in one study must not end the others
            self._leave_alone(row.name, error)
            return
        self._gate.note(demand(plan.study, known, time.time()))
        thread = threading.Thread(target=self._drive, args=(plan, lease, store), name=row.name)
        self._threads[row.name] = thread
        thread.start()

    def _drive(self, plan: DrivePlan, lease: Lease, store: stores.Store) -> None:
        """One study until it is over, or the server ends."""
        name = plan.study.name
        self._metrics.driven(name, driving=True)
        self._say_once(name, f"{name}: driving")
        self._not_before[name] = time.monotonic() + RETRY_SECONDS  # unless it ends well
        try:
            outcome = self._drive_through(plan, lease, store)
            self._not_before.pop(name)
            if outcome:
                self._say(f"{name}: {outcome}")
        except Exception as error:  # noqa: BLE001 - a mistake in one study must not end the others
            self._leave_alone(name, error)
        finally:
            self._drivers.pop(name, None)
            self._gate.forget(name)
            self._metrics.driven(name, driving=False)
            store.close()

    def _drive_through(self, plan: DrivePlan, lease: Lease, store: stores.Store) -> str:
        """Why the study is over; "" when the server ends before it."""
        gated: list[_Gated] = []

        def search(session: Proposer) -> Proposer:
            gated.append(_Gated(session, self._gate, plan.study.name))
            return gated[0]

        launcher = make_launcher(plan.study, plan.paths.packs)
        keeps_time = plan.launcher_kind.keeps_time
        environment = Environment(
            launcher=launcher,
            clock=make_clock(plan.study, launcher) if keeps_time else _Clock(self._stop),
            view=_View(plan.study.name, self._gate, self._say),
            pause=self._pause,
            search=search,
        )
        with driver(plan, store, lease, self._metrics.measured(environment), accept_changes=False) as driving:
            self._drivers[plan.study.name] = driving
            driving.interrupt = self._stop.is_set()
            while True:
                outcome = driving.run()
                if outcome.interrupted:
                    return ""
                if not gated[0].denied:
                    break
                if self._stop.wait(plan.period):
                    return ""
            store.finish(lease, outcome.reason)
        from lora_tune.cli import report

        study = with_base(plan.study, driving.sweep)
        export.export_best(study, driving.sweep, plan.workload, plan.paths.best)
        report.write_report(study, driving.sweep, plan.paths.report, people_if_known(store, study.name))
        return f"{outcome.reason}; report {plan.paths.report}"

    def _leave_alone(self, name: str, error: Exception) -> None:
        self._not_before[name] = time.monotonic() + RETRY_SECONDS
        self._say_once(name, f"{name}: {_told(error)}")

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _Stopped("the server is stopping; the preparation continues")

    def _say_once(self, name: str, text: str) -> None:
        if self._said.get(name) != text:
            self._said[name] = text
            self._say(text)


def _told(error: Exception) -> str:
    """An error in one line; with its traceback where it is a mistake of ours."""
    if isinstance(error, errors.LoraTuneError):
        return str(error)
    if outside := fault(error):
        return f"{' '.join(outside.split())}; fix it and start the server again"
    return str(error) if isinstance(error, OSError) else "".join(traceback.format_exception(error))


def plan_of(row: Registered, cap: int | None, key: SigningKey | None = None) -> DrivePlan:
    """What the database says of a study as a plan. Raises LoraTuneError where it cannot be driven from here.

    key: drive only what is signed with it.
    """
    if key is not None:
        key.check(row)
    if row.cwd != Path.cwd():
        raise errors.SetupError(f"was registered in {row.cwd}, and its paths start there; run a server there")
    from_file = with_secrets_of(parse_study(row.study_toml, row.file), row.file).model_copy(update={"name": row.name})
    study = from_file.with_options(row.options)
    if cap is not None and study.search_space.most_nodes > cap:
        raise errors.InputError(
            f"its trials need up to {study.search_space.most_nodes} nodes, the cap is {cap}; raise --nodes"
        )
    return DrivePlan(
        file=row.file,
        text=row.study_toml,
        study=study,
        from_file=from_file,
        options=row.options,
        paths=SweepPaths(row.folder),
        workload=load_workload(study, row.file),
        key=key,
    )
