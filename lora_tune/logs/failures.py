"""Why an attempt failed: from its log, its job's state in the cluster, and its measurements.

:class:`FailureScanner` records which failure texts a log has and where; :func:`diagnose` weighs them against the
cluster's state. Evidence starts where the run begins, a specific text has priority over a general one, the last error
before the end over an early warning, and the second reason is reported with the first.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, StrEnum
from importlib import resources
from typing import Any

from lora_tune.base.text import bytes_without_escapes, counted, redact
from lora_tune.logs.run import Eval, RunLog, TrainPoint

# The known failure texts (``failure_signatures.toml``), and the noise of healthy logs.
#
# If a log has several, ``most_telling`` orders them: by place in the log, ``Weight``, and place in the table.


class FailureKind(StrEnum):
    """What a failure implies about the trial's parameters, which decides the reaction."""

    INFEASIBLE = "infeasible"
    """These parameters cannot run here, as far as one attempt shows."""
    FLAKY = "flaky"
    """Intermittent: retry the same attempt on another node."""
    INFRASTRUCTURE = "infrastructure"
    """A node, network, disk or container fault, independent of the parameters."""
    CONFIGURATION = "configuration"
    """Every trial would fail like this until the user fixes it."""
    PREEMPTED = "preempted"
    """The cluster preempted the job."""
    HOST_MEMORY = "host memory"
    """Killed for lack of host memory, which others on the node also used."""
    DISPLACED = "displaced"
    """Its shared job ended before it began: it was not tried."""
    CAPACITY = "capacity"
    """Its nodes were not available and nothing of it ran: it is submitted again later."""
    HELD = "held"
    """The job was on hold in the queue until the sweep gave it up."""
    DRAINED = "drained"
    """The nodes that it could run on were drained, down or reserved until the sweep gave it up."""
    UNSATISFIABLE = "unsatisfiable"
    """The cluster accepted the job but can never run it."""
    DIVERGED = "diverged"
    """The loss is no longer finite."""
    CLOCK = "clock"
    """The log's time stamps are impossible: it is measured again."""
    FOREIGN = "foreign"
    """The log or a record is of another attempt: it is run again."""
    MISMATCH = "mismatch"
    """The log's hyperparameters differ from the trial's."""
    IMPLAUSIBLE = "implausible"
    """The log states an impossible loss."""
    UNREAD = "unread"
    """Nothing in its log matches the study's format of evals."""
    UNKNOWN = "unknown"
    NONE = ""
    """It did not fail."""


class Weight(IntEnum):
    """How directly a failure text names the cause; smaller is more direct."""

    VERDICT = 0
    """The scheduler's statement why the job ended."""
    CAUSE = 1
    """Names the cause: no memory, a faulty GPU, a rejected value, an uncaught exception about a missing file."""
    CONSEQUENCE = 2
    """Printed by the other ranks when one of them failed."""
    EXCEPTION = 3
    """Any other Python exception."""
    REMARK = 4
    """Message of a shell or tool whose script continues."""
    ENDED = 5
    """The processes were killed from outside; the reason is elsewhere."""


@dataclass(frozen=True, slots=True)
class Signature:
    """One failure text. ``anchor`` is literal text in every matching line: only lines with it are tried.

    certain: the same values fail again on any node. completes: name of signatures whose lines only report a failure,
    for which this line gives the reason; it is no failure by itself.
    """

    name: str
    kind: FailureKind
    anchor: bytes
    pattern: re.Pattern[bytes]
    remedy: str
    weight: Weight = Weight.CAUSE
    certain: bool = False
    completes: str = ""


def _signatures(row: Mapping[str, Any]) -> Iterator[Signature]:
    """The signatures of a table row: one for each of its plain ``texts``, and of its ``patterns`` by anchor."""
    weight = Weight[row.get("weight", "cause").upper()]
    rest = {key: row[key] for key in row.keys() - {"texts", "patterns"}}
    forms = {text: re.escape(text) for text in row.get("texts", ())} | row.get("patterns", {})
    for anchor, pattern in forms.items():
        known = {"anchor": anchor.encode(), "pattern": re.compile(pattern.encode())}
        yield Signature(**{**rest, **known, "kind": FailureKind(row["kind"]), "weight": weight})


def _read_table() -> tuple[Signature, ...]:
    text = resources.files("lora_tune.logs").joinpath("failure_signatures.toml").read_text(encoding="utf-8")
    return tuple(signature for row in tomllib.loads(text)["signature"] for signature in _signatures(row))


