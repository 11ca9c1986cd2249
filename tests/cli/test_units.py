"""A study's log counts samples, steps or epochs, and every command says which; one of a thing is never "1 trials"."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_tune.__main__ import main
from lora_tune.base.text import counted
from lora_tune.review.figures import charts
from tests.builders import ACTIVE_ENVIRONMENT, BEGAN, STUDY, stored, study_of, sweep_of

ONE_OF_MANY = re.compile(r"\b1 (?:trials|runs|evals|samples|steps|epochs|attempts|jobs|lines|logs|seeds)\b")
"""What nobody says."""

SAMPLES = re.compile(r"\bsamples?\b", re.IGNORECASE)


def counting(unit: str) -> str:
    """A study whose log counts this; all the rest is that of the built sweeps."""
    log = {"samples": '{ kind = "mllog" }'}.get(unit, f'{{ kind = "jsonl", {unit[:-1]} = "at" }}')
    return STUDY.replace('argv = ["bash", "train.sh"]', f'argv = ["bash", "train.sh"]\nlog = {log}')


def told(folder: Path, trials: int, unit: str) -> dict[str, str]:
    """What each command that reads a sweep prints of one in ``folder``; the report as its page shows it."""
    text = counting(unit)
    study = study_of(text)
    sweep = sweep_of(study, trials=trials, text=text)
    stored(folder / "built", sweep, study)
    where = ["--study", "built", "--output", str(folder / "built")]
    (folder / "job.log").write_text('{"at": 1, "eval_loss": 0.95}\n{"at": 2, "eval_loss": 0.94}\n')
    commands = {
        "status": ["status", *where],
        "every trial": ["status", *where, "--all"],
        "explain": ["explain", *where],
        "trial": ["explain", *where, "--trial", "0"],
        "report": ["report", *where, "--to", str(folder / "report.html")],
    }
    printed = {}
    for name, words in commands.items():
        done = CliRunner(env=ACTIVE_ENVIRONMENT).invoke(main, words, prog_name="lora-tune")
        assert done.exit_code in (0, 4), f"{words}: {done.output}"
        printed[name] = done.output
    printed["report"] = visible_text((folder / "report.html").read_text(encoding="utf-8"))
    for name, chart in charts(study, sweep, BEGAN).items():
        said = [chart.title, chart.x.label, chart.y.label, chart.note or ""]
        said += [text for mark in chart.marks for text in getattr(mark, "texts", ())]
        printed[f"figure {name}"] = "\n".join(said)
    return printed


def visible_text(page: str) -> str:
    """A page's text, without the study file that it shows."""
    page = re.sub(r"<(script|style|pre)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", " ", page))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("unit", ["steps", "epochs"])
def test_no_command_speaks_of_samples_where_the_log_counts_something_else(here: Path, unit: str) -> None:
    for name, text in told(here, 24, unit).items():
        wrong = [line for line in text.splitlines() if SAMPLES.search(line) and "batch size" not in line]
        assert wrong == [], name


def test_one_trial_is_one_trial(here: Path) -> None:
    for name, text in told(here, 1, "steps").items():
        wrong = [line for line in text.splitlines() if ONE_OF_MANY.search(line)]
        assert wrong == [], name


def test_what_a_program_reads_names_the_unit(here: Path) -> None:
    told(here, 3, "epochs")
    done = CliRunner().invoke(main, ["status", "--study", "built", "--output", str(here / "built"), "--json"])
    assert json.loads(done.output)["progress_unit"] == "epochs"


@pytest.mark.parametrize(("count", "said"), [
    (1, "1 step"), (2, "2 steps"), (0.5, "0.5 steps"), (0, "0 steps"), (1_234_567, "1234567 steps"),
    (1 / 3, "0.333333 steps"),
])  # fmt: skip
def test_a_count_for_people(count: float, said: str) -> None:
    assert counted(count, "steps") == said
