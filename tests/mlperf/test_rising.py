"""Benchmarks whose metric rises: read as what it lacks of 1, so that everything that follows a loss follows it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.errors import StudyError
from lora_tune.config.study import parse_study
from lora_tune.logs.mllog import MllogReader
from lora_tune.mlperf.benchmark import benchmark_names, find_benchmark
from lora_tune.mlperf.rulesets import order, rulesets_with
from lora_tune.review.summary import objective_text
from lora_tune.store import Store, sqlite_url
from lora_tune.store.records import Verdict
from lora_tune.sweep import main
from tests.conftest import REPOSITORY
from tests.mlperf.logs import line

STUDY = """
name = "graph"
[workload]
kind = "command"
argv = [{python}, {trial}]
[site]
kill_seconds = 3
[space]
LR = {{ type = "categorical", choices = [0.02, 0.2, 0.5] }}
GBS = 100
[objective]
benchmark = {benchmark}
[search]
enqueue = [{{ LR = 0.2 }}, {{ LR = 0.5 }}, {{ LR = 0.02 }}]
[budget]
trials = 3
"""


def study_text(benchmark: str = "rgat", trial: Path = REPOSITORY / "tests" / "mlperf" / "rising_trial.py") -> str:
    words = {"python": sys.executable, "trial": str(trial), "benchmark": benchmark}
    return STUDY.format(**{name: json.dumps(word) for name, word in words.items()})


@pytest.mark.parametrize("name", [n for n in benchmark_names() if order(rulesets_with(n)[-1]) >= (5, 0)])
def test_every_benchmark_brings_its_target_and_direction(name: str) -> None:
    metric = find_benchmark(name).metrics[0]
    study = parse_study(study_text(name), Path("graph.toml"))
    assert study.rising == (metric.direction == "maximize")
    kept = 1 - study.objective.target if study.rising else study.objective.target
    assert study.target == kept
    assert metric.reached(study.objective.target)


def test_a_target_of_ones_own_stands() -> None:
    text = study_text().replace("[objective]\n", "[objective]\ntarget = 0.6\n")
    assert parse_study(text, Path("graph.toml")).target == pytest.approx(0.4)
    percent = parse_study(text.replace("0.6", "72"), Path("graph.toml"))
    assert (percent.target, percent.shown(-72.5)) == (-72.0, 72.5), "no share: counted down from 0"
    with pytest.raises(StudyError, match="no installed ruleset has a benchmark 'rgatt'"):
        parse_study(study_text("rgatt"), Path("graph.toml"))


@given(st.floats(0.001, 0.999), st.floats(0.5, 0.999))
def test_a_share_meets_its_target_where_what_it_lacks_does(share: float, target: float) -> None:
    """Exactly so: for targets of a half and more no digit is lost."""
    reader = MllogReader()
    reader.read_shortfall(1.0)
    log = [line(0, "global_batch_size", 100), line(1, "run_start"), line(2, "eval_accuracy", share, samples_count=100)]
    reader.feed(("\n".join(log) + "\n").encode())
    assert (reader.run().reached(1 - target) is not None) == (share >= target or 1 - share == 1 - target)


def test_a_sweep_of_a_rising_metric_finds_the_fastest_and_says_what_it_measures(tmp_path: Path) -> None:
    file = tmp_path / "graph.toml"
    file.write_text(study_text())
    done = CliRunner().invoke(main, ["--study", str(file), "--output", str(tmp_path / "sweep"), "--quiet"])
    assert done.exit_code == 0, done.output
    store = Store(sqlite_url(tmp_path / "sweep" / "sweep.db"))
    sweep = store.load("graph")
    store.close()
    assert sweep is not None
    by_rate = {trial.parameters["LR"]: trial for trial in sweep.trials.values()}
    assert [by_rate[rate].verdict for rate in (0.2, 0.5)] == [Verdict.REACHED, Verdict.REACHED]
    assert by_rate[0.02].verdict is not Verdict.REACHED
    best = sweep.best()
    assert best is not None
    assert best.parameters["LR"] == 0.5
    assert best.metrics.mlperf_score >= best.objective
    assert objective_text(parse_study(study_text(), file)) == "time to eval accuracy 0.72"
