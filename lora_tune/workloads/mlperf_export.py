"""A trial of ``run.sub`` as a config that can be submitted: base and changed lines under a name of its own."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lora_tune.base.errors import InputError
from lora_tune.base.text import redact
from lora_tune.workloads.base import ALSO, Export, Proposal, Value
from lora_tune.workloads.config_file import render, source_lines
from lora_tune.workloads.walltime import own_limit

if TYPE_CHECKING:
    from lora_tune.workloads.mlperf import MlperfWorkload

WALLTIME = "export WALLTIME=$((5 + ${NEXP:-1} * (WALLTIME_RUNANDTIME + 5)))"


def export(
    workload: MlperfWorkload, proposal: Proposal, provenance: tuple[str, ...], submit: str | None = None
) -> Export:
    """The file, and the line that puts it into the implementation and runs it. submit: how, where not by ``sbatch``.

    Raises InputError where no name for it is free.
    """
    place = workload.config_place
    limits = {} if submit else _limits(workload, proposal)  # sbatch alone is given a limit
    exports = {**_system(workload), **workload.exports(proposal), **limits}
    after = [WALLTIME] if limits else []
    text = render(exports, comments=_comments(workload, provenance), before=_sources(workload), after=after)
    folder = workload.implementation.folder
    name, there = _free_name(workload, proposal, folder / place, text)
    text = _named(workload, proposal, text, name)
    copy = "" if there else f"cp -n {shlex.quote(name)} {shlex.quote(str(folder / place))}/ && "
    before = "".join(f"source {shlex.quote(file)} && " for file in workload.settings.before)
    site = workload.study.site
    options = shlex.join(site.sbatch_words(workload.nodes(proposal)))
    sbatch = " ".join(filter(None, ("sbatch -N $DGXNNODES -t $WALLTIME", options, workload.settings.script)))
    variables = {**site.step_variables(), **site.environment}
    assignments = [assignment(name, value) for name, value in variables.items()]
    assignments += [f'{name}="${name}"' for name in site.secrets if name not in variables]
    steps = "".join(f"{word} " for word in assignments)
    left = [f"{n}={shlex.quote(v)}" for n, v in left_to_the_shell(workload, proposal).items()]
    assigned = f"export {' '.join(left)} && " if left else ""
    usage = (
        f"{copy}cd {shlex.quote(str(folder))} && {before}source {shlex.quote(str(place / name))} && {assigned}"
        f"{steps}{submit or sbatch}"
    )
    return Export(files={name: text}, usage=usage)


def left_to_the_shell(workload: MlperfWorkload, proposal: Proposal) -> Mapping[str, str]:
    """What launch scripts want to know of the machine and of time limits, and neither base config nor trial sets.

    A config into which its common file was copied makes its system's name of a file that does not source it: "".
    """
    if workload.base is None:
        return {}
    exports = workload.record(workload.exports(proposal)).exports
    wanted = {
        "DGXSYSTEM": workload.file_name(proposal).removeprefix("config_").removesuffix(".sh"),
        "DGXNNODES": str(workload.nodes(proposal)),
        "DGXNGPU": str(workload.study.site.gpus_per_node),
    }
    reads = workload.implementation.reads
    if "WALLTIME_RUNANDTIME" in reads and not _limits(workload, proposal):
        minutes = workload.run_minutes()
        wanted |= {"WALLTIME_RUNANDTIME": str(minutes), "WALLTIME": str(minutes + 10)}
    return {n: v for n, v in wanted.items() if n not in exports and (n in reads or n == "WALLTIME")}


def assignment(name: str, value: str) -> str:
    """``NAME=value`` for a command line; a secret is taken from the user's own shell instead."""
    shown = f"{name}={shlex.quote(value)}"
    return shown if redact(shown) == shown else f'{name}="${name}"'


def _system(workload: MlperfWorkload) -> Mapping[str, Value]:
    """The base's system where the export sources the common file by itself, which would name the export's."""
    base, exports = workload.base, workload.beneath.exports
    return {n: exports[n] for n in ("DGXSYSTEM",) if n in exports and base is not None and base.beside}


def _limits(workload: MlperfWorkload, proposal: Proposal) -> Mapping[str, Value]:
    """The run's time limit; nothing where the base config has one that is long enough, also for the whole job alone."""
    minutes = workload.run_minutes()
    long_enough = workload.is_base(proposal) or own_limit(workload.implementation.values)[1] >= minutes
    if workload.base is not None and long_enough:
        return {}
    return {"WALLTIME_RUNANDTIME": minutes}


def _comments(workload: MlperfWorkload, provenance: tuple[str, ...]) -> tuple[str, ...]:
    reads = workload.implementation.reads
    needed = [n for name, also in ALSO.items() for n in (name, *also) if n in reads]
    what = () if workload.base is None else (f"what it changes in {workload.base.name}, the machine's own config",)
    return (*provenance, *what, f"needs {', '.join(needed or ['CONT'])} and LOGDIR from the shell that sources it")


def _sources(workload: MlperfWorkload) -> list[str]:
    """The lines that source what the export builds on, beside which it lies."""
    base, folder = workload.base, workload.implementation.folder
    files = workload.implementation.common if base is None else (*base.beside, base.file)
    return source_lines([folder / file for file in files], beside=True)


def _free_name(workload: MlperfWorkload, proposal: Proposal, place: Path, text: str) -> tuple[str, bool]:
    """A name that is free where the export belongs, and whether the same export lies there already.

    The true name where nobody has it; else with study and trial behind it.
    """
    plain = workload.file_name(proposal)
    trial = proposal.number if proposal.number >= 0 else "unrun"  # put together of several, and run by none
    own = f"{plain.removesuffix('.sh')}_{workload.study.name}-{trial}.sh"
    for name in (plain, own):
        file = place / name
        if not file.exists():
            return name, False
        if _exports(file.read_text(encoding="utf-8", errors="replace")) == _exports(
            _named(workload, proposal, text, name)
        ):
            return name, True
    raise InputError(
        f"{place / own} is there already and holds something else; move it away, or set workload.suffix to give this "
        "study's exports a name of their own"
    )


def _named(workload: MlperfWorkload, proposal: Proposal, text: str, name: str) -> str:
    """The text with the system's name that follows from the file's; the base's own where nothing is changed."""
    if workload.is_base(proposal):
        return text
    plain = workload.file_name(proposal)
    before, after = (f"export DGXSYSTEM={n.removeprefix('config_').removesuffix('.sh')}\n" for n in (plain, name))
    return text.replace(before, after)


def _exports(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]
