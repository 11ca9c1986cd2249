"""NVIDIA's MLPerf implementation as a workload: a config_*.sh and a log folder for each trial, run.sub unchanged.

The implementation's folder is only read. A trial's config sources ``config_common.sh`` from there and is named truly,
since ``config_common.sh`` derives DGXSYSTEM from the name. What the config exports is also what ``sbatch`` is given.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from lora_tune.base.errors import InputError, SetupError, StudyError
from lora_tune.base.paths import AttemptPaths
from lora_tune.config.layout import Layout, config_file_name
from lora_tune.config.study import Study
from lora_tune.logs.mllog import LogReader, MllogReader
from lora_tune.mlperf.benchmark import Benchmark
from lora_tune.mlperf.knobs import INTERVAL_IN_STEPS
from lora_tune.mlperf.registry import LORA, check_name, find_benchmark
from lora_tune.mlperf.rulesets import rulesets
from lora_tune.workloads.base import Export, Job, Proposal, Resources, Value, some_proposal
from lora_tune.workloads.config_file import render, value_text
from lora_tune.workloads.implementation import Implementation, read_implementation
from lora_tune.workloads.metric import reader_of
from lora_tune.workloads.places import ALSO, places, required, unseen
from lora_tune.workloads.recipe import layout_of
from lora_tune.workloads.script_needs import script_doubts

ALIASES: Mapping[str, tuple[str, ...]] = {
    "TP": ("TENSOR_MODEL_PARALLEL",),
    "PP": ("PIPELINE_MODEL_PARALLEL",),
    "VP": ("INTERLEAVED_PIPELINE",),
    "CP": ("CONTEXT_PARALLEL",),
    "SP": ("SEQ_PARALLEL",),
    "MBS": ("MICRO_BATCH_SIZE",),
    "FP8_ACT": ("FP8_ACTIVATION",),
    "FP8_ACTIVATION": ("FP8_ACT",),
    "SKIP_EVALS": ("SKIP_EVAL",),
    "GBS": ("GLOBAL_BATCH_SIZE",),
}
"""Names that mean the same in other rounds (v4.0 to v5.1) and in Llama 3.1 405B."""

NEUTRAL: Mapping[str, Value] = {"PP": 1, "VP": 1, "CP": 1, "SP": 0, "MBS": 1}
"""Layout values that change nothing: an implementation that does not read them may go without."""

_ELSEWHERE = (
    "no file reads LR or MAX_STEPS, so the training code lies in the container, and only that can tell which variables "
    'have an effect; workload.reads = "container" says so'
)

PROBE_STEPS = 16
"""Optimizer steps of each of a probe's two blocks; the second is warm."""


