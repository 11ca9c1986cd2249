"""Why an attempt failed: from its log, what the cluster says of its job, and what it measured.

:class:`FailureScanner` remembers which failure texts a log holds and where; :func:`diagnose` weighs them against the
cluster's verdict. Evidence begins where the run begins, a specific text beats a general one, the last error before the
end beats an early warning, and the second reason is reported beside the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lora_tune.base.format import counted
from lora_tune.base.redact import redact
from lora_tune.logs.failure_evidence import FailureScanner, Hit, Phase, most_telling
from lora_tune.logs.failure_signatures import SIGNATURES, FailureKind, Weight
from lora_tune.logs.run import Eval, RunLog, TrainPoint

__all__ = ["Diagnosis", "FailureKind", "FailureScanner", "diagnose", "redact"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why an attempt failed. ``kind`` is "" when it did not fail.

    line: the log line that shows it, redacted, or what the cluster said. remedy: what a person can do. certain: the
    same values would fail again on any node. also: the next reason that the log shows, "" where there is no other.
    specific: the log names this cause; else the cluster, the exit code or a general text says it. by_scheduler: the
    scheduler's own verdict, as it stands in the log.
    """

    kind: FailureKind = FailureKind.NONE
    line: str = ""
    remedy: str = ""
    certain: bool = False
    also: str = ""
    specific: bool = False
    by_scheduler: bool = False

    @property
    def told(self) -> str:
        """The line with the second reason behind it."""
        return f"{self.line} (also in its log: {self.also})" if self.also else self.line


def diagnose(
    log: FailureScanner | bytes | str,
    *,
    state: str = "ended",
    exit_code: int | None = None,
    reason: str = "",
    run: RunLog | None = None,
    unit: str = "samples",
) -> Diagnosis:
    """Why the attempt failed, or ``kind`` "" when it did not: then it ended by itself, whatever its loss.

    log: its scanned log, or its text. state: what the cluster says of the job (the values of ``JobState``), reason:
    in the cluster's own words. exit_code: None where unknown; a training may fail with 0. run: what the log measured.
    unit: what it counts in, for people.
    """
    scanner = log if isinstance(log, FailureScanner) else _scan(log)
    hits, run = scanner.hits(), run or RunLog()
    telling = most_telling(hits, begun=scanner.begun())
    diagnosis = _first_reason(telling, scanner.last_line(), state, exit_code, reason, run, unit)
    if not diagnosis.kind:
        return diagnosis
    diagnosis = replace(diagnosis, line=_completed(diagnosis.line, telling, hits))
    return replace(diagnosis, also=_second_reason(diagnosis, [*telling, *reversed(hits)]))


def is_refusal(line: str) -> bool:
    """Whether a line of a log is a refusal of the trial's values by its program, not a lack of memory."""
    text = line.encode(errors="replace")
    known = (s for s in SIGNATURES if s.kind is FailureKind.INFEASIBLE and s.certain)
    return any(signature.pattern.search(text) for signature in known)


def _first_reason(
    telling: Sequence[Hit], last_line: str, state: str, exit_code: int | None, reason: str, run: RunLog, unit: str
) -> Diagnosis:
    if state in _STATES_ABOVE_LOG:
        kind, remedy = _STATES_ABOVE_LOG[state]
        return Diagnosis(kind, redact(reason) or f"the cluster says: {state}", remedy)
    fatal = [hit for hit in telling if not hit.survived]
    if (point := _diverged(run)) and not any(hit.signature.kind is FailureKind.INFEASIBLE for hit in fatal):
        line = f"loss {point.loss} at {counted(point.samples, unit)}"
        return Diagnosis(FailureKind.DIVERGED, line, "lower the learning rate, or warm up for longer")
    if state == "ended" and not exit_code and run.run_stop_ms is not None and run.evals:
        return Diagnosis()
    measured = bool(run.evals) and not exit_code
    cause = next((hit for hit in fatal if not (measured and hit.signature.weight is Weight.REMARK)), None)
    if state in _STATES_BELOW_LOG:
        if cause is None or cause.signature.weight > Weight.CAUSE:
            kind, remedy = _STATES_BELOW_LOG[state]
            return Diagnosis(kind, redact(reason) or f"the cluster says: {state}", remedy)
    elif cause is None and not measured:
        # It failed, and the only error stands before lines of progress: those may have waited in a buffer.
        cause = next((hit for hit in telling if hit.signature.weight < Weight.REMARK), None)
    killed = exit_code is not None and _signal(exit_code) in (9, 15)
    if cause is not None and not (killed and cause.phase is Phase.PROLOG):
        return _of(cause)
    if exit_code:
        return _by_exit_code(exit_code, last_line)
    if run.evals:
        return Diagnosis()
    # Nothing failed, and nothing was measured: most often the log has another form than the study says.
    remedy = "read the job's log; is it of the kind that [workload.log] says?" if last_line else "read the job's log"
    return Diagnosis(FailureKind.UNKNOWN, last_line or "the log is empty", remedy)


