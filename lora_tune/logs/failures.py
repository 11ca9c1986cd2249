"""Why an attempt failed: from its log, what the cluster says of its job, and what it measured.

:class:`FailureScanner` remembers which failure texts a log holds and where; :func:`diagnose` weighs them against the
cluster's verdict. Evidence begins where the run begins, a specific text beats a general one, the last error before the
end beats an early warning, and the second reason is reported beside the first.
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

# The failure texts that are recognised in logs (``failure_signatures.toml``), and the noise of healthy logs.
#
# Where several appear in a log, ``most_telling`` weighs them: by where in the log they stand, by their
# ``Weight``, and then by their place in the table.


class FailureKind(StrEnum):
    """What a failure says about the trial's parameters, and so what is done about it."""

    INFEASIBLE = "infeasible"
    """These parameters cannot run here, as far as one attempt can tell."""
    FLAKY = "flaky"
    """Comes and goes: the same attempt again, elsewhere."""
    INFRASTRUCTURE = "infrastructure"
    """A node, the network, a disk, the container: says nothing about the parameters."""
    CONFIGURATION = "configuration"
    """Every trial would fail like this until the user fixes it."""
    PREEMPTED = "preempted"
    """The cluster wanted the nodes back."""
    HOST_MEMORY = "host memory"
    """The kernel killed it for want of host memory, of which others had their part."""
    DISPLACED = "displaced"
    """The job in which it waited for a place ended before it began: it has not been tried."""
    CAPACITY = "capacity"
    """Its nodes could not be had, and nothing of it ran: it waits, and is submitted again."""
    HELD = "held"
    """Somebody held the job back in the queue until it was given up."""
    DRAINED = "drained"
    """The nodes that it could run on were drained, down or reserved until it was given up."""
    UNSATISFIABLE = "unsatisfiable"
    """The cluster accepted the job and can never run it."""
    DIVERGED = "diverged"
    """The loss is no number any more."""
    CLOCK = "clock"
    """The log's time stamps cannot be true: it is measured again."""
    FOREIGN = "foreign"
    """The log, or a record beside it, is another attempt's: it is run again."""
    MISMATCH = "mismatch"
    """The log announces other hyperparameters than the trial was given."""
    IMPLAUSIBLE = "implausible"
    """The log states a loss that no loss can be."""
    UNREAD = "unread"
    """Nothing in its log is what the study says its evals look like."""
    UNKNOWN = "unknown"
    NONE = ""
    """It did not fail."""


class Weight(IntEnum):
    """How much a failure text says of the cause; the smaller, the more."""

    VERDICT = 0
    """The scheduler's own statement why the job ended."""
    CAUSE = 1
    """Names the cause itself: no memory, a faulty GPU, a refused value, an uncaught exception about a missing file."""
    CONSEQUENCE = 2
    """What the other ranks print when one of them broke."""
    EXCEPTION = 3
    """Any other exception of Python."""
    REMARK = 4
    """What a shell or a tool remarks while its script goes on."""
    ENDED = 5
    """Somebody or something ended the processes; the reason is elsewhere."""


