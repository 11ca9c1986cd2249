"""Why an attempt failed: from its log, what the cluster says of its job, and what it measured.

:class:`FailureScanner` reads the log as it grows and remembers the first line of each known failure text;
:func:`diagnose` chooses among them. Every line that leaves here went through :func:`redact`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from lora_tune.facts import Eval, Run, TrainPoint
from lora_tune.redact import redact
from lora_tune.signatures import SIGNATURES, FailureKind, Signature

__all__ = ["Diagnosis", "FailureKind", "FailureScanner", "diagnose", "redact"]

MAX_LINE = 4096
"""Bytes; a longer line is read in pieces of this length."""

SCANNED_BYTES = 64 << 20
"""How much of a log is scanned as it comes. Of what a flood prints beyond, the last TAIL_BYTES or more are scanned."""

TAIL_BYTES = 1 << 20
MAX_TRIED = 100_000
"""Lines tried for one anchor: a log with more of them prints them for another reason."""

SHOWN_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why an attempt failed. ``kind`` is "" when it did not fail.

    line: the log line that shows it, redacted, or what the cluster said. remedy: what a person can do. certain: the
    same values would fail again on any node.
    """

    kind: FailureKind = FailureKind.NONE
    line: str = ""
    remedy: str = ""
    certain: bool = False


