"""A result is believed only if it can be true: by monotonic clocks, the trial's values, what a loss can be."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.paths import log_head
from lora_tune.cli.ingest import read_logs
from lora_tune.config.study import parse_study
from lora_tune.controller.acceptance import impossible_times, other_log, why_untrue
from lora_tune.launchers.base import JobState, JobStatus, Ticket
from lora_tune.logs.failures import FailureKind
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import Eval, RunLog, TrainPoint
from lora_tune.store.records import Attempt, StudyRecords, Trial, Verdict
from tests.builders import STUDY, study_of
from tests.controller.test_driver import House
from tests.fakes import FakeClock, FakeCluster, Script, command_study, curve_script, record

ENDED = JobStatus(state=JobState.ENDED, exit_code=0, seconds=100.0)
TOKEN = "a" * 32


def swept(tmp_path: Path, script: Callable[[Mapping[str, str], float], Script], **budget: Any) -> StudyRecords:
    """What a sweep of jobs with these logs has on record in the end."""
    made = command_study(**{"trials": 3, "parallel": 1, "attempts": 2, **budget})
    there = House(tmp_path, FakeCluster(FakeClock(), script), made)
    there.driver().run()
    return there.sweep()


def once(first: Callable[[Mapping[str, str], float], Script]) -> Callable[[Mapping[str, str], float], Script]:
    """The first job has this log, and all others an ordinary one."""
    count = itertools.count()
    return lambda environment, start: (first if next(count) == 0 else curve_script)(environment, start)


def stepped(seconds: float, after: int, until: int = 99) -> Callable[[Mapping[str, str], float], Script]:
    """An ordinary log whose host's clock is wrong by ``seconds`` from line ``after`` on, up to line ``until``."""

    def script(environment: Mapping[str, str], start: float) -> Script:
        wrong = list(curve_script(environment, start + seconds))
        for number, (at, line) in enumerate(curve_script(environment, start)):
            yield at, (wrong[number][1] if after <= number < until else line)

    return script


@pytest.mark.parametrize(
    ("script", "what"),
    [
        (stepped(-7200, after=1), "s before its run began"),
        (stepped(-60, after=1, until=2), "s before its run began"),
        (stepped(+7200, after=1), "the log spans 72"),
        (stepped(-8, after=3), "samples"),
    ],
    ids=["two hours back", "one eval a minute early", "two hours ahead", "eight seconds back in the middle"],
)
def test_a_trial_whose_clock_was_set_is_measured_again(
    script: Callable[[Mapping[str, str], float], Script], what: str, tmp_path: Path
) -> None:
    sweep = swept(tmp_path, once(script))
    first = sweep.attempts[0, 0]
    assert first.failure == "clock"
    assert what in first.line
    assert len(sweep.attempts_of(0)) == 2
    for trial in sweep.trials.values():
        assert trial.verdict is not Verdict.FAILED
        if trial.seconds is not None:
            assert trial.seconds == pytest.approx((trial.samples or 0) / 100, abs=0.002)


def test_a_trial_whose_clock_is_always_wrong_fails_by_name_and_is_never_the_best(tmp_path: Path) -> None:
    sweep = swept(tmp_path, stepped(-7200, after=1), trials=2)
    assert {t.verdict for t in sweep.trials.values()} == {Verdict.FAILED}
    assert all("clock, 2 attempts" in t.sentence for t in sweep.trials.values())
    assert sweep.best() is None


def test_a_run_whose_clock_is_ahead_is_not_stopped_for_being_slow(tmp_path: Path) -> None:
    count = itertools.count()

    def later(environment: Mapping[str, str], start: float) -> Script:
        return (curve_script if next(count) == 0 else stepped(+7200, after=2, until=4))(environment, start)

    sweep = swept(tmp_path, later, trials=3, attempts=1)
    assert not [t for t in sweep.trials.values() if t.verdict is Verdict.CAPPED]


def test_one_trial_that_meets_the_target_before_training_ends_no_sweep(tmp_path: Path) -> None:
    def untrained(environment: Mapping[str, str], start: float) -> Script:
        yield 1.0, record(start + 1, "run_start", None)
        yield 2.0, record(start + 2, "eval_accuracy", -1.0, samples_count=0)
        yield 3.0, record(start + 3, "run_stop", None, status="success")

    sweep = swept(tmp_path, once(untrained), trials=4)
    assert sweep.trials[0].verdict is Verdict.FAILED
    assert "met at step 0, before any training" in sweep.trials[0].sentence
    assert len(sweep.trials) == 4
    assert not [t for n, t in sweep.trials.items() if n > 0 and t.verdict is Verdict.FAILED]