@dataclass(frozen=True, slots=True)
class Signature:
    """One failure text. ``anchor`` is literal text that every matching line holds: only lines with it are tried.

    certain: the same values fail again, wherever they run. completes: the name of the signatures whose line says only
    that something failed, where this one's says why; by itself it is no failure.
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
    """Those of a row of the table: one of each of its plain ``texts``, and of its ``patterns`` by their anchors."""
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
"""The most telling first. A line is matched without its ``srun -l`` label, its first 4,096 bytes."""

NOISE = re.compile(
    rb"/etc/(?:dgx|os)-release: No such file"  # every machine that is not a DGX
    rb"|enroot: (?:command )?not found"  # the clean-up of containers on a node that has none
    rb"|bash: line \d+: nvidia-smi: command not found"  # the same, asked by a step of the script on each node
    rb"|mlperf-sysjson(?:\.sh)?: line \d+: "  # describes the machine by whatever tools there are
    rb"|modprobe: (?:FATAL|ERROR|WARNING)"
    rb"|/(?:sys|proc)/\S+: (?:No such file|Permission denied)"  # what describes a system tries many places
)
"""Lines that healthy launch scripts print and go on: never evidence, wherever they stand."""


# Which failure texts a log holds, and where in it: :class:`FailureScanner` reads the log as it grows.
#
# The place decides what a text is worth. Launch scripts print frightening lines long before the training starts
# (``/etc/dgx-release: No such file or directory`` on every machine that is not a DGX), and trainings print warnings
# and go on. So the scanner remembers, for each known text, its last line in each phase of the log, and whether the
# training went on after it. Every line that leaves here went through :func:`redact`.


MAX_LINE = 4096
"""Bytes; a longer line is read in pieces of this length."""

LONG = 1024
"""Bytes; of a longer piece half as many, around what a failure text always holds, are tried: patterns cost a
millisecond for each 1,600 bytes, and 8 MB without a line end took a look 7 s of processor."""

SCANNED_BYTES = 64 << 20
"""How much of a log is scanned as it comes. Of what a flood prints beyond, the last TAIL_BYTES or more are scanned."""

TAIL_BYTES = 1 << 20
MAX_TRIED = 100_000
"""Lines tried for one anchor in one phase: a log with more of them prints them for another reason."""

MAX_MARKS = 10_000
"""Phases of one log; a log with more marks prints them for another reason."""

SHOWN_CHARACTERS = 500

LATER_STEPS = 3
"""Lines of progress after a text that show that the training survived it; ranks that interleave print one or two."""


class Phase(Enum):
    """A stretch of a log."""

    PROLOG = "prolog"
    """What a launch script does before the training: containers, mounts, NCCL test, caches."""
    RUN = "run"
    """The training. A log without any mark is all run."""
    EPILOG = "epilog"
    """What a launch script does afterwards: compliance checker, clean-up."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A failure text as a log holds it. line: redacted. offset: where in the log, in bytes.

    survived: the training went on after it.
    """

    signature: Signature
    line: str
    phase: Phase
    offset: int
    survived: bool = False


@dataclass(frozen=True, slots=True)
class _Mark:
    """A line that opens a phase. ``first``: only where the run has not begun yet."""

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
"""What a training prints only while it trains: MLLOG, and the dictionaries of the Hugging Face Trainer."""


@dataclass(slots=True)
class _State:
    """What was seen so far: for each phase the last line of each signature, by its index, with its offset."""

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
        """A mark was read. What stood before a run's own begin belongs to its prolog; a new run forgets the last."""
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
    """Remembers where each failure signature stands in a log; bounded memory whatever it is fed."""

    def __init__(self) -> None:
        self._held = b""  # begins at the start of a line, or of a piece of a long one
        self._scanned = 0
        self._offset = 0
        self._state = _State()

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the log, cut anywhere. Never raises for what they contain."""
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
        """The failure texts seen so far, by their place in the log."""
        state = self._complete()
        # The third last line of progress: what stands before it was survived.
        progressed_to = state.progress[0] if len(state.progress) == LATER_STEPS else -1
        placed = [
            (offset, index, Hit(SIGNATURES[index], _shown(line), phase, offset, survived=offset < progressed_to))
            for phase, lines in state.hits.items()
            for index, (offset, line) in lines.items()
        ]
        return tuple(hit for *_, hit in sorted(placed, key=lambda one: one[:2]))

    def begun(self) -> bool:
        """Whether the log shows where its run began: then what stands before is no evidence."""
        return self._complete().begun

    def last_line(self) -> str:
        """The last line that is not blank, redacted; "" for an empty log."""
        return _shown(self._complete().last)

    def _drop(self, count: int) -> None:
        self._held, self._offset = self._held[count:], self._offset + count

    def _complete(self) -> _State:
        """The state after what is held as well: an unfinished line, or the end of a flood."""
        state = self._state.copy()
        _scan_evidence(state, self._held, self._offset)
        return state


def most_telling(hits: tuple[Hit, ...], *, begun: bool) -> list[Hit]:
    """The texts that may be the cause, most telling first.

    begun: the run began, so that its prolog is no evidence; of its epilog only what ended the job is. Texts that the
    training survived come last. In a prolog that never got to the run the last line is the one that ended it.
    What only completes another text is none by itself.
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
    """The marks in ``text``, each with where its line begins."""
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
    """The lines that hold ``anchor``, each with where it begins."""
    at, begin = text.find(anchor), 0
    while at >= 0:
        begin, end = _line_at(text, begin, at)
        if at + len(anchor) <= end:
            yield begin, text[begin:end]
        at = text.find(anchor, max(end, at + 1))
        begin = end


