"""The five journeys of docs/architecture.md, held to the code without running it."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from itertools import pairwise

import pytest

from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")

SECTION = PAGE.split("## Five journeys")[1].split("\n## ")[0]


@dataclass(frozen=True)
class Stop:
    """One line of a journey.

    file: below ``lora_tune/``. names: functions, methods or classes in it. by_optuna: Optuna calls the next stop.
    """

    file: str
    names: frozenset[str]
    by_optuna: bool


def journeys() -> dict[str, list[Stop]]:
    """The stops of each journey, in order."""
    _, *parts = re.split(r"^\*\*(.+)\*\*$", SECTION, flags=re.MULTILINE)
    lines = r"^\d+\. `([\w/]+\.py)` (`\w+`(?:, `\w+`)*)(.*)$"
    return {
        title: [
            Stop(file, frozenset(re.findall(r"\w+", names)), "Optuna calls the next" in what)
            for file, names, what in re.findall(lines, stops, flags=re.MULTILINE)
        ]
        for title, stops in zip(parts[::2], parts[1::2], strict=True)
    }


@functools.cache
def tree(file: str) -> ast.Module:
    return ast.parse((REPOSITORY / "lora_tune" / file).read_text(encoding="utf-8"))


@functools.cache
def defined(file: str) -> frozenset[str]:
    """Functions, methods and classes of a file."""
    return frozenset(n.name for n in ast.walk(tree(file)) if isinstance(n, ast.FunctionDef | ast.ClassDef))


@functools.cache
def called(file: str) -> frozenset[str]:
    """What the code of a file names: functions, methods of whatever object, classes; not what its texts name."""
    nodes = [*ast.walk(tree(file))]
    names = {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    return frozenset(names)


def calls(here: Stop, there: Stop) -> bool:
    return not there.names.isdisjoint(called(here.file))


def joined(here: Stop, there: Stop, journey: list[Stop]) -> bool:
    """Whether data can pass from one stop to the next: one calls the other, or somebody on the journey calls both."""
    if here.by_optuna or calls(here, there) or calls(there, here):
        return True
    return any(calls(caller, here) and calls(caller, there) for caller in journey)


JOURNEYS = journeys()
each_journey = pytest.mark.parametrize("title", JOURNEYS)


def test_there_are_five_and_none_is_a_stroll() -> None:
    assert len(JOURNEYS) == 5
    assert min(len(stops) for stops in JOURNEYS.values()) >= 8


@each_journey
def test_every_function_is_where_the_page_says(title: str) -> None:
    assert [(s.file, *(s.names - defined(s.file))) for s in JOURNEYS[title] if not s.names <= defined(s.file)] == []


@each_journey
def test_data_goes_one_way_and_comes_by_no_file_twice(title: str) -> None:
    files = [stop.file for stop in JOURNEYS[title]]
    assert sorted(files) == sorted(set(files))


@each_journey
def test_each_stop_reaches_the_next(title: str) -> None:
    stops = JOURNEYS[title]
    assert [(here.file, there.file) for here, there in pairwise(stops) if not joined(here, there, stops)] == []


def test_files_and_folders_named_in_passing_are_there() -> None:
    named = set(re.findall(r"`([a-z_]+/[\w/]*(?:\.py)?)`", SECTION))
    assert {
        n for n in named if not any((root / n).exists() for root in (REPOSITORY, REPOSITORY / "lora_tune"))
    } == set()
