"""The tables of a study file that are a few keys each: what runs, how it is searched, pruned and paid for."""

from __future__ import annotations

import tomllib
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from lora_tune.base.registry import SAMPLERS
from lora_tune.config.parameters import Value
from lora_tune.config.problems import Section
from lora_tune.config.secrets import with_secrets_apart

REPLACED = {"portfolio": "auto"}
"""Samplers that are gone, and what they are read as: studies and records of earlier releases name them."""


def _sampler_of_today(name: str) -> str:
    return SAMPLERS.known(REPLACED.get(name, name))


def replaced_in(text: str) -> str:
    """What a study file names that is gone, and what it is read as; "" where it names nothing of the kind."""
    search = tomllib.loads(text).get("search", {})
    name = search.get("sampler")
    if name not in REPLACED:
        return ""
    return f'search.sampler: "{name}" is gone and read as "{REPLACED[name]}"; write that, or remove the line'


class WorkloadTable(BaseModel):
    """What runs. ``kind`` names the workload; the other keys are that workload's own."""

    model_config = ConfigDict(frozen=True, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _secrets_apart(cls, table: Any) -> Any:
        return with_secrets_apart(table) if isinstance(table, dict) else table

    kind: str = Field(description="peft, nemo, bridge, mlperf, mlperf_docker, command or surface")
    stop_at_target: bool | None = Field(
        None,
        description="a trial whose log shows training beyond the target is asked to end (SIGTERM, which the script may "
        "catch); false: it trains to its own end [true; false for MLPerf's submissions]",
    )


class Search(Section):
    """How trials are proposed."""

    sampler: Annotated[str, AfterValidator(_sampler_of_today)] = Field(
        "auto",
        description="who proposes: auto (grey_box where there are layouts, published or ingested runs, else tpe), tpe, "
        "random, requests (only what is asked for), gp, cmaes, grey_box, or one that was added",
    )
    seed: int = Field(0, ge=0, description="seed of the sampler and, with the trial number, of each trial")
    startup_trials: int = Field(5, ge=0, description="random proposals before TPE's model is used")
    full_fine_tuning_lr: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="learning rate at which the base is fine-tuned in full: LoRA's is then expected near ten times it "
        "(a weak belief of grey_box, for studies that no published results are about)",
    )
    probes: bool | None = Field(
        None,
        description="the grey box may propose short runs that end once their layout's speed is measured "
        "[true where trials end such a run by themselves (peft, nemo, bridge, surface) and budget.trials is not given]",
    )
    enqueue: tuple[dict[str, Value], ...] = Field((), description="points tried first, tuned values by name")


class Pruning(Section):
    """When a running trial is stopped."""

    rule: Literal["stall", "none"] = Field("stall", description="stop stalled and diverging eval curves, or nothing")
    false_prune_rate: float = Field(
        0.01,
        gt=0,
        lt=0.5,
        description="share of good runs that may be stopped by error; n references support no less than 1/(n+1)",
    )
    references: int = Field(
        8, ge=3, description="good runs that end before others are compared with them; more support a smaller rate"
    )
    audit: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of condemned trials that go on to their end, so that the sweep measures its own false-prune "
        "rate; left out: 0.05 where the budget allows 50 trials or more, else 0",
    )
    no_verdict_before: float = Field(0, ge=0, description="samples before which nothing is stopped but NaN")
    cap: bool = Field(True, description="stop a run that can no longer beat the best one")
    cap_risk: float = Field(0.01, gt=0, lt=0.5, description="accepted chance that a capped run would have won")


DEFAULT_AUDIT = 0.05
"""Share of condemned trials that go on where trials are cheap."""

CHEAP_TRIALS = 50
"""Trials within the budget from which on one of them is cheap."""


class Budget(Section):
    """Where the sweep ends. At least one of trials, node_hours and wall_hours is needed."""

    trials: int | None = Field(None, ge=1, description="proposals, retries not counted")
    node_hours: float | None = Field(None, gt=0, description="node-hours of all attempts together")
    wall_hours: float | None = Field(None, gt=0, description="hours since the sweep began")
    stop_below: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="end when the next node-hour is expected to improve the score by less than this share "
        "(0.002: 0.2%); needs sampler auto or grey_box, and a limit beside it",
    )
    parallel: int = Field(1, ge=1, description="trials at one time")
    trial_minutes: float = Field(60, gt=0, description="time limit of one trial, start-up included")
    attempts: int = Field(3, ge=1, description="attempts of one trial when the machine fails it")
    price_per_node_hour: float | None = Field(None, ge=0, description="money shown beside node-hours")
