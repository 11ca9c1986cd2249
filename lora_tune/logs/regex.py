"""Lines of any form, by a user's patterns."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from functools import lru_cache
from re import _parser  # type: ignore[attr-defined]  # the only way to know how patterns nest
from typing import Any

from lora_tune.base.host import steady_epoch
from lora_tune.logs.lines import FACTS, FORM, SCALES, Clock, LineReader, ReaderKind, scaled_samples

# Regular expressions from study files, refused where a log line could make them hang.


_PROGRESS = frozenset(("samples", "step", "epoch"))

MAX_REPEATS = 100
"""A repetition that may go on for longer counts as unbounded."""


@lru_cache(maxsize=64)
def compile_safely(name: str, pattern: str, *, progress_apart: bool = False) -> re.Pattern[str]:
    """The compiled pattern; ValueError where it is malformed, lacks groups, or repeats a repetition.

    progress_apart: another pattern says how far the run is.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        remedy = "; Python writes a named group (?P<name>...)" if "unknown extension ?<" in str(error) else ""
        raise ValueError(
            f"log setting {name!r} is not a valid regular expression ({error}){remedy}; got {pattern!r}"
        ) from error
    if _repeats_repetition(_parser.parse(pattern)):
        raise ValueError(
            f"log setting {name!r} repeats a repetition or an alternative, which can hang on a long line; "
            f"write the inner one possessively (x++) or without repetition; got {pattern!r}"
        )
    groups = set(compiled.groupindex)
    measures = name in ("eval", "train")
    if measures and not ("loss" in groups and (progress_apart or groups & _PROGRESS)):
        raise ValueError(
            f"log setting {name!r} needs the named groups loss and samples, step or epoch; where these stand on lines "
            f"of their own, add a pattern 'progress' with one of them; got {pattern!r}"
        )
    if name == "progress" and not groups & _PROGRESS:
        raise ValueError(f"log setting 'progress' needs the named group samples, step or epoch; got {pattern!r}")
    unknown = sorted(groups - {"loss", *FACTS})
    if unknown:
        raise ValueError(
            f"log setting {name!r} has the unknown group {unknown[0]!r}; known are loss, {', '.join(FACTS)}"
        )
    return compiled


def _repeats_repetition(parsed: Any, inside: bool = False) -> bool:
    """Whether an unbounded repetition holds another, or an alternative: what takes exponential time to fail."""
    for operation, argument in parsed:
        kind = str(operation)
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, held = argument
            if (inside and most != least) or _repeats_repetition(held, inside or most > MAX_REPEATS):
                return True
        elif kind == "BRANCH" and (inside or any(_repeats_repetition(branch) for branch in argument[1])):
            return True
        elif kind in _HOLDS:
            position, starts_anew = _HOLDS[kind]
            held = argument if position is None else argument[position]
            if _repeats_repetition(held, inside and not starts_anew):
                return True
    return False


# Where a parsed operation holds another pattern, and whether that one never gives back what it matched.
_HOLDS: dict[str, tuple[int | None, bool]] = {
    "SUBPATTERN": (3, False),
    "ASSERT": (1, True),
    "ASSERT_NOT": (1, True),
    "ATOMIC_GROUP": (None, True),
    "POSSESSIVE_REPEAT": (2, True),
}


MAX_PATTERN_LINE = 1000
"""Characters of a line that a user's pattern is given: they bound a polynomial pattern's time to seconds."""

SLOW_SECONDS = 1.0
"""CPU seconds on one line after which a user's pattern is given up."""


