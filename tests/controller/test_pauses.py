"""A job that was suspended: its trial's time is that of its training, or is measured again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.cli.explain import trial_story
from lora_tune.controller import policy
from lora_tune.controller.acceptance import ObservedPauses, unplaced
from lora_tune.launchers.base import JobState, JobStatus, Ticket
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.readers import JsonLinesReader
from lora_tune.logs.run import Eval, LogReader, RunLog
from lora_tune.review.advice import suspended
from lora_tune.store.records import StudyRecords, Verdict
from tests.controller.test_driver import House
from tests.controller.test_policy import NOW, look, study
from tests.fakes import FakeClock, FakeCluster, Script, command_study, curve_script, record

PAUSE = (3.0, 43.0)
"""Seconds of the job between which it stands still."""


def paused(environment: Mapping[str, str], start: float) -> Script:
    """The ordinary trial, suspended in ``PAUSE``: what it prints afterwards has later stamps and comes later."""
    begin, end = PAUSE
    later = list(curve_script(environment, start + end - begin))
    for number, (at, line) in enumerate(curve_script(environment, start)):
        yield (at, line) if at <= begin else (at + end - begin, later[number][1])


class Suspends(FakeCluster):
    """Suspends each first attempt in ``PAUSE``, and says so in one of the ways in which launchers do.

    runner: the job's own runner noted the pause. count: seconds that the scheduler counts at the end. Else only looks
    show that it is suspended.
    """

    runner, count = True, 0.0

    def _status(self, ticket: Ticket) -> JobStatus:
        status = super()._status(ticket)
        if status.started_at is None or not ticket.name.endswith("-0"):
            return status
        begin, end = (status.started_at + at for at in PAUSE)
        if self.runner:
            return replace(status, pauses=((begin, end),) if self.clock.true >= end else ())
        over = not status.state.alive
        return replace(
            status, paused=begin <= self.clock.true < end, reason="SUSPENDED", paused_seconds=self.count * over
        )


def swept(tmp_path: Path, script: Callable[[Mapping[str, str], float], Script], **how: object) -> StudyRecords:
    tmp_path.mkdir(exist_ok=True)
    clusters = {True: Suspends, False: FakeCluster}
    cluster = clusters[bool(how)](FakeClock(), script)
    for name, value in how.items():
        setattr(cluster, name, value)
    there = House(tmp_path, cluster, command_study(trials=4, parallel=1, attempts=2))
    there.driver().run()
    return there.sweep()


@pytest.mark.parametrize(
    ("how", "error"), [({"runner": True}, 1e-6), ({"runner": False, "count": 40.0}, 2.0)], ids=["runner", "looks"]
)
def test_a_suspended_trial_has_the_time_of_its_training(how: dict[str, object], error: float, tmp_path: Path) -> None:
    quiet = swept(tmp_path / "quiet", curve_script)
    sweep = swept(tmp_path / "suspended", paused, **how)
    assert {t.verdict for t in quiet.trials.values()} >= {Verdict.REACHED}
    for number, trial in quiet.trials.items():
        suspended = sweep.trials[number]
        assert suspended.verdict is trial.verdict, suspended.sentence
        if trial.seconds is not None:
            assert suspended.seconds == pytest.approx(trial.seconds, abs=error)
            assert "its job stood still for" in suspended.sentence
            assert suspended.metrics.paused_seconds == pytest.approx(40.0, abs=error)


def test_explain_says_what_does_not_count(tmp_path: Path) -> None:
    sweep = swept(tmp_path, paused, runner=True)
    trial = next(t for t in sweep.trials.values() if t.verdict is Verdict.REACHED)
    story = dict(trial_story(study(), sweep, trial))
    advice = suspended(study(), sweep)
    assert advice is not None
    assert advice.evidence.startswith("trials 0, 1, 2, 3 stood still for 2:40 min")
    assert story["suspended"] == "its job stood still for 40 s beside, which do not count"


def test_a_pause_that_nobody_saw_begin_or_end_is_measured_again(tmp_path: Path) -> None:
    """The scheduler counts 40 s, and the driver was not there: the second attempt is undisturbed."""

    class Unseen(Suspends):
        def _status(self, ticket: Ticket) -> JobStatus:
            return replace(super()._status(ticket), paused=False)

    numbers = itertools.count()
    script = lambda *job: (paused if next(numbers) == 0 else curve_script)(*job)  # noqa: E731
    cluster = Unseen(FakeClock(), script)
    cluster.runner, cluster.count = False, 40.0
    there = House(tmp_path, cluster, command_study(trials=1, parallel=1, attempts=2))
    there.driver().run()
    first, second = there.sweep().attempts_of(0)
    assert first.failure == "clock"
    assert first.line.startswith("its job stood still for 40.0 s")
    assert second.failure == ""


def test_a_suspended_job_is_neither_silent_nor_at_its_limit() -> None:
    suspended = replace(look(grew=100_000, started_at=NOW - 100_000), ran_at=NOW - 100_000)
    assert isinstance(policy.watch(study(), suspended, NOW), policy.Stop)
    status = replace(suspended.status, paused=True, reason="SUSPENDED")
    assert policy.watch(study(), replace(suspended, status=status), NOW) is None
    resumed = replace(suspended.status, pauses=((NOW - 99_500, NOW - 50),))
    assert policy.watch(study(), replace(suspended, status=resumed, grew_at=NOW - 50), NOW) is None


def test_looks_never_make_a_pause_longer_than_it_was() -> None:
    seen, running = ObservedPauses(), JobStatus(state=JobState.RUNNING)
    suspended = replace(running, paused=True)
    for at, status in enumerate((running, suspended, suspended, suspended, running, suspended, running)):
        last = seen.update(status, 10.0 * at)
    assert last.pauses == ((10.0, 30.0), (50.0, 50.0))
    noted = replace(running, pauses=((9.0, 31.0),))
    assert seen.update(noted, 99.0).pauses == noted.pauses, "the runner knows better"


def test_seconds_that_a_log_counts_by_itself_may_hold_the_pause() -> None:
    status = JobStatus(state=JobState.ENDED, pauses=((10.0, 50.0),))
    assert unplaced(status, RunLog(), left_out=False) is not None
    assert unplaced(status, RunLog(paused_seconds=40.0), left_out=True) is None
    assert unplaced(status, RunLog(), left_out=True) is None, "lines came meanwhile: the training went on"
    half = replace(status, paused_seconds=60.0)
    untold = unplaced(half, RunLog(paused_seconds=40.0), left_out=True)
    assert untold is not None
    assert untold.line.endswith("of which 20.0 s cannot be told from its training")


Points = Sequence[tuple[float, float]]


def evals_of(reader: LogReader, lines: Iterator[bytes], pauses: Points) -> RunLog:
    for line in lines:
        reader.feed(line + b"\n")
    reader.pauses = [(round(1000 * a), round(1000 * b)) for a, b in pauses]  # type: ignore[attr-defined]
    return reader.run()


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 7), st.integers(3, 10**5)), max_size=4, unique_by=lambda pause: pause[0]),
)
def test_a_run_without_its_pauses_is_the_run_that_had_none(steps: list[int], pauses: list[tuple[int, int]]) -> None:
    """Property: wherever a job stands still between two lines, each time and each pace is as without."""
    longer = dict(pauses)

    def lines(*, stands_still: bool) -> Iterator[bytes]:
        at = 1000.0
        yield record(at, "run_start", None).encode()
        for number, seconds in enumerate(steps):
            at += seconds + (longer.get(number, 0) if stands_still else 0)
            yield record(at, "train_loss", 2.0, samples_count=8 * number + 4).encode()
            yield record(at, "block_stop", None).encode()
            yield record(at + 1, "eval_accuracy", 1.0, samples_count=8 * number + 8).encode()
            yield record(at + 1, "block_start", None).encode()
            at += 1

    spans, at = [], 1000.0
    for number, seconds in enumerate(steps):
        if number in longer:
            spans.append((at, at + longer[number]))
        at += seconds + longer.get(number, 0) + 1
    whole = evals_of(MllogReader(), lines(stands_still=False), ())
    run = evals_of(MllogReader(), lines(stands_still=True), spans)
    assert (run.evals, run.train, run.throughput, run.eval_seconds) == (
        whole.evals, whole.train, whole.throughput, whole.eval_seconds,
    )  # fmt: skip
    assert run.paused_seconds == sum(end - begin for begin, end in spans)


def test_lines_that_came_meanwhile_show_that_training_went_on() -> None:
    clock = iter([0.0, 10.0, 20.0, 30.0])
    reader = JsonLinesReader(lambda: next(clock))
    lines = (json.dumps({"step": step, "eval_loss": 1.0}).encode() for step in (1, 2, 3, 4))
    run = evals_of(reader, lines, [(5.0, 25.0)])
    assert run.evals[-1] == Eval(4.0, 1.0, 30.0)
    assert run.paused_seconds == 0.0
    reader.pauses = [(21_000, 29_000)]
    assert reader.run().evals[-1] == Eval(4.0, 1.0, 22.0)
