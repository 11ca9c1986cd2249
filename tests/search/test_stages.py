"""The search in stages: designs of probes that separate switches, and what is handed over of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState

from lora_tune.base.errors import StudyError
from lora_tune.config.study import Study, load_study, parse_study
from lora_tune.search.grey_box.sampler import GreyBoxSampler
from lora_tune.search.samplers import make_sampler
from lora_tune.search.session import Session
from lora_tune.search.stages.arithmetic import Arithmetic, ArithmeticChoice, WholeRun
from lora_tune.search.stages.sampler import StagesSampler
from lora_tune.search.stages.screening import Screening, Setting, Switch, SwitchReading
from lora_tune_simulation.h100 import with_switches
from tests.conftest import REPOSITORY

SCATTER = 0.0017
"""Sd of a probe's ln(seconds), as between public runs."""

H100 = REPOSITORY / "studies" / "h100.toml"
FORMER = REPOSITORY / "benchmarks" / "records" / "h100_former.toml"


def switches(count: int, *, precision: tuple[int, ...] = ()) -> tuple[Switch, ...]:
    """Switches of two levels, every fifth of three."""
    levels = [(0, 1, 2) if at % 5 == 4 else (0, 1) for at in range(count)]
    return tuple(Switch(name=f"S{at}", levels=known, precision=at in precision) for at, known in enumerate(levels))


def played(
    known: tuple[Switch, ...], seconds: Callable[[Setting], float], seed: int = 0, dead: tuple[int, int] | None = None
) -> Screening:
    """A whole screening against a truth in ln(seconds), until no probe is expected to gain 0.02%."""
    rng = np.random.default_rng(seed)

    def probe(setting: Setting) -> SwitchReading:
        if dead is not None and setting[dead[0]] == dead[1]:
            return SwitchReading(setting=setting, dead=True)
        return SwitchReading(setting=setting, ln_seconds=seconds(setting) + SCATTER * rng.normal())

    screening = Screening(switches=known)
    screening = replace(screening, readings=(probe(screening.base), probe(screening.base)))
    for _ in range(60):
        screening = screening.fitted()
        if not screening.screened:
            setting = screening.most_informative(rng)
        else:
            setting, gain = screening.most_promising(rng)
            if gain < 2e-4:
                return screening
        screening = replace(screening, readings=(*screening.readings, probe(setting)))
    raise AssertionError("the screening did not end within 60 probes")


def additive(effects: dict[tuple[int, int], float]) -> Callable[[Setting], float]:
    """ln(seconds) that are a sum over switches."""
    return lambda setting: 7.3 + sum(effects.get(pair, 0.0) for pair in enumerate(setting))


def test_as_many_probes_as_levels_separate_every_switch_better_than_one_at_a_time_would() -> None:
    screening, rng = Screening(switches=switches(10)), np.random.default_rng(1)
    screening = replace(screening, readings=(SwitchReading(setting=screening.base, ln_seconds=7.3),))
    while not screening.screened:
        setting = screening.most_informative(rng)
        screening = replace(screening, readings=(*screening.readings, SwitchReading(setting=setting, ln_seconds=7.3)))
    design = np.array([[r.setting[at] == level for at, level in screening.levels] for r in screening.readings])
    x = np.column_stack([np.ones(len(design)), design])
    assert len(design) <= screening.probes_needed + 1
    assert np.linalg.matrix_rank(x) == x.shape[1]
    variances = np.diag(np.linalg.inv(x.T @ x))[1:]
    assert np.median(variances) < 0.75  # 2: each level once alone beside one base; 1 + 1/n: beside a base without error


def test_effects_are_recovered_with_errors_that_hold_them() -> None:
    rng, known = np.random.default_rng(3), switches(12)
    truth = {pair: float(rng.uniform(-0.06, 0.06)) for pair in Screening(switches=known).levels}
    screening = played(known, additive(truth))
    effects = {p: screening.compared(screening._with(screening.base, *p), screening.base) for p in truth}
    off = [(mean - truth[pair]) / sd for pair, (mean, sd) in effects.items()]
    assert max(map(abs, off)) < 4
    assert float(np.sqrt(np.mean(np.square(off)))) < 2
    assert SCATTER / 3 < screening.scales.scatter < 3 * SCATTER  # learned, of repeats and of what the effects leave


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_leader_has_nearly_all_that_switches_can_win_though_some_interact(seed: int) -> None:
    rng, known = np.random.default_rng(seed), switches(9)
    levels = Screening(switches=known).levels
    truth = {pair: float(rng.uniform(-0.06, 0.06)) for pair in levels}
    first, second = (levels[i] for i in rng.choice(len(levels), 2, replace=False))
    together = float(rng.normal(0, 0.012)) if first[0] != second[0] else 0.0
    alone = additive(truth)

    def seconds(setting: Setting) -> float:
        both = setting[first[0]] == first[1] and setting[second[0]] == second[1]
        return alone(setting) + (together if both else 0.0)

    screening = played(known, seconds, seed)
    best = min(map(seconds, np.ndindex(*(len(s.levels) for s in known))))
    assert seconds(screening.leader()) - best < 0.004


