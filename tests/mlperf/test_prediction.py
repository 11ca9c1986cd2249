"""What runs of one configuration score under MLPerf's rules, and whether a submission of it would pass."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_tune.cli.report import report_html
from lora_tune.cli.sweep import summary
from lora_tune.config.study import parse_study
from lora_tune.controller.driver import Outcome
from lora_tune.mlperf.benchmark import read_benchmark
from lora_tune.mlperf.score import olympic_mean, predict, score
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import StudyRecords, Trial, TrialState, Verdict
from lora_tune.sweep import main

LORA = read_benchmark("llama2_70b_lora")
EOS_N8_MINUTES = [5.03, 5.04, 5.05, 5.06, 5.07, 5.3, 5.31, 5.32, 5.9, 4.4]
EOS_N8_SAMPLES = [3072.0, 3072, 3072, 3072, 3072, 3456, 3456, 3456, 3840, 2688]


def test_the_olympic_mean_drops_the_fastest_and_the_slowest() -> None:
    assert olympic_mean([3, 1, 2, 100]) == 2.5
    assert olympic_mean([math.inf, 1, 2, 3]) == 2.5
    with pytest.raises(ValueError, match="at least 3 runs, got 2"):
        olympic_mean([1, 2])


def test_faster_convergence_than_the_reference_is_taken_back() -> None:
    found = score(LORA, EOS_N8_MINUTES, EOS_N8_SAMPLES, 8)
    assert found.factor == 1.0
    faster = score(LORA, [5.0] * 10, [3072.0] * 10, 8)
    assert faster.factor == pytest.approx(3178.6667 / 3072)
    assert faster.minutes == pytest.approx(5.0 * 3178.6667 / 3072)
    assert faster.passes
    assert "taken back" in faster.sentence


def test_converging_much_faster_fails_and_so_does_a_batch_without_reference() -> None:
    assert not score(LORA, [4.0] * 10, [2688.0] * 10, 8).passes
    assert not score(LORA, [1.0] * 10, [12000.0] * 10, 256).passes


def test_one_run_may_fail_to_converge_and_two_may_not() -> None:
    one = score(LORA, [*[5.0] * 9, math.inf], [*[3456.0] * 9, math.inf], 8)
    two = score(LORA, [*[5.0] * 8, math.inf, math.inf], [*[3456.0] * 8, math.inf, math.inf], 8)
    assert (one.minutes, one.passes) == (5.0, True)
    assert (two.minutes, two.passes) == (math.inf, False)


def test_a_configuration_at_the_reference_is_predicted_to_pass() -> None:
    found = predict(LORA, EOS_N8_MINUTES, EOS_N8_SAMPLES, 8)
    assert found.passes > 0.9
    assert found.low < found.minutes < found.high
    assert found == predict(LORA, EOS_N8_MINUTES, EOS_N8_SAMPLES, 8)


def test_a_configuration_that_converges_too_fast_is_predicted_to_fail_with_the_reason() -> None:
    found = predict(LORA, [4.0] * 10, [2688.0] * 10, 8)
    assert found.passes < 0.1
    assert found.scaled > 0.9
    assert "only throughput and eval time pay" in found.sentence


def test_unconverged_runs_and_few_runs_lower_the_prediction() -> None:
    sure = predict(LORA, EOS_N8_MINUTES, EOS_N8_SAMPLES, 8)
    shaky = predict(LORA, EOS_N8_MINUTES, EOS_N8_SAMPLES, 8, unconverged=3)
    once = predict(LORA, [5.2], [3200.0], 8)
    assert shaky.passes < sure.passes
    assert once.high - once.low > sure.high - sure.low
    with pytest.raises(ValueError, match="at least one run"):
        predict(LORA, [], [], 8)


@pytest.mark.parametrize("unconverged", [20, 60, 500])
def test_a_configuration_that_hardly_ever_converges_is_predicted_and_not_a_crash(unconverged: int) -> None:
    found = predict(LORA, [5.0], [3072.0], 8, unconverged=unconverged)
    assert found.passes < 0.02
    assert found.sentence


def test_where_ten_runs_never_pass_the_prediction_says_why() -> None:
    found = predict(LORA, [5.0], [3072.0], 8, unconverged=500)
    assert (found.passes, found.minutes) == (0.0, math.inf)
    assert "500 of 501 runs did not converge, one of them may" in found.sentence


SIMULATED = Path(__file__).resolve().parents[2] / "studies" / "simulated_h100.toml"


def test_a_sweep_says_at_its_start_that_a_batch_size_has_no_reference(tmp_path: Path) -> None:
    study = tmp_path / "large.toml"
    study.write_text(SIMULATED.read_text().replace("gbs = [8, 16, 32]", "gbs = [8, 256]"))
    shown = CliRunner().invoke(main, ["--study", str(study), "--output", str(tmp_path / "sweep"), "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert "warning: space.GBS: GBS 256 is above 128, the largest batch size with a reference" in shown.output


@pytest.mark.parametrize(
    ("score", "objective", "says"),
    [
        ("time_to_target", 1500.0, "26:40 min RCP-normalised"),
        ("mlperf_score", 1600.0, "25:00 min before RCP normalisation"),
    ],
)
def test_both_objectives_are_shown_whichever_is_minimised(score: str, objective: float, says: str) -> None:
    text = SIMULATED.read_text().replace('score = "mlperf_score"', f'score = "{score}"')
    study = parse_study(text, SIMULATED)
    trial = Trial(
        number=0, seed=1, tuned={}, parameters={"GBS": 8}, state=TrialState.FINISHED, verdict=Verdict.REACHED,
        seconds=1500.0, samples=3072.0, metrics=TrialMetrics(objective=objective, mlperf_score=1600.0),
    )  # fmt: skip
    sweep = StudyRecords(name=study.name, digest="", study_toml=text, began_at=0.0, trials={0: trial})
    assert says in summary(study, sweep, Outcome("done"))
    assert says in report_html(study, sweep, 0.0)
