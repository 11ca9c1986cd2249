"""Files that a trial needs: container, data, model, the implementation, and where the sweep itself writes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from lora_tune.checks import Finding, good, problem, warning
from lora_tune.errors import LoraTuneError, StoreError
from lora_tune.mounts import NETWORK, file_system, mountinfo
from lora_tune.store import safe_url, server_version
from lora_tune.study import Study
from lora_tune.workloads.base import Proposal
from lora_tune.workloads.implementation import Implementation
from lora_tune.workloads.mlperf import MlperfWorkload

GB = 1e9
MODEL_GB = 130
"""Llama-2-70B in 16 bit: 69 B parameters, two bytes each."""
FREE_GB = 300
"""What the implementation's own README asks for to prepare data and model."""
HEALTHY_BANDWIDTH = 300.0
"""Bus bandwidth of NCCL's all-reduce on a DGX H100, GB/s; below it training is slow."""


def container(image: str | None) -> Finding:
    """CONT: a .sqsh file, or a registry's image name."""
    why = "run.sub starts every step in this container, and ends with 'CONT: CONT not set' without"
    if not image:
        return problem("no container", why, "set site.container, or export CONT=/path/to/image.sqsh")
    path = Path(image)
    if not path.is_absolute() and "." not in path.suffix:
        return warning(
            f"container {image} is a registry's image",
            "every job pulls it anew, which takes minutes and may be throttled",
            f"enroot import -o lora.sqsh docker://{image}, then site.container = the file's absolute path",
        )
    mend = "enroot import -o /shared/lora.sqsh dockerd://IMAGE, then site.container = that path"
    if not path.is_file():
        return problem(f"container {image} is not there", why, mend)
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"hsqs":  # the first bytes of every squashfs
        return problem(f"container {image} is no squashfs file", "enroot cannot start it", mend)
    return good(f"container {image}, {path.stat().st_size / GB:.1f} GB")


def data(folder: str | None) -> Iterator[Finding]:
    """DATADIR with the two prepared arrays."""
    why = "mountcheck ends the job with a RuntimeError without it"
    if not folder:
        yield problem("no data folder", why, "set site.data, or export DATADIR=/path/to/gov_report")
        return
    root = Path(folder)
    place = next((p for p in (root, root / "gov_report") if (p / "train.npy").is_file()), root)
    for name in ("train.npy", "validation.npy"):
        file = place / name
        mend = "prepare it with the implementation's scripts (convert_dataset.py), or correct site.data"
        if not file.is_file():
            yield problem(f"{file} is not there", why, mend)
            continue
        with file.open("rb") as opened:
            magic = opened.read(6)
        if magic != b"\x93NUMPY":
            yield problem(f"{file} is no NumPy array", "training stops when it reads it", mend)
        else:
            yield good(f"{file}, {file.stat().st_size / 1e6:.0f} MB")


def model(folder: str | None) -> Iterator[Finding]:
    """MODEL with ``context`` and ``weights``, whole."""
    why = "every rank loads it before run_start"
    if not folder:
        yield problem("no model folder", why, "set site.model, or export MODEL=/path/to/model")
        return
    root = Path(folder)
    mend = "convert it with the implementation's scripts (convert_model.py), or correct site.model"
    for name in ("context", "weights"):
        files = [p for p in (root / name).rglob("*") if p.is_file()] if (root / name).is_dir() else []
        size = sum(p.stat().st_size for p in files)
        if not files:
            yield problem(f"{root / name} is not there or empty", why, mend)
        elif name == "weights" and size < MODEL_GB * GB:
            what = f"{root / name} holds {size / GB:.1f} GB in {len(files)} files; Llama-2-70B has {MODEL_GB} GB"
            yield problem(what, "it is not whole: a copy was cut short, or it is another model", mend)
        elif empty := [p.name for p in files if p.stat().st_size == 0]:
            yield problem(f"{root / name}: {', '.join(empty[:3])} is empty", "a copy was cut short", mend)
        else:
            yield good(f"{root / name}, {size / GB:.1f} GB in {len(files)} files")


PRETRAINING = ("PREPROC_DATA", "LOAD_CHECKPOINTS_PATH", "TOKENIZER")
"""What a Llama 3.1 405B job mounts."""


