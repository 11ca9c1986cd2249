"""The small tables of a study file: workload, search, pruning, budget, site."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from lora_tune.base.host import hostnames
from lora_tune.base.registry import LAUNCHERS, SAMPLERS
from lora_tune.config.parameters import Value
from lora_tune.config.problems import Section, numbers_are_numbers
from lora_tune.config.secrets import Variables, with_secrets_apart

REPLACED = {"portfolio": "auto"}
"""Removed samplers -> their replacements, for studies and records of earlier releases."""


def _sampler_of_today(name: str) -> str:
    return SAMPLERS.known(REPLACED.get(name, name))


def replaced_in(text: str) -> str:
    """A warning if a study file names a removed sampler; "" if not."""
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
        description="who proposes: auto (grey_box where there are layouts, published or ingested runs, gp for the "
        "lowest loss, else tpe), tpe, random, requests (only what is asked for), gp, cmaes, grey_box, or one that was "
        "added",
    )
    seed: int = Field(0, ge=0, description="seed of the sampler and, with the trial number, of each trial")
    startup_trials: int = Field(5, ge=0, description="random proposals before a model is used")
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
    enqueue: tuple[dict[str, Value], ...] = Field(
        (), description="points tried first, tuned values by name; a layout may state gbs8 in place of its MINIBS"
    )


class Pruning(Section):
    """When a running trial is stopped."""

    rule: Literal["stall", "none"] = Field("stall", description="stop stalled and diverging eval curves, or nothing")
    false_prune_rate: float = Field(
        0.01,
        gt=0,
        lt=0.5,
        description="share of runs that would have become the best that may be stopped; n references support no less "
        "than 1/(n+1)",
    )
    references: int = Field(
        3,
        ge=3,
        description="best finished runs that others are compared with, once one more has ended; more support a "
        "smaller rate, fewer stop more",
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
"""Default share of condemned trials that continue to their end, if trials are cheap."""

CHEAP_TRIALS = 50
"""Number of trials in the budget from which on trials are cheap."""


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


# The site: differences between clusters, nothing that is tuned.


class Site(Variables):
    """A site profile: the launcher, the shape of a node, and what this cluster's ``sbatch`` and ``srun`` need.

    A study holds it inline under ``[site]``, or names a profile file and overrides parts of it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    _numbers = field_validator("*", mode="before")(numbers_are_numbers)

    profile: str | None = Field(None, description="TOML file with these keys, relative to the study file")
    launcher: Annotated[str, AfterValidator(LAUNCHERS.known)] = Field(
        "local", description="who starts jobs: local, slurm, simulated, outside (ask and tell), or one that was added"
    )
    system: str = Field("LOCAL", pattern=r"^[A-Za-z0-9_-]+$", description="system name in exported file names")
    nodes: int = Field(1, ge=1, description="nodes of one trial")
    gpus_per_node: int = Field(
        0,
        ge=0,
        description="GPUs of one node; 0: CPU only [own scripts on this machine: one each]",
    )
    partition: str | None = Field(None, description="sbatch --partition")
    account: str | None = Field(None, description="sbatch --account")
    reservation: str | None = Field(None, description="sbatch --reservation")
    qos: str | None = Field(None, description="sbatch --qos")
    nodelist: str | None = Field(None, description="sbatch --nodelist: only these nodes")
    exclude: str | None = Field(None, description="sbatch --exclude: never these nodes")
    gres: str | None = Field(
        None, description="GPU resources of each step (SLURM_GRES), e.g. gpu:8; none: the cluster knows no GPUs"
    )
    mpi: str | None = Field(None, description="MPI start-up of each step (SLURM_MPI_TYPE), e.g. pmi2, pmix")
    cpu_bind: str | None = Field(None, description="CPU binding of each step (SLURM_CPU_BIND), e.g. none")
    container: str | None = Field(None, description="container image (CONT): a .sqsh file or an image name")
    container_mounts: tuple[str, ...] = Field((), description="further host:container mounts")
    data: Path | None = Field(None, description="prepared data (DATADIR)")
    model: Path | None = Field(None, description="model folder (MODEL)")
    log_folder: Path | None = Field(None, description="where jobs may write logs; must be visible from the nodes")
    slots: int | Literal["auto"] | None = Field(
        None,
        description='trials that share one job and one GPU (workload "peft", docs/trainers.md); "auto": as many as its '
        "memory holds",
    )
    packs: int = Field(
        1,
        ge=1,
        description="jobs that trials share (slots): packs in one, each on one GPU (docs/trainers.md)",
    )
    python: str | None = Field(None, description="interpreter of the trials; this one when absent")
    sbatch_args: tuple[str, ...] = Field((), description="further sbatch options, one string each")
    queue_minutes: float = Field(24 * 60, gt=0, description="longest wait in the queue before the job is given up")
    stall_minutes: float = Field(20, gt=0, description="longest silence of a running job's log")
    kill_seconds: float = Field(60, gt=0, description="wait for a cancelled job before it is killed")

    @field_validator("slots")
    @classmethod
    def _at_least_one(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, int) and value < 1:
            raise ValueError(f'{value} slots; allowed are 1 and more, or "auto"')
        return value

    @field_validator("packs")
    @classmethod
    def _of_slots(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("slots") is None:
            raise ValueError(f"{value} packs a job, and no slots in them; add site.slots, or take site.packs out")
        return value

    @field_validator(
        "partition", "account", "reservation", "qos", "nodelist", "exclude", "gres", "mpi", "cpu_bind", "container",
        "container_mounts", "python", "sbatch_args",
    )  # fmt: skip
    @classmethod
    def _one_line(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        """Refuse line breaks: these become lines of a batch file, where a new line starts a command."""
        for text in (value,) if isinstance(value, str) else value or ():
            if not text.isprintable():
                raise ValueError(f"{text!r} holds line ends or control characters; write it on one line")
        return value

    def step_variables(self) -> dict[str, str]:
        """Environment variables of ``srun``, which apply to every step without changes to the script."""
        variables = {"SLURM_GRES": self.gres, "SLURM_MPI_TYPE": self.mpi, "SLURM_CPU_BIND": self.cpu_bind}
        return {name: value for name, value in variables.items() if value}

    def sbatch_arguments(self, nodes: int) -> tuple[str, ...]:
        """Options of ``sbatch`` on this cluster, for a command line with ``nodes`` nodes.

        Only the first ``nodes`` of a node list are named, because sbatch would require all of them.
        """
        named = ",".join(itertools.islice(hostnames(self.nodelist or ""), nodes)) or None
        options = {
            "-p": self.partition,
            "-A": self.account,
            "-q": self.qos,
            "--reservation": self.reservation,
            "-w": named,
            "--exclude": self.exclude,
        }
        pairs = [word for option, value in options.items() if value for word in (option, value)]
        return (*pairs, *((f"--gres={self.gres}",) if self.gres else ()), *self.sbatch_args)
