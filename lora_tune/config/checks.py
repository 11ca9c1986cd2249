"""What a study must hold beyond each of its tables: the checks that need more than one of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from lora_tune.base.errors import StudyError
from lora_tune.base.registry import SAMPLERS
from lora_tune.config.objective import check_objective
from lora_tune.config.parameters import FormulaError, Value
from lora_tune.config.space import SpaceError, check_space

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

    from lora_tune.config.study import Study
    from lora_tune.mlperf.gate import Violation


def check_whole(study: Study, path: Path) -> None:
    """The checks that need more than one section."""
    space = study.search_space
    try:
        check_space(space)
    except SpaceError as error:
        raise StudyError(path, f"space.{error.key}", str(error)) from error
    budget = study.budget
    if budget.trials is None and budget.node_hours is None and budget.wall_hours is None:
        raise StudyError(path, "budget", "no end: give at least one of trials, node_hours and wall_hours")
    try:
        violations = closed_violations(study)
    except FormulaError as error:  # at an end of what is tuned; the space's own check computes one point
        raise StudyError(path, f"space.{error.name}", str(error)) from error
    for violation in violations:
        if violation.fatal:
            raise StudyError(path, f"space.{violation.name}", violation.sentence)
    check_objective(study, path)
    if study.objective.score == "mlperf_score" and study.benchmark is None:
        raise StudyError(path, "objective.score", "mlperf_score needs objective.benchmark beside it")
    _check_search(study, path)


def _check_search(study: Study, path: Path) -> None:
    """What the search needs of the other sections."""
    space, budget = study.search_space, study.budget
    sampler = SAMPLERS.load(study.search.sampler)
    if budget.stop_below is not None and not getattr(sampler, "knows_gain", False):
        problem = 'needs search.sampler = "auto" or "grey_box": this sampler does not know its expected gain'
        raise StudyError(path, "budget.stop_below", problem)
    auto = study.search.sampler == "auto"
    if budget.stop_below is not None and auto and space.varies_nodes and study.objective.score != "throughput":
        problem = "no search for a time knows its expected gain where NODES varies; remove it, or tune one size"
        raise StudyError(path, "budget.stop_below", problem)
    if study.search.probes and not getattr(sampler, "proposes_probes", False):
        problem = 'needs search.sampler = "auto" or "grey_box": this sampler does not propose them'
        raise StudyError(path, "search.probes", problem)
    _check_stated_rate(study, path)
    models = getattr(sampler, "objectives", None)
    if models is not None and (study.objective.score not in models or study.objective.second is not None):
        problem = f"{study.search.sampler} models {', '.join(models)} alone; use tpe"
        raise StudyError(path, "search.sampler", problem)
    if space.varies_nodes and not getattr(sampler, "several_node_counts", True):
        problem = f"{study.search.sampler} models trials of one size, and NODES varies here; use tpe"
        raise StudyError(path, "search.sampler", problem)
    tuned, conditions = space.distributions(), space.conditions
    for index, point in enumerate(study.search.enqueue):
        absent = conditions.absent(point)
        for key, value in point.items():
            if key not in tuned:
                raise StudyError(
                    path, f"search.enqueue.{index}.{key}", f"is not tuned; tuned are {', '.join(sorted(tuned))}"
                )
            if not within(tuned[key], value):
                raise StudyError(path, f"search.enqueue.{index}.{key}", f"{value!r} is not {range_words(tuned[key])}")
            if key in absent:
                problem = f"exists only where {conditions.words(key)}; remove it from this point"
                raise StudyError(path, f"search.enqueue.{index}.{key}", problem)


def _check_stated_rate(study: Study, path: Path) -> None:
    """That a stated rate of full fine-tuning has an effect: on a rate that is tuned, where nothing better is known."""
    problem = ""
    if study.search.full_fine_tuning_lr is None:
        return
    if study.benchmark is not None or study.objective.curves == "llama2_70b_lora":
        problem = "the search starts from published results here; remove it"
    elif not {name.upper() for name in study.search_space.distributions()} & {"LR", "LEARNING_RATE"}:
        problem = "no LR or LEARNING_RATE is tuned; remove it, or tune one"
    elif not getattr(SAMPLERS.load(study.search.sampler), "proposes_probes", False):
        problem = 'needs search.sampler = "auto" or "grey_box": this sampler has no use for it'
    if problem:
        raise StudyError(path, "search.full_fine_tuning_lr", problem)


def range_words(distribution: BaseDistribution) -> str:
    """What a distribution can propose, for people."""
    if choices := getattr(distribution, "choices", None):
        return f"one of {', '.join(map(repr, choices))}"
    low, high = getattr(distribution, "low", -math.inf), getattr(distribution, "high", math.inf)
    step = getattr(distribution, "step", None)
    return f"within {low:g} to {high:g}" + (f" in steps of {step:g}" if step not in (None, 1) else "")


def within(distribution: BaseDistribution, value: Value) -> bool:
    """Whether a distribution can propose ``value``."""
    from optuna.trial import create_trial

    try:
        create_trial(value=0.0, params={"x": value}, distributions={"x": distribution})
    except (ValueError, OverflowError):  # the second: an integer that no float holds
        return False
    return True


def closed_violations(study: Study) -> list[Violation]:
    """What the study breaks of MLPerf's closed division, where it says that it keeps it; warnings among them."""
    benchmark = study.benchmark
    if study.division == "open" or benchmark is None:
        return []
    from lora_tune.mlperf.gate import check_space

    space = study.search_space
    ends = {name: _ends(d) for name, d in space.distributions().items()}
    return check_space(benchmark, ends, space.each_layout(), space.following(ends), space.each_end(ends))


def _ends(distribution: BaseDistribution) -> tuple[Value, ...]:
    """The lowest and the highest value that a distribution proposes, or its choices."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(distribution, CategoricalDistribution):
        return tuple(distribution.choices)  # type: ignore[arg-type]  # studies hold no None
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    return distribution.low, distribution.high