@pytest.mark.parametrize("dead", [(0, 1), (4, 2), (7, 1)])
def test_a_level_that_does_not_run_is_learned_of_few_deaths_and_left_out(dead: tuple[int, int]) -> None:
    rng, known = np.random.default_rng(5), switches(10)
    truth = {pair: float(rng.uniform(-0.06, 0.06)) for pair in Screening(switches=known).levels}
    truth[dead] = -0.2
    screening = played(known, additive(truth), dead=dead)
    assert screening.dead == {dead}
    assert sum(r.dead for r in screening.readings) <= 3
    assert screening.leader()[dead[0]] != dead[1]


def test_a_base_that_does_not_run_is_no_switchs_fault() -> None:
    screening = Screening(switches=switches(4))
    screening = replace(screening, readings=(SwitchReading(setting=screening.base, dead=True),))
    assert not screening.dead
    assert screening.lives((1, 1, 0, 0)) > 0.8


def test_two_levels_that_do_not_go_together_are_not_run_together_again_and_are_both_kept() -> None:
    screening = Screening(switches=switches(3))
    alone = [SwitchReading(setting=s, ln_seconds=7.3) for s in ((0, 0, 0), (1, 0, 0), (0, 1, 0))]
    screening = replace(screening, readings=(*alone, SwitchReading(setting=(1, 1, 0), dead=True)))
    assert not screening.dead
    assert screening.lives((1, 1, 1)) == 0
    assert screening.lives((1, 0, 0)) == screening.lives((0, 1, 0)) == 1


# -- switches that change arithmetic

REFERENCE = math.log(2990)
FASTER = ArithmeticChoice(changes=frozenset({0}), ln_seconds=-0.04)
UNCHANGED = ArithmeticChoice(changes=frozenset(), ln_seconds=0.0)


def runs(*ln_samples: float, changes: frozenset[int] = FASTER.changes) -> tuple[WholeRun, ...]:
    """Whole runs of an arithmetic that needed so many samples more than the reference, in ln."""
    return tuple(WholeRun(changes=changes, ln_samples=REFERENCE + more, sd=0.06) for more in ln_samples)


def decision(*known: WholeRun) -> Arithmetic:
    return Arithmetic(options=(UNCHANGED, FASTER), runs=known, expected=REFERENCE, reference=REFERENCE)


def test_another_arithmetic_is_never_decided_for_before_a_run_has_reached_the_target_with_it() -> None:
    base = runs(0.0, 0.01, changes=UNCHANGED.changes)
    assert decision(*base).decided() == UNCHANGED
    missed = WholeRun(changes=FASTER.changes, ln_samples=REFERENCE, missed=True)
    running = WholeRun(changes=FASTER.changes)
    assert decision(*base, running).decided() == UNCHANGED
    assert decision(*base, missed, running).decided() == UNCHANGED


def test_one_lucky_run_keeps_no_arithmetic_two_runs_may() -> None:
    base = runs(0.02, 0.03, 0.02, changes=UNCHANGED.changes)
    far = ArithmeticChoice(changes=FASTER.changes, ln_seconds=-0.2)
    for known, kept in ((runs(-0.1), UNCHANGED), (runs(-0.1, 0.0), far)):
        of_all = Arithmetic(options=(UNCHANGED, far), runs=(*base, *known), expected=REFERENCE, reference=REFERENCE)
        assert of_all.decided() == kept
        of_all.next_run()
        assert of_all.decided() == kept  # asking what to run next changes nothing


def test_runs_decide_by_what_it_costs_in_samples_beside_what_it_saves() -> None:
    base = runs(0.0, 0.01, changes=UNCHANGED.changes)
    assert decision(*base, *runs(-0.02, 0.01, 0.0)).decided() == FASTER
    assert decision(*base, *runs(0.15, 0.12, 0.14)).decided() == UNCHANGED


