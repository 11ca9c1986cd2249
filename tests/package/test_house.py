"""The rooms of the package: who may import whom, and what stands at the root. Drawn in docs/architecture.md."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from benchmarks.house import (
    BESIDE,
    ORDER,
    SIMULATION,
    TRAINERS,
    Module,
    against_the_order,
    circles,
    everyday_share,
    modules,
    of_two_libraries,
    shared_class_names,
    unnamed_parameters,
)
from lora_tune.__main__ import COMMANDS, _module
from tests.conftest import REPOSITORY
from tests.distribution import LONGEST, TOGETHER


@pytest.fixture(scope="module")
def house() -> list[Module]:
    return modules(REPOSITORY)


def test_a_room_imports_only_rooms_before_it_in_the_order(house: list[Module]) -> None:
    assert against_the_order(house) == []


def test_every_folder_of_the_package_is_a_room_of_the_order(house: list[Module]) -> None:
    folders = {m.room for m in house} - {""}
    assert folders == {*ORDER, *BESIDE, "recipes"}, "recipes: where the trainers were, for old run lines"


def test_the_root_holds_commands_alone_and_each_is_a_few_lines(house: list[Module]) -> None:
    root = {m.path.stem: m.lines for m in house if not m.room and not m.path.stem.startswith("__")}
    assert len(root) <= 20
    assert set(root) <= set(COMMANDS)
    assert max(root.values()) <= 20


def test_every_test_lies_in_a_folder() -> None:
    """One of the package's room, or one that says what the tests are of (``docs``, ``package``, ``slurm``, ...)."""
    assert list((REPOSITORY / "tests").glob("test_*.py")) == []


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_is_a_module_of_its_name(name: str) -> None:
    assert callable(importlib.import_module(_module(name)).main)


def test_help_waits_for_nothing_that_a_command_needs_to_run() -> None:
    """Within half a second of a bare interpreter: ``python -m benchmarks.start_up`` measures it."""
    heavy = ("pydantic", "numpy", "sqlalchemy", "optuna", "rich", "lora_tune.config.study", "lora_tune.controller")
    program = (
        f"import importlib, sys; [importlib.import_module(name) for name in {[_module(name) for name in COMMANDS]}]; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"


def test_no_module_knows_two_of_the_big_libraries(house: list[Module]) -> None:
    assert of_two_libraries(house) == []


def test_no_module_and_no_function_outgrows_a_reader(house: list[Module]) -> None:
    """A module is as large as one idea, 600 lines at most; a function 45."""
    assert max(m.lines for m in house) <= 600
    assert max(lines for m in house for _, lines in m.functions) <= 45


def test_a_parameter_is_called_by_what_it_is(house: list[Module]) -> None:
    """Not by that it was found, given or asked for: a caller reads the names in the signature."""
    assert unnamed_parameters(house) == []


def test_a_class_name_stands_for_one_thing(house: list[Module]) -> None:
    assert shared_class_names(house) == []


def test_what_the_suites_processes_share_out_is_there() -> None:
    named = {file for files in TOGETHER.values() for file in files} | {*LONGEST} - {*TOGETHER}
    assert [file for file in sorted(named) if not (REPOSITORY / "tests" / file).exists()] == []


def test_modules_do_not_import_each_other_not_even_for_types(house: list[Module]) -> None:
    assert circles(house) == []


MOST_EVERYDAY = {
    "": 0.9, "base": 0.4, "logs": 0.4, "curves": 0.6, "mlperf": 0.9, "config": 0.8, "store": 0.5, "workloads": 0.4,
    "launchers": 0.4, "search": 0.3, "controller": 0.4, "review": 0.7, "cli": 0.4, TRAINERS: 1.2, SIMULATION: 0.8,
    "recipes": 0.0,
}  # fmt: skip
"""Percent of the words of identifiers, by room: goes down, never up."""


def test_identifiers_speak_the_language_of_the_field(house: list[Module]) -> None:
    share = everyday_share(house)
    assert {room: value for room, value in share.items() if value > MOST_EVERYDAY[room]} == {}
