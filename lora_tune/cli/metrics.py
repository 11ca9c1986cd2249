"""Prometheus metrics of a sweep, an option of ``sweep``; by default on 127.0.0.1."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lora_tune.base.errors import InputError, SetupError
from lora_tune.base.host import is_loopback
from lora_tune.cli.web_server import SHORTEST_TOKEN, Application, listen, with_bearer
from lora_tune.config.study import Study
from lora_tune.controller.driver import Clock, View
from lora_tune.controller.runtime import Environment
from lora_tune.launchers.base import JobState
from lora_tune.search.recommendation import best_run
from lora_tune.store.records import StudyRecords, TrialState

TOKEN_VARIABLE = "LORA_TUNE_METRICS_TOKEN"
"""If set, a scrape must send it as a bearer token."""

LOOK_SECONDS = 2.0
"""Minimum seconds between two updates; Prometheus scrapes every 15 s or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepGauges:
    """Measurements of one sweep at a driver's tick. Times are epoch seconds, None if there is none.

    states: trials by verdict, or by job state while open. queue_since: submission time of the job queued longest.
    queue_wait: seconds in the queue of the job that started last.
    """

    name: str
    states: Mapping[str, int]
    queue_since: float | None
    queue_wait: float | None
    node_hours: float
    price: float | None
    best: float | None
    last_eval_at: float | None = None
    tick_seconds: float | None = None


def gauges_of(study: Study, sweep: StudyRecords, now: float) -> SweepGauges:
    """The sweep's gauges at ``now``, without last_eval_at and tick_seconds, which the view adds."""
    states: Counter[str] = Counter()
    queued: list[float] = []
    started: list[tuple[float, float]] = []
    for trial in sweep.trials.values():
        attempts = sweep.attempts_of(trial.number)
        newest = attempts[-1] if attempts else None
        open_ = trial.state is not TrialState.FINISHED
        states[str(trial.verdict) if not open_ else newest.state if newest else str(trial.state)] += 1
        if newest is None:
            continue
        since = newest.submitted_at or newest.intended_at
        if open_ and newest.state == JobState.QUEUED.value:
            queued.append(since)
        if newest.started_at is not None:
            started.append((newest.started_at, max(0.0, newest.started_at - since)))
    best = best_run(study, sweep)
    return SweepGauges(
        name=study.name,
        states=states,
        queue_since=min(queued, default=None),
        queue_wait=max(started)[1] if started else None,
        node_hours=sweep.node_hours(now),
        price=study.budget.price_per_node_hour,
        best=None if best is None else best.objective,
    )