def _of(hit: Hit) -> Diagnosis:
    signature = hit.signature
    specific, verdict = signature.weight is Weight.CAUSE, signature.weight is Weight.VERDICT
    return Diagnosis(
        signature.kind, hit.line, signature.remedy, signature.certain, specific=specific, by_scheduler=verdict
    )


def _second_reason(diagnosis: Diagnosis, hits: Sequence[Hit]) -> str:
    """The line of the most telling text of another kind than ``diagnosis``; what only ended the job is no reason."""
    for hit in hits:
        reason = hit.signature.weight is not Weight.ENDED and not hit.signature.completes
        if reason and _words(hit) not in diagnosis.line and hit.signature.remedy != diagnosis.remedy:
            return hit.line
    return ""


def _completed(line: str, telling: Sequence[Hit], hits: Sequence[Hit]) -> str:
    """The cause's line with the reason behind it that another program gave: pyxis says only that enroot failed."""
    cause = next((hit for hit in telling if hit.line == line), None)
    if cause is None:
        return line
    reasons = [h for h in hits if h.signature.completes == cause.signature.name and h.phase is cause.phase]
    first = min(reasons, key=lambda hit: SIGNATURES.index(hit.signature), default=None)
    return line if first is None or _words(first) in line else f"{line}: {_words(first)}"


def _words(hit: Hit) -> str:
    """A hit's line without the name of the program that passed it on."""
    return hit.line.rpartition("pyxis: ")[2].strip()


def _scan(log: bytes | str) -> FailureScanner:
    scanner = FailureScanner()
    scanner.feed(log.encode(errors="replace") if isinstance(log, str) else log)
    return scanner


def _diverged(run: RunLog) -> Eval | TrainPoint | None:
    """The newest eval or train point whose loss is no finite number."""
    newest: tuple[Eval | TrainPoint, ...] = (*run.evals[-1:], *run.train[-1:])
    return next((point for point in newest if not math.isfinite(point.loss)), None)


def _signal(code: int) -> int:
    """The signal that an exit code stands for; the code itself where it stands for none."""
    return -code if code < 0 else code - 128 if 128 < code < 192 else code


def _by_exit_code(code: int, last_line: str) -> Diagnosis:
    kind, what, remedy = _EXITS.get(_signal(code), (FailureKind.UNKNOWN, "", "read the job's log"))
    return Diagnosis(kind, f"exit code {code}{what}; last line: {last_line or 'none'}", remedy)


# What the cluster knows better than any log, and what it says where the log shows no cause of its own.
_STATES_ABOVE_LOG = {
    "node failed": (FailureKind.INFRASTRUCTURE, "run it on another node and report this one"),
    "preempted": (FailureKind.PREEMPTED, "nothing to fix: it is run again"),
    "displaced": (FailureKind.DISPLACED, "nothing to fix: it is run again, and this attempt does not count"),
    "not begun": (FailureKind.CAPACITY, "nothing to fix in the study: it is submitted again, and no attempt is spent"),
}
_STATES_BELOW_LOG = {
    "out of memory": (FailureKind.INFEASIBLE, "ask for more host memory (--mem=0), or use fewer data workers"),
    "host memory": (
        FailureKind.HOST_MEMORY,
        "ask for more host memory (under Slurm --mem=0), or run fewer side by side (site.slots, budget.parallel)",
    ),
    "time limit": (FailureKind.CONFIGURATION, "raise budget.trial_minutes, or WALLTIME"),
    "cancelled": (FailureKind.INFRASTRUCTURE, "it was cancelled: run it again"),
    "lost": (FailureKind.INFRASTRUCTURE, "the cluster has no trace of it: run it again"),
}
_EXITS = {
    4: (FailureKind.FLAKY, " (illegal instruction)", "run it on another node"),
    6: (FailureKind.FLAKY, " (aborted)", "run it on another node"),
    7: (FailureKind.FLAKY, " (bus error)", "raise /dev/shm or --mem, or run it on another node"),
    9: (FailureKind.INFRASTRUCTURE, " (killed)", "by the kernel for memory, or by hand: see the node's dmesg"),
    11: (FailureKind.FLAKY, " (segmentation fault)", "run it on another node"),
    15: (FailureKind.INFRASTRUCTURE, " (terminated)", "it was ended from outside: run it again"),
    126: (FailureKind.CONFIGURATION, " (not executable)", "check the command's mode and its interpreter"),
    127: (FailureKind.CONFIGURATION, " (command not found)", "this command is not on the node's PATH"),
}
