"""The port between a proposal and something that can be launched.

A workload turns resolved parameters into a :class:`Job`: files to write, a command, an environment.
It is pure; it never starts anything. A trial knows nothing of Optuna or the database: it prints a log.
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
    probe: stop after one warm block and one eval; only throughput is wanted.
    """

    number: int
    attempt: int
    seed: int
    parameters: Mapping[str, Value]
    replicates: int = 1
    probe: bool = False


def some_proposal(study: Study) -> Proposal:
    """A trial of the study, for those who look at what its jobs would be."""
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
    """How a job's trial can share another job: a packed trainer trains several side by side.

    argv: the trainer's command, to which the folder that it watches is appended. knobs: the variables of this trial,
    which the job's own command would read from its environment. company: how many may train side by side while it
    does, itself counted; 0: as many as there is room for.
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
    secrets: further variables by name, of which launchers read the values when they submit and write them nowhere.
    log: the file in which the job's output appears.
    token: of the attempt that this job runs, and sweep: the id of its sweep; the launcher writes both into what it
    records. "" where there is none.
    contained: a command that runs in the site's container where it has one; False: it starts its own.
    run_logs: the files in which a job of several runs keeps each run's output, oldest first; () where it does not.
    slot: how it can share a job with other trials; None where it needs one of its own.
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
    """An exported configuration: file name -> text, and the line that a user types to run it."""

    files: Mapping[str, str]
    usage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A configuration that is there before any trial: trial 0 measures it as it stands.

    name: what its user calls it. parameters: its values by the study's names, as the trial's proposal holds them.
    tuned: the same as a point of the study's space; None where it is none, with the reason in ``outside``.
    inherited: those of its values that every other trial has as well unless the study says otherwise; a batch that is
    another where something else is tuned is none of them.
    values: every variable that its files set, as a sweep keeps them: a file may be edited, or gone, before it is over.
    """

    name: str
    parameters: Mapping[str, Value]
    inherited: Mapping[str, Value] = field(default_factory=dict)
    tuned: Mapping[str, Value] | None = None
    outside: str = ""
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def why(self) -> str:
        """Why it is proposed, in words."""
        apart = f"; it is not a point of the study's space ({self.outside}), so the search learns nothing of it"
        return f"{self.name} as it stands: what all others are compared with{apart if self.outside else ''}"


PYXIS = "pyxis"
"""Slurm's plugin that starts containers."""

LAUNCH = "sbatch and the launch script"
BY_THE_SITE = frozenset({"DGXSYSTEM", "DGXNNODES", "DGXNGPU", "WALLTIME", "WALLTIME_RUNANDTIME"})
"""Variables that launch scripts and sbatch read, not the training."""


class Workload(ABC):
    """One kind of trial program. Constructed from a validated study and its ``Settings``; see ``workloads.load``.

    ``job``, ``reader`` and ``export`` are each kind's own. The other answers are those of a program of which nothing
    more is known. Methods that read its files raise SetupError where they cannot be read.
    """

    Settings: ClassVar[type[BaseModel]]
    needs_goal: ClassVar[bool] = False
    """Its study must state a target or a metric."""
    ends_probes: ClassVar[bool] = False
    """Its trials end a short run by themselves."""
    seeds_per_job: ClassVar[int] = 1
    """Seeds that a job of a confirmation runs one after another (``Proposal.replicates``)."""
    engine: str = PYXIS
    """What starts the container: ``PYXIS``, or a command that the launch script calls."""

    @abstractmethod
    def job(self, proposal: Proposal, folder: Path) -> Job:
        """The files and the command of one attempt, to run in ``folder``. Pure."""

    @abstractmethod
    def reader(self, proposal: Proposal | None = None) -> LogReader:
        """A fresh reader for this workload's log format; ``proposal`` where it depends on the trial (its batch)."""

    @abstractmethod
    def export(self, proposal: Proposal, provenance: tuple[str, ...]) -> Export:
        """The proposal in the form that this workload's users run by hand; ``provenance`` lines become comments."""

    # A trial, beforehand

    def written(self, proposal: Proposal) -> Record:
        """Its effective record: every variable that its program finds, by its name there. What the trial changes, the
        base config's own, the implementation's defaults, the values of a probe."""
        return Record(stated=proposal.parameters)

    def first_eval(self, proposal: Proposal) -> tuple[float, float] | None:
        """Samples before its first eval, and samples of its whole training; None where nobody states them."""
        return None

    def unread_switches(self) -> tuple[str, ...]:
        """The switches of the study that are not swept since nothing reads them."""
        return ()

    # What is there before any trial

    def start(self) -> Start | None:
        """The configuration that trial 0 measures as it stands; None where the study names none."""
        return None

    def start_values(self) -> Mapping[str, str]:
        """What that configuration's files set now, as ``Start.values`` has it."""
        return {}

    def preparation(self, folder: Path) -> Job | None:
        """The job that makes, once, what every trial needs, to run in ``folder``; None without any. Pure."""
        return None

    def beside(self, folder: Path) -> AbstractContextManager[None]:
        """What runs beside the trials while a driver starts them. folder: the sweep's."""
        return nullcontext()

    # What can be told of its files

    def check(self) -> Sequence[str]:
        """What may yet be wrong with what every trial needs, a sentence each. SetupError: surely missing."""
        return ()

    def findings(self, paths: SweepPaths) -> Iterator[Finding] | None:
        """What ``doctor`` says of its files, one by one; None: what ``check`` says. paths: the sweep's."""
        return None

    def known_places(self) -> Mapping[str, str]:
        """Container, data and model by every name that they go by, as a trial would have them; {}: the site's."""
        return {}

    def sudo_calls(self) -> Sequence[str]:
        """The commands that its launch script runs with sudo, as it writes them."""
        return ()

    # Its configs, where they lie in a folder of launch scripts and are sourced there

    def scripts_folder(self) -> Path | None:
        """The folder of launch scripts."""
        return None

    def config_folder(self) -> Path | None:
        """Where in it configs lie and are sourced, beside what they source; None: anywhere."""
        return None

    def values_of(self, file: Path) -> Mapping[str, str] | None:
        """What a config in that folder exports now; None for one that lies elsewhere."""
        return None

    def recorded_values(self, file: Path) -> Mapping[str, str] | None:
        """What ``file`` exported when the sweep began, where it is the base config that a sweep has on record."""
        return None

    def as_recorded(self, name: str, values: Mapping[str, str]) -> Self:
        """The same with the base config as a sweep has it on record. name, values: of ``Start``."""
        return self

    def readers(self, names: Iterable[str]) -> Mapping[str, str] | None:
        """Who reads each variable, in words, "" for nobody; None where nobody can know (another's command)."""
        return None