class MlperfSettings(BaseModel):
    """Keys of ``[workload]`` for ``kind = "mlperf"``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    implementation: Path | None = Field(
        None, description="the implementation's folder; LORA_TUNE_IMPLEMENTATION when absent"
    )
    benchmark: Annotated[str, AfterValidator(check_name)] = Field(
        LORA, description="MLPerf benchmark whose rules the evals and the closed division follow"
    )
    script: str = Field("run.sub", description="the batch script in it")
    before: tuple[str, ...] = Field((), description="files in it to source before the config, e.g. env.sh")
    common: tuple[str, ...] = Field((), description="config files to source after config_common.sh, beside it")
    reads: Literal["folder", "container"] | tuple[str, ...] | None = Field(
        None,
        description='where the training code lies: "folder", or "container" (any variable may then have an effect), or '
        "names that it reads beside those found in the folder [found out]",
    )
    suffix: str = Field("", description="ends the config's name, before .sh")
    first_eval: int | None = Field(None, ge=1, description="samples before the first eval; open division only")
    eval_every: int | None = Field(None, ge=1, description="samples between evals; open division only")
    compliance: bool = Field(False, description="let run.sub call the compliance checker after each run")


class MlperfWorkload:
    """Trials of ``run.sub``. Reads the implementation's folder when the first job is made."""

    Settings = MlperfSettings
    engine = "pyxis"
    """What starts the container: Slurm's plugin, or a command that the launch script calls."""

    def __init__(self, study: Study, settings: MlperfSettings) -> None:
        file = f"study {study.name}"
        if study.division == "closed" and (settings.first_eval or settings.eval_every):
            raise StudyError(file, "workload.first_eval", "the closed division fixes the evals; remove it, or use open")
        if study.site.container_mounts:
            raise StudyError(
                file,
                "site.container_mounts",
                "cannot reach run.sub's steps: pyxis takes mounts from srun's command line only; add them there",
            )
        self._study = study
        self._settings = settings

    @functools.cached_property
    def implementation(self) -> Implementation:
        """The folder as read now. Raises SetupError when it is not there."""
        found = self._settings.implementation or os.environ.get("LORA_TUNE_IMPLEMENTATION") or "llama2_70b_lora"
        settings = self._settings
        return read_implementation(Path(found), settings.script, settings.common, settings.before, settings.reads)

    def job(self, proposal: Proposal, folder: Path) -> Job:
        """The attempt's config file and run.sub with exactly its environment.

        Raises InputError for a variable that the implementation never reads, SetupError without its folder.
        """
        site = self._study.site
        attempt = AttemptPaths(folder)
        job_name = self._study.job_name(proposal.number, proposal.attempt)
        exports = self._exports(proposal)
        sources = [f"source {shlex.quote(str(self.implementation.folder / c))}" for c in self.implementation.common]
        logs = site.log_folder / job_name if site.log_folder else folder / "results"
        run: dict[str, Value] = {
            "NEXP": proposal.replicates,
            "SEED_BASE": proposal.seed,
            "LOGDIR": str(logs),
            # Fixed, so that the replicates' own logs have names that are known beforehand: run_1.log, run_2.log ...
            "DATESTAMP": "run",
            "CHECK_COMPLIANCE": int(self._settings.compliance),
        }
        environment = {
            **self.implementation.values,
            **{name: value_text(value) for name, value in {**exports, **run}.items()},
            "WALLTIME": str(self._walltime(proposal)),
            **places(site, self.implementation.reads),
            **site.environment,
        }
        return Job(
            name=job_name,
            folder=folder,
            files={self._file_name(proposal): render(exports, before=sources, after=[_WALLTIME])},
            argv=(self._settings.script,),
            environment=environment,
            cwd=self.implementation.folder,
            log=attempt.log,
            run_logs=tuple(logs / f"run_{i + 1}.log" for i in range(proposal.replicates)),
            resources=Resources(
                nodes=self._nodes(proposal),
                gpus_per_node=site.gpus_per_node,
                minutes=float(self._walltime(proposal)),
            ),
            script=True,
        )

    def check(self) -> list[str]:
        """The implementation's folder, and container, data and model where it has no value for them.

        Raises SetupError when one is missing; returns a sentence for each that this machine does not see.
        """
        found = self.implementation
        known = {**found.values, **places(self._study.site, found.reads), **self._study.site.environment}
        for names in required(found.reads - found.defaults):
            if not any(known.get(name) for name in names):
                ours = next(n for n, others in ALSO.items() if set(names) & {n, *others})
                key = {"CONT": "container", "DATADIR": "data", "MODEL": "model"}.get(ours, f"environment.{ours}")
                raise SetupError(
                    f"{names[0]} is not set, and {found.folder} needs it; set site.{key}, or export {names[0]}"
                )
        job = self.job(some_proposal(self._study), Path("/tmp/check"))
        elsewhere = [f"{found.folder}: {_ELSEWHERE}"] if found.in_container and self._settings.reads is None else []
        return [
            *elsewhere,
            *unseen({name: known[name] for names in required(found.reads) for name in names if known.get(name)}),
            *script_doubts(found.folder / self._settings.script, job.environment),
        ]

    def reader(self, proposal: Proposal | None = None) -> LogReader:
        """run.sub's output holds MLLOG lines behind rank prefixes."""
        return reader_of(self._study, MllogReader())

    def export(self, proposal: Proposal, provenance: tuple[str, ...]) -> Export:
        """The config as its users keep it: beside config_common.sh, which it sources from its own folder."""
        name = self._file_name(proposal)
        place = Path(*self.implementation.common[:1]).parent
        before = "".join(f"source {shlex.quote(file)} && " for file in self._settings.before)
        site = self._study.site
        submit = shlex.join(["sbatch", *site.sbatch_words(self._nodes(proposal))]).replace(
            "sbatch", "sbatch -N $DGXNNODES -t $WALLTIME", 1
        )
        steps = "".join(f"{name}={shlex.quote(value)} " for name, value in site.step_variables().items())
        sources = [
            f'source "$(dirname "${{BASH_SOURCE[0]}}")"/{shlex.quote(Path(common).name)}'
            for common in self.implementation.common
        ]
        usage = (
            f"cp {name} {shlex.quote(str(self.implementation.folder / place))}/ && "
            f"cd {shlex.quote(str(self.implementation.folder))} && {before}source {place / name} && "
            f"{steps}{submit} {self._settings.script}"
        )
        needed = [n for name, also in ALSO.items() for n in (name, *also) if n in self.implementation.reads]
        comments = (*provenance, f"Run, with {', '.join(needed or ['CONT'])} and LOGDIR exported: {usage}")
        text = render(self._exports(proposal), comments=comments, before=sources, after=[_WALLTIME])
        return Export(files={name: text}, usage=usage)

    # -- values

    def _exports(self, proposal: Proposal) -> dict[str, Value]:
        """What the config sets, in this implementation's names."""
        site = self._study.site
        values = {**proposal.parameters, **self._evals(proposal)}
        values.pop("NODES", None)  # DGXNNODES, below
        if proposal.probe:
            values |= _probe(self._gbs(proposal))
        exports = spelled(values, self.implementation)
        exports |= {
            "DGXNNODES": self._nodes(proposal),
            "DGXNGPU": site.gpus_per_node,
            "DGXSYSTEM": self._file_name(proposal).removeprefix("config_").removesuffix(".sh"),
            "WALLTIME_RUNANDTIME": self._run_minutes(),
        }
        _refuse_illegal({**self.implementation.values, **exports})
        return exports

    @functools.cached_property
    def benchmark(self) -> Benchmark:
        """The benchmark under the study's ruleset, else under the one that the implementation's scripts name."""
        stated = self._study.objective.ruleset or stated_ruleset(self.implementation.folder / self._settings.script)
        return find_benchmark(self._settings.benchmark, stated)

    def _evals(self, proposal: Proposal) -> dict[str, Value]:
        """The eval schedule in the implementation's terms: the rules' for this GBS unless the study says otherwise.

        Nothing where the rules count epochs, or where steps are counted and the first evals skipped: there the
        implementations keep the rules by themselves.
        """
        gbs, given = self._gbs(proposal), (self._settings.first_eval, self._settings.eval_every)
        rule, tuned = self.benchmark.eval_schedule(gbs), proposal.parameters.get("VAL_CHECK_INTERVAL")
        in_steps = self.benchmark.name in INTERVAL_IN_STEPS
        asked = bool(tuned or any(given))
        if rule is None or self.benchmark.progress == "epoch_num":
            return {}
        if (
            in_steps
            and not asked
            and (rule.first_samples > rule.interval_samples or not self.implementation.knows("VAL_CHECK_INTERVAL"))
        ):
            return {}
        unit = gbs if in_steps else 1
        every = int(tuned) if tuned else math.ceil((self._settings.eval_every or rule.interval_samples) / unit)
        first = self._settings.first_eval or int(rule.first_samples)
        derived: dict[str, Value] = {
            "VAL_CHECK_INTERVAL": every, "SKIP_EVALS": max(0, round(first / (every * unit)) - 1),
        }  # fmt: skip
        if not self.implementation.mentions("SKIP_EVALS", "SKIP_EVAL"):
            del derived["SKIP_EVALS"]
        return {name: value for name, value in derived.items() if name not in proposal.parameters}

    def _file_name(self, proposal: Proposal) -> str:
        site = self._study.site
        return config_file_name(
            site.system, self._nodes(proposal), site.gpus_per_node, self._layout(proposal), self._settings.suffix
        )

    def _nodes(self, proposal: Proposal) -> int:
        return self._study.search_space.node_count(proposal.parameters)

    def _layout(self, proposal: Proposal) -> Layout:
        """The effective layout: what the study leaves open comes from config_common.sh."""
        set_there = self.implementation.values
        inherited = {
            name: set_there[known]
            for name in ("TP", "PP", "CP", "MBS", "MINIBS")
            if (known := next((n for n in (name, *ALIASES.get(name, ())) if n in set_there), None))
        }
        return layout_of({**inherited, **proposal.parameters})

    def _gbs(self, proposal: Proposal) -> int:
        given = proposal.parameters.get("GBS") or self.implementation.values.get("GLOBAL_BATCH_SIZE")
        gpus = self._study.search_space.gpu_count(proposal.parameters)
        return int(given) if given else self._layout(proposal).gbs(gpus)

    def _run_minutes(self) -> int:
        return math.ceil(self._study.budget.trial_minutes)

    def _walltime(self, proposal: Proposal) -> int:
        return 5 + proposal.replicates * (self._run_minutes() + 5)