SIGNATURES = _read_table()
"""Most telling first. Lines are matched without their ``srun -l`` label, in pieces of 4,096 bytes."""

NOISE = re.compile(
    rb"/etc/(?:dgx|os)-release: No such file"  # on every machine except DGX
    rb"|enroot: (?:command )?not found"  # container clean-up on a node without enroot
    rb"|bash: line \d+: nvidia-smi: command not found"  # the same, from a step of the script on each node
    rb"|mlperf-sysjson(?:\.sh)?: line \d+: "  # describes the machine with the available tools
    rb"|modprobe: (?:FATAL|ERROR|WARNING)"
    rb"|/(?:sys|proc)/\S+: (?:No such file|Permission denied)"  # system descriptions try many paths
)
"""Lines that healthy launch scripts print: never evidence, anywhere."""


# Finding failure texts and their places: :class:`FailureScanner` reads the log as it grows.
#
# The place matters: launch scripts print alarming lines long before training starts (``/etc/dgx-release: No such file
# or directory`` on every machine except DGX), and trainings print warnings and continue. So the scanner records, for
# each known text, its last line in each phase of the log, and whether training continued after it. Every line that it
# returns has passed through :func:`redact`.


MAX_LINE = 4096
"""Bytes; longer lines are read in pieces of this length."""

LONG = 1024
"""Bytes; of longer pieces half as many, around the anchor, are tried: patterns take 1 ms per 1,600 bytes, and 8 MB
without a line end took 7 s of processor time."""

SCANNED_BYTES = 64 << 20
"""Bytes of a log that are scanned as they arrive. Of further output the last TAIL_BYTES or more are scanned."""

TAIL_BYTES = 1 << 20
MAX_TRIED = 100_000
"""Maximum lines tried per anchor and phase: a log with more prints them for another reason."""

MAX_MARKS = 10_000
"""Maximum phases of a log: one with more marks prints them for another reason."""

SHOWN_CHARACTERS = 500

LATER_STEPS = 3
"""Progress lines after a text that show that training survived it; interleaved ranks may print one or two."""


class Phase(Enum):
    """A part of a log."""

    PROLOG = "prolog"
    """Output of a launch script before training: containers, mounts, NCCL test, caches."""
    RUN = "run"
    """The training. A log without marks is all run."""
    EPILOG = "epilog"
    """Output of a launch script after training: compliance checker, clean-up."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A failure text in a log. line: redacted. offset: in bytes from the log's start.

    survived: training continued after it.
    """

    signature: Signature
    line: str
    phase: Phase
    offset: int
    survived: bool = False


@dataclass(frozen=True, slots=True)
class _Mark:
    """A line that starts a phase. ``first``: only if the run has not begun yet."""

    anchor: bytes
    pattern: re.Pattern[bytes]
    phase: Phase
    first: bool = False


_MARKS = (
    _Mark(b"PROLOG_START", re.compile(rb"^PROLOG_START\b"), Phase.PROLOG),
    _Mark(b"Beginning trial ", re.compile(rb"^Beginning trial \d+ of \d"), Phase.PROLOG),
    _Mark(b"RUNANDTIME_START", re.compile(rb"^RUNANDTIME_START\b"), Phase.RUN),
    _Mark(b"STARTING TIMING RUN AT", re.compile(rb"^STARTING TIMING RUN AT"), Phase.RUN, first=True),
    _Mark(b'"init_start"', re.compile(rb':::MLLOG .*"key": ?"init_start"'), Phase.RUN, first=True),
    _Mark(b"RUNANDTIME_STOP", re.compile(rb"^RUNANDTIME_STOP\b"), Phase.EPILOG),
)

_PROGRESS = (
    (b":::MLLOG", re.compile(rb'"key": ?"(?:(?:reduced_)?train_loss ?|tracked_stats|eval_accuracy|block_stop)"')),
    (b"loss':", re.compile(rb"\{'(?:eval_)?loss':")),
)
"""Lines that a training prints only while it trains: MLLOG, and the Hugging Face Trainer's dicts."""


