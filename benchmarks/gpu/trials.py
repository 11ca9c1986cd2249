"""Run trials one after another outside a sweep, each bounded in time, and read their logs.

For probes and calibration: a trial is a set of variables; its ranks are plain processes, which a warm worker serves
where ``LORA_TUNE_WORKER`` names one.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import RunLog

NEMO = "lora_tune_recipes.nemo_lora"
PORTS = range(10_000, 30_000)
"""Below those that a kernel gives out: a trial may wait for its worker for minutes before it listens."""
_count = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one trial gave. samples_per_second: median of the warm blocks. gib: largest allocator reading.

    failure: "" or the last error line. start_seconds: from the start of the processes to ``run_start``.
    """

    name: str
    seconds: float
    start_seconds: float | None
    samples_per_second: float | None
    eval_seconds: float | None
    gib: float | None
    evals: list[tuple[float, float, float]]
    failure: str

    def record(self) -> dict[str, Any]:
        return asdict(self)


def run_trial(
    name: str, variables: Mapping[str, object], *, ranks: int = 1, module: str = NEMO, limit: float, folder: Path
) -> Outcome:
    """Run one trial on ``ranks`` processes, for ``limit`` seconds at most. Its output stays in ``folder/name.log``."""
    # Its ranks are sessions of their own: whoever ends this program must not leave them on the GPUs.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name}.log"
    run_id = f"{name}-{os.getpid()}"
    common = {**os.environ, **{k: str(v) for k, v in variables.items()}}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_of_its_own()), "WORLD_SIZE": str(ranks)}
    common |= {"LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": run_id}
    began, epoch = time.monotonic(), time.time()
    processes = []
    with log.open("wb") as out:
        for rank in range(ranks):
            own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
            command = [sys.executable, "-m", module]
            processes.append(
                subprocess.Popen(command, env=own, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
            )
        ended = _wait(processes, limit)
    text = log.read_text(errors="replace")
    reader = MllogReader()
    reader.feed(text.encode())
    return _outcome(name, reader.run(), text, time.monotonic() - began, epoch, "" if ended else f"over {limit:g} s")


def port_of_its_own() -> int:
    """A port that no other trial of this program has, in whichever process of its pool it is started."""
    return PORTS[(os.getpid() * 31 + next(_count)) % len(PORTS)]


def _wait(processes: list[subprocess.Popen[bytes]], limit: float) -> bool:
    """Until all have ended; a failed rank takes the others along after 4 s, the limit takes all. Says which it was."""
    end = time.monotonic() + limit
    try:
        while any(p.poll() is None for p in processes) and time.monotonic() < end:
            if any(p.poll() for p in processes):
                end = min(end, time.monotonic() + 4)
            time.sleep(0.05)
    finally:
        alive = [p for p in processes if p.poll() is None]
        failed = any(p.poll() for p in processes)
        for process in alive:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return not alive or failed


def _outcome(name: str, run: RunLog, text: str, seconds: float, epoch: float, failure: str) -> Outcome:
    warm = sorted(run.stated_throughput[1:] or run.stated_throughput)
    evals = sorted(run.eval_seconds)
    peaks = [float(part.split("}")[0]) for part in text.split('"max_memory_usage": ')[1:]]
    if run.run_stop_ms is None and not failure:
        lines = [line for line in text.splitlines() if line.startswith(("nemo_lora:", "peft_lora:", "bridge_lora:"))]
        failure = (lines or text.splitlines()[-1:] or ["no output"])[-1][:400]
    return Outcome(
        name=name,
        seconds=round(seconds, 1),
        start_seconds=None if run.run_start_ms is None else round(run.run_start_ms / 1e3 - epoch, 1),
        samples_per_second=round(warm[len(warm) // 2], 4) if warm else None,
        eval_seconds=round(evals[len(evals) // 2], 2) if evals else None,
        gib=max(peaks, default=None),
        evals=[(e.samples, round(e.loss, 5), round(e.seconds, 2)) for e in run.evals],
        failure=failure,
    )
