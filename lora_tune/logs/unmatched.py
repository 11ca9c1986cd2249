"""A log in which a study's reader finds nothing: what its lines look like, and what pattern would read them.

Pure functions of text. A wrong pattern shows in the first minute of the first trial, so it must not cost a second one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

ENOUGH_LINES = 50
"""Lines without a match after which a line that looks like an eval says that the pattern is wrong."""

_EVAL_WORD = re.compile(r"(?i)(?<![a-z])(eval|val|valid|validation|test|dev)(?![a-z])|eval_|val_|test_|dev_")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_LOSS = re.compile(
    rf"(?i)(?:[\w/ -]*?)(?<![a-z])(?:loss|perplexity|ppl|nll)(?![a-z])[\"']?\s*[:=]?\s*(?P<number>{_NUMBER})"
)
_PROGRESS = re.compile(
    rf"(?i)(?<![a-z])(?P<word>step|steps|iter|iteration|global_step|samples|consumed_samples|epoch)(?![a-z])"
    rf"[\"']?\s*[:=#]?\s*(?P<number>{_NUMBER})"
)
_GROUP = {"samples": "samples", "consumed_samples": "samples", "epoch": "epoch"}


def looks_like_an_eval(line: str) -> bool:
    """Whether a line states a loss and how far the run is."""
    return _LOSS.search(line) is not None and _PROGRESS.search(line) is not None


def suggest(line: str) -> str:
    """A pattern for lines like this one, with the groups that a reader of kind regex wants; "" where none is seen."""
    loss, progress = _LOSS.search(line), _PROGRESS.search(line)
    if loss is None or progress is None:
        return ""
    group = _GROUP.get(progress["word"].lower(), "step")
    places = sorted([(*progress.span("number"), group), (*loss.span("number"), "loss")])
    (a, b, first), (c, _, second) = places
    begin = min(progress.start("word"), loss.start("number") - len(_word_before(line, loss.start("number"))))
    between = _literal(line[b:c])
    return f"{_literal(line[begin:a])}(?P<{first}>{_field(first)}){between}(?P<{second}>{_field(second)})"


def _word_before(line: str, at: int) -> str:
    found = re.search(r"[\w./-]+[\"']?\s*[:=]?\s*$", line[:at])
    return found[0] if found else ""


def _literal(text: str) -> str:
    """The text as a pattern: spaces and other numbers may differ in length."""
    return re.sub(r"(?:\\ |\s)+", r"\\s+", re.sub(_NUMBER, r"\\S+", re.escape(text).replace(r"\.", "."), count=0))


def _field(group: str) -> str:
    return r"\d+" if group in ("step", "samples") else r"\S+"


@dataclass(slots=True)
class Unmatched:
    """Counts the lines of a log until one is understood.

    patterns: what the study searches for, "" for formats without a pattern; it tells whether plain losses are wanted.
    """

    patterns: str = ""
    lines: int = 0
    likely: str = ""
    found: bool = field(default=False)

    def take(self, line: str) -> None:
        """One line that no setting matched."""
        self.lines += 1
        if not looks_like_an_eval(line):
            return
        is_eval = _EVAL_WORD.search(line) is not None
        if is_eval or (self.patterns and not _EVAL_WORD.search(self.patterns)):
            self.likely = line.strip()[:200]

    def words(self, *, ended: bool) -> str:
        """What is wrong and what to write instead; "" while it may only be too early. ended: the job is over."""
        if self.found or not (ended or (self.lines >= ENOUGH_LINES and self.likely)):
            return ""
        lines = "1 line" if self.lines == 1 else f"{self.lines} lines"
        told = f"{lines} read, none matched workload.log"
        if not self.likely:
            return f"{told}; none of them looks like an eval"
        pattern = suggest(self.likely)
        remedy = f"; try this pattern: {pattern}" if pattern else ""
        return f"{told}; a line that looks like an eval: `{self.likely}`{remedy}"