@dataclass(slots=True)
class _State:
    """State of the scan: for each phase the last line of each signature, by its index, with its offset."""

    phase: Phase = Phase.RUN
    begun: bool = False
    hits: dict[Phase, dict[int, tuple[int, bytes]]] = field(default_factory=lambda: {phase: {} for phase in Phase})
    progress: deque[int] = field(default_factory=lambda: deque(maxlen=LATER_STEPS))
    tried: dict[bytes, int] = field(default_factory=lambda: dict.fromkeys(_BY_ANCHOR, 0))
    last: bytes = b""
    marks: int = 0

    def copy(self) -> _State:
        hits = {phase: dict(lines) for phase, lines in self.hits.items()}
        return _State(self.phase, self.begun, hits, self.progress.copy(), dict(self.tried), self.last, self.marks)

    def enter(self, mark: _Mark) -> None:
        """Process a mark. Lines before a run's first start belong to its prolog; a new run discards the last one."""
        if mark.first and self.begun and self.phase is Phase.RUN:
            return
        if mark.phase is Phase.RUN and not self.begun:
            self.hits[Phase.PROLOG] |= self.hits[Phase.RUN]
        if mark.phase is not Phase.EPILOG:
            self.hits[Phase.RUN], self.hits[Phase.EPILOG] = {}, {}
            self.progress.clear()
            self.begun = mark.phase is Phase.RUN
        self.phase = mark.phase
        self.tried = dict.fromkeys(self.tried, 0)


class FailureScanner:
    """Records where each failure signature is in a log, in bounded memory for any input."""

    def __init__(self) -> None:
        self._held = b""  # begins at the start of a line, or of a piece of a long one
        self._scanned = 0
        self._offset = 0
        self._state = _State()

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the log, cut anywhere. Never raises because of their content."""
        self._held += chunk
        if self._scanned < SCANNED_BYTES:
            lines = self._held.rfind(b"\n") + 1
            whole = lines + (len(self._held) - lines) // MAX_LINE * MAX_LINE
            _scan_evidence(self._state, self._held[:whole], self._offset)
            self._scanned += whole
            self._drop(whole)
        elif len(self._held) > 2 * TAIL_BYTES:
            cut = len(self._held) - TAIL_BYTES
            self._drop(max(cut, self._held.find(b"\n", cut) + 1))

    def hits(self) -> tuple[Hit, ...]:
        """The failure texts so far, in order of their places in the log."""
        state = self._complete()
        # The third last progress line: training survived texts before it.
        progressed_to = state.progress[0] if len(state.progress) == LATER_STEPS else -1
        placed = [
            (offset, index, Hit(SIGNATURES[index], _shown(line), phase, offset, survived=offset < progressed_to))
            for phase, lines in state.hits.items()
            for index, (offset, line) in lines.items()
        ]
        return tuple(hit for *_, hit in sorted(placed, key=lambda one: one[:2]))

    def begun(self) -> bool:
        """Whether the log shows the start of its run; lines before it are then no evidence."""
        return self._complete().begun

    def last_line(self) -> str:
        """The last non-blank line, redacted; "" for an empty log."""
        return _shown(self._complete().last)

    def _drop(self, count: int) -> None:
        self._held, self._offset = self._held[count:], self._offset + count

    def _complete(self) -> _State:
        """The state including bytes held back: an unfinished line, or the end of huge output."""
        state = self._state.copy()
        _scan_evidence(state, self._held, self._offset)
        return state


def most_telling(hits: tuple[Hit, ...], *, begun: bool) -> list[Hit]:
    """The texts that may be the cause, most telling first.

    begun: the run began, so its prolog is no evidence, and of its epilog only texts of an ended job count. Texts that
    the training survived come last. In a prolog without a run the last line is the one that ended it. Texts that only
    complete others are skipped.
    """
    hits = tuple(hit for hit in hits if not hit.signature.completes)
    if begun:
        hits = tuple(hit for hit in hits if hit.phase is Phase.RUN or _ends_job(hit))

    def order(hit: Hit) -> tuple[int, ...]:
        if hit.phase is Phase.PROLOG:
            return hit.survived, hit.signature.weight in (Weight.CONSEQUENCE, Weight.ENDED), 0, -hit.offset
        late = -hit.offset if hit.signature.weight in (Weight.EXCEPTION, Weight.REMARK) else 0
        return hit.survived, hit.signature.weight, late, SIGNATURES.index(hit.signature)

    return sorted(hits, key=order)


def _ends_job(hit: Hit) -> bool:
    return hit.phase is Phase.EPILOG and hit.signature.weight in (Weight.VERDICT, Weight.ENDED)


def _scan_evidence(state: _State, text: bytes, offset: int) -> None:
    """Read whole lines (or the end of a log) into ``state``; ``offset`` is that of the text's first byte."""
    begin = 0
    for at, mark in _marks(text):
        if state.marks >= MAX_MARKS:
            break
        state.marks += 1
        _scan_stretch(state, text[begin:at], offset + begin)
        state.enter(mark)
        begin = at
    _scan_stretch(state, text[begin:], offset + begin)
    ending = reversed(text[-2 * MAX_LINE :].rstrip().split(b"\n"))
    state.last = next((line for line in ending if line and not _RUNNERS.match(line)), b"")[-MAX_LINE:] or state.last


