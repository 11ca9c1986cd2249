"""What OptunaHub would take: each folder's module, loaded from its file as the hub loads it, works in a plain study."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import optuna
import pytest
import yaml

from tests.conftest import REPOSITORY

HUB = REPOSITORY / ".ci" / "optunahub" / "package"
PACKAGES = sorted(str(file.parent.relative_to(HUB)) for file in HUB.glob("*/*/__init__.py"))


def load(place: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"hub_{place.parent.name}_{place.stem}", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", PACKAGES)
def test_a_folder_has_what_the_hub_asks_for(name: str) -> None:
    readme = (HUB / name / "README.md").read_text()
    front = yaml.safe_load(readme.split("---")[1])
    assert set(front) == {"author", "title", "description", "tags", "optuna_versions", "license"}
    assert all(f"## {part}" in readme for part in ("Abstract", "APIs", "Installation", "Example"))
    assert (HUB / name / "LICENSE").read_text() == (REPOSITORY / "LICENSE").read_text()


@pytest.mark.parametrize("name", PACKAGES)
def test_its_example_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = SimpleNamespace(load_module=lambda asked: load(HUB / asked / "__init__.py"))
    monkeypatch.setitem(sys.modules, "optunahub", hub)
    example = load(HUB / name / "example.py")
    if name == "pruners/stall":
        study = optuna.create_study(
            pruner=load(HUB / name / "__init__.py").StallPruner(target=0.2, max_steps=30),
            sampler=optuna.samplers.RandomSampler(seed=1),
        )
        study.optimize(example.objective, n_trials=40)
        assert study.get_trials(states=[optuna.trial.TrialState.PRUNED])
    else:
        study = optuna.create_study(sampler=load(HUB / name / "__init__.py").GreyBoxSampler(seed=1))
        study.optimize(example.seconds, n_trials=12)
    assert study.best_trial.value is not None


def test_the_images_install_what_the_package_has() -> None:
    """Files that no builder here can build name extras and files that exist."""
    import tomllib

    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for file in ("Containerfile", "lora-tune.def"):
        text = (REPOSITORY / ".ci" / file).read_text()
        assert set(text.split("/src[")[1].split("]")[0].split(",")) <= set(extras)
        assert "-c /src/constraints.txt" in text