def test_what_costs_samples_is_told_from_what_runs_beside_it_does_not() -> None:
    both, dear, cheap = frozenset({0, 1}), frozenset({0}), frozenset({1})
    options = (UNCHANGED, *(ArithmeticChoice(changes=c, ln_seconds=-0.04 * len(c)) for c in (dear, cheap, both)))
    known = (
        *runs(0.0, 0.02, changes=UNCHANGED.changes),
        *runs(0.15, 0.16, changes=both),
        *runs(0.0, 0.0, changes=cheap),
    )
    decided = Arithmetic(options=options, runs=known, expected=REFERENCE, reference=REFERENCE).decided()
    assert decided.changes == cheap


def test_fewer_samples_than_the_bases_are_luck_and_no_reason_for_another_arithmetic() -> None:
    slower = ArithmeticChoice(changes=frozenset({0}), ln_seconds=0.002)
    base = runs(0.1, 0.12, 0.1, changes=UNCHANGED.changes)
    known = Arithmetic(
        options=(UNCHANGED, slower), runs=(*base, *runs(0.0, 0.01, 0.0)), expected=REFERENCE, reference=REFERENCE
    )
    assert known.decided() == UNCHANGED


def test_beside_a_pair_of_runs_under_way_another_is_worth_less_so_that_slots_try_different_things() -> None:
    two = (UNCHANGED, FASTER, ArithmeticChoice(changes=frozenset({1}), ln_seconds=-0.038))
    known = Arithmetic(options=two, runs=(), expected=REFERENCE, reference=REFERENCE)
    first, _ = known.next_run()
    pair = replace(known, runs=2 * (WholeRun(changes=first.changes),))
    second, _ = pair.next_run()
    assert first.changes != second.changes


def test_samples_below_the_reference_cost_nothing_since_the_score_takes_them_back() -> None:
    base = runs(-0.2, -0.19, -0.2, changes=UNCHANGED.changes)
    assert decision(*base, *runs(-0.1, -0.11, -0.1)).decided() == FASTER


def test_a_run_is_worth_most_where_it_may_change_the_decision() -> None:
    option, gain = decision(*runs(0.0, changes=UNCHANGED.changes)).next_run()
    assert option == FASTER
    assert gain > 0.005
    _, later = decision(*runs(0.0, changes=UNCHANGED.changes), *runs(*[0.0] * 12)).next_run()
    assert later < gain / 10


# -- studies

SWITCHED = """
[workload]
kind = "surface"
surface = "h100_switches"
[site]
launcher = "simulated"
system = "SIMH100"
gpus_per_node = 8
[space]
LR = { type = "float", low = 2.5e-4, high = 8e-4, log = true }
MAX_STEPS = { type = "int", low = 500, high = 1100, step = 50 }
layout = { type = "layout", tp = [4, 8], cp = [1, 2], gbs = [8] }
VBOOST_VALUE = { type = "categorical", choices = [1, 0], role = "switch" }
NUM_WORKERS = { type = "categorical", choices = [8, 4, 2], role = "switch" }
FP8_ACT = { type = "categorical", choices = [0, 1], role = "precision" }
[objective]
target = 0.925
score = "mlperf_score"
curves = "llama2_70b_lora"
[search]
seed = 1
enqueue = [{ LR = 4e-4, MAX_STEPS = 800, layout = "tp4 pp1 cp1 minibs4 mbs1" }]
[budget]
node_hours = 8
trial_minutes = 60
"""


def switched(*changes: tuple[str, str]) -> Study:
    text = f'division = "closed"\n{SWITCHED}'
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return parse_study(text, Path("switched.toml"))