# How the evals of a study's logs are read.


def reader_of(study: Study, reader: LogReader) -> LogReader:
    """The reader as the study's metric wants it: evals that rise are read as what they lack of the study's ceiling.

    Raises StudyError for a reader of another package where the metric rises: none is known to turn its evals.
    """
    if study.rising:
        if not isinstance(reader, MllogReader | LineReader):
            kind = type(reader).__name__
            problem = f"maximize, but {kind} reads losses; read the log as mllog, or print a value that falls"
            raise StudyError(f"study {study.name}", "objective.direction", problem)
        reader.read_shortfall(study.ceiling)
    return reader


# Container, data, model and tokenizer under the names that launch scripts read.


ALSO: Mapping[str, tuple[str, ...]] = {
    "CONT": ("CONT_FILE",),
    "DATADIR": ("PREPROC_DATA",),
    "MODEL": ("LOAD_CHECKPOINTS_PATH",),
    "TOKENIZER": (),
}
"""Our name -> what other recipes call it: Inventec's env.sh, and Llama 3.1 405B."""


def required(reads: Collection[str]) -> list[tuple[str, ...]]:
    """Which places a recipe that reads ``reads`` needs, each under the names that it goes by there."""
    return [known for name, others in ALSO.items() if (known := tuple(n for n in (name, *others) if n in reads))]


_IMAGES = (".sqsh", ".sqfs", ".squashfs", ".sif")
"""What ends the name of a container that is a file."""


def is_image_file(container: str) -> bool:
    """Whether CONT is a file, not an image of a registry such as ``nvcr.io/nvidia/pytorch:25.04-py3``."""
    return container.startswith(("/", ".")) or container.endswith(_IMAGES)


def misplaced(named: Mapping[str, str], folder: Path) -> list[str]:
    """A sentence, its last part the remedy, for each relative path that a job does not find that starts in ``folder``.

    pyxis takes a container's name without ``/`` or ``.`` at its head for an image of a registry.
    """
    sentences = []
    for name in (n for canonical, others in ALSO.items() for n in (canonical, *others) if n != "TOKENIZER"):
        value, container = named.get(name, ""), name in ("CONT", *ALSO["CONT"])
        if not value or value.startswith("/") or (container and not is_image_file(value)):
            continue
        bare = container and not value.startswith(".")
        if (folder / value).exists() and not bare:
            continue
        if name == "MODEL" and "/" not in value and not Path(value).exists():
            continue  # the name of a model, as flux1's "schnell"
        why = "pyxis takes it for an image of a registry" if bare else f"jobs start in {folder}, where it is not"
        existing = next((root / value for root in (folder, Path.cwd()) if (root / value).exists()), None)
        remedy = f"name it by its whole path{f', {existing.resolve()}' if existing else ''}"
        sentences.append(f"{name}={value} is relative, and {why}; {remedy}")
    return sentences


def unseen(named: Mapping[str, str]) -> list[str]:
    """Places that are absolute paths with nothing at them as this machine sees it, one sentence each.

    A node may see more: its own disk, for one.
    """
    return [
        f"{name}={value} is not there as this machine sees it; a trial fails unless its node has it "
        "(python -m lora_tune.doctor --probe asks a node)"
        for name, value in named.items()
        if value.startswith("/") and not Path(value).exists()
    ]


def set_by_site(site: Site, name: str) -> bool:
    """Whether the site profile names the place that scripts call ``name``."""
    paths = {"CONT": site.container, "DATADIR": site.data, "MODEL": site.model}
    canonical = next((n for n, others in ALSO.items() if name in (n, *others)), name)
    return bool(paths.get(canonical)) or not {canonical, name}.isdisjoint(site.environment)


def places(site: Site, reads: Collection[str] = ()) -> dict[str, str]:
    """CONT, DATADIR, MODEL and TOKENIZER as far as known: the site's, else what the user's shell exports.

    reads: the variables that the recipe reads; a place is then set under each of its names among them.
    """
    paths = {"CONT": site.container, "DATADIR": site.data, "MODEL": site.model}
    known: dict[str, str] = {}
    for name, others in ALSO.items():
        shell = (os.environ.get(n, "") for n in (name, *others))
        value = str(paths.get(name) or "") or site.environment.get(name, "") or next(filter(None, shell), "")
        known |= {n: value for n in (name, *others) if value and (n == name or n in reads)}
    return known
