"""Which failure texts a log holds, and where in it: :class:`FailureScanner` reads the log as it grows.

The place decides what a text is worth. Launch scripts print frightening lines long before the training starts
(``/etc/dgx-release: No such file or directory`` on every machine that is not a DGX), and trainings print warnings and
go on. So the scanner remembers, for each known text, its last line in each phase of the log, and whether the training
went on after it. Every line that leaves here went through :func:`redact`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from lora_tune.base.redact import bytes_without_escapes, redact
from lora_tune.logs.failure_signatures import NOISE, SIGNATURES, Signature, Weight

MAX_LINE = 4096
"""Bytes; a longer line is read in pieces of this length."""

SCANNED_BYTES = 64 << 20
"""How much of a log is scanned as it comes. Of what a flood prints beyond, the last TAIL_BYTES or more are scanned."""

TAIL_BYTES = 1 << 20
MAX_TRIED = 100_000
"""Lines tried for one anchor in one phase: a log with more of them prints them for another reason."""

MAX_MARKS = 10_000
"""Phases of one log; a log with more marks prints them for another reason."""

SHOWN_CHARACTERS = 500

WENT_ON = 3
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
    progress: deque[int] = field(default_factory=lambda: deque(maxlen=WENT_ON))
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
            _scan(self._state, self._held[:whole], self._offset)
            self._scanned += whole
            self._drop(whole)
        elif len(self._held) > 2 * TAIL_BYTES:
            cut = len(self._held) - TAIL_BYTES
            self._drop(max(cut, self._held.find(b"\n", cut) + 1))

    def hits(self) -> tuple[Hit, ...]:
        """The failure texts seen so far, by their place in the log."""
        state = self._complete()
        # The third last line of progress: what stands before it was survived.
        went_on = state.progress[0] if len(state.progress) == WENT_ON else -1
        placed = [
            (offset, index, Hit(SIGNATURES[index], _shown(line), phase, offset, survived=offset < went_on))
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
        _scan(state, self._held, self._offset)
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


def _scan(state: _State, text: bytes, offset: int) -> None:
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
            begin, end = _line_around(text, 0, at)
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
            for index, part in _matching(line, indices):
                hits[index] = (offset + begin, part)


def _lines_with(text: bytes, anchor: bytes) -> Iterator[tuple[int, bytes]]:
    """The lines that hold ``anchor``, each with where it begins."""
    at, begin = text.find(anchor), 0
    while at >= 0:
        begin, end = _line_around(text, begin, at)
        if at + len(anchor) <= end:
            yield begin, text[begin:end]
        at = text.find(anchor, max(end, at + 1))
        begin = end


def _matching(line: bytes, indices: list[int]) -> Iterator[tuple[int, bytes]]:
    """Which of these signatures a line shows, each with the part of the line that does; nothing for noise."""
    for part in bytes_without_escapes(line).split(b"\r"):
        part = _LABEL.sub(b"", part, count=1)
        if not (_TRACE.match(part) or NOISE.search(part)):
            yield from ((index, part) for index in indices if SIGNATURES[index].pattern.search(part))


def _line_around(text: bytes, begin: int, at: int) -> tuple[int, int]:
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
