"""Folders whose launch script is none that a workload drives: what starts their training, and what they need.

Such a folder starts a container on each node by hand, or ranks by ``mpirun`` within a cloud's job, and takes its config
from the image or by a fixed name. What is said here is read from the scripts, comments left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lora_tune.workloads.script_needs import code_of, sourced_configs

DRIVEN = {"run.sub": "mlperf", "run_with_docker.sh": "mlperf_docker"}
"""Launch scripts of public rounds, and the workload that drives each."""

_CONTAINER = re.compile(r"^\s*(?:exec\s+)?(?:sudo\s+)?(?:docker|podman|nerdctl)\s+(?:run|exec)\b", re.MULTILINE)
_RANKS = re.compile(r"^\s*(?:exec\s+)?(?:mpirun|mpiexec|orterun)\b", re.MULTILINE)
_OWN_CONFIG = re.compile(r"--config\w*[= ]\s*[\"']?(\S*config_\S*?\.sh)")
_TRAINS = re.compile(r"\btrain\.py\b")
_BY_COMMAND = 'workload.kind = "command" can drive it (docs/mlperf.md shows how)'


def other_starters(folder: Path) -> str:
    """What starts the training in ``folder``, and what a study needs to drive that; "" where nothing is recognised."""
    driven = [
        f'{name} is there: workload.kind = "{kind}"' for name, kind in DRIVEN.items() if (folder / name).is_file()
    ]
    scripts = {file: code_of(file) for file in sorted(folder.glob("*.sh")) if not file.name.startswith("config")}
    starts = [sentence for script, code in scripts.items() for sentence in _about(script, code)]
    trains = [
        f"{script.name} trains in a container that runs already, with the variables of its shell; {_BY_COMMAND}"
        for script, code in scripts.items()
        if _TRAINS.search(code)
    ]
    return "; ".join(driven or starts or trains)


def _about(script: Path, code: str) -> Iterator[str]:
    """What one script starts, and why a trial's config would not reach it as it is."""
    own = _OWN_CONFIG.search(code)
    if _CONTAINER.search(code):
        takes = f"takes {own[1]} from the image" if own else "passes on only the variables that it names"
        yield f"{script.name} starts a container by itself, on each node by hand, and {takes}; {_BY_COMMAND}"
    elif _RANKS.search(code):
        yield f"{script.name} starts ranks by mpirun, within a job that something else has begun; {_BY_COMMAND}"
    if fixed := ", ".join(sourced_configs(script)):
        yield f"{script.name} sources {fixed} itself: what that sets, no trial can; export a trial's behind it"
