"""Fixtures: ``slurm`` (fast, without accounting) and ``slurm_accounting`` (with slurmdbd, so a real sacct).

One cluster of each flavour a session, started when first asked for; every test finds it empty and all nodes idle.
Where the cluster cannot run the tests are skipped with the reason; where ``CI`` is set they fail instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, Shape, missing


def _need(*, accounting: bool) -> None:
    reason = missing(accounting=accounting)
    if reason and os.environ.get("CI"):
        pytest.fail(f"nothing may be skipped here: {reason}")
    if reason:
        pytest.skip(f"no Slurm test cluster: {reason}")


@pytest.fixture(scope="session")
def _fast_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    _need(accounting=False)
    with Cluster(tmp_path_factory.mktemp("slurm") / "c") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def _accounting_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    _need(accounting=True)
    with Cluster(tmp_path_factory.mktemp("slurmdb") / "c", Shape(accounting=True)) as cluster:
        yield cluster


def _lent(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    yield cluster
    cluster.clear()


@pytest.fixture
def slurm(_fast_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A running, empty cluster of 4 nodes x 8 GPUs without accounting; SLURM_CONF and PATH point to it."""
    yield from _lent(_fast_cluster, monkeypatch)


@pytest.fixture
def slurm_accounting(_accounting_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The same with slurmdbd: sacct works."""
    yield from _lent(_accounting_cluster, monkeypatch)
