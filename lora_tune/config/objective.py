"""The objective section of a study file, and its checks."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator

from lora_tune.base.errors import InputError, StudyError
from lora_tune.base.registry import OBJECTIVES, WORKLOADS
from lora_tune.config.problems import Section
from lora_tune.config.tables import WorkloadTable


def _known_objective(name: str | None) -> str | None:
    return None if name is None else OBJECTIVES.known(name)


class ObjectiveSettings(Section):
    """What trials are compared by."""

    benchmark: str | None = Field(
        None,
        description="MLPerf benchmark whose target, rules, runs and score apply; else the workload's own",
    )
    ruleset: str | None = Field(
        None,
        description='round of MLPerf\'s rules, such as "6.1"; what the launch script sets MLPERF_RULESET to, else the '
        "newest installed that has the benchmark",
    )
    metric: str | None = Field(
        None,
        min_length=1,
        description="name of the metric in the log; without a target its best value counts "
        '(`score = "best_value"`); left out: the eval loss',
    )
    target: float | None = Field(
        None,
        description="value of the metric to reach; the benchmark's where one is named, 0.925 for the workloads that "
        "are MLPerf's LoRA; best_value and final_value have none",
    )
    direction: Literal["minimize", "maximize"] = Field(
        "minimize",
        description="maximize: more is better, as of an accuracy; the benchmark's where one is named",
    )
    score: Annotated[str, AfterValidator(OBJECTIVES.known)] = Field(
        "time_to_target",
        description="time_to_target: seconds; mlperf_score: the same after RCP normalisation; throughput: samples/s; "
        "best_value, final_value: of the metric, within the budget below; node_hours: the cost of reaching the target",
    )
    within_steps: float | None = Field(None, gt=0, description="steps after which no eval counts, and a trial ends")
    within_samples: float | None = Field(None, gt=0, description="the same in samples")
    within_seconds: float | None = Field(None, gt=0, description="the same in seconds since the run began")
    second: Annotated[str | None, AfterValidator(_known_objective)] = Field(
        None,
        description="a score that is weighed against the first, such as node_hours: the search looks for the Pareto "
        "front of both",
    )
    estimator: Literal["stop", "curve"] = Field(
        "stop", description="time of the first eval at the target, or where the fitted curve crosses it"
    )
    curves: Literal["own", "llama2_70b_lora"] = Field(
        "own", description="what a good curve looks like: this study's own runs, or the public MLPerf runs"
    )

    @field_validator("benchmark")
    @classmethod
    def _known_benchmark(cls, name: str | None) -> str | None:
        from lora_tune.mlperf.benchmark import check_name

        return None if name is None else check_name(name)

    @property
    def within(self) -> tuple[tuple[float, str], ...]:
        """The limits that are set, each with its unit."""
        limits = ((self.within_steps, "steps"), (self.within_samples, "samples"), (self.within_seconds, "s"))
        return tuple((limit, unit) for limit, unit in limits if limit is not None)


LORA_TARGET = 0.925
"""The target of MLPerf's LoRA benchmark; default for workloads that run it. Other scripts must state a target."""


def filled_in(objective: Mapping[str, Any], workload: object) -> dict[str, Any]:
    """The section with the named benchmark's target if none is stated, and the score of a metric without target.

    Raises ValueError, which pydantic expects, for an unknown benchmark.
    """
    filled = dict(objective)
    name = filled.get("benchmark") or (workload.get("benchmark") if isinstance(workload, dict) else None)
    if name is not None and not {"target", "direction"} <= filled.keys():
        filled = {**_benchmark_goal(str(name), ruleset_of(filled.get("ruleset"), workload, str(name))), **filled}
    elif filled.get("target") is None and "score" not in filled and "metric" in filled:
        filled["score"] = "best_value"
    score = str(filled.get("score", "time_to_target"))
    if filled.get("target") is None and _wants_target(score) and not _has_no_target(score, workload):
        filled["target"] = LORA_TARGET
    return filled


def _has_no_target(score: str, workload: object) -> bool:
    """Whether a script without a default goal is scored by something else than a target, such as throughput.

    Such a study gets no default target.
    """
    try:
        kind = WORKLOADS.load(str(workload.get("kind"))) if isinstance(workload, dict) else None
        return getattr(kind, "needs_goal", False) and not getattr(OBJECTIVES.load(score), "has_target", True)
    except InputError:
        return False


def check_goal(text: str, path: Path) -> None:
    """Raise StudyError for a user's script without a goal, because no default target applies to it."""
    try:
        table = tomllib.loads(text.removeprefix("\ufeff"))
        workload, objective = table.get("workload", {}), table.get("objective", {})
        needs_goal = getattr(WORKLOADS.load(str(workload.get("kind"))), "needs_goal", False)
    except (tomllib.TOMLDecodeError, InputError, AttributeError):
        return  # reported by parse_study
    if not needs_goal or objective.keys() & {"target", "metric", "benchmark"} or "benchmark" in workload:
        return
    if "score" in objective and not _wants_target(str(objective["score"])):
        return
    if objective.get("score") == "throughput":
        return
    raise StudyError(
        path,
        "objective",
        "a script of your own has no target that could be known; add under [objective] one of the two lines: "
        'target = 0.5 (the eval loss to reach; trials are compared by the time to it), or metric = "eval_loss" '
        '(its lowest value counts; with direction = "maximize" its highest)',
    )


def _wants_target(score: str) -> bool:
    """Whether a score uses a target; False for an unknown name, which is reported elsewhere."""
    try:
        return not getattr(OBJECTIVES.load(score), "has_budget", False)
    except InputError:
        return False


def ruleset_of(stated: str | None, workload: object, benchmark: str) -> str | None:
    """The round whose rules apply to ``benchmark``: ``stated`` in the study, else the one that its scripts set.

    workload: the study's table, validated or not. None (the newest) if neither states one, or there are no scripts.
    """
    if stated is not None:
        return stated
    try:
        table = WorkloadTable.model_validate(workload)
        of_scripts = getattr(WORKLOADS.load(table.kind), "stated_ruleset", None)
    except (ValidationError, InputError):
        return None  # reported by parse_study
    return of_scripts(table, benchmark) if of_scripts else None


def _benchmark_goal(name: str, ruleset: str | None) -> dict[str, Any]:
    """Target and direction of an MLPerf benchmark. Raises ValueError for an unknown one."""
    from lora_tune.mlperf.benchmark import find_benchmark
    from lora_tune.mlperf.rules import reaching

    try:
        metric = find_benchmark(name, ruleset).metrics[0]
    except InputError as error:
        raise ValueError(f"objective.benchmark: {error}") from error
    return {"target": reaching(metric), "direction": metric.direction}
