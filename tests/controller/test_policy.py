"""What happens to a trial next, as a table of situations."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_tune.config.study import Study, parse_study
from lora_tune.controller import conclusion, evidence, limits, policy, pruning
from lora_tune.launchers.base import JobState, JobStatus, Waits
from lora_tune.logs.failures import Diagnosis, FailureKind, diagnose
from lora_tune.logs.run import Eval, RunLog, TrainPoint
from lora_tune.search.noise import clock_noise
from lora_tune.search.objectives import objective_of
from lora_tune.store.metrics import TrialMetrics, as_mapping
from lora_tune.store.records import Attempt, StopKind, StudyRecords, Trial, TrialState, Verdict
from tests.fakes import command_study

NOW = 10_000.0


def study(**site: Any) -> Study:
    found = parse_study(command_study(trials=5, parallel=2, trial_minutes=10), Path("x.toml"))
    return found.with_options({"site": {"stall_minutes": 2.0, "queue_minutes": 60.0, "kill_seconds": 30.0, **site}})


def attempt(**change: Any) -> Attempt:
    base = Attempt(trial=0, number=0, job_name="x-0000-0", folder="t", intended_at=NOW - 500, submitted_at=NOW - 500)
    return replace(base, **{"started_at": NOW - 300, **change})


def run(*losses: float, stop: str | None = None) -> RunLog:
    evals = tuple(Eval(100.0 * (i + 1), loss, 10.0 * (i + 1)) for i, loss in enumerate(losses))
    return RunLog(run_start_ms=1, evals=evals, status=stop)


def trial(number: int = 0, **change: Any) -> Trial:
    parameters = {"LR": 1e-3, "STEPS": 100, "GBS": 8, "MAX_STEPS": 100}
    return replace(Trial(number=number, seed=1, tuned={"LR": 1e-3}, parameters=parameters), **change)


def look(state: JobState = JobState.RUNNING, *losses: float, grew: float = 1.0, **change: Any) -> policy.JobSnapshot:
    status = JobStatus(state=state, reason="Priority")
    return policy.JobSnapshot(
        attempt=attempt(**change), status=status, run=run(*losses), grew_at=NOW - grew, trial=trial()
    )


@pytest.mark.parametrize(("share_seconds", "ends"), [(601.0, True), (599.0, False), (None, False)])
def test_of_a_trial_that_shares_its_node_the_share_that_it_has_had_is_limited(
    share_seconds: float | None, ends: bool
) -> None:
    # A driver that was started again has seen it run for a second only, and its clock says another thing.
    seen = replace(look(started_at=NOW + 3600), ran_at=NOW - 1)
    shared = replace(seen, status=replace(seen.status, node_share=0.5, share_seconds=share_seconds))
    action = policy.watch(study(), shared, NOW)
    assert (isinstance(action, policy.Stop) and action.kind is StopKind.TIME_LIMIT) == ends


def test_a_driver_whose_clock_is_ahead_of_the_clusters_ends_no_job_for_its_length() -> None:
    """A driver began on a host an hour ahead, and every job had run into its limit before it was a minute old."""
    ahead = look(started_at=NOW - 3600)
    assert policy.watch(study(), replace(ahead, ran_at=NOW - 599), NOW) is None
    assert isinstance(policy.watch(study(), replace(ahead, ran_at=NOW - 601), NOW), policy.Stop)
    counted = replace(ahead, status=replace(ahead.status, seconds=599.0))
    assert policy.watch(study(), counted, NOW) is None, "what the job's own runner counts is known"


@pytest.mark.parametrize(
    ("situation", "kind"),
    [
        (look(), None),
        (look(JobState.QUEUED, submitted_at=NOW - 3000), None),
        (look(JobState.QUEUED, submitted_at=NOW - 3700), StopKind.QUEUE),
        (look(started_at=NOW - 601), StopKind.TIME_LIMIT),
        (look(grew=121), StopKind.SILENT),
        (look(JobState.RUNNING, 1.0, -0.1, grew=31), StopKind.REACHED),
        (look(JobState.RUNNING, 1.0, -0.1, grew=29), None),
        (look(stop=StopKind.PRUNED, stop_at=NOW - 29), None),
    ],
)
def test_a_live_job_is_left_alone_or_asked_to_end(situation: policy.JobSnapshot, kind: StopKind | None) -> None:
    found = policy.watch(study(), situation, NOW)
    assert (found.kind if isinstance(found, policy.Stop) else found) == kind


def test_a_run_whose_evals_nobody_keeps_any_more_trains_no_further() -> None:
    """It would be refused at its end, hours later: none of the evals that are kept is at the target."""
    full = look(JobState.RUNNING, 1.0, 0.9)
    more = replace(full, run=replace(full.run, missing_evals=1))
    found = policy.watch(study(), more, NOW)
    assert isinstance(found, policy.Stop)
    assert found.kind is StopKind.UNREAD
    assert found.sentence == "the log has 3 evals, of which the first 2 were kept: none of them at the target"
    assert found.diagnosis.remedy == "evaluate less often"
    reached = replace(more, run=replace(run(1.0, -0.1), missing_evals=1))
    assert policy.watch(study(), reached, NOW) is None, "which of the evals counts is known"


def test_a_job_that_was_asked_and_stays_is_killed_again_and_again() -> None:
    assert policy.watch(study(), look(stop=StopKind.PRUNED, stop_at=NOW - 31), NOW) == policy.Kill()
    killed = look(stop=StopKind.PRUNED, stop_at=NOW - 99, killed_at=NOW - 5)
    assert policy.watch(study(), killed, NOW) is None


def test_a_job_that_survives_a_kill_is_a_matter_for_the_administrator() -> None:
    undying = look(stop=StopKind.PRUNED, stop_at=NOW - 99, killed_at=NOW - 31, job_id="7", nodes=("n3",))
    found = policy.watch(study(), undying, NOW)
    assert found == policy.Kill("job 7 refuses to die on n3: tell the administrator")


def queued(waits: Waits, minutes: float) -> policy.JobSnapshot:
    status = JobStatus(state=JobState.QUEUED, reason="its reason", waits=waits, job_id="7")
    return replace(look(submitted_at=NOW - 60 * minutes), status=status)


@pytest.mark.parametrize(
    ("waits", "minutes", "kind"),
    [
        (Waits.NORMAL, 59, None),
        (Waits.NORMAL, 61, "infrastructure"),
        (Waits.HELD, 59, None),
        (Waits.HELD, 61, "held"),
        (Waits.DRAINED, 61, "drained"),
        (Waits.UNSATISFIABLE, 9, None),
        (Waits.UNSATISFIABLE, 11, "unsatisfiable"),
    ],
)
def test_a_queued_job_is_given_up_with_the_class_of_what_it_waits_for(
    waits: Waits, minutes: float, kind: str | None
) -> None:
    found = policy.watch(study(), queued(waits, minutes), NOW)
    if kind is None:
        assert found is None
        return
    assert isinstance(found, policy.Stop)
    assert found.kind is StopKind.QUEUE
    assert found.diagnosis.kind == kind
    assert found.diagnosis.line == "its reason"


def test_what_a_person_can_do_for_a_waiting_job_is_said_while_it_waits() -> None:
    assert limits.waiting(queued(Waits.NORMAL, 1).status) == ""
    assert limits.waiting(queued(Waits.HELD, 1).status).startswith("job 7 waits, held: its reason; scontrol release 7")


def test_a_job_that_was_given_up_failed_for_that_reason_and_not_because_it_was_cancelled() -> None:
    seen = Diagnosis(FailureKind.INFRASTRUCTURE, "slurmstepd: *** JOB 7 CANCELLED AT ***", "run it again")
    cancelled = JobStatus(state=JobState.CANCELLED)
    over = attempt(stop=StopKind.TIME_LIMIT, failure="configuration", line="ran into the limit", remedy="raise it")
    assert conclusion.cause(over, cancelled, seen).line == "ran into the limit"
    silent = attempt(stop=StopKind.SILENT, failure="infrastructure", line="silent for 20 min", remedy="again")
    assert conclusion.cause(silent, cancelled, seen).line == "silent for 20 min"
    memory = Diagnosis(FailureKind.INFEASIBLE, "CUDA out of memory", "more TP")
    assert conclusion.cause(silent, cancelled, memory) == memory
    faulty = Diagnosis(FailureKind.INFRASTRUCTURE, "uncorrectable ECC error", "report it", specific=True)
    assert conclusion.cause(silent, cancelled, faulty) == faulty, "it names the cause of the silence"
    assert (
        conclusion.cause(over, cancelled, faulty).sentence
        == "ran into the limit (also in its log: uncorrectable ECC error)"
    )
    assert conclusion.cause(attempt(), cancelled, seen) == seen


def test_what_a_cut_log_still_shows_fails_no_trial_for_good() -> None:
    """The end is missing, where the cause stands: a line of a healthy prolog was left, and was believed."""
    ended = JobStatus(state=JobState.ENDED, exit_code=1)
    left = Diagnosis(
        FailureKind.CONFIGURATION, "nvidia-smi: command not found", "install it", certain=True, specific=True
    )
    assert conclusion.cause(attempt(), ended, left) == left
    cut = conclusion.cause(attempt(), ended, left, log_cut=True)
    assert (cut.kind, cut.certain, cut.line) == (FailureKind.INFRASTRUCTURE, False, left.line)
    assert "run again" in cut.remedy


def measured(*speeds: float) -> RunLog:
    return replace(run(0.95), throughput=speeds, eval_seconds=(34.5,))


def test_a_probe_ends_with_its_first_warm_block_and_is_judged_by_nothing_else() -> None:
    cold, warm = (replace(look(), trial=trial(probe=True), run=measured(*speeds)) for speeds in ((2.1,), (2.1, 2.2)))
    assert policy.watch(study(), cold, NOW) is None
    found = policy.watch(study(), warm, NOW)
    assert isinstance(found, policy.Stop)
    assert found.kind is StopKind.PROBED
    assert policy.watch(study(), replace(warm, trial=trial()), NOW) is None
    bad = replace(run(0.95), train=(TrainPoint(80.0, math.nan, 8.0),))
    assert pruning.judge_curve(study(), sweep(trial()), trial(probe=True), bad) is None
    ended = JobStatus(state=JobState.CANCELLED)
    ending = conclusion.conclude(
        study(), [attempt(stop=StopKind.PROBED)], ended, measured(2.1, 2.2), WELL, trial=trial(probe=True)
    )
    assert ending == conclusion.Finish(Verdict.CENSORED, "a probe of the layout: 2.2 samples/s, 34.5 s an eval")


def conclude(diagnosis: Diagnosis, *losses: float, attempts: int = 1, launcher: str = "slurm", **given: Any) -> Any:
    last = attempt(**{k: given.pop(k) for k in ("stop", "stop_sentence") if k in given})
    before = [attempt(failure=diagnosis.kind)] * (attempts - 1)
    suspect = given.pop("node_at_fault", False)
    state = JobStatus(**{"state": JobState.ENDED, "exit_code": 0, "nodes": ("n1",), **given})
    return conclusion.conclude(
        study(launcher=launcher), [*before, last], state, run(*losses), diagnosis, trial=trial(), node_at_fault=suspect
    )


WELL = Diagnosis(kind="", line="", remedy="")


def failure(kind: Any) -> Diagnosis:
    return Diagnosis(kind=kind, line="the line", remedy="the remedy")


STEP_LIMIT = Diagnosis(
    FailureKind.CONFIGURATION, "slurmstepd: error: *** STEP 7.9 ON n1 CANCELLED AT 2024 DUE TO TIME LIMIT ***", "raise"
)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (conclude(WELL, 1.0, -0.5), Verdict.REACHED),
        (conclude(failure("unknown"), 1.0, -0.5, exit_code=1), Verdict.REACHED),
        (conclude(WELL, 1.0, 0.5), Verdict.CENSORED),
        (conclude(WELL, 1.0, stop=StopKind.PRUNED, stop_sentence="flat"), Verdict.PRUNED),
        (conclude(WELL, 1.0, stop=StopKind.CAPPED, stop_sentence="late"), Verdict.CAPPED),
        (conclude(WELL, 1.0, stop=StopKind.TIME_LIMIT), Verdict.CENSORED),
        (conclude(WELL, 1.0, state=JobState.TIME_LIMIT), Verdict.CENSORED),
        (conclude(failure("configuration"), 1.0, state=JobState.TIME_LIMIT), Verdict.CENSORED),
        (conclude(STEP_LIMIT, 1.0, exit_code=1), Verdict.CENSORED),
        (conclude(failure("configuration"), state=JobState.TIME_LIMIT), Verdict.FAILED),
        (conclude(failure("unsatisfiable"), stop=StopKind.QUEUE), Verdict.FAILED),
        (conclude(WELL, stop=StopKind.USER), Verdict.CANCELLED),
        (conclude(failure("configuration"), exit_code=1), Verdict.FAILED),
        (conclude(failure("diverged"), 1.0), Verdict.PRUNED),
        (conclude(failure("infeasible"), attempts=2), Verdict.INFEASIBLE),
        (conclude(failure("infeasible"), launcher="local"), Verdict.INFEASIBLE),
        (conclude(replace(failure("infeasible"), certain=True)), Verdict.INFEASIBLE),
        (conclude(failure("infrastructure"), attempts=3), Verdict.FAILED),
    ],
)
def test_the_end_of_a_trial(found: Any, verdict: Verdict) -> None:
    assert isinstance(found, conclusion.Finish)
    assert found.verdict is verdict


def test_the_node_to_leave_out_is_named_where_slurm_forgot_the_job() -> None:
    forgotten = JobStatus(state=JobState.LOST)
    found = conclusion.conclude(
        study(launcher="slurm"),
        [attempt(nodes=("n1",))],
        forgotten,
        run(),
        failure("configuration"),
        trial=trial(),
        node_at_fault=True,
    )
    assert found == conclusion.Retry("configuration: the line; once more on another node than n1", ("n1",))


def test_a_cancellation_that_is_nobodys_costs_an_attempt_and_not_the_trial() -> None:
    by_hand = conclude(failure("infrastructure"), 1.0, state=JobState.CANCELLED)
    assert by_hand == conclusion.Finish(Verdict.CANCELLED, "somebody cancelled its job, outside the sweep (scancel)")
    by_slurm = conclude(failure("infrastructure"), 1.0, state=JobState.CANCELLED, by_cluster=True)
    assert by_slurm == conclusion.Retry("infrastructure: the line", ("n1",))
    told = replace(failure("infrastructure"), by_scheduler=True)
    assert isinstance(conclude(told, 1.0, state=JobState.CANCELLED), conclusion.Retry), "DUE TO NODE FAILURE"
    assert conclude(WELL, 1.0, -0.5, state=JobState.CANCELLED, by_cluster=True).verdict is Verdict.REACHED
    mine = {"stop": StopKind.USER, "stop_sentence": "by anna"}
    assert conclude(WELL, state=JobState.CANCELLED, by_cluster=True, **mine).verdict is Verdict.CANCELLED


@pytest.mark.parametrize("step_failed", [True, False])
def test_a_step_that_the_script_survived_fails_no_training_that_states_its_end(*, step_failed: bool) -> None:
    """mlperf-sysjson.sh fails in every job of a submitter without MLPERF_STATUS; Slurm keeps the worst step's code."""
    status = JobStatus(state=JobState.ENDED, exit_code=1, step_failed=step_failed)
    whole = replace(run(0.95), run_stop_ms=9)
    assert conclusion.of_training(status, whole).exit_code == (0 if step_failed else 1)
    assert conclusion.of_training(status, run(0.95)).exit_code == 1, "it may have died between two evals"
    assert conclusion.of_training(status, RunLog(run_stop_ms=9)).exit_code == 1, "a stop without evals is faked"


