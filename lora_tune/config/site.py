"""Where trials run: what differs between clusters, and nothing of what is tuned."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator

from lora_tune.base.host import hostnames
from lora_tune.base.registry import LAUNCHERS
from lora_tune.base.sbatch_options import sbatch_options
from lora_tune.config.problems import numbers_are_numbers
from lora_tune.config.secrets import Variables


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
        """These become lines of a batch file, where a line end begins a command."""
        for text in (value,) if isinstance(value, str) else value or ():
            if not text.isprintable():
                raise ValueError(f"{text!r} holds line ends or control characters; write it on one line")
        return value

    @field_validator("sbatch_args")
    @classmethod
    def _without_a_comment(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """The comment of a job is the token by which a sweep finds it again."""
        for option in sbatch_options(value):
            if option.name == "comment":
                raise ValueError(f"{option.text} replaces the comment by which a sweep knows its jobs; remove it")
        return value

    def step_variables(self) -> dict[str, str]:
        """What ``srun`` reads: the site's differences reach every step of a script that knows nothing of them."""
        variables = {"SLURM_GRES": self.gres, "SLURM_MPI_TYPE": self.mpi, "SLURM_CPU_BIND": self.cpu_bind}
        return {name: value for name, value in variables.items() if value}

    def sbatch_words(self, nodes: int) -> tuple[str, ...]:
        """What ``sbatch`` needs on this cluster, as options for somebody who types the line for ``nodes`` nodes.

        Of a longer node list the first ones are named: sbatch would demand all of them.
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
