"""MLPerf's rules: what the closed division allows, what a result scores, whether it passes."""

from __future__ import annotations

import gzip
import logging
import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from lora_tune import mlperf
from lora_tune.base.errors import InputError
from lora_tune.commands.report import report_html
from lora_tune.commands.sweep import main, summary
from lora_tune.config.study import parse_study
from lora_tune.controller.driver import Outcome
from lora_tune.store.records import Sweep, Trial, TrialState, Verdict

EOS_N8_MINUTES = [5.03, 5.04, 5.05, 5.06, 5.07, 5.3, 5.31, 5.32, 5.9, 4.4]
EOS_N8_SAMPLES = [3072.0, 3072, 3072, 3072, 3072, 3456, 3456, 3456, 3840, 2688]


@pytest.mark.parametrize(
    ("gbs", "skip", "first", "interval"),
    [(8, 3, 1536, 384), (9, 3, 1548, 387), (16, 4, 1920, 384), (64, 10, 4224, 384), (128, 18, 7296, 384)],
)
def test_the_eval_schedule_follows_from_the_batch_size(gbs: int, skip: int, first: int, interval: int) -> None:
    assert mlperf.skipped_evals(gbs) == skip
    assert (mlperf.eval_schedule(gbs).first_samples, mlperf.eval_schedule(gbs).interval_samples) == (first, interval)


@given(st.integers(1, 4096))
def test_every_eval_falls_on_a_whole_step(gbs: int) -> None:
    schedule = mlperf.eval_schedule(gbs)
    assert schedule.interval_samples % gbs == 0
    assert 384 <= schedule.interval_samples < 384 + gbs
    assert schedule.first_samples % schedule.interval_samples == 0


def test_a_batch_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        mlperf.eval_schedule(0)


def test_learning_rate_batch_steps_and_warmup_may_be_tuned() -> None:
    tuned = ["LR", "MAX_STEPS", "MINIBS", "WARMUP_RATIO", "WARMUP_STEPS", "TP", "layout"]
    assert mlperf.check_closed(tuned=tuned, batch_sizes=[8, 16]) == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("VAL_CHECK_INTERVAL", "follows from GBS: evaluate every CEIL(384 / GBS) steps"),
        ("SKIP_EVALS", "skipping the first FLOOR(0.125 * GBS + 2)"),
        ("LORA_DIM", "LoRA rank is 16, fixed to the reference"),
        ("lora_rank", "LoRA rank is 16"),
        ("LORA_ALPHA", "LoRA alpha is 32"),
        ("LORA_DROPOUT", "LoRA dropout is 0.1"),
        ("GRADIENT_CLIP_VAL", "gradient clip is 0.3"),
        ("WEIGHT_DECAY", "weight decay is 0.0001"),
        ("MAX_SEQLEN", "sequence length is 8192"),
    ],
)
def test_what_is_fixed_may_not_be_tuned_and_the_rule_is_quoted(name: str, says: str) -> None:
    (found,) = mlperf.check_closed(tuned=["LR", name])
    assert found.fatal
    assert found.name == name
    assert says in found.sentence


def test_reference_values_may_be_written_down_and_others_may_not() -> None:
    assert mlperf.check_closed(tuned=[], values={"LORA_DROPOUT": 0.1, "WEIGHT_DECAY": "1e-4"}) == []
    (found,) = mlperf.check_closed(tuned=[], values={"LORA_DROPOUT": 0.05})
    assert "LORA_DROPOUT = 0.05, but LoRA dropout is 0.1" in found.sentence


def test_a_stale_skip_evals_is_refused_for_the_batch_size_it_breaks() -> None:
    assert mlperf.check_closed(tuned=[], values={"SKIP_EVALS": 3}, batch_sizes=[8]) == []
    (found,) = mlperf.check_closed(tuned=[], values={"SKIP_EVALS": 3}, batch_sizes=[8, 64])
    assert "must be 10 at GBS 64" in found.sentence


def test_the_references_eval_interval_is_accepted_at_every_batch_size() -> None:
    assert mlperf.check_closed(tuned=[], values={"VAL_CHECK_INTERVAL": 384}, batch_sizes=[8, 9]) == []
    (found,) = mlperf.check_closed(tuned=[], values={"VAL_CHECK_INTERVAL": 192}, batch_sizes=[8])
    assert "must be 384 samples at GBS 8" in found.sentence


def test_a_batch_size_above_the_largest_reference_is_a_warning() -> None:
    (found,) = mlperf.check_closed(tuned=["MINIBS"], batch_sizes=[128, 256])
    assert not found.fatal
    assert "GBS 256 is above 128" in found.sentence


def test_reference_convergence_is_found_interpolated_or_absent() -> None:
    assert mlperf.reference(8).mean == pytest.approx(3178.67, abs=0.01)
    assert mlperf.reference(64).mean == pytest.approx(7131.43, abs=0.01)
    assert "interpolated" in mlperf.reference(64).words
    assert mlperf.reference(4).mean == mlperf.reference(8).mean
    assert mlperf.reference(129) is None
    assert mlperf.reference(8).fastest < mlperf.reference(8).mean


def test_the_olympic_mean_drops_the_fastest_and_the_slowest() -> None:
    assert mlperf.olympic_mean([3, 1, 2, 100]) == 2.5
    assert mlperf.olympic_mean([math.inf, 1, 2, 3]) == 2.5
    with pytest.raises(ValueError, match="at least 3 runs, 2 came"):
        mlperf.olympic_mean([1, 2])


