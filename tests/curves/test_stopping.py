"""The stopping rule: what stops a run before there are references, and what does not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.curves.comparison import ComparedRun, compared_run
from lora_tune.curves.points import usable
from lora_tune.curves.published import confirms, contradicts, shown_by
from lora_tune.curves.stopping import Evidence, verdict
from lora_tune.logs.run import Eval
from lora_tune.mlperf import convergence

TARGET, END = 0.925, 8192.0
NOTHING = Evidence()


def run_of(*losses: float, step: float = 384.0) -> list[Eval]:
    return [Eval(step * (i + 1), loss, i) for i, loss in enumerate(losses)]


def good_run(shift: float = 0.0, evals: int = 20) -> list[Eval]:
    return run_of(*(0.92 + shift + 0.06 * 0.8**i for i in range(evals)))


def reference(evals: list[Eval]) -> ComparedRun:
    return ComparedRun(curve=usable(evals), length=END)


GOOD = tuple(reference(good_run(shift)) for shift in np.linspace(-0.004, 0.003, 12))


def test_two_evals_that_are_not_numbers_are_divergence_even_before_the_first_verdict() -> None:
    found = verdict(run_of(0.94, math.nan, math.inf), TARGET, Evidence(no_verdict_before=9e9))
    assert (found.stop, found.reason) == (True, "diverged")


def test_a_metric_that_is_no_number_yet_is_no_divergence() -> None:
    """Undefined until warm-up ends, until an episode has ended, or while a perplexity overflows."""
    for unknown in (math.nan, math.inf, 1e300):
        start = run_of(unknown, unknown, unknown, 0.99, 0.98)
        assert not any(verdict(start[:n], TARGET, NOTHING, length=END).stop for n in range(1, 6))


def test_a_metric_that_was_a_number_again_means_nothing_when_it_is_none() -> None:
    """Weights that are no numbers never are again; a mean over the episodes that ended since the last eval is."""
    now_and_then = run_of(0.99, math.nan, 0.98, math.nan, math.nan)
    assert not verdict(now_and_then, TARGET, NOTHING).stop
    good = compared_run(run_of(0.99, math.nan, math.nan, 0.92), length=END)
    gone = run_of(0.99, 0.98, math.nan, math.nan)
    assert not verdict(gone, TARGET, Evidence(finished=[good])).stop
    assert verdict(gone, TARGET, Evidence(finished=[replace(good, task="another batch")])).reason == "diverged"


@pytest.mark.parametrize("lost", ["none", "of a good run", "of the run"])
def test_one_eval_that_is_no_number_hides_no_divergence(lost: str) -> None:
    """A metric may be none for twice as long as it was before it came back; for longer it is gone."""
    numbers = [0.92 + 0.06 * 0.8**i for i in range(20)]
    references = [compared_run(run_of(*(x + 1e-4 * i for x in numbers), step=50.0), length=1000.0) for i in range(20)]
    gone = [*numbers[:5], *[math.nan] * 14]
    if lost == "of a good run":
        references[7] = compared_run(run_of(*numbers[:3], math.nan, *numbers[4:], step=50.0), length=1000.0)
    if lost == "of the run":
        gone[0] = math.nan
    evidence = Evidence(finished=references, rate=0.05)
    found = (verdict(run_of(*gone[:n], step=50.0), TARGET, evidence, length=1000.0) for n in range(1, 20))
    stops = [(50.0 * n, v.reason) for n, v in enumerate(found, 1) if v.stop]
    assert stops[0] == (350.0 if lost == "none" else 500.0, "diverged")


def test_dense_evals_that_are_no_numbers_say_no_more_than_sparse_ones() -> None:
    gone = [*([1.0] * 50), *([math.nan] * 10)]
    stops = [n for n in range(len(gone) + 1) if verdict(run_of(*gone[:n], step=48.0), TARGET, NOTHING).stop]
    assert stops[0] == 56


def test_a_run_that_is_no_number_for_longer_than_good_ones_were_is_stopped_at_the_supported_rate() -> None:
    """A diverged run is none to its end; beside good runs that were numbers soon it is stopped as one of the worst."""
    late = [compared_run(run_of(*[math.nan] * (2 + i % 3), *(0.92 + 0.06 * 0.8**j for j in range(18))), length=END)
            for i in range(12)]  # fmt: skip
    never = run_of(*[math.nan] * 12)
    found = [verdict(never[:n], TARGET, Evidence(finished=late), length=END) for n in range(1, 13)]
    assert [v.stop for v in found[:4]] == [False] * 4
    assert found[-1].reason == "stalled"
    assert "the best 3 of 12 finished runs" in found[-1].sentence
    soon = Evidence(finished=GOOD)
    assert next(n for n in range(1, 13) if verdict(never[:n], TARGET, soon, length=END).stop) <= 4
    assert not verdict([*never, Eval(END, math.nan, 0)], TARGET, soon, length=END).stop, "it has come to its end"


def test_arithmetic_knows_nothing_of_a_fall_before_the_first_evals_of_good_runs() -> None:
    sparse = reference([Eval(7000.0, 0.94, 0), Eval(7900.0, 0.92, 0)])
    high = [Eval(5000.0, 1.3, 0)]
    few = Evidence(finished=[sparse] * 3)
    assert not verdict(high, TARGET, few, length=END).stop
    assert verdict([*high, Eval(7100.0, 1.3, 0)], TARGET, few, length=END).stop


def test_public_runs_are_numbers_from_their_first_evals_on() -> None:
    published = Evidence(published=convergence.published(8))
    never = [Eval(1536 + 384.0 * i, math.nan, i) for i in range(4)]
    assert [verdict(never[:n], TARGET, published, length=END).stop for n in range(1, 4)] == [False, True, True]
    late = compared_run([*never, Eval(3072.0, 0.924, 0)], length=END)
    assert not verdict(never, TARGET, replace(published, finished=[late]), length=END).stop
    assert not verdict(never, TARGET, replace(published, published_from=3190.0), length=END).stop


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
        known = Evidence(finished=[ComparedRun(curve=usable(run_of(*peak)), length=END, task=task)])
        assert verdict(run_of(*peak[:5]), TARGET, known, length=END).stop is stopped
    later = [Eval(8000.0 + i, 90.0, i) for i in range(3)]
    steady = Evidence(finished=[reference(good_run()), reference([*good_run(), *later])])
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
    few = Evidence(finished=GOOD[:3])
    hopeless = run_of(*[1.6] * 11)
    assert not verdict(hopeless[:10], TARGET, few, length=END).stop, "a peak that others had none at"
    assert "in which no good run fell more than" in verdict(hopeless, TARGET, few, length=END).sentence
    assert not verdict(hopeless, TARGET, few, length=END, task="another batch").stop, "nothing is known of it"
    assert not verdict(hopeless, TARGET, Evidence(finished=GOOD[:2]), length=END).stop, "two runs are no range"
    assert not verdict(hopeless, TARGET, few).stop, "where its training ends is not known"
    assert not verdict(run_of(*[0.99] * 11), TARGET, few, length=END).stop, "an FP4 run before its change of precision"


def test_finished_runs_are_what_a_run_is_compared_with() -> None:
    stalled = verdict(run_of(*[0.97] * 9), TARGET, Evidence(finished=GOOD), length=END)
    assert stalled.reason == "stalled"
    assert "further above the best 3 of 12 finished runs" in stalled.sentence
    assert "of the runs that come among the best 4, at most 25.0% look like this" in stalled.sentence
    assert not verdict(good_run(0.002)[:5], TARGET, Evidence(finished=GOOD), length=END).stop


def test_sentences_count_in_what_the_log_counts_in() -> None:
    broken = verdict(run_of(0.94, math.nan, math.inf), TARGET, Evidence(unit="steps"))
    assert broken.sentence == "diverged: eval loss is not finite since 384 steps"
    hopeless = verdict(run_of(*[1.6] * 11), TARGET, Evidence(finished=GOOD[:3], unit="steps"), length=END)
    assert " steps to go, in which" in hopeless.sentence
    stalled = verdict(run_of(*[0.97] * 9), TARGET, Evidence(finished=GOOD, unit="epochs"), length=END)
    assert " epochs than any of them" in stalled.sentence
    published = Evidence(published=convergence.published(8), unit="steps")
    blank = verdict([Eval(1536 + 384.0 * i, math.nan, i) for i in range(4)], TARGET, published, length=END)
    assert "no number by 2688 steps" in blank.sentence


def test_the_first_runs_go_to_their_ends() -> None:
    few = Evidence(finished=GOOD[:3])
    assert not verdict(run_of(*[0.99] * 8), TARGET, few, length=END).stop


def test_a_run_at_its_target_or_its_end_is_never_stopped() -> None:
    reached = [*good_run(), Eval(9000.0, math.nan, 1), Eval(9400.0, math.nan, 1)]
    assert not verdict(reached, TARGET, Evidence(finished=GOOD), length=END).stop
    ended = run_of(*[0.99] * 10)
    assert not verdict(ended, TARGET, Evidence(finished=GOOD), length=3840.0).stop


def test_the_published_envelope_is_silent_while_the_precision_may_still_change() -> None:
    healing = [Eval(1536 + 384.0 * i, v, i) for i, v in enumerate((0.961, 0.957, 0.952, 0.949, 0.9257))]
    published = Evidence(published=convergence.published(8))
    assert verdict(healing[:4], TARGET, published, length=END).stop
    wary = replace(published, published_from=3190.0)
    assert not any(verdict(healing[:n], TARGET, wary, length=END).stop for n in range(1, 6))
    flat = [Eval(1536 + 384.0 * i, 0.961, i) for i in range(8)]
    assert verdict(flat, TARGET, wary, length=END).stop


def test_a_good_run_of_this_study_overrules_the_published_envelope() -> None:
    slow = [Eval(1536 + 384.0 * i, v, i) for i, v in enumerate((0.96, 0.955, 0.95, 0.945, 0.94, 0.935, 0.93, 0.924))]
    published = Evidence(published=convergence.published(8))
    assert verdict(slow[:4], TARGET, published, length=END).stop
    envelope = published.published
    assert envelope is not None
    known = replace(published, shown=[shown_by(reference(slow), TARGET, envelope)])
    assert not verdict(slow[:4], TARGET, known, length=END).stop


def test_an_envelope_moves_to_where_the_good_runs_of_a_study_lie() -> None:
    """One that needs 15% more samples lies among the public runs and above most of them."""
    envelope = convergence.published(8)
    assert envelope is not None
    assert envelope.limit(0.05) == envelope.threshold(0.05)
    above = [1.0, 2.0, 1.5, 1.5]
    assert envelope.limit(0.05, above) == pytest.approx(envelope.threshold(0.05) + 1.5 + 0.64, abs=0.01)
    assert envelope.limit(0.05, above) < envelope.limit(0.05, above[:2]) - 0.1 < envelope.limit(0.05, [3.0])
    assert envelope.limit(0.05, [-1.0] * 100) == pytest.approx(envelope.threshold(0.05), abs=0.2), "never stricter"
    assert envelope.limit(0.05, [*[0.0] * 100, 9.0]) == 9.0


def test_good_runs_confirm_an_envelope_when_they_surely_lie_among_its() -> None:
    envelope = convergence.published(8)
    assert envelope is not None
    told = {count: confirms([2.5] * count, envelope) for count in (0, 1, 2, 8)}
    assert told == {0: False, 1: False, 2: False, 8: True}, "one good run may be luck"
    assert confirms([0.5], envelope)
    assert not confirms([3.5] * 100, envelope)


def evals_from(*losses: float) -> list[Eval]:
    return [Eval(1536 + 384.0 * i, v, i) for i, v in enumerate(losses)]


def test_only_a_good_run_that_lay_outside_of_an_envelope_contradicts_it() -> None:
    envelope = convergence.published(8)
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
    envelope = convergence.published(8)
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
    references = (*(ComparedRun(curve=usable(e), length=end) for e in others), *GOOD)
    for evidence in (
        Evidence(finished=references),
        Evidence(published=convergence.published(8), finished=references),
    ):
        found = verdict(evals, TARGET, evidence, length=end)
        assert found.stop == bool(found.sentence)
