"""Why attempts fail: every known failure text gets its class, and no successful log has any."""

from __future__ import annotations

import gzip
import math
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.launchers.base import JobState
from lora_tune.logs import failures as evidence
from lora_tune.logs import failures as module
from lora_tune.logs.failures import SIGNATURES, Diagnosis, FailureKind, FailureScanner, diagnose, most_telling, redact
from lora_tune.logs.guess import guess
from lora_tune.logs.lines import is_eval_line
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import Eval, RunLog, TrainPoint
from tests import prologs

FAILURES = [
    (line, kind)
    for kind, _, line in (
        row.partition("\t")
        for row in Path(__file__).with_name("failures.tsv").read_text().splitlines()
        if row[0] != "#"
    )
]


def test_an_interval_beyond_the_training_is_cured_by_what_the_closed_division_leaves_free() -> None:
    (row,) = [signature for signature in SIGNATURES if signature.name == "val_check_interval"]
    assert row.remedy.startswith("raise MINIBS")


@pytest.mark.parametrize(("line", "kind"), FAILURES)
def test_each_failure_text_has_its_class(line: str, kind: str) -> None:
    log = f"0: [NeMo I 2025-04-21 14:07:43] starting\n0: {line}\n"
    found = diagnose(log, exit_code=1)
    assert found.kind == kind, found
    assert found.line == redact(line).strip()
    assert found.remedy


@pytest.mark.parametrize("prolog", [prologs.DGX, prologs.OTHER], ids=["DGX", "another machine"])
class TestPrologs:
    """Evidence begins where the run begins: what the scripts print before it is shown, and never the cause."""

    def test_a_healthy_run_behind_a_prolog_has_no_failure(self, prolog: str) -> None:
        run = RunLog(run_start_ms=0, evals=(Eval(8, 0.95, 1.0),))
        assert diagnose(prolog + prologs.RUN_BEGINS + "0: training\n", run=run).kind == ""

    def test_only_what_stands_behind_the_begin_of_the_run_is_its_failure(self, prolog: str) -> None:
        for line, kind in FAILURES:
            failed = diagnose(f"{prolog}{prologs.RUN_BEGINS}0: starting\n0: {line}\n{prologs.RUN_ENDS}", exit_code=0)
            assert (failed.kind, failed.line) == (kind, redact(line).strip())
            before = diagnose(f"{prolog}{line}\n{prologs.RUN_BEGINS}0: loading the model\n", exit_code=0)
            assert (before.kind, before.line) == ("unknown", "0: loading the model")

    def test_what_the_prolog_printed_is_told_as_second_reason(self, prolog: str) -> None:
        missing = "RuntimeError: mount check failed: /data missing"
        assert diagnose(f"{prolog}{missing}\n{prologs.RUN_BEGINS}0: loading\n").also == missing

    @pytest.mark.parametrize(
        ("line", "kind"),
        [
            ("sudo: a password is required", "configuration"),
            ("RuntimeError: mount check failed: /data missing", "configuration"),
            ("slurmstepd: error: pyxis: couldn't start container", "configuration"),
            ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "infrastructure"),
            ("tee: /home/u/log: Disk quota exceeded", "infrastructure"),
        ],
    )
    def test_what_ends_the_script_before_its_run_is_the_cause(self, prolog: str, line: str, kind: str) -> None:
        log = f"{prolog}{line}\nsrun: error: n1: task 0: Exited with exit code 1\n"
        log += "/bin/bash: line 1: enroot: command not found\n"  # the clean-up in its trap
        found = diagnose(log, exit_code=1)
        assert (found.kind, found.line) == (kind, line)

    def test_the_next_of_several_runs_begins_anew(self, prolog: str) -> None:
        """NEXP=2: what the first run died of says nothing of the second."""
        begins = "Beginning trial 2 of 2\nsudo: a password is required\n" + prologs.RUN_BEGINS
        log = prolog + prologs.RUN_BEGINS + "0: torch.OutOfMemoryError: CUDA out of memory\n" + prologs.RUN_ENDS
        assert (
            diagnose(log + begins + "0: RuntimeError: CUDA error: uncorrectable ECC error\n").kind == "infrastructure"
        )


