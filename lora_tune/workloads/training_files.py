"""Checks of files for training Llama-2-70B and similar models: container, data, model, and the last NCCL test."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_tune.base.errors import Finding, good, problem, warning
from lora_tune.workloads.base import is_image_file

GB = 1e9
MODEL_GB = 130
"""Llama-2-70B in 16 bit: 69 B parameters, two bytes each."""
FREE_GB = 300
"""Space that the implementation's README asks for to prepare data and model."""
LINK_RATES = {"A100": 300.0, "H100": 450.0, "H200": 450.0, "B200": 900.0, "B300": 900.0, "MI3": 448.0}
"""GB/s of one GPU's links within its node, one way (NVLink 3, 4, 5; xGMI), by a part of the GPU's name."""
HEALTHY_SHARE = 2 / 3
"""Share of the link rate that a healthy node's all-reduce reaches in bus bandwidth: 300 GB/s on a DGX H100."""


def container(image: str | None) -> Finding:
    """CONT: a .sqsh file, or a registry's image name."""
    why = "run.sub starts every step in this container, and ends with 'CONT: CONT not set' without it"
    if not image:
        return problem("no container", why, "set site.container, or export CONT=/path/to/image.sqsh")
    path = Path(image)
    if not is_image_file(image):
        return warning(
            f"container {image} is a registry's image",
            "every job pulls it again, which takes minutes and may be throttled",
            f"enroot import -o lora.sqsh docker://{image}, then site.container = the file's absolute path",
        )
    fix = "enroot import -o /shared/lora.sqsh dockerd://IMAGE, then site.container = that path"
    if not path.is_file():
        return problem(f"container {image} is not there", why, fix)
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"hsqs":  # magic number of squashfs
        return problem(f"container {image} is not a squashfs file", "enroot cannot start it", fix)
    return good(f"container {image}, {path.stat().st_size / GB:.1f} GB")


def docker_image(image: str | None) -> Finding:
    """CONT of a launch script that starts its own container: an image that the engine has, or can pull."""
    why = "the launch script starts the training in this container"
    if not image:
        return problem("no container", why, "set site.container, or export CONT=IMAGE")
    if shutil.which("docker") is None:
        fix = "nothing to do where trials run on other nodes that have it; otherwise install Docker, or podman-docker"
        return warning("docker is not on PATH here", "the launch script calls it on the node", fix)
    inspected = subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=False, timeout=60)
    if inspected.returncode:
        return warning(
            f"container {image} is not among the images of this machine",
            "docker run pulls it again on each node, or fails",
            f"docker pull {image}, or build it with the implementation's Dockerfile, on each node",
        )
    return good(f"container {image}, known to docker")


def data(folder: str | None) -> Iterator[Finding]:
    """DATADIR with the two prepared arrays."""
    why = "mountcheck ends the job with a RuntimeError without it"
    if not folder:
        yield problem("no data folder", why, "set site.data, or export DATADIR=/path/to/gov_report")
        return
    root = Path(folder)
    place = next((p for p in (root, root / "gov_report", root / "data") if (p / "train.npy").is_file()), root)
    for name in ("train.npy", "validation.npy"):
        file = place / name
        fix = "prepare it with the implementation's scripts (convert_dataset.py), or correct site.data"
        if not file.is_file():
            yield problem(f"{file} is not there", why, fix)
            continue
        with file.open("rb") as opened:
            magic = opened.read(6)
        if magic != b"\x93NUMPY":
            yield problem(f"{file} is not a NumPy array", "training stops when it reads it", fix)
        else:
            yield good(f"{file}, {file.stat().st_size / 1e6:.0f} MB")


@dataclass(frozen=True, slots=True)
class CheckpointForm:
    """A format of Llama-2-70B on disk: its parts, and which of them hold the weights (globs)."""

    name: str
    parts: tuple[str, ...]
    weights: str


CHECKPOINTS = (
    CheckpointForm("NeMo 2 (v5.0, v5.1)", ("context", "weights"), "weights"),
    CheckpointForm("NeMo 1, unpacked (v4.0, v4.1)", ("model_config.yaml", "model_weights"), "model_weights"),
    CheckpointForm("NeMo 1 (v4.0, v4.1)", ("*.nemo",), "*.nemo"),
    CheckpointForm("Megatron Bridge (v6.0)", ("iter_*/run_config.yaml", "iter_*/*.distcp"), "iter_*"),
    CheckpointForm("Hugging Face", ("config.json", "*.safetensors"), "*.safetensors"),
)
"""The formats that public rounds load, most specific first."""