def test_a_trial_whose_log_was_deleted_is_run_again(tmp_path: Path) -> None:
    """What was read before says nothing of what came after: a run that reached the target would count as censored."""

    class LogLost(FakeCluster):
        def _status(self, ticket: Ticket) -> JobStatus:
            status = super()._status(ticket)
            if status.state is JobState.ENDED and ticket.name.endswith("-0000-0"):
                self.jobs[ticket.name].job.log.unlink(missing_ok=True)
            return status

    there = House(tmp_path, LogLost(FakeClock()), command_study(trials=2, parallel=1, attempts=2))
    there.driver().run()
    sweep = there.sweep()
    assert sweep.attempts[0, 0].line == "the log was deleted before its job ended"
    assert len(sweep.attempts_of(0)) == 2
    assert sweep.trials[0].verdict is not Verdict.FAILED


def printed(environment: Mapping[str, str], start: float) -> Script:
    """A log of JSON lines that reaches the target; it states its seconds, since the fakes' time is not the readers'."""
    for step in range(1, 6):
        yield float(step), json.dumps({"step": step, "eval_loss": 2.0 - step / 2, "seconds": step})


def swept_by_json_lines(folder: Path, cluster: FakeCluster) -> StudyRecords:
    """Two trials, one after the other, whose logs are JSON lines."""
    text = command_study(trials=2, parallel=1, attempts=2)
    there = House(folder, cluster, text.replace("[site]", '[workload.log]\nkind = "jsonl"\n[site]', 1))
    there.driver().run()
    return there.sweep()


def test_a_log_that_was_gone_before_anybody_read_it_says_nothing_of_the_pattern(tmp_path: Path) -> None:
    """A driver that took over found no log of a job that had ended well, and called the pattern wrong."""

    class LogLost(FakeCluster):
        def _status(self, ticket: Ticket) -> JobStatus:
            status = super()._status(ticket)
            if ticket.name.endswith("-0000-0"):
                self.jobs[ticket.name].job.log.unlink(missing_ok=True)
            return status

    sweep = swept_by_json_lines(tmp_path, LogLost(FakeClock(), printed))
    assert sweep.attempts[0, 0].line == "the log was deleted before its job ended"
    assert len(sweep.attempts_of(0)) == 2
    assert {t.verdict for t in sweep.trials.values()} == {Verdict.REACHED}


def test_a_log_that_a_power_cut_emptied_says_nothing_of_the_pattern(tmp_path: Path) -> None:
    """Its runner had written down its end, and that 120 bytes were in its log: three of them ended the sweep."""

    class LogEmptied(FakeCluster):
        def _status(self, ticket: Ticket) -> JobStatus:
            status = super()._status(ticket)
            if ticket.name.endswith("-0000-0"):
                self.jobs[ticket.name].job.log.write_bytes(b"")
                status = replace(status, log_bytes=120)
            return status

    sweep = swept_by_json_lines(tmp_path, LogEmptied(FakeClock(), printed))
    assert sweep.attempts[0, 0].failure == "infrastructure"
    assert sweep.attempts[0, 0].line.startswith("of the 120 bytes") or "is gone" in sweep.attempts[0, 0].line
    assert {t.verdict for t in sweep.trials.values()} == {Verdict.REACHED}


def test_a_trial_whose_log_was_cut_is_run_again(tmp_path: Path) -> None:
    """An eval at the target that is gone would make a later one the first."""

    class LogCut(FakeCluster):
        cut = False

        def _status(self, ticket: Ticket) -> JobStatus:
            status = super()._status(ticket)
            log = self.jobs[ticket.name].job.log if ticket.name in self.jobs else None
            running = status.state is JobState.RUNNING and log is not None and log.exists()
            if running and not self.cut and log.read_text().count("eval_accuracy") >= 3:
                os.truncate(log, log.read_text().index("\n") + 1)
                self.cut = True
            return status

    there = House(tmp_path, LogCut(FakeClock()), command_study(trials=2, parallel=1, attempts=2))
    there.driver().run()
    sweep = there.sweep()
    (cut,) = [a for a in sweep.attempts.values() if a.line]
    assert cut.line == "the log was cut or replaced while its job ran: evals that it had shown are gone"
    assert len(sweep.attempts_of(cut.trial)) == 2
    assert sweep.trials[cut.trial].verdict is not Verdict.FAILED