PYXIS = "slurmstepd: error: pyxis: "
START_FAILED = f"{PYXIS}couldn't start container"
REASONS = [
    f"{PYXIS}    [ERROR] URL https://registry.example/v2/x/manifests/1 returned error code: 404 Not Found",
    f"{PYXIS}    /usr/lib/enroot/docker.sh: line 337: 4711 Killed                  mksquashfs",
    f"{PYXIS}    mkdir: cannot create directory '/run/enroot': Permission denied",
    f"{PYXIS}    Write failed because No space left on device",
    f"{PYXIS}    enroot-mount: failed to mount: /data at /data: No such file or directory",
    f"{PYXIS}    FATAL ERROR:Failed to write to output filesystem",
    "[ERROR] URL https://registry.example/v2/x/manifests/1 returned error code: 401 Unauthorized",
    "/usr/lib/enroot/docker.sh: line 337: 4711 Killed                  mksquashfs",
]
AROUND = [f"{PYXIS}    [INFO] Fetching image manifest", f"{PYXIS}    Parallel mksquashfs: Using 2 processors"]


@pytest.mark.parametrize("prolog", ["", prologs.DGX, prologs.OTHER], ids=["no prolog", "DGX", "another machine"])
@pytest.mark.parametrize("reason", REASONS, ids=range(len(REASONS)))
def test_why_enroot_did_not_start_the_container_is_in_the_sentence(reason: str, prolog: str) -> None:
    """Whether its log comes before what pyxis says of it or after, and whatever else that log holds."""
    shown = " ".join(redact(reason).removeprefix(PYXIS).split())
    enroots = [AROUND[0], reason, f"{PYXIS}    FATAL ERROR:Failed to write to output filesystem", AROUND[1]]
    for lines in ([*enroots, START_FAILED], [START_FAILED, *enroots], [START_FAILED, *enroots, START_FAILED]):
        found = diagnose(prolog + "".join(f" 0: {line}\n" for line in lines), exit_code=1)
        assert shown in " ".join(found.line.split()), found
        assert "couldn't start container" in found.sentence
        assert " ".join(found.sentence.split()).count(shown) == 1, "told once"


def test_what_enroot_printed_is_no_failure_where_the_container_started() -> None:
    scanner = FailureScanner()
    scanner.feed("".join(f"{line}\n" for line in (REASONS[0], REASONS[6])).encode())
    assert most_telling(scanner.hits(), begun=False) == []
    died = "0: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    assert diagnose(f"{REASONS[0]}\n{died}", exit_code=1).sentence == died[3:].strip()


def test_scripts_without_marks_of_their_own_are_read_by_those_of_run_and_time() -> None:
    """v4.0's run.sub and run_with_docker.sh print neither PROLOG_START nor RUNANDTIME_START."""
    log = "/usr/bin/bash: line 2: /etc/dgx-release: No such file or directory\nBeginning trial 1 of 1\n"
    log += "sudo: a password is required\nSTARTING TIMING RUN AT 2025-10-09 08:54:10 AM\n"
    log += "0: RuntimeError: CUDA error: uncorrectable ECC error\n1: STARTING TIMING RUN AT 2025-10-09 08:54:11 AM\n"
    assert diagnose(log).kind == "infrastructure"


