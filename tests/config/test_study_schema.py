"""The JSON schema of a study file admits every shipped study, and refuses what no study can be."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from lora_tune.__main__ import main
from lora_tune.config.study_schema import study_schema
from tests.conftest import REPOSITORY

STUDIES = [p for p in sorted((REPOSITORY / "studies").rglob("*.toml")) if p.parent.name != "sites"]

SMALL = """
[workload]
kind = "command"
argv = ["python", "train.py"]
[space]
LR = { type = "float", low = 1e-4, high = 1e-2, log = true }
[budget]
trials = 3
"""


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    return Draft202012Validator(study_schema())


@pytest.mark.parametrize("file", STUDIES, ids=lambda path: path.stem)
def test_it_admits_every_shipped_study(validator: Draft202012Validator, file: Path) -> None:
    study = tomllib.loads(file.read_text(encoding="utf-8"))
    assert [f"{list(e.absolute_path)}: {e.message}" for e in validator.iter_errors(study)] == []


@pytest.mark.parametrize(
    "wrong",
    [
        SMALL.replace("trials = 3", "trails = 3"),
        SMALL.replace("trials = 3", 'trials = "many"'),
        SMALL.replace("[budget]", "[bugdet]"),
        SMALL.replace('type = "float"', 'type = "flaot"'),
        SMALL.replace("low = 1e-4, ", ""),
        SMALL.partition("[space]")[0],
    ],
)
def test_it_refuses_what_no_study_can_be(validator: Draft202012Validator, wrong: str) -> None:
    assert validator.is_valid(tomllib.loads(SMALL))
    assert not validator.is_valid(tomllib.loads(wrong))


def test_the_command_prints_it_and_each_key_has_its_meaning() -> None:
    printed = json.loads(CliRunner().invoke(main, ["schema"]).output)
    assert printed == json.loads(json.dumps(study_schema()))
    Draft202012Validator.check_schema(printed)
    budget = printed["$defs"]["Budget"]["properties"]
    assert all(key["description"] for key in budget.values())
    assert "outside" in printed["$defs"]["Site"]["properties"]["launcher"]["examples"]