def _marks(text: bytes) -> Iterator[tuple[int, _Mark]]:
    """The marks in ``text``, each with the start of its line."""
    marks = []
    for mark in _MARKS:
        at = text.find(mark.anchor)
        while at >= 0:
            begin, end = _line_at(text, 0, at)
            if mark.pattern.search(_LABEL.sub(b"", text[begin:end], count=1)):
                marks.append((begin, mark))
            at = text.find(mark.anchor, max(end, at + 1))
    return iter(sorted(marks, key=lambda one: one[0]))


def _scan_stretch(state: _State, text: bytes, offset: int) -> None:
    """Read lines that belong to one phase."""
    progress = [
        offset + begin
        for anchor, pattern in _PROGRESS
        for begin, line in _lines_with(text, anchor)
        if pattern.search(line)
    ]
    state.progress.extend(sorted(progress))
    hits = state.hits[state.phase]
    for anchor, indices in _BY_ANCHOR.items():
        for begin, line in _lines_with(text, anchor):
            if state.tried[anchor] > MAX_TRIED:
                break
            state.tried[anchor] += 1
            for index, part in _matching(line, anchor, indices):
                hits[index] = (offset + begin, part)


def _lines_with(text: bytes, anchor: bytes) -> Iterator[tuple[int, bytes]]:
    """The lines that contain ``anchor``, each with its start."""
    at, begin = text.find(anchor), 0
    while at >= 0:
        begin, end = _line_at(text, begin, at)
        if at + len(anchor) <= end:
            yield begin, text[begin:end]
        at = text.find(anchor, max(end, at + 1))
        begin = end