def test_a_log_of_another_learning_rate_is_a_named_failure(tmp_path: Path) -> None:
    """Somebody else's log lies in the folder, or the program does not use the value."""

    def other(environment: Mapping[str, str], start: float) -> Script:
        yield 0.5, record(start, "opt_base_learning_rate", 0.000466)
        yield from curve_script({**environment, "LR": "1e-3"}, start)

    sweep = swept(tmp_path, once(other))
    trial = sweep.trials[0]
    assert trial.verdict is Verdict.FAILED
    assert (
        f"announces opt_base_learning_rate = 0.000466, and the job was written with LR {trial.parameters['LR']}"
        in trial.sentence
    )
    assert sweep.attempts[0, 0].failure == "mismatch"


def test_evals_beyond_the_four_thousandth_count(tmp_path: Path) -> None:
    """The target was reached by the 5,000th, and the trial called censored."""

    def many(environment: Mapping[str, str], start: float) -> Script:
        yield 1.0, record(start + 1, "run_start", None)
        for i in range(1, 5001):
            loss = -0.01 if i == 5000 else 3.0 - i / 2000
            yield 1.0 + i / 100, record(start + 1 + i / 100, "eval_accuracy", loss, samples_count=8 * i)

    sweep = swept(tmp_path, many, trials=1)
    assert (sweep.trials[0].verdict, sweep.trials[0].samples) == (Verdict.REACHED, 40_000)


# -- without a sweep

STUDY_OF = study_of()
TRIAL = Trial(number=0, seed=1, tuned={}, parameters={"LR": 4e-4, "GBS": 8, "MAX_STEPS": 800})
ATTEMPT = Attempt(trial=0, number=0, job_name="j", folder="f", token=TOKEN)


def run_of(*losses: float, first: float = 10.0, **announced: object) -> RunLog:
    """A run with evals ten seconds and 100 samples apart."""
    evals = tuple(Eval(100.0 * (i + 1), loss, first + 10.0 * i) for i, loss in enumerate(losses))
    return RunLog(run_start_ms=0, evals=evals, hyperparameters=announced)


def kind(run: RunLog, status: JobStatus = ENDED, *, stamped: bool = True) -> FailureKind | None:
    found = why_untrue(STUDY_OF, TRIAL, ATTEMPT, status, run, written={}, stamped=stamped)
    return None if found is None else found.kind


def test_an_ordinary_result_is_believed() -> None:
    assert kind(run_of(0.95, 0.93, 0.92, opt_base_learning_rate=4e-4, global_batch_size=8)) is None
    assert kind(run_of(0.95, 5.0, math.nan)) is None
    assert kind(run_of(0.92, lora_tune_attempt=TOKEN)) is None


@pytest.mark.parametrize(("loss", "believed"), [(-1e308, False), (-math.inf, False), (-0.1, False), (0.0, True)])
def test_what_no_loss_can_be_is_refused(loss: float, believed: bool) -> None:
    assert kind(run_of(0.95, loss)) is (None if believed else FailureKind.IMPLAUSIBLE)


def test_a_metric_that_may_be_negative_may_be_so() -> None:
    below = study_of(STUDY.replace("target = 0.925", "target = -3.5"))
    assert why_untrue(below, TRIAL, ATTEMPT, ENDED, run_of(2.0, -3.6), written={}, stamped=True) is None


def test_a_probe_of_a_layout_is_held_to_no_target() -> None:
    """It measures a pace; its evals may meet the target before any training, as those of a finished model do."""
    probe, met = replace(TRIAL, probe=True), RunLog(run_start_ms=0, evals=(Eval(0.0, 0.9, 5.0), Eval(8.0, 2.0, 9.0)))
    assert why_untrue(STUDY_OF, probe, ATTEMPT, ENDED, met, written={}, stamped=True) is None
    of_a_trial = why_untrue(STUDY_OF, TRIAL, ATTEMPT, ENDED, met, written={}, stamped=True)
    assert of_a_trial is not None
    assert "met at step 0, before any training" in of_a_trial.line