@pytest.mark.parametrize(
    "kind",
    ["infrastructure", "flaky", "preempted", "host memory", "displaced", "unknown", "infeasible", "held", "drained"],
)
def test_what_says_nothing_of_the_parameters_is_tried_again(kind: str) -> None:
    found = conclude(failure(kind), exit_code=1)
    assert isinstance(found, conclusion.Retry)
    assert "the line" in found.sentence


def test_a_host_that_stays_short_of_memory_fails_its_trials_and_is_not_tried_for_ever() -> None:
    last = conclude(failure("host memory"), attempts=3)
    assert (last.verdict, last.sentence) == (Verdict.FAILED, "host memory, 3 attempts: the line")


def test_what_only_waited_in_a_job_that_died_has_not_been_tried() -> None:
    assert isinstance(conclude(failure("displaced"), attempts=3), conclusion.Retry)
    waited = replace(attempt(), failure="displaced", state="displaced")
    assert conclusion.counted_attempts([waited, waited, attempt()]) == 1


def test_a_target_without_a_beginning_is_no_time_and_tried_again() -> None:
    """A truncated log, a disk that was full: run_start is lost, and with it the seconds."""
    damaged = RunLog(evals=(Eval(1000.0, -0.5, math.nan),))
    ended = JobStatus(state=JobState.ENDED, exit_code=0)
    found = conclusion.conclude(study(launcher="slurm"), [attempt()], ended, damaged, WELL, trial=trial())
    assert isinstance(found, conclusion.Retry)
    assert "lines of it are lost" in found.sentence


