"""What ``doctor`` shows of an MLPerf implementation: folder, base config, whether it reads what a study tunes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lora_tune.base.errors import Finding, LoraTuneError, free_space, good, problem, warning
from lora_tune.base.paths import SweepPaths
from lora_tune.mlperf.benchmark import LORA
from lora_tune.workloads.base import PYXIS, some_proposal
from lora_tune.workloads.mlperf_checks import about_base, other_benchmark, other_scripts, same_machine
from lora_tune.workloads.places import misplaced
from lora_tune.workloads.script_needs import own_nodes, path_doubts, script_doubts
from lora_tune.workloads.training_files import (
    FREE_GB,
    MOUNTED,
    bandwidth,
    container,
    data,
    docker_image,
    model,
    mounted,
)

if TYPE_CHECKING:
    from lora_tune.workloads.mlperf import MlperfWorkload


def findings(workload: MlperfWorkload, paths: SweepPaths) -> Iterator[Finding]:
    """The implementation, the container, what is trained from, and the NCCL test of the last run."""
    yield from _implementation(workload, paths.attempt(0, 0).folder)
    known, site = workload.known_places(), workload.study.site
    yield from _container(workload, known, paths.attempt(0, 0).folder)
    benchmark = workload.study.benchmark
    if benchmark is not None and benchmark.name != LORA:
        yield from (mounted(name, known.get(name)) for name in _mounted_names(workload))
    else:
        yield from _data_and_model(known, paths)
    if workload.engine == PYXIS:  # run_with_docker.sh makes no NCCL test
        folders = [folder for folder in (paths.root, site.log_folder) if folder and folder.is_dir()]
        yield bandwidth(folders, site.system, site.nodes)


def _container(workload: MlperfWorkload, known: Mapping[str, str], trial: Path) -> Iterator[Finding]:
    """The container, and every place that is named by a path that jobs do not find. trial: a trial's own folder."""
    lost = []
    with contextlib.suppress(LoraTuneError):  # without the folder, which is said above
        lost = misplaced(known, workload.implementation.folder if workload.engine == PYXIS else trial)
    for sentence in lost:
        what, _, fix = sentence.rpartition("; ")
        yield problem(what, "every trial would look for it there", fix)
    if not any(sentence.startswith("CONT") for sentence in lost):
        yield (container if workload.engine == PYXIS else docker_image)(known.get("CONT"))


def _mounted_names(workload: MlperfWorkload) -> list[str]:
    """The places that the folder's files read and have no value of their own for."""
    try:
        tree = workload.implementation
    except LoraTuneError:  # said above
        return []
    return [name for name in MOUNTED if name in tree.reads - tree.defaults]


def _data_and_model(known: Mapping[str, str], paths: SweepPaths) -> Iterator[Finding]:
    """What Llama-2-70B LoRA is trained from."""
    yield from data(known.get("DATADIR"))
    yield from model(known.get("MODEL"))
    place = Path(known.get("MODEL") or paths.root)
    if not place.is_dir():
        yield free_space(place, FREE_GB, "preparing data and model takes that much")


def _doubts(remarks: Iterable[str], why: str) -> Iterator[Finding]:
    """A warning for each remark, whose last part is the remedy."""
    for remark in remarks:
        what, _, fix = remark.rpartition("; ")
        yield warning(what, why, fix)


def _implementation(workload: MlperfWorkload, trial: Path) -> Iterator[Finding]:
    """The implementation's folder, and whether it reads every knob of the study. trial: a trial's own folder."""
    try:
        implementation = workload.implementation
    except LoraTuneError as error:
        script = workload.settings.script
        yield problem(str(error), f"its {script} is what a trial runs", "see above, or correct workload.implementation")
        return
    shared = f"; every config sources {', '.join(implementation.common)}" if implementation.common else ""
    yield good(f"implementation {implementation.folder}, {len(implementation.reads)} variables read{shared}")
    yield from _doubts(other_benchmark(workload), "a run that meets another benchmark's target is refused at its end")
    yield from _doubts(other_scripts(workload), "a script that was changed for this machine starts training otherwise")
    yield from _base(workload)
    if implementation.in_container:
        yield warning(
            "the training code is not in this folder: no file here reads LR, LEARNING_RATE or MAX_STEPS",
            "which variables have an effect, only the container can tell",
            'nothing to do where the names are right; workload.reads = "folder" if the code is here',
        )
    try:
        job = workload.job(some_proposal(workload.study), trial)
        if not implementation.in_container:
            unread = workload.unread_switches()
            yield good(f"it reads all of {', '.join(n for n in workload.study.space if n not in unread)}")
            if unread:
                yield warning(
                    f"no file in it reads {', '.join(unread)}",
                    "these switches are not swept, and stay as they are",
                    "nothing to do; or remove them from [space]",
                )
        nodes = own_nodes(implementation.folder / Path(job.argv[-1]).name)
        if nodes and workload.study.site.nodelist is None:
            yield problem(
                f"{Path(job.argv[-1]).name} asks for the nodes {nodes} by name",
                "they are another cluster's, or too many for a trial",
                "name yours in site.nodelist, which overrides that line",
            )
        launched = implementation.folder / Path(job.argv[-1]).name
        for doubt in (*path_doubts(job), *script_doubts(launched, job.environment)):
            what, _, fix = doubt.rpartition("; ")
            yield problem(what, "every trial would run into it", fix)
    except LoraTuneError as error:
        yield problem(str(error), "tuning a knob that nothing reads measures noise", "correct the study's [space]")


def _base(workload: MlperfWorkload) -> Iterator[Finding]:
    """The machine's own config that trials start from, or which one they pass over."""
    why, fix = "what makes a machine fast stands in its own config", "set workload.base"
    if workload.base is not None:
        why, fix = "trial 0 is that config, and all others are compared with it", "correct it, or name another"
    try:
        same_machine(workload)
        remarks = about_base(workload)
    except LoraTuneError as error:
        yield problem(str(error), why, "correct workload.base or the site")
        return
    if workload.base is not None:
        yield good(f"trial 0 is {workload.base.file} as it stands; all others change it")
    for remark in remarks:
        yield warning(remark, why, f"nothing to do if that is intended; otherwise {fix}")