class Metrics:
    """Prometheus collector of the sweep that this process drives."""

    def __init__(self) -> None:
        self.newest: SweepGauges | None = None

    def serve(self, where: str, echo: Callable[[str], object] | None = None) -> Metrics:
        """Serve /metrics at ``[HOST:]PORT`` in a thread. echo: prints the address.

        Raises InputError for another form, SetupError if the port is taken or prometheus_client is missing.
        """
        host, port = address(where)
        try:
            from prometheus_client import make_wsgi_app
            from prometheus_client.registry import CollectorRegistry
        except ModuleNotFoundError as error:
            raise SetupError(f"{error}; install it with: pip install 'lora-tune[metrics]'") from error
        registry = CollectorRegistry()
        registry.register(self)
        answers: Application = make_wsgi_app(registry)
        token = os.environ.pop(TOKEN_VARIABLE, "")  # not inherited by trials
        if token and len(token) < SHORTEST_TOKEN:
            raise InputError(f"{TOKEN_VARIABLE} has less than {SHORTEST_TOKEN} characters; take more")
        server = listen(with_bearer(answers, token) if token else answers, host, port)
        threading.Thread(target=server.serve_forever, daemon=True, name="metrics").start()
        if echo is not None:
            echo(f"metrics  http://{host}:{server.server_port}/metrics")
            if not is_loopback(host) and not token:
                echo(
                    f"warning: anyone who can reach {host} can read these metrics, unencrypted; leave them on "
                    "127.0.0.1 and put a web server that asks for passwords in front (docs/service.md)"
                )
        return self

    def measured(self, environment: Environment) -> Environment:
        """The environment, instrumented."""
        ticks = _Ticks(environment.clock)
        return replace(environment, clock=ticks, view=_CountedView(environment.view, self, ticks))

    def collect(self) -> Iterator[Any]:
        """Metric families for prometheus_client; called at each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        gauges, now = self.newest, time.time()
        trials = GaugeMetricFamily("lora_tune_trials", "trials by state", labels=["study", "state"])
        if gauges is not None:
            for state, count in gauges.states.items():
                trials.add_metric([gauges.name, state], count)
        yield trials
        for kind, key, description, value in _MEASURES:
            family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(
                f"lora_tune_{key}", description, labels=["study"]
            )
            if gauges is not None and (measured := value(gauges, now)) is not None:
                family.add_metric([gauges.name], measured)
            yield family


def _waited(gauges: SweepGauges, now: float) -> float:
    return 0.0 if gauges.queue_since is None else now - gauges.queue_since


def _since_eval(gauges: SweepGauges, now: float) -> float | None:
    return None if gauges.last_eval_at is None else now - gauges.last_eval_at


_MEASURES: tuple[tuple[str, str, str, Callable[[SweepGauges, float], float | None]], ...] = (
    ("counter", "node_hours", "node-hours of all attempts", lambda gauges, _: gauges.node_hours),
    ("counter", "money", "node-hours times their price",
     lambda gauges, _: gauges.price and gauges.node_hours * gauges.price),
    ("gauge", "queue_wait_seconds", "how long the job that waits the longest has been queued", _waited),
    ("gauge", "last_queue_wait_seconds", "how long the job that started last had been queued",
     lambda gauges, _: gauges.queue_wait),
    ("gauge", "seconds_since_last_eval", "since an eval line was last seen", _since_eval),
    ("gauge", "best_objective", "of the trials that reached the target", lambda gauges, _: gauges.best),
    ("gauge", "tick_seconds", "work of the driver's last tick", lambda gauges, _: gauges.tick_seconds),
)  # fmt: skip
"""Kind, name, help text and value of the metrics besides the trials by state."""


def address(text: str, option: str = "--metrics") -> tuple[str, int]:
    """Host and port of ``[HOST:]PORT``; default host 127.0.0.1. Raises InputError, which names ``option``."""
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise InputError(f"{option} {text!r} is not of the form [HOST:]PORT; write for example 9464")
    return host.strip("[]") or "127.0.0.1", int(port)


class _Ticks:
    """A clock that measures the time between two sleeps."""

    def __init__(self, inner: Clock) -> None:
        self._inner = inner
        self._woke = time.perf_counter()
        self.last: float | None = None

    def now(self) -> float:
        return self._inner.now()

    def monotonic_now(self) -> float:
        return self._inner.monotonic_now()

    def sleep(self, seconds: float) -> None:
        self.last = time.perf_counter() - self._woke
        self._inner.sleep(seconds)
        self._woke = time.perf_counter()


class _CountedView:
    """A view that updates the metrics from the records it receives."""

    def __init__(self, inner: View, metrics: Metrics, ticks: _Ticks) -> None:
        self._inner, self._metrics, self._ticks = inner, metrics, ticks
        self._looked = -LOOK_SECONDS
        self._evals = -1
        self._last_eval_at: float | None = None

    def update(self, study: Study, sweep: StudyRecords, now: float) -> None:
        self._inner.update(study, sweep, now)
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        count = sum(map(len, sweep.evals.values()))
        if count != self._evals and self._evals >= 0:
            self._last_eval_at = time.time()
        self._evals = count
        self._metrics.newest = replace(
            gauges_of(study, sweep, now), last_eval_at=self._last_eval_at, tick_seconds=self._ticks.last
        )

    def line(self, text: str) -> None:
        self._inner.line(text)