def model(folder: str | None) -> Iterator[Finding]:
    """MODEL in one of the ``CHECKPOINTS`` formats, complete; in the folder itself or in its ``model``."""
    why = "every rank loads it before run_start"
    if not folder:
        yield problem("no model folder", why, "set site.model, or export MODEL=/path/to/model")
        return
    root, fix = Path(folder), "convert it with the implementation's scripts, or correct site.model"
    candidates = [
        (place, form, [part for part in form.parts if not any(place.glob(part))])
        for place in (root, root / "model")
        for form in CHECKPOINTS
    ]
    place, form, absent = min(candidates, key=lambda one: len(one[2]) / len(one[1].parts))
    if len(absent) == len(form.parts):
        forms = "; ".join(f"{form.name}: {', '.join(form.parts)}" for form in CHECKPOINTS)
        yield problem(f"{root} holds no model of a known form ({forms})", why, fix)
        return
    for part in absent:
        yield problem(f"{place / part} is not there or empty, while the rest of {form.name} is there", why, fix)
    files = [f for p in place.glob(form.weights) for f in ([p] if p.is_file() else p.rglob("*")) if f.is_file()]
    size = sum(f.stat().st_size for f in files)
    if form.weights not in absent and not files:
        yield problem(f"{place / form.weights} is not there or empty", why, fix)
    elif empty := [f.name for f in files if f.stat().st_size == 0 and f.suffix != ".metadata"]:
        yield problem(f"{place / form.weights}: {', '.join(empty[:3])} is empty", "a copy was cut short", fix)
    elif files and size < MODEL_GB * GB:
        what = f"{place / form.weights} holds {size / GB:.1f} GB in {len(files)} files; Llama-2-70B has {MODEL_GB} GB"
        yield problem(what, "it is incomplete: a copy was cut short, or it is another model", fix)
    elif not absent:
        yield good(f"{place}, {form.name}, {size / GB:.1f} GB of weights in {len(files)} files")


MOUNTED = ("DATADIR", "PREPROC_DATA", "LOAD_CHECKPOINTS_PATH", "TOKENIZER")
"""Variables of mounts of benchmarks other than LoRA, if their files read them."""


def mounted(name: str, folder: str | None) -> Finding:
    """A folder that every node of a job mounts."""
    why = "the job's mount check ends it with a RuntimeError, on all of its nodes"
    if not folder:
        return problem(f"{name} is not set", why, f"export {name}=FOLDER, or set it in [site.environment]")
    if not Path(folder).is_dir() or not any(Path(folder).iterdir()):
        return problem(f"{name}: {folder} is not there or empty", why, "correct it, or prepare the folder")
    return good(f"{name}: {folder}")


def bandwidth(folders: list[Path], system: str, nodes: int) -> Finding:
    """The newest NCCL test of a run, compared with the links of the machine's GPUs.

    system: the site's name, if the log does not name its GPUs. Across nodes the network limits the bandwidth, so that
    the value is reported without a judgement.
    """
    logs = sorted((log for f in folders for log in f.rglob("*_nccl.log")), key=lambda log: log.stat().st_mtime)
    readings = [
        (log, float(match[1]), text)
        for log in logs
        if (match := re.search(r"Avg bus bandwidth\s*:\s*([\d.]+)", text := log.read_text(errors="replace")))
    ]
    if not readings:
        return good("no NCCL test on record yet; run.sub makes one unless NCCL_TEST=0")
    log, reading, text = readings[-1]
    devices = " ".join(re.findall(r"^.*\bdevice\b.*$", text, re.MULTILINE))
    gpu = next((name for described in (devices, system) for name in LINK_RATES if name in described), None)
    if gpu is None or nodes > 1:
        unknown = f"no threshold is known for {system}" if gpu is None else "not judged across nodes"
        return good(f"NCCL bus bandwidth {reading:g} GB/s ({log}); {unknown}")
    healthy = HEALTHY_SHARE * LINK_RATES[gpu]
    if reading < healthy:
        return warning(
            f"NCCL bus bandwidth {reading:g} GB/s ({log})",
            f"a healthy node of {gpu} has more than {healthy:.0f}; trials on such a node are slow and unlike others",
            "nvidia-smi topo -m; nvidia-smi nvlink -s; ask the administrator to drain the node",
        )
    return good(f"NCCL bus bandwidth {reading:g} GB/s ({log}); a healthy node of {gpu} has more than {healthy:.0f}")
