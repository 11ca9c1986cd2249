"""Every private name of another library that this package uses: named here, there today, and the library bounded above.

A library may change what is private in any release. A new use belongs into :data:`PRIVATE`, and an upper bound into
pyproject.toml.
"""

from __future__ import annotations

import ast
import re as regular_expressions
import tomllib
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
import submitit
from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker
from packaging.requirements import Requirement
from submitit.slurm import slurm

import lora_tune
import lora_tune_recipes
import lora_tune_simulation
from tests.conftest import REPOSITORY


def _study() -> optuna.Study:
    return optuna.create_study()


PRIVATE: dict[str, dict[str, Callable[[], object]]] = {
    "optuna": {
        # Attributes of trials that a sampler writes
        "_storage": _study,
        "_trial_id": lambda: _study().ask(),
    },
    "submitit": {
        "_make_sbatch_string": lambda: slurm,
        "_make_submission_command": lambda: submitit.SlurmExecutor,
        "_process": lambda: submitit.LocalJob,
        "_submit_command": lambda: submitit.LocalExecutor,
    },
    "mlperf-logging": {
        # What lies between two reference points, and what the check accepts (mlperf/convergence.py)
        "_create_interp_rcp": lambda: RCP_Checker,
        "_eval_submission_record": lambda: RCP_Checker,
    },
}  # fmt: skip

OF_INSTANCES = {"_process"}
"""Attributes that only a job has which runs: tests/launchers/test_local.py uses them."""

OF_PYTHON = {"_asdict", "_replace", "_exit", "_parser"}
"""Public though they begin with an underscore, but for re._parser, which every supported Python has."""

OF_CONTAINERS = {"_world", "_set_pg_timeout", "_training_loss_reduction", "_validation_loss_reduction"}
"""Of torch and NeMo in the NeMo recipe, which the extra ``nemo`` pins to one release."""

OF_PARSERS = {"_actions", "_short_opts", "_long_opts"}
"""What option parsers hold of their options: read in a script's own process
(``workloads/parser_hook``), where another version of the library has its help text read instead."""

OF_TRANSFORMERS = {"_no_split_modules"}
"""Which layers FSDP and accelerate keep whole: every model class names them there, and nowhere else."""

OF_TORCH = {"_dynamo"}
"""Its config says how many programs a function may have: a pack compiles one for each shape (packed/base.py)."""


def private_names() -> set[str]:
    """Names with an underscore in front that lora_tune uses and nowhere defines."""
    used, defined = set[str](), set[str]()
    for file in (
        f for p in (lora_tune, lora_tune_recipes, lora_tune_simulation) for f in Path(p.__file__).parent.rglob("*.py")
    ):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                    defined.add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    defined.add(name)
                case ast.Attribute(attr=name):
                    used.add(name)
                case ast.ImportFrom(module=module, names=names) if not str(module).startswith("lora_tune"):
                    used.update(alias.name for alias in names)
    return {name for name in used - defined if name.startswith("_") and not name.endswith("__")}


def test_every_private_use_is_named() -> None:
    named = {name for names in PRIVATE.values() for name in names}
    assert private_names() - OF_PYTHON - OF_CONTAINERS - OF_PARSERS - OF_TRANSFORMERS - OF_TORCH - named == set()


@pytest.mark.parametrize(("library", "name"), [(library, name) for library, names in PRIVATE.items() for name in names])
def test_the_installed_library_has_it(library: str, name: str) -> None:
    assert hasattr(PRIVATE[library][name](), name) or name in OF_INSTANCES


def test_the_running_python_parses_patterns_as_the_regex_reader_needs() -> None:
    assert regular_expressions._parser.parse("(a+)+")  # type: ignore[attr-defined]


def test_a_library_whose_private_names_are_used_is_bounded_above() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = {r.name: str(r.specifier) for r in map(Requirement, project["dependencies"])}
    # optuna-dashboard: no private name, but its routes and the shape of its answers.
    assert [name for name in (*PRIVATE, "optuna-dashboard") if "<" not in bounds[name]] == []
