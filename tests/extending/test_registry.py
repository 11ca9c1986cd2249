"""Kinds that other packages add: one file and one entry point each, driven by the real commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_tune.base.errors import InputError, SetupError
from lora_tune.base.registry import LAUNCHERS, SAMPLERS, Registry
from lora_tune.config.study import Study
from lora_tune.launchers import make_launcher
from lora_tune.logs.lines import make_reader
from lora_tune.search.objectives import objective_of
from lora_tune.search.samplers import make_sampler
from lora_tune.workloads import load as load_workload
from tests.conftest import REPOSITORY

LAUNCHER = '''
from lora_tune.launchers.base import LauncherKind
from lora_tune.launchers.local import LocalLauncher


class Counting(LocalLauncher):
    """Jobs on this machine; each submission leaves a line in a file."""

    def submit(self, job):
        with open("submitted.txt", "a") as file:
            file.write(job.name + "\\n")
        return super().submit(job)


KIND = LauncherKind(make=lambda study, jobs: Counting(), period=0.1, submit_grace_seconds=0.0, one_machine=True)
'''

SAMPLER = '''
import optuna


class Lowest(optuna.samplers.BaseSampler):
    """Always the lower end of every range."""

    def infer_relative_search_space(self, study, trial):
        return {}

    def sample_relative(self, study, trial, search_space):
        return {}

    def sample_independent(self, study, trial, name, distribution):
        return distribution.low


def lowest(study, old_runs):
    return Lowest()
'''

READER = '''
from lora_tune.logs.lines import LineReader


class Percent(LineReader):
    """Lines such as ``40 samples: loss 0.91``."""

    def line(self, text, now):
        samples, _, rest = text.partition(" samples: loss ")
        if not rest:
            return True
        return self.take_fields({"loss": float(rest)}, now, float(samples))
'''

STUDY = """
[objective]
target = 0.5

[workload]
kind = "command"
argv = ["{python}", "-uc", "import time; print('8 samples: loss 0.9'); time.sleep(0.8); print('16 samples: loss 0.4')"]
log = {{ kind = "percent" }}

[space]
LR = {{ type = "float", low = 0.001, high = 0.01 }}

[search]
sampler = "lowest"

[site]
launcher = "counting"

[budget]
trials = 2
attempts = 1
"""


BENCHMARK_STUDY = """
division = "closed"

[objective]
benchmark = "my_accuracy"

[workload]
kind = "command"
argv = ["{python}", "-uc", "import time; print('320 samples: loss 0.7'); time.sleep(1); print('480 samples: loss 0.9')"]
log = {{ kind = "percent" }}

[space]
GBS = 16
MAX_GRAD_NORM = {norm}
LR = {{ type = "float", low = 0.001, high = 0.01 }}

[budget]
trials = 1
attempts = 3
"""


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A package that somebody else installed: four modules and their entry points."""
    site = tmp_path / "site"
    info = site / "their_kinds-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-kinds\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lora_tune.launchers]\ncounting = their_launcher:KIND\nbroken = their_launcher:NOTHING\n"
        "[lora_tune.samplers]\nlowest = their_sampler:lowest\n"
        "[lora_tune.log_readers]\npercent = their_reader:Percent\n"
        "[lora_tune.benchmarks]\nmy_accuracy = their_benchmark:my_accuracy\n"
    )
    kinds = (("launcher", LAUNCHER), ("sampler", SAMPLER), ("reader", READER), ("benchmark", documented("my_accuracy")))
    for name, text in kinds:
        (site / f"their_{name}.py").write_text(text)
    return site


def documented(name: str) -> str:
    """The example of docs/extending.md that defines ``name``."""
    blocks = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8").split("```python\n")[1:]
    return next(code for block in blocks if f" {name}(" in (code := block.split("```")[0]))


