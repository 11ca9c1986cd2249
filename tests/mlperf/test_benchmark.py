"""Benchmarks are read from mlperf_logging's files: targets, directions, runs, fixed values, formulas, eval grids."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.base.errors import InputError
from lora_tune.mlperf import benchmark as registry
from lora_tune.mlperf.benchmark import Benchmark, read_benchmark
from lora_tune.mlperf.gate import log_lines
from lora_tune.mlperf.log_check import complaints, parse
from lora_tune.mlperf.rules import reaching
from lora_tune.mlperf.rulesets import as_ruleset, benchmarks_of, newest_with, package, rulesets
from tests.mlperf.logs import run_log

ROUNDS = ("5.0.0", "5.1.0", "6.0.0", "6.1.0")
PAIRS = [(name, ruleset) for ruleset in ROUNDS for name in benchmarks_of(ruleset)]


@pytest.mark.parametrize(("name", "ruleset"), PAIRS)
def test_the_checker_itself_agrees_on_target_and_direction(name: str, ruleset: str) -> None:
    benchmark = read_benchmark(name, ruleset)
    for metric in benchmark.metrics:
        for value in (reaching(metric), *(math.nextafter(metric.target, to) for to in (-math.inf, math.inf))):
            log = "\n".join(log_lines(benchmark, {"global_batch_size": 512}, {metric.name: value}))
            said = complaints(parse(log.splitlines(), ruleset), ruleset)
            refused = any("Failed checks for" in words for words in said)
            assert refused == (not metric.reached(value)), (value, said)


def test_there_are_29_pairs_of_benchmark_and_round_with_targets_as_published() -> None:
    assert len(PAIRS) == 29
    known = {name: read_benchmark(name) for name, _ in PAIRS}
    assert {n: (b.target, b.direction, b.runs) for n, b in known.items() if len(b.metrics) == 1} == {
        "bert": (0.72, "maximize", 10),
        "deepseekv3_671b": (3.6, "minimize", 3),
        "dlrm_dcnv2": (0.80275, "maximize", 10),
        "dlrmv4": (0.75, "maximize", 10),
        "flux1": (0.586, "minimize", 10),
        "gpt_oss_20b": (3.34, "minimize", 10),
        "llama2_70b_lora": (0.925, "minimize", 10),
        "llama31_405b": (5.6, "minimize", 3),
        "llama31_8b": (3.3, "minimize", 10),
        "qwen35_397b_grpo": (0.69, "maximize", 3),
        "retinanet": (0.34, "maximize", 5),
        "rgat": (0.72, "maximize", 10),
    }
    assert [(m.name, m.target, m.direction) for m in known["stable_diffusion"].metrics] == [
        ("FID", 90.0, "minimize"), ("CLIP", 0.15, "maximize"),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "ruleset"), [p for p in PAIRS if p != ("bert", "5.1.0")])
def test_the_checker_accepts_a_log_with_what_the_rules_demand(name: str, ruleset: str) -> None:
    benchmark = read_benchmark(name, ruleset)
    for batch in (benchmark.batch_sizes[0], benchmark.batch_sizes[-1]):
        log = log_lines(benchmark, {"global_batch_size": batch})
        assert complaints(parse(log, ruleset), ruleset) == ()


def test_formulas_follow_the_batch_size() -> None:
    deepseek = read_benchmark("deepseekv3_671b", "6.1").demanded({"global_batch_size": 18432})
    assert deepseek["opt_base_learning_rate"] == pytest.approx(2.5456e-5, rel=1e-4)
    qwen = read_benchmark("qwen35_397b_grpo").demanded({"global_batch_size": 1024})
    assert qwen["opt_base_learning_rate"] == pytest.approx(2e-6)
    assert qwen["opt_gradient_clip_norm"] == pytest.approx(0.0625)
    large = read_benchmark("llama31_405b", "5.1").demanded({"global_batch_size": 896})
    assert large["opt_learning_rate_warmup_steps"] == math.ceil(8000 * 1152 / 896)
    small = read_benchmark("llama31_8b").demanded(
        {"global_batch_size": 32, "opt_learning_rate_warmup_steps": 128, "opt_base_learning_rate": 5e-4}
    )
    assert small["opt_learning_rate_decay_steps"] == 1_199_872
    assert small["opt_end_learning_rate"] == pytest.approx(5e-5)


@given(st.integers(1, 20_000))
@settings(max_examples=200)
def test_a_demanded_rate_passes_the_check_that_compares_it_exactly(batch: int) -> None:
    rate = read_benchmark("llama31_405b", "6.0").demanded({"global_batch_size": batch})["opt_base_learning_rate"]
    assert isinstance(rate, float)
    near = [rate]
    for _ in range(64):
        near = [math.nextafter(near[0], 0), *near, math.nextafter(near[-1], 1)]
    passing = [candidate for candidate in near if candidate * 1152 == batch * 8e-5]
    assert rate in passing or not passing  # at some batch sizes no number at all passes the checker's comparison


@pytest.mark.parametrize(
    ("name", "ruleset", "batch", "first", "interval"),
    [
        ("llama2_70b_lora", "6.1", 8, 1536, 384),
        ("llama2_70b_lora", "6.1", 9, 1548, 387),
        ("llama2_70b_lora", "6.1", 72, 5184, 432),
        ("llama31_8b", "6.1", 32, 12_288, 12_288),
        ("llama31_405b", "5.0", 1216, 46_208, 46_208),
        ("llama31_405b", "5.1", 960, 288_000, 19_200),  # as the public logs of v5.1 evaluate
        ("flux1", "5.1", 2304, 262_144, 262_144),
        ("flux1", "6.1", 2304, 262_656, 262_656),
        ("dlrmv4", "6.1", 8192, 25 * 2_293_760, 2_293_760),
        ("dlrmv4", "6.1", 32768, 41 * 2_293_760, 2_293_760),
        ("deepseekv3_671b", "6.1", 15360, 43 * 15360, 15360),
        ("qwen35_397b_grpo", "6.1", 256, 4608, 256),
        ("retinanet", "5.1", 256, 1, 1),
        ("dlrm_dcnv2", "6.0", 55296, 0.05, 0.05),
    ],
)
def test_eval_grids_follow_from_rules_and_batch(
    name: str, ruleset: str, batch: int, first: float, interval: float
) -> None:
    schedule = read_benchmark(name, ruleset).eval_schedule(batch)
    assert schedule is not None
    assert (schedule.first_samples, schedule.interval_samples) == (first, interval)


def test_a_batch_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        read_benchmark("llama2_70b_lora").eval_schedule(0)


def test_progress_is_counted_in_samples_or_in_epochs() -> None:
    epochs = {name for name, _ in PAIRS if read_benchmark(name).progress == "epoch_num"}
    assert epochs == {"bert", "dlrm_dcnv2", "retinanet", "rgat"}


def test_reference_convergence_is_found_interpolated_or_absent() -> None:
    lora = read_benchmark("llama2_70b_lora")
    assert lora.batch_sizes == (8, 16, 32, 128)
    found = {batch: lora.reference(batch) for batch in (4, 8, 64, 129)}
    assert found[8] is not None
    assert found[8].mean == pytest.approx(3178.67, abs=0.01)
    assert found[64] is not None
    assert found[64].mean == pytest.approx(7131.43, abs=0.01)
    assert found[4] is not None
    assert found[4].mean == found[8].mean
    assert found[129] is None
    large = read_benchmark("llama31_405b", "5.0").reference(1152)
    assert large is not None
    assert large.fastest <= large.mean - 46_080  # the exception of 5.0: one evaluation earlier


def test_rounds_are_called_as_people_call_them() -> None:
    assert as_ruleset("5.1") == as_ruleset("v5.1") == as_ruleset("5.1.0") == "5.1.0"
    with pytest.raises(InputError, match=r"ruleset '9.9' is not in the installed mlperf_logging, which has .*6\.1\.0"):
        as_ruleset("9.9")
    with pytest.raises(InputError, match="no installed ruleset has a benchmark 'resnet51'"):
        newest_with("resnet51")
    with pytest.raises(InputError, match=r"ruleset 6.1.0 has no closed_bert"):
        read_benchmark("bert", "6.1")


def test_a_ruleset_added_to_mlperf_logging_is_served(tmp_path: Path) -> None:
    """A copy of the package with a ruleset more: newest, with a target of its own, checked and scored."""
    copy = tmp_path / "mlperf_logging"
    shutil.copytree(package(), copy)
    for room in ("compliance_checker", "rcp_checker"):
        shutil.copytree(copy / room / "training_6.1.0", copy / room / "training_7.0.0")
    for file in (copy / "compliance_checker" / "training_7.0.0").glob("*.yaml"):
        file.write_text(file.read_text().replace("6.1.0", "7.0.0").replace("<= 3.3)", "<= 3.1)"))
    log = run_log(read_benchmark("llama31_8b"), {"global_batch_size": 16}, progress=172_032, loss=3.05)
    results = tmp_path / "results"
    results.mkdir()
    for number in range(10):
        (results / f"result_{number}.txt").write_text(log)
    code = (
        "from pathlib import Path\n"
        "from lora_tune.mlperf.benchmark import read_benchmark\n"
        "from lora_tune.mlperf.submission import read_submission\n"
        "b = read_benchmark('llama31_8b')\n"
        f"s = read_submission(Path({str(results)!r}))\n"
        "print(b.ruleset, b.target, s.ruleset, s.compliant, s.convergence.passes, s.score_minutes)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["7.0.0", "3.1", "7.0.0", "True", "True", "25.0"]


def test_rulesets_are_sorted_by_version() -> None:
    assert [r for r in rulesets() if r in ROUNDS] == list(ROUNDS)


def test_a_benchmark_of_ones_own_is_plain_data() -> None:
    lora = read_benchmark("llama2_70b_lora")
    own = Benchmark(
        name="own", ruleset=lora.ruleset, metrics=lora.metrics, progress="samples_count", runs=5, rules=lora.rules
    )
    assert own.eval_schedule(8) is None
    assert own.reference(8) is None


def test_an_installed_package_brings_benchmarks_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(ruleset: str | None) -> Benchmark:
        lora = read_benchmark("llama2_70b_lora", ruleset)
        return replace(lora, name="house_lora", metrics=(replace(lora.metrics[0], target=0.9),), runs=5)

    point = EntryPoint("house_lora", "house:make", registry.GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda _self: make)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.GROUP else [])
    for cached in (registry.find_benchmark, registry.benchmark_names, registry._outside):
        cached.cache_clear()
    try:
        assert "house_lora" in registry.benchmark_names()
        assert registry.check_name("house_lora") == "house_lora"
        found = registry.find_benchmark("house_lora")
        assert (found.target, found.runs) == (0.9, 5)
        assert registry.find_benchmark("llama31_8b").target == 3.3
    finally:
        for cached in (registry.find_benchmark, registry.benchmark_names, registry._outside):
            cached.cache_clear()
