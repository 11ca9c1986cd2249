"""The simulated surfaces say what the public runs say where there are public runs, and are consistent elsewhere."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.base.errors import InputError
from lora_tune_simulation import SHIPPED, load
from lora_tune_simulation.h100 import function as h100
from lora_tune_simulation.h100 import gb200x72 as gb200
from lora_tune_simulation.h100 import sixty_four_nodes, time_to_target
from lora_tune_simulation.machine import Recipe, ln_samples
from lora_tune_simulation.simulated_run import eval_samples, rcp_samples

PUBLISHED = {"LR": 4e-4, "MAX_STEPS": 800, "WARMUP_STEPS": 0, "TP": 4, "PP": 1, "CP": 1, "MINIBS": 4, "MBS": 1}


def test_published_configuration_converges_as_published() -> None:
    """Nine 8x H100 submissions of v4.1: mean stops of 3,072 to 3,226 samples, sd 115 to 290, 27.0 to 27.9 min."""
    runs = [h100.outcome(PUBLISHED, seed) for seed in range(300)]
    stops = np.array([run.evals[-1][0] for run in runs])
    minutes = np.array([run.end_seconds - run.init_seconds for run in runs]) / 60
    assert all(run.end == "success" for run in runs)
    assert 3072 < stops.mean() < 3226
    assert 115 < stops.std() < 290
    assert 26.2 < minutes.mean() < 28.5


@pytest.mark.parametrize(
    ("surface", "parameters", "minutes"),
    [
        (gb200, {"LR": 5e-4, "MAX_STEPS": 800, "TP": 1, "PP": 1, "CP": 8, "MINIBS": 1}, (1.586, 1.663)),
        (sixty_four_nodes, {"LR": 5e-4, "MAX_STEPS": 1024, "TP": 4, "PP": 1, "CP": 2, "MINIBS": 1}, (1.953, 2.103)),
    ],
)
def test_larger_systems_are_near_their_published_scores(surface, parameters, minutes) -> None:
    """Within 25% of the published range; the best of 64 H200 nodes is 1.61 min, so the surface sits between."""
    score = surface.expected_score(parameters) / 60
    assert 0.75 * minutes[0] < score < 1.25 * minutes[1]


def test_expected_score_is_the_mean_of_simulated_runs() -> None:
    runs = [time_to_target.outcome(PUBLISHED, seed) for seed in range(600)]
    mean = np.mean([run.end_seconds - run.init_seconds for run in runs])
    assert time_to_target.expected_score(PUBLISHED) == pytest.approx(mean, rel=0.01)


def test_expected_score_is_scaled_up_to_the_reference_mean() -> None:
    fast = {**PUBLISHED, "MAX_STEPS": 620}
    assert h100.expected_score(fast) > time_to_target.expected_score(fast)


def test_same_seed_same_log_other_seed_other_log() -> None:
    assert list(h100(PUBLISHED, 3)) == list(h100(PUBLISHED, 3))
    assert list(h100(PUBLISHED, 3)) != list(h100(PUBLISHED, 4))


@settings(max_examples=60, deadline=None)
@given(
    rate=st.floats(1e-5, 1e-2),
    steps=st.integers(100, 2500),
    warm=st.floats(0, 0.2),
    tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2, 4]),
    minibs=st.sampled_from([4, 8, 16]),
    seed=st.integers(0, 10_000),
)
def test_any_parameters_give_an_ordered_log_that_ends(rate, steps, warm, tp, cp, minibs, seed) -> None:
    if tp * cp > 8:
        cp = 1
    parameters = {
        "LR": rate,
        "MAX_STEPS": steps,
        "WARMUP_STEPS": int(warm * steps),
        "TP": tp,
        "CP": cp,
        "MINIBS": minibs,
    }
    lines = list(h100(parameters, seed))
    seconds = [second for second, _ in lines]
    assert seconds == sorted(seconds)
    events = [json.loads(text.removeprefix(":::MLLOG ")) for _, text in lines if text.startswith(":::MLLOG")]
    times = [event["time_ms"] for event in events]
    assert times == sorted(times)
    assert "OutOfMemoryError" in lines[-1][1] or events[-1]["key"] == "run_stop"
    assert h100.expected_score(parameters) > 0


def test_wide_ranges_hold_runs_that_diverge_stall_and_end_unfinished() -> None:
    blown = h100.outcome({**PUBLISHED, "LR": 1e-2}, 0)
    assert math.isnan(blown.train[-1][1])
    assert blown.end == "aborted"
    slow = h100.outcome({**PUBLISHED, "LR": 2e-5}, 0)
    assert slow.end == "aborted"
    assert slow.evals[-1][1] > 0.94
    assert h100.outcome({**PUBLISHED, "MAX_STEPS": 100}, 0).evals == ()
    assert math.isinf(h100.expected_score({**PUBLISHED, "MAX_STEPS": 100}))


def test_memory_is_certain_far_from_the_limit_and_luck_near_it() -> None:
    def deaths(**layout: int) -> float:
        return float(np.mean([h100.outcome({**PUBLISHED, **layout}, s).end == "oom" for s in range(200)]))

    assert deaths(TP=1, MINIBS=1) == 1
    assert deaths(TP=4) == 0
    assert 0.02 < deaths(TP=4, MBS=2) < 0.25


def test_variants_are_other_sites_of_the_same_kind() -> None:
    scores = np.array([h100.variant(k).expected_score(PUBLISHED) for k in range(1, 41)])
    assert 0.02 < np.log(scores).std() < 0.08
    assert np.median(scores) == pytest.approx(h100.expected_score(PUBLISHED), rel=0.04)


def test_schedule_is_the_closed_divisions_unless_told_otherwise() -> None:
    assert list(eval_samples({}, 8, 2400)) == [1536, 1920, 2304]
    assert list(eval_samples({"VAL_CHECK_INTERVAL": 16, "SKIP_EVALS": 0}, 8, 40)) == [16, 32]
    assert rcp_samples(8) == pytest.approx(3178.7, abs=0.1)
    assert rcp_samples(256) == 0


@given(st.floats(1e-5, 3e-4), st.floats(1e-5, 3e-4))
def test_below_the_published_rates_less_is_slower(a: float, b: float) -> None:
    low, high = sorted((a, b))
    if high / low > 1.05:
        assert ln_samples(Recipe(learning_rate=low, gbs=8, steps=1024)) > ln_samples(
            Recipe(learning_rate=high, gbs=8, steps=1024)
        )


def test_shipped_names_and_files_load_and_others_say_what_is_missing(tmp_path) -> None:
    for name in SHIPPED:
        assert callable(load(name))
    (tmp_path / "mine.py").write_text("def flat(parameters, seed):\n    yield 0.0, 'hello'\n")
    assert list(load("mine.py:flat", tmp_path)({}, 0)) == [(0.0, "hello")]
    with pytest.raises(InputError, match=r"no file .*other\.py"):
        load("other.py:flat", tmp_path)
    with pytest.raises(InputError, match="has no function 'round'"):
        load("mine.py:round", tmp_path)


def test_score_is_named() -> None:
    assert replace(h100, score="time_to_target") == time_to_target
