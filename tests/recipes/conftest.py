"""Warm workers of the NeMo and the Bridge recipe on a CPU, and what both recipes' tests compare with.

Their imports take as long as a dozen trials, so each worker serves all tests of this folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipes.served import WITHOUT_TE, Served, Trial, interpreter, served


@pytest.fixture(scope="package")
def nemo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Runs NeMo trials."""
    python, folder = interpreter("nemo"), tmp_path_factory.mktemp("nemo")
    with served(python, "tests.recipes.cpu_shim", "lora_tune_recipes.nemo.trial", folder) as trials:
        yield trials


@pytest.fixture(scope="package")
def nemo_alone(nemo: Served) -> Trial:
    """The reference of NeMo's layouts, and what Bridge must learn from the same: one process."""
    trial = nemo()
    assert trial.codes == (0,), trial.output[-2000:]
    return trial


@pytest.fixture(scope="package")
def nemo_base(nemo: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped base as a NeMo checkpoint folder."""
    folder = tmp_path_factory.mktemp("base") / "model"
    trial = nemo(module="tests.recipes.nemo_folder", SAVE_TO=folder)
    assert (folder / "weights" / ".metadata").exists(), trial.output[-2000:]
    return folder


@pytest.fixture(scope="package")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Runs Megatron-Bridge trials."""
    python, folder = interpreter("bridge"), tmp_path_factory.mktemp("bridge")
    recipe, trial = "tests.recipes.bridge_shim", "lora_tune_recipes.bridge.trial"
    with served(python, recipe, trial, folder, **WITHOUT_TE) as trials:
        yield trials
