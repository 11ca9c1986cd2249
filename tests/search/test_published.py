"""Published results of other benchmarks: read from tables, and believed by the studies that they are about."""

from __future__ import annotations

import pytest

from lora_tune.config.study import Study, parse_study
from lora_tune.search.published import of_benchmark
from lora_tune.search.samplers import published_about
from lora_tune.search.session import Session
from tests.conftest import REPOSITORY

EIGHT = REPOSITORY / "studies" / "mlperf" / "b200_llama31_8b.toml"


def study(*changes: tuple[str, str]) -> Study:
    text = EIGHT.read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return parse_study(text, EIGHT)


@pytest.mark.parametrize(("name", "submissions"), [("llama31_8b", 25), ("flux1", 9), ("llama31_405b", 10)])
def test_each_submission_is_a_source_of_its_own(name: str, submissions: int) -> None:
    table = of_benchmark(name)
    assert len({o.source for o in table}) == len({o.number for o in table}) == submissions
    for row in table:
        assert 0 < row.attributes["crossing_samples"] < row.reached
        assert row.values["LR"] == row.values["LEARNING_RATE"] > 0


def test_a_mean_stop_lies_half_an_eval_interval_behind_the_crossing() -> None:
    dell = next(o for o in of_benchmark("llama31_8b") if o.source == "v5.1 Dell 1xXE9780x8B300-SXM-270GB")
    assert (dell.values["GBS"], dell.values["LR"], dell.values["WARMUP_STEPS"]) == (16, 4e-4, 16)
    assert dell.reached - dell.attributes["crossing_samples"] == 12_288 / 2
    by_round = {o.source.split()[0]: o.reached - o.attributes["crossing_samples"] for o in of_benchmark("llama31_405b")}
    assert by_round["v5.0"] > by_round["v5.1"], "405B is evaluated more often since 5.1"


def test_a_benchmark_without_a_table_has_none() -> None:
    assert of_benchmark("gpt_oss_20b") == ()


def test_a_study_believes_them_where_it_keeps_the_benchmarks_rules_and_target() -> None:
    assert len(published_about(study())) == 25
    assert published_about(study(('division = "closed"', 'division = "open"'))) == ()
    assert published_about(study(("[objective]\n", "[objective]\ntarget = 3.5\n"))) == ()
    assert published_about(study(('benchmark = "llama31_8b"', 'benchmark = "gpt_oss_20b"'))) == ()


def test_the_first_proposal_of_a_wide_range_lies_where_others_ended() -> None:
    wide = study(
        ("low = 2e-4, high = 1e-3", "low = 1e-5, high = 1e-2"),
        ("[search]\n", '[search]\nsampler = "grey_box"\n'),
        ('enqueue = [{ LR = 4e-4, WARMUP_STEPS = 16, layout = "tp1 pp1 cp1 gbs16 mbs2" }]', ""),
    )
    asked = Session(wide).ask()
    assert not isinstance(asked, str)
    assert 2e-4 < asked.tuned["LR"] < 2e-3