def sweep(study: Path, outside: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The real command in the study's folder, with the other package installed."""
    path = os.pathsep.join(filter(None, [str(outside), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "lora_tune.sweep", "--study", str(study), *options],
        cwd=study.parent,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.long
def test_a_launcher_a_sampler_and_a_log_format_of_another_package_drive_a_sweep(outside: Path, tmp_path: Path) -> None:
    study = tmp_path / "theirs.toml"
    study.write_text(STUDY.format(python=sys.executable))
    swept = sweep(study, outside, "--quiet")
    assert swept.returncode == 0, swept.stderr + swept.stdout
    assert (tmp_path / "submitted.txt").read_text().split() == ["theirs-0000-0", "theirs-0001-0"]
    assert "LR=0.001" in swept.stdout


@pytest.mark.long
def test_a_benchmark_of_another_package_gives_target_direction_and_rules(outside: Path, tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text(BENCHMARK_STUDY.format(python=sys.executable, norm=1.0))
    swept = sweep(tmp_path / "good.toml", outside)
    assert swept.returncode == 0, swept.stderr + swept.stdout
    assert re.search(r"trial 0 +reached +eval accuracy 0.9000 at 480 samples", swept.stdout)
    (tmp_path / "bad.toml").write_text(BENCHMARK_STUDY.format(python=sys.executable, norm=0.5))
    refused = sweep(tmp_path / "bad.toml", outside, "--dry-run")
    assert refused.returncode == 2
    assert "in the closed division of my_accuracy opt_gradient_clip_norm must be 1.0 (its own rules" in refused.stderr
    (tmp_path / "misspelt.toml").write_text((tmp_path / "good.toml").read_text().replace("my_accuracy", "my_acuracy"))
    assert "did you mean 'my_accuracy'?" in sweep(tmp_path / "misspelt.toml", outside, "--dry-run").stderr


def test_an_unknown_name_is_answered_with_the_nearest_known_one() -> None:
    with pytest.raises(InputError, match=r"launcher 'slrum' is unknown \(did you mean 'slurm'\?\)"):
        LAUNCHERS.load("slrum")
    with pytest.raises(
        ValueError, match=r"sampler 'grey' is unknown.*known are auto, tpe, random, requests, gp, cmaes, grey"
    ):
        SAMPLERS.known("grey")


def test_an_entry_point_that_cannot_be_loaded_names_its_package(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(outside))
    with pytest.raises(InputError, match=r"launcher 'broken' of their-kinds 1\.0 cannot be loaded"):
        LAUNCHERS.load("broken")


def test_a_file_of_ones_own_serves_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("KIND = object()\n")
    registry = Registry("lora_tune.tests_only", "launcher", {})
    kind = registry.load("mine.py:KIND")
    assert registry.load("mine.py:KIND") is kind, "a file is executed once"
    with pytest.raises(InputError, match="has no 'OTHER'"):
        registry.load("mine.py:OTHER")
    with pytest.raises(InputError, match=f"there is no file 'yours.py' in {re.escape(str(tmp_path))}"):
        registry.load("yours.py:KIND")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def made(:", r"SyntaxError: invalid syntax \(mine\.py, line 1\)"),
        ("import nothing_such", "ModuleNotFoundError: No module named 'nothing_such'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(2)", "SystemExit: 2"),  # a program that runs as it is imported
    ],
)
def test_a_file_that_fails_is_told_with_its_error(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(InputError, match=rf"launcher 'mine\.py:KIND': mine\.py cannot be loaded: {reason}"):
        Registry("lora_tune.tests_only", "launcher", {}).load("mine.py:KIND")


FAILING = """
import json


class Failing:
    def __init__(self, study):
        self.target = json.loads("no number")


def failing(study, old_runs):
    return study.search.seeed
"""


@pytest.mark.parametrize(
    ("study", "words"),
    [
        (
            STUDY.replace('"lowest"', '"mine.py:failing"'),
            r"lora_tune: sampler 'mine\.py:failing' fails: \S*mine\.py, line 11, in failing: AttributeError: .*seeed",
        ),
        (
            STUDY.replace("target = 0.5", 'target = 0.5\nscore = "mine.py:Failing"'),
            r"lora_tune: objective 'mine\.py:Failing' fails: \S*mine\.py, line 7, in __init__: JSONDecodeError: E",
        ),
    ],
)
@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_a_mistake_in_ones_own_kind_is_told_by_its_line(
    study: str, words: str, options: tuple[str, ...], outside: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(FAILING)
    (tmp_path / "s.toml").write_text(study.format(python=sys.executable))
    swept = sweep(tmp_path / "s.toml", outside, *options)
    assert swept.returncode == 2, swept.stderr
    assert re.fullmatch(words + r".*; fix it and rerun the same command\n", swept.stderr), swept.stderr


FORGOTTEN = """
import optuna


def forgotten(*given, **settings):
    optuna.samplers.RandomSampler()  # and no return


three = 3
"""


def of_ones_own(name: str) -> Study:
    """A study whose sampler, launcher and objective are this one."""
    return Study.model_validate(
        {
            "name": "x",
            "objective": {"target": 0.5, "score": name},
            "site": {"launcher": name},
            "workload": {"kind": "command"},
            "search": {"sampler": name},
            "space": {},
            "budget": {"trials": 1},
        }
    )


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("sampler", lambda name: make_sampler(of_ones_own(name))),
        ("launcher", lambda name: make_launcher(of_ones_own(name), Path())),
        ("objective", lambda name: objective_of(of_ones_own(name))),
        ("log format", lambda name: make_reader(name)),
    ],
)
def test_a_kind_of_ones_own_that_makes_nothing_is_refused_by_its_line(
    kind: str, make: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optuna would take its own TPE in place of a sampler that is None, and nobody would know."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FORGOTTEN)
    line = rf"gives None, which has no \w+\(\): \S*mine\.py, line 5, in forgotten; return a {kind}"
    with pytest.raises(InputError, match=rf"{kind} 'mine\.py:forgotten' {line}"):
        make("mine.py:forgotten")
    with pytest.raises(InputError, match=rf"{kind} 'mine\.py:three' is 3; name a class or a function that makes one"):
        make("mine.py:three")


def test_a_workload_of_ones_own_that_is_no_class_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FORGOTTEN)
    study = of_ones_own("mine.py:forgotten").with_options({"workload": {"kind": "mine.py:forgotten"}})
    with pytest.raises(InputError, match=r"workload\.kind: 'mine\.py:forgotten' is <function .* extend lora_tune"):
        load_workload(study, "s.toml")


@pytest.mark.parametrize(
    ("base", "body"),
    [
        ("", "Settings = None"),
        ("(Workload)", "job = reader = export = lambda self: None"),
        ("(Workload)", "Settings = None"),
    ],
    ids=["no workload", "no settings", "no job"],
)
def test_a_workload_of_ones_own_that_lacks_something_is_refused(
    base: str, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        f"from lora_tune.workloads.base import Workload\n\nclass Mine{base}:\n    {body}\n"
    )
    study = of_ones_own("mine.py:Mine").with_options({"workload": {"kind": "mine.py:Mine"}})
    with pytest.raises(InputError, match="a pydantic model Settings, job, reader, export"):
        load_workload(study, "s.toml")


def test_a_mistake_in_an_installed_kind_is_told_by_its_line(outside: Path, tmp_path: Path) -> None:
    with (outside / "their_sampler.py").open("a") as file:
        file.write("\n\ndef lowest(study, old_runs):\n    raise PermissionError(13, 'no', 'x')\n")
    line = len((outside / "their_sampler.py").read_text().splitlines())
    (tmp_path / "s.toml").write_text(STUDY.format(python=sys.executable))
    swept = sweep(tmp_path / "s.toml", outside)
    assert swept.returncode == 2, swept.stderr
    assert f"sampler 'lowest' fails: {outside}/their_sampler.py, line {line}, in lowest: Permission" in swept.stderr
    assert "Traceback" not in swept.stderr


def test_a_mistake_of_ours_is_not_laid_on_a_kind_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("KIND = object()\n")
    registry = Registry("lora_tune.tests_only", "launcher", {})
    registry.load("mine.py:KIND")
    with pytest.raises(ZeroDivisionError) as raised:
        1 / 0  # noqa: B018
    assert registry.fault(raised.value) == ""


def test_a_sampler_that_needs_torch_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    study = Study.model_validate(
        {
            "name": "x",
            "workload": {"kind": "command"},
            "search": {"sampler": "gp"},
            "space": {},
            "budget": {"trials": 1},
        }
    )
    with pytest.raises(SetupError, match=r'needs torch.*pip install "lora-tune\[gp\]"'):
        make_sampler(study)
