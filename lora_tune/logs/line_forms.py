"""What a line of an unknown log states: names with numbers, which of them is a loss, and a pattern for lines like it.

Pure functions of text, for a format that nobody has described yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

NUMBER = r"[-+]?(?:\d++\.?\d*+|\.\d++)(?:[eE][-+]?\d++)?+"
_PAIR = re.compile(  # possessive and bounded: a line of any form takes a millisecond
    r"(?<![\w])(?P<name>[A-Za-z][\w./@-]*+(?: [A-Za-z][\w./@-]*+){0,3})"
    r"(?P<between>[\"']?\s{0,12}(?:[:=|]|is|=>)?\s{0,12}(?:tensor\()?)"
    rf"(?P<number>{NUMBER}|[-+]?(?:nan|inf))(?![\w%])"
)
_COUNT = re.compile(r"(?<![\w.])(?P<number>\d++) (?P<name>samples|sequences|steps|iterations|updates|epochs)\b")
_FORMS = {
    "samples": ("samples", "consumed samples", "sample", "sequences", "tokens", "consumed tokens", "tokens seen"),
    "step": ("step", "steps", "iter", "iters", "iteration", "iterations", "it", "update", "updates"),
    "epoch": ("epoch", "epochs"),
}
_PROGRESS = {word: group for group, words in _FORMS.items() for word in words}
ORDER = ("samples", "step", "epoch")
"""Groups that say how far a run is, the finest first."""

EVAL_WORDS = frozenset(("eval", "evaluation", "val", "valid", "validation", "test", "dev", "heldout"))
_TRAIN_WORDS = frozenset(("train", "training", "tr", "smoothed", "lm"))
_LOSSES = {"loss": 3, "nll": 2, "perplexity": 2, "ppl": 2, "bpb": 2, "bpc": 2, "ce": 1, "xent": 2, "mlm": 1}
_SHARES = frozenset(("accuracy", "acc", "f1", "bleu", "rouge", "reward", "auc"))
_BEST = frozenset(("best", "lowest", "min", "previous", "target"))


@dataclass(frozen=True, slots=True)
class NamedNumber:
    """A name and its number. begin, end: of the whole; at: where the number begins; tail: what stands behind it."""

    name: str
    number: str
    begin: int
    at: int
    end: int
    tail: str = ""

    @property
    def words(self) -> list[str]:
        """The name's words in small letters, ``val/avg_loss`` as val, avg and loss."""
        return re.findall(r"[a-z][a-z0-9]*|\d+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", self.name).lower())

    @property
    def progress(self) -> str:
        """samples, step or epoch where the name says how far the run is, else ""."""
        words = self.words
        return _PROGRESS.get(" ".join(words[-2:])) or _PROGRESS.get(words[-1] if words else "", "")

    @property
    def score(self) -> int:
        """How much the name looks like an eval's: 0 for what is no measure of quality."""
        return name_score(self.words)

    @property
    def trains(self) -> bool:
        """Whether the name is of a training loss."""
        known = {*self.words}
        return "loss" in known and not known & (EVAL_WORDS | _BEST)

    @property
    def falls(self) -> bool:
        """Whether less of it is better."""
        return not (_SHARES & {*self.words}) or bool(_LOSSES.keys() & {*self.words})


def name_score(words: list[str]) -> int:
    """How much a name of these words looks like an eval loss: 0 for what measures nothing, 7 for ``val_loss``."""
    known = {*words}
    kind = max((_LOSSES.get(word, 0) for word in known), default=0) or int(bool(_SHARES & known))
    if not kind:
        return 0
    named = 4 * bool(EVAL_WORDS & known) - 2 * bool(_TRAIN_WORDS & known) - 6 * bool(_BEST & known)
    return max(0, 2 * kind + 1 + 2 * named)


def pairs(line: str) -> Iterator[NamedNumber]:
    """Every name with a number in a line, in order; of a name's words only those from the first one that matters."""
    for found in _PAIR.finditer(line):
        begin = found.start("name") + _idle(found["name"])
        name = line[begin : found.end("name")]
        yield NamedNumber(name, found["number"], begin, found.start("number"), found.end("number"))


def _idle(name: str) -> int:
    """Characters of a name before the word with which it begins to matter: ``done with val loss`` -> 10."""
    for word in re.finditer(r"\S+", name):
        known = {*re.findall(r"[a-z]+", word[0].lower())}
        if known & (EVAL_WORDS | _TRAIN_WORDS | _LOSSES.keys() | _SHARES | _BEST | _PROGRESS.keys() | {"global"}):
            return word.start()
    return 0


def _counted(line: str) -> Iterator[NamedNumber]:
    """What is counted behind its number: ``after 1024 samples``."""
    for found in _COUNT.finditer(line):
        begin, end = found.span()
        yield NamedNumber(found["name"], found["number"], begin, begin, end, line[found.end("number") : end])


def losses(line: str) -> list[NamedNumber]:
    """What measures quality in a line, most like an eval first."""
    return sorted((p for p in pairs(line) if p.score), key=lambda p: -p.score)


def positions(line: str) -> list[NamedNumber]:
    """What says how far the run is, the finest first."""
    found = [p for p in (*pairs(line), *_counted(line)) if p.progress and p.number[:1].isdigit()]
    return sorted(found, key=lambda p: ORDER.index(p.progress))


def pattern(line: str, loss: NamedNumber | None, progress: NamedNumber | None, between: str = ".*?") -> str:
    """A pattern for lines like this one, with the groups ``loss`` and samples, step or epoch as far as they are given.

    What stands between the two may differ from line to line (``between``), and so may the lengths of numbers and of
    spaces.
    """
    parts = [(p, group) for p, group in ((loss, "loss"), (progress, progress.progress if progress else "")) if p]
    parts.sort(key=lambda part: part[0].at)
    text, end = "", None
    for pair, group in parts:
        if end is not None:
            gap = line[end : pair.begin]
            text += between if re.search(r"\w", gap) or len(gap) > 4 else _literal(gap)
        text += _guard(line, pair, first=end is None) + _literal(line[pair.begin : pair.at])
        text += f"(?P<{group}>{_field(group, pair.number)})" + _literal(pair.tail)
        end = pair.end
    return text


def _guard(line: str, pair: NamedNumber, *, first: bool) -> str:
    """What keeps ``loss`` from matching within ``train_loss``, where the pattern begins with it."""
    return r"(?<![\w/])" if first and pair.begin and line[pair.begin - 1].isspace() and pair.score else ""


def _literal(text: str) -> str:
    """The text as a pattern in which spaces may differ in length, and need not be there after ``:`` and ``=``."""
    escaped = re.sub(r"([^\w\s/:=\"',@<>%-])", r"\\\1", text)
    return re.sub(r"\s+", r"\\s+", re.sub(r"([:=])\s+$", r"\1\\s*", escaped))


def _field(group: str, number: str) -> str:
    if group == "loss":
        return r"[-+.\w]+"
    return r"\d+" if number.isdigit() else r"[\d.eE+-]+"
