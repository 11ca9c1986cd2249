"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.slurm.house import House


@pytest.fixture
def house(slurm: Cluster, tmp_path: Path) -> Iterator[Callable[..., House]]:
    """Makes a :class:`House`, below a folder of the given name; its drivers are ended with the test."""
    made: list[House] = []

    def make(name: str = "", **settings: Any) -> House:
        folder = tmp_path / (name or (str(len(made)) if made else ""))
        folder.mkdir(exist_ok=True)
        found = House(folder, slurm, **settings)
        made.append(found)
        return found

    yield make
    for one in made:
        one.close()
