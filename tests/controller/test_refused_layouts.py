"""A configuration that the trainer refuses teaches the search: what Megatron does not take is not asked for again."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from lora_tune.config.study import parse_study
from lora_tune.controller.doomed import ENOUGH, refused_before
from lora_tune.store.records import StudyRecords, Trial, Verdict
from tests.controller.test_driver import House
from tests.fakes import FakeClock, FakeCluster, Script, command_study, curve_script

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "standin"))
from trainer import Degrees

sys.path.pop(0)

TUNED = ("TENSOR_MODEL_PARALLEL", "PIPELINE_MODEL_PARALLEL", "INTERLEAVED_PIPELINE", "SP")
SPACE = """
TENSOR_MODEL_PARALLEL = { type = "categorical", choices = [1, 2, 4, 16] }
PIPELINE_MODEL_PARALLEL = { type = "categorical", choices = [1, 2] }
INTERLEAVED_PIPELINE = { type = "categorical", choices = [1, 4] }
SP = { type = "categorical", choices = [0, 1] }
"""
REFUSAL = "ValueError: num_attention_heads (64) must be a multiple of tensor_model_parallel_size (16)."


def of_megatron(environment: Mapping[str, str], start: float) -> Script:
    """The curve of tests.fakes where Megatron takes the degrees, else its refusal."""
    values = {"DGXNGPU": "32", "MINIBS": "4", **{name: environment[name] for name in TUNED}}
    try:
        Degrees.of(values).refuse("llama2_70b_lora")
    except (RuntimeError, ValueError) as error:
        yield 1.0, f"Traceback (most recent call last):\n{type(error).__name__}: {error}"
        return
    yield from curve_script(environment, start)


def swept(tmp_path: Path, sampler: str) -> StudyRecords:
    text = command_study(trials=24, parallel=1).replace("[space]", f"[space]{SPACE}")
    text = text.replace("random", sampler)
    home = House(tmp_path, FakeCluster(FakeClock(), of_megatron), text)
    home.driver().run()
    return home.sweep()


def combination(values: Mapping[str, object]) -> tuple[object, ...]:
    return tuple(values[name] for name in TUNED)


@pytest.mark.parametrize("sampler", ["random", "tpe", "grey_box"])
def test_what_megatron_refuses_is_left_alone_after_two_trials(
    tmp_path: Path, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_ROUND", "v5.0")
    trials = swept(tmp_path, sampler).trials
    refused = Counter(combination(t.tuned) for t in trials.values() if t.verdict is Verdict.INFEASIBLE)
    assert refused, "interleaving at PP=1, sequence parallel at TP=1, 64 heads on 16"
    assert max(refused.values()) <= ENOUGH
    ran = {combination(t.tuned) for t in trials.values() if t.verdict in (Verdict.REACHED, Verdict.CENSORED)}
    assert ran.isdisjoint(refused)


@pytest.mark.parametrize(
    ("others", "doomed"),
    [
        (["refused"], False),
        (["refused", "refused"], True),
        (["refused", "out of memory"], False),
        (["refused", "refused", "reached"], False),
        (["refused", "another TP"], False),
    ],
)
def test_only_what_was_refused_each_time_is_left_alone(others: list[str], doomed: bool) -> None:
    sentences = {"refused": REFUSAL, "another TP": REFUSAL, "out of memory": "CUDA out of memory", "reached": "reached"}
    trials = {
        n: Trial(
            number=n, seed=n, parameters={},
            tuned={"LR": n * 1e-4, "TENSOR_MODEL_PARALLEL": 8 if kind == "another TP" else 16, "SP": 1},
            sentence=sentences[kind], verdict=Verdict.REACHED if kind == "reached" else Verdict.INFEASIBLE,
        )
        for n, kind in enumerate(others)
    }  # fmt: skip
    sweep = StudyRecords(name="x", digest="", study_toml="", began_at=0.0, trials=trials)
    study = parse_study(command_study(trials=2).replace("[space]", f"[space]{SPACE}"), Path("x.toml"))
    tuned = {"LR": 0.3, "TENSOR_MODEL_PARALLEL": 16, "SP": 1}
    assert bool(refused_before(study, sweep, tuned)) is doomed
    assert refused_before(parse_study(command_study(trials=2), Path("x.toml")), sweep, tuned) == "", "numbers alone"
