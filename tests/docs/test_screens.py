"""Every screen as people see it, into build/screenshots: terminals of 60 to 200 columns, report on desk and phone."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from lora_tune.cli import report, status
from lora_tune.cli.options import Feedback
from lora_tune.review import screen
from lora_tune.store.port import Request
from tests.browser import Browser
from tests.builders import BEGAN, study_of, sweep_of

NOW = BEGAN + 4 * 3600
ASKED = Request(
    number=0,
    kind="enqueue",
    what={"values": {"LR": 0.002, "MAX_STEPS": 900}, "clone_of": 7},
    who="ann@login1",
    asked_at=NOW - 400,
    answered_at=NOW - 399,
    accepted=True,
    answer="the next free slot runs it",
)
SAID = "trial 13 pruned      stalled: two evals in a row 0.0081 above the median curve"


def recorded(width: int, what: str) -> Console:
    """A terminal on which the live screen or the status has been drawn."""
    study = study_of()
    sweep = sweep_of(study, trials=16, running=2)
    console = Console(record=True, width=width, file=io.StringIO())
    if what == "live":
        console.print(screen.screen(study, sweep, NOW, [SAID]))
    else:
        driver = ("ann@login1 pid 12", NOW - 3)
        console.print(status.picture(study, sweep, driver, NOW, every=False, requests=[ASKED]))
    return console


@pytest.mark.parametrize("what", ["live", "status"])
@pytest.mark.parametrize("width", [60, 80, 100, 120, 160, 200])
def test_no_text_of_a_terminal_is_cut(width: int, what: str) -> None:
    text = recorded(width, what).export_text()
    assert "…" not in text
    words = re.sub(r"[│\s]+", " ", text)
    assert (
        " ".join(SAID.split()) if what == "live" else "ann@login1, 6:40 min ago: try LR=0.002 MAX_STEPS=900"
    ) in words
    assert "MAX_STEPS=1000 tp8" in words
    shown = set(re.findall(r"MAX_STEPS=(\d+)", text))
    assert shown <= {str(steps) for steps in range(400, 1300, 100)}, "no value is broken in two"


@pytest.mark.browser
@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_pictures_of_terminals(browser: Browser, pictures: Path, tmp_path: Path, width: int) -> None:
    for what in ("live", "status"):
        drawn = recorded(width, what).export_svg(title=f"{what}, {width} columns", unique_id=f"{what}{width}")
        page = tmp_path / f"{what}.html"
        page.write_text(re.sub(r"@font-face\s*\{.*?\}", "", drawn, flags=re.DOTALL), encoding="utf-8")
        browser.look(width=max(760, 10 * width))
        browser.open(page.as_uri())
        browser.screenshot(pictures / f"{what}-{width}.png", whole=True)
        assert (pictures / f"{what}-{width}.png").stat().st_size > 5000


@pytest.mark.browser
@pytest.mark.parametrize(
    ("name", "width", "dark"), [("desk", 1280, False), ("desk-dark", 1280, True), ("phone", 390, False)]
)
def test_pictures_of_the_report(
    browser: Browser, pictures: Path, tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    study = study_of()
    report.write_report(
        study, sweep_of(study, trials=40, running=2), tmp_path / "report.html", Feedback(requests=[ASKED])
    )
    browser.look(width=width, dark=dark)
    browser.open((tmp_path / "report.html").as_uri() + "#compare=3,7,9")
    browser.screenshot(pictures / f"compared-{name}.png", whole=True)
    cut = "return [...document.querySelectorAll('td, dd, p, h2')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
    assert browser.run(cut) == 0
    assert browser.run("return document.documentElement.scrollWidth") <= width
