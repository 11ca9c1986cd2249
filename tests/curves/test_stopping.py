"""The stopping rule: what stops a run before there are references, and what does not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.curves.overlay import Course
from lora_tune.curves.points import usable
from lora_tune.curves.stopping import Evidence, contradicts, verdict
from lora_tune.logs.run import Eval
from lora_tune.mlperf import published_curves

TARGET, END = 0.925, 8192.0
NOTHING = Evidence()


def run_of(*losses: float, step: float = 384.0) -> list[Eval]:
    return [Eval(step * (i + 1), loss, i) for i, loss in enumerate(losses)]


def good_run(shift: float = 0.0, evals: int = 20) -> list[Eval]:
    return run_of(*(0.92 + shift + 0.06 * 0.8**i for i in range(evals)))


def reference(evals: list[Eval]) -> Course:
    return Course(curve=usable(evals), length=END)


GOOD = tuple(reference(good_run(shift)) for shift in np.linspace(-0.004, 0.003, 12))


def test_two_evals_that_are_not_numbers_are_divergence_even_before_the_first_verdict() -> None:
    found = verdict(run_of(0.94, math.nan, math.inf), TARGET, Evidence(no_verdict_before=9e9))
    assert (found.stop, found.reason) == (True, "diverged")


def test_one_spike_is_not_divergence_and_a_blow_up_is() -> None:
    assert not verdict(run_of(0.94, 0.935, 1.5), TARGET, NOTHING).stop
    assert verdict(run_of(0.94, 0.935, 5.2, 5.1), TARGET, NOTHING).reason == "diverged"


@pytest.mark.parametrize(
    "losses",
    [
        [0.93, 1.5, 2.4, 2.4, 2.0, 1.1],  # begins near its target, rises far, and comes down
        [0.926, 3.2, 2.9, 3.3, 3.1, 2.8],  # noise whose first value was luck
    ],
)
def test_a_first_eval_near_the_target_makes_no_blow_up_of_what_follows(losses: list[float]) -> None:
    assert not any(verdict(run_of(*losses[: n + 1]), TARGET, NOTHING).stop for n in range(len(losses)))


def test_a_blow_up_is_no_divergence_where_a_good_run_came_back_from_one() -> None:
    """A regression error peaks a hundredfold at the interpolation threshold, and falls again."""
    peak = [1.0, 0.96, 0.95, 60.0, 80.0, 30.0, 1.0, 0.92]
    assert verdict(run_of(*peak[:5]), TARGET, NOTHING).reason == "diverged"
    for task, stopped in (((), False), ("another batch", True)):
        known = Evidence(references=[Course(curve=usable(run_of(*peak)), length=END, task=task)])
        assert verdict(run_of(*peak[:5]), TARGET, known, length=END).stop is stopped
    later = [Eval(8000.0 + i, 90.0, i) for i in range(3)]
    steady = Evidence(references=[reference(good_run()), reference([*good_run(), *later])])
    assert verdict(run_of(*peak[:5]), TARGET, steady, length=END).stop, "what happens after the target proves nothing"


def test_large_numbers_are_no_divergence() -> None:
    """A metric in dollars, or a perplexity: beyond what a loss can be, and falling."""
    assert not verdict(run_of(9e7, 8e7, 6e7), 1e6, NOTHING).stop


def test_a_spike_over_many_dense_evals_is_no_blow_up() -> None:
    losses = [*np.linspace(1.2, 1.0, 100), *[9.0] * 5]
    assert not verdict(run_of(*losses, step=48.0), TARGET, NOTHING).stop


@pytest.mark.parametrize(
    "losses",
    [
        [2.3, 2.4, 3.0, 4.0, 5.0, 5.5, 5.5, 5.4],  # grokking: validation loss rises far before it falls
        [2.0, 1.2, 1.0, 1.4, 1.9, 2.0, 1.9, 1.8],  # double descent
        [1.5] * 15,  # flat until a learning rate step
        [1.0, 0.99, 0.985, 0.983, 0.982, 0.9815, 0.981, 0.981, 0.981, 0.981],  # log-linear: beyond any target
    ],
)
def test_without_references_no_shape_is_a_reason_to_stop(losses: list[float]) -> None:
    assert not verdict(run_of(*losses), TARGET, NOTHING, length=384.0 * (len(losses) + 1)).stop


def test_arithmetic_stops_what_no_run_ever_made_good() -> None:
    few = Evidence(references=GOOD[:3])
    hopeless = run_of(*[1.6] * 8)
    assert "in which no good run fell more than" in verdict(hopeless, TARGET, few, length=END).sentence
    assert not verdict(hopeless, TARGET, few, length=END, task="another batch").stop, "nothing is known of it"
    assert not verdict(hopeless, TARGET, Evidence(references=GOOD[:2]), length=END).stop, "two runs are no range"
    assert not verdict(hopeless, TARGET, few).stop, "where its training ends is not known"
    assert not verdict(run_of(*[0.99] * 8), TARGET, few, length=END).stop, "an FP4 run before its change of precision"


def test_finished_runs_are_what_a_run_is_compared_with() -> None:
    stalled = verdict(run_of(*[0.97] * 9), TARGET, Evidence(references=GOOD), length=END)
    assert stalled.reason == "stalled"
    assert "12 good runs" in stalled.sentence
    assert "at most 7.7% of good runs look like this" in stalled.sentence
    assert not verdict(good_run(0.002)[:5], TARGET, Evidence(references=GOOD), length=END).stop


def test_the_first_good_runs_go_free() -> None:
    few = Evidence(references=GOOD[:7])
    assert not verdict(run_of(*[0.99] * 8), TARGET, few, length=END).stop


def test_a_run_at_its_target_or_its_end_is_never_stopped() -> None:
    reached = [*good_run(), Eval(9000.0, math.nan, 1), Eval(9400.0, math.nan, 1)]
    assert not verdict(reached, TARGET, Evidence(references=GOOD), length=END).stop
    ended = run_of(*[0.99] * 10)
    assert not verdict(ended, TARGET, Evidence(references=GOOD), length=3840.0).stop


def test_the_published_envelope_is_silent_while_the_precision_may_still_change() -> None:
    healing = [Eval(1536 + 384.0 * i, v, i) for i, v in enumerate((0.961, 0.957, 0.952, 0.949, 0.9257))]
    published = Evidence(published=published_curves.published(8))
    assert verdict(healing[:4], TARGET, published, length=END).stop
    wary = replace(published, published_from=3190.0)
    assert not any(verdict(healing[:n], TARGET, wary, length=END).stop for n in range(1, 6))
    flat = [Eval(1536 + 384.0 * i, 0.961, i) for i in range(8)]
    assert verdict(flat, TARGET, wary, length=END).stop


def test_a_good_run_of_this_study_overrules_the_published_envelope() -> None:
    slow = [Eval(1536 + 384.0 * i, v, i) for i, v in enumerate((0.96, 0.955, 0.95, 0.945, 0.94, 0.935, 0.93, 0.924))]
    published = Evidence(published=published_curves.published(8))
    assert verdict(slow[:4], TARGET, published, length=END).stop
    assert not verdict(slow[:4], TARGET, replace(published, references=(reference(slow),)), length=END).stop


def evals_from(*losses: float) -> list[Eval]:
    return [Eval(1536 + 384.0 * i, v, i) for i, v in enumerate(losses)]


def test_only_a_good_run_that_lay_outside_of_an_envelope_contradicts_it() -> None:
    envelope = published_curves.published(8)
    assert envelope is not None
    late = reference(evals_from(*[0.96] * 8, 0.924))
    assert contradicts(late, TARGET, envelope, 0.01)
    assert not contradicts(reference(evals_from(*[0.96] * 9)), TARGET, envelope, 0.01), "it never got there"
    usual = evals_from(*(float(envelope.family.loss_at(np.array(1536 + 384.0 * i))) for i in range(8)), 0.92)
    assert not contradicts(reference(usual), TARGET, envelope, 0.01)
    spike = evals_from(0.94, 0.937, 0.96, 0.931, 0.924)
    assert not contradicts(reference(spike), TARGET, envelope, 0.01), "one eval alone says nothing"
    assert not contradicts(late, TARGET, envelope, 0.01, begin=4000.0), "its precision may have changed until then"


def test_a_study_that_lets_many_good_runs_be_stopped_gives_up_the_envelope_no_sooner() -> None:
    """One good run in five lies outside of an envelope at 20%, whatever it was calibrated on."""
    envelope = published_curves.published(8)
    assert envelope is not None
    unit = float(np.hypot(envelope.family.noise_at(np.array(1920.0)), envelope.family.spread))
    between = (envelope.threshold(0.2) + envelope.threshold(0.01)) / 2
    middle = [float(envelope.family.loss_at(np.array(1536 + 384.0 * i))) for i in range(2)]
    above = reference(evals_from(*(v + between * unit for v in middle), 0.92))
    assert not contradicts(above, TARGET, envelope, 0.2)


anything = st.lists(st.builds(Eval, *(st.floats(allow_nan=True, allow_infinity=True) for _ in range(3))), max_size=30)


@settings(deadline=None, max_examples=150)
@given(anything, st.lists(anything, max_size=5), st.floats(1, 1e6) | st.none())
def test_no_sequence_of_evals_breaks_the_rule(evals: list[Eval], others: list[list[Eval]], end: float | None) -> None:
    references = (*(Course(curve=usable(e), length=end) for e in others), *GOOD)
    for evidence in (
        Evidence(references=references),
        Evidence(published=published_curves.published(8), references=references),
    ):
        found = verdict(evals, TARGET, evidence, length=end)
        assert found.stop == bool(found.sentence)
