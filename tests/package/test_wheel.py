"""A user without a checkout has everything: the wheel holds every file that the package reads."""

from __future__ import annotations

import zipfile
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.package.wheel import build_wheel


def test_the_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    package = REPOSITORY / "lora_tune"
    there = {
        str(path.relative_to(REPOSITORY))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(build_wheel(tmp_path)) as wheel:
        assert there - set(wheel.namelist()) == set()
