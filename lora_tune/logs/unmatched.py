"""A log in which a study's reader finds nothing: what its lines look like, and what pattern would read them.

Pure functions of text. A wrong pattern shows in the first minute of the first trial, so it must not cost a second one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lora_tune.logs.decimal_commas import in_use, with_points
from lora_tune.logs.line_forms import losses, pattern, positions

ENOUGH_LINES = 50
"""Lines without a match after which a line that looks like an eval says that the pattern is wrong."""

MAX_LINE = 1000
"""Characters of a line that are looked at: they bound the time that one line can take."""

_EVAL_WORD = re.compile(r"(?i)(?<![a-z])(eval|val|valid|validation|test|dev)(?![a-z])|eval_|val_|test_|dev_")


def looks_like_an_eval(line: str) -> bool:
    """Whether a line states a loss and how far the run is."""
    return bool(losses(line[:MAX_LINE]) and positions(line[:MAX_LINE]))


def suggest(line: str) -> str:
    """A pattern for lines like this one, with the groups that a reader of kind regex wants; "" where none is seen."""
    measures, places = losses(line[:MAX_LINE]), positions(line[:MAX_LINE])
    return pattern(line, measures[0], places[0]) if measures and places else ""


TELL_APART = "let the pattern say which it is, by the name of its data set for example"
"""The remedy where two things are printed in the same words."""


@dataclass(slots=True)
class Unmatched:
    """Counts the lines of a log until one is understood.

    patterns: what the study searches for, "" for formats without a pattern; it tells whether plain losses are wanted.
    error: what the format's own code raised last for a line. cut: the last number that a pattern took a part of.
    """

    patterns: str = ""
    lines: int = 0
    likely: str = ""
    error: str = ""
    cut: str = ""
    found: bool = field(default=False)

    def take(self, line: str) -> None:
        """One line that no setting matched."""
        self.lines += 1
        if not looks_like_an_eval(with_points(line) if in_use([line[:MAX_LINE]]) else line):
            return
        is_eval = _EVAL_WORD.search(line) is not None
        if is_eval or (self.patterns and not _EVAL_WORD.search(self.patterns)):
            self.likely = line.strip()[:200]

    def words(self, *, ended: bool) -> str:
        """What is wrong and what to write instead; "" while it may only be too early. ended: the job is over."""
        if self.found or not (ended or (self.lines >= ENOUGH_LINES and self.likely)):
            return ""
        lines = "1 line" if self.lines == 1 else f"{self.lines} lines"
        failed = f" (its reader failed: {self.error})" if self.error else ""
        failed += f" (its pattern takes only a part of the number {self.cut})" if self.cut else ""
        counted = f"{lines} read, none matched workload.log{failed}"
        if not self.likely:
            return f"{counted}; none of them looks like an eval"
        comma = in_use([self.likely])
        pattern = suggest(with_points(self.likely) if comma else self.likely)
        remedy = f"; try this pattern: {pattern}" if pattern else ""
        remedy += ", with decimal_comma = true beside it" if comma else ""
        return f"{counted}; a line that looks like an eval: `{self.likely}`{remedy}"
