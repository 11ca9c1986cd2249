"""The packs of one job: a process each, one a GPU. They share the job's folder, and live and end together.

A pack that ends by itself has failed, and its GPU would lie idle as long as the job lives: so the others are asked to
end, too. They save their trials, which go on with the rest in the next job. Packs that share one base (``FSDP=1``)
find each other in a folder on their node.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lora_tune.base.errors import InputError
from lora_tune.base.files import read_json, write_json
from lora_tune.launchers.pack_folder import PackFolder
from lora_tune_recipes.knobs import Knobs

DEVICES = "CUDA_VISIBLE_DEVICES"
PAUSE = 0.2
GRACE_SECONDS = 120.0
"""For packs that were asked to end: to finish a step or an evaluation, and to save their trials."""
TERMINATED = 143
"""Exit code of a job that SIGTERM ended."""


def run(command: Sequence[str], folder: PackFolder, packs: int, idle: float) -> int:
    """Run ``command --pack i`` for each of ``packs`` until nobody has asked for a trial for ``idle`` seconds.

    Returns the exit code of the job. Raises InputError where the job has fewer GPUs than packs.
    """
    devices = devices_of(os.environ, packs)
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    with _started(command, devices) as children:
        busy_at = time.monotonic()
        while not signals:
            failed = [(i, code) for i, child in enumerate(children) if (code := child.poll()) is not None]
            if failed:
                number, code = failed[0]
                print(f"pack {number} of {packs} ended with exit code {code}: the others are asked to end", flush=True)
                return code if code >= 0 else 128 - code
            if any(folder.open_requests()):
                busy_at = time.monotonic()
            elif folder.ends(time.monotonic() - busy_at, idle):
                return 0
            time.sleep(PAUSE)
    return TERMINATED


def devices_of(environment: Mapping[str, str], packs: int) -> list[str]:
    """The GPU of each pack, as its process is to see it. Raises InputError where there are too few.

    Where the job was given none by name, their numbers: without a GPU these say nothing.
    """
    listed = environment.get(DEVICES)
    if listed is None:
        return [str(number) for number in range(packs)]
    devices = [device for device in listed.split(",") if device]
    if 0 < len(devices) < packs:
        raise InputError(
            f"site.packs = {packs}: the job has {len(devices)} GPUs ({DEVICES}={listed}); allowed are as many packs as "
            "GPUs, or correct site.gres"
        )
    return devices[:packs] or [""] * packs


@contextlib.contextmanager
def _started(command: Sequence[str], devices: Sequence[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A process for each device; at the end each is asked to end, and killed where it does not."""
    children: list[subprocess.Popen[bytes]] = []
    try:
        for number, device in enumerate(devices):
            environment = {**os.environ, DEVICES: device}
            children.append(subprocess.Popen([*command, "--pack", str(number)], env=environment))
        yield children
    finally:
        for child in children:
            child.terminate()
        end = time.monotonic() + GRACE_SECONDS
        for number, child in enumerate(children):
            try:
                child.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"pack {number} does not end within {GRACE_SECONDS:.0f} s: killed", flush=True)
                child.kill()
                child.wait()


OF_BASE = {
    "MODEL": "model",
    "DTYPE": "dtype",
    "LOAD_IN_4BIT": "load_in_4bit",
    "ATTN": "attn",
    "RECOMPUTE_GRANULARITY": "recompute",
    "CUDA_GRAPH": "cuda_graph",
    "TORCH_COMPILE": "torch_compile",
}
"""Variables that all trials of a pack have in common, and their names in ``Settings``."""
OF_SHARDS = ("THREADS", "FSDP", "FSDP_STRATEGY", "FSDP_WRAP", "FSDP_SHARDS", "FSDP_OFFLOAD")
"""Variables that say how the base lies over the packs."""
LEAST_GAIN = 1.05
"""Below this, two trials side by side are not worth their memory: a pack trains one after another."""


class JobPack(NamedTuple):
    """Pack ``rank`` of ``world`` that meet in ``folder``."""

    folder: Path
    rank: int
    world: int

    @property
    def store(self) -> Path:
        """Where they exchange their addresses."""
        return self.folder / "store"

    @property
    def base_knobs(self) -> dict[str, str]:
        """The variables of their base."""
        return {name: str(value) for name, value in (read_json(_knobs_in(self.folder)).content or {}).items()}


@contextlib.contextmanager
def meeting_place(pack: PackFolder, idle: float) -> Iterator[Path | None]:
    """A folder for the packs of this job where the first trial asks for one base; None where it asks for none.

    Waits at most ``idle`` seconds for that trial.
    """
    base = _shared_base(pack, idle)
    if base is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="packs-") as folder:
        write_json(_knobs_in(Path(folder)), base)
        yield Path(folder)


def _shared_base(pack: PackFolder, idle: float) -> dict[str, str] | None:
    end = time.monotonic() + idle
    while (request := next(pack.open_requests(), None)) is None:
        if time.monotonic() > end:
            return None
        time.sleep(PAUSE)
    return _base_of(request.knobs) if _sharded(request.knobs) else None


def _sharded(knobs: Mapping[str, str]) -> bool:
    try:
        return Knobs(knobs).switch("FSDP", default=False)
    except InputError:  # the pack that takes the trial says so
        return False


def _base_of(knobs: Mapping[str, str]) -> dict[str, str]:
    """Of a trial's knobs those of the base: another one's length or rate must not decide whether it can be loaded."""
    return {name: knobs[name] for name in (*OF_BASE, *OF_SHARDS) if name in knobs} | {"SEQ": "2"}


def _knobs_in(folder: Path) -> Path:
    return folder / "base.json"