class FailureScanner:
    """Remembers the first line of each failure signature in a log; bounded memory whatever it is fed."""

    def __init__(self) -> None:
        self._held = b""  # begins at the start of a line, or of a piece of a long one
        self._scanned = 0
        self._last = b""
        self._lines: dict[int, bytes] = {}
        self._tried = dict.fromkeys(_BY_ANCHOR, 0)

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the log, cut anywhere. Never raises for what they contain."""
        self._held += chunk
        if self._scanned < SCANNED_BYTES:
            lines = self._held.rfind(b"\n") + 1
            whole = lines + (len(self._held) - lines) // MAX_LINE * MAX_LINE
            self._scan(self._held[:whole])
            self._scanned += whole
            self._held = self._held[whole:]
        elif len(self._held) > 2 * TAIL_BYTES:
            cut = len(self._held) - TAIL_BYTES
            self._held = self._held[max(cut, self._held.find(b"\n", cut) + 1) :]

    def found(self) -> tuple[tuple[Signature, str], ...]:
        """The signatures seen so far, most telling first, each with its first line, redacted."""
        lines = self._complete()._lines
        return tuple((SIGNATURES[index], _shown(lines[index])) for index in sorted(lines))

    def last_line(self) -> str:
        """The last line that is not blank, redacted; "" for an empty log."""
        return _shown(self._complete()._last)

    def _complete(self) -> FailureScanner:
        """A copy that has also scanned what is held: an unfinished line, or the end of a flood."""
        copy = FailureScanner()
        copy._lines, copy._last = dict(self._lines), self._last
        copy._scan(self._held)
        return copy

    def _scan(self, text: bytes) -> None:
        for anchor, indices in _BY_ANCHOR.items():
            wanted = [index for index in indices if index not in self._lines]
            at, begin = text.find(anchor) if wanted else -1, 0
            while at >= 0 and wanted and self._tried[anchor] <= MAX_TRIED:
                begin, end = _line_around(text, begin, at)
                if at + len(anchor) <= end:
                    self._tried[anchor] += 1
                    wanted = self._try(text[begin:end], wanted)
                begin = end
                at = text.find(anchor, max(end, at + 1))
        ending = text[-2 * MAX_LINE :].rstrip()
        self._last = ending[ending.rfind(b"\n") + 1 :][-MAX_LINE:] or self._last

    def _try(self, line: bytes, wanted: list[int]) -> list[int]:
        """Match one line against these signatures; return those that are still wanted."""
        if b"\x1b" in line:
            line = _COLOURS.sub(b"", line)
        for part in line.split(b"\r"):
            part = _LABEL.sub(b"", part, count=1)
            if not _TRACE.match(part):
                for index in wanted:
                    if index not in self._lines and SIGNATURES[index].pattern.search(part):
                        self._lines[index] = part
        return [index for index in wanted if index not in self._lines]


def diagnose(
    log: FailureScanner | bytes | str,
    *,
    state: str = "ended",
    exit_code: int | None = None,
    reason: str = "",
    run: Run | None = None,
) -> Diagnosis:
    """Why the attempt failed, or ``kind`` "" when it did not: then it ended by itself, whatever its loss.

    log: its scanned log, or its text. state: what the cluster says of the job (the values of ``JobState``), reason:
    in the cluster's own words. exit_code: None where unknown; a training may fail with 0. run: what the log measured.
    """
    scanner = log if isinstance(log, FailureScanner) else _scan(log)
    found, run = scanner.found(), run or Run()
    if state in _STATES_ABOVE_LOG:
        kind, remedy = _STATES_ABOVE_LOG[state]
        return Diagnosis(kind, redact(reason) or f"the cluster says: {state}", remedy)
    if (point := _diverged(run)) and not any(signature.kind is FailureKind.INFEASIBLE for signature, _ in found):
        line = f"loss {point.loss} at {point.samples:g} samples"
        return Diagnosis(FailureKind.DIVERGED, line, "lower the learning rate, or warm up for longer")
    if state == "ended" and not exit_code and run.run_stop_ms is not None and run.evals:
        return Diagnosis()
    if found and not (state in _STATES_BELOW_LOG and found[0][0].kind in _SAY_LITTLE):
        signature, line = found[0]
        return Diagnosis(signature.kind, line, signature.remedy, signature.certain)
    if state in _STATES_BELOW_LOG:
        kind, remedy = _STATES_BELOW_LOG[state]
        return Diagnosis(kind, redact(reason) or f"the cluster says: {state}", remedy)
    if exit_code:
        return _by_exit_code(exit_code, scanner.last_line())
    if run.evals:
        return Diagnosis()
    last = scanner.last_line()
    # Nothing failed, and nothing was measured: most often the log has another form than the study says.
    remedy = "read the job's log; is it of the kind that [workload.log] says?" if last else "read the job's log"
    return Diagnosis(FailureKind.UNKNOWN, last or "the log is empty", remedy)


def _scan(log: bytes | str) -> FailureScanner:
    scanner = FailureScanner()
    scanner.feed(log.encode(errors="replace") if isinstance(log, str) else log)
    return scanner


def _diverged(run: Run) -> Eval | TrainPoint | None:
    """The newest eval or train point whose loss is no finite number."""
    newest: tuple[Eval | TrainPoint, ...] = (*run.evals[-1:], *run.train[-1:])
    return next((point for point in newest if not math.isfinite(point.loss)), None)


def _by_exit_code(code: int, last_line: str) -> Diagnosis:
    signal = -code if code < 0 else code - 128 if 128 < code < 192 else code
    kind, what, remedy = _EXITS.get(signal, (FailureKind.UNKNOWN, "", "read the job's log"))
    return Diagnosis(kind, f"exit code {code}{what}; last line: {last_line or 'none'}", remedy)


def _line_around(text: bytes, begin: int, at: int) -> tuple[int, int]:
    """The line, or the piece of a long line, around ``at``; ``begin`` is where some line or piece before it starts."""
    begin = max(begin, text.rfind(b"\n", begin, at) + 1)
    begin += (at - begin) // MAX_LINE * MAX_LINE
    end = text.find(b"\n", begin, begin + MAX_LINE)
    return begin, min(len(text), begin + MAX_LINE) if end < 0 else end + 1


def _shown(line: bytes) -> str:
    text = redact(line.decode("utf-8", "replace")).strip()
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


_LABEL = re.compile(rb"^ {0,8}\d{1,6}: ")  # srun -l
_TRACE = re.compile(rb"^\+{1,9} ")  # bash's set -x echoes commands, which may quote any failure
_COLOURS = re.compile(rb"\x1b\[[0-9;?]{0,40}[@-~]")

_BY_ANCHOR: dict[bytes, list[int]] = {}
for _index, _one in enumerate(SIGNATURES):
    _BY_ANCHOR.setdefault(_one.anchor, []).append(_index)

_SAY_LITTLE = (FailureKind.INFRASTRUCTURE, FailureKind.UNKNOWN, FailureKind.FLAKY)

# What the cluster knows better than any log, and what it says where the log shows no cause of its own.
_STATES_ABOVE_LOG = {
    "node failed": (FailureKind.INFRASTRUCTURE, "run it on another node and report this one"),
    "preempted": (FailureKind.PREEMPTED, "nothing to mend: it is run again"),
}
_STATES_BELOW_LOG = {
    "out of memory": (FailureKind.INFEASIBLE, "ask for more host memory (--mem=0), or use fewer data workers"),
    "time limit": (FailureKind.CONFIGURATION, "raise budget.trial_minutes, or WALLTIME"),
    "cancelled": (FailureKind.INFRASTRUCTURE, "somebody cancelled it: run it again"),
    "lost": (FailureKind.INFRASTRUCTURE, "the cluster has no trace of it: run it again"),
}
_EXITS = {
    4: (FailureKind.FLAKY, " (illegal instruction)", "run it on another node"),
    6: (FailureKind.FLAKY, " (aborted)", "run it on another node"),
    7: (FailureKind.FLAKY, " (bus error)", "raise /dev/shm or --mem, or run it on another node"),
    9: (FailureKind.INFRASTRUCTURE, " (killed)", "by the kernel for memory, or by hand: see the node's dmesg"),
    11: (FailureKind.FLAKY, " (segmentation fault)", "run it on another node"),
    15: (FailureKind.INFRASTRUCTURE, " (terminated)", "somebody ended it: run it again"),
    126: (FailureKind.CONFIGURATION, " (not executable)", "check the command's mode and its interpreter"),
    127: (FailureKind.CONFIGURATION, " (command not found)", "this command is not on the node's PATH"),
}