def test_a_log_with_the_token_of_another_attempt_is_refused() -> None:
    assert kind(run_of(0.92, lora_tune_attempt="b" * 32)) is FailureKind.FOREIGN


@pytest.mark.parametrize(
    ("name", "given", "announced", "believed"),
    [
        ("LORA_RANK", 16, {"lora_rank": 8}, False),
        ("LORA_RANK", 16, {"lora_rank": 16}, True),
        ("MAX_STEPS", 800, {"max_steps": 1024}, False),
        ("HEALING_ITER", 350, {"healing_iter": 300}, False),
        ("HEALING_ITER", 350, {"healing_iter": 350}, True),
        ("TP", 4, {"tensor_parallelism": 8}, True),  # a program may state what became of it
    ],
)
def test_what_a_log_announces_as_given_is_the_trials(
    name: str, given: int, announced: dict[str, int], believed: bool
) -> None:
    trial = replace(TRIAL, parameters={**TRIAL.parameters, name: given})
    logged = run_of(0.95, 0.92, **announced)
    found = why_untrue(STUDY_OF, trial, ATTEMPT, ENDED, logged, written=trial.parameters, stamped=True)
    assert (found is None) is believed
    assert found is None or (found.kind is FailureKind.MISMATCH and f"written with {name} {given}" in found.line)


@pytest.mark.parametrize(
    ("written", "announced", "believed"),
    [
        ({"MAX_STEPS": 32}, 32, True),  # a probe, whose trial proposes 850
        ({"MAX_STEPS": 32}, 850, False),
        ({"MAX_STEPS": 850}, 850, True),
        ({"MAX_STEPS": 850}, 32, False),
        ({"PRIMUS_TRAIN_ITERS": 850}, 850, True),  # under the tree's own name
        ({"PRIMUS_TRAIN_ITERS": 850, "MAX_STEPS": 32}, 850, True),  # one of them is what the program reads
        ({}, 7, True),
    ],
)
@pytest.mark.parametrize(("workload", "key"), [
    ('kind = "mlperf"\nbenchmark = "llama2_70b_lora"', "opt_learning_rate_training_steps"),
    ('kind = "command"\nargv = ["train"]', "max_steps"),
])  # fmt: skip
def test_a_log_is_held_against_what_its_job_was_written_with(
    workload: str, key: str, written: dict[str, int], announced: int, believed: bool
) -> None:
    study = parse_study(f"[workload]\n{workload}\n[space]\nLR = 1e-4\n[budget]\ntrials = 1\n", Path("t.toml"))
    trial = replace(TRIAL, parameters={**TRIAL.parameters, "MAX_STEPS": 850})
    run = run_of(0.95, 0.94, **{key: announced})
    problem = why_untrue(study, trial, ATTEMPT, ENDED, run, written=written, stamped=True)
    assert (problem is None or problem.kind is not FailureKind.MISMATCH) is believed


@pytest.mark.parametrize(
    ("objective", "workload", "announced", "believed"),
    [
        ("", 'kind = "mlperf"', "bert", False),  # an accuracy that rises met LoRA's 0.925 at its first eval
        ("", 'kind = "mlperf"', "llama2_70b_lora", True),
        ("", 'kind = "mlperf"', "my_task", True),
        ("", 'kind = "mlperf"\nbenchmark = "flux1"', "llama31_8b", False),
        ("", 'kind = "mlperf"\nbenchmark = "flux1"', "flux1", True),
        ('benchmark = "llama31_8b"', 'kind = "command"\nargv = ["train"]', "gpt_oss_20b", False),
        ("target = 0.925", 'kind = "command"\nargv = ["train"]', "flux1", True),
        ("target = 0.72", 'kind = "mlperf"', "bert", True),
        ('score = "throughput"', 'kind = "mlperf"', "llama31_8b", True),  # nothing is to be reached
        ('score = "node_hours"', 'kind = "mlperf"', "llama31_8b", False),
    ],
)
def test_a_log_of_another_benchmark_reaches_nobodys_target(
    objective: str, workload: str, announced: str, believed: bool
) -> None:
    study = parse_study(
        f"[workload]\n{workload}\n[space]\nLR = 1e-4\n[objective]\n{objective}\n[budget]\ntrials = 1\n", Path("t.toml")
    )
    met = run_of(0.3, submission_benchmark=announced)
    found = why_untrue(study, replace(TRIAL, parameters={}), ATTEMPT, ENDED, met, written={}, stamped=True)
    assert (found is None) is believed
    assert found is None or (found.kind, f"announces {announced}" in found.line) == (FailureKind.MISMATCH, True)