def test_a_fault_or_a_memory_failure_is_tried_on_another_node() -> None:
    assert conclude(failure("infrastructure")).exclude_nodes == ("n1",)
    assert conclude(failure("unknown")).exclude_nodes == ("n1",)
    assert conclude(failure("infeasible")).exclude_nodes == ("n1",)
    assert conclude(failure("preempted")).exclude_nodes == ()


def test_what_may_be_its_nodes_fault_is_tried_on_another_node_whatever_its_class() -> None:
    again = conclude(failure("configuration"), node_at_fault=True)
    assert isinstance(again, conclusion.Retry)
    assert again.exclude_nodes == ("n1",)
    assert again.sentence == "configuration: the line; once more on another node than n1"
    for last in (
        conclude(replace(failure("configuration"), certain=True), node_at_fault=True),
        conclude(failure("configuration"), node_at_fault=True, attempts=3),
        conclude(failure("configuration"), node_at_fault=True, state=JobState.TIME_LIMIT),
        conclude(failure("configuration"), node_at_fault=True, launcher="local"),
    ):
        assert isinstance(last, conclusion.Finish)


def test_a_clean_exit_without_evals_is_no_result() -> None:
    assert isinstance(conclude(WELL), conclusion.Retry)


def sweep(*trials: Trial) -> StudyRecords:
    return StudyRecords(name="x", digest="d", study_toml="", began_at=NOW - 3600, trials={t.number: t for t in trials})


