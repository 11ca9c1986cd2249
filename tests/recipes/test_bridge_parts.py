"""Parts of the Megatron-Bridge recipe that need neither it nor a GPU."""

from __future__ import annotations

import importlib
import sys

import pytest

from lora_tune.recipes.bridge.imports import StandIns, present


def test_a_stand_in_is_imported_and_never_called() -> None:
    finder = StandIns(["absent_package"])
    try:
        deep = importlib.import_module("absent_package.deep.module")
        assert isinstance(deep.Name, type)
        assert not isinstance(3, deep.Name)
        assert not present("absent_package")
        with pytest.raises(RuntimeError, match=r"absent_package\.deep\.module\.Name was called"):
            deep.Name()
    finally:
        finder.remove()
    assert "absent_package" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("absent_package")


def test_what_is_installed_is_present() -> None:
    assert present("json")
    assert not present("no_such_package_at_all")
    assert not present("no_such_package.below_it")
