"""The rooms of the package: who may import whom, and what stands at the root. Drawn in docs/architecture.md."""

from __future__ import annotations

import importlib

import pytest

from benchmarks.house import ORDER, against_the_order, figures, modules, shared_class_names
from lora_tune.__main__ import COMMANDS, _module
from tests.conftest import REPOSITORY


def test_a_room_imports_only_rooms_before_it_in_the_order() -> None:
    assert against_the_order(modules(REPOSITORY)) == []


def test_every_folder_of_the_package_is_a_room_of_the_order() -> None:
    folders = {m.room for m in modules(REPOSITORY)} - {""}
    assert folders == {*ORDER, "recipes"}


def test_the_root_holds_commands_alone_and_each_is_a_few_lines() -> None:
    root = {m.path.stem: m.lines for m in modules(REPOSITORY) if not m.room and not m.path.stem.startswith("__")}
    assert len(root) <= 16
    assert set(root) <= set(COMMANDS)
    assert max(root.values()) <= 20


def test_every_test_lies_in_a_folder() -> None:
    """One of the package's room, or one that says what the tests are of (``docs``, ``package``, ``slurm``, ...)."""
    assert list((REPOSITORY / "tests").glob("test_*.py")) == []


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_is_a_module_of_its_name(name: str) -> None:
    assert callable(importlib.import_module(_module(name)).main)


def test_no_module_knows_two_of_the_big_libraries() -> None:
    assert figures(REPOSITORY)["modules that know two of optuna, sqlalchemy, submitit, torch"] == 0


def test_no_module_and_no_function_outgrows_a_reader() -> None:
    """300 lines a module, 45 a function."""
    found = modules(REPOSITORY)
    assert max(m.lines for m in found) <= 300
    assert max(lines for m in found for _, lines in m.functions) <= 45


def test_a_class_name_stands_for_one_thing() -> None:
    assert shared_class_names(modules(REPOSITORY)) == []
