"""What the ``#SBATCH`` lines of a batch script, and a site's own options, would make of a trial's job.

A script is submitted as it is, so that its header takes effect wherever the command line says nothing of the same.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence

from lora_tune.base.sbatch_options import SbatchOption, sbatch_options

_MAGIC = "#SBATCH"

_ONE_JOB = "a trial is one job, with one log"
_PROBLEMS = {
    "array": f"makes an array of jobs of each trial; {_ONE_JOB}",
    "clusters": "sends trials to a cluster where nobody looks for them; the sweep asks the one that SLURM_CONF names",
    "hetjob": f"makes several jobs of each trial; {_ONE_JOB}",
    "error": "keeps what a trial says of its failure out of its log",
    "output": "sends a trial's log where nobody reads it",
    "job-name": "renames the jobs that the sweep finds by their names",
    "parsable": "keeps from sbatch's answer what tells the job's id",
    "quiet": "keeps from sbatch's answer what tells the job's id",
    "test-only": "submits nothing",
    "wait": "keeps sbatch, and with it the sweep, until the job has ended; nothing would be watched meanwhile",
}
"""Option -> what it does to any trial."""
_VARIABLES = {
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_CLUSTERS": "clusters",
    "SLURM_CLUSTERS": "clusters",
    "SBATCH_EXPORT": "export",
    "SBATCH_WAIT": "wait",
}
"""What sbatch takes from its environment, which counts for more than a header."""
_OVERRULED = frozenset({"error", "job-name", "output", "quiet"})
"""What a header may say: our own word on the command line counts, and sbatch reads --quiet there alone."""


def header_options(script: str) -> list[SbatchOption]:
    """The options in the text of a batch script; sbatch reads them up to the first line that is a command."""
    words: list[str] = []
    for line in script.splitlines():
        if line.startswith(_MAGIC):
            words += _words(line.removeprefix(_MAGIC))
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return sbatch_options(words)


def environment_options(variables: Mapping[str, str]) -> list[SbatchOption]:
    """The options that ``sbatch`` takes from a job's variables."""
    return [SbatchOption(name, variables[v], f"{v}={variables[v]}") for v, name in _VARIABLES.items() if v in variables]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quote without its end
        return text.split()


def refusals(
    header: Sequence[SbatchOption],
    site: Sequence[SbatchOption],
    *,
    script: str,
    needed: Collection[str],
    nodes: int,
    environment: Sequence[SbatchOption] = (),
) -> list[str]:
    """Why no trial could run as its study has it, a sentence each.

    header, site: the options of the batch script and of ``site.sbatch_args``, of which the last one counts. script:
    the script's name, "" for a command that a batch file of ours starts. needed: the variables without which a job
    would not be its trial's. nodes: of one job. environment: the options in the variables of its jobs.
    """
    effective = {option.name: (option, f"{script}: #SBATCH {option.text}") for option in header}
    effective |= {option.name: (option, f"[site.environment] {option.text}") for option in environment}
    effective |= {option.name: (option, f"site.sbatch_args: {option.text}") for option in site}
    sentences = []
    for name, (option, place) in effective.items():
        of_header = place.startswith(f"{script}: #SBATCH")
        why = "" if of_header and name in _OVERRULED else _PROBLEMS.get(name, "")
        if name == "export":
            why = _kept_away(option.value, needed)
        elif name.startswith("ntasks") and not script:
            why = _several_tasks(name, option.value, nodes)
        if why:
            remedy = f"take it out of {f'a copy of {script}' if of_header else place.split()[0].rstrip(':')}"
            other = ', or write sbatch_args = ["--export=ALL"] in [site]' if of_header and name == "export" else ""
            sentences.append(f"{place} {why}; {remedy}{other}")
    return sentences


def _kept_away(value: str, needed: Collection[str]) -> str:
    """What ``--export=VALUE`` does to the variables ``needed``; "" where all arrive as they are."""
    items = [item.partition("=") for item in value.split(",")]
    named = {name for name, equals, _ in items if not equals}
    everything = "ALL" in {name.upper() for name in named}
    fixed = sorted({name for name, equals, _ in items if equals} & set(needed))
    if fixed:
        return f"sets {', '.join(fixed)} for every trial, whatever is proposed; trials set it themselves"
    absent = [] if everything else sorted(set(needed) - named)
    shown = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
    return f"keeps {shown} from the job, so that trials would train with the script's own values" if absent else ""


def _several_tasks(name: str, value: str, nodes: int) -> str:
    """What so many tasks do to a command that our batch file starts once on each node; "" for no more than that."""
    allowed = nodes if name == "ntasks" else 1
    if not re.fullmatch("[0-9]{1,9}", value) or int(value) <= allowed:
        return ""
    return f"starts the trial's command {value} times, and {allowed} is allowed; a command starts its ranks itself"
