"""An MLPerf implementation as a workload: a config_*.sh and a log folder for each trial, run.sub unchanged.

The implementation's folder is only read. A trial is the machine's own config (``workload.base``) with some variables
changed, or without one the common config and the study's variables. What its config exports is also what ``sbatch`` is
given.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from lora_tune.base.errors import Finding, InputError, LoraTuneError, StudyError
from lora_tune.base.paths import AttemptPaths, SweepPaths
from lora_tune.config.layout import config_file_name
from lora_tune.config.study import Study
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import LogReader
from lora_tune.mlperf.benchmark import Benchmark, find_benchmark
from lora_tune.mlperf.gate import VARIABLES, disclosure_exports
from lora_tune.workloads import mlperf_checks, mlperf_evals, mlperf_export
from lora_tune.workloads.base import (
    ALSO,
    PYXIS,
    Export,
    Job,
    Proposal,
    Resources,
    Value,
    given_by_site,
    places,
    reader_of,
)
from lora_tune.workloads.base_config import equal
from lora_tune.workloads.config_file import render, source_lines, value_text
from lora_tune.workloads.mlperf_names import probe_values, refuse_illegal, spelled
from lora_tune.workloads.mlperf_settings import MlperfSettings
from lora_tune.workloads.record import ALIASES, Record
from lora_tune.workloads.tree import TreeWorkload


class MlperfWorkload(TreeWorkload):
    """Trials of ``run.sub``. Reads the implementation's folder when the first job is made."""

    stops_at_target = False
    engine = PYXIS
    seeds_per_job = 3
    """Of a confirmation: the launch script runs several seeds one after another (``NEXP``)."""

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
        """The attempt's config file and run.sub with exactly its environment.

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
            # Fixed, so that the replicates' own logs have names that are known beforehand: run_1.log, run_2.log ...
            "DATESTAMP": "run",
            "CHECK_COMPLIANCE": int(self.settings.compliance),
        }
        environment = {
            **self.shell_values(),
            **mlperf_export.left_to_the_shell(self, proposal),
            **{name: value_text(value) for name, value in {**exports, **run}.items()},
            "WALLTIME": str(self._walltime(proposal)),
            **self.places(),
            **site.environment,
        }
        return Job(
            name=job_name,
            folder=folder,
            files={self.file_name(proposal): render(exports, before=self.sources(), after=[mlperf_export.WALLTIME])},
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

    def check(self) -> list[str]:
        """The implementation's folder, the base config, and container, data and model where nothing names them.

        Raises SetupError when one is missing; returns a sentence for each that this machine does not see.
        """
        return mlperf_checks.check(self)

    def findings(self, paths: SweepPaths) -> Iterator[Finding]:
        """The implementation, its base config, whether every knob of the study is read, container, data and model."""
        return mlperf_checks.findings(self, paths)

    def known_places(self) -> Mapping[str, str]:
        """Container, data, model and tokenizer as a trial would have them: a file such as env.sh may name them."""
        try:
            known = {**self.implementation.values, **self.places(), **self.study.site.environment}
        except LoraTuneError:
            return places(self.study.site)  # said among the findings
        return {**known, **{n: known[other] for n, others in ALSO.items() for other in others if other in known}}

    def sudo_calls(self) -> list[str]:
        """The commands that the launch script runs with sudo, as it writes them; none without the folder."""
        try:
            text = (self.implementation.folder / self.settings.script).read_text(encoding="utf-8", errors="replace")
        except LoraTuneError:
            return []  # said among the findings
        return sorted({match.strip() for match in re.findall(r"sudo\s+(?:-n\s+)?([^\s\"';|&]+)", text)})

    def reader(self, proposal: Proposal | None = None) -> LogReader:
        """run.sub's output holds MLLOG lines behind rank prefixes."""
        return reader_of(self.study, MllogReader())

    def export(self, proposal: Proposal, provenance: tuple[str, ...]) -> Export:
        """The config as its users keep it: beside the one that it sources.

        Raises InputError where a file of that name is there already and holds something else.
        """
        return mlperf_export.export(self, proposal, provenance)

    # -- values

    def exports(self, proposal: Proposal) -> dict[str, Value]:
        """What the config sets beyond what it sources, in this implementation's names.

        With a base config that is what changes against it: nothing for that config itself.
        """
        if self.is_base(proposal):
            return {}
        values = {**proposal.parameters, **mlperf_evals.eval_exports(self, proposal)}
        values.pop("NODES", None)  # DGXNNODES, below
        values = self.effective(values)
        if proposal.probe:
            in_steps = mlperf_evals.counts_steps(self)
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
        """What the trial's program finds: its exports over the base or common config and the files' defaults.

        With container, data and model, and with the batch, also where that follows from MINIBS.
        """
        return self.record({**self.exports(proposal), **self.places()}).with_batch()

    def proposed(self, proposal: Proposal) -> Record:
        """The record of a proposal by our names, before the eval schedule and other derived values are known."""
        return self.record({**proposal.parameters, "NODES": self.nodes(proposal)})

    def first_eval(self, proposal: Proposal) -> tuple[float, float] | None:
        """Samples before the first eval, and of the whole training, where both are stated."""
        return mlperf_evals.first_eval(self, proposal)

    def unread_switches(self) -> tuple[str, ...]:
        """The switches that the implementation reads under no name: trials leave them alone."""
        return tuple(
            name
            for name in self.study.search_space.switches()
            if self.implementation.spelling((name, *ALIASES.get(name, ()))) is None
        )

    def effective(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """``values`` without switches that nothing reads, and without those that stay as unset as in the base."""
        left = {*self.unread_switches(), *self._unstated(values)}
        return {name: value for name, value in values.items() if name not in left}

    def _unstated(self, values: Mapping[str, Value]) -> list[str]:
        """The switches that a trial leaves as in the base config, which states none of them: nothing is exported."""
        start = self._start
        if start is None or start.tuned is None:
            return []
        unstated = [n for n in self.study.search_space.switches() if n not in start.parameters]
        return [name for name in unstated if values.get(name) == start.tuned.get(name)]

    def is_base(self, proposal: Proposal) -> bool:
        """Whether a proposal is the base config as it stands."""
        return self._start is not None and not proposal.probe and proposal.parameters == self._start.parameters

    def _changed(self, exports: Mapping[str, Value]) -> dict[str, Value]:
        """Those that are not so already; all without a base config."""
        if self.base is None:
            return dict(exports)
        return {name: value for name, value in exports.items() if not equal(self.beneath.get(name), value)}

    def _disclosed(self, exports: Mapping[str, Value], proposal: Proposal) -> dict[str, Value]:
        """The disclosures that the implementation prints from variables, as they follow from what runs."""
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
        """The workload's benchmark, under the ruleset that the whole study is judged by."""
        return find_benchmark(self.settings.benchmark, self.study.ruleset(self.settings.benchmark))

    def places(self) -> dict[str, str]:
        """Container, data and model: what the site names, then what the base config sets, then the user's shell."""
        site, implementation = self.study.site, self.implementation
        known = places(site, implementation.reads)
        if self.base is None:
            return known
        return {
            **known,
            **{n: v for n, v in self.base.values.items() if n in known and v and not given_by_site(site, n)},
        }

    def file_name(self, proposal: Proposal) -> str:
        """The true name of a proposal's config; the base's own for the base."""
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
        """The files that an attempt's config builds on, in order, relative to the implementation's folder."""
        base = self.base
        return self.implementation.common if base is None else (*self.settings.before, *base.beside, base.file)

    def sources(self) -> list[str]:
        """The lines with which an attempt's config sources what it builds on, from wherever it lies."""
        return source_lines([self.implementation.folder / file for file in self.sourced()])

    def gbs(self, proposal: Proposal) -> int | None:
        """Samples of one optimizer step; None where the tree has a way of its own to count them."""
        return self.proposed(proposal).gbs

    def _counted(self, proposal: Proposal) -> int:
        """The batch, where something has to be counted in it. Raises InputError where nobody states it."""
        if (batch := self.gbs(proposal)) is None:
            raise InputError("a probe ends after so many steps, and nobody states the batch; set search.probes = false")
        return batch

    def run_minutes(self) -> int:
        """Minutes that one run may take."""
        return math.ceil(self.study.budget.trial_minutes)

    def _walltime(self, proposal: Proposal) -> int:
        return 5 + proposal.replicates * (self.run_minutes() + 5)
