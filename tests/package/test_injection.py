"""One corpus of hostile texts and numbers through every field that a user, a log or a cluster controls.

Each attack goes into all fields of a sweep at once, and the sweep through all that is made of it: nothing may run,
draw, link, break a line where lines count, or leave its folder.
"""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lora_tune.base.errors import StudyError
from lora_tune.base.paths import SweepPaths
from lora_tune.cli import report, status
from lora_tune.config.study import Study, parse_study
from lora_tune.config.tables import Site
from lora_tune.controller.driver import Dependencies, Driver
from lora_tune.controller.sweep_records import EventFile
from lora_tune.launchers.slurm.submission import preview, submission_command
from lora_tune.review import screen
from lora_tune.review.screen import Quiet
from lora_tune.search.session import Session
from lora_tune.store import Store, sqlite_url
from lora_tune.store.metrics import as_mapping
from lora_tune.store.records import StudyRecords, TrialState
from lora_tune.workloads import load as load_workload
from lora_tune.workloads.base import Job, Resources
from lora_tune.workloads.config_file import render
from lora_tune.workloads.implementation import sourced
from tests.builders import BEGAN, STUDY, sweep_of
from tests.fakes import FakeClock, FakeCluster, command_study, record, write_study

NOW = BEGAN + 30 * 3600

ATTACKS = {
    "substitution": "$(touch owned) `touch owned` ${HOME} $((1/0))",
    "quotes": "'\"; touch owned; '\" && touch owned || touch owned | touch owned & #",
    "lines": "a\ntouch owned\n#SBATCH --wrap=touch owned\r\ntouch owned\v\f\u2028\u0085touch owned",
    "options": "--wrap=touch owned -J x --uid=root",
    "terminal": "\x1b[31m\x1b]0;owned\x07\x1b]8;;http://x\x07\x9b2J\x08\x7f\u202e\u2066",
    "html": "<script>owned()</script><img src=x onerror=owned()><a href='javascript:owned()'>&lt;\"'></style></title>",
    "markdown": "[x](javascript:owned()) ![x](http://x/y) <b>|`|\n# owned\n| a | b |",
    "template": "{{ 7*7 }}{% raw %}{0.__class__}%s%n%(x)s\\N{BULLET}\\1",
    "formula": '=HYPERLINK("http://x")\t+1-1@SUM(A1)',
    "traversal": "../../../../etc/passwd\\..\\..\\x",
    "long": "A" * 20_000,
    "unicode": "é\U0001f600\ufeff\u200b漢\ufffd",
}
"""A text that would run, draw, break or link wherever it is not treated as a text. None has a NUL: TOML allows none."""


def toml_text(text: str) -> str:
    """A TOML string of any text."""
    return '"' + "".join(c if c.isalnum() or c == " " else f"\\U{ord(c):08x}" for c in text) + '"'


def attacked(text: str) -> tuple[Study, StudyRecords]:
    """A study and a sweep with ``text`` in every field that somebody else can write."""
    choice = f'OPTIMIZER = {{ type = "categorical", choices = ["adamw", {toml_text(text)}] }}'
    toml = STUDY.replace("[objective]", f"{choice}\nFIXED = {toml_text(text)}\n[objective]")
    toml = toml.replace('"a study for tests"', toml_text(text))
    toml = toml.replace("[site]", f"[site]\nenvironment = {{ VALUE = {toml_text(text)} }}")
    study = parse_study(toml, Path("attacked.toml"))
    sweep = sweep_of(study, trials=10, text=toml, running=1)
    trials = {n: replace(t, sentence=text, why=text) for n, t in sweep.trials.items()}
    attempts = {
        key: replace(a, nodes=(text,), job_id=text, job_name=text, failure="flaky", line=text, remedy=text)
        for key, a in sweep.attempts.items()
    }
    return study, replace(sweep, trials=trials, attempts=attempts)


