"""An MLPerf implementation as a workload: a config_*.sh and a log folder for each trial, with run.sub unchanged.

The implementation's folder is only read. A trial is the machine's own config (``workload.base``) with some variables
changed, or without one the common config plus the study's variables. ``sbatch`` receives the same exports.
"""

from __future__ import annotations

import functools
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from lora_tune.base.errors import InputError, LoraTuneError, StudyError
from lora_tune.base.paths import AttemptPaths
from lora_tune.base.text import redact
from lora_tune.config.layout import config_file_name
from lora_tune.config.study import Study
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import LogReader
from lora_tune.mlperf.benchmark import Benchmark, find_benchmark
from lora_tune.mlperf.gate import INTERVAL_IN_STEPS, VARIABLES, disclosure_exports
from lora_tune.workloads.base import (
    PLACE_ALIASES,
    PYXIS,
    Export,
    Job,
    Proposal,
    Resources,
    Value,
    places,
    reader_of,
    set_by_site,
)
from lora_tune.workloads.base_config import equal
from lora_tune.workloads.config_file import render, source_lines, value_text
from lora_tune.workloads.implementation import probe_values, refuse_illegal, spelled
from lora_tune.workloads.record import ALIASES, Record, names_of
from lora_tune.workloads.tree import MlperfSettings, TreeWorkload
from lora_tune.workloads.walltime import base_walltime

WALLTIME = "export WALLTIME=$((5 + ${NEXP:-1} * (WALLTIME_RUNANDTIME + 5)))"