def test_a_train_loss_that_is_not_a_number_ends_the_run() -> None:
    bad = replace(run(1.0), train=(TrainPoint(80.0, math.nan, 8.0), TrainPoint(160.0, math.nan, 16.0)))
    found = pruning.judge_curve(study(), sweep(trial()), trial(), bad)
    assert found is not None
    assert found.sentence == "diverged: train loss is nan at 160 samples"


def in_steps() -> Study:
    """A study whose log counts steps, and does not say how many samples one has."""
    log = {"kind": "regex", "eval": r"(?P<step>\d+) (?P<loss>\S+)"}
    return study().with_options({"workload": {"log": log}})


def test_what_is_said_of_a_run_counts_in_what_its_log_counts_in() -> None:
    bad = replace(run(1.0), train=(TrainPoint(80.0, math.nan, 8.0), TrainPoint(160.0, math.nan, 16.0)))
    found = pruning.judge_curve(in_steps(), sweep(trial()), trial(), bad)
    assert found is not None
    assert found.sentence == "diverged: train loss is nan at 160 steps"
    found = pruning.judge_curve(in_steps(), sweep(trial()), trial(), run(1.0, math.nan, math.nan))
    assert found is not None
    assert found.sentence == "diverged: eval loss is not finite since 100 steps"
    assert diagnose("", run=bad, unit=in_steps().progress_unit).line == "loss nan at 160 steps"
    fast = objective_of(in_steps().with_options({"objective": {"score": "throughput"}}))
    assert (fast.text(3.5), fast.heading) == ("3.5 steps/s", "Steps/s")