@pytest.fixture(params=sorted(ATTACKS))
def text(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    yield ATTACKS[request.param]
    assert not (tmp_path / "owned").exists(), "it ran"


def no_controls(shown: str, keep: str = "\n") -> bool:
    return all(c.isprintable() or c in keep for c in shown)


class _Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_report_has_the_elements_of_a_harmless_one(text: str) -> None:
    study, sweep = attacked(text)
    tags = _Tags(report.report_html(study, sweep, NOW)).found
    names = [tag for tag, _ in tags]
    harmless, quiet = attacked("harmless")
    expected = {tag for tag, _ in _Tags(report.report_html(harmless, quiet, NOW)).found}
    assert set(names) <= expected
    assert names.count("script") == 1
    assert not [a for _, a in tags if any(name.startswith("on") for name in a)]
    assert not [a for _, a in tags if str(a.get("href", "")).lower().startswith(("javascript", "data", "http"))]


def test_terminals_are_told_no_control_character(text: str) -> None:
    study, sweep = attacked(text)
    for drawn in (
        status.picture(study, sweep, (text, NOW - 1), NOW, every=True),
        status.picture(study, sweep, ("", 0.0), NOW, every=False),
        screen.screen(study, sweep, NOW, [text]),
    ):
        console = Console(width=150, height=100, record=True, force_terminal=True, file=io.StringIO())
        console.print(drawn)
        assert no_controls(console.export_text(styles=False))
    out = io.StringIO()
    screen.Plain(out).line(text)
    assert out.getvalue().count("\n") == 1
    assert no_controls(out.getvalue())


def test_json_is_json_of_one_line(text: str, tmp_path: Path) -> None:
    study, sweep = attacked(text)
    told = json.dumps(status.as_json(study, sweep, (text, NOW - 1), NOW), allow_nan=False)
    assert len(told.splitlines()) == 1
    out = io.StringIO()
    screen.JsonLines(out).line(text)
    assert json.loads(out.getvalue())["text"] == text
    EventFile(tmp_path / "driver.log").write(NOW, "note", text=text)
    (line,) = (tmp_path / "driver.log").read_text(encoding="utf-8").split("\n")[:-1]
    assert "\x1b" not in json.loads(line)["text"]


def test_bash_reads_back_the_value_and_runs_nothing(text: str) -> None:
    shown = render({"VALUE": text, "LR": 4e-4}, comments=(text, f"config of {text}"))
    assert sourced(shown)["VALUE"] == text


def test_the_submission_has_one_word_a_value(text: str, tmp_path: Path) -> None:
    job = Job(
        name="attacked-0001-0", folder=tmp_path / "attempt-0", argv=("bash", "train.sh", text),
        environment={"VALUE": text}, log=tmp_path / "attempt-0" / "job.log", resources=Resources(nodes=1, minutes=5),
        script=True,
    )  # fmt: skip
    command = submission_command(job, Site(launcher="slurm"), "token")
    assert command.count(text) == 1, "as the script's argument"
    assert command.count(f"VALUE={text}") == 1
    assert [word for word in command if "owned" in word and word not in (text, f"VALUE={text}")] == []
    assert command[command.index("sbatch") - 1 :].count("sbatch") == 1
    assert preview(job, Site(launcher="slurm"))
    printed = subprocess.run(
        ["env", "-i", f"PATH={os.environ['PATH']}", f"VALUE={text}", "bash", "-c", 'printf %s "$VALUE"'],
        capture_output=True, check=True,
    )  # fmt: skip
    assert printed.stdout.decode() == text


SITE_FIELDS = ("partition", "account", "reservation", "qos", "nodelist", "exclude", "gres", "container", "python")


@pytest.mark.parametrize("field", SITE_FIELDS)
@pytest.mark.parametrize("value", ["gpu\ntouch owned", "gpu\n#SBATCH --uid=0", "gpu\r", "gpu\x1b[31m", "a\x7fb"])
def test_a_site_with_line_ends_is_no_site(field: str, value: str) -> None:
    """These become lines of a batch file, where a line end begins a command."""
    toml = STUDY.replace("[site]", f"[site]\n{field} = {toml_text(value)}")
    with pytest.raises(StudyError, match=field):
        parse_study(toml, Path("site.toml"))


@pytest.mark.parametrize("name", ["../x", "a/b", "a b", "", "-x", "a\nb", "$(x)", "<b>", "a;b", "x" * 65, ".x"])
def test_a_study_cannot_be_called_anything(name: str) -> None:
    """Its name becomes a folder, the prefix of job names, and a part of commands."""
    with pytest.raises(StudyError, match="name"):
        parse_study(f"name = {json.dumps(name)}\n{STUDY}", Path("name.toml"))


@pytest.mark.parametrize(
    "formula", ["__import__('os').system('touch owned')", "(1).__class__", "[x for x in (1,)]", "9**9**9", "open('x')"]
)
def test_a_formula_is_arithmetic(formula: str) -> None:
    toml = STUDY.replace("[objective]", f'X = {{ type = "derived", formula = {json.dumps(formula)} }}\n[objective]')
    with pytest.raises(StudyError):
        parse_study(toml, Path("formula.toml"))


# -- what logs can say -------------------------------------------------------------------------------------------------

NUMBERS: Mapping[str, str] = {
    "nan": "NaN", "infinity": "Infinity", "minus": "-Infinity", "huge": "1e308", "beyond": "1e999", "digits": "9" * 400,
    "tiny": "1e-320", "negative": "-1", "text": '"$(touch owned)"', "list": "[[[]]]", "null": "null",
    "surrogate": '"\\ud800"', "nul": '"\\u0000"', "64 bit": str(2**63), "32 bit": str(2**31),
}  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS.values(), ids=list(NUMBERS))
def test_a_log_can_say_what_it_likes(number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the real driver and both records of the sweep: it ends, is kept, and can be shown."""
    monkeypatch.chdir(tmp_path)

    def script(_: Mapping[str, str], start: float) -> Iterator[tuple[float, str]]:
        yield 1.0, record(start + 1, "run_start", None)
        yield 2.0, record(start + 2, "eval_accuracy", 2.5, samples_count=100)
        for key, value, samples, at in (
            ("eval_accuracy", number, "200", "1700000003000"), ("eval_accuracy", "2.4", number, "1700000004000"),
            ("eval_accuracy", "2.3", "300", number), ("train_loss", number, number, number),
            ("seed", number, "1", "1700000005000"), ("run_stop", number, number, "1700000006000"),
            (ATTACKS["html"].replace('"', ""), number, number, "1700000007000"),
        ):  # fmt: skip
            meta = f'{{"file": "x", "lineno": 1, "samples_count": {samples}, "status": {number}}}'
            yield (
                3.0,
                (
                    f':::MLLOG {{"namespace": "", "time_ms": {at}, "event_type": "POINT_IN_TIME", "key": "{key}", '
                    f'"value": {value}, "metadata": {meta}}}'
                ),
            )
        yield 4.0, ATTACKS["terminal"] + ATTACKS["html"] + ATTACKS["substitution"]
        yield 5.0, "torch.OutOfMemoryError: CUDA out of memory " + "".join(ATTACKS[k] for k in ("html", "terminal"))

    cluster = FakeCluster(FakeClock(), script)
    text = command_study(trials=2, parallel=2, attempts=2)
    file = write_study(tmp_path, text)
    study = parse_study(text, file)
    paths = SweepPaths(tmp_path / "sweep")
    paths.root.mkdir()
    store = Store(sqlite_url(paths.database))
    store.begin(study.name, study.digest, text, cluster.clock.now())
    ports: dict[str, Any] = {
        "workload": load_workload(study, file), "launcher": cluster, "store": store, "clock": cluster.clock,
        "session": Session(study), "view": Quiet(),
    }  # fmt: skip
    lease = store.take_lease(study.name, "test", cluster.clock.now())
    Driver(study, paths, Dependencies(**ports), lease, period=1.0).run()
    sweep = store.load(study.name)
    assert sweep is not None
    assert all(t.state is TrialState.FINISHED for t in sweep.trials.values())
    assert all(
        math.isfinite(v) for t in sweep.trials.values() for v in as_mapping(t.metrics).values() if isinstance(v, float)
    )
    json.dumps(status.as_json(study, sweep, ("", 0.0), cluster.clock.now()), allow_nan=False)
    page = report.report_html(study, sweep, cluster.clock.now())
    assert [tag for tag, _ in _Tags(page).found].count("script") == 1
    assert no_controls("".join(a.line for a in sweep.attempts.values()))
    assert not (tmp_path / "owned").exists()
    steps = [s for t in Session(study, sweep)._study.trials for s in t.intermediate_values]
    assert all(0 <= s < 2**31 for s in steps), "PostgreSQL's integers"


def test_everything_is_made_with_the_users_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        cluster = FakeCluster(FakeClock())
        text = command_study(trials=1, parallel=1)
        file = write_study(tmp_path, text)
        study = parse_study(text, file)
        paths = SweepPaths(tmp_path / "sweep")
        paths.root.mkdir()
        store = Store(sqlite_url(paths.database))
        store.begin(study.name, study.digest, text, cluster.clock.now())
        lease = store.take_lease(study.name, "test", cluster.clock.now())
        ports: dict[str, Any] = {
            "workload": load_workload(study, file), "launcher": cluster, "store": store, "clock": cluster.clock,
            "session": Session(study), "view": Quiet(),
        }  # fmt: skip
        driver = Driver(study, paths, Dependencies(**ports), lease, period=1.0)
        driver.run()
        report.write_report(study, driver.sweep, paths.report)
    finally:
        os.umask(before)
    found = list(paths.root.rglob("*"))
    assert {"sweep.db", "driver.log", "report.html"} <= {f.name for f in found}
    assert [f for f in found if f.stat().st_mode & 0o077] == []
