"""The pictures that the pages show: the report of a real sweep, made by these tests.

Made anew by: ``LORA_TUNE_SCREENSHOTS=docs/images LORA_TUNE_TINY_SWEEP=sweeps/tiny pytest tests/docs/test_pictures.py``
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lora_tune.base.paths import SweepPaths
from lora_tune.cli import report
from lora_tune.cli.options import Review, load_sweep, recorded_study
from tests.browser import Browser
from tests.tiny import STUDY

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def real(tiny_sweep: Path) -> Review:
    paths = SweepPaths(tiny_sweep)
    sweep = load_sweep("tiny", paths, None)
    return Review(recorded_study(sweep, STUDY), sweep, paths, STUDY)


@pytest.mark.parametrize(
    ("name", "width", "height", "dark"),
    [("report", 1280, 1500, False), ("report-dark", 1280, 1500, True), ("report-phone", 390, 1700, False)],
)
def test_the_report_of_a_real_sweep(
    browser: Browser,
    real: Review,
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    width: int,
    height: int,
    dark: bool,
) -> None:
    file = tmp_path / "report.html"
    monkeypatch.setattr(sys, "executable", "/opt/lora_tune/bin/python")
    report.write_report(real.study, real.sweep, file, folder=Path("/scratch/sweeps/tiny"))
    browser.look(width=width, dark=dark)
    browser.open(file.as_uri())
    assert len(browser.run("return [...document.querySelectorAll('svg.chart')]")) >= 6
    browser.screenshot(pictures / f"{name}.png", whole=True, height=height)
    assert browser.complaints() == []
