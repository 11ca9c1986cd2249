"""What the live view says of a trial that runs: no time beyond its end, and nothing cut."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from lora_tune.config.study import parse_study
from lora_tune.controller.monitor import verdict_line
from lora_tune.logs.run import Eval
from lora_tune.review import screen
from lora_tune.review.screen import FittedTable
from lora_tune.store.records import Attempt, StudyRecords, Trial
from tests.builders import STUDY


def sweep_with(steps: int, **more: float) -> StudyRecords:
    parameters = {"LR": 0.001, "MAX_STEPS": steps, "GBS": 8, **more}
    trial = Trial(number=0, seed=1, tuned={"LR": 0.001, "MAX_STEPS": steps, **more}, parameters=parameters)
    attempt = Attempt(trial=0, number=0, job_name="", folder="", started_at=0.0, state="running")
    evals = tuple(Eval(400.0 * i, 1.5 - 0.1 * i, 40.0 * i) for i in range(1, 5))
    return StudyRecords(
        name="x", digest="d", study_toml="", began_at=0.0, trials={0: trial}, attempts={(0, 0): attempt},
        evals={(0, 0): evals},
    )  # fmt: skip


def drawn(sweep: StudyRecords, width: int, lines: list[str]) -> str:
    out = io.StringIO()
    study = parse_study(STUDY, Path("x.toml"))
    Console(file=out, width=width).print(screen.screen(study, sweep, 200.0, lines))
    return out.getvalue()


def test_there_is_no_eta_beyond_the_trials_own_end() -> None:
    assert screen.LATE in drawn(sweep_with(steps=205), 160, [])
    assert screen.LATE not in drawn(sweep_with(steps=4000), 160, [])


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_reasons_and_parameters_are_never_cut(width: int) -> None:
    reason = "trial 0  again       " + " ".join(f"word{i}" for i in range(40))
    sweep = sweep_with(4000, **{f"KNOB_{i}": 0.125 for i in range(9)})
    shown = "".join(drawn(sweep, width, [reason]).replace("│", "").split())
    assert "".join(reason.split()) in shown
    assert "…" not in shown


@pytest.mark.parametrize("width", [30, 40, 60])
def test_a_metric_with_a_long_name_gives_way_instead_of_being_cut(width: int) -> None:
    rows = [
        {"trial": "7", "state": "running", "time": "3.0 s", "validation/perplexity_on_held_out": "1.25", "best": "-"}
    ]
    out = Console(file=io.StringIO(), width=width, record=True)
    out.print(FittedTable(rows))
    text = out.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "running" in text
    assert "…" not in text
    assert ("perplexity_on_held_out" in text) == (width == 60)


def test_what_does_not_fit_beside_a_verdict_goes_on_below_its_reason() -> None:
    line = verdict_line(
        Trial(number=3, seed=0, tuned={}, parameters={}),
        "failed",
        "configuration: " + " ".join(f"word{i}" for i in range(12)),
    )
    rows = [row for row in drawn(sweep_with(4000), 70, [line]).splitlines() if "word" in row]
    assert rows[0].strip("│ ").startswith("trial 3  failed      configuration: word0")
    assert len(rows) > 1
    assert {row.index("word") for row in rows[1:]} == {rows[0].index("configuration")}