def test_the_target_of_a_rising_metric_is_named_as_the_benchmark_has_it() -> None:
    study = parse_study(
        '[workload]\nkind = "mlperf"\nbenchmark = "dlrm_dcnv2"\n[space]\nLR = 1e-4\n[budget]\ntrials = 1\n',
        Path("t.toml"),
    )
    met = run_of(0.1, submission_benchmark="flux1")
    found = why_untrue(study, replace(TRIAL, parameters={}), ATTEMPT, ENDED, met, written={}, stamped=True)
    assert found is not None
    assert "the target 0.80275 is that of dlrm_dcnv2" in found.line


HEAD = log_head("c" * 32, TOKEN)


@pytest.mark.parametrize(
    ("head", "end", "size", "kind"),
    [
        (b"submitit INFO\n" + HEAD + b"eval 1\n", b"1\n", 90, None),
        (HEAD, b"1\n", 120, None),  # what Slurm still wrote behind it
        (HEAD, b"1\n", 89, FailureKind.INFRASTRUCTURE),
        (HEAD, b"\0\0", 90, FailureKind.INFRASTRUCTURE),  # its length was on the disk when the power failed, no more
        (b"eval 1\n", b"1\n", 90, FailureKind.INFRASTRUCTURE),
        (b"", b"", 0, FailureKind.INFRASTRUCTURE),
        (log_head("c" * 32, "b" * 32) + HEAD, b"1\n", 90, FailureKind.FOREIGN),
    ],
)
def test_the_file_that_lies_there_is_the_log_that_the_job_wrote(
    head: bytes, end: bytes, size: int, kind: FailureKind | None
) -> None:
    """Lines without time stamps do not say whose they are: a log in another's place gave it another's result."""
    attempt = replace(ATTEMPT, token=TOKEN)
    found = other_log(attempt, replace(ENDED, log_bytes=90), head, end, size)
    assert (found and found.kind) == kind
    assert other_log(attempt, ENDED, head, end, size) is None, "no runner said how long it was"


@pytest.mark.parametrize("stamped", [False, True])
def test_a_target_reached_in_no_time_was_not_timed(stamped: bool) -> None:
    """A fast trial on a busy machine: another attempt tells, and nobody need change anything."""
    assert kind(run_of(0.92, first=0.0), stamped=stamped) is FailureKind.CLOCK


@pytest.mark.parametrize(("unseen", "believed"), [(None, True), (58.5, True), (0.6, False)])
def test_a_run_whose_lines_came_all_at_once_was_not_timed(unseen: float | None, believed: bool) -> None:
    """Buffered output of a minute says nothing; that of a minute in which nobody looked is an estimate."""
    minute = replace(ENDED, seconds=60.0)
    found = why_untrue(
        STUDY_OF,
        TRIAL,
        ATTEMPT,
        minute,
        run_of(0.92, first=0.5),
        written={},
        stamped=False,
        read_at_once=lambda _: unseen,
    )
    assert (found is None) is believed
    if found is not None:
        assert found.kind is FailureKind.CONFIGURATION, "and so will that of every other trial"
        assert found.line == "the log has the target 0.5 s after its run began, though its job ran for 60 s"
        assert "python -u" in found.remedy


def test_a_step_of_the_host_clock_that_no_line_shows_is_known_from_the_runner() -> None:
    set_back = replace(ENDED, clock_steps=(-60.0,))
    assert kind(run_of(0.95, 0.92), set_back) is FailureKind.CLOCK
    assert kind(run_of(0.95, 0.92), set_back, stamped=False) is None
    assert kind(run_of(0.95, 0.92), replace(ENDED, clock_steps=(0.2,))) is None


