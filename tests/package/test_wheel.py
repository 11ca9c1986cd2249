"""A user without a checkout has everything: the wheel holds every file that the package reads."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.package.wheel import build_wheel, copied


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    there = {
        str(path.relative_to(REPOSITORY))
        for package in ("lora_tune", "lora_tune_recipes", "lora_tune_simulation")
        for path in (REPOSITORY / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    shipped = {f"lora_tune/{path.relative_to(REPOSITORY)}" for path in (REPOSITORY / "studies").rglob("*.toml")}
    with zipfile.ZipFile(wheel) as held:
        assert (there | shipped) - set(held.namelist()) == set()


def test_the_shipped_studies_run_where_there_is_no_checkout(wheel: Path, tmp_path: Path) -> None:
    """Dry, since the tiny study trains; ``python -m benchmarks.installed`` runs the tests against the wheel."""
    installed, place = tmp_path / "installed", tmp_path / "place"
    place.mkdir()
    with zipfile.ZipFile(wheel) as held:
        held.extractall(installed)
    main = "import lora_tune.__main__ as m; print(m.__file__); m.main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", main, "sweep", "--study", "tiny", "--dry-run"],
        cwd=place, env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed)), "not the checkout"
    assert "# trial 0: LR=" in done.stdout


@pytest.mark.long
def test_the_files_of_a_release_are_what_an_index_takes(tmp_path: Path) -> None:
    source, files = copied(tmp_path), tmp_path / "dist"
    line = [sys.executable, "-m", "build", "--no-isolation", "-o", str(files), str(source)]
    subprocess.run(line, check=True, capture_output=True, timeout=300)
    assert {path.suffix for path in files.iterdir()} == {".whl", ".gz"}
    line = [sys.executable, "-m", "twine", "check", "--strict", *map(str, files.iterdir())]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