def _matching(line: bytes, anchor: bytes, indices: list[int]) -> Iterator[tuple[int, bytes]]:
    """Indices of the signatures that a line matches, each with the matching part of the line; nothing for noise.

    Of a long part only the text around its first ``anchor`` is tried, which bounds the time for output without line
    ends.
    """
    for part in bytes_without_escapes(line).split(b"\r"):
        part = _LABEL.sub(b"", part, count=1)
        if not (_TRACE.match(part) or NOISE.search(part)):
            if len(part) > LONG:
                at = max(0, part.find(anchor) - LONG // 8)
                part = part[at : at + LONG // 2]
            yield from ((index, part) for index in indices if SIGNATURES[index].pattern.search(part))


def _line_at(text: bytes, begin: int, at: int) -> tuple[int, int]:
    """Start and end of the line, or piece of a long line, around ``at``; ``begin`` is the start of an earlier one."""
    begin = max(begin, text.rfind(b"\n", begin, at) + 1)
    begin += (at - begin) // MAX_LINE * MAX_LINE
    end = text.find(b"\n", begin, begin + MAX_LINE)
    return begin, min(len(text), begin + MAX_LINE) if end < 0 else end + 1


def _shown(line: bytes) -> str:
    text = redact(line.decode("utf-8", "replace")).strip()
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


_RUNNERS = re.compile(rb"submitit INFO \(|lora-tune: attempt ")  # printed by the programs that start the training
_LABEL = re.compile(rb"^ {0,8}\d{1,6}: ")  # srun -l
_TRACE = re.compile(rb"^\+{1,9} ")  # set -x of bash echoes commands, which may quote any failure

_BY_ANCHOR: dict[bytes, list[int]] = {}
for _index, _one in enumerate(SIGNATURES):
    _BY_ANCHOR.setdefault(_one.anchor, []).append(_index)


__all__ = ["Diagnosis", "FailureKind", "FailureScanner", "diagnose", "redact"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why an attempt failed. ``kind`` is "" if it did not.

    line: the log line that shows it, redacted, or the cluster's reason. remedy: action for the user. certain: the same
    values would fail again on any node. also: the next reason in the log, or "". specific: the log names this cause;
    else it comes from the cluster, the exit code or a general text. by_scheduler: the log has the scheduler's
    statement.
    """

    kind: FailureKind = FailureKind.NONE
    line: str = ""
    remedy: str = ""
    certain: bool = False
    also: str = ""
    specific: bool = False
    by_scheduler: bool = False

    @property
    def sentence(self) -> str:
        """The line, followed by the second reason."""
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
    """Diagnose a failed attempt; ``kind`` is "" if it ended by itself, whatever its loss.

    log: its scanned log, or its text. state: the job's state in the cluster (a value of ``JobState``). reason: the
    cluster's reason. exit_code: None if unknown; a failed training may exit with 0. run: what the log measured. unit:
    of progress, for messages.
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
    """Whether a log line is the program's rejection of the trial's values, other than lack of memory."""
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
        # It failed, and the only error is before progress lines, which may have been buffered.
        cause = next((hit for hit in telling if hit.signature.weight < Weight.REMARK), None)
    killed = exit_code is not None and _signal(exit_code) in (9, 15)
    if cause is not None and not (killed and cause.phase is Phase.PROLOG):
        return _of(cause)
    if run.run_start_ms is not None and run.status == "aborted" and not run.evals and not killed:
        line = "the training ended by itself before its first eval (run_stop without an eval in the log)"
        remedy = "train for more steps, or let the first eval come earlier (the interval between evals, SKIP_EVALS)"
        return Diagnosis(FailureKind.CONFIGURATION, line, remedy)
    if exit_code:
        return _by_exit_code(exit_code, last_line)
    if run.evals:
        return Diagnosis()
    # No failure and no measurement: usually the log has another format than the study's.
    remedy = "read the job's log; is it of the kind that [workload.log] says?" if last_line else "read the job's log"
    return Diagnosis(FailureKind.UNKNOWN, last_line or "the log is empty", remedy)


def _of(hit: Hit) -> Diagnosis:
    signature = hit.signature
    specific, verdict = signature.weight is Weight.CAUSE, signature.weight is Weight.VERDICT
    return Diagnosis(
        signature.kind, hit.line, signature.remedy, signature.certain, specific=specific, by_scheduler=verdict
    )


def _second_reason(diagnosis: Diagnosis, hits: Sequence[Hit]) -> str:
    """The line of the most telling text with another remedy than ``diagnosis``; texts that only ended the job are
    skipped."""
    for hit in hits:
        reason = hit.signature.weight is not Weight.ENDED and not hit.signature.completes
        if reason and _normalized(hit) not in diagnosis.line and hit.signature.remedy != diagnosis.remedy:
            return hit.line
    return ""


def _completed(line: str, telling: Sequence[Hit], hits: Sequence[Hit]) -> str:
    """The cause's line, followed by the reason from another program: pyxis only reports that enroot failed."""
    cause = next((hit for hit in telling if hit.line == line), None)
    if cause is None:
        return line
    reasons = [h for h in hits if h.signature.completes == cause.signature.name and h.phase is cause.phase]
    first = min(reasons, key=lambda hit: SIGNATURES.index(hit.signature), default=None)
    return line if first is None or _normalized(first) in line else f"{line}: {_normalized(first)}"


def _normalized(hit: Hit) -> str:
    """A hit's line without the name of the program that relayed it."""
    return hit.line.rpartition("pyxis: ")[2].strip()


def _scan(log: bytes | str) -> FailureScanner:
    scanner = FailureScanner()
    scanner.feed(log.encode(errors="replace") if isinstance(log, str) else log)
    return scanner


def _diverged(run: RunLog) -> Eval | TrainPoint | None:
    """The last eval or train point if its loss is not finite."""
    newest: tuple[Eval | TrainPoint, ...] = (*run.evals[-1:], *run.train[-1:])
    return next((point for point in newest if not math.isfinite(point.loss)), None)


def _signal(code: int) -> int:
    """The signal of an exit code, or the code itself if it is none."""
    return -code if code < 0 else code - 128 if 128 < code < 192 else code


def _by_exit_code(code: int, last_line: str) -> Diagnosis:
    kind, what, remedy = _EXITS.get(_signal(code), (FailureKind.UNKNOWN, "", "read the job's log"))
    return Diagnosis(kind, f"exit code {code}{what}; last line: {last_line or 'none'}", remedy)


# Cluster states with priority over the log, and those used if the log shows no cause.
_STATES_ABOVE_LOG = {
    "node failed": (FailureKind.INFRASTRUCTURE, "run it on another node and report this one"),
    "preempted": (FailureKind.PREEMPTED, "nothing to fix: it is run again"),
    "displaced": (FailureKind.DISPLACED, "nothing to fix: it is run again, and this attempt does not count"),
    "not begun": (FailureKind.CAPACITY, "nothing to fix in the study: it is submitted again, and no attempt is spent"),
}
_STATES_BELOW_LOG = {
    "host memory": (
        FailureKind.HOST_MEMORY,
        "ask for more host memory (under Slurm --mem=0), use fewer data workers, or run fewer side by side "
        "(site.slots, budget.parallel)",
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
