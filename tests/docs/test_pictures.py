"""The pictures that the README shows: report and dashboard of a real sweep, made by these tests.

Made anew by: ``LORA_TUNE_SCREENSHOTS=docs/images LORA_TUNE_TINY_SWEEP=sweeps/tiny pytest tests/docs/test_pictures.py``
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from PIL import Image

from lora_tune.base.paths import SweepPaths
from lora_tune.cli import report
from lora_tune.cli.options import Review, load_sweep, recorded_study
from tests.browser import Browser
from tests.dashboards import serving
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


def test_the_dashboard_of_a_real_sweep(browser: Browser, real: Review, pictures: Path) -> None:
    best = real.sweep.best()
    assert best is not None
    with serving(real) as address:
        browser.look(width=1400, height=1000)
        browser.open(address + "/dashboard/studies/1")
        drawn = "return document.querySelectorAll('.js-plotly-plot').length"
        browser.until(lambda: browser.run(drawn) >= 3, "the figures are drawn")
        browser.screenshot(pictures / "dashboard-study.png", whole=True, height=2500)
        frames = [_frame(browser)]
        browser.run("window.scrollTo(0, 700)")
        frames.append(_frame(browser))
        browser.open(f"{address}/dashboard/studies/1/trials?numbers={best.number}")
        browser.find("main", f"Trial {best.number}")
        browser.screenshot(pictures / "dashboard-trial.png")
        frames.append(_frame(browser))
    recording = pictures / "dashboard.gif"
    _record(frames, recording)
    assert recording.stat().st_size < 600_000


def _frame(browser: Browser) -> Image.Image:
    """What the window shows now."""
    return Image.open(io.BytesIO(browser.driver.get_screenshot_as_png()))


def _record(frames: list[Image.Image], file: Path) -> None:
    """The frames as a GIF that shows each for two seconds; 900 pixels wide and 64 colours, so that it stays small."""
    size = (900, round(900 * frames[0].height / frames[0].width))
    small = [frame.convert("RGB").resize(size).quantize(64) for frame in frames]
    small[0].save(file, save_all=True, append_images=small[1:], duration=2000, loop=0, optimize=True)