@given(st.lists(st.floats(0.1, 1e6), min_size=3))
def test_the_olympic_mean_lies_between_its_inner_values(values: list[float]) -> None:
    kept = sorted(values)[1:-1]
    assert kept[0] * (1 - 1e-9) <= mlperf.olympic_mean(values) <= kept[-1] * (1 + 1e-9)


def test_faster_convergence_than_the_reference_is_taken_back() -> None:
    found = mlperf.score(EOS_N8_MINUTES, EOS_N8_SAMPLES, 8)
    assert found.factor == 1.0
    faster = mlperf.score([5.0] * 10, [3072.0] * 10, 8)
    assert faster.factor == pytest.approx(3178.6667 / 3072)
    assert faster.minutes == pytest.approx(5.0 * 3178.6667 / 3072)
    assert faster.passes
    assert "taken back" in faster.sentence


def test_converging_much_faster_fails_and_so_does_a_batch_without_reference() -> None:
    assert not mlperf.score([4.0] * 10, [2688.0] * 10, 8).passes
    assert not mlperf.score([1.0] * 10, [12000.0] * 10, 256).passes


def test_one_run_may_fail_to_converge_and_two_may_not() -> None:
    one = mlperf.score([*[5.0] * 9, math.inf], [*[3456.0] * 9, math.inf], 8)
    two = mlperf.score([*[5.0] * 8, math.inf, math.inf], [*[3456.0] * 8, math.inf, math.inf], 8)
    assert (one.minutes, one.passes) == (5.0, True)
    assert (two.minutes, two.passes) == (math.inf, False)


def test_a_configuration_at_the_reference_is_predicted_to_pass() -> None:
    found = mlperf.predict(EOS_N8_MINUTES, EOS_N8_SAMPLES, 8)
    assert found.passes > 0.9
    assert found.low < found.minutes < found.high
    assert found == mlperf.predict(EOS_N8_MINUTES, EOS_N8_SAMPLES, 8)


def test_a_configuration_that_converges_too_fast_is_predicted_to_fail_with_the_reason() -> None:
    found = mlperf.predict([4.0] * 10, [2688.0] * 10, 8)
    assert found.passes < 0.1
    assert found.scaled > 0.9
    assert "only throughput and eval time pay" in found.sentence


def test_unconverged_runs_and_few_runs_lower_the_prediction() -> None:
    sure = mlperf.predict(EOS_N8_MINUTES, EOS_N8_SAMPLES, 8)
    shaky = mlperf.predict(EOS_N8_MINUTES, EOS_N8_SAMPLES, 8, unconverged=3)
    once = mlperf.predict([5.2], [3200.0], 8)
    assert shaky.passes < sure.passes
    assert once.high - once.low > sure.high - sure.low
    with pytest.raises(ValueError, match="at least one run"):
        mlperf.predict([], [], 8)


@pytest.mark.parametrize("unconverged", [20, 60, 500])
def test_a_configuration_that_hardly_ever_converges_is_predicted_and_not_a_crash(unconverged: int) -> None:
    found = mlperf.predict([5.0], [3072.0], 8, unconverged=unconverged)
    assert found.passes < 0.02
    assert found.sentence


def test_where_ten_runs_never_pass_the_prediction_says_why() -> None:
    found = mlperf.predict([5.0], [3072.0], 8, unconverged=500)
    assert (found.passes, found.minutes) == (0.0, math.inf)
    assert "500 of 501 runs did not converge, one of ten is allowed" in found.sentence


def submission(public_data: Path, tmp_path: Path, name: str) -> Path:
    for path in (public_data / "logs" / name).glob("result_*.txt.gz"):
        (tmp_path / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    return tmp_path


@pytest.mark.public_data
def test_the_official_checkers_pass_a_published_submission(public_data: Path, tmp_path: Path) -> None:
    folder = submission(public_data, tmp_path, "v5.0/NVIDIA/nyx_n1_ngc25.04_nemo")
    handlers = logging.getLogger().handlers[:]
    found = mlperf.run_compliance(folder, "5.0.0")
    assert found.passes
    assert found.sentence == "10 result files, all comply; RCP check passed: RCP found, score factor 1.0034"
    assert sorted(p.name for p in folder.iterdir()) == [f"result_{i}.txt" for i in range(10)]
    assert logging.getLogger().handlers == handlers


@pytest.mark.public_data
def test_the_checkers_words_name_the_file_that_does_not_comply(public_data: Path, tmp_path: Path) -> None:
    folder = submission(public_data, tmp_path, "v5.0/NVIDIA/nyx_n1_ngc25.04_nemo")
    for i in (2, 5):
        log = folder / f"result_{i}.txt"
        log.write_text(log.read_text().replace('"lora_rank", "value": 16', '"lora_rank", "value": 8'))
    found = mlperf.run_compliance(folder, "5.0.0")
    assert not found.passes
    assert "result_2.txt, result_5.txt do not comply" in found.sentence
    assert any("lora_rank" in words for words in found.files["result_2.txt"])


def test_an_empty_folder_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no result_\*\.txt"):
        mlperf.run_compliance(tmp_path)


def test_logs_of_something_else_are_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "result_0.txt").write_text("nothing to see\n")
    found = mlperf.run_compliance(tmp_path)
    assert not found.passes
    assert "None, not llama2_70b_lora" in found.rcp_words


SIMULATED = Path(__file__).resolve().parent.parent / "studies" / "simulated_h100.toml"


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
        seconds=1500.0, samples=3072.0, facts={"objective": objective, "mlperf_score": 1600.0},
    )  # fmt: skip
    sweep = Sweep(name=study.name, digest="", study_toml=text, began_at=0.0, trials={0: trial})
    assert says in summary(study, sweep, Outcome("done"))
    assert says in report_html(study, sweep, 0.0)