def test_one_train_loss_that_is_not_a_number_is_a_step_that_was_skipped() -> None:
    """A batch without a label, or an overflow for which the loss scale is lowered: the next one says what it was."""
    once = replace(run(1.0), train=(TrainPoint(80.0, 1.2, 8.0), TrainPoint(160.0, math.nan, 16.0)))
    assert pruning.judge_curve(study(), sweep(trial()), trial(), once) is None


def finished_well(count: int, **change: Any) -> StudyRecords:
    """A sweep whose trials 1 to ``count`` have reached the target 0, one after another."""
    done = {"state": TrialState.FINISHED, "verdict": Verdict.REACHED, **change}
    numbers = range(1, count + 1)
    return replace(
        sweep(*(trial(n, finished_at=NOW + n, **done) for n in numbers)),
        attempts={(n, 0): replace(attempt(), trial=n) for n in numbers},
        evals={(n, 0): run(*(2.0 - 0.5 * k + 0.01 * n for k in range(6))).evals for n in numbers},
    )


FLAT = [2.0] * 4


def test_a_run_is_compared_with_the_best_runs_once_enough_have_ended() -> None:
    assert pruning.judge_curve(study(), finished_well(3), trial(), run(*FLAT)) is None
    found = pruning.judge_curve(study(), finished_well(4), trial(), run(*FLAT))
    assert isinstance(found, policy.Stop)
    assert "further above the best 3 of 4 finished runs" in found.sentence
    assert "of the runs that come among the best 4, at most 25.0% look like this" in found.sentence