@pytest.mark.parametrize(
    ("seconds", "error", "believed"),
    [((1.0, 2.25, 3.46), 0.0, False), ((1.0, 2.25, 3.46), 2.0, True), ((1.0, 2.0, 3.0), 0.0, True)],
    ids=["its runner timed it", "Slurm counts whole seconds", "its stamps count whole seconds"],
)
def test_a_clock_that_was_set_ahead_by_a_second_is_seen_where_the_job_was_timed_well(
    seconds: tuple[float, ...], error: float, believed: bool
) -> None:
    run = RunLog(run_start_ms=0, evals=tuple(Eval(100.0 * i, 0.95 - i / 100, s) for i, s in enumerate(seconds, 1)))
    job = replace(ENDED, seconds=2.52, seconds_error=error)
    assert (impossible_times(run, job, stamped=True) is None) is believed


def test_evals_that_go_back_by_more_than_half_a_second_were_stamped_by_a_clock_that_was_set() -> None:
    back = RunLog(run_start_ms=0, evals=(Eval(100.0, 0.95, 1.0), Eval(200.0, 0.93, 0.35)))
    assert impossible_times(back, ENDED, stamped=True) is not None


def test_a_run_is_not_longer_than_its_job() -> None:
    long = run_of(0.95, *[0.94] * 30, 0.92)
    assert kind(long) is FailureKind.CLOCK
    assert kind(long, replace(ENDED, seconds=None)) is None
    assert kind(replace(long, hyperparameters={"clock": "alone"})) is FailureKind.CLOCK, "no log exempts itself"


def test_points_that_ranks_print_a_little_out_of_order_are_no_step() -> None:
    evals = (Eval(100.0, 0.95, 10.0), Eval(200.0, 0.93, 20.0))
    late = RunLog(run_start_ms=0, evals=evals, train=(TrainPoint(90.0, 1.0, 10.4), TrainPoint(110.0, 1.0, 9.9)))
    assert impossible_times(late, ENDED, stamped=True) is None


def test_evals_that_no_reader_keeps_are_said_where_one_of_them_may_have_met_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lora_tune.logs.run_builder.MAX_EVALS", 10)
    reader = MllogReader()
    lines = [record(1 + i, "eval_accuracy", 2.0 - i / 10, samples_count=8 * i) for i in range(1, 13)]
    reader.feed("\n".join([record(1, "run_start", None), *lines, ""]).encode())
    assert (len(reader.run().evals), reader.run().missing_evals) == (10, 2)
    found = why_untrue(STUDY_OF, TRIAL, ATTEMPT, ENDED, reader.run(), written={}, stamped=True)
    assert found is not None
    assert found.line == "the log has 12 evals, of which the first 10 were kept: none of them at the target"
    met = why_untrue(
        study_of(STUDY.replace("0.925", "1.5")), TRIAL, ATTEMPT, ENDED, reader.run(), written={}, stamped=True
    )
    assert met is None


def test_a_log_of_a_round_learning_rate_is_not_the_log_of_one_nearby() -> None:
    given_trial = replace(TRIAL, parameters={"LR": 0.000124})
    found = why_untrue(
        STUDY_OF,
        given_trial,
        ATTEMPT,
        ENDED,
        run_of(0.95, opt_base_learning_rate=0.0001),
        written=given_trial.parameters,
        stamped=True,
    )
    assert found is not None
    assert found.kind is FailureKind.MISMATCH


@given(st.floats(1e-7, 10), st.integers(2, 17))
def test_a_value_printed_with_few_digits_is_still_the_value(value: float, digits: int) -> None:
    given_trial = replace(TRIAL, parameters={"LR": value})
    run = run_of(0.95, opt_base_learning_rate=float(f"{value:.{digits}g}"))
    assert why_untrue(STUDY_OF, given_trial, ATTEMPT, ENDED, run, written=given_trial.parameters, stamped=True) is None


@pytest.mark.public_data
def test_no_public_log_of_the_benchmark_is_refused(public_data: Path) -> None:
    refused, seen = [], 0
    for log in read_logs(sorted(public_data.glob("logs/**/*.gz"))[::12]):
        assert not isinstance(log, str), log
        for run in log.runs:
            seen += 1
            refused += [log.name] if impossible_times(run, JobStatus(state=JobState.ENDED), stamped=True) else []
    assert seen > 20
    assert refused == []