def search(study: Study) -> optuna.Study:
    """An Optuna study whose first trial, the published point, has reached the target."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    made = optuna.create_study(sampler=make_sampler(study))
    made.enqueue_trial(dict(study.search.enqueue[0]))
    return made


def run(made: optuna.Study, study: Study, site: int = 1) -> optuna.trial.FrozenTrial:
    """The next trial as a simulated site would end it."""
    trial = made.ask(study.search_space.distributions())
    outcome = with_switches.variant(site).outcome(study.search_space.resolve(trial.params), trial.number)
    facts = {"samples_per_second": outcome.samples_per_second, "seconds_per_eval": outcome.seconds_per_eval}
    died = outcome.end == "oom"
    for name, value in ({"verdict": "failed"} if died else facts | {"node_hours": 0.1}).items():
        trial.set_user_attr(name, value)
    whole = trial.user_attrs.get("kind") != "probe"
    if whole and outcome.end == "success":
        for samples, loss, _ in outcome.evals:
            trial.report(loss, int(samples))
        facts = {"stop_samples": outcome.evals[-1][0], "verdict": "reached", "node_hours": 0.45}
        for name, value in facts.items():
            trial.set_user_attr(name, value)
        made.tell(trial, outcome.end_seconds)
    else:
        made.tell(trial, state=TrialState.FAIL if died else TrialState.PRUNED)
    return made.get_trials(deepcopy=False)[-1]


def test_the_published_point_is_run_whole_then_probes_change_several_switches_on_its_layout() -> None:
    study = switched()
    made = search(study)
    first, *probes = [run(made, study) for _ in range(6)]
    assert first.user_attrs["kind"] == "full"
    assert (first.params["VBOOST_VALUE"], first.params["NUM_WORKERS"], first.params["FP8_ACT"]) == (1, 8, 0)
    assert {p.user_attrs["kind"] for p in probes} == {"probe"}
    assert {(p.params["layout"], p.params["LR"], p.params["MAX_STEPS"]) for p in probes} == {
        (first.params["layout"], 4e-4, 800)
    }
    tried = {(n, p.params[n]) for p in probes for n in study.search_space.switches()}
    assert tried >= {("VBOOST_VALUE", 0), ("NUM_WORKERS", 4), ("NUM_WORKERS", 2), ("FP8_ACT", 1)}
    assert "the base again, for the scatter of probes" in probes[0].user_attrs["why"]
    assert any(p.user_attrs["why"].count("=") > 1 for p in probes)


def test_what_is_not_run_since_it_must_fail_is_not_proposed_for_ever() -> None:
    """Proposals follow from the trials alone, so a discarded one must leave something in them."""
    session = Session(switched())
    proposals = []
    for _ in range(6):
        asked = session.ask()
        assert not isinstance(asked, str)
        proposals.append((tuple(sorted(asked.tuned.items())), asked.probe))
        session.discard(asked.number)
    assert len(set(proposals)) > 2


def test_arithmetic_is_recommended_only_once_a_whole_run_has_confirmed_it() -> None:
    study = switched()
    made = search(study)
    sampler = made.sampler
    assert isinstance(sampler, StagesSampler)
    confirmed = False
    for _ in range(24):
        last = run(made, study)
        confirmed |= last.params["FP8_ACT"] == 1 and last.state is TrialState.COMPLETE
        assert confirmed or sampler.recommend(made)[0]["FP8_ACT"] == 0
    assert confirmed


def test_once_each_level_was_in_a_probe_further_ones_are_weighed_against_whole_runs_by_the_node_hour() -> None:
    study = switched()
    made = search(study)
    sampler, further = made.sampler, 0
    assert isinstance(sampler, StagesSampler)
    for _ in range(24):
        gain = sampler.expected_gain(made)
        if "may be faster yet" in run(made, study).user_attrs.get("why", ""):
            further += 1
            assert gain is not None
            assert 0.0019 < gain < 1
    assert further


def test_what_is_handed_over_has_run_as_a_whole_and_is_faster_than_the_base() -> None:
    study = switched(("node_hours = 8", "node_hours = 8\nstop_below = 0.002"))
    made = search(study)
    sampler, gain = made.sampler, None
    assert isinstance(sampler, StagesSampler)
    while gain is None or gain >= 0.002:
        run(made, study)
        gain = sampler.expected_gain(made)
        assert len(made.trials) < 60
    values, seconds, words = sampler.recommend(made)
    whole = [t for t in made.trials if t.params == values and t.state is TrialState.COMPLETE]
    assert whole
    truth, space = with_switches.variant(1), study.search_space
    assert truth.expected_score(space.resolve(values)) < truth.expected_score(space.resolve(made.trials[0].params))
    assert "of the base's time" in words
    assert seconds > 0


def test_a_study_without_switches_is_what_it_was() -> None:
    former = parse_study(FORMER.read_text(encoding="utf-8"), H100)
    assert former.digest == "6bc7dd3d1387"
    assert former.search_space.switches() == {}
    assert type(make_sampler(former)) is GreyBoxSampler


def test_the_shipped_study_searches_in_stages() -> None:
    study = load_study(H100)
    assert isinstance(make_sampler(study), StagesSampler)
    changes = study.search_space.switches()
    assert not changes["VBOOST_VALUE"]
    assert changes["FP8_DPA"]


def test_no_probes_no_stages() -> None:
    assert type(make_sampler(switched(("seed = 1", "seed = 1\nprobes = false")))) is GreyBoxSampler


@pytest.mark.parametrize(
    "parameter",
    ['{ type = "int", low = 1, high = 4, role = "switch" }',
     '{ type = "categorical", choices = [0, 1], role = "precision", when = { VBOOST_VALUE = [1] } }'],
)  # fmt: skip
def test_a_switch_is_a_choice_that_always_exists(parameter: str) -> None:
    with pytest.raises(StudyError, match="is for choices that always exist"):
        switched(('{ type = "categorical", choices = [0, 1], role = "precision" }', parameter))