_WALLTIME = "export WALLTIME=$((5 + ${NEXP:-1} * (WALLTIME_RUNANDTIME + 5)))"


_STATED = re.compile(r"MLPERF_STATED:?[=-]\"?(\d+\.\d+\.\d+)")


def stated_ruleset(script: Path) -> str | None:
    """The ruleset that a batch script sets MLPERF_STATED to by itself; None where it names none that is installed."""
    try:
        found = _STATED.search(script.read_text(encoding="utf-8", errors="replace"))
    except OSError:  # the implementation's own check says that it is missing
        return None
    return found[1] if found and found[1] in rulesets() else None


def spelled(values: Mapping[str, Value], implementation: Implementation) -> dict[str, Value]:
    """``values`` under the names that the implementation reads.

    Raises InputError for a value that it reads under no name: such a knob has no effect.
    """
    found: dict[str, Value] = {}
    for name, value in values.items():
        known = implementation.spelling((name, *ALIASES.get(name, ())))
        follows = name == "GBS" and not implementation.mentions("GBS", *ALIASES["GBS"])  # from MINIBS
        if known is not None and not follows:
            found[known] = value
        elif name == "WARMUP_STEPS" and implementation.knows("WARMUP_RATIO"):
            found["WARMUP_RATIO"] = float(value) / float(values["MAX_STEPS"])
        elif name == "MINIBS" and implementation.knows("GLOBAL_BATCH_SIZE"):
            continue  # the batch is given whole
        elif name != "GBS" and NEUTRAL.get(name) != value:
            near = difflib.get_close_matches(name, sorted(implementation.reads), n=3)
            hint = f"; it reads {', '.join(near)}" if near else ""
            raise InputError(
                f"space.{name}: no file in {implementation.folder} reads {name}, so setting it has no effect{hint}; "
                "remove it or name the variable that it reads"
            )
    return found


def _probe(gbs: int) -> dict[str, Value]:
    """Two short blocks with an eval behind each, and an end of its own should nobody stop it."""
    return {"VAL_CHECK_INTERVAL": PROBE_STEPS * gbs, "SKIP_EVALS": 0, "MAX_STEPS": 2 * PROBE_STEPS}


def _refuse_illegal(values: Mapping[str, Value]) -> None:
    """Combinations that NVIDIA's code rejects or silently ignores (v4.0 to v5.1)."""

    def on(name: str) -> bool:
        return str(values.get(name, "")).lower() in ("1", "true")

    if on("FP8") and on("FP4"):
        raise InputError("FP8 and FP4 are both on; the implementation allows one of them")
    if str(values.get("CP_EVAL", "")) not in ("", "1", "null"):
        raise InputError(f"CP_EVAL={values['CP_EVAL']}; only 1 or unset works")