def mounted(name: str, folder: str | None) -> Finding:
    """A folder that every node of a job mounts."""
    why = "the job's mount check ends it with a RuntimeError, on all of its nodes"
    if not folder:
        return problem(f"{name} is not set", why, f"export {name}=FOLDER, or set it in [site.environment]")
    if not Path(folder).is_dir() or not any(Path(folder).iterdir()):
        return problem(f"{name}: {folder} is not there or empty", why, "correct it, or prepare the folder")
    return good(f"{name}: {folder}")


def free_space(folder: Path, wanted_gb: float, why: str) -> Finding:
    """Free space where ``folder`` is, or will be."""
    place = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(place).free / GB
    if free < wanted_gb:
        return problem(f"{free:.0f} GB free at {place}", why, f"free {wanted_gb - free:.0f} GB, or use another disk")
    return good(f"{free:.0f} GB free at {place}")


def database(folder: Path, mounts: str | None = None) -> Finding:
    """Whether the sweep's SQLite file would lie on a network file system. ``mounts``: text of /proc/self/mountinfo."""
    kind = file_system(folder, mountinfo() if mounts is None else mounts) or "an unknown file system"
    if kind in NETWORK:
        return problem(
            f"{folder} is on {kind}",
            "SQLite's locks do not hold there: a second host corrupts the database, so a sweep refuses to begin",
            "keep the sweep folder, and put the database on a local disk (--storage sqlite:////LOCAL/DISK/sweep.db) "
            "or use --storage postgresql+psycopg://...",
        )
    return good(f"the database at {folder} is on {kind}")


def server(url: str) -> Finding:
    """Whether the PostgreSQL server answers."""
    try:
        return good(f"the database {safe_url(url)} answers: {server_version(url)}")
    except StoreError as error:
        return problem(str(error), "every record of the sweep lies there", "start the server, or correct the URL")


def implementation(workload: MlperfWorkload, study: Study) -> Iterator[Finding]:
    """The implementation's folder, and whether it reads every knob of the study."""
    try:
        found = workload.implementation
    except LoraTuneError as error:
        yield problem(str(error), "its run.sub is what a trial runs", "give workload.implementation the folder's path")
        return
    yield good(f"implementation {found.folder}, {len(found.reads)} variables read")
    if re.search(r"\s", str(found.folder)):
        what = f"{found.folder} has a space in it"
        yield problem(what, "its scripts do not quote their paths", "move the folder to a path without spaces")
    space = study.search_space
    try:
        proposal = Proposal(number=0, attempt=0, seed=1, parameters=space.resolve(space.corner()))
        workload.job(proposal, Path("/tmp/doctor"))
        yield good(f"it reads all of {', '.join(study.space)}")
    except LoraTuneError as error:
        yield problem(str(error), "tuning a knob that nothing reads measures noise", "correct the study's [space]")


def sudo_calls(found: Implementation, script: str) -> list[str]:
    """The commands that the batch script runs with sudo, as it writes them."""
    text = (found.folder / script).read_text(encoding="utf-8", errors="replace")
    return sorted({match.strip() for match in re.findall(r"sudo\s+(?:-n\s+)?([^\s\"';|&]+)", text)})


def bandwidth(folders: list[Path]) -> Finding:
    """The newest NCCL test that a run left behind."""
    logs = sorted((log for f in folders for log in f.rglob("*_nccl.log")), key=lambda log: log.stat().st_mtime)
    readings = [
        (log, float(match[1]))
        for log in logs
        if (match := re.search(r"Avg bus bandwidth\s*:\s*([\d.]+)", log.read_text(errors="replace")))
    ]
    if not readings:
        return good("no NCCL test on record yet; run.sub makes one unless NCCL_TEST=0")
    log, reading = readings[-1]
    if reading < HEALTHY_BANDWIDTH:
        return warning(
            f"NCCL bus bandwidth {reading:g} GB/s ({log})",
            f"a healthy DGX H100 has more than {HEALTHY_BANDWIDTH:g}; trials on such a node are slow and unlike others",
            "nvidia-smi topo -m; nvidia-smi nvlink -s; ask the administrator to drain the node",
        )
    return good(f"NCCL bus bandwidth {reading:g} GB/s ({log})")