def test_in_a_first_sweep_without_a_good_run_bad_ones_are_stopped_and_the_best_goes_on() -> None:
    """No run has come to the target 0: those that came closest are what others are compared with."""
    numbers = range(1, 9)
    missed = replace(
        finished_well(8, verdict=Verdict.CENSORED),
        evals={(n, 0): run(*(2.0 - 0.2 * k + 0.02 * n for k in range(6))).evals for n in numbers},
    )
    assert evidence.whole_runs(study(), missed)[0].number == 1
    found = pruning.judge_curve(study(), missed, trial(), run(*FLAT, *FLAT[:2]))
    assert isinstance(found, policy.Stop)
    assert pruning.judge_curve(study(), missed, trial(), run(2.0, 1.75, 1.5, 1.2)) is None


def test_a_faster_run_is_compared_with_what_slower_ones_had_come_to_in_as_many_seconds() -> None:
    """It needs more samples than they do, and is the best by the clock."""
    well, more, layout = finished_well(8), run(2.0, 1.8, 1.6, 1.4), trial(parameters={**trial().parameters, "TP": 2})
    assert isinstance(pruning.judge_curve(study(), well, layout, more), policy.Stop)
    slow = {key: tuple(e._replace(seconds=3 * e.seconds) for e in evals) for key, evals in well.evals.items()}
    assert pruning.judge_curve(study(), replace(well, evals=slow), layout, more) is None
    assert pruning.judge_curve(study(), replace(well, evals=slow), layout, run(*[2.0] * 7)) is not None


