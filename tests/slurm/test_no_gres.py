"""A cluster whose slurm.conf knows no GPUs: nodes are taken whole."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_tune.store.records import Verdict
from tests.cluster import Cluster, Shape, missing
from tests.recorded import recorded
from tests.slurm.test_strange_sites import STUDY, TRAIN

pytestmark = [pytest.mark.slurm, pytest.mark.long]


@pytest.fixture
def plain(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two nodes without GresTypes and Gres."""
    if reason := missing(accounting=False):
        pytest.skip(f"no Slurm test cluster: {reason}")
    with Cluster(tmp_path_factory.mktemp("ng") / "c", Shape(nodes=2, gpus=0)) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        yield cluster


def sweep(place: Path, site: str) -> subprocess.CompletedProcess[str]:
    place.mkdir()
    (place / "train.py").write_text(TRAIN)
    study = STUDY.format(python=sys.executable, folder=place).replace("gpus_per_node = 1", site)
    (place / "s.toml").write_text(study)
    command = [sys.executable, "-m", "lora_tune.sweep", "--study", "s.toml", "--output", "out"]
    return subprocess.run(
        command, cwd=place, env={**os.environ}, capture_output=True, text=True, timeout=120, check=False
    )


def test_whole_nodes_are_asked_for_by_a_word_and_a_refusal_names_it(plain: Cluster, tmp_path: Path) -> None:
    refused = sweep(tmp_path / "a", "gpus_per_node = 8")
    assert refused.returncode == 3
    assert 'gres = "none" in [site]' in refused.stdout + refused.stderr
    assert plain.run("squeue", "--noheader", "--states=all") == "", "nothing runs on fewer GPUs than it wants"

    swept = sweep(tmp_path / "b", 'gpus_per_node = 8\ngres = "none"')
    assert swept.returncode == 0, swept.stdout + swept.stderr
    records = recorded(tmp_path / "b" / "out" / "sweep.db", "s")
    assert [trial.verdict for trial in records.trials.values()] == [Verdict.REACHED] * 2
    assert len(records.attempts) == 2