def _matching(line: bytes, anchor: bytes, indices: list[int]) -> Iterator[tuple[int, bytes]]:
    """Which of these signatures a line shows, each with the part of the line that does; nothing for noise.

    Of a long part only what stands around its first ``anchor`` counts: a flood without line ends costs as little.
    """
    for part in bytes_without_escapes(line).split(b"\r"):
        part = _LABEL.sub(b"", part, count=1)
        if not (_TRACE.match(part) or NOISE.search(part)):
            if len(part) > LONG:
                at = max(0, part.find(anchor) - LONG // 8)
                part = part[at : at + LONG // 2]
            yield from ((index, part) for index in indices if SIGNATURES[index].pattern.search(part))


def _line_at(text: bytes, begin: int, at: int) -> tuple[int, int]:
    """The line, or the piece of a long line, around ``at``; ``begin`` is where some line or piece before it starts."""
    begin = max(begin, text.rfind(b"\n", begin, at) + 1)
    begin += (at - begin) // MAX_LINE * MAX_LINE
    end = text.find(b"\n", begin, begin + MAX_LINE)
    return begin, min(len(text), begin + MAX_LINE) if end < 0 else end + 1


def _shown(line: bytes) -> str:
    text = redact(line.decode("utf-8", "replace")).strip()
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


_RUNNERS = re.compile(rb"submitit INFO \(|lora-tune: attempt ")  # printed by those who start the program
_LABEL = re.compile(rb"^ {0,8}\d{1,6}: ")  # srun -l
_TRACE = re.compile(rb"^\+{1,9} ")  # bash's set -x echoes commands, which may quote any failure

_BY_ANCHOR: dict[bytes, list[int]] = {}
for _index, _one in enumerate(SIGNATURES):
    _BY_ANCHOR.setdefault(_one.anchor, []).append(_index)


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
    def sentence(self) -> str:
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
    if run.run_start_ms is not None and run.status == "aborted" and not run.evals and not killed:
        line = "the training ended by itself before its first eval (run_stop without an eval in the log)"
        remedy = "train for more steps, or let the first eval come earlier (the interval between evals, SKIP_EVALS)"
        return Diagnosis(FailureKind.CONFIGURATION, line, remedy)
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
        if reason and _normalized(hit) not in diagnosis.line and hit.signature.remedy != diagnosis.remedy:
            return hit.line
    return ""


def _completed(line: str, telling: Sequence[Hit], hits: Sequence[Hit]) -> str:
    """The cause's line with the reason behind it that another program gave: pyxis says only that enroot failed."""
    cause = next((hit for hit in telling if hit.line == line), None)
    if cause is None:
        return line
    reasons = [h for h in hits if h.signature.completes == cause.signature.name and h.phase is cause.phase]
    first = min(reasons, key=lambda hit: SIGNATURES.index(hit.signature), default=None)
    return line if first is None or _normalized(first) in line else f"{line}: {_normalized(first)}"


def _normalized(hit: Hit) -> str:
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