def test_stopped_runs_are_no_references_and_the_fastest_are_the_best() -> None:
    seconds = {n: replace(t, metrics=TrialMetrics(objective=100.0 - n)) for n, t in finished_well(8).trials.items()}
    stopped = {8: replace(seconds[8], verdict=Verdict.PRUNED)}
    whole = evidence.whole_runs(study(), replace(finished_well(8), trials={**seconds, **stopped}))
    assert [t.number for t in whole] == [7, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize(("spread", "capped"), [(0.001, True), (0.3, False)])
def test_the_cap_counts_how_far_equal_settings_of_the_sweep_differ(spread: float, capped: bool) -> None:
    """A run at twice the best one's time, where runs of one setting differ by a tenth of a percent, or by a third."""
    well = finished_well(12)
    seconds = [100 * math.exp(spread * (-1) ** n) for n in well.trials]
    repeats = {
        n: replace(t, seconds=s, metrics=TrialMetrics(objective=s), parameters={"LR": n // 2})
        for (n, t), s in zip(well.trials.items(), seconds, strict=True)
    }
    slow = replace(run(*FLAT[:1]), run_start_ms=0, last_ms=200_000)
    apart = study().with_options({"pruning": {"references": 99}})
    found = pruning.judge_curve(apart, replace(well, trials=repeats), trial(), slow)
    assert (isinstance(found, policy.Stop) and found.kind is StopKind.CAPPED) == capped


def test_the_cap_knows_a_leader_that_was_run_again_by_all_of_its_runs() -> None:
    """And by seconds, whatever the noise of the objective was read from before."""
    well = finished_well(4)
    rates = {1: 1, 2: 2, 3: 1, 4: 1}
    trials = {
        n: replace(t, seconds=100.0 + n, metrics=TrialMetrics(objective=7.0 + n), parameters={"LR": rates[n]})
        for n, t in well.trials.items()
    }
    records = replace(well, trials=trials)
    assert clock_noise(study(), records).repeats == 2
    incumbent = pruning._incumbent(study(), records, trials[1], 1.0)
    assert incumbent.seconds == (101.0, 103.0, 104.0)


def test_a_run_of_a_batch_size_without_references_goes_on() -> None:
    wide = trial(parameters={"GBS": 16})
    sweep = finished_well(12, parameters={"GBS": 8})
    assert pruning.judge_curve(study(), sweep, wide, run(*FLAT)) is None
    assert pruning.lone_reason(study(), sweep, wide).startswith("no like runs: none of 4 finished ones")
    assert pruning.lone_reason(study(), sweep, trial(parameters={"GBS": 8})) == ""


def test_an_audit_goes_on_though_the_rule_would_stop_it_and_divergence_stops_it_all_the_same() -> None:
    audits = study().with_options({"pruning": {"audit": 1.0}})
    found = pruning.judge_curve(audits, finished_well(8), trial(), run(*FLAT))
    assert isinstance(found, pruning.Audited)
    assert isinstance(pruning.judge_curve(audits, finished_well(8), trial(), run(1.0, math.nan, math.nan)), policy.Stop)


def test_a_run_that_has_ended_by_itself_is_not_stopped() -> None:
    assert pruning.judge_curve(study(), finished_well(8), trial(), replace(run(*FLAT), run_stop_ms=9)) is None


def test_runs_of_another_batch_or_precision_are_not_compared() -> None:
    def task(change: float = 0.0, **parameters: object) -> object:
        return evidence.task(trial(parameters={"GBS": 8, "MAX_STEPS": 1000, **parameters}), change)

    assert task() == task(LR=1e-3, MAX_STEPS=500, WARMUP_STEPS=30, FP8=True)
    assert len({task(), task(GBS=16), task(FP4=True), task(change=2800.0)}) == 4


def test_audits_are_a_share_of_the_trials_settled_by_their_seeds() -> None:
    some = study().with_options({"pruning": {"audit": 0.2}})
    chosen = [evidence.is_audit(some, replace(trial(), seed=seed)) for seed in range(500)]
    assert 60 <= sum(chosen) <= 140
    assert chosen == [evidence.is_audit(some, replace(trial(), seed=seed)) for seed in range(500)]


@pytest.mark.parametrize(
    ("budget", "share"),
    [({"trials": 12}, 0.0), ({"trials": 60}, 0.05), ({"trials": 60, "node_hours": 5, "trial_minutes": 60}, 0.0)],
)
def test_audits_are_the_default_where_a_trial_is_cheap(budget: dict[str, Any], share: float) -> None:
    assert study().with_options({"budget": budget}).audit_share == share


def test_a_trial_that_shares_its_node_has_used_its_share_of_time_and_of_node_hours() -> None:
    half = replace(look(started_at=NOW - 601), status=JobStatus(state=JobState.RUNNING, node_share=0.5))
    assert policy.watch(study(), half, NOW) is None
    shared = attempt(ended_at=NOW, node_share=0.25)
    assert conclusion.measured(study(), trial(), [shared], run(1.0), NOW).node_hours == pytest.approx(75 / 3600)


def test_the_time_of_a_trial_in_a_pack_is_told_twice_and_the_objective_is_the_first() -> None:
    packed = replace(run(1.0, -0.1), hyperparameters={"packed_seconds": 77.0})
    ended = JobStatus(state=JobState.ENDED, exit_code=0)
    verdict = conclusion.conclude(study(), [attempt()], ended, packed, Diagnosis(), trial=trial())
    assert verdict.sentence == "eval loss -0.1000 at 200 samples, 20.0 s alone (77.0 s in its pack)"
    found = conclusion.measured(study(), trial(), [attempt(ended_at=NOW)], packed, NOW)
    assert (found.objective, found.packed_seconds) == (20.0, 77.0)


def test_what_is_unknown_is_none() -> None:
    found = conclusion.measured(study(), trial(), [attempt(ended_at=NOW)], run(1.0, 0.5), NOW)
    assert (found.objective, found.init_seconds) == (None, None)
    assert found.node_hours == pytest.approx(300 / 3600)
    assert all(not isinstance(v, float) or math.isfinite(v) for v in as_mapping(found).values())


def test_the_score_takes_back_convergence_faster_than_the_reference() -> None:
    text = command_study(trials=5).replace(
        "target = 0.0", 'target = 0.925\nscore = "mlperf_score"\ncurves = "llama2_70b_lora"'
    )
    closed = parse_study(text, Path("x.toml"))
    fast = RunLog(run_start_ms=1, evals=(Eval(1536.0, 0.94, 700.0), Eval(2688.0, 0.924, 1230.0)))
    found = conclusion.measured(closed, trial(), [attempt()], fast, NOW)
    assert found.stop_seconds == 1230.0
    assert found.objective == pytest.approx(1230.0 * 3178.7 / 2688, rel=1e-4)


@pytest.mark.parametrize(
    ("budget", "trials", "reason"),
    [
        ({}, 1, ""),
        ({}, 2, "2 of 2 slots are taken"),
        ({"trials": 2}, 2, "all 2 trials are proposed"),
        ({"wall_hours": 0.5}, 0, "the 0.5 hours of the sweep are over"),
    ],
)
def test_the_budget_is_checked_before_a_proposal(budget: dict[str, Any], trials: int, reason: str) -> None:
    limited = study().with_options({"budget": budget})
    assert limits.may_propose(limited, sweep(*(trial(i) for i in range(trials))), NOW) == reason


class TestThroughputAlone:
    """No target: what a trial measures is its result, and one that cannot become the fastest is stopped."""

    @staticmethod
    def study() -> Study:
        text = command_study(trials=5, parallel=2, trial_minutes=10)
        found = parse_study(text.replace("[objective]", '[objective]\nscore = "throughput"'), Path("x.toml"))
        assert not objective_of(found).has_target
        return found

    @staticmethod
    def paced(speed: float, seconds: float, **facts: Any) -> RunLog:
        """A run that reports a train loss every half a second, at ``speed`` samples/s; nothing else in its log."""
        points = [TrainPoint(speed * t / 2, 1.0, t / 2) for t in range(1, int(2 * seconds) + 1)]
        return RunLog(run_start_ms=1, train=tuple(points), **facts)

    @staticmethod
    def sweep(**nodes: float) -> StudyRecords:
        """Finished trials: ``n4=80.0`` measured 80 samples/s on 4 nodes."""
        done = {
            i: Trial(
                number=i,
                seed=1,
                tuned={},
                parameters={"NODES": int(name[1:])},
                verdict=Verdict.REACHED,
                metrics=TrialMetrics(objective=speed),
            )
            for i, (name, speed) in enumerate(nodes.items())
        }
        return StudyRecords(name="x", digest="", study_toml="", began_at=0.0, trials=done)

    @pytest.mark.parametrize(
        ("speed", "seconds", "stopped"),
        [
            (100.0, 60, False),  # as fast as the best
            (98.0, 600, False),  # speeds differ by less than this between runs of the same configuration
            (90.0, 60, True),
            (
                90.0,
                8,
                False,
            ),  # a second's doubt about arrival, and a reading's about samples, may still make it the best
            (50.0, 1, False),  # too few readings
        ],
    )
    def test_a_slow_trial_is_stopped_once_its_pace_cannot_win(
        self, speed: float, seconds: float, stopped: bool
    ) -> None:
        trial = Trial(number=9, seed=1, tuned={}, parameters={"NODES": 4})
        found = pruning.judge_curve(self.study(), self.sweep(n4=100.0), trial, self.paced(speed, seconds))
        assert (found is not None) == stopped
        if found is not None:
            assert found.kind is StopKind.CAPPED
            assert "the best on 4 nodes is 100" in found.sentence

    def test_fewer_nodes_are_not_stopped_for_being_fewer(self) -> None:
        trial = Trial(number=9, seed=1, tuned={}, parameters={"NODES": 1})
        assert pruning.judge_curve(self.study(), self.sweep(n4=100.0), trial, self.paced(20.0, 60)) is None

    def test_nothing_is_stopped_without_a_finished_trial_or_with_the_rule_off(self) -> None:
        trial = Trial(number=9, seed=1, tuned={}, parameters={"NODES": 4})
        assert pruning.judge_curve(self.study(), self.sweep(), trial, self.paced(20.0, 60)) is None
        off = self.study().with_options({"pruning": {"rule": "none"}})
        assert pruning.judge_curve(off, self.sweep(n4=100.0), trial, self.paced(20.0, 60)) is None

    def test_what_the_program_says_of_the_whole_run_is_its_throughput(self) -> None:
        run = self.paced(90.0, 60, stated_throughput=(95.3,), overall_throughput=95.339, run_stop_ms=60_001)
        found = conclusion.conclude(
            self.study(), [attempt()], JobStatus(state=JobState.ENDED, exit_code=0), run, Diagnosis(), trial=trial()
        )
        assert isinstance(found, conclusion.Finish)
        assert (found.verdict, found.sentence) == (Verdict.REACHED, "measured 95.34 samples/s")

    def test_a_stopped_one_is_capped(self) -> None:
        stopped = attempt(stop=StopKind.CAPPED, stop_sentence="too slow", stop_at=NOW)
        found = conclusion.conclude(
            self.study(),
            [stopped],
            JobStatus(state=JobState.CANCELLED),
            self.paced(90.0, 60),
            Diagnosis(),
            trial=trial(),
        )
        assert isinstance(found, conclusion.Finish)
        assert found.verdict is Verdict.CAPPED


def test_a_program_that_trains_on_after_the_target_is_ended() -> None:
    """Hugging Face's Trainer knows no target: what it does beyond costs node-hours and says nothing."""
    evals = (Eval(100, 1.0, 10.0), Eval(200, -0.1, 20.0))
    for last, ended in ((45.0, False), (55.0, True)):
        going = RunLog(run_start_ms=0, last_ms=int(last * 1000), evals=evals)
        found = policy.watch(study(), replace(look(), run=going), NOW)
        assert (found is not None) == ended
        if found is not None:
            assert isinstance(found, policy.Stop)
            assert found.kind is StopKind.REACHED
        done = replace(going, run_stop_ms=21_000)
        assert policy.watch(study(), replace(look(), run=done), NOW) is None
