"""The interface between a proposal and something that can be launched.

A workload turns resolved parameters into a :class:`Job`: files to write, a command, an environment. It is pure and
never starts anything. A trial needs neither Optuna nor the database: it only prints a log.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel

from lora_tune.base.errors import Finding, StudyError
from lora_tune.base.paths import SweepPaths
from lora_tune.config.secrets import Secret
from lora_tune.config.study import Study
from lora_tune.config.tables import Site
from lora_tune.logs.lines import LineReader
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import LogReader
from lora_tune.workloads.record import Record

Value = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One trial as the search proposed it, resolved to plain values.

    parameters: every tuned, derived, fixed and layout value under the name that the trial reads
    (``LR``, ``MAX_STEPS``, ``TP``, ``MINIBS``, ...).
    seed: the seed of the first run; replicates (``replicates > 1``) count upwards from it.
    probe: stop after one warm block and one eval, to measure only throughput.
    """

    number: int
    attempt: int
    seed: int
    parameters: Mapping[str, Value]
    replicates: int = 1
    probe: bool = False


def some_proposal(study: Study) -> Proposal:
    """An example trial of the study, to inspect its jobs."""
    space = study.search_space
    return Proposal(number=0, attempt=0, seed=1, parameters=space.resolve(space.corner()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one job occupies. ``minutes`` is the time limit that the scheduler enforces (0: none)."""

    nodes: int = 1
    gpus_per_node: int = 0
    minutes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTerms:
    """How a trial can share a job: a packed trainer trains several trials in one process.

    argv: the trainer's command, to which its folder is appended. knobs: the variables of this trial, which a job of its
    own would read from its environment. company: limit of trials in a pack with this one, including itself; 0: as many
    as fit.
    """

    argv: tuple[str, ...]
    knobs: Mapping[str, str]
    company: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything a launcher needs; built without side effects.

    name: ``<study>-<trial>-<attempt>``, unique among all jobs of a study.
    folder: the attempt's own folder; ``files`` are relative to it and written before submission.
    argv: the command; with ``script=True`` it is an sbatch script and its arguments, submitted unchanged.
    environment: variables added for this job (all strings).
    secrets: names of further variables, whose values launchers read on submission and never write to a file.
    log: the file with the job's output.
    token: id of the attempt, and sweep: id of the sweep; the launcher writes both into its records. "" for none.
    contained: run the command in the site's container if there is one; False: the command starts its own.
    run_logs: the output files of the runs in a job of several runs, oldest first; () otherwise.
    slot: how it can share a job with other trials; None if it cannot.
    """

    name: str
    folder: Path
    token: str = ""
    sweep: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    cwd: Path | None = None
    log: Path
    run_logs: tuple[Path, ...] = ()
    resources: Resources = Resources()
    script: bool = False
    contained: bool = True
    exclude_nodes: tuple[str, ...] = ()
    slot: SlotTerms | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """An exported configuration: file name -> text, and the command line that runs it."""

    files: Mapping[str, str]
    usage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The user's present configuration, which trial 0 measures unchanged.

    name: the user's name for it. parameters: its values in the study's names, as in the trial's proposal.
    tuned: the same as a point of the study's space; None if it is not one, for the reason in ``outside``.
    inherited: its values that every other trial also has by default; without a batch that follows from tuned values.
    values: every variable that its files set, as recorded by a sweep, because a file may change during it.
    """

    name: str
    parameters: Mapping[str, Value]
    inherited: Mapping[str, Value] = field(default_factory=dict)
    tuned: Mapping[str, Value] | None = None
    outside: str = ""
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def why(self) -> str:
        """The reason for proposing it."""
        apart = f"; it is not a point of the study's space ({self.outside}), so the search learns nothing of it"
        return f"{self.name} as it stands: what all others are compared with{apart if self.outside else ''}"


PYXIS = "pyxis"
"""Slurm's plugin that starts containers."""

LAUNCH = "sbatch and the launch script"
BY_THE_SITE = frozenset({"DGXSYSTEM", "DGXNNODES", "DGXNGPU", "WALLTIME", "WALLTIME_RUNANDTIME"})
"""Variables that launch scripts and sbatch read, not the training."""


class Workload(ABC):
    """One kind of trial program, constructed from a validated study and its ``Settings``; see ``workloads.load``.

    Subclasses implement ``job``, ``reader`` and ``export``. The other methods default to a program of which nothing
    more is known. Methods that read its files raise SetupError if these are unreadable.
    """

    Settings: ClassVar[type[BaseModel]]
    needs_goal: ClassVar[bool] = False
    """Whether its study must state a target or a metric."""
    ends_probes: ClassVar[bool] = False
    """Whether its trials end a probe by themselves."""
    seeds_per_job: ClassVar[int] = 1
    """Seeds that one job of a confirmation runs in sequence (``Proposal.replicates``)."""
    engine: str = PYXIS
    """What starts the container: ``PYXIS``, or a command that the launch script calls."""

    @abstractmethod
    def job(self, proposal: Proposal, folder: Path) -> Job:
        """The files and the command of one attempt, to run in ``folder``. Pure."""

    @abstractmethod
    def reader(self, proposal: Proposal | None = None) -> LogReader:
        """A new reader for this workload's log format; ``proposal`` if that depends on the trial (its batch)."""

    @abstractmethod
    def export(self, proposal: Proposal, provenance: tuple[str, ...]) -> Export:
        """The proposal in the form that users run by hand; ``provenance`` lines become comments."""

    # A trial before it runs

    def written(self, proposal: Proposal) -> Record:
        """Its effective record: every variable of its program by name, from the trial, the base config, the
        implementation's defaults and a probe's values."""
        return Record(stated=proposal.parameters)

    def first_eval(self, proposal: Proposal) -> tuple[float, float] | None:
        """(samples before its first eval, samples of its whole training); None if unknown."""
        return None

    def unread_switches(self) -> tuple[str, ...]:
        """The study's switches that are not tuned because nothing reads them."""
        return ()

    # Before any trial

    def start(self) -> Start | None:
        """The configuration that trial 0 measures unchanged; None if the study names none."""
        return None

    def start_values(self) -> Mapping[str, str]:
        """The values that its files set now, in the form of ``Start.values``."""
        return {}

    def preparation(self, folder: Path) -> Job | None:
        """A job that prepares, once, what every trial needs, to run in ``folder``; None if there is none. Pure."""
        return None

    def beside(self, folder: Path) -> AbstractContextManager[None]:
        """A context for what runs alongside the trials while a driver starts them. folder: the sweep's."""
        return nullcontext()

    # Checks of its files

    def check(self) -> Sequence[str]:
        """A sentence for each possible problem of what every trial needs. Raises SetupError for certain ones."""
        return ()

    def findings(self, paths: SweepPaths) -> Iterator[Finding] | None:
        """``doctor``'s findings on its files; None: use ``check``. paths: the sweep's."""
        return None

    def known_places(self) -> Mapping[str, str]:
        """Container, data and model of a trial under each of their names; {}: the site's."""
        return {}

    def sudo_calls(self) -> Sequence[str]:
        """The commands that its launch script runs with sudo, as written."""
        return ()

    # Its configs, if they are sourced within a folder of launch scripts

    def scripts_folder(self) -> Path | None:
        """The folder of launch scripts."""
        return None

    def config_folder(self) -> Path | None:
        """The folder in it where configs are sourced, next to the files that they source; None: any folder."""
        return None

    def values_of(self, file: Path) -> Mapping[str, str] | None:
        """The present exports of a config in that folder; None for a file elsewhere."""
        return None

    def recorded_values(self, file: Path) -> Mapping[str, str] | None:
        """The exports of ``file`` when the sweep began, if it is the base config that the sweep recorded."""
        return None

    def as_recorded(self, name: str, values: Mapping[str, str]) -> Self:
        """The same workload with the base config as a sweep recorded it. name, values: of ``Start``."""
        return self

    def readers(self, names: Iterable[str]) -> Mapping[str, str] | None:
        """What reads each variable, in words, "" if nothing does; None if unknown (a user's command)."""
        return None


# Readers of a study's logs.


def reader_of(study: Study, reader: LogReader) -> LogReader:
    """The reader for the study's metric; evals of a rising one are read as the study's ceiling minus the value.

    Raises StudyError if the metric rises and the reader comes from another package, which may not support that.
    """
    if study.rising:
        if not isinstance(reader, MllogReader | LineReader):
            kind = type(reader).__name__
            problem = f"maximize, but {kind} reads losses; read the log as mllog, or print a value that falls"
            raise StudyError(f"study {study.name}", "objective.direction", problem)
        reader.read_shortfall(study.ceiling)
    return reader


# Container, data, model and tokenizer under the names of launch scripts.


PLACE_ALIASES: Mapping[str, tuple[str, ...]] = {
    "CONT": ("CONT_FILE",),
    "DATADIR": ("PREPROC_DATA",),
    "MODEL": ("LOAD_CHECKPOINTS_PATH",),
    "TOKENIZER": (),
}
"""Our name -> names in other recipes: Inventec's env.sh, and Llama 3.1 405B."""


def required(reads: Collection[str]) -> list[tuple[str, ...]]:
    """The places that a recipe with the variables ``reads`` needs, each as its names there."""
    return [
        known for name, others in PLACE_ALIASES.items() if (known := tuple(n for n in (name, *others) if n in reads))
    ]


_IMAGES = (".sqsh", ".sqfs", ".squashfs", ".sif")
"""File name endings of containers."""


def is_image_file(container: str) -> bool:
    """Whether CONT is a file, not an image of a registry such as ``nvcr.io/nvidia/pytorch:25.04-py3``."""
    return container.startswith(("/", ".")) or container.endswith(_IMAGES)


def misplaced(named: Mapping[str, str], folder: Path) -> list[str]:
    """A sentence, ending in the remedy, for each relative path that a job started in ``folder`` would not find.

    pyxis interprets a container name that does not start with ``/`` or ``.`` as an image of a registry.
    """
    sentences = []
    for name in (n for canonical, others in PLACE_ALIASES.items() for n in (canonical, *others) if n != "TOKENIZER"):
        value, container = named.get(name, ""), name in ("CONT", *PLACE_ALIASES["CONT"])
        if not value or value.startswith("/") or (container and not is_image_file(value)):
            continue
        bare = container and not value.startswith(".")
        if (folder / value).exists() and not bare:
            continue
        if name == "MODEL" and "/" not in value and not Path(value).exists():
            continue  # a model's name, such as flux1's "schnell"
        why = "pyxis takes it for an image of a registry" if bare else f"jobs start in {folder}, where it is not"
        existing = next((root / value for root in (folder, Path.cwd()) if (root / value).exists()), None)
        remedy = f"name it by its whole path{f', {existing.resolve()}' if existing else ''}"
        sentences.append(f"{name}={value} is relative, and {why}; {remedy}")
    return sentences


def missing_paths(named: Mapping[str, str]) -> list[str]:
    """One sentence for each absolute path that does not exist on this machine.

    A node may see more, such as its own disk.
    """
    return [
        f"{name}={value} is not there as this machine sees it; a trial fails unless its node has it "
        "(python -m lora_tune.doctor --probe asks a node)"
        for name, value in named.items()
        if value.startswith("/") and not Path(value).exists()
    ]


def set_by_site(site: Site, name: str) -> bool:
    """Whether the site profile sets the place that scripts call ``name``."""
    paths = {"CONT": site.container, "DATADIR": site.data, "MODEL": site.model}
    canonical = next((n for n, others in PLACE_ALIASES.items() if name in (n, *others)), name)
    return bool(paths.get(canonical)) or not {canonical, name}.isdisjoint(site.environment)


def places(site: Site, reads: Collection[str] = ()) -> dict[str, str]:
    """CONT, DATADIR, MODEL and TOKENIZER as far as known: from the site, else from the user's shell.

    reads: the variables that the recipe reads; a place is set under each of its names among them.
    """
    paths = {"CONT": site.container, "DATADIR": site.data, "MODEL": site.model}
    known: dict[str, str] = {}
    for name, others in PLACE_ALIASES.items():
        shell = (os.environ.get(n, "") for n in (name, *others))
        value = str(paths.get(name) or "") or site.environment.get(name, "") or next(filter(None, shell), "")
        known |= {n: value for n in (name, *others) if value and (n == name or n in reads)}
    return known