class RunSubWorkload(TreeWorkload):
    """Trials of ``run.sub``. Reads the implementation's folder on first use."""

    stops_at_target = False
    engine = PYXIS
    seeds_per_job = 3
    """For a confirmation: the launch script runs several seeds in sequence (``NEXP``)."""

    def __init__(self, study: Study, settings: MlperfSettings) -> None:
        file = f"study {study.name}"
        if study.division == "closed" and (settings.first_eval or settings.eval_every):
            raise StudyError(file, "workload.first_eval", "the closed division fixes the evals; remove it, or use open")
        if settings.base and settings.common:
            raise StudyError(file, "workload.common", "the base config sources what it needs by itself; remove it")
        if study.site.container_mounts:
            raise StudyError(
                file,
                "site.container_mounts",
                "cannot reach run.sub's steps: pyxis takes mounts from srun's command line only; add them there",
            )
        super().__init__(study, settings)

    def job(self, proposal: Proposal, folder: Path) -> Job:
        """The attempt's config file, and run.sub with its exact environment.

        Raises InputError for a variable that the implementation never reads, SetupError without its folder.
        """
        site = self.study.site
        attempt = AttemptPaths(folder)
        job_name = self.study.job_name(proposal.number, proposal.attempt)
        limits: dict[str, Value] = {"WALLTIME_RUNANDTIME": self.run_minutes()}
        exports = {**self.exports(proposal), **limits}
        logs = site.log_folder / job_name if site.log_folder else folder / "results"
        run: dict[str, Value] = {
            "NEXP": proposal.replicates,
            "SEED_BASE": proposal.seed,
            "LOGDIR": str(logs),
            # A fixed stamp makes the names of the replicates' logs predictable: run_1.log, run_2.log ...
            "DATESTAMP": "run",
            "CHECK_COMPLIANCE": int(self.settings.compliance),
        }
        environment = {
            **self.shell_values(),
            **left_to_the_shell(self, proposal),
            **{name: value_text(value) for name, value in {**exports, **run}.items()},
            "WALLTIME": str(self._walltime(proposal)),
            **self.places(),
            **site.environment,
        }
        return Job(
            name=job_name,
            folder=folder,
            files={self.file_name(proposal): render(exports, before=self.sources(), after=[WALLTIME])},
            argv=(self.settings.script,),
            environment=environment,
            secrets=site.secrets,
            cwd=self.implementation.folder,
            log=attempt.log,
            run_logs=tuple(logs / f"run_{i + 1}.log" for i in range(proposal.replicates)),
            resources=Resources(
                nodes=self.nodes(proposal),
                gpus_per_node=site.gpus_per_node,
                minutes=float(self._walltime(proposal)),
            ),
            script=True,
        )

    def known_places(self) -> Mapping[str, str]:
        """Container, data, model and tokenizer of a trial; a file such as env.sh may also set them."""
        try:
            known = {**self.implementation.values, **self.places(), **self.study.site.environment}
        except LoraTuneError:
            return places(self.study.site)  # the error is reported among the findings
        return {
            **known,
            **{n: known[other] for n, others in PLACE_ALIASES.items() for other in others if other in known},
        }

    def sudo_calls(self) -> list[str]:
        """The commands that the launch script runs with sudo, as written; none without the folder."""
        try:
            text = (self.implementation.folder / self.settings.script).read_text(encoding="utf-8", errors="replace")
        except LoraTuneError:
            return []  # the error is reported among the findings
        return sorted({match.strip() for match in re.findall(r"sudo\s+(?:-n\s+)?([^\s\"';|&]+)", text)})

    def reader(self, proposal: Proposal | None = None) -> LogReader:
        """A reader of MLLOG, whose lines have rank prefixes in run.sub's output."""
        return reader_of(self.study, MllogReader())

    def export(self, proposal: Proposal, provenance: tuple[str, ...]) -> Export:
        """The config as a file next to the one that it sources.

        Raises InputError if a different file of that name exists.
        """
        return exported(self, proposal, provenance)

    # -- values

    def exports(self, proposal: Proposal) -> dict[str, Value]:
        """The variables that the trial's config adds to what it sources, in this implementation's names.

        With a base config only the changes to it: none for that config itself.
        """
        if self.is_base(proposal):
            return {}
        values = {**proposal.parameters, **self.eval_exports(proposal)}
        values.pop("NODES", None)  # set as DGXNNODES below
        values = self.effective(values)
        if proposal.probe:
            in_steps = self.counts_steps()
            values |= probe_values(self._counted(proposal), values.get("WARMUP_STEPS"), in_steps=in_steps)
        exports = spelled(values, self.implementation)
        exports |= {"DGXNNODES": self.nodes(proposal), "DGXNGPU": self.study.site.gpus_per_node}
        exports = self._changed(exports)
        if exports or self.base is None:
            exports |= {"DGXSYSTEM": self.file_name(proposal).removeprefix("config_").removesuffix(".sh")}
            exports |= self._disclosed(exports, proposal)
        refuse_illegal(self.record(exports), exports)
        return exports

    def written(self, proposal: Proposal) -> Record:
        """The trial's effective variables: its exports over the base or common config and the files' defaults.

        Includes container, data and model, and the batch, also if it follows from MINIBS.
        """
        return self.record({**self.exports(proposal), **self.places()}).with_batch()

    def proposed(self, proposal: Proposal) -> Record:
        """The record of a proposal in our names, without the eval schedule and other derived values."""
        return self.record({**proposal.parameters, "NODES": self.nodes(proposal)})

    def counts_steps(self) -> bool:
        """Whether an implementation counts its eval interval in optimizer steps instead of samples.

        Decided by its config or default, if that equals the rules' interval at its batch in one of the two units. Else
        Primus passes it to Megatron as iterations, in every benchmark, and others count as their benchmark's do.
        """
        benchmark, below = self.benchmark, self.beneath
        stated, batch = below.number("VAL_CHECK_INTERVAL"), below.gbs
        rule = None if batch is None or batch == 1 else benchmark.eval_schedule(batch)
        if rule is not None and batch is not None and stated is not None:
            if stated == rule.interval_samples:
                return False
            if stated == math.ceil(rule.interval_samples / batch):
                return True
        name = self.implementation.spelling(names_of("VAL_CHECK_INTERVAL"))
        return benchmark.name in INTERVAL_IN_STEPS or name == "PRIMUS_EVAL_INTERVAL"

    def eval_exports(self, proposal: Proposal) -> dict[str, Value]:
        """The eval schedule in the implementation's terms: by default the rules' for this GBS.

        Empty if the rules count epochs, or if steps are counted and the first evals skipped, since the implementations
        then follow the rules by themselves; also empty if the batch is unknown. If the study sets the interval, the
        number of skipped evals also comes from the study or the config.
        """
        settings, benchmark, implementation = self.settings, self.benchmark, self.implementation
        gbs = self.gbs(proposal)
        rule = None if gbs is None else benchmark.eval_schedule(gbs)
        tuned = proposal.parameters.get("VAL_CHECK_INTERVAL")
        in_steps = self.counts_steps()
        scheduled = bool(tuned or settings.first_eval or settings.eval_every)
        if gbs is None or rule is None or benchmark.progress == "epoch_num":
            return {}
        skips = rule.first_samples > rule.interval_samples
        if (
            in_steps
            and benchmark.name in INTERVAL_IN_STEPS
            and not scheduled
            and (skips or not implementation.reads_name("VAL_CHECK_INTERVAL"))
        ):
            return {}
        unit = gbs if in_steps else 1
        every = int(tuned) if tuned else math.ceil((settings.eval_every or rule.interval_samples) / unit)
        first = settings.first_eval or int(rule.first_samples)
        derived: dict[str, Value] = {
            "VAL_CHECK_INTERVAL": every,
            "SKIP_EVALS": max(0, round(first / (every * unit)) - 1),
        }
        if not implementation.mentions("SKIP_EVALS", "SKIP_EVAL") or (tuned and not settings.first_eval):
            del derived["SKIP_EVALS"]
        return {
            name: value
            for name, value in derived.items()
            if proposal.parameters.keys().isdisjoint((name, *ALIASES[name]))
        }

    def first_eval(self, proposal: Proposal) -> tuple[float, float] | None:
        """(samples before a trial's first eval, samples of its whole training); None if either is unknown."""
        record = self.written(proposal)
        batch, every, steps = record.gbs, record.number("VAL_CHECK_INTERVAL"), record.number("MAX_STEPS")
        if batch is None or every is None or steps is None or self.benchmark.progress == "epoch_num":
            return None
        unit = batch if self.counts_steps() else 1
        return ((record.number("SKIP_EVALS") or 0) + 1) * every * unit, steps * batch

    def effective(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """``values`` without those that nothing reads, and without switches left unset as in the base."""
        left = {*self.unread_switches(), *self._unstated(values)}
        return {name: value for name, value in values.items() if name not in left}

    def _unstated(self, values: Mapping[str, Value]) -> list[str]:
        """The switches that the base config does not set and the trial does not change, so that none is exported."""
        start = self._start
        if start is None or start.tuned is None:
            return []
        unstated = [n for n in self.study.search_space.switches() if n not in start.parameters]
        return [name for name in unstated if values.get(name) == start.tuned.get(name)]

    def is_base(self, proposal: Proposal) -> bool:
        """Whether a proposal is the unchanged base config."""
        return self._start is not None and not proposal.probe and proposal.parameters == self._start.parameters

    def _changed(self, exports: Mapping[str, Value]) -> dict[str, Value]:
        """The exports that differ from the base config; all without one."""
        if self.base is None:
            return dict(exports)
        return {name: value for name, value in exports.items() if not equal(self.beneath.get(name), value)}

    def _disclosed(self, exports: Mapping[str, Value], proposal: Proposal) -> dict[str, Value]:
        """The disclosure variables that the implementation prints, computed from the trial's variables."""
        implementation = self.implementation
        reads = {
            n for names in VARIABLES.values() for n in names if n in implementation.reads | implementation.values.keys()
        }
        if not reads:
            return {}
        disclosed = disclosure_exports(self.settings.benchmark, self.record(exports), self.file_name(proposal), reads)
        return self._changed({name: value for name, value in disclosed.items() if isinstance(value, str | int)})

    @functools.cached_property
    def benchmark(self) -> Benchmark:
        """The workload's benchmark, under the study's ruleset."""
        return find_benchmark(self.settings.benchmark, self.study.ruleset(self.settings.benchmark))

    def places(self) -> dict[str, str]:
        """Container, data and model: from the site, else the base config, else the user's shell."""
        site, implementation = self.study.site, self.implementation
        known = places(site, implementation.reads)
        if self.base is None:
            return known
        return {
            **known,
            **{n: v for n, v in self.base.values.items() if n in known and v and not set_by_site(site, n)},
        }

    def file_name(self, proposal: Proposal) -> str:
        """The file name of a proposal's config; the base's own for the base."""
        base, site = self.base, self.study.site
        if base is not None and self.is_base(proposal):
            return base.name
        system = base.system if base is not None and site.system == "LOCAL" else ""
        return config_file_name(
            system or site.system,
            self.nodes(proposal),
            site.gpus_per_node,
            self.proposed(proposal).layout,
            self.settings.suffix or ("" if base is None else base.suffix(proposal.parameters)),
        )

    def nodes(self, proposal: Proposal) -> int:
        """Nodes of a trial."""
        return self.study.search_space.node_count(proposal.parameters)

    def sourced(self) -> tuple[str, ...]:
        """The files that an attempt's config sources, in order, relative to the implementation's folder."""
        base = self.base
        return self.implementation.common if base is None else (*self.settings.before, *base.beside, base.file)

    def sources(self) -> list[str]:
        """The lines with which an attempt's config sources these files, from any folder."""
        return source_lines([self.implementation.folder / file for file in self.sourced()])

    def gbs(self, proposal: Proposal) -> int | None:
        """Samples of one optimizer step; None if the implementation counts them in its own way."""
        return self.proposed(proposal).gbs

    def _counted(self, proposal: Proposal) -> int:
        """The batch, if something is counted in it. Raises InputError if it is unknown."""
        if (batch := self.gbs(proposal)) is None:
            raise InputError("a probe ends after so many steps, and nobody states the batch; set search.probes = false")
        return batch

    def run_minutes(self) -> int:
        """Time limit of one run in minutes."""
        return math.ceil(self.study.budget.trial_minutes)

    def _walltime(self, proposal: Proposal) -> int:
        return 5 + proposal.replicates * (self.run_minutes() + 5)


# Export of a trial as a config that users can submit: base and changed lines under a new name.


def exported(
    workload: RunSubWorkload, proposal: Proposal, provenance: tuple[str, ...], submit: str | None = None
) -> Export:
    """The file, and the command that installs it in the implementation and runs it. submit: replaces ``sbatch``.

    Raises InputError if no file name is free.
    """
    place = workload.config_place
    limits = {} if submit else _limits(workload, proposal)  # only sbatch needs a time limit
    exports = {**_system(workload), **workload.exports(proposal), **limits}
    after = [WALLTIME] if limits else []
    text = render(exports, comments=_comments(workload, provenance), before=_sources(workload), after=after)
    folder = workload.implementation.folder
    name, location = _free_name(workload, proposal, folder / place, text)
    text = _named(workload, proposal, text, name)
    copy = "" if location else f"cp -n {shlex.quote(name)} {shlex.quote(str(folder / place))}/ && "
    before = "".join(f"source {shlex.quote(file)} && " for file in workload.settings.before)
    site = workload.study.site
    options = shlex.join(site.sbatch_arguments(workload.nodes(proposal)))
    sbatch = " ".join(filter(None, ("sbatch -N $DGXNNODES -t $WALLTIME", options, workload.settings.script)))
    variables = {**site.step_variables(), **site.environment}
    assignments = [assignment(name, value) for name, value in variables.items()]
    assignments += [f'{name}="${name}"' for name in site.secrets if name not in variables]
    steps = "".join(f"{each} " for each in assignments)
    left = [f"{n}={shlex.quote(v)}" for n, v in left_to_the_shell(workload, proposal).items()]
    assigned = f"export {' '.join(left)} && " if left else ""
    usage = (
        f"{copy}cd {shlex.quote(str(folder))} && {before}source {shlex.quote(str(place / name))} && {assigned}"
        f"{steps}{submit or sbatch}"
    )
    return Export(files={name: text}, usage=usage)


def left_to_the_shell(workload: RunSubWorkload, proposal: Proposal) -> Mapping[str, str]:
    """Variables that launch scripts need about machine and time limits, and neither base config nor trial sets.

    A config with a copy of its common file derives its system's name from the file that does not source it: "".
    """
    if workload.base is None:
        return {}
    exports = workload.record(workload.exports(proposal)).exports
    sets = {
        "DGXSYSTEM": workload.file_name(proposal).removeprefix("config_").removesuffix(".sh"),
        "DGXNNODES": str(workload.nodes(proposal)),
        "DGXNGPU": str(workload.study.site.gpus_per_node),
    }
    reads = workload.implementation.reads
    if "WALLTIME_RUNANDTIME" in reads and not _limits(workload, proposal):
        minutes = workload.run_minutes()
        sets |= {"WALLTIME_RUNANDTIME": str(minutes), "WALLTIME": str(minutes + 10)}
    return {n: v for n, v in sets.items() if n not in exports and (n in reads or n == "WALLTIME")}


def assignment(name: str, value: str) -> str:
    """``NAME=value`` for a command line; a secret refers to the user's own variable instead."""
    shown = f"{name}={shlex.quote(value)}"
    return shown if redact(shown) == shown else f'{name}="${name}"'


def _system(workload: RunSubWorkload) -> Mapping[str, Value]:
    """The base's DGXSYSTEM, if the export sources the common file itself, which would use the export's name."""
    base, exports = workload.base, workload.beneath.exports
    return {n: exports[n] for n in ("DGXSYSTEM",) if n in exports and base is not None and base.beside}


def _limits(workload: RunSubWorkload, proposal: Proposal) -> Mapping[str, Value]:
    """The run's time limit; empty if the base config's is long enough, even if that is of the whole job."""
    minutes = workload.run_minutes()
    long_enough = workload.is_base(proposal) or base_walltime(workload.implementation.values)[1] >= minutes
    if workload.base is not None and long_enough:
        return {}
    return {"WALLTIME_RUNANDTIME": minutes}


def _comments(workload: RunSubWorkload, provenance: tuple[str, ...]) -> tuple[str, ...]:
    reads = workload.implementation.reads
    needed = [n for name, also in PLACE_ALIASES.items() for n in (name, *also) if n in reads]
    what = () if workload.base is None else (f"what it changes in {workload.base.name}, the machine's own config",)
    return (*provenance, *what, f"needs {', '.join(needed or ['CONT'])} and LOGDIR from the shell that sources it")


def _sources(workload: RunSubWorkload) -> list[str]:
    """The lines that source the files that the export builds on, from the same folder."""
    base, folder = workload.base, workload.implementation.folder
    files = workload.implementation.common if base is None else (*base.beside, base.file)
    return source_lines([folder / file for file in files], beside=True)


def _free_name(workload: RunSubWorkload, proposal: Proposal, place: Path, text: str) -> tuple[str, bool]:
    """A free file name for the export, and whether the same export already exists under it.

    The plain name if possible, else with study and trial appended.
    """
    plain = workload.file_name(proposal)
    trial = proposal.number if proposal.number >= 0 else "unrun"  # a combination that no trial ran
    of_trial = f"{plain.removesuffix('.sh')}_{workload.study.name}-{trial}.sh"
    for name in (plain, of_trial):
        file = place / name
        if not file.exists():
            return name, False
        if _exports(file.read_text(encoding="utf-8", errors="replace")) == _exports(
            _named(workload, proposal, text, name)
        ):
            return name, True
    raise InputError(
        f"{place / of_trial} is there already and holds something else; move it away, or set workload.suffix to give "
        "this study's exports a name of their own"
    )


def _named(workload: RunSubWorkload, proposal: Proposal, text: str, name: str) -> str:
    """The text with the system's name that follows from the file name; unchanged for the base itself."""
    if workload.is_base(proposal):
        return text
    plain = workload.file_name(proposal)
    before, after = (f"export DGXSYSTEM={n.removeprefix('config_').removesuffix('.sh')}\n" for n in (plain, name))
    return text.replace(before, after)


def _exports(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]
