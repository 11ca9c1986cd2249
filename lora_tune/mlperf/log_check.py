"""The verdict of ``mlperf_logging``'s compliance checker on one log."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from lora_tune.mlperf.rules import with_code
from lora_tune.mlperf.rulesets import known_to_checkers

# The package's checkers report through the root logger.


class _Collector(logging.Handler):
    """Collects warnings and errors."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage().strip())


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collect the root logger's warnings and errors in place of its handlers.

    Works even if the caller has disabled logging, because the messages are part of a verdict.
    """
    root, collector = logging.getLogger(), _Collector()
    before, level, disabled = root.handlers[:], root.level, logging.root.manager.disable
    root.handlers[:] = [collector]
    root.setLevel(logging.WARNING)
    logging.disable(logging.NOTSET)
    try:
        yield collector.messages
    finally:
        logging.disable(disabled)
        root.setLevel(level)
        root.handlers[:] = before


MARK = ":::MLLOG "

SHOWN = 200
"""Most characters quoted of a record that cannot be parsed."""

_PLAIN = re.compile(r"[A-Za-z0-9_]+")
_FILE_NAMES = ("submission_division", "submission_benchmark")
"""Keys whose values become part of the names of rule files."""


@dataclass(frozen=True, slots=True)
class ParsedLog:
    """The records of one log, by mlperf_logging's parser.

    lines: its LogLine objects (``key``, ``value`` with ``value`` and ``metadata``, ``timestamp`` in ms).
    errors: records that cannot be parsed, with the reason.
    """

    lines: Sequence[Any]
    errors: tuple[str, ...] = ()

    def first(self, key: str) -> object:
        """The value of the first record of a key; None if there is none."""
        return next((line.value["value"] for line in self.lines if line.key == key), None)

    def times(self) -> tuple[float, float] | None:
        """``run_start`` and ``run_stop`` in ms as the result summarizer takes them; None if one is missing."""
        start = stop = None
        for line in self.lines:
            if line.key == "run_start":
                start = line.timestamp
            elif line.key == "run_stop":
                stop = line.timestamp
            if start is not None and stop is not None:
                return float(start), float(stop)
        return None


def records(text: Iterable[str]) -> list[str]:
    """The ``:::MLLOG`` records in the lines of a log, each from its mark on, as the package's tools cut them.

    Takes linear time; their regular expression takes the square of a line's length. An empty record keeps the blank
    of its mark, so that it still fails to parse.
    """
    return [MARK + line[line.rfind(MARK) + len(MARK) :].rstrip() for line in text if MARK in line]


def parse(lines: Iterable[str], ruleset: str) -> ParsedLog:
    """The records in the lines of a log, by the package's parser for a ruleset. Never raises for their content."""
    version = known_to_checkers(ruleset).replace(".", "")
    parser = import_module(f"mlperf_logging.compliance_checker.mlp_parser.ruleset_{version}")
    parsed, failed = [], []
    for number, record in enumerate(records(lines)):
        try:
            parsed.append(parser.string_to_logline(number, record))
        except ValueError as error:
            failed.append(f"{error}: {record[:SHOWN]}")
        except Exception as error:  # noqa: BLE001  # the package's tools would crash here, so the whole log is unread
            return ParsedLog((), (f"mlperf_logging ends with {type(error).__name__}: {error}: {record[:SHOWN]}",))
    return ParsedLog(parsed, tuple(failed))


class _Yaml:
    """Replaces the yaml module in the checker, which would parse and compile its rules again for each log."""

    BaseLoader = yaml.BaseLoader

    @staticmethod
    def load(file: Any, Loader: object) -> Any:  # noqa: ARG004  # as the checker calls it
        """The rules in an open file, parsed once."""
        return _rules_in(Path(file.name))


@cache
def _rules_in(path: Path) -> Any:
    return with_code(yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader))


def complaints(log: ParsedLog, ruleset: str) -> tuple[str, ...]:
    """The compliance checker's complaints about a log; empty if it passes."""
    return tuple(text for _, text in findings(log, ruleset))


def findings(log: ParsedLog, ruleset: str) -> list[tuple[str, str]]:
    """The checker's complaints as (key, message), with "" as the key if it concerns none.

    The rules are code in the package's YAML files, named by values of the log. Such values are checked first, and an
    exception of the rules becomes a complaint.
    """
    from mlperf_logging.compliance_checker import mlp_compliance

    mlp_compliance.yaml = _Yaml
    for key in _FILE_NAMES:
        odd = [line.value["value"] for line in log.lines if line.key == key and not _is_plain(line.value["value"])]
        if odd:
            return [(key, f"{key} is {odd[0]!r}, which names no rules of MLPerf")]
    checker = mlp_compliance.make_checker("training", ruleset, quiet=True, werror=False)
    with captured_log():
        try:
            if log.errors:
                checker.put_message("Log lines had parsing errors: " + log.errors[0])
            checker.check_loglines(list(log.lines), f"training_{ruleset}/common.yaml")
        except FileNotFoundError as error:  # a benchmark that this ruleset does not have
            checker.put_message(f"mlperf_logging has no rules {Path(error.filename).name} in {ruleset}")
        except Exception as error:  # noqa: BLE001  # rules may raise anything; it becomes a complaint
            checker.put_message(f"the rules fail on this log: {type(error).__name__}: {error}")
        finally:
            mlp_compliance.enqueued_configs.clear()
    return [*checker.overwritable.items(), *(("", text) for text in checker.not_overwritable)]


def _is_plain(value: object) -> bool:
    return isinstance(value, str) and _PLAIN.fullmatch(value) is not None


# The verdict of ``mlperf_logging``'s seed checker on the result files of one submission.


def seed_complaint(files: Sequence[Path], ruleset: str) -> str:
    """The seed checker's first complaint about runs of the closed division; "" if each run logs a different seed.

    files: the result files in plain text, in one folder; its path is removed from the message.
    """
    from mlperf_logging.package_checker.seed_checker import SeedChecker

    with captured_log() as messages, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if SeedChecker(known_to_checkers(ruleset)).check_seeds([str(f) for f in files]):
            return ""
    lines = "\n".join(messages).replace(f"{files[0].parent}/", "").splitlines()
    first = lines[0].partition("following errors: ")[2].rstrip(".") or lines[0]
    return f"{first}; and {len(lines) - 1} more" if len(lines) > 1 else first
