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

# What the package's checkers say: they speak through the root logger.


class _Collector(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage().strip())


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is said to the root logger meanwhile; its own handlers hear nothing of it, and none is installed.

    Heard too where the caller has switched logging off: the words are part of a verdict.
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
"""Characters of a record that could not be read."""

_PLAIN = re.compile(r"[A-Za-z0-9_]+")
_FILE_NAMES = ("submission_division", "submission_benchmark")
"""Keys whose values the rules put into the names of further rule files."""


@dataclass(frozen=True, slots=True)
class ParsedLog:
    """The records of one log as the package's own parser reads them.

    lines: its LogLine objects (``key``, ``value`` with ``value`` and ``metadata``, ``timestamp`` in ms).
    errors: records that it could not read, with why.
    """

    lines: Sequence[Any]
    errors: tuple[str, ...] = ()

    def first(self, key: str) -> object:
        """The value of the first record of a key; None where there is none."""
        return next((line.value["value"] for line in self.lines if line.key == key), None)

    def times(self) -> tuple[float, float] | None:
        """``run_start`` and ``run_stop`` in ms as the result summarizer takes them; None where one is missing."""
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

    Their own regular expression for it takes time with the square of a line's length; this takes none to speak of.
    Records are lines again: an empty one keeps the blank of its mark, and stays one that cannot be parsed.
    """
    return [MARK + line[line.rfind(MARK) + len(MARK) :].rstrip() for line in text if MARK in line]


def parse(lines: Iterable[str], ruleset: str) -> ParsedLog:
    """The records in the lines of a log, by the package's parser for a ruleset. Never raises for what they hold."""
    version = known_to_checkers(ruleset).replace(".", "")
    parser = import_module(f"mlperf_logging.compliance_checker.mlp_parser.ruleset_{version}")
    parsed, failed = [], []
    for number, record in enumerate(records(lines)):
        try:
            parsed.append(parser.string_to_logline(number, record))
        except ValueError as error:
            failed.append(f"{error}: {record[:SHOWN]}")
        except Exception as error:  # noqa: BLE001  # where the package's tools would end, all of the log is unread
            return ParsedLog((), (f"mlperf_logging ends with {type(error).__name__}: {error}: {record[:SHOWN]}",))
    return ParsedLog(parsed, tuple(failed))


class _Yaml:
    """In place of the yaml module in the checker, which reads and compiles its rules anew for each log."""

    BaseLoader = yaml.BaseLoader

    @staticmethod
    def load(file: Any, Loader: object) -> Any:  # noqa: ARG004  # as the checker calls it
        """The rules in an open file, read once."""
        return _rules_in(Path(file.name))


@cache
def _rules_in(path: Path) -> Any:
    return with_code(yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader))


def complaints(log: ParsedLog, ruleset: str) -> tuple[str, ...]:
    """What the compliance checker says against a log; empty when it passes."""
    return tuple(text for _, text in findings(log, ruleset))


def findings(log: ParsedLog, ruleset: str) -> list[tuple[str, str]]:
    """The checker's complaints with the key that each is about, "" where it is about none.

    The rules are code in the package's YAML files. Values that they make file names of are looked at before they
    run, and what the rules themselves raise on a strange log is a complaint too.
    """
    from mlperf_logging.compliance_checker import mlp_compliance

    mlp_compliance.yaml = _Yaml
    for key in _FILE_NAMES:
        odd = [line.value["value"] for line in log.lines if line.key == key and not _is_plain(line.value["value"])]
        if odd:
            return [(key, f"{key} is {odd[0]!r}, which names no rules of MLPerf")]
    checker = mlp_compliance.make_checker("training", ruleset, quiet=True, werror=False)
    with heard():
        try:
            if log.errors:
                checker.put_message("Log lines had parsing errors: " + log.errors[0])
            checker.check_loglines(list(log.lines), f"training_{ruleset}/common.yaml")
        except FileNotFoundError as error:  # a benchmark that this ruleset does not have
            checker.put_message(f"mlperf_logging has no rules {Path(error.filename).name} in {ruleset}")
        except Exception as error:  # noqa: BLE001  # whatever the rules raise on a log is said
            checker.put_message(f"the rules fail on this log: {type(error).__name__}: {error}")
        finally:
            mlp_compliance.enqueued_configs.clear()
    return [*checker.overwritable.items(), *(("", text) for text in checker.not_overwritable)]


def _is_plain(value: object) -> bool:
    return isinstance(value, str) and _PLAIN.fullmatch(value) is not None


# The verdict of ``mlperf_logging``'s seed checker on the result files of one submission.


def seed_complaint(files: Sequence[Path], ruleset: str) -> str:
    """What the seed checker says first against runs of the closed division; "" when each logs a seed of its own.

    files: the result files in plain text, all in one folder, whose path the words do not name.
    """
    from mlperf_logging.package_checker.seed_checker import SeedChecker

    with heard() as messages, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if SeedChecker(known_to_checkers(ruleset)).check_seeds([str(f) for f in files]):
            return ""
    lines = "\n".join(messages).replace(f"{files[0].parent}/", "").splitlines()
    first = lines[0].partition("following errors: ")[2].rstrip(".") or lines[0]
    return f"{first}; and {len(lines) - 1} more" if len(lines) > 1 else first