@pytest.mark.parametrize(
    ("line", "certain"),
    [
        ("nemo_lora: TP=3 PP=1 CP=1: allowed is a product that divides the 8 processes", True),
        ("AssertionError: batch size 9 is not divisible by world size 8", True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has", False),
    ],
)
def test_only_what_memory_decides_may_end_otherwise_on_another_node(line: str, certain: bool) -> None:
    found = diagnose(line, exit_code=1)
    assert (found.kind, found.certain) == ("infeasible", certain)


def test_each_failure_text_is_found_behind_labels_colours_and_progress_bars() -> None:
    for line, kind in FAILURES:
        for dressed in (f" 7: {line}", f"\x1b[31m{line}\x1b[0m", f"50%|###   |\r{line}", f"{line}\r"):
            assert diagnose(f"a\n{dressed}\nb\n", exit_code=1).kind == kind, dressed
    for escape in ("\x1b]8;;https://a.b/c\x1b\\", "\x1b[2K", "\x1b[1!p", "\x1b(B", "\x1b[1m"):
        text = f"AssertionError: batch size 9 is not {escape}divisible by world size 8"
        assert diagnose(text, exit_code=1).kind == "infeasible", escape


def test_each_signature_is_shown_by_a_failure_text() -> None:
    shown = set()
    for line in (*(text for text, _ in FAILURES), *REASONS):
        scanner = FailureScanner()
        scanner.feed(line.encode() + b"\n")
        shown |= {hit.signature.name for hit in scanner.hits()}
    assert {signature.name for signature in SIGNATURES} <= shown


@pytest.mark.public_data
def test_no_log_of_a_successful_run_has_a_signature(public_data: Path) -> None:
    """1,049 successful logs hold thousands of warnings; the one that hit its time limit is told from them."""
    failed = []
    for log in sorted((public_data / "logs").rglob("*.txt.gz")):
        text = gzip.decompress(log.read_bytes())
        scanner, reader = FailureScanner(), MllogReader()
        scanner.feed(text)
        reader.feed(text)
        found = diagnose(scanner, exit_code=0, run=reader.run())
        if most_telling(scanner.hits(), begun=scanner.begun()) or found.kind:
            failed.append((log.parent.name, log.name, found.kind.value, found.line[-22:]))
    assert failed == [("9xXE9712x4GB200", "result_9.txt.gz", "configuration", " DUE TO TIME LIMIT ***")]


@pytest.mark.parametrize("step", ["import", "fabric", "clocks", "nccl"])
@pytest.mark.parametrize("machine", ["dgx", "other"])
class TestPrograms:
    """What enroot, nvidia-smi and the NCCL test print is evidence of nothing, wherever a script starts them.

    Some scripts ask nvidia-smi in run_and_time.sh, behind RUNANDTIME_START, and scripts of one's own print no marks.
    """

    def test_no_line_is_a_failure_text(self, step: str, machine: str) -> None:
        scanner = FailureScanner()
        scanner.feed(prologs.printed(step, machine).encode())
        assert [hit.line for hit in scanner.hits()] == []

    def test_no_line_looks_like_an_eval_or_like_a_log_to_read(self, step: str, machine: str) -> None:
        text = prologs.printed(step, machine)
        assert [line for line in text.splitlines() if is_eval_line(line)] == []
        assert guess(text.encode()) is None


FRIGHTENING = [
    "3: GPU-3:1:2 [3] proxy.cc:1521 NCCL WARN [Proxy Service 3] Failed to execute operation Close from rank 3",
    "2: [n1:9] PMIX ERROR: ERROR in file gds_ds12_lock_pthread.c at line 168",
    "gdrcopy open failed",
    "0: [W9 socket.cpp:752] [c10d] The client socket has failed to connect to [n9]:29500 (errno: 22 - Invalid",
    "sys:1: ResourceWarning: unclosed <socket.socket fd=9>",
    "srun: warning: can't run 1 processes on 9 nodes, setting nnodes to 1",
    "+ srun --ntasks=9 bash -c 'echo CONT not set; false || echo CUDA out of memory, Killed'",
    "++ : 'CONT: CONT not set'",
    "/usr/bin/bash: line 1: nvidia-smi: command not found",
    "/usr/local/bin/mlperf-sysjson.sh: line 60: ibstat: command not found",
    "0: loss 1.25 nan iterations: 0 | number of skipped iterations: 0 | lm loss: 1.2",
]


@pytest.mark.parametrize("line", FRIGHTENING)
def test_frightening_lines_of_healthy_runs_are_no_failures(line: str) -> None:
    scanner = FailureScanner()
    scanner.feed(line.encode() + b"\n")
    assert scanner.hits() == ()


STEP = ':::MLLOG {"time_ms": 1, "event_type": "POINT_IN_TIME", "key": "train_loss", "value": 1.3}\n'


class TestChoice:
    """Which of several texts is the cause, and what the cluster and the measurements add."""

    def test_a_job_that_was_killed_in_its_prolog_did_not_die_of_what_the_prolog_printed(self) -> None:
        log = "PROLOG_START\nrun.sub: line 100: ibstat: command not found\n+ echo NCCL_TEST = 1\n"
        assert diagnose(log, exit_code=1).kind is FailureKind.CONFIGURATION
        assert diagnose(log, exit_code=137).kind is FailureKind.INFRASTRUCTURE

    def test_an_error_that_the_training_survived_is_not_the_cause_and_is_shown_as_second_reason(self) -> None:
        log = "torch.OutOfMemoryError: CUDA out of memory; retrying with a smaller cache\n" + STEP * 5
        log += "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
        found = diagnose(log, exit_code=1)
        assert (found.kind, found.also[:22]) == ("infrastructure", "torch.OutOfMemoryError")
        assert found.sentence.startswith(
            "RuntimeError: CUDA error: uncorrectable ECC error encountered (also in its log: "
        )

    def test_a_line_or_two_of_another_rank_do_not_show_that_it_was_survived(self) -> None:
        log = STEP * 9 + "3: torch.OutOfMemoryError: CUDA out of memory\n" + STEP * 2 + "0: NCCL error: remote exited\n"
        assert diagnose(log, exit_code=1).kind == "infeasible"

    def test_an_error_whose_buffered_progress_came_late_is_still_the_cause(self) -> None:
        log = "torch.OutOfMemoryError: CUDA out of memory\n" + STEP * 30
        assert diagnose(log, exit_code=1).kind == "infeasible"

    def test_what_a_shell_remarks_yields_to_any_exception(self) -> None:
        remark = "./run_and_time.sh: line 12: /opt/site/hooks: No such file or directory\n"
        for line, kind in [("ncclSystemError: lost", "infrastructure"), ("ValueError: what", "unknown")]:
            found = diagnose(f"{line}\n{remark}", exit_code=1)
            assert (found.kind, found.also) == (kind, remark.strip())
        assert diagnose(remark, exit_code=1).kind == "configuration"
        assert diagnose(remark, run=RunLog(evals=(Eval(8, 0.95, 1.0),))).kind == "", (
            "it measured, and nothing else is wrong"
        )

    def test_the_last_exception_beats_an_earlier_one(self) -> None:
        found = diagnose("ValueError: no fused kernel here, using another\n\nKeyError: 'train'\n", exit_code=1)
        assert found.line == "KeyError: 'train'"

    @pytest.mark.parametrize("state", [JobState.TIME_LIMIT, JobState.CANCELLED, JobState.LOST, JobState.HOST_MEMORY])
    def test_the_schedulers_verdict_beats_a_general_text_and_yields_to_a_specific_one(self, state: JobState) -> None:
        general, specific = "KeyError: 'x'\n", "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
        found = diagnose(general, state=state.value, reason="its words")
        assert (found.line, found.also) == ("its words", "KeyError: 'x'")
        assert diagnose(specific, state=state.value, reason="its words").kind == "infrastructure"

    def test_memory_on_one_rank_is_the_cause_of_broken_connections_on_the_others(self) -> None:
        log = "1: torch.distributed.DistBackendError: NCCL error: remote process exited\n"
        log += "Traceback (most recent call last):\n0: torch.OutOfMemoryError: CUDA out of memory.\n"
        log += "slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2025-04-21T14:07:43 ***\n"
        found = diagnose(log, exit_code=1)
        assert (found.kind, found.line) == ("infeasible", "torch.OutOfMemoryError: CUDA out of memory.")

    def test_a_run_that_ended_by_itself_did_not_fail(self) -> None:
        run = RunLog(run_start_ms=0, run_stop_ms=9, status="aborted", evals=(Eval(8, 0.95, 1.0),))
        assert diagnose("Segmentation fault\n", exit_code=0, run=run) == Diagnosis()
        assert diagnose("", exit_code=0, run=RunLog(evals=(Eval(8, 0.95, 1.0),))) == Diagnosis()

    @pytest.mark.parametrize("code", [0, 1])
    def test_a_training_that_ended_before_its_first_eval_says_so_whatever_the_script_did_after_it(self, code) -> None:
        """The script's clean-up has an exit code and a last line of its own, which say nothing of the training."""
        run = RunLog(run_start_ms=0, run_stop_ms=9, status="aborted")
        found = diagnose("+ srun --ntasks-per-node=1 /bin/bash -c cleanup\n", exit_code=code, run=run)
        assert found.kind == "configuration"
        assert "ended by itself before its first eval" in found.line
        memory = diagnose("torch.OutOfMemoryError: CUDA out of memory.\n", exit_code=code, run=run)
        assert memory.kind == "infeasible"
        assert diagnose("", exit_code=137, run=run).kind != "configuration"

    def test_a_faked_success_without_evals_is_not_one(self) -> None:
        run = RunLog(run_start_ms=0, run_stop_ms=9, status="success")
        assert diagnose("RESULT,LLM_FINETUNING\n", exit_code=0, run=run).kind == "unknown"

    @pytest.mark.parametrize(
        ("state", "kind"),
        [
            (JobState.NODE_FAILED, "infrastructure"),
            (JobState.PREEMPTED, "preempted"),
            (JobState.HOST_MEMORY, "host memory"),
            (JobState.DISPLACED, "displaced"),
            (JobState.TIME_LIMIT, "configuration"),
            (JobState.CANCELLED, "infrastructure"),
            (JobState.LOST, "infrastructure"),
        ],
    )
    def test_what_the_cluster_says(self, state: JobState, kind: str) -> None:
        found = diagnose("training\n", state=state.value, reason="as it says")
        assert (found.kind, found.line) == (kind, "as it says")
        assert diagnose("", state=state.value).line == f"the cluster says: {state.value}"

    def test_every_state_in_which_a_job_can_end_is_known(self) -> None:
        known = {"ended", *module._STATES_ABOVE_LOG, *module._STATES_BELOW_LOG}
        assert known == {state.value for state in JobState if not state.alive}

    def test_a_node_that_died_outranks_what_its_ranks_printed(self) -> None:
        assert diagnose("ncclSystemError: x\n", state="node failed").kind == "infrastructure"
        assert diagnose("CUDA out of memory\n", state="preempted").kind == "preempted"

    @pytest.mark.parametrize(
        "run",
        [
            RunLog(train=(TrainPoint(8, 1.0, 1.0), TrainPoint(16, math.nan, 2.0))),
            RunLog(evals=(Eval(8, math.inf, 1.0),), run_stop_ms=1),
        ],
    )
    def test_a_loss_that_is_no_number_is_divergence(self, run: RunLog) -> None:
        found = diagnose("ncclRemoteError: x\n", exit_code=0, run=run)
        assert found.kind == "diverged"
        assert found.line.startswith("loss ")

    def test_a_loss_that_recovered_is_not(self) -> None:
        run = RunLog(train=(TrainPoint(8, math.nan, 1.0), TrainPoint(16, 1.0, 2.0)), evals=(Eval(8, 0.9, 1.0),))
        assert diagnose("", exit_code=0, run=run).kind == ""

    @pytest.mark.parametrize(
        ("code", "kind", "words"),
        [
            (-11, "flaky", "segmentation fault"),
            (139, "flaky", "segmentation fault"),
            (137, "infrastructure", "killed"),
            (-15, "infrastructure", "terminated"),
            (127, "configuration", "command not found"),
            (3, "unknown", "exit code 3"),
            (255, "unknown", "exit code 255"),
        ],
    )
    def test_without_any_text_the_exit_code_speaks(self, code: int, kind: str, words: str) -> None:
        found = diagnose("starting\nworking\n\n", exit_code=code)
        assert found.kind == kind
        assert words in found.line
        assert "last line: working" in found.line

    def test_what_the_programs_runner_says_is_not_its_last_line(self) -> None:
        """The job of a program that failed ended with "Exiting after successful completion"."""
        runner = "submitit INFO (2026-11-23 15:32:25,243) - Exiting after successful completion\n"
        assert "last line: working" in diagnose(f"starting\nworking\n{runner}", exit_code=1).line
        silent = f"{runner}lora-tune: attempt 06b364043db8 of sweep b1b8a27a\n{runner}"
        assert diagnose(silent, exit_code=1).line == "exit code 1; last line: none"

    def test_a_log_that_says_nothing(self) -> None:
        assert diagnose(b"", exit_code=0) == Diagnosis(FailureKind.UNKNOWN, "the log is empty", "read the job's log")
        assert diagnose("only this", exit_code=0).line == "only this"


class TestScanner:
    def test_the_last_line_of_a_signature_counts(self) -> None:
        scanner = FailureScanner()
        scanner.feed(b"KeyError: 'handled'\nKeyError: 'fatal'\n")
        assert {hit.line for hit in scanner.hits()} == {"KeyError: 'fatal'"}

    def test_an_unfinished_last_line_counts(self) -> None:
        scanner = FailureScanner()
        scanner.feed(b"x\nKey")
        scanner.feed(b"Error: 'a'")
        assert scanner.hits()[0].line == "KeyError: 'a'"
        assert scanner.last_line() == "KeyError: 'a'"

    def test_lines_are_shown_short_and_without_secrets(self) -> None:
        scanner = FailureScanner()
        scanner.feed(b"RuntimeError: \x1b[31mno https://me:hunter2@host/x with HF_TOKEN=hf_abcdefghijklmnopqrst\n")
        assert [hit.line for hit in scanner.hits()] == ["RuntimeError: no https://***@host/x with HF_TOKEN=***"]
        scanner.feed(b"KeyError: '" + b"x" * 3000 + b"'\n")
        assert {len(hit.line) for hit in scanner.hits()} == {evidence.SHOWN_CHARACTERS}

    def test_a_gigabyte_without_newline_takes_bounded_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(evidence, "SCANNED_BYTES", 4 << 20)
        scanner = FailureScanner()
        for _ in range(64):
            scanner.feed(b"x" * (1 << 20))
            assert sys.getsizeof(scanner._held) <= 4 * evidence.TAIL_BYTES
        scanner.feed(b"\nKeyError: 'late'\n")
        assert scanner.hits()[0].line == "KeyError: 'late'", "the end of a flood is scanned"

    def test_a_text_that_very_many_lines_hold_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(evidence, "MAX_TRIED", 100)
        scanner = FailureScanner()
        scanner.feed(b"0: some error\n" * 200 + b"RuntimeError: x\nSegmentation fault\n")
        assert [hit.signature.name for hit in scanner.hits()] == ["crash"]

    def test_a_flood_of_lines_that_look_like_errors_is_read_in_seconds(self) -> None:
        scanner = FailureScanner()
        begin = time.process_time()
        for _ in range(16):
            scanner.feed(b"0: some error, not an Exception, SIG, not set, emory\n" * 20_000)
        assert time.process_time() - begin < 60
        assert scanner.hits() == ()

    def test_a_flood_without_line_ends_costs_little_more_than_other_text(self) -> None:
        """Patterns tried all of each 4 KB: a look at 8 MB took 7 s of processor."""
        spent = []
        for text in (b"loss of the step is 0.51, ", b"RuntimeError: CUDA error, "):
            scanner, begin = FailureScanner(), time.process_time()
            scanner.feed(text * 80_000)
            spent.append(time.process_time() - begin)
        assert spent[1] < 8 * spent[0]

    @pytest.mark.parametrize("before", [0, 700, 3_000, 9_000])
    def test_a_failure_text_is_found_wherever_it_stands_in_a_long_line(self, before: int) -> None:
        scanner = FailureScanner()
        scanner.feed(b"loss 0.5, " * (before // 10) + b"Segmentation fault (core dumped) " + b"x" * 5_000 + b"\n")
        assert [hit.signature.name for hit in scanner.hits()] == ["crash"]

    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(
            st.sampled_from([line.encode() + b"\n" for line, _ in FAILURES])
            | st.sampled_from([b"\n", b"\r", b"+ ", b"0: ", b"x" * 4000, b"Error: ", b"\xff"]),
            max_size=8,
        ),
        st.lists(st.integers(0, 20_000), max_size=8),
    )
    def test_any_split_of_the_bytes_finds_the_same(self, pieces: list[bytes], cuts: list[int]) -> None:
        log = b"".join(pieces)
        whole, split = FailureScanner(), FailureScanner()
        whole.feed(log)
        for begin, end in pairwise([0, *sorted(min(cut, len(log)) for cut in cuts), len(log)]):
            split.feed(log[begin:end])
        assert split.hits() == whole.hits()
        assert split.last_line() == whole.last_line()

    @settings(max_examples=200, deadline=None)
    @given(st.binary(max_size=300))
    def test_no_bytes_raise(self, log: bytes) -> None:
        assert isinstance(diagnose(log, exit_code=1), Diagnosis)


SECRETS = [
    ("+ export HF_TOKEN={}", "+ export HF_TOKEN=***"),
    ("+ HF_TOKEN='{} x'", "+ HF_TOKEN=***"),
    ("++ export 'WANDB_API_KEY={}'", "++ export 'WANDB_API_KEY=***'"),
    ('declare -x MYSQL_PWD="{}"', "declare -x MYSQL_PWD=***"),
    ("PGPASSWORD={} psql -h db", "PGPASSWORD=*** psql -h db"),
    ("AWS_SECRET_ACCESS_KEY={}", "AWS_SECRET_ACCESS_KEY=***"),
    ("AWS_ACCESS_KEY_ID={}", "AWS_ACCESS_KEY_ID=***"),
    ("SLURM_JWT={}", "SLURM_JWT=***"),
    ('{{"hf_token": "{}", "lr": 1}}', '{"hf_token": ***, "lr": 1}'),
    ("{{'password': '{} y', 'b': 1}}", "{'password': ***, 'b': 1}"),
    ("python x.py --hf-token {} --n 3", "python x.py --hf-token *** --n 3"),
    ("python x.py --api-key={}", "python x.py --api-key=***"),
    ("curl -u me:{} https://x", "curl -u me:*** https://x"),
    ("docker login -u me -p {} nvcr.io", "docker login -u me -p *** nvcr.io"),
    ("git clone https://me:{}@host/x.git", "git clone https://***@host/x.git"),
    ("postgresql+psycopg://me:{}@db:5432/optuna", "postgresql+psycopg://***@db:5432/optuna"),
    ("+ curl -H 'Authorization: Bearer {}' x", "+ curl -H 'Authorization: Bearer ***' x"),
    ("password is {}", "password is ***"),
    (
        "wandb: Paste an API key from your profile and hit enter: {}",
        "wandb: Paste an API key from your profile and hit enter: ***",
    ),
    ("\x1b[31mHF_TO\x1b[0mKEN={}", "HF_TOKEN=***"),
]


TOKENS = (
    "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
    "nvapi-abcdefghijklmnopqrstuvwxyz0123456789",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "glpat-abcdefghijklmnopqrst",
    "AKIAIOSFODNN7EXAMPLE",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
)


class TestRedact:
    @pytest.mark.parametrize(("line", "shown"), SECRETS)
    def test_secrets_are_hidden(self, line: str, shown: str) -> None:
        assert redact(line.format("s3cr3t+/=Value")) == shown

    def test_what_has_the_form_of_a_secret_is_hidden_whole_and_anywhere(self) -> None:
        for token in TOKENS:
            assert redact(f"using {token}, ok") == "using ***, ok"
        assert redact(f"https://me:{'x' * 600}://{'y' * 600}@host/x") == "https://***@host/x"
        key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA PRIVATE KEY-----"
        assert redact(f"a\n{key}\nb") == "a\n***\nb"

    @pytest.mark.parametrize(
        "text",
        [
            "tokenizer: /models/llama tokens=8192 num_tokens: 5 max_tokens 3",
            "eos_token='</s>' bos_token_id=1 pad_token: <pad>",
            "https://host:8080/path?x=1 and user@host",
            "Permission denied (publickey,password).",
            "sudo: a password is required",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB",
            ':::MLLOG {"namespace": "", "time_ms": 1, "key": "seed", "value": 3}',
            "KEY=value MONKEY=5 keyboard: us",
            "two\nlines\tand a tab",
        ],
    )
    def test_what_is_no_secret_stays(self, text: str) -> None:
        assert redact(text) == text

    def test_terminal_escapes_and_control_characters_go(self) -> None:
        assert redact("\x1b]0;title\x07a\x1b[2Jb\x1b(Bc\x00d\x9b31me\x7f\n") == "abcde\n"

    @settings(max_examples=200, deadline=None)
    @given(st.text(max_size=200) | st.sampled_from([line.format("abcdefgh") for line, _ in SECRETS]))
    def test_redacting_twice_changes_nothing(self, text: str) -> None:
        assert redact(redact(text)) == redact(text)

    @pytest.mark.parametrize(
        "text", ["token", "token=", "-" * 5, "a:", "://", "\x1b[", "'", "-----BEGIN PRIVATE KEY-----", "login "]
    )
    def test_long_hostile_text_is_read_in_seconds(self, text: str) -> None:
        begin = time.process_time()
        redact(text * (200_000 // len(text)))
        assert time.process_time() - begin < 20


def test_errors_of_code_that_a_training_evaluates_hide_no_fault_of_the_machine() -> None:
    fault = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    log = f"sample 3: SyntaxError: invalid syntax\nsample 4: EOFError: EOF when reading a line\n{fault}\n"
    assert diagnose(log, exit_code=1).kind is FailureKind.INFRASTRUCTURE