class RegexReader(LineReader):
    """Lines of any form, by one pattern for evals and one for train losses.

    eval, train: regular expressions searched for in each line, with the named group ``loss`` (of an eval, also the
    name that ``metric`` gives), one of ``samples``, ``step`` and ``epoch``, and if printed ``seconds`` (since the
    start of the run), ``eval_seconds`` and ``throughput``. start, stop: patterns of the lines where the run starts and
    ends. global_batch_size and samples_per_epoch: as for JSON lines.

    progress: a pattern with one of ``samples``, ``step`` and ``epoch``, where that stands on lines of its own: an eval
    or a train loss without such a group is then of the last such line (0 before the first). from_zero: the first epoch
    and step are called 0, so one is added. repeated: a line shows the last eval again until there is a new one, as
    progress bars do; only a changed loss is an eval. decimal_comma: numbers are printed as ``0,925`` and ``1.200``; the
    patterns see them as ``0.925`` and ``1,200``.

    A number of which a pattern takes the first digits alone, as 0 of ``0.925``, is not understood.
    Only the first 1,000 characters of a line are searched. A repetition within a repetition is refused, and a pattern
    that needs more than a second for a line is given up (``dropped_lines`` counts it): a log line can make either hang.
    """

    def __init__(
        self,
        clock: Clock = steady_epoch,
        *,
        global_batch_size: float = 1.0,
        samples_per_epoch: float = 1.0,
        from_zero: bool = False,
        repeated: bool = False,
        decimal_comma: bool = False,
        metric: str = "loss",
        **patterns: str,
    ) -> None:
        super().__init__(clock)
        self._metric = metric
        if "eval" not in patterns:
            raise ValueError("log kind 'regex' needs the setting 'eval': a pattern with the groups loss and samples")
        if other := reads_a_loss_instead(metric, patterns["eval"]):
            raise ValueError(
                f"eval reads {other!r}, the metric is {metric!r}: put the group (?P<loss>...) behind {metric} in it"
            )
        self._scale = {"samples": 1.0, "step": global_batch_size, "epoch": samples_per_epoch}
        self._first = 0 if from_zero else 1
        self.repeated, self.decimal_comma = repeated, decimal_comma
        apart = "progress" in patterns
        order = sorted(patterns, key=lambda name: name != "progress")  # of a line that has both
        self._patterns = {name: compile_safely(name, patterns[name], progress_apart=apart) for name in order}
        self._progress: dict[str, Any] = {"samples": 0.0} if apart else {}
        self.unmatched.patterns = patterns["eval"]
        self._cpu = 0.0

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the log. Never raises for what they contain."""
        self._cpu = time.thread_time()  # too slow a call for every line
        super().feed(chunk)

    def line(self, text: str, now: int) -> bool:
        understood = True
        for name, pattern in list(self._patterns.items()):
            begin = time.perf_counter()
            match = pattern.search(text[:MAX_PATTERN_LINE])
            if time.perf_counter() - begin > SLOW_SECONDS and time.thread_time() - self._cpu > SLOW_SECONDS:
                del self._patterns[name]
                understood = False
            if match:
                understood &= self._found(name, match, now)
        return understood

    def _found(self, name: str, match: re.Match[str], now: int) -> bool:
        builder, groups = self.run_builder, match.groupdict()
        if short := cut_short(match):
            self.unmatched.cut = short
            return False
        if name == "start" and not builder.evals and not builder.train:
            builder.run_start = now
        elif name == "stop" and builder.run_stop is None:
            builder.run_stop = now
        elif name == "progress":
            self._progress = {fact: value for fact, value in groups.items() if value is not None}
        elif name in ("eval", "train"):
            fields = {fact: value for fact, value in groups.items() if value is not None}
            if name == "eval" and self._metric in fields:
                fields["loss"] = fields.pop(self._metric)
            samples = scaled_samples(fields, self._scale, first=self._first)
            if samples is None:
                samples = scaled_samples(self._progress, self._scale, first=self._first)
            if name == "train" and "loss" in fields:
                fields["train_loss"] = fields.pop("loss")
            return self.take_fields(fields, now, samples)
        return True


def reads_a_loss_instead(metric: str, pattern: str) -> str:
    """The name behind which a pattern has its group ``loss``, where that is a loss and ``metric`` is none; else ""."""
    if "loss" in metric.lower():
        return ""
    before = re.sub(r"\\[A-Za-z]", " ", pattern.partition("(?P<loss>")[0])
    name = (re.findall(r"\w+", before) or [""])[-1]
    return name if "loss" in name.lower() else ""


def cut_short(match: re.Match[str]) -> str:
    """The whole number of which a pattern ends within: ``0,925`` where it took 0; "" where it took all that matters."""
    last = match[match.lastgroup] if match.lastgroup else None
    if not last or not last.isdigit() or match.end() != match.end(match.lastgroup or 0):
        return ""
    rest = _REST.match(match.string, match.end())
    return last + rest[0] if rest else ""


_REST = re.compile(r"[.,]\d{0,20}[1-9]\d{0,20}")


_PATTERNS = ("eval", "train", "progress", "start", "stop")


def _counts(settings: Mapping[str, Any]) -> str:
    """What the pattern's groups count in; nothing scales steps without the batch size."""
    pattern = "".join(str(settings.get(name, "")) for name in ("eval", "progress"))
    for name, scale in (("step", "global_batch_size"), ("epoch", "samples_per_epoch")):
        if f"(?P<{name}>" in pattern and "(?P<samples>" not in pattern and scale not in settings:
            return f"{name}s"
    return "samples"


KIND = ReaderKind(
    make=RegexReader,
    settings={**SCALES, **FORM, **dict.fromkeys((*_PATTERNS, "metric"), str)},
    metric="metric",
    counts=_counts,
)
"""``workload.log.kind = "regex"``."""
