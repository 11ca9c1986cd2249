"""The packs of one job: one process per GPU. They share the job's folder, and start and end together.

If a pack ends by itself it has failed, and its GPU would idle until the job ends: so the others are stopped, too. They
save their trials, which continue in the next job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

from lora_tune.base.errors import InputError
from lora_tune.launchers.pack_folder import PackFolder

DEVICES = "CUDA_VISIBLE_DEVICES"
PAUSE = 0.2
GRACE_SECONDS = 120.0
"""Time for stopped packs to finish a step or an evaluation, and to save their trials."""
TERMINATED = 143
"""Exit code of a job ended by SIGTERM."""


def run(command: Sequence[str], folder: PackFolder, packs: int, idle: float) -> int:
    """Run ``command --pack i`` for each of ``packs`` until no trial was requested for ``idle`` seconds.

    Returns the exit code of the job. Raises InputError if the job has fewer GPUs than packs.
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
    """Each pack's value of CUDA_VISIBLE_DEVICES. Raises InputError if there are too few GPUs.

    If the variable is unset, their numbers, which have no effect without a GPU.
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
    """A process for each device; at the end each is terminated, and killed if it does not exit."""
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
"""Variables that all trials of a pack share, and their names in ``Settings``."""
LEAST_GAIN = 1.05
"""Below this gain a pack trains one trial after another, because two side by side are not worth their memory."""
